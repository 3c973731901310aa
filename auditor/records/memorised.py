"""Which training records were extracted from generations, by configuration, as the table of a run keeps them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from auditor.core.nouns import CellKey
from auditor.records.table import RECORDS, TABLE, Column, read, refused

_SECRET, _TRAINED = "record", "trained"  # of a secret, which of the records it is in; of no record, how many there are


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

    records: tuple[RecordOut, ...]
    trained: dict[int | None, int]  # None where nobody knows how often

    def columns(self, cell: CellKey) -> Iterator[Column]:
        """What the table keeps of it."""
        ids, copies = [one.alias for one in self.records], [one.copies for one in self.records]
        for name in ("generations", "longest"):
            yield Column(RECORDS, cell, name, ids, [getattr(one, name) for one in self.records], None, copies)
        inside = [(secret, place) for place, one in enumerate(self.records) for secret in one.secrets]
        yield Column(RECORDS, cell, _SECRET, [secret for secret, _ in inside], [place for _, place in inside])
        yield Column(RECORDS, cell, _TRAINED, [""] * len(self.trained), [*self.trained.values()], None, [*self.trained])


def of_folder(folder: Path) -> dict[CellKey, RecordsOut]:
    """Empty where no row is about generations. Raises AuditError as `table.read`."""
    cells: dict[CellKey, dict[str, Column]] = {}
    for column in read(folder, RECORDS):
        cells.setdefault(column.cell, {})[column.quantity] = column
    with refused(folder / TABLE):
        return {cell: _records(columns) for cell, columns in cells.items()}


def _records(columns: dict[str, Column]) -> RecordsOut:
    trained = columns[_TRAINED]
    of = dict(zip(_repeats(trained), map(int, trained.values), strict=True))
    if "generations" not in columns:
        return RecordsOut((), of)
    seen, longest = columns["generations"], columns["longest"]
    inside: dict[int, list[str]] = {}
    if _SECRET in columns:
        for secret, place in zip(columns[_SECRET].ids, columns[_SECRET].values, strict=True):
            inside.setdefault(int(place), []).append(secret)
    numbers = zip(seen.ids, _repeats(seen), seen.values, longest.values, strict=True)
    return RecordsOut(
        tuple(
            RecordOut(alias, tuple(inside.get(i, ())), copies, int(generations), int(most))
            for i, (alias, copies, generations, most) in enumerate(numbers)
        ),
        of,
    )


def _repeats(column: Column) -> list[int | None]:
    return list(column.repeats or [None] * len(column.ids))
