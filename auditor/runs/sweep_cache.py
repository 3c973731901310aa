"""What consecutive runs of a sweep share. Knows nothing of what lies on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from auditor.core.nouns import TextForm

T = TypeVar("T")


class SweepCache:
    """The last thing of each kind, so that consecutive runs share it and two big models never
    coexist."""

    def __init__(self) -> None:
        self._held: dict[str, tuple[Any, Any]] = {}
        self.fits: dict[
            str, dict[str, Any]
        ] = {}  # soft prompts and the like: small, and worth minutes each
        self.forms: dict[
            str, TextForm
        ] = {}  # that were chosen, by model and data: however few of them are attacked

    def get_or_make(self, kind: str, key: Any, make: Callable[[], T]) -> T:
        """The last thing of this kind, if it had this key; else a new one, before which the last is
        let go."""
        if kind not in self._held or self._held[kind][0] != key:
            self._held.pop(kind, None)
            self._held[kind] = (key, make())
        held: T = self._held[kind][1]
        return held
