"""Print messages, tables and progress for every command, and silence libraries.

This module imports large libraries only when they are needed.
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
from auditor.core.errors import AuditError, list_causes
from auditor.reports import escaping
from auditor.runs.reporter import Reporter

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress
    from rich.text import Text

    from auditor.core.result import Measurement
    from auditor.reports.blocks import Document

_A_LINE_EVERY = 60.0  # seconds between log lines
debugging = False  # whether unexpected errors are shown completely (`audit --debug`)


# Shared: only a console that knows its progress bar prints lines above it instead of through it.
@cache
def stderr_console() -> Console:
    from rich.console import Console

    return Console(stderr=True)


def print_stderr_line(text: str, code: int) -> int:
    """Print a line on stderr, and return the exit code `code`.

    The line is escaped, because files and arguments may supply parts of it.
    """
    try:
        stderr_console().print(escaping.escape_for_terminal(text), soft_wrap=True)
    except (BrokenPipeError, SystemExit) as error:
        if not is_output_pipe_closed(error):
            raise
        discard_output()
    return code


def is_output_pipe_closed(error: BaseException) -> bool:
    """Test if an error means that the process reading stdout or stderr (e.g. `head`) has ended."""
    if isinstance(error, SystemExit):
        return isinstance(error.__context__, BrokenPipeError)  # rich raises this in its place
    return isinstance(error, BrokenPipeError) and any(
        map(_has_output_stream_lost_its_reader, (sys.stdout, sys.stderr))
    )


def _has_output_stream_lost_its_reader(stream: Any) -> bool:
    with suppress(OSError, ValueError, AttributeError):  # no stream, or not a system stream
        poll = select.poll()  # only on Unix
        # POLLERR, which is always reported, means that the pipe has no reader
        poll.register(stream.fileno(), 0)
        return any(event & select.POLLERR for _, event in poll.poll(0))
    return False


def discard_output() -> None:
    """Redirect stdout to /dev/null, and also stderr if the process reading it has ended.

    Otherwise Python would fail again when it flushes these streams at exit (code 120).
    """
    for stream in (sys.stdout, sys.stderr):
        if stream is sys.stdout or _has_output_stream_lost_its_reader(stream):
            with suppress(OSError, ValueError, AttributeError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def print_error_traceback(error: BaseException) -> None:
    """Print the traceback of an unexpected error.

    The error's message is printed only on request, because the message may quote private text.
    """
    if debugging:
        # Never print local variables: they may include all data.
        stderr_console().print_exception(show_locals=False)
        return
    # Show the first cause first, as Python does.
    for cause in reversed(list_causes(error)):
        for frame in traceback.extract_tb(cause.__traceback__):
            print_stderr_line(f"  {frame.filename}:{frame.lineno} in {frame.name}", 3)
        print_stderr_line(
            f"{type(cause).__module__}.{type(cause).__name__} (its message may quote private text: "
            "audit --debug)",
            3,
        )


def describe_edited_run(arguments: Sequence[str]) -> str:
    """Return a sentence about an argument's run folder that is not as its run left it, or ""."""
    from auditor.records import manifest

    for argument in arguments:
        folder = Path(argument.rpartition("=")[2])
        with suppress(AuditError, OSError):
            unlisted = manifest.FolderEdits((f"no {manifest.MANIFEST}",))
            edits = manifest.find_folder_edits(folder) or unlisted
            if (folder / manifest.RESULT).is_file() and edits.changed:
                return (
                    f"{folder}: expected a folder as its run left it, but it has been edited "
                    f"({', '.join(edits.changed)}) and cannot be read: restore it, or re-run the "
                    "audit"
                )
    return ""


def get_command_line() -> str:
    return "audit " + " ".join(shlex.quote(word) for word in sys.argv[1:])


def print_table(table: Any, styles: Sequence[str] = ()) -> None:
    from rich.console import Console

    from auditor.reports.tables import render_rich_table

    Console().print(render_rich_table(table, styles))


def write_report_folder(
    out: Path, name: str, document: Document, as_json: str, to_stderr: bool = False
) -> None:
    """Write NAME.md, NAME.html and NAME.json to `out`, and print their paths.

    to_stderr: print the paths on stderr instead of stdout.
    """
    import typer

    from auditor.core import disk
    from auditor.reports.files import write_document

    _, report = write_document(out, name, document)
    disk.replace_atomically(out / f"{name}.json", as_json)
    typer.echo(f"report  {report}", err=to_stderr)


def print_verdict(page: Any, subject: Any, name: str, out: Path | None, as_json: bool) -> None:
    """Print a command's verdict as lines or JSON, and write its report to a folder.

    Args:
        page: module that formats `subject`, the judged object.
        name: base name of the report's files.
    """
    import typer

    content = page.format_json(subject)
    if as_json:
        typer.echo(content, nl=False)
    else:
        for line in page.list_terminal_lines(subject):
            typer.echo(line)
    if out is not None:
        document = page.make_document(subject, get_command_line())
        write_report_folder(out, name, document, content, to_stderr=as_json)


def seconds_since_start() -> float:
    """Return the age of this process in seconds."""
    import psutil

    return time.time() - psutil.Process().create_time()


