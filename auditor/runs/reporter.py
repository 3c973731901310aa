"""Where a run says what it is doing, and the clock that times its stages. Knows nothing of
terminals."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

from auditor.core.result import Measurement


class Reporter(Protocol):
    """Where a run says what it is doing."""

    def stage(self, name: str) -> Any:
        """A context manager around a stage, which is timed."""

    def progress(self, what: str, done: int, total: int) -> None: ...

    def note(self, text: str) -> None:
        """What a user should know at once; the record holds it too."""

    def announce(self, text: str) -> None:
        """What a user waits for: shown however little is to be said."""

    def show_greedy_recall(self, recall: Mapping[str, Measurement]) -> None:
        """The first real number: greedy recall by repeat count."""


class SilentReporter:
    """A reporter that says nothing."""

    def stage(self, name: str) -> AbstractContextManager[None]:
        return nullcontext()

    def progress(self, what: str, done: int, total: int) -> None: ...

    def note(self, text: str) -> None: ...

    def announce(self, text: str) -> None: ...

    def show_greedy_recall(self, recall: Mapping[str, Measurement]) -> None: ...


class StageClock:
    """Announces the stages of a run to its reporter, and keeps how long each took."""

    def __init__(self, reporter: Reporter) -> None:
        self.reporter = reporter
        self.seconds: dict[str, float] = {}

    @contextmanager
    def timed_stage(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        with self.reporter.stage(name):
            yield
        # No `finally`: a stage that fails took no time that anybody reads. Of equal names the last
        # one stays.
        self.seconds[name] = time.perf_counter() - start
