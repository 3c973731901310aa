"""One command makes the table and the power curve of the gate's simulation, small here."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import check_command
from validation.gates import simulation, stopping


def test_tables_and_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    simulation.main(runs=2, out=tmp_path)
    text = (tmp_path / "simulation.md").read_text()
    assert text == capsys.readouterr().out
    assert len([line for line in text.splitlines() if line.endswith("% |")]) == 13 + 8
    assert "<svg" in (tmp_path / "power.svg").read_text()
    # the command that the table names
    check_command("gate", "--plan", "recall=0.2:0.25:0.1")
    asked = next(
        line.split()[0]
        for line in capsys.readouterr().out.splitlines()
        if "not worse than baseline by 0 " in line
    )
    assert f"asks for {asked} secrets" in text


def test_what_stops_early_is_seldom_wrong_and_asks_less(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stopping.main(runs=1000, out=tmp_path)
    text = (tmp_path / "stopping.md").read_text()
    assert text == capsys.readouterr().out
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in text.splitlines()
        if line.endswith("|")
    ]
    on_the_limit = [row for row in rows if "%" in row[1]]
    assert len(on_the_limit) == 8
    for row in on_the_limit:
        assert all(float(rate.rstrip("%")) <= 5 for rate in row[1:3] if rate), row
    # an exact bound is for one look
    assert all(float(row[3].rstrip("%")) > 15 for row in on_the_limit[:4])
    far = [row for row in rows if row[:2] in (["0.05", "0.4"], ["0.01", "0.08"], ["0.01", "0"])]
    assert all(float(row[-1].split()[0]) >= 5 for row in far) and len(far) == 3
