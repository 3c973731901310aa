"""The last hidden states of texts that a model has read, so that whoever asks about a text again pays its head alone.

For a model whose weights do not change while it is asked: nothing here would notice. Knows nothing of what is asked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from auditor.core.nouns import Tokens
from auditor.models.memory import AtOnce, free_bytes

_SHARE = 8  # of the free memory, held states take one part of so many at most
_TOGETHER = 1024  # tokens of texts that are read ahead in one pass: of more, a processor reads no faster
_TOLERANCE = 1e-4  # of logits, by the largest of them: more than rounding is a head that is not all that follows


class HiddenStates:
    """Answers for texts that were read; the first answer of the head is held against the model's own.

    body: gives hidden states (B, m, d) as the first of its outputs, of the last m positions at least; head: makes
    logits of them; logits: of the model itself, which reads at least the last so many positions of token ids (B, n) and
    answers for no more of them than it is told, (B, kept, V) float32. Where body and head are not all of the model
    (Gemma 2 caps its logits), nothing is held and the model itself is asked each time.
    """

    def __init__(self, body: Any, head: Any, logits: Callable[[Tensor, int, int], Tensor]) -> None:
        self._body, self._head, self._logits = body, head, logits
        self._held: dict[bytes, Tensor] = {}
        self._bytes = 0
        self._right: bool | None = None if head is not None else False  # whether body and head are all of it

    @torch.no_grad()
    def logits(self, texts: Tensor, last: int) -> Tensor:
        """(B, last, V) behind the texts (B, n)."""
        names = [_name(text) for text in texts.cpu()]
        missing = [i for i, name in enumerate(names) if not self._holds(name, last)]
        if self._right is False or len(missing) == len(names):
            return self._read(texts, last, names)
        if missing:
            self._read(texts[missing], last, [names[i] for i in missing])
        if not all(self._holds(name, last) for name in names):  # no room for them
            return self._logits(texts, last, last)
        states = torch.stack([self._held[name][-last:] for name in names])
        found: Tensor = self._head(states).float()
        return found

    @torch.no_grad()
    def read_ahead(self, texts: Sequence[Tokens], last: Sequence[int], device: torch.device) -> None:
        """Reads texts of any lengths side by side: each will be asked about, at its last so many positions.

        The shorter are filled up behind their ends, which changes nothing before them in a causal model.
        """
        asked = ((torch.tensor(t), own) for t, own in dict(zip(texts, last, strict=True)).items() if own <= len(t))
        ahead = sorted((one for one in asked if not self._holds(_name(one[0]), one[1])), key=lambda one: len(one[0]))
        if len(ahead) < 2:
            return
        size = max(1, _TOGETHER // len(ahead[-1][0]))
        for _ in AtOnce(size).pieces(len(ahead), lambda some: self._read_together(ahead[some], device)):
            if not self._right:
                return

    def _read_together(self, texts: Sequence[tuple[Tensor, int]], device: torch.device) -> None:
        longest = len(texts[-1][0])
        filled = torch.stack([torch.cat([text, text[-1:].expand(longest - len(text))]) for text, _ in texts])
        first = min(len(text) - last for text, last in texts)
        _, states = self._states(filled.to(device), longest - first, 1)
        if states is not None and torch.isfinite(states).all():
            missing = longest - states.shape[1]  # positions that were not read
            own = [row[: len(text) - missing].clone() for row, (text, _) in zip(states, texts, strict=True)]
            self._hold([_name(text) for text, _ in texts], own)

    def _holds(self, name: bytes, last: int) -> bool:
        return name in self._held and len(self._held[name]) >= last

    def _read(self, texts: Tensor, last: int, names: list[bytes]) -> Tensor:
        found, states = self._states(texts, last, last)
        if states is not None:
            self._hold(names, list(states))
        return found

    def _states(self, texts: Tensor, last: int, kept: int) -> tuple[Tensor, Tensor | None]:
        """What the model answers for the last `kept` positions, and the states of the last `last` at least; None where
        they do not tell its answers."""
        if self._right is False:
            return self._logits(texts, last, kept), None
        caught: list[Any] = []
        hook = self._body.register_forward_hook(lambda module, given, said: caught.append(said[0]))
        try:
            found = self._logits(texts, last, kept)
        finally:
            hook.remove()
        if self._right is None:
            self._right = bool(caught) and self._is_all(caught[-1], found)
        # The last: what texts begin with may have been read before them.
        return found, caught[-1] if self._right else None

    def _hold(self, names: Sequence[bytes], states: Sequence[Tensor]) -> None:
        """As far as there is room."""
        new = sum(own.nbytes for own in states)
        if self._bytes + new <= free_bytes(states[0].device) // _SHARE:
            self._held.update(zip(names, states, strict=True))
            self._bytes += new

    def _is_all(self, states: Any, found: Tensor) -> bool:
        if not isinstance(states, Tensor) or states.ndim != 3 or len(states) != len(found):
            return False
        again = self._head(states[:, -found.shape[1] :]).float()
        return again.shape == found.shape and bool((again - found).abs().max() <= _TOLERANCE * found.abs().max())


def _name(text: Tensor) -> bytes:
    """text: (n,) token ids, on the CPU."""
    return text.numpy().tobytes()
