"""Which training records came out of generations, row by row: `memorised.json`. Aliases and numbers only."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from auditor.core import disk
from auditor.core.jsonable import from_json, to_json
from auditor.core.jsonfiles import read_object
from auditor.core.nouns import CellKey

FILE = "memorised.json"


@dataclass(frozen=True)
class RecordOut:
    """A record that came out. alias: what reports call it; secrets: the attacked ones in it, by theirs.

    copies: how often it was trained on, None where nobody knows; generations: in how many it is; longest: tokens.
    """

    alias: str
    secrets: tuple[str, ...]
    copies: int | None
    generations: int
    longest: int


@dataclass(frozen=True)
class RecordsOut:
    """Of one row: those that came out most often first; trained: how many there are that could, by their copies."""

    n: int
    records: tuple[RecordOut, ...]
    trained: dict[str, int]  # "" where nobody knows how often


def save(folder: Path, rows: Mapping[CellKey, RecordsOut]) -> None:
    disk.replace(folder / FILE, json.dumps({str(row): to_json(found) for row, found in rows.items()}))


def read(folder: Path) -> dict[CellKey, RecordsOut]:
    """Empty where no row is about generations. Raises AuditError for a damaged file."""
    path = folder / FILE
    if not path.exists():
        return {}
    held = read_object(path, "the records that came out of generations")
    read: dict[str, RecordsOut] = from_json(dict[str, RecordsOut], held, str(path))
    return {CellKey.read(row): found for row, found in read.items()}
