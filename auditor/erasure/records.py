"""Read all deleted records, and a sample of kept records as the control.

Each file is JSONL, CSV or Parquet. Its rows have `text`, and optionally `id` and `embedding` or
`vector`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from auditor.benchmarks.data import large_tables
from auditor.benchmarks.data.json_rows import (
    describe_cell_value_type,
    parse_table_json,
    require_json_object,
)
from auditor.core.arrays import Floats, Ints
from auditor.core.errors import AuditError
from auditor.erasure.windows import LETTERS, TEXT, WindowIndex, choose_window_count

CONTROL = 400  # kept records to look for
LEAST = 20  # fewest control records for a verdict on a layer
_AT_ONCE = 2_000  # kept rows to compare at once
_VECTOR_NAMES = ("embedding", "vector")
_SUFFIXES = {  # of files that are read, with what they must hold
    ".jsonl": "one JSON object a line, in UTF-8",
    ".csv": "a header of different names and a line for each record, in UTF-8",
    ".parquet": "a readable Parquet file whose columns have different names",
}
_SAME = 1 - 1e-6  # cosine of two vectors that differ by rounding of float32 at most
_NEARLY = 0.99  # cosine in float32 from which it is computed in float64
ALIKE = 0.999  # cosine at which two vectors count as equal, as int8 and float16 round
# Below this cosine with all other vectors, a rounded vector is nearest to its own record's.
_DISTINCT = 2 * ALIKE**2 - 1


@dataclass(frozen=True)
class StoredRecord:
    """Hold a record to search for; users: the record's people.

    vectors: equal up to rounding, (dimensions,) each; several if rows have the same text.
    """

    name: str
    text: str
    deleted: bool
    vectors: tuple[Floats, ...] = ()
    users: tuple[str, ...] = ()


@dataclass(frozen=True)
class ErasureRecords:
    """Hold the deleted records, followed by a sample of the kept records.

    Deleted records of the same text have different vectors; the first one stands for the text.

    windows: the index of the records' unique byte windows.
    highest_cosines: (records,), the highest cosine of a record's vector with any other vector.
    directions: (records, dimensions), the vectors scaled to length 1; NaN if a record has no
        vector.
    n_kept: number of all kept records; kept_texts: hashes of all kept texts.
    sources: the files that were read.
    """

    targets: tuple[StoredRecord, ...]
    windows: WindowIndex
    highest_cosines: Floats
    directions: Floats
    n_kept: int
    kept_texts: frozenset[int] = field(repr=False)
    sources: tuple[Path, ...] = ()

    @cached_property
    def deleted(self) -> frozenset[int]:
        """The indices of the deleted records."""
        return frozenset(i for i, record in enumerate(self.targets) if record.deleted)

    @cached_property
    def deleted_texts(self) -> dict[str, int]:
        """The index of the first deleted record of each text, keyed by the text."""
        indices = dict[str, int]()
        for i in sorted(self.deleted):
            indices.setdefault(self.targets[i].text, i)
        return indices

    @cached_property
    def with_vectors(self) -> frozenset[int]:
        """The indices of the records whose vectors, even rounded, resemble no other record's."""
        return self._list_below(_DISTINCT)

    @cached_property
    def with_own_vectors(self) -> frozenset[int]:
        """The indices of the records whose vectors differ from those of all other records."""
        return self._list_below(_SAME)

    def _list_below(self, cosine: float) -> frozenset[int]:
        usable = ~np.isnan(self.directions[:, 0]) & (self.highest_cosines < cosine)
        return frozenset(np.flatnonzero(usable).tolist())

    @cached_property
    def with_text(self) -> frozenset[int]:
        """The indices of the records with letters and digits in a row that no other record has."""
        texts = {self.targets[i].text for i in self.windows.list_records(TEXT, LETTERS)}
        return frozenset(i for i, record in enumerate(self.targets) if record.text in texts)


