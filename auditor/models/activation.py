"""Find where a text switches an activated LoRA on: PEFT searches only the ids of one call.

With a cache, a call reads one token, which contains no invocation, and with input embeddings it
reads no ids at all: the adapter would be off. This module computes the tokens that the adapter
changes from the whole text and passes them to PEFT. It handles token ids, not models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from auditor.core.nouns import Tokens

# For each text, how many of its last tokens the adapter changes; None: no invocation.
Offsets = list[int | None]


class Activation:
    """The invocation that switches the active adapter of a model on.

    invocation: empty for a model without an activated LoRA.
    """

    def __init__(self, model: Any) -> None:
        config = getattr(model, "active_peft_config", None)
        self.invocation: Tokens = tuple(getattr(config, "alora_invocation_tokens", None) or ())
        self.offsets: Offsets | None = None  # of the texts in the current call

    def __bool__(self) -> bool:
        return bool(self.invocation)

    def compute_offsets(self, texts: Tensor) -> Offsets | None:
        """Return how many last tokens of each text (B, n) the adapter changes.

        Returns None without an activated LoRA.
        """
        if not self.invocation:
            return None
        starts = find_last_invocation_starts(texts, self.invocation)
        return _count_changed_tokens(starts[:, -1], texts.shape[1])

    @contextmanager
    def apply_offsets(self, offsets: Offsets | None) -> Iterator[None]:
        """Pass these offsets to PEFT with every text read in this context."""
        self.offsets = offsets
        try:
            yield
        finally:
            self.offsets = None

    def read(self, texts: Tensor, last: int, read_texts: Callable[[], Tensor]) -> Tensor:
        """Return the distribution of each of the last positions after its own last invocation.

        PEFT changes only the tokens after the last invocation of a whole text. A position before
        that invocation has an earlier invocation, or none, so the texts are read again for it.

        Args:
            texts: (B, n) token ids.
            read_texts: reads the texts.

        Returns:
            Distributions, (B, last, V).
        """
        if not self.invocation:
            return read_texts()

        def read_from(starts: Tensor) -> Tensor:
            with self.apply_offsets(_count_changed_tokens(starts, texts.shape[1])):
                return read_texts()

        starts = find_last_invocation_starts(texts, self.invocation)[:, -last:]
        newest = starts[:, -1]
        distributions = read_from(newest)
        while bool((is_earlier := starts < newest.unsqueeze(-1)).any()):
            before = torch.where(is_earlier, starts, -1).amax(1)
            newest = torch.where(is_earlier.any(1), before, newest)
            distributions = torch.where(is_earlier.unsqueeze(-1), read_from(newest), distributions)
        return distributions


class ActivatedTexts:
    """The texts of decoding rows, for an activated LoRA.

    tokens: (rows, n); length: how many tokens may follow.
    """

    def __init__(self, activation: Activation, tokens: Tensor, length: int) -> None:
        self.activation = activation
        self.tokens = tokens
        self.length = length

    def advance(self, parents: Tensor, tokens: Tensor) -> bool:
        """Continue text parents[i] with tokens[i]; return whether an invocation just ended."""
        self.tokens = torch.cat([self.tokens[parents], tokens.unsqueeze(-1)], dim=1)
        self.length -= 1
        starts = find_last_invocation_starts(self.tokens, self.activation.invocation)
        return not torch.equal(starts[:, -1], starts[:, -2])

    def compute_slot_offsets(self, slots: Tensor) -> Offsets | None:
        """Return the offsets of the texts in the order of their slots (rows,)."""
        return self.activation.compute_offsets(self.tokens[slots.argsort()])


def find_last_invocation_starts(texts: Tensor, invocation: Tokens) -> Tensor:
    """Return the start of the last whole invocation in tokens 0..t of each position t, (B, n).

    -1 means none. texts: (B, n) token ids.
    """
    size = len(invocation)
    starts = texts.new_full(texts.shape, -1)
    if texts.shape[1] >= size:
        tokens = torch.tensor(invocation, device=texts.device)
        is_invocation = (texts.unfold(1, size, 1) == tokens).all(-1)
        positions = torch.arange(is_invocation.shape[1], device=texts.device)
        starts[:, size - 1 :] = torch.where(is_invocation, positions, -1).cummax(1).values
    return starts


def _count_changed_tokens(starts: Tensor, length: int) -> Offsets:
    """Return PEFT's offsets for texts of `length` tokens with invocations at `starts` (B,)."""
    return [length - start if start >= 0 else None for start in starts.tolist()]
