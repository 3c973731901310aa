"""Share loaded models and data between consecutive runs of a sweep."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from auditor.core.nouns import TextForm

T = TypeVar("T")


class SweepCache:
    """Cache of only the last object of each kind, so that memory never holds two large models."""

    def __init__(self) -> None:
        self._held: dict[str, tuple[Any, Any]] = {}
        self.fits: dict[
            str, dict[str, Any]
        ] = {}  # soft prompts and similar: small, but each takes minutes
        self.forms: dict[
            str, TextForm
        ] = {}  # chosen text forms, keyed by model and data, for any number of attacked records

    def get_or_make(self, kind: str, key: Any, make: Callable[[], T]) -> T:
        """Return the last object of this kind if its key matches, otherwise a new object.

        The last object is freed before `make` is called.
        """
        if kind not in self._held or self._held[kind][0] != key:
            self._held.pop(kind, None)
            self._held[kind] = (key, make())
        cached: T = self._held[kind][1]
        return cached
