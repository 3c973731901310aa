"""Where a text switches an activated LoRA on: PEFT looks for the invocation in the ids of one call only.

With a cache a call reads one token, in which there is no invocation, and with input embeddings no ids at all: the
adapter would be off. The tokens that it changes are worked out here from the whole text and handed to PEFT. Knows token
ids, no models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from auditor.core.nouns import Tokens

Offsets = list[int | None]  # of each text: how many of its last tokens the adapter changes; None: no invocation


class Activation:
    """What switches the active adapter of a model on. invocation: empty for a model without an activated LoRA."""

    def __init__(self, model: Any) -> None:
        config = getattr(model, "active_peft_config", None)
        self.invocation: Tokens = tuple(getattr(config, "alora_invocation_tokens", None) or ())
        self.offsets: Offsets | None = None  # of the texts that are being read

    def __bool__(self) -> bool:
        return bool(self.invocation)

    def offsets_of(self, texts: Tensor) -> Offsets | None:
        """Return how many last tokens of each text (B, n) the adapter changes; None without an activated LoRA."""
        if not self.invocation:
            return None
        return _count_changed_tokens(find_last_invocation_starts(texts, self.invocation)[:, -1], texts.shape[1])

    @contextmanager
    def reading_with(self, offsets: Offsets | None) -> Iterator[None]:
        """Hand these offsets to PEFT with every text that is read within."""
        self.offsets = offsets
        try:
            yield
        finally:
            self.offsets = None

    def read(self, texts: Tensor, last: int, read: Callable[[], Tensor]) -> Tensor:
        """Return what each of the last positions has with its own last invocation, (B, last, V).

        PEFT changes only what follows the last invocation of a whole text. A position before that invocation has
        another one, or none, so the texts are read again for it. texts: (B, n) token ids; read: reads them.
        """
        if not self.invocation:
            return read()

        def read_from(starts: Tensor) -> Tensor:
            with self.reading_with(_count_changed_tokens(starts, texts.shape[1])):
                return read()

        starts = find_last_invocation_starts(texts, self.invocation)[:, -last:]
        newest = starts[:, -1]
        distributions = read_from(newest)
        while bool((is_earlier := starts < newest.unsqueeze(-1)).any()):
            before = torch.where(is_earlier, starts, -1).amax(1)
            newest = torch.where(is_earlier.any(1), before, newest)
            distributions = torch.where(is_earlier.unsqueeze(-1), read_from(newest), distributions)
        return distributions


class ActivatedTexts:
    """The texts of decoding rows, for an activated LoRA. tokens: (rows, n); length: how many tokens may follow."""

    def __init__(self, activation: Activation, tokens: Tensor, length: int) -> None:
        self.activation, self.tokens, self.length = activation, tokens, length

    def advance(self, parents: Tensor, tokens: Tensor) -> bool:
        """Continue text parents[i] with tokens[i]; return whether an invocation has just ended in any text."""
        self.tokens = torch.cat([self.tokens[parents], tokens.unsqueeze(-1)], dim=1)
        self.length -= 1
        starts = find_last_invocation_starts(self.tokens, self.activation.invocation)
        return not torch.equal(starts[:, -1], starts[:, -2])

    def offsets_by_slot(self, slots: Tensor) -> Offsets | None:
        """Return the offsets of the texts in the order of their slots (rows,)."""
        return self.activation.offsets_of(self.tokens[slots.argsort()])


def find_last_invocation_starts(texts: Tensor, invocation: Tokens) -> Tensor:
    """Return where the last whole invocation starts that each position has read; -1 for none.

    texts: (B, n) token ids. Returns (B, n): position t knows its tokens 0..t.
    """
    size = len(invocation)
    starts = texts.new_full(texts.shape, -1)
    if texts.shape[1] >= size:
        tokens = torch.tensor(invocation, device=texts.device)
        is_invocation = (texts.unfold(1, size, 1) == tokens).all(-1)
        places = torch.arange(is_invocation.shape[1], device=texts.device)
        starts[:, size - 1 :] = torch.where(is_invocation, places, -1).cummax(1).values
    return starts


def _count_changed_tokens(starts: Tensor, length: int) -> Offsets:
    """Return PEFT's offsets of texts of `length` tokens whose invocations start at `starts` (B,)."""
    return [length - start if start >= 0 else None for start in starts.tolist()]