def silence_libraries() -> None:
    """Silence the progress bars and advice of libraries, which would clutter the report."""
    # Before the first import of transformers; settings of the user stay. Otherwise tokenizers
    # prints a warning at every later fork, e.g. of a data loader's workers.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    import logging as stdlib
    import warnings

    from transformers.utils import logging

    logging.disable_progress_bar()
    # transformers reads it once, maybe before this call
    if os.environ["TRANSFORMERS_VERBOSITY"] == "error":
        logging.set_verbosity_error()
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    warnings.filterwarnings("ignore", category=UserWarning, module="peft")
    for library in ("bitsandbytes", "accelerate"):  # these log a line for every layer
        stdlib.getLogger(library).setLevel(stdlib.ERROR)


def _format_led_text(lead: str, text: str) -> Text:
    from rich.text import Text

    # A Text: in a plain string rich would interpret [words] in brackets as markup and drop them.
    return Text(lead).append(escaping.escape_for_terminal(text))


class Terminal(Reporter):
    """Display of progress on stderr: a line with the step and the remaining time.

    If stderr is not a terminal, a log line is printed every minute. verbose: whether to also print
    each stage, notes and the first numbers.
    """

    def __init__(self, progress: Progress, verbose: bool) -> None:
        self._progress = progress
        self._verbose = verbose
        self._task: Any = None
        self._said_threads = False
        self._what, self._begun = "", time.monotonic()  # the current step, and its start
        self._last = self._told = self._begun  # time of the last progress, and of the last line
        self._n_done = 0
        self._longest = (0.0, 0)  # longest interval between two reports, and the work in it

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        with self.transient_progress_bar(name):
            yield
        if self._verbose:
            stderr_console().print(
                _format_led_text(f"{time.perf_counter() - start:7.1f} s  ", name)
            )
        # Wait until the first stage: a refusal prints only one sentence.
        if self._verbose and not self._said_threads:
            import torch

            self._said_threads = True
            used = threads.describe_threads(torch.get_num_threads())
            speed = threads.measure_machine_gflops()
            self.note(f"threads: {used}; {speed:.0f} GFLOP/s in float32")

    @contextmanager
    def transient_progress_bar(self, name: str = "") -> Iterator[None]:
        """Show a progress bar that disappears at the end."""
        self._task = task = self._progress.add_task(escaping.make_printable_line(name), total=None)
        # No step yet: the first reported step starts its clock here.
        self._what, self._last = "", time.monotonic()
        try:
            yield
        finally:
            self._progress.remove_task(task)

    def progress(self, description: str, n_done: int, total: int) -> None:
        now = time.monotonic()
        if description != self._what:  # earlier work does not predict the time of this step
            self._what = description
            self._n_done = 0
            self._longest = (0.0, 0)
            if not n_done:  # the step begins now, perhaps after a long preparation
                self._last = now
            self._begun = self._last
            if self._task is not None:
                self._progress.reset(self._task, total=total)
        self._longest = max(self._longest, (now - self._last, n_done - self._n_done))
        self._last = now
        self._n_done = n_done
        if self._task is not None:
            self._progress.update(
                self._task,
                description=escaping.make_printable_line(description),
                completed=n_done,
                total=total,
            )
        if n_done and not stderr_console().is_terminal and now - self._told >= _A_LINE_EVERY:
            from auditor.reports import phrases

            self._told = now
            time_left = phrases.format_duration(self._estimate_seconds_each() * (total - n_done))
            print_stderr_line(
                f"{description}: {n_done:,} of {total:,}, {time_left} left of this step", 0
            )

    def _estimate_seconds_each(self) -> float:
        """Return the mean seconds of a finished item.

        The longest interval is left out, because it may have been a pause.
        """
        seconds = self._last - self._begun
        n_left_out = self._longest[1]
        if n_left_out < self._n_done:
            return (seconds - self._longest[0]) / (self._n_done - n_left_out)
        return seconds / self._n_done

    def note(self, text: str) -> None:
        if self._verbose:
            stderr_console().print(_format_led_text("           ", text), soft_wrap=True)

    def announce(self, text: str) -> None:
        print_stderr_line(text, 0)

    def show_greedy_recall(self, recall: Mapping[str, Measurement]) -> None:
        parts = [f"{key} → {m.value:.0%}" for key, m in recall.items()]
        if self._verbose:
            stderr_console().print(
                f"           greedy recall by copies: {', '.join(parts)}",
                markup=False,
                highlight=False,
            )


def resume_grid_hint(folder: Path) -> str:
    return f"finished points are kept in {folder}: the same command with -o {folder} continues"


@contextmanager
def open_progress_terminal(verbose: bool = True, interrupted: str = "") -> Iterator[Terminal]:
    """Open a terminal that shows progress.

    interrupted: message after Ctrl-C about the stored answers and the command that continues.
    """
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
            if task.total is None or task.time_remaining is None:
                return Text("")  # rich writes -:--:--
            return Text.assemble(super().render(task), " left of this step")

    with Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeLeft(),
        console=stderr_console(),
        transient=True,
        disable=not stderr_console().is_terminal,
    ) as progress:
        try:
            yield Terminal(progress, verbose)
        except KeyboardInterrupt:
            if interrupted:
                print_stderr_line(f"interrupted; {interrupted}", 130)
            raise
