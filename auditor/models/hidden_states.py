"""The last hidden states of texts that a model has read, so that whoever asks about a text again pays its head alone.

For a model whose weights do not change while it is asked: nothing here would notice. Knows nothing of what is asked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from auditor.models.memory import free_bytes

_SHARE = 8  # of the free memory, held states take one part of so many at most
_TOLERANCE = 1e-4  # of logits, by the largest of them: more than rounding is a head that is not all that follows


class HiddenStates:
    """Answers for texts that were read; the first answer of the head is held against the model's own.

    body: gives hidden states (B, m, d) as the first of its outputs, of the last m positions at least; head: makes
    logits of them; logits: of the model itself, for token ids (B, n) and the last so many positions, (B, last, V)
    float32. Where body and head are not all
    of the model (Gemma 2 caps its logits), nothing is held and the model itself is asked each time.
    """

    def __init__(self, body: Any, head: Any, logits: Callable[[Tensor, int], Tensor]) -> None:
        self._body, self._head, self._logits = body, head, logits
        self._held: dict[bytes, Tensor] = {}
        self._bytes = 0
        self._right: bool | None = None if head is not None else False  # whether body and head are all of it

    @torch.no_grad()
    def logits(self, texts: Tensor, last: int) -> Tensor:
        """(B, last, V) behind the texts (B, n)."""
        names = [text.numpy().tobytes() for text in texts.cpu()]
        missing = [i for i, name in enumerate(names) if not self._holds(name, last)]
        if self._right is False or len(missing) == len(names):
            return self._read(texts, last, names)
        if missing:
            self._read(texts[missing], last, [names[i] for i in missing])
        if not all(self._holds(name, last) for name in names):  # no room for them
            return self._logits(texts, last)
        states = torch.stack([self._held[name][-last:] for name in names])
        found: Tensor = self._head(states).float()
        return found

    def _holds(self, name: bytes, last: int) -> bool:
        return name in self._held and len(self._held[name]) >= last

    def _read(self, texts: Tensor, last: int, names: list[bytes]) -> Tensor:
        if self._right is False:
            return self._logits(texts, last)
        caught: list[Any] = []
        hook = self._body.register_forward_hook(lambda module, given, said: caught.append(said[0]))
        try:
            found = self._logits(texts, last)
        finally:
            hook.remove()
        if self._right is None:
            self._right = bool(caught) and self._is_all(caught[-1], found)
        # The last: what texts begin with may have been read before them.
        if self._right and self._bytes + caught[-1].nbytes <= free_bytes(texts.device) // _SHARE:
            self._held.update(zip(names, caught[-1], strict=True))
            self._bytes += caught[-1].nbytes
        return found

    def _is_all(self, states: Any, found: Tensor) -> bool:
        if not isinstance(states, Tensor) or states.ndim != 3 or len(states) != len(found):
            return False
        again = self._head(states[:, -found.shape[1] :]).float()
        return again.shape == found.shape and bool((again - found).abs().max() <= _TOLERANCE * found.abs().max())
