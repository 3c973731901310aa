"""The table of a run as tests write and edit it: configurations by name, what they found by
quantity."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from auditor.conclusions.outcomes import ValuesBySecret
from auditor.core.nouns import CellKey
from auditor.records import table
from auditor.records.table import MEASURED, TABLE, Column, SuffixLogProbs
from auditor.statistics.judging import Outcome


def judge_columns(
    ids: tuple[str, ...],
    hit: Any,
    any_hit: Any,
    score: Any,
    repeats: tuple[int | None, ...],
    member: Any,
    distance: Any,
    tolerance: Any,
    traits: Mapping[str, Any] | None = None,
) -> Outcome:
    """Judged guesses, column by column."""
    columns = {"hit": hit, "any_hit": any_hit, "distance": distance, "tolerance": tolerance}
    return Outcome(ids, member, repeats, {**columns, "score": score, **(traits or {})})


def row_of(found: ValuesBySecret) -> dict[str, Any]:
    """`ids`, `member`, `repeats`, and each quantity by its name, as lists."""
    return _row(list(found.list_columns(CellKey("", "", ""))))


def read_rows(folder: Path) -> dict[str, dict[str, Any]]:
    """As `row_of`, by configuration."""
    cells: dict[str, list[Column]] = {}
    for column in table.read_secrets_table(folder, MEASURED):
        cells.setdefault(str(column.cell), []).append(column)
    return {cell: _row(columns) for cell, columns in cells.items()}


def _row(columns: list[Column]) -> dict[str, Any]:
    first, *_ = columns
    about = {"ids": first.ids, "member": first.member, "repeats": first.repeats}
    return {
        **{name: np.asarray(held, object).tolist() for name, held in about.items()},
        **{c.quantity: list(c.values) for c in columns},
    }


def write_rows(folder: Path, rows: Mapping[str, Mapping[str, Any]]) -> None:
    """The inverse of `read_rows`."""
    about = ("ids", "member", "repeats")
    table.write_secrets_table(
        folder,
        [
            Column(
                MEASURED,
                CellKey.parse_cell_key(cell),
                name,
                row["ids"],
                values,
                row["member"],
                row["repeats"],
            )
            for cell, row in rows.items()
            for name, values in row.items()
            if name not in about
        ],
    )


def repacked(folder: Path) -> None:
    """The same to whoever reads it, not the same bytes."""
    pq.write_table(pq.read_table(folder / TABLE), folder / TABLE, compression="none")


def pack_suffixes(suffixes: Mapping[str, tuple[float, ...]]) -> SuffixLogProbs:
    """The nats of each token, by secret, as a run folder's reader returns them."""
    ends = np.cumsum([*map(len, suffixes.values())], dtype=np.int64)
    nats = [x for suffix in suffixes.values() for x in suffix]
    return SuffixLogProbs(tuple(suffixes), ends, np.array(nats, dtype=float))
