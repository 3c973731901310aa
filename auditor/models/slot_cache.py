"""A preallocated cache whose rows are slots that may be left and taken."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


class SlotLayer(CacheLayerMixin):
    """Keys and values of one layer, preallocated for `length` positions; a row lives in a slot.

    DynamicCache concatenates the whole cache at every token and StaticLayer fixes the batch: here a
    token is written in place and rows may split.
    """

    is_sliding = False
    supports_early_init = False

    def __init__(self, length: int, filled: int = 0) -> None:
        super().__init__()
        self.length, self.filled, self.is_initialized = length, filled, filled > 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys = self._allocate_slots(key_states, len(key_states))
        self.values = self._allocate_slots(value_states, len(value_states))
        self.is_initialized = True

    def _allocate_slots(self, like: Tensor, count: int) -> Tensor:
        # Not cleared: `update` gives out no position that was not written.
        return like.new_empty(count, like.shape[1], self.length, like.shape[3])

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        # `assign_slots` keeps them dense: rows that live are the first slots, in this order.
        rows, end = len(key_states), self.filled + key_states.shape[2]
        self.keys[:rows, :, self.filled : end] = key_states
        self.values[:rows, :, self.filled : end] = value_states
        self.filled = end
        return self.keys[:rows, :, :end], self.values[:rows, :, :end]

    def copy_slots(self, source: Tensor, destination: Tensor, slots: int) -> None:
        """Copies slots, growing to `slots` of them (by doubling, so that growth is paid for
        rarely)."""
        assert self.keys is not None and self.values is not None
        # this layer's own
        source, destination = (
            source.to(self.keys.device),
            destination.to(self.keys.device),
        )
        first, last = int(destination[0]), int(destination[-1])
        # As where no row ends: the extra children follow all rows. `assign_slots` gives
        # destinations by rising slot.
        beside = last - first + 1 == len(source) and int(source.max()) < first
        for name in ("keys", "values"):
            held = getattr(self, name)
            if slots > len(held):
                grown = self._allocate_slots(held, max(slots, 2 * len(held)))
                grown[: len(held), :, : self.filled] = held[:, :, : self.filled]
                setattr(self, name, grown)
                held = grown
            # whole slots, straight to where they go: several times as fast as any index on the left
            if beside:
                torch.index_select(held[:first], 0, source, out=held[first : first + len(source)])
            else:
                held[destination, :, : self.filled] = held[source, :, : self.filled]

    def copy_first_positions_of_slots(self, slots: Tensor, filled: int, length: int) -> SlotLayer:
        """A layer of `length` positions: the first `filled` ones of these slots, which may be
        none."""
        new = SlotLayer(length, filled)
        for name in ("keys", "values") if filled else ():
            held = getattr(self, name)
            own = new._allocate_slots(held, len(slots))
            own[:, :, :filled] = held[slots.to(held.device), :, :filled]
            setattr(new, name, own)
        return new

    def put_rows_into_slots(
        self, layer: SlotLayer, rows: Tensor, slots: Tensor, capacity: int
    ) -> None:
        """Takes rows of another layer into slots of this one, which grows to `capacity` of them."""
        assert layer.keys is not None and layer.values is not None
        rows, slots = rows.to(layer.keys.device), slots.to(layer.keys.device)
        for name in ("keys", "values"):
            held, theirs = getattr(self, name), getattr(layer, name)
            if held is None or len(held) < capacity:
                grown = self._allocate_slots(theirs, capacity)
                if held is not None:
                    grown[: len(held)] = held
                setattr(self, name, grown)
                held = grown
            held[slots, :, : layer.filled] = theirs[rows, :, : layer.filled]

    @classmethod
    def join_layers(cls, layers: Sequence[SlotLayer], more: int) -> SlotLayer:
        """The slots of these layers one behind the other, what each holds moved to one end; `more`
        positions follow."""
        filled = max(layer.filled for layer in layers)
        new = cls(filled + more, filled)
        for name in ("keys", "values"):
            held = [getattr(layer, name) for layer in layers]
            own = held[0].new_zeros(
                sum(map(len, held)), held[0].shape[1], new.length, held[0].shape[3]
            )
            setattr(new, name, own)  # zeros where a row holds nothing: masked, but never a NaN
            start = 0
            for layer, theirs in zip(layers, held, strict=True):
                own[start : start + len(theirs), :, filled - layer.filled : filled] = theirs[
                    :, :, : layer.filled
                ]
                start += len(theirs)
        return new

    @classmethod
    def gather_slots(
        cls, rows: Sequence[tuple[SlotLayer, int]], filled: int, length: int
    ) -> SlotLayer:
        """A layer of `length` positions: the first `filled` ones of a slot of each of these
        layers."""
        new = cls(length, filled)
        for name in ("keys", "values"):
            own = new._allocate_slots(getattr(rows[0][0], name), len(rows))
            for place, (layer, slot) in zip(own, rows, strict=True):
                place[:, :filled] = getattr(layer, name)[slot, :, :filled]
            setattr(new, name, own)
        return new

    @property
    def nbytes(self) -> int:
        return sum(held.nbytes for held in (self.keys, self.values) if held is not None)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.filled + query_length, 0

    def get_seq_length(self) -> int:
        return self.filled

    def get_max_length(self) -> int:
        return self.length


class PaddedCache(Cache):
    """Slots whose first positions hold nothing, so that all end at one position. empty: (slots,)
    how many those are."""

    def __init__(self, layers: Sequence[SlotLayer], empty: Tensor) -> None:
        super().__init__(layers=list(layers))
        self.empty = empty

    def mask_and_positions(self, length: int) -> dict[str, Tensor]:
        """A model's arguments for `length` more tokens: the mask that leaves out empty positions,
        and position ids."""
        end = self.get_seq_length() + length
        positions = torch.arange(end, device=self.empty.device) - self.empty.unsqueeze(-1)
        return {"attention_mask": (positions >= 0).long(), "position_ids": positions[:, -length:]}


def assign_slots(parents: Tensor, slots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Where children live: a parent's first child stays in its parent's slot, only extra children
    are copied.

    parents: (children,) row of each child; slots: (rows,) slot of each row. Slots stay dense,
    0..children-1.
    Returns (slot of each child, copied-from slots, copied-to slots).
    """
    count = len(parents)
    old = slots[parents]
    position = torch.arange(count, device=parents.device)
    first = torch.full((int(slots.max()) + 1,), count, device=parents.device)
    first.scatter_reduce_(0, old, position, "amin")
    # a slot beyond the number of children moves down: dense
    stays = (first[old] == position) & (old < count)
    taken = torch.zeros(count, dtype=torch.bool, device=parents.device)
    taken[old[stays]] = True
    new = old.clone()
    new[~stays] = (~taken).nonzero().squeeze(-1)
    return new, old[~stays], new[~stays]
