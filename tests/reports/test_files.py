"""Run folders: what is written comes back, and what cannot be read is refused in one sentence."""

from __future__ import annotations

import contextlib
import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from auditor.core import disk
from auditor.core.errors import AuditError
from auditor.core.result import AuditResult
from auditor.records import result_file
from auditor.reports import files


def test_round_trip(tmp_path: Path, result: AuditResult) -> None:
    files.write_run_reports(tmp_path / "run", result)
    assert result_file.read_result(tmp_path / "run") == result


def test_files_are_private_and_nothing_else_is_left(tmp_path: Path, result: AuditResult) -> None:
    files.write_run_reports(tmp_path, result)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *("journals.json", "manifest.json", "report.html", "report.md", "result.json")
    ]
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {0o600}


def test_rendering_again_changes_nothing(tmp_path: Path, result: AuditResult) -> None:
    files.write_run_reports(tmp_path, result)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert files.rewrite_run_reports(tmp_path) == (tmp_path / "report.html", tmp_path / "report.md")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_rendering_needs_no_torch(tmp_path: Path, result: AuditResult) -> None:
    files.write_run_reports(tmp_path, result)
    code = (
        "import sys; from pathlib import Path; from auditor.reports import files, terminal; folder "
        "= Path(sys.argv[1]); files.rewrite_run_reports(folder); "
        "list(terminal.build_report_screen(files.read_result(folder), folder)); "
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=300)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no result.json in this folder"),
        ("{", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ("[]", "expected an object, got list"),
        ("{}", "expected schema_version 4, got 'none'"),
        (
            '{"schema_version": 2, "tool_version": "0.0.9"}',
            "expected schema_version 4, got 2; audit 0.0.9 made it",
        ),
        ('{"schema_version": 99}', "expected schema_version 4, got 99"),
        ('{"schema_version": 4}', "missing field 'name'"),
    ],
)
def test_what_cannot_be_read_is_refused(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "result.json").write_text(content)
    with pytest.raises(AuditError, match=message) as caught:
        result_file.read_result(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_folder_without_a_result_says_what_it_is(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "plan.json").write_text("{}")
    with pytest.raises(AuditError, match=f"not finished; audit run --resume {run} continues it"):
        result_file.read_result(run)
    (run / "result.json").write_text("{}")
    with pytest.raises(AuditError, match="a folder of runs, not a run"):
        result_file.read_result(tmp_path)
    with pytest.raises(AuditError, match="expected a run folder, got a file"):
        result_file.read_result(run / "result.json")


def test_a_wrong_field_is_named(tmp_path: Path, result: AuditResult) -> None:
    files.write_run_reports(tmp_path, result)
    raw = json.loads((tmp_path / "result.json").read_text())
    raw["findings"][0]["measurements"][0]["n"] = "many"
    (tmp_path / "result.json").write_text(json.dumps(raw))
    with pytest.raises(AuditError, match=r"findings\[0\]\.measurements\[0\]\.n: expected int"):
        result_file.read_result(tmp_path)


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AuditError, match="no such run folder"):
        result_file.read_result(tmp_path / "nowhere")


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path, result: AuditResult) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(AuditError, match="cannot be written"):
        files.write_run_reports(tmp_path / "file" / "run", result)


def test_a_failed_write_keeps_the_old_file(
    tmp_path: Path, result: AuditResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    files.write_run_reports(tmp_path, result)
    before = (tmp_path / "result.json").read_bytes()

    def full(source: str, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(AuditError, match="No space left on device"):
        files.write_run_reports(tmp_path, result)
    assert (tmp_path / "result.json").read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 5


@pytest.mark.parametrize("writes", range(6))
def test_a_folder_with_a_result_has_its_reports(
    tmp_path: Path, result: AuditResult, monkeypatch: pytest.MonkeyPatch, writes: int
) -> None:
    """Killed after any number of writes: a sweep takes a folder with a result for finished, and
    never renders it."""
    left, replace = [None] * writes, disk.replace_atomically

    def killed(*given: object, **more: object) -> None:
        if not left:
            raise KeyboardInterrupt
        left.pop()
        replace(*given, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(disk, "replace_atomically", killed)
    with contextlib.suppress(KeyboardInterrupt):
        files.write_run_reports(tmp_path, result)
    there = {path.name for path in tmp_path.iterdir()}
    assert len(there) == min(writes, 5) and ("result.json" not in there or len(there) == 5)
