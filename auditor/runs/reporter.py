"""Report the progress of a run, and time its stages. Knows nothing of terminals."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

from auditor.core.result import Measurement


class Reporter(Protocol):
    """Report the progress of a run."""

    def stage(self, name: str) -> Any:
        """Return a context manager around a timed stage."""

    def progress(self, description: str, n_done: int, total: int) -> None: ...

    def note(self, text: str) -> None:
        """Report a note for the user at once; the record has it too."""

    def announce(self, text: str) -> None:
        """Report a message that the user awaits, even in quiet modes."""

    def show_greedy_recall(self, recall: Mapping[str, Measurement]) -> None:
        """Show the first result: greedy recall by repeat count."""


class SilentReporter:
    """Report nothing."""

    def stage(self, name: str) -> AbstractContextManager[None]:
        return nullcontext()

    def progress(self, description: str, n_done: int, total: int) -> None: ...

    def note(self, text: str) -> None: ...

    def announce(self, text: str) -> None: ...

    def show_greedy_recall(self, recall: Mapping[str, Measurement]) -> None: ...


class StageClock:
    """Announce the stages of a run to its reporter, and record the duration of each."""

    def __init__(self, reporter: Reporter) -> None:
        self.reporter = reporter
        self.seconds: dict[str, float] = {}

    @contextmanager
    def timed_stage(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        with self.reporter.stage(name):
            yield
        # No `finally`: no reader needs the time of a failed stage. A repeated name overwrites its
        # time.
        self.seconds[name] = time.perf_counter() - start
