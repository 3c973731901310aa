"""An exit code says what happened: 0 is success, 1 a gate that failed, 130 a user's interrupt, and nothing else is."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from auditor.cli import call
from auditor.core.errors import AuditError
from auditor.plugins import registry
from auditor.reports import files


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (SystemExit(0), 3, "stopped from inside, by a plug-in or a library: SystemExit(0)"),
        (SystemExit(), 3, "SystemExit(None)"),
        (SystemExit(4), 3, "SystemExit(4)"),
        (EOFError("empty"), 3, "a bug of ours"),  # click's way to say "interrupted"
        (BrokenPipeError(errno.EPIPE, "Broken pipe"), 3, "nobody reads the output"),  # click: exit code 1
        (GeneratorExit(), 3, "a bug of ours"),
        (BaseException("of a library"), 3, "a bug of ours"),
        (OSError(errno.ENOSPC, "No space left on device"), 2, "error: No space left on device"),
        (OSError(errno.EROFS, "Read-only file system", "/a/b"), 2, "error: /a/b: Read-only file system"),
        (KeyboardInterrupt(), 130, ""),
        (AuditError("expected a, got b"), 2, "error: expected a, got b"),
    ],
    ids=repr,
)
def test_what_ends_a_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: BaseException, code: int, said: str
) -> None:
    def raises(*_: object) -> None:
        raise error

    monkeypatch.setattr(files, "render_all", raises)
    assert call(["report", "run"]) == code
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("ending", ["raise SystemExit(0)", "import sys; sys.exit()", "exit(0)"])
def test_a_plug_in_that_exits_as_it_is_loaded_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], ending: str
) -> None:
    (tmp_path / "mine.py").write_text(ending)
    assert call(["list", "--plugin", str(tmp_path / "mine.py")]) == 2
    assert "cannot load the plug-in" in capsys.readouterr().err


def test_an_installed_plug_in_that_exits_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Entry:
        value = "theirs:module"

        def load(self) -> None:
            raise SystemExit(0)

    monkeypatch.setattr(registry.importlib.metadata, "entry_points", lambda group: [Entry()])
    with pytest.raises(AuditError, match="cannot load the plug-in 'theirs:module': SystemExit"):
        registry.attacks()


@pytest.mark.parametrize(("out", "code"), [("/dev/full", 2), ("pipe", 3)])
def test_a_command_that_cannot_say_its_answer_has_not_succeeded(out: str, code: int) -> None:
    """In a process of its own: Python flushes stdout once more as it ends, and has its own exit code for that."""
    if out == "/dev/full" and not os.path.exists(out):
        pytest.skip("needs /dev/full")
    if out == "pipe":
        read, write = os.pipe()
        os.close(read)
    else:
        write = os.open(out, os.O_WRONLY)
    try:
        command = [sys.executable, "-c", "from auditor.cli import main; main()", "--version"]
        assert subprocess.run(command, stdout=write, stderr=subprocess.PIPE, timeout=300).returncode == code
    finally:
        os.close(write)
