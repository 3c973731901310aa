"""The last hidden states of texts that a model has read, so that whoever asks about a text again
pays its head alone, and keys and values of what was read ahead, so that whoever completes a
beginning of it reads nothing again.

For a model whose weights do not change while it is asked: nothing here would notice. Knows nothing
of what is asked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from auditor.core.nouns import Tokens
from auditor.models.memory import BatchSizeLimit, available_device_memory_bytes
from auditor.models.slot_cache import SlotLayer

_SHARE = 8  # of the free memory, what is held takes one part of so many at most
# and keys and values one part of so many of that: where there is no room for them, for states there
# is
_FOR_STATES = 2
# tokens of texts that are read ahead in one pass: of more, a processor reads no faster
_TOGETHER = 1024
_RECENT_BYTES = 2**29  # of logits of a batch of texts, about which several ask in turn
# of logits, by the largest of them: more than rounding is a head that is not all that follows
_TOLERANCE = 1e-4

Logits = Callable[[Tensor, int, int, list[SlotLayer] | None], Tensor]


class HiddenStateCache:
    """Answers for texts that were read; the first answer of the head is held against the model's
    own.

    body: gives hidden states (B, m, d) of the last m positions as the first of its outputs; head:
    makes logits of them. logits(texts, last, kept, layers): the model itself; of token ids (B, n)
    it reads at least the last `last` positions and answers for the last `kept`, (B, kept, V)
    float32; `layers` takes those that hold the texts' keys and values. Where body and head are not
    all of the model (Gemma 2 caps its logits), nothing is held and the model itself is asked each
    time.
    """

    def __init__(self, body: Any, head: Any, logits: Logits) -> None:
        self._body, self._head, self._logits = body, head, logits
        self._held: dict[bytes, Tensor] = {}
        self._begun: dict[
            bytes, tuple[Tensor, list[SlotLayer], int]
        ] = {}  # of a prefix: last state, layers, its slot
        self._bytes = 0
        self._recent: dict[
            bytes, Tensor
        ] = {}  # logits of texts that several ask about in turn, of the last positions
        # whether body and head are all of it
        self._right: bool | None = None if head is not None else False

    @torch.no_grad()
    def logits(self, texts: Tensor, last: int) -> Tensor:
        """(B, last, V) behind the texts (B, n)."""
        names = [_hidden_state_key_of_text(text) for text in texts.cpu()]
        if all(name in self._recent and len(self._recent[name]) >= last for name in names):
            return torch.stack([self._recent[name][-last:] for name in names])
        found = self._logits_from_states(texts, last, names)
        if self._right and texts.shape[1] > 1:
            self._remember_recent_logits(names, found)
        return found

    def _remember_recent_logits(self, names: Sequence[bytes], found: Tensor) -> None:
        """Keeps the logits for the next who asks about the same texts; the oldest go, so that few
        are held."""
        most = min(_RECENT_BYTES, self._remaining_bytes(found.device, _SHARE))
        if found.nbytes > most:
            return
        for name, own in zip(names, found, strict=True):
            self._recent.pop(name, None)  # the newest are at the end
            self._recent[name] = own.clone()
        held = sum(own.nbytes for own in self._recent.values())
        while held > most:
            held -= self._recent.pop(next(iter(self._recent))).nbytes

    def forget_batch(self) -> None:
        """Lets go of keys, values and logits, when all that is asked about a batch of texts was
        asked."""
        self._recent.clear()
        layers = {id(layer): layer for _, own, _ in self._begun.values() for layer in own}
        self._bytes -= sum(layer.nbytes for layer in layers.values())
        self._begun.clear()

    def _logits_from_states(self, texts: Tensor, last: int, names: Sequence[bytes]) -> Tensor:
        missing = [i for i, name in enumerate(names) if not self._has_states(name, last)]
        if self._right is False or len(missing) == len(names):
            return self._read_and_hold(texts, last, list(names))
        if missing:
            self._read_and_hold(texts[missing], last, [names[i] for i in missing])
        if not all(self._has_states(name, last) for name in names):  # no room for them
            return self._logits(texts, last, last, None)
        states = torch.stack([self._held[name][-last:] for name in names])
        found: Tensor = self._head(states).float()
        return found

    @torch.no_grad()
    def logits_and_layers_behind_prefixes(
        self, prefixes: Tensor, length: int
    ) -> tuple[Tensor, list[SlotLayer]] | None:
        """(B, V) logits behind prefixes (B, n), and layers of `length` positions that hold these;
        None unless each was read ahead, with `keys`, as all of a text but its last positions."""
        names = [_hidden_state_key_of_text(prefix) for prefix in prefixes.cpu()]
        if not names or not all(name in self._begun for name in names):
            return None
        states, layers, slots = zip(*(self._begun[name] for name in names), strict=True)
        held = (list(zip(same, slots, strict=True)) for same in zip(*layers, strict=True))
        return self._head(torch.stack(states)).float(), [
            SlotLayer.gather_slots(rows, prefixes.shape[1], length) for rows in held
        ]

    def _remaining_bytes(self, device: torch.device, share: int) -> int:
        return available_device_memory_bytes(device) // share - self._bytes

    @torch.no_grad()
    def read_ahead(
        self,
        texts: Sequence[Tokens],
        last: Sequence[int],
        device: torch.device,
        keys: bool = False,
        begun: Sequence[int] | None = None,
    ) -> None:
        """Reads texts of any lengths side by side: each will be asked about, at its last so many
        positions.

        begun: tokens of each text that will be completed, if not all before those positions.

        The shorter are filled up behind their ends, which changes nothing before them in a causal
        model. keys: whether keys and values are held, too, to complete what stands before those
        positions.
        """
        beginnings = begun or [len(text) - own + 1 for text, own in zip(texts, last, strict=True)]
        wanted = {
            text: (own, begin) for text, own, begin in zip(texts, last, beginnings, strict=True)
        }
        asked = ((torch.tensor(text), *own) for text, own in wanted.items() if own[0] <= len(text))
        # By length: a batch is filled up to its longest text, the last.
        ahead = sorted(
            (
                one
                for one in asked
                if not self._has_states(_hidden_state_key_of_text(one[0]), one[1])
            ),
            key=lambda one: len(one[0]),
        )
        if len(ahead) < 2:  # one alone is read when it is asked about
            return
        size = max(1, _TOGETHER // len(ahead[-1][0]))
        for _ in BatchSizeLimit(size).run_pieces_within_memory(
            len(ahead), lambda some: self._read_and_cache_batch(ahead[some], device, keys)
        ):
            if (
                not self._right
            ):  # found out by the first batch: nothing of what follows would be held
                return

    def _read_and_cache_batch(
        self, texts: Sequence[tuple[Tensor, int, int]], device: torch.device, keys: bool
    ) -> None:
        longest = len(texts[-1][0])
        filled = torch.stack(
            [torch.cat([text, text[-1:].expand(longest - len(text))]) for text, *_ in texts]
        )
        first = min(len(text) - last for text, last, _ in texts)
        layers: list[SlotLayer] | None = [] if keys else None
        # Logits of one position only: the states are what is wanted, and a head over all costs the
        # most.
        _, states = self._logits_and_hidden_states(filled.to(device), longest - first, 1, layers)
        if states is None or not torch.isfinite(states).all():
            return
        missing = longest - states.shape[1]  # positions that were not read
        # Copies: a view of a row would keep the states of the whole batch in memory.
        own = [
            row[: len(text) - missing].clone()
            for row, (text, *_) in zip(states, texts, strict=True)
        ]
        self._hold_where_room([_hidden_state_key_of_text(text) for text, *_ in texts], own)
        if layers and (new := sum(layer.nbytes for layer in layers)) <= self._remaining_bytes(
            device, _SHARE * _FOR_STATES
        ):
            self._bytes += new
            for slot, ((text, _, begin), state) in enumerate(zip(texts, own, strict=True)):
                # The state at this place, counted from the end, has read the text up to and with
                # that position.
                self._begun[_hidden_state_key_of_text(text[:begin])] = (
                    state[begin - 1 - len(text)],
                    layers,
                    slot,
                )

    def _has_states(self, name: bytes, last: int) -> bool:
        return name in self._held and len(self._held[name]) >= last

    def _read_and_hold(self, texts: Tensor, last: int, names: list[bytes]) -> Tensor:
        found, states = self._logits_and_hidden_states(texts, last, last)
        if states is not None:
            self._hold_where_room(names, list(states))
        return found

    def _logits_and_hidden_states(
        self, texts: Tensor, last: int, kept: int, layers: list[SlotLayer] | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """What the model answers for the last `kept` positions, and the states of the last `last`
        at least; None where they do not tell its answers. layers: takes those that hold keys and
        values."""
        if self._right is False:
            return self._logits(texts, last, kept, layers), None
        caught: list[Any] = []
        hook = self._body.register_forward_hook(lambda module, given, said: caught.append(said[0]))
        try:
            found = self._logits(texts, last, kept, layers)
        finally:
            hook.remove()
        if self._right is None:
            self._right = bool(caught) and self._is_input_of_head(caught[-1], found)
        # The last: what texts begin with may have been read before them.
        return found, caught[-1] if self._right else None

    def _hold_where_room(self, names: Sequence[bytes], states: Sequence[Tensor]) -> None:
        """Keeps these states; none of them where memory has no room for all."""
        if (new := sum(own.nbytes for own in states)) <= self._remaining_bytes(
            states[0].device, _SHARE
        ):
            self._held.update(zip(names, states, strict=True))
            self._bytes += new

    def _is_input_of_head(self, states: Any, found: Tensor) -> bool:
        if not isinstance(states, Tensor) or states.ndim != 3 or len(states) != len(found):
            return False
        again = self._head(states[:, -found.shape[1] :]).float()
        return again.shape == found.shape and bool(
            (again - found).abs().max() <= _TOLERANCE * found.abs().max()
        )


def _hidden_state_key_of_text(text: Tensor) -> bytes:
    """text: (n,) token ids, on the CPU."""
    return text.numpy().tobytes()
