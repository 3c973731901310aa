"""A gate judges what the run wrote: a record that was edited or lost fails by its name, and so does
a baseline's."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from auditor import __version__
from auditor.cli import run_command_line
from auditor.records.manifest import MANIFEST
from auditor.records.table import TABLE
from auditor.reports import files
from tests.gate.finished_runs import edit, finished, outcome
from tests.rows import repacked

Said = pytest.CaptureFixture[str]


def gate(run: Path, *more: str) -> int:
    return run_command_line(["gate", str(run), "--max", "recall=0.05", *more])


def reordered(name: str) -> Callable[[Path], None]:
    """The same, to whoever reads it; not the same bytes."""

    def change(run: Path) -> None:
        (run / name).write_text((run / name).read_text() + "\n")

    return change


def a_guess(run: Path) -> None:
    first, *rest = (run / "guesses.jsonl").read_text().splitlines(keepends=True)
    (run / "guesses.jsonl").write_text(
        json.dumps({**json.loads(first), "ranked": []}) + "\n" + "".join(rest)
    )


EDITS: dict[str, tuple[Callable[[Path], object], str]] = {
    "result": (reordered("result.json"), "result.json has changed since the run ended"),
    "table": (repacked, "secrets.parquet has changed since the run ended"),
    "secrets": (reordered("secrets.json"), "secrets.json has changed since the run ended"),
    "plan": (reordered("plan.json"), "plan.json has changed since the run ended"),
    "journal": (a_guess, "guesses.jsonl has changed since the run ended"),
    "digests": (
        lambda run: (run / "journals.json").unlink(),
        "journals.json is gone since the run ended",
    ),
    "lost": (
        lambda run: (run / "secrets.json").unlink(),
        "secrets.json is gone since the run ended",
    ),
    "lost journal": (
        lambda run: (run / "guesses.jsonl").unlink(),
        "guesses.jsonl is gone since the run ended",
    ),
    "another": (
        lambda run: (run / "observations.jsonl").write_text(""),
        "observations.jsonl has changed since the run",
    ),
}


@pytest.mark.parametrize("name", EDITS)
def test_an_edited_or_lost_record_fails_by_its_name(
    name: str, tmp_path: Path, capsys: Said
) -> None:
    run, (change, said) = finished(tmp_path / "run"), EDITS[name]
    assert gate(run) == 0
    change(run)
    capsys.readouterr()
    assert gate(run, "--inconclusive", "pass") == 1
    assert said in capsys.readouterr().out


def test_what_is_rendered_or_decided_later_changes_nothing(tmp_path: Path) -> None:
    run = finished(tmp_path / "run")
    for name in ("report.html", "frontier.json", "attestation.json"):
        (run / name).write_text("{}")
    assert [gate(run), gate(run)] == [0, 0]


def test_a_run_without_a_manifest_is_refused(tmp_path: Path, capsys: Said) -> None:
    run, base = finished(tmp_path / "run"), finished(tmp_path / "base")
    (base / MANIFEST).unlink()
    assert gate(run, "--baseline", str(base)) == 2
    assert f"{base}: no manifest.json" in capsys.readouterr().err
    (run / MANIFEST).unlink()
    assert gate(run) == 2
    said = capsys.readouterr().err
    assert f"audit 0 wrote none; run the audit again with {__version__}" in said
    (run / MANIFEST).write_text("{}")
    assert gate(run) == 2 and "manifest.json" in capsys.readouterr().err


def test_three_files_are_a_baseline_and_an_edited_one_is_none(tmp_path: Path, capsys: Said) -> None:
    run, whole, base = finished(tmp_path / "run"), finished(tmp_path / "whole"), tmp_path / "base"
    base.mkdir()
    for name in ("result.json", TABLE, MANIFEST):
        shutil.copy(whole / name, base)
    same = ("--max-increase", "recall=0.05", "--baseline", str(base))
    assert gate(run, *same) == 0
    edit(base, TABLE, lambda rows: next(iter(rows.values())).update(lead=[0.0] * 460))
    assert gate(run, *same) == 1
    assert f"{base}: secrets.parquet has changed since the run ended" in capsys.readouterr().out


def test_the_manifest_tells_nothing_of_private_text(tmp_path: Path) -> None:
    """Two runs of the same answers: no digest of them is the same, so that none confirms a guess of
    a text."""
    files = [
        json.loads((finished(tmp_path / name, outcome()) / MANIFEST).read_text())["files"]
        for name in "ab"
    ]
    assert files[0][TABLE] == files[1][TABLE]
    assert files[0]["journals.json"] != files[1]["journals.json"]
    assert not any(name.endswith(".jsonl") for name in files[0])


def share(**changed: object) -> dict[str, object]:
    known = {"name": "recall", "value": 0.5, "low": 0.0, "high": 1.0, "n": 10}
    return {**known, **changed}


@pytest.mark.parametrize("command", ["gate", "report"])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("strata", [{"copies": 1, "population": -5, "extracted": share()}]),
        ("strata", [{"copies": 2, "population": 5, "extracted": share(value="inf")}]),
        ("strata", [{"copies": 2, "population": 5, "extracted": share(n=-7)}]),
        ("measurements", [share(n=10**30)]),
    ],
)
def test_an_impossible_number_in_an_edited_result_is_refused_or_fails(
    tmp_path: Path, capsys: Said, command: str, name: str, value: object
) -> None:
    """Computing with it was a bug of ours, with a traceback."""
    run = finished(tmp_path / "run")
    edit(run, "result.json", lambda result: result["findings"][0].update({name: value}))
    code = gate(run) if command == "gate" else run_command_line(["report", str(run)])
    error = capsys.readouterr().err
    assert code in ((1, 2) if command == "gate" else (0, 2)) and "Traceback" not in error
    if code == 2:
        assert "has been edited (result.json)" in error and error.count("\n") == 1


def test_a_failure_on_a_folder_as_its_run_left_it_is_a_bug_of_ours(
    tmp_path: Path, capsys: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = finished(tmp_path / "run")
    monkeypatch.setattr(files, "rewrite_run_reports", lambda *_: 1 / 0)
    assert run_command_line(["report", str(run)]) == 3
    assert "a bug of ours" in capsys.readouterr().err
    (run / MANIFEST).unlink()
    assert run_command_line(["report", str(run)]) == 2
    assert "has been edited (no manifest.json)" in capsys.readouterr().err
