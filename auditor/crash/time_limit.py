"""End a training, and the processes that it started, when its time is up."""

from __future__ import annotations

import contextlib
import math
import signal
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from typing import Any

import psutil

from auditor.core.errors import AuditError

LONG = "the training takes longer than its budget: give it fewer steps, or raise --minutes"
_AGAIN = 5.0  # seconds from alarm to alarm


class _OutOfTime(BaseException):
    """Signal that a training is out of time; `except Exception` does not catch this exception."""


@contextmanager
def training_time_limit_context(until: float) -> Iterator[None]:
    """End the code in the block and its processes when the time is up, and raise AuditError.

    until: the end, on the clock of `time.monotonic()`. The alarm repeats every few seconds, in case
        the training catches the exception. Alarms work only in Python's main thread; in other
        threads, the model's next forward pass ends the training.
    """
    over = False

    def late(*_: Any) -> None:
        if not over:
            raise _OutOfTime

    before = set(psutil.Process().children())
    alarmed = threading.current_thread() is threading.main_thread() and hasattr(signal, "setitimer")
    if alarmed:
        handler = signal.signal(signal.SIGALRM, late)
        start = time.monotonic()
        if until < math.inf:
            first = max(until - start, 1e-3)
        else:
            first = 0
        remaining, _ = signal.setitimer(signal.ITIMER_REAL, first, _AGAIN)
    try:
        yield
    except _OutOfTime:
        raise AuditError(LONG) from None
    finally:
        over = True
        if alarmed:
            # Do this first: an alarm without a handler ends the process.
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, handler)
            # Restore an earlier alarm, less the elapsed time.
            signal.setitimer(
                signal.ITIMER_REAL, remaining and max(remaining - (time.monotonic() - start), 1e-3)
            )
        for process in list_training_processes(before):
            with contextlib.suppress(psutil.Error):
                process.kill()


def list_training_processes(before: Collection[psutil.Process]) -> list[psutil.Process]:
    """List all descendant processes of this process, except multiprocessing's resource tracker.

    before: processes to omit, together with their descendants.
    """
    tracker = resource_tracker._resource_tracker._pid  # type: ignore[attr-defined]
    processes = list[psutil.Process]()
    for child in psutil.Process().children():
        if child.pid != tracker and child not in before:
            with contextlib.suppress(psutil.Error):  # the process may have ended
                processes += [*child.children(recursive=True), child]
    return processes
