"""Where the work of a run is done: in this process, or on the workers of a cluster. Knows items;
nothing of attacks.

Work is a value that says what is to be done, and a place holds what it is done with (models, data):
each worker opens a place of its own, once, so that only work, items and what was found travel.
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
    """A task over items, each on its own: the result of one does not depend on the others."""

    @property
    def portion(self) -> int:
        """Items that are handed out together, and done again together where a worker is lost."""

    def results_at_workplace(self, place: Any, items: Sequence[Any]) -> Iterator[Any]:
        """The results for these items, one by one, with the models and data of `place`: the same on
        every worker."""


class Engine(Protocol):
    """One way to have work done."""

    @property
    def workers(self) -> int:
        """Processes beside this one."""

    @property
    def said(self) -> str:
        """Who does the work, in words: "this process"."""

    def set_work_context(self, here: Any, elsewhere: Callable[[], Any]) -> None:
        """Sets what later work runs on: `here` in this process; each worker makes its own with
        `elsewhere()`."""

    def stream_results(self, work: Work, items: Sequence[Any]) -> Iterator[Any]:
        """The results of the items as they arrive, each once. The same item always goes to the same
        worker."""

    def results_of_long_items(self, work: Work, items: Sequence[Any]) -> Iterator[Any]:
        """`stream` for few, long items: the next free worker takes the next item, so that none
        waits for another."""

    def close(self) -> None:
        """Stops its workers and lets go of what they worked on."""


class LocalEngine:
    """This process, which works on one item after the other."""

    workers, said = 0, "this process"
    _place: Any = None

    def set_work_context(self, here: Any, elsewhere: Callable[[], Any]) -> None:
        self._place = here

    def stream_results(self, work: Work, items: Sequence[Any]) -> Iterator[Any]:
        yield from work.results_at_workplace(self._place, items)

    results_of_long_items = stream_results

    def close(self) -> None:
        self._place = None


@dataclass(frozen=True)
class WorkerStart:
    """Where a worker begins: with this version, and in the folder that the run's relative paths
    begin at."""

    # asked where the run starts; workers get this record pickled
    folder: str = field(default_factory=os.getcwd)
    version: str = __version__

    def enter_folder_checking_version(self) -> None:
        """Raises AuditError where a worker has another version, or no such folder."""
        if self.version != __version__:
            raise AuditError(
                f"expected audit {self.version} on every worker, got {__version__} on {node()}"
            )
        try:
            os.chdir(self.folder)  # of the whole process, which a worker has to itself
        except OSError as error:
            raise AuditError(
                f"expected the folder {self.folder!r} on every worker, got none on {node()}"
            ) from error