def read_erasure_records(
    deleted: Path, remaining: Path, user_column: str | None = None
) -> ErasureRecords:
    """Read the files of deleted and of remaining records.

    user_column: the column in the file of deleted records with each record's person. Raise
    AuditError if a file is invalid or a deleted record is kept.
    """
    removed = _read_deleted(deleted, user_column)
    first_rows = dict[str, int]()
    for row, record in removed:
        first_rows.setdefault(record.text, row)
    control = _read_control(remaining)
    targets = tuple(record for _, record in (*removed, *control))
    _require_equal_dimensions(targets)
    windows = _index_windows(targets)
    directions = _list_directions(targets)
    highest_cosines = np.full(len(targets), -1.0)
    n_rows = 0
    own_rows = {row: len(removed) + i for i, (row, _) in enumerate(control)}
    n_deleted = len(removed)
    np.maximum(
        highest_cosines,
        compute_highest_cosines(directions, directions[:n_deleted], range(n_deleted)),
        out=highest_cosines,
    )
    hashes = set[int]()
    for rows, texts, vectors in _stream_kept(remaining, directions.shape[1]):
        for row, text in zip(rows, texts, strict=True):
            if text in first_rows:
                raise AuditError(
                    "expected no deleted record among --kept, got the same text in row "
                    f"{first_rows[text]} of {str(deleted)!r} and row {row} of {str(remaining)!r} "
                    "(counted from 0)"
                )
        hashes.update(map(hash, texts))
        n_rows += len(rows)
        windows.mark_shared([texts[i] for i, row in enumerate(rows) if row not in own_rows])
        owners = [own_rows.get(row, -1) for row in rows]
        windows.mark_shared_vectors(vectors[np.asarray(owners) < 0])
        np.maximum(
            highest_cosines,
            compute_highest_cosines(directions, vectors, owners),
            out=highest_cosines,
        )
    windows.finish()
    return ErasureRecords(
        targets,
        windows,
        highest_cosines,
        directions,
        n_rows,
        frozenset(hashes),
        (deleted, remaining),
    )


def _index_windows(targets: Sequence[StoredRecord]) -> WindowIndex:
    """Index the targets' texts and vectors, and mark the windows that several targets share."""
    windows = WindowIndex(choose_window_count(len(targets)))
    owners = dict[tuple[str, int], int]()  # by text, and by index if the record is kept
    for i, record in enumerate(targets):
        if owners.setdefault((record.text, i * (not record.deleted)), i) == i:
            windows.add_text(i, record.text)
        for vector in record.vectors:
            windows.add_vector(i, vector)
    windows.finish()
    for (text, _), i in owners.items():
        windows.mark_shared([text], i)
    return windows


def compute_highest_cosines(
    directions: Floats, vectors: Floats, owner_indices: Sequence[int]
) -> Floats:
    """Return each direction's highest cosine with the vectors of other records, (directions,).

    Args:
        directions: (directions, dimensions) vectors of length 1, at most one for each record.
        vectors: (vectors, dimensions) vectors to compare with.
        owner_indices: (vectors,) for each vector, the index of its own record's direction, with
            which it is not compared; -1 if its record has none.
    """
    highest = np.full(len(directions), -1.0)
    owners = np.asarray(owner_indices, dtype=int)
    singles = np.nan_to_num(directions.astype(np.float32))
    for start in range(0, len(vectors), _AT_ONCE):
        batch = np.asarray(vectors[start : start + _AT_ONCE], dtype=np.float64)
        lengths = np.linalg.norm(batch, axis=1, keepdims=True)
        units = np.nan_to_num(batch / np.where(lengths == 0, np.nan, lengths))
        # Compare in float32, which is several times as fast, and again in float64 if vectors are
        # nearly equal.
        cosines = units.astype(np.float32) @ singles.T
        _skip_owners(cosines, owners[start : start + _AT_ONCE])
        near = np.flatnonzero(cosines.max(axis=1) >= _NEARLY)
        exact = units[near] @ np.nan_to_num(directions).T
        _skip_owners(exact, owners[start + near])
        cosines[near] = -1.0
        highest = np.maximum(highest, cosines.max(axis=0))
        highest = np.maximum(highest, exact.max(axis=0, initial=-1.0))
    return highest


