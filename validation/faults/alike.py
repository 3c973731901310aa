"""Compare the files of two commands, except times, memory use and the cost of API calls.

Numbers may differ by 1e-5, because batches of another size sum in another order; words, ids,
tokens and counts must be equal. Weights and tuned prompts are compared bit by bit, journals secret
by secret, and reports by their words and numbers. Of a drawing only its text is compared, because
its lines leave out points that are almost on a straight line.
"""

from __future__ import annotations

import json
import math
import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from auditor.core import disk
from auditor.records.manifest import MANIFEST, NO_EDITS, PRIVATE, find_folder_edits

# Fields with dates, durations and memory.
_TIMES = {
    *("created", "seconds", "seconds_of_last_run", "timings", "training_seconds"),
    *("milliseconds_per_token", "peak_memory_mb", "gemm"),
}
_CLOSE = 1e-5
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e-?\d+)?")
# Dates, durations and costs in reports: "0.3 s", "1.35 times as long".
_SHOWN = re.compile(
    r"\s?A token takes [\d.,]+ times as long\."
    r"|paid for [\d,]+ tokens in [\d,]+ requests \([^)]*\)"
    r"|(?<=Time per token)(?::|</d[td]>|<d[td]>|\s|–|[\d.,]+ ms)+"
    # without the time of a resumed configuration, a column less; `result.json` has the counts
    r"|Cost of each configuration[^|<]*(?:\|[^\n]*\n)+|(?s:<table id=\"rows-table\">.*?</table>)"
    r"|\d{4}-\d\d-\d\d[T ]\d\d:\d\d(?::\d\d)?(?:\+00:00| UTC)?"
    r"|[\d.,]+\s?(?:times as long|GFLOP/s|ms|MB|GB|s|min|seconds|minutes)\b"
)
_LINES = re.compile(r'\sd="[^"]*"')


def differences(found: Path, expected: Path) -> list[str]:
    """Return at most one sentence for each file of a folder that differs from the expected
    folder.
    """
    names = [{str(path.relative_to(root)) for path in _files(root)} for root in (found, expected)]
    told = [f"{name} is missing" for name in sorted(names[1] - names[0])]
    told += [f"{name} is left over" for name in sorted(names[0] - names[1])]
    return told + [
        why
        for name in sorted(names[0] & names[1])
        if (why := _alike(found / name, expected / name))
    ]


def _files(root: Path) -> Iterator[Path]:
    return (path for path in root.rglob("*") if path.is_file() and path.name != ".lock")


def left_over(stand: Path) -> list[str]:
    """Return the scratch files that were never renamed, in this folder and its sub-folders."""
    return [
        str(path.relative_to(stand))
        for path in stand.rglob("*")
        if not path.is_symlink() and (disk.is_scratch_file(path) or ".audit-scratch-" in path.name)
    ]


def _alike(found: Path, expected: Path) -> str:
    """Return how a file differs from the expected one; "" if they are equal."""
    one, other = found.read_bytes(), expected.read_bytes()
    if one == other:
        return ""
    kind = found.suffix
    if kind == ".jsonl":
        mine, theirs = _lines(one), _lines(other)
        if found.name != "observations.jsonl" and len(one.splitlines()) != len(other.splitlines()):
            return f"{found.name}: {len(one.splitlines())} lines, not {len(other.splitlines())}"
    elif found.name in (MANIFEST, PRIVATE):  # digests of files with times, and a random number
        if find_folder_edits(found.parent) != NO_EDITS:
            return f"{found.name} does not fit the files"
        mine, theirs = sorted(json.loads(one)), sorted(json.loads(other))
    elif kind == ".json":
        mine, theirs = json.loads(one), json.loads(other)
    elif kind == ".pt":
        mine, theirs = (torch.load(path, weights_only=True) for path in (found, expected))
    elif kind == ".parquet":
        mine, theirs = _numbers(found), _numbers(expected)
    elif kind == ".sqlite":
        mine, theirs = _rows(found), _rows(expected)
    elif kind in (".md", ".html", ".csv", ".tex", ".txt"):
        mine, theirs = _told(one), _told(other)
    else:
        return f"{found.name} differs"
    at = _unlike(mine, theirs)
    return f"{found.name}{at}" if at else ""


def _lines(content: bytes) -> dict[str, Any]:
    """Return the records of a journal by cell and secret; the last record of a secret counts."""
    found = {}
    for line in content.splitlines():
        record = json.loads(line)
        found[f"{record.get('cell') or record.get('target') or ''} {record['secret']}"] = record
    return found


def _numbers(path: Path) -> dict[str, Any]:
    """Return the values of a run's table, keyed by the other columns of their rows."""
    rows = pd.read_parquet(path)
    about = (" ".join(map(str, row)) for row in rows.drop(columns="value").itertuples(index=False))
    return {
        name: "nan" if math.isnan(x) else x for name, x in zip(about, rows["value"], strict=True)
    }


def _rows(path: Path) -> list[Any]:
    """Return all rows of the database, which holds the answers that a server was paid for."""
    with closing(sqlite3.connect(path)) as held:
        names = [
            name for (name,) in held.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        ]
        return sorted(repr(row) for name in names for row in held.execute(f"SELECT * FROM {name}"))


def _told(content: bytes) -> list[Any]:
    """Return the words and the numbers of a report, without times."""
    text = _SHOWN.sub("", _LINES.sub("", content.decode()))
    return [_NUMBER.split(text), [float(number) for number in _NUMBER.findall(text)]]


def _unlike(one: Any, other: Any) -> str:
    """Return the place where two values differ, and how; "" if they are equal."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return "" if torch.equal(one, other) else " differs"
    if (
        isinstance(one, float | int)
        and isinstance(other, float | int)
        and not isinstance(one, bool)
    ):
        return (
            ""
            if math.isclose(one, other, rel_tol=_CLOSE, abs_tol=_CLOSE)
            else f": {one} is not {other}"
        )
    if isinstance(one, dict) and isinstance(other, dict):
        if set(one) != set(other):
            return f": {sorted(map(str, set(one) ^ set(other)))[:3]} on one side"
        pairs = [(key, one[key], other[key]) for key in one if key not in _TIMES]
    elif isinstance(one, list | tuple) and isinstance(other, list | tuple):
        if len(one) != len(other):
            return f": {len(one)} of something, not {len(other)}"
        pairs = list(zip(range(len(one)), one, other, strict=True))
    else:
        if isinstance(one, str) and isinstance(other, str):
            one, other = _SHOWN.sub("", one), _SHOWN.sub("", other)
        return "" if one == other else f": {str(one)[:60]!r} is not {str(other)[:60]!r}"
    return next(
        (f"[{key}]{at}" for key, mine, theirs in pairs if (at := _unlike(mine, theirs))), ""
    )
