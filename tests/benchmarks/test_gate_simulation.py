"""One command makes the table and the power curve of the gate's simulation, small here."""

from __future__ import annotations

from pathlib import Path

import pytest

from auditor.cli import call
from benchmarks.checks.gates import simulation


def test_tables_and_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    simulation.main(runs=2, out=tmp_path)
    text = (tmp_path / "simulation.md").read_text()
    assert text == capsys.readouterr().out
    assert len([line for line in text.splitlines() if line.endswith("% |")]) == 13 + 8
    assert "<svg" in (tmp_path / "power.svg").read_text()
    assert call(["gate", "--plan", "recall=0.2:0.25:0.1"]) == 0  # the command that the table names
    asked = next(
        line.split()[0] for line in capsys.readouterr().out.splitlines() if "not worse than baseline by 0 " in line
    )
    assert f"asks for {asked} secrets" in text