def _skip_owners(cosines: NDArray[np.floating[Any]], owners: Ints) -> None:
    """Set the cosine of each vector with its own record's direction to -1.

    cosines: (vectors, directions); owners: (vectors,), the index of this direction, or -1.
    """
    places = np.flatnonzero(owners >= 0)
    cosines[places, owners[places]] = -1.0


def _list_directions(targets: Sequence[StoredRecord]) -> Floats:
    n_dimensions = max((len(v) for record in targets for v in record.vectors), default=1)
    directions = np.full((len(targets), n_dimensions), np.nan)
    for i, record in enumerate(targets):
        if record.vectors and (length := np.linalg.norm(record.vectors[0])) > 0:
            directions[i] = record.vectors[0] / length
    return directions


def _require_equal_dimensions(targets: Sequence[StoredRecord]) -> None:
    sizes = sorted({len(vector) for record in targets for vector in record.vectors})
    if len(sizes) > 1:
        raise AuditError(f"expected vectors of one length in both files, got {sizes}")


def _read_deleted(path: Path, user_column: str | None) -> list[tuple[int, StoredRecord]]:
    """Read the deleted records with their row numbers.

    Rows of the same text and vector are one record, of all their people. If several records have
    the same id, their names have the row number.
    """
    records = dict[str, list[tuple[int, StoredRecord]]]()
    names = set[str]()
    for row, value in enumerate(_stream_rows("--deleted", path)):
        record = _parse_record("--deleted", path, row, value, deleted=True)
        if user_column is not None:
            if value.get(user_column) in (None, ""):
                raise AuditError(
                    f"--deleted {str(path)!r}, row {row} (counted from 0): expected a person in "
                    f"the column {user_column!r}, got none"
                )
            record = replace(record, users=(str(value[user_column]),))
        twins = records.setdefault(record.text, [])
        if _join_twin(twins, record):
            continue
        if record.name in names:
            record = replace(record, name=f"{record.name}, row {row}")
        names.add(record.name)
        twins.append((row, record))
    if not records:
        raise AuditError(f"--deleted {str(path)!r} is empty: expected at least one row")
    return [numbered for twins in records.values() for numbered in twins]


def _join_twin(twins: list[tuple[int, StoredRecord]], record: StoredRecord) -> bool:
    """Join a record to that of the same text and vector, if any; return whether there is one.

    The first of `twins`, the records of this text, gets the people of all.
    """
    is_joined = False
    for i, (row, twin) in enumerate(twins):
        is_same = not is_joined and _have_same_direction(twin, record)
        if is_same or i == 0:
            users = tuple(dict.fromkeys((*twin.users, *record.users)))
            vectors = twin.vectors + record.vectors * is_same
            twins[i] = row, replace(twin, users=users, vectors=vectors)
        is_joined |= is_same
    return is_joined


def _have_same_direction(first: StoredRecord, second: StoredRecord) -> bool:
    """Compare the first vectors of two records; return True if a record has no vector."""
    if not (first.vectors and second.vectors):
        return True
    if len(first.vectors[0]) != len(second.vectors[0]):
        return False
    units = [record.vectors[0] / np.linalg.norm(record.vectors[0]) for record in (first, second)]
    return bool(units[0] @ units[1] >= _SAME)


def _read_control(path: Path) -> list[tuple[int, StoredRecord]]:
    """Read an evenly spaced sample of the kept records, with their row numbers.

    The rows in between are not parsed.
    """
    n_rows = sum(1 for _ in _stream_raw_rows("--kept", path))
    if not n_rows:
        raise AuditError(
            f"--kept {str(path)!r} is empty: expected records that stay, which show what a search "
            "can find"
        )
    sample = np.linspace(0, n_rows - 1, min(n_rows, CONTROL)).round().astype(int)
    sampled_rows = set(sample.tolist())
    control = []
    for row, raw in enumerate(_stream_raw_rows("--kept", path)):
        if row in sampled_rows:
            value = _parse_row("--kept", path, row, raw)
            control.append((row, _parse_record("--kept", path, row, value, deleted=False)))
    return control


