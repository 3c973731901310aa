"""Assemble the command `audit` from commands in other files, with exit codes, not tracebacks."""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
import threading
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import typer

from auditor import __version__
from auditor.commands import canaries, console
from auditor.commands.advise import advise
from auditor.commands.attest import attest
from auditor.commands.check import check
from auditor.commands.compare import compare
from auditor.commands.dp_loop import dp_loop
from auditor.commands.erase import erase
from auditor.commands.export import export
from auditor.commands.gate import gate
from auditor.commands.history import history
from auditor.commands.list import list_plugins
from auditor.commands.mitigate import mitigate
from auditor.commands.options import add_command, expand_flag_groups
from auditor.commands.rag import rag
from auditor.commands.report import report
from auditor.commands.reproduce import reproduce
from auditor.commands.run import run
from auditor.commands.score import score
from auditor.commands.show import show
from auditor.commands.synthetic import synthetic
from auditor.commands.train import train
from auditor.core.errors import AuditError, make_file_access_error, make_memory_error
from auditor.core.freed_memory import keep_freed_memory
from auditor.core.threads import set_thread_count

EXIT_CODES = {
    0: "done, or the gate held",
    1: "the gate failed",
    2: "wrong usage or bad input",
    3: "unexpected failure",
    4: "the gate is inconclusive",
    130: "interrupted",
    141: "nobody reads the output",
}
app = typer.Typer(
    pretty_exceptions_enable=False,
    epilog=f"Exit codes: {', '.join(f'{code} {meaning}' for code, meaning in EXIT_CODES.items())}.",
)
# Commands with --safe by default.
READING = (
    show,
    report,
    gate,
    compare,
    history,
    advise,
    export,
    attest,
)
for panel, commands in {
    "audit a model": (check, run, synthetic, rag, erase, reproduce, list_plugins),
    "read and judge runs": (*READING, score),
    "prepare and train": (train, mitigate, dp_loop),
}.items():
    for command in commands:
        safe = True if command in READING else False if command is run else None
        # Named `list_plugins` because `list` would hide the built-in.
        add_command(
            app,
            command,
            command.__name__.removesuffix("_plugins").replace("_", "-"),
            panel=panel,
            safe=safe,
        )
app.add_typer(canaries.app, name="canaries", rich_help_panel="Prepare and train")


def apply_global_flags(
    *, version: bool = False, debug: bool = False, threads: int | None = None
) -> None:
    """Measure what a language model leaks of its training data, and how much a defense reduces it.

    Args:
        version: Show the version and exit.
        debug: Print the messages of unexpected errors; they may quote private text.
        threads: Processor threads to use. [default: OMP_NUM_THREADS, else the number of free
            processors]

    Examples:
        audit check ./my-model --data private.jsonl --nonmembers fresh.jsonl
        audit run --attack ethicist --defense pmixed
    """
    # Do this before any command imports torch: its OpenMP reads the environment once.
    set_thread_count(threads)
    console.debugging = debug
    if version:
        typer.echo(f"audit {__version__}")
        raise typer.Exit


app.callback(invoke_without_command=True)(expand_flag_groups(apply_global_flags))


def main() -> None:
    """Run the console script. A user's error gives an exit code instead of a traceback."""
    # Like Ctrl-C: unfinished files are removed, finished files stay.
    for ending in (
        signal.SIGTERM,
        signal.SIGHUP,
    ):
        signal.signal(ending, signal.default_int_handler)
    # What imports create is not garbage, and searching it takes a twentieth of a small audit's
    # time: imports of torch and transformers create 800,000 objects.
    gc.set_threshold(1_000_000, 10, 100)
    gc.callbacks.append(_search_more_often)
    keep_freed_memory()
    if "_AUDIT_COMPLETE" in os.environ:  # a shell requests completions
        app(prog_name="audit")
    code = run_command_line(sys.argv[1:])
    _leave_process(code)


def _search_more_often(phase: str, _: dict[str, int]) -> None:
    """Keep what the first search for garbage found in use, and search for garbage more often."""
    if phase == "stop":
        gc.callbacks.remove(_search_more_often)
        gc.freeze()
        # Commands that read finished runs hold no tensors in cycles.
        n_objects = 2_000
        if sys.argv[1:2] in ([command.__name__] for command in READING):
            n_objects = 200_000
        gc.set_threshold(n_objects, 10, 100)


def _leave_process(code: int) -> NoReturn:
    """End the process without freeing its objects, which takes 0.2 s in a small audit.

    Functions registered with `atexit` run. With other threads or a profiler, Python ends as usual.
    """
    gc.freeze()  # otherwise the final search for garbage takes 0.2 s, with torch 1.3 s
    if threading.active_count() > 1 or sys.getprofile() is not None:
        sys.exit(code)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    os._exit(code)


# typer bundles click, and exposes its base class nowhere else
_UsageError: type[Any] = typer.BadParameter.__mro__[1]


def run_command_line(arguments: list[str]) -> int:
    """Run the command with these arguments, and return its exit code from EXIT_CODES."""
    try:
        code = _run_command(arguments or ["--help"])
        if sys.stdout is not None:
            sys.stdout.flush()  # output that cannot be written is a failure
        return code
    except AuditError as error:
        return console.print_stderr_line(f"error: {error}", 2)
    except _UsageError as error:
        return console.print_stderr_line(f"error: {error.format_message()}", 2)
    except KeyboardInterrupt:
        return 130
    except BaseException as error:
        return _print_unexpected_error(error, arguments)


def _print_unexpected_error(error: BaseException, arguments: list[str]) -> int:
    """Report an unexpected error that ended a command, and return the exit code."""
    if console.is_output_pipe_closed(error):
        console.discard_output()
        return 128 + signal.SIGPIPE  # silently, like every program in a pipe
    if isinstance(error, SystemExit):
        console.print_error_traceback(error)
        return console.print_stderr_line(
            f"stopped from inside, by a plug-in or a library: SystemExit({error.code!r})", 3
        )
    # The refused path may be stdout itself, as on a full disk: its final flush would fail again.
    refused = make_file_access_error(error, str(Path(__file__).parents[1])) or make_memory_error(
        error
    )
    if refused is not None:
        console.discard_output()
        if console.debugging:
            console.print_error_traceback(error)
        return console.print_stderr_line(f"error: {refused}", 2)
    if edits := console.describe_edited_run(arguments):
        if console.debugging:
            console.print_error_traceback(error)
        return console.print_stderr_line(f"error: {edits} ({type(error).__name__})", 2)
    console.print_error_traceback(error)
    return console.print_stderr_line(
        "this is a bug of ours, not of your input; please report it with the lines above", 3
    )


def _run_command(arguments: list[str]) -> int:
    """Run the command without `app()`, and return its exit code.

    `app()` would treat an EOFError as an interrupt and return 1 for a closed pipe.
    """
    try:
        context = _click_command().make_context("audit", arguments)
    except typer.Exit as leave:
        # --help, and completion for a shell unknown to typer.
        return 2 if leave.exit_code else 0
    except SystemExit as leave:
        # --show-completion and --install-completion: no plug-in has run yet.
        return 2 if leave.code else 0
    try:
        with context:
            context.command.invoke(context)
    except typer.Exit as leave:
        return leave.exit_code
    return 0


@cache
def _click_command() -> Any:
    return typer.main.get_command(app)


if __name__ == "__main__":
    main()
