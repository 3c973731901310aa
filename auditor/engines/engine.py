"""Do the work of a run in this process or on a cluster's workers.

Work is a task over items. A workplace is the models and data that a task needs. Each worker loads
its workplace once; after that, only work, items and results are sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol


class Work(Protocol):
    """Interface of a task over items. The result for an item does not depend on other items."""

    @property
    def portion(self) -> int:
        """Number of items that are sent to a worker together.

        If the worker is lost, they are sent together again.
        """

    def process_items(self, place: Any, items: Sequence[Any]) -> Iterator[Any]:
        """Yield the results for these items.

        `place` is the loaded models and data. The results do not depend on which worker processes
        the items.
        """


class Engine:
    """An engine that processes a task's items one after another in this process.

    Subclasses process the items on the workers of a cluster.
    """

    workers = 0  # worker processes besides this process
    _place: Any = None

    @property
    def description(self) -> str:
        """Phrase that says where work runs."""
        return "this process"

    def set_work_context(self, local_place: Any, make_place: Callable[[], Any]) -> None:
        """Set the workplace (models and data) that later tasks use.

        `local_place` is the workplace in this process; `make_place` creates a workplace on each
        worker.
        """
        self._place = local_place

    def load_ahead(self, load: Callable[[], Any]) -> None:
        """Have workers load models while this process prepares the workplace."""

    def stream_results(self, work: Work, items: Sequence[Any]) -> Iterator[Any]:
        """Yield the result for each item once, as it arrives.

        The same list of items is always divided among the workers in the same way.
        """
        yield from work.process_items(self._place, items)

    def stream_long_results(self, work: Work, items: Sequence[Any]) -> Iterator[Any]:
        """Yield the results for a few long items; each item goes to the next free worker."""
        yield from self.stream_results(work, items)

    def close(self) -> None:
        """Stop the workers and release their models and data."""
        self._place = None
