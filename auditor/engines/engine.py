"""Do the work of a run in this process or on a cluster's workers.

Work is a task over items. A workplace is the models and data that a task needs. Each worker loads
its workplace once; after that, only work, items and results are sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol


class Work(Protocol):
    """The interface of a task over items. Each item's result is independent of the other items."""

    @property
    def portion(self) -> int:
        """Number of items that are sent to a worker together, and repeated together if it is
        lost.
        """

    def process_items(self, place: Any, items: Sequence[Any]) -> Iterator[Any]:
        """Yield the results of these items.

        place: the loaded models and data. The results are equal on every worker.
        """


class Engine:
    """An engine that processes the items of a task one after another in this process.

    A subclass processes the items on the workers of a cluster.
    """

    workers = 0  # worker processes besides this process
    _place: Any = None

    @property
    def description(self) -> str:
        """A phrase for the place where work runs."""
        return "this process"

    def set_work_context(self, local_place: Any, make_place: Callable[[], Any]) -> None:
        """Set the workplace (models and data) that later tasks use.

        local_place: the workplace in this process; make_place: creates a workplace on each worker.
        """
        self._place = local_place

    def stream_results(self, work: Work, items: Sequence[Any]) -> Iterator[Any]:
        """Yield the result of each item once, as it arrives.

        Equal lists of items are divided among the workers in an equal way.
        """
        yield from work.process_items(self._place, items)

    def stream_long_results(self, work: Work, items: Sequence[Any]) -> Iterator[Any]:
        """Yield the results of a few long items; each item goes to the next free worker."""
        yield from self.stream_results(work, items)

    def close(self) -> None:
        """Stop the workers and release their models and data."""
        self._place = None
