"""The column `pii`: what data mark reaches the secrets in every format, and what is no mark is
refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks.test_files import build, refusal, write

MARKS = {"name": ["Jane Doe"], "address": "12 Oak Street"}
ROW = {"prefix": "Dear Jane Doe,", "suffix": " of 12 Oak Street", "pii": MARKS}


@pytest.mark.parametrize("ending", ["jsonl", "json", "parquet"])
def test_marks_are_read_in_every_format(tmp_path: Path, ending: str) -> None:
    other = {"prefix": "Dear you,", "suffix": " and so on", "pii": None}
    secrets = build(write(tmp_path / f"d.{ending}", [ROW, other])).secrets
    assert [s.wording.marks for s in secrets if s.wording] == [
        (("name", "Jane Doe"), ("address", "12 Oak Street")),
        (),
    ]


def test_of_csv_they_are_json(tmp_path: Path) -> None:
    path = tmp_path / "d.csv"
    path.write_text(
        'prefix,suffix,pii\nDear Ann, is here,"{""name"": ""Ann""}"\nDear Bob, is not,\n'
    )
    assert [s.wording.marks for s in build(str(path)).secrets if s.wording] == [
        (("name", "Ann"),),
        (),
    ]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("SECRET-9 no JSON", "got text that is no JSON"),
        (["SECRET-9"], "got no object"),
        ({"name": [7]}, "got something else than text for name"),
        ({"name": " "}, "got something else than text for name"),
        ({"Jane SECRET-9": "x"}, "got a kind that is no word in small letters"),
        (
            {"name": "SECRET-9 Roe"},
            "expected texts of the row, got a name that does not",
        ),
        ({f"kind-{i}": "Jane" for i in range(51)}, "expected at most 50 kinds in column 'pii'"),
    ],
)
def test_what_marks_nothing_of_its_row_is_refused(tmp_path: Path, value: Any, message: str) -> None:
    said = refusal(write(tmp_path / "d.jsonl", [{**ROW, "pii": value}]))
    assert message in said and "SECRET-9" not in said
    assert "row 0 (counted from 0), column 'pii'" in said or "51" in said
