"""One command makes the table and the power curve of the gate's simulation, small here."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from auditor.cli import call

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "gates" / "simulation.py"


def test_tables_and_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--runs", "2", "--out", str(tmp_path)]
    done = subprocess.run([sys.executable, PROGRAM, *flags], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "simulation.md").read_text()
    assert text == done.stdout
    assert len([line for line in text.splitlines() if line.endswith("% |")]) == 13 + 8
    assert "<svg" in (tmp_path / "power.svg").read_text()
    assert call(["gate", "--plan", "recall=0.2:0.25:0.1"]) == 0  # the command that the table names
    asked = next(
        line.split()[0] for line in capsys.readouterr().out.splitlines() if "not worse than baseline by 0 " in line
    )
    assert f"asks for {asked} secrets" in text
