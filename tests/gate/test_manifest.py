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
