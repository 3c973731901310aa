"""`audit dp-loop`: test if your private training loop delivers the epsilon that it claims."""

from __future__ import annotations

import contextlib
import inspect
import os
import re
import shlex
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import typer

from auditor.commands import console
from auditor.core import disk
from auditor.core.errors import AuditError, refuse_unknown_names
from auditor.core.python_files import add_script_folder, load_python_file


def dp_loop(
    script: Path,
    *,
    function: str | None = None,
    out: Path | None = None,
    gate: bool = False,
    junit: Path | None = None,
    minutes: float = 2.0,
    seed: int = 0,
    check: list[str] | None = None,
) -> None:
    """Crash-test a DP training loop: does it deliver the epsilon that it claims?

    Runs the unchanged training on tiny models and generated records, and reads the gradient of
    every step when the optimizer gets it. `train` trains the given model on records of token ids,
    and returns (model, claim); claim is a mapping with noise_multiplier, max_grad_norm,
    sample_rate, steps and delta. A file that makes a transformers Trainer (as `trainer`, in
    `main()` or as a script) defines this mapping as CLAIM.

    Args:
        script (TRAIN.py): Python file with `train(model, records)`, or a Trainer; the test runs it.
        function (NAME): Function in TRAIN.py that trains, or that makes a Trainer.
        out (-o, --out DIR): Folder for dp-loop.html, .md and .json.
        gate: Exit 1 if the training is broken, 4 if the test cannot tell.
        junit (FILE.xml): Write the checks as JUnit XML.
        minutes: Time limit of the test.
        seed: Seed of the trainings that the test runs.
        check (NAME): Report only this check, at the same significance level; repeatable.

    Examples:
        audit dp-loop my_train.py
        audit dp-loop my_train.py --gate -o crash-test
    """
    if not 0 < minutes < 1e4:
        raise AuditError(f"expected --minutes above 0 and below 10,000, got {minutes:g}")
    console.silence_libraries()
    from auditor.crash import report
    from auditor.crash.checks import CHECKS
    from auditor.crash.trial import crash_test

    refuse_unknown_names("check", check or (), CHECKS)
    loop_function = _load_dp_loop_training_function(script, function)
    with (
        _kill_process_if_block_exceeds(
            60 * minutes + 30
        ),  # the test ends by itself at `minutes`, unless a training never returns
        console.open_progress_terminal(verbose=False) as reporter,
        contextlib.redirect_stdout(sys.stderr),  # output of the training is not part of the report
        reporter.transient_progress_bar(),
    ):
        tested = crash_test(
            _wrap_training_errors(loop_function, script),
            minutes=minutes,
            seed=seed,
            tell=partial(reporter.progress, "trainings watched"),
        ).keep_named_checks(check or ())
    source = str(script)
    again = f"audit dp-loop {shlex.quote(str(script))}"
    if function is not None:
        again += f" --function {shlex.quote(function)}"
    for line in report.format_crash_test_lines(tested, again):
        typer.echo(line)
    if junit is not None:
        disk.replace_atomically(junit, report.render_crash_test_junit(tested, again))
    if out is not None:
        page = report.build_crash_test_document(tested, source, again)
        console.write_report_folder(
            out, "dp-loop", page, report.render_crash_test_json(tested, again)
        )
    if gate:
        raise typer.Exit({"broken": 1, "cannot tell": 4}.get(tested.verdict, 0))


@contextlib.contextmanager
def _kill_process_if_block_exceeds(seconds: float) -> Iterator[None]:
    """Kill this process and its new children if the block takes longer than `seconds`.

    The user's training in the block may hang.
    """
    # Imported here: `time_limit` needs modules of Unix, and --help works without them.
    import psutil

    from auditor.crash.time_limit import LONG, list_training_processes

    # Compared by pid and start time: a reused pid is a different process.
    before = set(psutil.Process().children())

    def end() -> None:
        for process in list_training_processes(before):
            with contextlib.suppress(psutil.Error):
                process.kill()
        # Bypasses Python's streams and clean-up: the main thread may hang in a library with their
        # locks.
        os.write(2, f"error: {LONG}\n".encode())
        os._exit(2)

    timer = threading.Timer(seconds, end)
    # Otherwise Python would wait for it at the end of the command.
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


