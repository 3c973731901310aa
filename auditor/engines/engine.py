"""Do the work of a run in this process or on a cluster's workers.

Work is a task over items. A workplace is the models and data that a task needs. Each worker loads
its workplace once; after that, only work, items and results are sent.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from platform import node
from typing import Any, Protocol

from auditor import __version__
from auditor.core.errors import AuditError


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


class Engine(Protocol):
    """The interface of an engine, which processes the items of a task in one or several
    processes.
    """

    @property
    def workers(self) -> int:
        """Number of worker processes besides this process."""

    @property
    def description(self) -> str:
        """A phrase for the place where work runs, such as "this process"."""

    def set_work_context(self, local_place: Any, make_place: Callable[[], Any]) -> None:
        """Set the workplace (models and data) that later tasks use.

        local_place: the workplace in this process; make_place: creates a workplace on each worker.
        """

    def stream_results(self, work: Work, items: Sequence[Any]) -> Iterator[Any]:
        """Yield the result of each item once, as it arrives.

        Equal lists of items are divided among the workers in an equal way.
        """

    def stream_long_results(self, work: Work, items: Sequence[Any]) -> Iterator[Any]:
        """Yield the results of a few long items; each item goes to the next free worker."""

    def close(self) -> None:
        """Stop the workers and release their models and data."""


class LocalEngine:
    """An engine that processes the items one after another in this process."""

    workers = 0
    description = "this process"
    _place: Any = None

    def set_work_context(self, local_place: Any, make_place: Callable[[], Any]) -> None:
        self._place = local_place

    def stream_results(self, work: Work, items: Sequence[Any]) -> Iterator[Any]:
        yield from work.process_items(self._place, items)

    stream_long_results = stream_results

    def close(self) -> None:
        self._place = None


@dataclass(frozen=True)
class WorkerStart:
    """The working folder and the version of the program that each worker must have.

    The run's relative paths start at this folder.
    """

    # of the process that starts the run; workers get this record pickled
    folder: str = field(default_factory=os.getcwd)
    version: str = __version__

    def enter_folder(self) -> None:
        """Change the worker's current folder to `folder`.

        Raise AuditError if the folder does not exist or the worker has another version.
        """
        if self.version != __version__:
            raise AuditError(
                f"expected audit {self.version} on every worker, got {__version__} on {node()}"
            )
        try:
            os.chdir(self.folder)  # of the whole process: each worker has its own
        except OSError as error:
            raise AuditError(
                f"expected the folder {self.folder!r} on every worker, got none on {node()}"
            ) from error
