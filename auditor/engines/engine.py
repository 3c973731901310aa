"""Where the work of a run is done: in this process, or on the workers of a cluster. Knows items; nothing of attacks.

Work is a value that says what is to be done, and a place holds what it is done with (models, data): a worker opens a
place of its own, once, so that only work, items and what was found travel.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol


class Work(Protocol):
    """What is to be done with items, each on its own: what is found of one does not depend on the others."""

    portion: int  # items that are handed out together, and done again together where a worker is lost

    def at(self, place: Any, items: Sequence[Any]) -> Iterator[Any]:
        """What is found, bit by bit: the same at every place that was opened in the same way."""


class Engine(Protocol):
    """One way to have work done."""

    @property
    def said(self) -> str:
        """Where it is done, in words."""

    def stream(self, work: Work, items: Sequence[Any]) -> Iterator[Any]:
        """What is found of the items, as it comes in: each bit once, those of different items in any order."""

    def close(self) -> None:
        """Lets go of what it holds. What is asked of it afterwards starts anew."""


class LocalEngine:
    """This process, at a place that is open already."""

    said = "this process"

    def __init__(self, place: Any) -> None:
        self.place = place

    def stream(self, work: Work, items: Sequence[Any]) -> Iterator[Any]:
        yield from work.at(self.place, items)

    def close(self) -> None:
        pass
