"""Report the progress of a run, and measure the time of its stages."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # a help page does not need this import
    from auditor.core.result import Measurement


class Reporter:
    """Interface through which a run reports its progress. This base class ignores all messages."""

    def stage(self, name: str) -> AbstractContextManager[None]:
        """Return a context manager for a stage of the run."""
        return nullcontext()

    def progress(self, description: str, n_done: int, total: int) -> None: ...

    def note(self, text: str) -> None:
        """Show a note to the user at once. The run's record also holds the note."""

    def announce(self, text: str) -> None:
        """Show a message that the user is waiting for, even in quiet modes."""

    def show_greedy_recall(self, recall: Mapping[str, Measurement]) -> None:
        """Show the first result: the share of members that greedy decoding recites.

        Args:
            recall: this share, keyed by repeat count.
        """


class StageClock:
    """Timer that announces stages to a reporter and records their durations."""

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