_USUAL = ("train", "trainer", "main")  # names searched in a file without --function


def _load_dp_loop_training_function(script: Path, function: str | None) -> Callable[..., Any]:
    """Return the training in a user's file as a function of (model, records).

    The file defines such a function, or makes a Trainer. `function` is its name. If it is None, the
    usual names are tried, and without any of them, the file is run as a script. Raise AuditError if
    the file has no training.
    """
    from auditor.crash import trainers

    module, entry = _load_training_script(script, f"audit_training_{script.stem}")
    if function is None:
        names = [name for name in _USUAL if hasattr(module, name)]
    else:
        names = [function]
    # Imported under its own name, the file created no Trainer: the training may be below `if
    # __name__ == "__main__"`.
    if not names and entry is None:
        module, entry = _load_training_script(script, "__main__")
    if entry is None:
        if names:
            entry = getattr(module, names[0], None)
        if not callable(entry) and not trainers.is_crash_test_trainer(entry):
            expected = "a function `train(model, records)` or a Trainer"
            if function is not None:
                expected = f"a function {function!r}"
            raise AuditError(
                f"expected {expected} in {str(script)!r}; name another with --function"
            )
    return _wrap_training_entry(entry, script, getattr(module, "CLAIM", None))


def _wrap_training_entry(trainer: Any, script: Path, claim: Any) -> Callable[..., Any]:
    from auditor.crash import trainers

    if not trainers.is_crash_test_trainer(trainer):
        try:
            # bind() calls nothing: it only tests whether a call without arguments is possible.
            inspect.signature(trainer).bind()
        except TypeError:  # it has parameters: the model and the records
            function: Callable[..., Any] = trainer
            return function
        with _attribute_script_errors(
            f"cannot run {getattr(trainer, '__name__', 'the entry')!r} of {str(script)!r}:"
        ):
            trainer = trainers.find_crash_test_trainer(trainer)
    if claim is None:
        raise AuditError(
            f"expected `CLAIM` in {str(script)!r}, a mapping of what its Trainer claims"
        )
    return trainers.wrap_crash_test_trainer(trainer, claim)


def _load_training_script(script: Path, name: str) -> tuple[Any, Any]:
    """Run the file as a module called `name`.

    Return the module, then the Trainer whose training it starts; None if it starts none.
    """
    from auditor.crash import trainers

    trainers_found: list[Any] = []
    with (
        _attribute_script_errors(f"cannot load {str(script)!r}:"),
        trainers.catch_trainer_before_training_context(trainers_found),
    ):
        add_script_folder(script)
        module = load_python_file(script, name, "a Python file with a training function")
    return module, trainers_found[0] if trainers_found else None


@contextlib.contextmanager
def _attribute_script_errors(description: str, of_device: str = "") -> Iterator[None]:
    """Convert errors of a user's file into AuditError.

    Args:
        description: noun for the action that failed, used in the message.
        of_device: text added to the message if an accelerator raised the error.
    """
    try:
        yield
    except AuditError:
        raise
    except (Exception, SystemExit) as error:
        hint = of_device if re.search("CUDA|cuda|NVIDIA", str(error)) else ""
        raise AuditError(f"{description} {type(error).__name__}: {error}{hint}") from error


def _wrap_training_errors(train: Callable[..., Any], script: Path) -> Callable[..., Any]:
    """Return the training as a function that converts errors into AuditError."""

    def run(model: Any, records: Any) -> Any:
        advice = "; the crash test trains on the processor: leave the model on its own device"
        with _attribute_script_errors(f"the training in {str(script)!r} raised", advice):
            return train(model, records)

    return run
