"""What texts begin with, read once: its keys and values, for the rows of a batch and for the
batches after it.

Records of one kind share a system turn, a template, a soft prompt. Holds one beginning at a time.
Knows no model.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from auditor.models.slot_cache import SlotLayer

LEAST = 16  # positions: fewer cost as much to be put in front of rows as to be read with them

# (texts (B, n [, d]), last positions, cache) -> logits, as a model's own
Read = Callable[[Tensor, int, Cache], Tensor]


class SharedPrefixCache:
    """Texts are token ids (B, n), or embeddings (B, n, d) behind a soft prompt.

    read: what reads them; layers: of the model; version: of its weights, what was read with others
    is not used;
    least: positions that a beginning has.
    """

    def __init__(
        self, read: Read, layers: int, version: Callable[[], object], least: int = LEAST
    ) -> None:
        self._read, self._count, self._version, self._least = read, layers, version, least
        self._held: tuple[Tensor, list[SlotLayer]] | None = None
        self._of: object = None  # the version of what is held
        # the first text of the last batch: what one text begins with, others tell
        self._last: Tensor | None = None

    @torch.no_grad()
    def layers_holding_prefix(
        self, texts: Tensor, last: int, length: int
    ) -> tuple[int, list[SlotLayer]]:
        """How many first positions of these texts are read already, and layers of `length`
        positions that hold them.

        The `last` positions at least are left to be read; all are, where the texts share too
        little.
        """
        if self._of != (version := self._version()):
            self._held, self._of = None, version
        beside = texts[0] if len(texts) > 1 else self._last
        self._last = texts[0].clone()
        held = 0 if self._held is None else shared_prefix_length(texts, self._held[0])
        count = min(
            max(held, 0 if beside is None else shared_prefix_length(texts, beside)),
            texts.shape[1] - last,
        )
        if count < self._least:
            return 0, [SlotLayer(length) for _ in range(self._count)]
        if count > held:
            self._read_and_hold_prefix(texts[0], held, count)
        assert self._held is not None
        slot = torch.zeros(len(texts), dtype=torch.long)
        return count, [
            layer.copy_first_positions_of_slots(slot, count, length) for layer in self._held[1]
        ]

    def _read_and_hold_prefix(self, text: Tensor, held: int, count: int) -> None:
        """Reads the first `count` positions of a text, of which the first `held` are there."""
        layers = [SlotLayer(count) for _ in range(self._count)]
        if held and self._held is not None:
            layers = [
                layer.copy_first_positions_of_slots(torch.zeros(1, dtype=torch.long), held, count)
                for layer in self._held[1]
            ]
        self._held = None  # where reading fails nothing is held
        self._read(text[None, held:count], 1, Cache(layers=list(layers)))
        self._held = text[:count].clone(), layers


def shared_prefix_length(texts: Tensor, text: Tensor) -> int:
    """How many of their first positions all texts (B, n [, d]) have in common with one (m [,
    d])."""
    if texts.shape[2:] != text.shape[1:] or texts.dtype != text.dtype:
        return 0
    size = min(texts.shape[1], len(text))
    same = texts[:, :size] == text[:size]
    while same.ndim > 2:
        same = same.all(-1)
    return int(same.all(0).long().cumprod(0).sum())  # cumprod is 0 from the first difference on
