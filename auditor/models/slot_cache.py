"""Store the keys and values of decoding rows in preallocated, reusable slots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


class SlotLayer(CacheLayerMixin):
    """Keys and values of one layer, with one slot per sequence and room for `length` positions.

    Tokens are written in place, and a slot is copied only if its sequence continues in several
    ways. In comparison, transformers' DynamicCache copies the whole cache at every token, and its
    StaticLayer has a fixed batch.
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
        # Not cleared: `update` returns only positions that were written.
        return like.new_empty(count, like.shape[1], self.length, like.shape[3])

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        # `assign_cache_slots` keeps slots dense: live rows are the first slots, in this order.
        rows = len(key_states)
        end = self.filled + key_states.shape[2]
        self.keys[:rows, :, self.filled : end] = key_states
        self.values[:rows, :, self.filled : end] = value_states
        self.filled = end
        return self.keys[:rows, :, :end], self.values[:rows, :, :end]

    def copy_slots(self, source: Tensor, destination: Tensor, slots: int) -> None:
        """Copy the slots `source` to the slots `destination`.

        `slots` is the number of slots needed afterwards. If the layer has fewer, it grows to at
        least twice its size.
        """
        assert self.keys is not None and self.values is not None
        # The device of this layer.
        source = source.to(self.keys.device)
        destination = destination.to(self.keys.device)
        first = int(destination[0])
        last = int(destination[-1])
        # If no row ends, the extra children follow all rows: `assign_cache_slots` returns ascending
        # destinations.
        is_contiguous = last - first + 1 == len(source) and int(source.max()) < first
        for name in ("keys", "values"):
            buffer = getattr(self, name)
            if slots > len(buffer):
                grown = self._allocate_slots(buffer, max(slots, 2 * len(buffer)))
                grown[: len(buffer), :, : self.filled] = buffer[:, :, : self.filled]
                setattr(self, name, grown)
                buffer = grown
            # Whole slots directly to their destination: several times as fast as an index on the
            # left.
            if is_contiguous:
                torch.index_select(
                    buffer[:first], 0, source, out=buffer[first : first + len(source)]
                )
            else:
                buffer[destination, :, : self.filled] = buffer[source, :, : self.filled]

    def copy_first_positions_of_slots(self, slots: Tensor, filled: int, length: int) -> SlotLayer:
        """Return a new layer with the first `filled` positions of these slots.

        `length` is the new layer's capacity in positions.
        """
        if self.keys is not None:
            slots = slots.to(self.keys.device)
        return SlotLayer.assemble([(self, slots, filled)], length)

    def put_rows_into_slots(
        self, layer: SlotLayer, rows: Tensor, slots: Tensor, capacity: int
    ) -> None:
        """Copy the batch rows `rows` of another layer into `slots` of this layer.

        This layer grows to `capacity` slots.
        """
        assert layer.keys is not None and layer.values is not None
        rows = rows.to(layer.keys.device)
        slots = slots.to(layer.keys.device)
        for name in ("keys", "values"):
            buffer = getattr(self, name)
            source = getattr(layer, name)
            if buffer is None or len(buffer) < capacity:
                grown = self._allocate_slots(source, capacity)
                if buffer is not None:
                    grown[: len(buffer)] = buffer
                setattr(self, name, grown)
                buffer = grown
            buffer[slots, :, : layer.filled] = source[rows, :, : layer.filled]

    def make_room(self, length: int) -> None:
        """Grow the capacity of all slots to `length` positions."""
        self.length = length
        for name in ("keys", "values"):
            buffer = getattr(self, name)
            grown = self._allocate_slots(buffer, len(buffer))
            grown[:, :, : self.filled] = buffer[:, :, : self.filled]
            setattr(self, name, grown)

    def select_positions(self, slots: Tensor, positions: Tensor, length: int) -> SlotLayer:
        """Return a new layer, whose slot i has the positions `positions[i]` of slot slots[i].

        Args:
            slots: (new slots,).
            positions: (new slots, n).
            length: capacity of the new layer in positions.
        """
        new = SlotLayer(length, positions.shape[1])
        for name in ("keys", "values"):
            source = getattr(self, name)
            buffer = new._allocate_slots(source, len(slots))
            states = source[slots.unsqueeze(-1), :, positions]  # (new slots, n, heads, d)
            buffer[:, :, : new.filled] = states.transpose(1, 2)
            setattr(new, name, buffer)
        return new

    @classmethod
    def assemble(
        cls, parts: Sequence[tuple[SlotLayer, Tensor | slice, int]], length: int
    ) -> SlotLayer:
        """Return a layer made of slots of other layers, aligned to end at the same position.

        Args:
            parts: layers, with their slots to copy and the number of leading positions to copy.
            length: capacity of the new layer in positions.
        """
        filled = max(n_positions for *_, n_positions in parts)
        new = cls(length, filled)
        for name in ("keys", "values") if filled else ():
            sources = []
            for layer, slots, n_positions in parts:
                sources.append(getattr(layer, name)[slots, :, :n_positions])
            buffer = new._allocate_slots(sources[0], sum(map(len, sources)))
            setattr(new, name, buffer)
            start = 0
            for source in sources:
                n_empty = filled - source.shape[2]
                target = buffer[start : start + len(source)]
                target[:, :, n_empty:filled] = source
                if n_empty:
                    target[:, :, :n_empty] = 0  # masked, but never a NaN
                start += len(source)
        return new

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in (self.keys, self.values) if buffer is not None)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.filled + query_length, 0

    def get_seq_length(self) -> int:
        return self.filled

    def get_max_length(self) -> int:
        return self.length


