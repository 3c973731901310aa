"""Cache the keys and values of the prefix that texts share, within and across batches.

Similar records share a system turn, a template or a soft prompt. The cache holds only one prefix at
a time.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from auditor.models.slot_cache import SlotLayer

LEAST = 16  # positions: a shorter beginning costs as much to copy as to read

# (texts (B, n [, d]), last positions, cache) -> logits, as a model's.
Read = Callable[[Tensor, int, Cache], Tensor]


class SharedPrefixCache:
    """A cache of the keys and values of the prefix that texts share.

    Texts are token ids (B, n), or embeddings (B, n, d) with a soft prompt.

    Args:
        read_texts: runs the model.
        layers: number of layers.
        version: returns an id of the weights; values cached with other weights are ignored.
        least: shortest prefix to cache, in positions.
    """

    def __init__(
        self, read_texts: Read, layers: int, version: Callable[[], object], least: int = LEAST
    ) -> None:
        self._read = read_texts
        self._count = layers
        self._version = version
        self._least = least
        self._held: tuple[Tensor, list[SlotLayer]] | None = None
        self._of: object = None  # the version of the cached beginning
        # First text of the last batch: comparing texts shows the beginning of a single text.
        self._last: Tensor | None = None

    @torch.no_grad()
    def get_prefix_layers(
        self, texts: Tensor, last: int, length: int
    ) -> tuple[int, list[SlotLayer]]:
        """Return the number of cached leading positions, and layers with their keys and values.

        At least the `last` trailing positions of each text stay uncached, and short prefixes are
        not cached. `length` is the capacity of the layers in positions.
        """
        if self._of != (version := self._version()):
            self._held = None
            self._of = version
        other_text = texts[0] if len(texts) > 1 else self._last
        self._last = texts[0].clone()
        n_cached = 0
        if self._held is not None:
            n_cached = shared_prefix_length(texts, self._held[0])
        n_common = 0
        if other_text is not None:
            n_common = shared_prefix_length(texts, other_text)
        count = min(max(n_cached, n_common), texts.shape[1] - last)
        if count < self._least:
            return 0, [SlotLayer(length) for _ in range(self._count)]
        if count > n_cached:
            self._read_prefix(texts[0], n_cached, count)
        assert self._held is not None
        slot = torch.zeros(len(texts), dtype=torch.long)
        return count, [
            layer.copy_first_positions_of_slots(slot, count, length) for layer in self._held[1]
        ]

    def _read_prefix(self, text: Tensor, n_cached: int, count: int) -> None:
        """Cache the first `count` positions of a text, of which `n_cached` are already cached."""
        layers = [SlotLayer(count) for _ in range(self._count)]
        if n_cached and self._held is not None:
            layers.clear()
            slot = torch.zeros(1, dtype=torch.long)
            for layer in self._held[1]:
                layers.append(layer.copy_first_positions_of_slots(slot, n_cached, count))
        self._held = None  # nothing is cached if reading fails
        self._read(text[None, n_cached:count], 1, Cache(layers=list(layers)))
        self._held = text[:count].clone(), layers


def shared_prefix_length(texts: Tensor, text: Tensor) -> int:
    """Return how many leading positions all `texts` (B, n [, d]) share with `text` (m [, d])."""
    if texts.shape[2:] != text.shape[1:] or texts.dtype != text.dtype:
        return 0
    size = min(texts.shape[1], len(text))
    same = texts[:, :size] == text[:size]
    while same.ndim > 2:
        same = same.all(-1)
    return int(same.all(0).long().cumprod(0).sum())  # cumprod is 0 from the first difference on
