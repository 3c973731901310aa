"""An exit code says what happened: 0 success, 1 a gate that failed, 130 an interrupt, 141 a reader
that left."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from auditor.core.errors import AuditError
from auditor.plugins import registry
from auditor.reports import files
from tests.conftest import check_command, save_tiny


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (SystemExit(0), 3, "stopped from inside, by a plug-in or a library: SystemExit(0)"),
        (SystemExit(), 3, "SystemExit(None)"),
        (SystemExit(4), 3, "SystemExit(4)"),
        (EOFError("empty"), 3, "a bug of ours"),  # click's way to say "interrupted"
        (
            BrokenPipeError(errno.EPIPE, "Broken pipe"),
            2,
            "error: Broken pipe",
        ),  # not of our output, which is read
        (GeneratorExit(), 3, "a bug of ours"),
        (BaseException("of a library"), 3, "a bug of ours"),
        (OSError(errno.ENOSPC, "No space left on device"), 2, "error: No space left on device"),
        (
            OSError(errno.EROFS, "Read-only file system", "/a/b"),
            2,
            "error: /a/b: Read-only file system",
        ),
        (KeyboardInterrupt(), 130, ""),
        (AuditError("expected a, got b"), 2, "error: expected a, got b"),
    ],
    ids=repr,
)
def test_what_ends_a_command(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    code: int,
    said: str,
) -> None:
    def raises(*_: object) -> None:
        raise error

    monkeypatch.setattr(files, "rewrite_run_reports", raises)
    check_command("report", "run", code=code)
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("ending", ["raise SystemExit(0)", "import sys; sys.exit()", "exit(0)"])
def test_a_plug_in_that_exits_as_it_is_loaded_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], ending: str
) -> None:
    (tmp_path / "mine.py").write_text(ending)
    check_command("list", "--plugin", tmp_path / "mine.py", code=2)
    assert "cannot load the plug-in" in capsys.readouterr().err


def test_a_file_without_a_plug_in_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text("from auditor.plugins.attack import Attack\n")
    check_command("list", "--plugin", tmp_path / "mine.py", code=2)
    error = capsys.readouterr().err
    assert "expected a plug-in in" in error and "Attack, Probe, Defense" in error


def test_an_installed_plug_in_that_exits_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Entry:
        value = "theirs:module"

        def load(self) -> None:
            raise SystemExit(0)

    monkeypatch.setattr(registry, "_plugin_entry_points", lambda: [Entry()])
    with pytest.raises(AuditError, match="cannot load the plug-in 'theirs:module': SystemExit"):
        registry.list_attacks()


def in_a_process(arguments: list[str], **streams: int) -> subprocess.CompletedProcess[str]:
    """Python flushes its output once more as it ends, and has its own exit code for that."""
    command = [sys.executable, "-c", "from auditor.cli import main; main()", *arguments]
    return subprocess.run(command, text=True, timeout=300, **{"stderr": subprocess.PIPE, **streams})


def test_a_command_that_cannot_say_its_answer_has_not_succeeded() -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("needs /dev/full")
    with open("/dev/full", "w") as full:
        assert in_a_process(["--version"], stdout=full.fileno()).returncode == 2


@pytest.mark.parametrize(
    "arguments", [["list"], ["reproduce", "--list"], ["gate", "--plan", "recall=0.1:0.2"]]
)
def test_a_command_whose_reader_left_ends_quietly(arguments: list[str]) -> None:
    """As in `audit list | head`. One is drawn by rich, which makes an exit of it; the others go
    through typer."""
    read, write = os.pipe()
    os.close(read)
    try:
        ended = in_a_process(arguments, stdout=write)
    finally:
        os.close(write)
    assert (ended.returncode, ended.stderr) == (141, "")


def test_a_refusal_that_nobody_reads_is_one_all_the_same() -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        assert in_a_process(["gate", "nowhere"], stdout=write, stderr=write).returncode == 2
    finally:
        os.close(write)


@pytest.mark.parametrize(
    ("attack", "journal"), [("perplexity", "guesses"), ("extraction-probability", "observations")]
)
def test_answers_about_secrets_of_nobody_are_not_kept_in_silence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], attack: str, journal: str
) -> None:
    save_tiny(tmp_path / "model")
    rows = [
        {"prefix": f"the number of {i} is", "suffix": f" {i * 7919} {i * 31} {i}"} for i in range(6)
    ]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = [
        "--model",
        str(tmp_path / "model"),
        "--data",
        str(tmp_path / "data.jsonl"),
        "--prefix-token",
        "none",
    ]
    sizes = [
        "--prefix-length",
        "3",
        "--suffix-length",
        "2",
        "--setting",
        "white-box",
        "-o",
        str(tmp_path / "run"),
    ]
    check_command("run", *data, *sizes, "--attack", attack)
    file = tmp_path / "run" / f"{journal}.jsonl"
    lines = file.read_text().splitlines()
    file.write_text(
        "\n".join([*lines, json.dumps({**json.loads(lines[0]), "secret": "nobody's"})]) + "\n"
    )
    check_command("run", "--resume", tmp_path / "run", code=2)
    said = " ".join(capsys.readouterr().err.split())
    assert (
        "got 1 of undefended, white-box" in said and "about others: the journal is damaged" in said
    )