def _stream_rows(flag: str, path: Path) -> Iterator[dict[str, Any]]:
    for row, raw in enumerate(_stream_raw_rows(flag, path)):
        yield _parse_row(flag, path, row, raw)


def _stream_raw_rows(flag: str, path: Path) -> Iterator[tuple[int, str] | dict[str, Any]]:
    """Yield each row: the cells of CSV or Parquet, or a line of JSONL, which is not parsed, with
    the number of lines before it.
    """
    source = f"{flag} {str(path)!r}"
    suffix = path.suffix.lower()
    if not path.is_file() or suffix not in _SUFFIXES:
        got = f"a name that ends in {suffix!r}" if path.is_file() else "no such file"
        raise AuditError(f"{source}: expected a .jsonl, .csv or .parquet file, got {got}")
    try:
        if suffix == ".jsonl":
            yield from large_tables.stream_nonblank_lines(path)
        elif suffix == ".csv":
            yield from large_tables.stream_objects(source, path)
        else:
            with large_tables.open_parquet(path) as file:
                for batch in file.iter_batches(batch_size=_AT_ONCE):
                    yield from batch.to_pylist()
    except (UnicodeDecodeError, large_tables.NotStreamable):
        raise AuditError(f"{source}: expected {_SUFFIXES[suffix]}") from None


def _parse_row(
    flag: str, path: Path, row: int, raw: tuple[int, str] | dict[str, Any]
) -> dict[str, Any]:
    if isinstance(raw, dict):
        return raw
    lines_before, line = raw
    source = f"{flag} {str(path)!r}"
    return require_json_object(source, row, parse_table_json(source, line, lines_before))


def _parse_record(
    flag: str, path: Path, row: int, value: dict[str, Any], deleted: bool
) -> StoredRecord:
    source = f"{flag} {str(path)!r}, row {row} (counted from 0)"
    if "text" not in value:
        raise AuditError(
            f"{source}: expected the record's words in a column 'text', got the columns "
            f"{', '.join(map(repr, value)) or '(none)'}"
        )
    text = value["text"]
    if not isinstance(text, str):
        kind = describe_cell_value_type(text)
        raise AuditError(f"{source}: expected words in the column 'text', got {kind}")
    if not text.strip():
        raise AuditError(f"{source}: expected words in the column 'text', got none")
    if value.get("id") not in (None, ""):
        name = str(value["id"])
    else:
        name = f"row {row}"
    return StoredRecord(name, text, deleted, tuple(_list_vectors(source, value)))


def _list_vectors(where: str, value: dict[str, Any]) -> Iterator[Floats]:
    column = next((name for name in _VECTOR_NAMES if value.get(name) not in (None, "")), None)
    if column is None:
        return
    cell = value[column]
    try:
        # A cell of CSV holds a list as text: [0.25, -1.5].
        vector = np.array(json.loads(cell) if isinstance(cell, str) else cell, dtype=np.float64)
    except (TypeError, ValueError):
        vector = np.empty((0, 0))
    if vector.ndim != 1 or not len(vector) or not np.isfinite(vector).all():
        raise AuditError(f"{where}: expected a list of finite numbers in {column!r}")
    if vector.any():  # zeros have no direction
        yield vector


def _stream_kept(path: Path, n_dimensions: int) -> Iterator[tuple[list[int], list[str], Floats]]:
    """Yield batches of kept rows: row numbers, texts, and vectors (rows, dimensions)."""
    numbered = enumerate(_stream_rows("--kept", path))
    while batch := list(islice(numbered, _AT_ONCE)):
        records = []
        for numbered_row in batch:
            records.append(_parse_record("--kept", path, *numbered_row, deleted=False))
        vectors = list[Floats]()
        for record in records:
            vectors += record.vectors or [np.full(n_dimensions, np.nan)]
        if any(len(vector) != n_dimensions for vector in vectors):
            raise AuditError(f"--kept {str(path)!r}: expected vectors of {n_dimensions} numbers")
        texts = [record.text for record in records]
        yield [row for row, _ in batch], texts, np.array(vectors)
