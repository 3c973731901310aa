"""Define decoding rows of Hugging Face causal LMs, which cache keys and values."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from auditor.models.activation import ActivatedTexts, Offsets
from auditor.models.caches import NativeCache
from auditor.models.decoding import Decoding, compute_log_sum_exp
from auditor.models.rows import Rows
from auditor.models.slot_cache import PaddedCache, SlotLayer, TreeCache, assign_cache_slots

# As `HuggingFaceModel.compute_input_logits`.
Forward = Callable[[Tensor, int, Cache | NativeCache | None], Tensor]

# Measured on a CPU: the time to copy and read a byte of keys and values, over that to multiply a
# byte of weights by one row; twice as much, because slots fill in later steps.
_READING_COST = 48
_FEW = 8  # places without a row that never matter
_WIDEST = 3  # positions of a slot over those of its longest row, at most


class HuggingFaceRows(Rows):
    """Decoding rows of a Hugging Face causal LM.

    A row has `width` sequences: one for each ensemble part if `forward` computes several parts,
    otherwise one. The sequences are ordered by (row, part). If a row has several children, each
    child gets copies of all its sequences.

    Args:
        model: the `HuggingFaceModel`.
        prefixes: token ids (rows, n).
        length: largest number of tokens to append to a row.
        prompt: soft prompt (P, d) or None.
        width: number of sequences in a row.
        forward: computes logits like `HuggingFaceModel.compute_input_logits`; None for that method.
    """

    cache: Cache | NativeCache
    _logits: Tensor  # (rows, width, V)
    # (rows, width): the log of the sum of exp over the logits, once it is computed.
    _total: Tensor | None = None
    _offsets: Offsets | None = None  # of an activated LoRA, for the next sequences to read

    def __init__(
        self,
        model: Any,
        prefixes: Tensor,
        length: int,
        prompt: Tensor | None,
        width: int = 1,
        forward: Forward | None = None,
    ) -> None:
        self.model = model
        self.width = width
        self.forward = forward or model.compute_input_logits
        self._start(prefixes, length, prompt)

    @abstractmethod
    def _start(self, prefixes: Tensor, length: int, prompt: Tensor | None) -> None:
        """Read the prefixes (rows, n), with room for `length` more tokens."""

    def _compute_next_logits(self, input_ids: Tensor) -> Tensor:
        """Return next-token logits (sequences, width, V) after an input that continues the cache.

        `input_ids` is a result of `prepend_soft_prompt`.
        """
        self._total = None
        with self.model.activation.apply_offsets(self._offsets):
            logits = self.forward(input_ids.repeat_interleave(self.width, dim=0), 1, self.cache)
        return logits[:, 0].unflatten(0, (-1, self.width))

    def _sequence_indices(self, rows: Tensor) -> Tensor:
        """Return the indices of all sequences in these rows, of shape (rows x width,)."""
        return (
            rows.unsqueeze(-1) * self.width + torch.arange(self.width, device=rows.device)
        ).flatten()

    def __len__(self) -> int:
        return len(self._logits)

    def log_probs(self) -> Tensor:
        """Return next-token log-probabilities, (rows, V); for an ensemble, (rows, parts, V)."""
        if self._total is None or self._total.any():
            # Log-probabilities are logits whose total is 0: they replace the logits.
            self._logits = torch.log_softmax(self._logits, dim=-1)
            self._total = self._logits.new_zeros(self._logits.shape[:-1])
        if self.width > 1:
            return self._logits
        return self._logits[:, 0]

    def draw(
        self, row_of_draw: Tensor, uniforms: Tensor, decoding: Decoding
    ) -> tuple[Tensor, Tensor]:
        assert self.width == 1  # a defense with several parts draws tokens itself
        return decoding.draw(
            self._logits[:, 0],
            self._logit_indices(row_of_draw),
            uniforms[:, 0],
            self._log_normalisers()[:, 0],
        )

    def token_log_probs(self, row_of_token: Tensor, tokens: Tensor) -> Tensor:
        assert self.width == 1
        places = self._logit_indices(row_of_token)
        return self._logits[places, 0, tokens] - self._log_normalisers()[places, 0]

    def _logit_indices(self, rows: Tensor) -> Tensor:
        """Return the indices of these rows in the logits tensor."""
        return rows

    def _log_normalisers(self) -> Tensor:
        if self._total is None:
            self._total = compute_log_sum_exp(self._logits.flatten(0, 1)).view(
                self._logits.shape[:-1]
            )
        return self._total


class SlotRows(HuggingFaceRows):
    """Decoding rows that cache keys and values in `SlotLayer`s.

    If the model allows it, all rows after a prefix share a slot, in a `TreeCache`, as long as this
    is faster. From then on, each sequence has its own slot.

    The logits are in slot order, because sorting them by row would copy all of them.

    Attributes:
        entries: index of each row in the logits, (rows,).
        remaining: largest number of tokens still to append to a row.
    """

    def _start(self, prefixes: Tensor, length: int, prompt: Tensor | None) -> None:
        total = prefixes.shape[1] + length + (0 if prompt is None else len(prompt))
        self.slots = torch.arange(len(prefixes), device=self.model.device)
        self.entries = self.slots
        self.remaining = length
        self.texts = ActivatedTexts(self.model.activation, prefixes, length)
        self.prompt = prompt
        self._offsets = self.model.activation.compute_offsets(prefixes)
        # Not `is`: each access creates a new bound method.
        is_plain_forward = self.forward == self.model.compute_input_logits
        seen = self.model.seen
        if is_plain_forward and prompt is None and seen is not None:
            before = seen.find_cached_prefix(prefixes, total)
            if before is not None:
                logits, self.layers = before
                self.cache, self._logits = self._make_cache(total - length), logits.unsqueeze(1)
                return
        model_input = self.model.prepend_soft_prompt(prefixes, prompt)
        n_cached, self.layers = self.model.copy_shared_prefix_layers(
            model_input, 1, total, is_plain_forward
        )
        self.cache = self._make_cache(total - length)
        self._logits = self._compute_next_logits(model_input[:, n_cached:])

    def _make_cache(self, n_positions: int) -> Cache:
        """Return a cache of prefixes of `n_positions` tokens, whose layers are `self.layers`."""
        if self.model.can_share_slots:
            shape = len(self.slots), n_positions
            paths = torch.ones(shape, dtype=torch.bool, device=self.slots.device)
            return TreeCache(self.layers, paths, self.width)
        return Cache(layers=list(self.layers))

    def __len__(self) -> int:
        return len(self.entries)

    def log_probs(self) -> Tensor:
        distribution = super().log_probs()
        all_entries = torch.arange(len(distribution), device=self.entries.device)
        if torch.equal(self.entries, all_entries):
            return distribution
        return distribution[self.entries]

    def _logit_indices(self, rows: Tensor) -> Tensor:
        return self.entries[rows]

    def joined(self, others: Sequence[Rows]) -> Rows:
        """Join rows of different lengths, aligned so that all sequences end at the same position.

        A mask hides the empty positions before shorter sequences.
        """
        parts = [self]
        for rows in others:
            # All rows belong to one model, which serves them in one way.
            assert isinstance(rows, SlotRows)
            parts.append(rows)
        filled = [rows.layers[0].filled for rows in parts]
        remaining = max(rows.remaining for rows in parts)
        new = copy.copy(self)  # shallow: everything with keys, values or logits is replaced below
        new.layers = []
        for layers in zip(*(rows.layers for rows in parts), strict=True):
            slots = [(layer, slice(None), layer.filled) for layer in layers]
            new.layers.append(SlotLayer.assemble(slots, max(filled) + remaining))
        empty = []
        for rows, n_filled in zip(parts, filled, strict=True):
            empty.append(torch.full_like(rows.slots, max(filled) - n_filled))
        new.cache = PaddedCache(new.layers, torch.cat(empty))
        new.slots = torch.arange(len(new.cache.empty), device=self.model.device)
        new.entries = new.slots
        new.remaining = remaining
        if isinstance(self.cache, TreeCache):
            positions = torch.arange(max(filled), device=self.model.device)
            paths = positions >= new.cache.empty.unsqueeze(-1)
            new.cache = TreeCache(new.layers, paths, self.width)
        new._logits = torch.cat([rows._logits for rows in parts])
        new._total = None
        return new

    @torch.no_grad()
    def advance(self, parents: Tensor, tokens: Tensor) -> None:
        if self.model.activation and self.texts.advance(parents, tokens):
            # An invocation has just ended: its tokens were read without the adapter.
            self._start(self.texts.tokens, self.texts.length, self.prompt)
            return
        self.remaining -= 1
        if isinstance(self.cache, TreeCache):
            if self._is_tree_faster(self.cache, parents):
                self._grow_trees(self.cache, parents, tokens)
            else:
                self._separate_rows(self.cache, parents, tokens)
            return
        slots, source, destination = assign_cache_slots(parents, self.slots)
        if len(source):
            source = self._sequence_indices(source)
            destination = self._sequence_indices(destination)
            for layer in self.layers:
                layer.copy_slots(source, destination, len(slots) * self.width)
        if isinstance(self.cache, PaddedCache):
            # Read before `self.slots` changes: these are the parents' slots.
            empty = self.cache.empty[self.slots[parents]]
            self.cache.empty = torch.empty_like(empty)
            self.cache.empty[slots] = empty
        self.slots = self.entries = slots
        if self.model.activation:
            self._offsets = self.texts.compute_slot_offsets(slots)
        in_slots = torch.empty_like(tokens)
        in_slots[slots] = tokens
        self._logits = self._compute_next_logits(in_slots.unsqueeze(-1))

    def _compute_next_logits(self, input_ids: Tensor, last: int = 1) -> Tensor:
        if not isinstance(self.cache, TreeCache):
            return super()._compute_next_logits(input_ids)
        self._total = None
        # One block of slots for each part: then no layer of an ensemble reorders its input.
        blocks = input_ids.repeat(self.width, *(1,) * (input_ids.ndim - 1))
        logits = self.forward(blocks, last, self.cache)
        return logits.unflatten(0, (self.width, -1)).flatten(1, 2).transpose(0, 1)

    def _is_tree_faster(self, cache: TreeCache, parents: Tensor) -> bool:
        """Return whether children of these rows are read faster in shared slots than in their own.

        Shared slots save copies and reads of keys and values. But each slot has as many places as
        the fullest one, and a row attends to all positions of its slot before a mask hides some.
        """
        counts = cache.count_children(parents)
        n_places = len(counts) * int(counts.max())
        longest = int(cache.paths.sum(-1).max())
        keys = self.layers[0].keys
        assert keys is not None
        n_bytes = 2 * len(self.layers) * longest * keys[0, :, 0].nbytes
        weight_bytes = sum(weight.nbytes for weight in self.model.model.parameters())
        most = (1 + _READING_COST * n_bytes / weight_bytes) * len(parents) + _FEW
        is_narrow = self.layers[0].filled + int(counts.max()) <= _WIDEST * longest
        return is_narrow and n_places <= most and bool(counts.all())

    def _grow_trees(self, cache: TreeCache, parents: Tensor, tokens: Tensor) -> None:
        """Extend the rows within their slots."""
        width, self.entries = cache.add_children(parents, self.model.model.dtype)
        filled = self.layers[0].filled
        if filled + width > self.layers[0].length:
            for layer in self.layers:
                layer.make_room(filled + width * (self.remaining + 1))
        in_places = tokens.new_zeros(len(self.slots) * width)
        in_places[self.entries] = tokens
        self._logits = self._compute_next_logits(in_places.view(-1, width), width)

    def _separate_rows(self, cache: TreeCache, parents: Tensor, tokens: Tensor) -> None:
        """Extend the rows, each in a slot of its own from now on."""
        paths = cache.paths[parents]
        lengths = paths.sum(-1)
        longest = int(lengths.max())
        # A stable sort puts unread positions first, then the path in order.
        positions = paths.to(torch.uint8).argsort(dim=-1, stable=True)[:, -longest:]
        blocks = torch.arange(self.width, device=parents.device) * len(self.slots)
        sequences = (cache.slots[parents].unsqueeze(-1) + blocks).flatten()
        positions = positions.repeat_interleave(self.width, dim=0)
        self.layers = [
            layer.select_positions(sequences, positions, longest + self.remaining + 1)
            for layer in self.layers
        ]
        self.cache = Cache(layers=list(self.layers))
        if int(lengths.min()) < longest:
            self.cache = PaddedCache(self.layers, longest - lengths)
        self.slots = self.entries = torch.arange(len(parents), device=parents.device)
        self._logits = self._compute_next_logits(tokens.unsqueeze(-1))


class CachedRows(HuggingFaceRows):
    """Decoding rows that use the model's own cache.

    If a row has several children, each child gets a copy of everything cached for the row.
    """

    cache: NativeCache

    def _start(self, prefixes: Tensor, length: int, prompt: Tensor | None) -> None:
        self.cache = NativeCache()
        self._logits = self._compute_next_logits(self.model.prepend_soft_prompt(prefixes, prompt))

    @torch.no_grad()
    def advance(self, parents: Tensor, tokens: Tensor) -> None:
        if not torch.equal(parents, torch.arange(len(self), device=parents.device)):
            self.cache.select(self._sequence_indices(parents), self.model.cache_batch_dimensions)
        self._logits = self._compute_next_logits(tokens.unsqueeze(-1))
