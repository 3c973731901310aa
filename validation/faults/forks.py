"""Run the `audit` command in a forked process; the parent has already imported all modules.

The child is killed, limited or left alone. It resembles a user's process: it has its own session,
writes its output to files, and handles signals as the command sets them. Moments are counted in
the child's processor time, so they do not depend on the load of the machine.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pkgutil
import select
import signal
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import auditor
from auditor import cli

Happened = Callable[[], bool]
_POLL = 0.002  # seconds
_LONGEST = 300.0  # most seconds that a command may take


@dataclass(frozen=True)
class Moment:
    """A moment: a number of seconds of processor time after an event.

    sent: the signal that the process gets at this moment.
    """

    after: Happened
    seconds: float
    sent: signal.Signals = signal.SIGKILL


@dataclass(frozen=True)
class Ended:
    """The end of a command. code: its exit code, negative if a signal ended it.

    said: its stderr; sent: whether the moment's signal was sent.
    """

    code: int
    said: str
    sent: bool = False

    @property
    def line(self) -> str:
        """Return the last line on stderr, which a user reads."""
        return next((line.strip() for line in reversed(self.said.splitlines()) if line.strip()), "")


class Running:
    """A running `audit WORDS` in the folder `stand`.

    before: a function that the child calls before the command.
    """

    def __init__(
        self,
        words: Sequence[str],
        stand: Path,
        environment: Mapping[str, str],
        before: Callable[[], object],
    ) -> None:
        self.stand = stand
        self._files = [stand / f".{os.urandom(4).hex()}.{name}" for name in ("out", "err")]
        sys.stdout.flush()
        sys.stderr.flush()
        with (
            warnings.catch_warnings()
        ):  # Python 3.12 warns of threads: they are of pytest's, and hold nothing
            warnings.simplefilter("ignore", DeprecationWarning)
            self.pid = os.fork()
        if self.pid == 0:
            _child(words, stand, environment, before, self._files)

    @property
    def seconds(self) -> float:
        """Return the processor time that the process has used so far."""
        return time.clock_gettime((~self.pid << 3) | 2)  # CPUCLOCK_SCHED of that process

    @property
    def is_over(self) -> bool:
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def send(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def until(self, happened: Happened) -> bool:
        """Wait for an event; return False if the process ends first."""
        deadline = time.monotonic() + _LONGEST
        while not happened():
            if self.is_over:
                return False
            if time.monotonic() > deadline:
                self._end_late_process()
            time.sleep(_POLL)
        return True

    def _wait_for_end(self) -> None:
        """Wait for the end of the process without asking for it again and again."""
        process = os.pidfd_open(self.pid)
        try:
            if not select.select([process], [], [], _LONGEST)[0]:
                self._end_late_process()
        finally:
            os.close(process)

    def _end_late_process(self) -> NoReturn:
        self.send(signal.SIGKILL)
        raise TimeoutError(f"{self.stand}: nothing came within {_LONGEST:g} s")

    def ended(self, moment: Moment | None = None) -> Ended:
        """Wait for the end of the process; send the moment's signal when the moment comes."""
        sent = False
        if moment is not None and self.until(moment.after):
            begun = self.seconds
            if sent := self.until(lambda: self.seconds - begun >= moment.seconds):
                self.send(moment.sent)
        self._wait_for_end()
        _, status = os.waitpid(self.pid, 0)
        said = self._files[1].read_text(errors="replace") if self._files[1].exists() else ""
        for path in self._files:
            path.unlink(missing_ok=True)
        return Ended(os.waitstatus_to_exitcode(status), said, sent)


def warm() -> None:
    """Import all modules that a command may import; a short command spends most of its time on
    this.
    """
    for module in pkgutil.walk_packages(auditor.__path__, "auditor."):
        with contextlib.suppress(ImportError):  # the extra is not installed
            importlib.import_module(module.name)


def _child(
    words: Sequence[str],
    stand: Path,
    environment: Mapping[str, str],
    before: Callable[[], object],
    files: list[Path],
) -> None:
    """Run the command in the forked child and exit; never return."""
    code = 3
    try:
        os.setsid()
        # The background processes of a shell ignore this signal.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.chdir(stand)
        for number, path in zip((1, 2), files, strict=True):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), number)
        sys.stdout, sys.stderr = (
            os.fdopen(os.dup(number), "w", encoding="utf-8") for number in (1, 2)
        )
        os.environ.update(environment)
        sys.argv = ["audit", *words]
        before()
        try:
            cli.main()
        except SystemExit as leave:
            code = leave.code if isinstance(leave.code, int) else 3
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)
