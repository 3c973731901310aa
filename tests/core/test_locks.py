"""One process a folder; what a killed one left blocks nobody."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from auditor.core import disk, locks
from auditor.core.errors import AuditError
from auditor.records.folder import RunFolder

HOLD = (
    "import sys, pathlib; from auditor.core import locks; l = "
    "locks.acquire_folder_lock(pathlib.Path(sys.argv[1]))"
)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = RunFolder.create(tmp_path / "run", "name", {"seed": 7})
    folder.close()
    return folder.path


@pytest.fixture
def other(run: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the folder until it is killed."""
    code = f"{HOLD}; print('held', flush=True); sys.stdin.read()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", code, str(run)], **pipes) as process:  # type: ignore[call-overload]
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_a_second_process_is_refused_by_the_pid_of_the_first(
    run: Path, other: subprocess.Popen[str]
) -> None:
    before = sorted(os.listdir(run))
    for _ in range(2):  # the first refusal does not forget who it was
        with pytest.raises(AuditError, match=f"in use by process {other.pid}: wait"):
            RunFolder.reopen(run)
    with pytest.raises(AuditError, match=f"in use by process {other.pid}"):
        RunFolder.create(run, "name", {})
    with (
        pytest.raises(AuditError, match=f"in use by process {other.pid}"),
        locks.lock_folder(run, "sweep.json"),
    ):
        raise AssertionError("nobody else may be here")
    assert sorted(os.listdir(run)) == before


def test_the_lock_of_a_killed_process_does_not_block(
    run: Path, other: subprocess.Popen[str]
) -> None:
    other.kill()
    other.wait()
    assert (run / locks.LOCK).read_text() == str(other.pid)
    assert RunFolder.reopen(run).plan() == {"seed": 7}
    assert (run / locks.LOCK).read_text() == str(os.getpid())


def test_a_folder_that_is_closed_is_free(run: Path) -> None:
    RunFolder.reopen(run).close()
    subprocess.run([sys.executable, "-c", HOLD, str(run)], check=True, timeout=300)


def test_one_process_may_hold_a_folder_several_times(run: Path) -> None:
    first, second = RunFolder.reopen(run), RunFolder.reopen(run)
    first.close()
    refused = subprocess.run(
        [sys.executable, "-c", HOLD, str(run)], capture_output=True, timeout=300
    )
    assert refused.returncode and f"in use by process {os.getpid()}".encode() in refused.stderr
    second.close()


def test_what_a_killed_process_left_half_written_goes_away(tmp_path: Path) -> None:
    (tmp_path / ".audit-x7.tmp").write_text("{")
    (tmp_path / "mine.tmp").write_text("a user's own")
    with locks.lock_folder(tmp_path, "training.json"):
        assert sorted(os.listdir(tmp_path)) == [locks.LOCK, "mine.tmp"]
    assert os.listdir(tmp_path) == ["mine.tmp"]


def test_a_folder_in_which_nothing_was_made_does_not_stay(tmp_path: Path) -> None:
    with locks.lock_folder(tmp_path / "new", "mark"):
        pass
    assert not (tmp_path / "new").exists()
    with locks.lock_folder(tmp_path / "new", "mark"):
        disk.replace_atomically(tmp_path / "new" / "mark", "here")
    assert sorted(os.listdir(tmp_path / "new")) == [locks.LOCK, "mark"]
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700


def test_a_file_is_replaced_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever happens at whichever step; and it is private though what it replaces was not."""
    path = tmp_path / "file"
    path.write_text("old")
    path.chmod(0o644)
    for step in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(
                os, step, lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device"))
            )
            with pytest.raises(AuditError, match="file: cannot be written: No space left"):
                disk.replace_atomically(path, "new", sync=True)
        assert os.listdir(tmp_path) == ["file"] and path.read_text() == "old"
    disk.replace_atomically(path, "new", sync=True)
    assert path.read_text() == "new" and stat.S_IMODE(path.stat().st_mode) == 0o600
