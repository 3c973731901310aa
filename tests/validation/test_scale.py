"""The cost of runs by number of secrets: texts of the asked number, and a picture of the table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from validation.speed import scale

TABLE = """secrets,processor seconds,"peak memory, MB"
10,2,60
100,3,61
1000,13,70
10000,113,150
"""


def test_texts_are_rows_of_the_asked_number(tmp_path: Path) -> None:
    scale.write_texts(tmp_path / "data.jsonl", 25)
    lines = (tmp_path / "data.jsonl").read_text().splitlines()
    texts = [json.loads(line)["text"] for line in lines]
    assert len(set(texts)) == 25
    assert {len(text.split()) for text in texts} <= set(range(8, 13))


def test_size_0_draws_the_rows_and_keeps_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(scale, "EVIDENCE", tmp_path)
    monkeypatch.setattr(scale, "TABLE", tmp_path / "secrets.csv")
    scale.TABLE.write_text(TABLE)
    scale.main(tmp_path, (0,))
    assert scale.TABLE.read_text() == TABLE
    drawn = (tmp_path / "cost.svg").read_text()
    assert "processor seconds: power 1.00" in drawn
    assert "at last 8.9 kB a secret" in drawn