class PaddedCache(Cache):
    """A cache in which all slots end at the same position.

    `empty` (slots,) is the number of unused positions at the start of each slot.
    """

    def __init__(self, layers: Sequence[SlotLayer], empty: Tensor) -> None:
        super().__init__(layers=list(layers))
        self.empty = empty

    def mask_and_positions(self, length: int) -> dict[str, Tensor]:
        """Return the model arguments for `length` more tokens: attention mask, position ids."""
        end = self.get_seq_length() + length
        positions = torch.arange(end, device=self.empty.device) - self.empty.unsqueeze(-1)
        return {"attention_mask": (positions >= 0).long(), "position_ids": positions[:, -length:]}


class TreeCache(Cache):
    """A cache in which all rows after a prefix share a slot, so no keys and values are copied.

    At each step, every slot gets one position for each of its places, and a row has one place in
    its slot. A row attends only to its path, the positions from the prefix to its last token.

    Attributes:
        paths: whether a position of the slot is on the row's path, (rows, positions).
        slots: slot of each row, (rows,).
    """

    def __init__(self, layers: Sequence[SlotLayer], paths: Tensor, parts: int) -> None:
        super().__init__(layers=list(layers))
        self.paths = paths
        self.slots = torch.arange(len(paths), device=paths.device)
        # Sequences in a slot: one for each part of an ensemble, in blocks.
        self._parts = parts
        self._n_slots = len(paths)
        self._arguments: dict[str, Tensor] = {}

    @property
    def n_sequences(self) -> int:
        """Number of rows, times the parts of the ensemble that read each."""
        return len(self.slots) * self._parts

    def count_children(self, parents: Tensor) -> Tensor:
        """Return the number of these children in each slot, given their parent rows, (slots,)."""
        return torch.bincount(self.slots[parents], minlength=self._n_slots)

    def add_children(self, parents: Tensor, dtype: torch.dtype) -> tuple[int, Tensor]:
        """Replace the rows by children, given their parent rows, each with a place in its slot.

        `dtype` is that of the mask. Return the number of places in a slot, and each child's place
        among those of all slots.
        """
        counts = self.count_children(parents)
        width = int(counts.max())
        self.slots = self.slots[parents]
        order = self.slots.argsort(stable=True)
        first = (counts.cumsum(0) - counts)[self.slots[order]]
        places = torch.empty_like(order)
        places[order] = torch.arange(len(order), device=order.device) - first
        places += self.slots * width
        is_read = self.paths.new_zeros(self._n_slots * width, self.paths.shape[1])
        is_read[places] = self.paths[parents]
        positions = is_read.sum(-1).view(-1, width)
        # A place without a row attends only to itself.
        self_mask = torch.eye(width, dtype=torch.bool, device=order.device)
        is_read = torch.cat([is_read, self_mask.repeat(self._n_slots, 1)], dim=1)
        self.paths = is_read[places]
        self._arguments = {}
        if not is_read.all():
            mask = torch.zeros(is_read.shape, dtype=dtype, device=order.device)
            mask.masked_fill_(~is_read, torch.finfo(dtype).min)
            mask = mask.view(self._n_slots, 1, width, -1).repeat(self._parts, 1, 1, 1)
            positions = positions.repeat(self._parts, 1)
            self._arguments = {"attention_mask": mask, "position_ids": positions}
        return width, places

    def mask_and_positions(self, length: int) -> dict[str, Tensor]:
        """Return the model arguments for the places of the last children."""
        return self._arguments


def assign_cache_slots(parents: Tensor, slots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Choose a cache slot for each child row, from 0 to children - 1.

    The first child of a row keeps the row's slot, unless the number of this slot is too large. All
    other children get copies of the row's slot.

    Args:
        parents: row of each child, (children,).
        slots: slot of each row, (rows,).

    Returns:
        The slot of each child, (children,).
        The slots to copy from, (copies,).
        The slots to copy to, (copies,).
    """
    count = len(parents)
    old = slots[parents]
    position = torch.arange(count, device=parents.device)
    first = torch.full((int(slots.max()) + 1,), count, device=parents.device)
    first.scatter_reduce_(0, old, position, "amin")
    # A slot beyond the number of children moves down, which keeps slots dense.
    stays = (first[old] == position) & (old < count)
    is_used = torch.zeros(count, dtype=torch.bool, device=parents.device)
    is_used[old[stays]] = True
    new = old.clone()
    new[~stays] = (~is_used).nonzero().squeeze(-1)
    return new, old[~stays], new[~stays]
