"""Do the work of a run in this process or on a cluster's workers, independent of attacks.

Work describes a task over items; a workplace holds the models and data for it. Each worker opens
its own workplace once, so only work, items and results are sent.
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
    """A task over items. The result of an item does not depend on the other items."""

    @property
    def portion(self) -> int:
        """Items that are handed out together, and done again together if a worker is lost."""

    def process_items(self, place: Any, items: Sequence[Any]) -> Iterator[Any]:
        """Yield the results of these items with the models and data of `place`; the same on every
        worker."""


class Engine(Protocol):
    """A way to do work."""

    @property
    def workers(self) -> int:
        """Processes besides this one."""

    @property
    def description(self) -> str:
        """The name of the place of work: "this process"."""

    def set_work_context(self, local_place: Any, make_place: Callable[[], Any]) -> None:
        """Set the workplace of later work: `local_place` in this process; each worker makes its own
        with `make_place()`."""

    def stream_results(self, work: Work, items: Sequence[Any]) -> Iterator[Any]:
        """Yield the result of each item once, as it arrives. The same item always goes to the same
        worker."""

    def stream_long_results(self, work: Work, items: Sequence[Any]) -> Iterator[Any]:
        """Yield the results of few, long items: the next free worker takes the next item."""

    def close(self) -> None:
        """Stop the workers and release their models and data."""


class LocalEngine:
    """This process, which works on one item after the other."""

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
    """The version that a worker must have, and its folder: relative paths of the run begin
    there."""

    # of the process that starts the run; workers get this record pickled
    folder: str = field(default_factory=os.getcwd)
    version: str = __version__

    def enter_folder(self) -> None:
        """Change to the folder. Raise AuditError if this worker has another version or no such
        folder."""
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
