"""The terminal, for every command: what is said and shown, progress on stderr, quiet libraries.

Knows nothing of commands, and imports nothing heavy before it is needed.
"""

from __future__ import annotations

import os
import select
import shlex
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from auditor.core import threads
from auditor.core.errors import error_and_its_causes
from auditor.reports import escaping

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress
    from rich.text import Text

    from auditor.core.result import Measurement

_A_LINE_EVERY = 60.0  # seconds, in a log
debugging = False  # whether unexpected errors are shown whole (`audit --debug`)


# one for all: only a console that knows its progress bar prints lines above it instead of through
# it
@cache
def stderr_console() -> Console:
    from rich.console import Console

    return Console(stderr=True)


def print_line_to_stderr(text: str, code: int) -> int:
    """Prints one line on stderr, escaped, as parts of it may come from files and arguments. Returns
    `code`.

    Where nobody reads stderr, the exit code alone has to say it.
    """
    try:
        stderr_console().print(escaping.escape_for_terminal(text), soft_wrap=True)
    except (BrokenPipeError, SystemExit) as error:
        if not is_output_pipe_closed(error):
            raise
        redirect_output_to_devnull()
    return code


def is_output_pipe_closed(error: BaseException) -> bool:
    """Whether the error says that whoever read stdout or stderr is gone, as `head` is when it has
    its lines."""
    if isinstance(error, SystemExit):
        return isinstance(error.__context__, BrokenPipeError)  # what rich makes of it
    return isinstance(error, BrokenPipeError) and any(
        map(_has_output_stream_lost_its_reader, (sys.stdout, sys.stderr))
    )


def _has_output_stream_lost_its_reader(stream: Any) -> bool:
    with suppress(OSError, ValueError, AttributeError):  # no stream, or none of the system's
        told = select.poll()  # Unix alone has it
        told.register(stream.fileno(), 0)  # POLLERR comes unasked: the pipe has lost its reader
        return any(event & select.POLLERR for _, event in told.poll(0))
    return False


