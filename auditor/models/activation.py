"""Find the tokens of a text that an activated LoRA changes.

PEFT looks for the invocation only among the token ids of the current call. A call with a cache has
only one token, and a call with input embeddings has no ids, so PEFT would leave the adapter off.
This module finds the tokens in the whole text and passes their positions to PEFT.
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
    """The tokens in a text that switch a model's activated LoRA on (its invocation).

    `invocation` holds their token ids, and is empty if the model has no activated LoRA. `offsets`
    holds, for each text of the current call, how many trailing tokens the adapter changes.
    """

    def __init__(self, model: Any) -> None:
        config = getattr(model, "active_peft_config", None)
        self.invocation: Tokens = tuple(getattr(config, "alora_invocation_tokens", None) or ())
        self.offsets: Offsets | None = None  # of the texts in the current call

    def __bool__(self) -> bool:
        return bool(self.invocation)

    def compute_offsets(self, texts: Tensor) -> Offsets | None:
        """Return, for each of the texts (B, n), how many trailing tokens the adapter changes.

        The number is None for a text without an invocation. Return None instead of a list if the
        model has no activated LoRA.
        """
        if not self.invocation:
            return None
        starts = find_last_invocation_starts(texts, self.invocation)
        return _count_changed_tokens(starts[:, -1], texts.shape[1])

    @contextmanager
    def apply_offsets(self, offsets: Offsets | None) -> Iterator[None]:
        """Pass these offsets to PEFT for every text that is read in the block."""
        self.offsets = offsets
        try:
            yield
        finally:
            self.offsets = None

    def read(self, texts: Tensor, last: int, read_texts: Callable[[], Tensor]) -> Tensor:
        """Return next-token distributions at the last positions of texts, of shape (B, last, V).

        The distribution at a position depends on the last invocation before it (the tokens that
        switch the adapter on). One forward pass can use only one invocation per text, so a text
        with several invocations is read several times.

        Args:
            texts: token ids (B, n).
            last: number of trailing positions.
            read_texts: runs one forward pass and returns its distributions.
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
    """Texts that a model with an activated LoRA continues token by token.

    `tokens` are the ids of the texts (rows, n), and `length` is the largest number of tokens that
    may be appended.
    """

    def __init__(self, activation: Activation, tokens: Tensor, length: int) -> None:
        self.activation = activation
        self.tokens = tokens
        self.length = length

    def advance(self, parents: Tensor, tokens: Tensor) -> bool:
        """Append tokens[i] to text parents[i]; the result is the new text i.

        Return whether any of the tokens completes an invocation.
        """
        self.tokens = torch.cat([self.tokens[parents], tokens.unsqueeze(-1)], dim=1)
        self.length -= 1
        starts = find_last_invocation_starts(self.tokens, self.activation.invocation)
        return not torch.equal(starts[:, -1], starts[:, -2])

    def compute_slot_offsets(self, slots: Tensor) -> Offsets | None:
        """Return `Activation.compute_offsets` of the texts, ordered by cache slot.

        `slots` (rows,) is the cache slot of each text.
        """
        return self.activation.compute_offsets(self.tokens[slots.argsort()])


def find_last_invocation_starts(texts: Tensor, invocation: Tokens) -> Tensor:
    """Return the start of the last complete invocation up to each position, (B, n).

    The start is -1 if there is no complete invocation. `texts` are token ids (B, n).
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
    """Return how many trailing tokens of each text the adapter changes.

    The result is None for a text without an invocation.

    `starts` (B,) is the start of the invocation in each text, or -1 if there is none. `length` is
    the number of tokens in each text.
    """
    return [length - start if start >= 0 else None for start in starts.tolist()]