def redirect_output_to_devnull() -> None:
    """Sends stdout, and a hung-up stderr, to nowhere: Python would fail again at its last flush
    (exit 120)."""
    for stream in (sys.stdout, sys.stderr):
        if stream is sys.stdout or _has_output_stream_lost_its_reader(stream):
            with suppress(OSError, ValueError, AttributeError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def print_error_traceback(error: BaseException) -> None:
    """Where an unexpected error came from. Its message may quote private text, so it is shown on
    request only."""
    if debugging:
        # no locals, whoever asks: the whole data may be among them
        stderr_console().print_exception(show_locals=False)
        return
    # the first cause on top, as Python shows them
    for one in reversed(error_and_its_causes(error)):
        for frame in traceback.extract_tb(one.__traceback__):
            print_line_to_stderr(f"  {frame.filename}:{frame.lineno} in {frame.name}", 3)
        print_line_to_stderr(
            f"{type(one).__module__}.{type(one).__name__} (its message may quote private text: "
            "audit --debug)",
            3,
        )


def current_command_line() -> str:
    return "audit " + " ".join(shlex.quote(word) for word in sys.argv[1:])


def print_table(table: Any, styles: Sequence[str] = ()) -> None:
    from rich.console import Console

    from auditor.reports.tables import row_table_to_rich

    Console().print(row_table_to_rich(table, styles))


def seconds_since_start() -> float:
    """Return the age of this process in seconds."""
    import psutil

    return time.time() - psutil.Process().create_time()


def silence_libraries() -> None:
    """Libraries speak through us: their own bars and advice would bury the report."""
    # before the first import of transformers; what the user has set stays
    # else tokenizers prints a warning at every later fork, as of a data loader's workers
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    import logging as stdlib
    import warnings

    from transformers.utils import logging

    logging.disable_progress_bar()
    if (
        os.environ["TRANSFORMERS_VERBOSITY"] == "error"
    ):  # it reads this once, maybe before we were asked
        logging.set_verbosity_error()
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    warnings.filterwarnings("ignore", category=UserWarning, module="peft")
    for library in ("bitsandbytes", "accelerate"):  # a line for every layer that is asked
        stdlib.getLogger(library).setLevel(stdlib.ERROR)


def _lead_and_escaped_terminal_text(lead: str, text: str) -> Text:
    from rich.text import Text

    # a Text: in a plain string rich would take [words] in brackets for markup and drop them
    return Text(lead).append(escaping.escape_for_terminal(text))


class Terminal:
    """Progress on stderr: one line with what it is at and the time left, or one line a minute where
    none can move.

    verbose: a line a stage, notes and the first numbers as well.
    """

    def __init__(self, progress: Progress, verbose: bool) -> None:
        self._progress, self._verbose = progress, verbose
        self._task: Any = None
        self._said_threads = False
        self._what, self._begun = "", time.monotonic()  # the step that is told of, and since when
        self._last = self._told = self._begun  # when progress came, and when it was said

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        with self.transient_progress_bar(name):
            yield
        if self._verbose:
            stderr_console().print(
                _lead_and_escaped_terminal_text(f"{time.perf_counter() - start:7.1f} s  ", name)
            )
        if (
            self._verbose and not self._said_threads
        ):  # behind the first stage: a refusal is one sentence, nothing else
            import torch

            self._said_threads = True
            used, speed = (
                threads.describe_threads(torch.get_num_threads()),
                threads.measure_machine_gflops(),
            )
            self.note(f"threads: {used}; {speed:.0f} GFLOP/s in float32")

    @contextmanager
    def transient_progress_bar(self, name: str = "") -> Iterator[None]:
        """Progress that leaves no line behind."""
        self._task = task = self._progress.add_task(escaping.to_printable_line(name), total=None)
        # no step yet: the first that is told of begins its clock here
        self._what, self._last = "", time.monotonic()
        try:
            yield
        finally:
            self._progress.remove_task(task)

    def progress(self, what: str, done: int, total: int) -> None:
        now = time.monotonic()
        if what != self._what:  # what was done before it says nothing of what it takes
            self._what, self._begun = what, self._last
            if self._task is not None:
                self._progress.reset(self._task, total=total)
        self._last = now
        if self._task is not None:
            self._progress.update(
                self._task,
                description=escaping.to_printable_line(what),
                completed=done,
                total=total,
            )
        if done and not stderr_console().is_terminal and now - self._told >= _A_LINE_EVERY:
            from auditor.reports import phrases

            self._told, left = (
                now,
                phrases.format_duration((now - self._begun) * (total - done) / done),
            )
            stderr_console().print(
                escaping.escape_for_terminal(
                    f"{what}: {done:,} of {total:,}, {left} left of this step"
                ),
                soft_wrap=True,
            )

    def note(self, text: str) -> None:
        if self._verbose:
            stderr_console().print(
                _lead_and_escaped_terminal_text("           ", text), soft_wrap=True
            )

    def announce(self, text: str) -> None:
        print_line_to_stderr(text, 0)

    def show_greedy_recall(self, recall: Mapping[str, Measurement]) -> None:
        parts = [f"{key} → {m.value:.0%}" for key, m in recall.items()]
        if self._verbose:
            stderr_console().print(
                f"           greedy recall by copies: {', '.join(parts)}",
                markup=False,
                highlight=False,
            )


def resume_grid_hint(folder: Path) -> str:
    return f"finished points are kept in {folder}: the same command with -o {folder} goes on"


@contextmanager
def open_progress_terminal(verbose: bool = True, interrupted: str = "") -> Iterator[Terminal]:
    """interrupted: what is said where Ctrl-C ends the block: what is kept, and how to go on."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        Task,
        TextColumn,
        TimeRemainingColumn,
    )
    from rich.text import Text

    class TimeLeft(TimeRemainingColumn):
        def render(self, task: Task) -> Text:
            # rich writes -:--:-- where it is not
            known = task.total is not None and task.time_remaining is not None
            return Text.assemble(super().render(task), " left of this step") if known else Text("")

    what = TextColumn("{task.description}", markup=False)
    columns = (what, BarColumn(), MofNCompleteColumn(), TimeLeft())
    with Progress(
        *columns, console=stderr_console(), transient=True, disable=not stderr_console().is_terminal
    ) as progress:
        try:
            yield Terminal(progress, verbose)
        except KeyboardInterrupt:
            if interrupted:
                print_line_to_stderr(f"interrupted; {interrupted}", 130)
            raise
