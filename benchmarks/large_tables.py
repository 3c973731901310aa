"""Tables too large to tokenise: counts every row by its text in one streamed pass, and reads a sample of the rows.

Only with --limit, and only for texts (`columns.PLAIN`) in JSONL and Parquet. Memory: 16 bytes a row, and the sample.
"""

from __future__ import annotations

import json
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from auditor.benchmarks import columns
from auditor.benchmarks.tables import ABSENT, RecordTable
from auditor.core.errors import AuditError
from auditor.statistics.extraction import copies_label

LARGE = 50_000  # rows, above which a table is counted by text and only a sample of it is tokenised
SAMPLE = 20_000  # rows of that sample, at least
_SAMPLES_PER_LIMIT = 4  # rows of the sample for each record of --limit: some are too short, or auxiliary data
_BATCH = 10_000  # rows in memory at once

Batch = Mapping[str, Sequence[Any]]  # the values of each column


class _NotStreamable(Exception):
    """The table has to be read as a whole, which also says what is wrong with it."""


@dataclass(frozen=True)
class UnreadRows:
    """What is known of a table of which only a sample was read.

    rows: (sample,), each one's number in the table; copies: (sample,), how often its text occurs in the table (by the
    repeats column if there is one); n_rows: rows of the whole table; n_distinct: distinct texts that were not read;
    by_copies: these, by `copies_label`; text_hashes: sorted, of all texts, equal in this process only.
    """

    rows: tuple[int, ...]
    copies: tuple[int, ...]
    n_rows: int
    n_distinct: int
    by_copies: Counter[str] = field(default_factory=Counter)
    text_hashes: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))

    def contains_text(self, text: str) -> bool:
        """Return whether some row of the table has exactly this text."""
        place = int(np.searchsorted(self.text_hashes, hash(text)))
        return place < len(self.text_hashes) and int(self.text_hashes[place]) == hash(text)


def read_sample_of_large_table(
    where: str,
    path: Path,
    wanted: Sequence[str],
    limit: int,
    draw_order: Callable[[int], list[int]],
    copied_first: bool,
) -> tuple[RecordTable, UnreadRows] | None:
    """Return a sample of the distinct rows of a large table and what is known of the others; None: read it whole.

    wanted: columns; limit: secrets that are attacked; draw_order: gives the numbers below n in random order;
    copied_first: half of the sample are the rows with most copies; the rest, or else all of it, is drawn at random.
    """
    if path.suffix.lower() not in (".jsonl", ".parquet") or not path.is_file():
        return None
    try:
        scan = _scan_texts(where, path, wanted)
        if scan is None:
            return None
        hashes, times, names = scan
        first, copies, distinct = _count_equal_texts(hashes, times)
        size = max(SAMPLE, _SAMPLES_PER_LIMIT * limit)
        if size >= len(first):
            return None
        chosen = _choose_rows(copies, np.array(draw_order(len(first))), size, copied_first)
        rows = tuple(first[chosen].tolist())
        others = np.delete(copies, chosen)
        values, counts = np.unique(others, return_counts=True)
        by_copies = Counter({copies_label(int(value)): int(n) for value, n in zip(values, counts, strict=True)})
        table = _read_rows(where, path, names, rows)
        return table, UnreadRows(rows, tuple(copies[chosen].tolist()), len(hashes), len(others), by_copies, distinct)
    except (_NotStreamable, AuditError, ValueError, OSError):
        return None  # whoever reads the whole table finds the same fault, and names it


def _scan_texts(
    where: str, path: Path, wanted: Sequence[str]
) -> tuple[NDArray[np.int64], NDArray[np.int64] | None, tuple[str, ...]] | None:
    """Return the hash of each row's text, its repeats if the table has them, and the columns; None: a small table."""
    hashes, times, names = array("q"), array("q"), dict[str, None]()
    layout: tuple[str, ...] = ()
    for batch in _stream_batches(path, wanted, names):
        n = len(next(iter(batch.values())))
        table = RecordTable(where, tuple(names), n, batch.__getitem__)
        layout = layout or columns.detect_column_layout(table)
        if layout not in columns.PLAIN:
            raise _NotStreamable
        hashes.extend(map(hash, columns.joined_layout_texts(table, layout)))
        if columns.REPEATS in names:
            times.extend(columns.row_repeat_counts(table))
    if len(hashes) <= LARGE:
        return None
    if columns.detect_column_layout(RecordTable(where, tuple(names), len(hashes), batch.__getitem__)) != layout:
        raise _NotStreamable
    if times and len(times) != len(hashes):
        raise _NotStreamable
    repeats = np.frombuffer(times, np.int64) if times else None
    return np.frombuffer(hashes, np.int64), repeats, tuple(names)


def _count_equal_texts(
    hashes: NDArray[np.int64], times: NDArray[np.int64] | None
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return of each distinct text its first row and its copies, by first row; and the distinct hashes, sorted.

    hashes, times: (rows,); times: how often each row counts, None: once.
    """
    distinct, first, of_row, copies = np.unique(hashes, return_index=True, return_inverse=True, return_counts=True)
    if times is not None:
        copies = np.zeros(len(distinct), np.int64)
        np.add.at(copies, of_row, times)
    by_row = np.argsort(first)
    return first[by_row], copies[by_row], distinct


def _choose_rows(
    copies: NDArray[np.int64], order: NDArray[np.int64], size: int, copied_first: bool
) -> NDArray[np.int64]:
    """Return `size` of the distinct rows, ascending. copies: (distinct,); order: (distinct,), all of them at random."""
    if copied_first:
        most_copied = order[np.argsort(-copies[order], kind="stable")][: size // 2]
        most_copied = most_copied[copies[most_copied] > 1]
        order = np.concatenate((most_copied, order[~np.isin(order, most_copied)]))
    return np.sort(order[:size])


def _read_rows(where: str, path: Path, names: tuple[str, ...], rows: Sequence[int]) -> RecordTable:
    """Return these rows of a table; rows: in ascending order."""
    values: dict[str, list[Any]] = {name: [] for name in names}
    if path.suffix.lower() == ".parquet":
        start, wanted = 0, np.array(rows)
        for batch in _stream_batches(path, names, {}):
            n = len(next(iter(batch.values())))
            here = wanted[(wanted >= start) & (wanted < start + n)]
            for name in names:
                values[name].extend(batch[name][row - start] for row in here)
            start += n
    else:
        remaining = iter(rows)
        following = next(remaining, None)
        for row, line in enumerate(_stream_lines(path)):
            if row == following:
                value = json.loads(line)
                for name in names:
                    values[name].append(value.get(name, ABSENT))
                following = next(remaining, None)
    return RecordTable(where, names, len(rows), values.__getitem__)


def _stream_batches(path: Path, wanted: Sequence[str], names: dict[str, None]) -> Iterator[Batch]:
    """Yield the wanted columns, some rows at a time. names: fills up with the columns of the table."""
    if path.suffix.lower() == ".parquet":
        yield from _stream_parquet_batches(path, wanted, names)
        return
    objects: list[dict[str, Any]] = []
    for line in _stream_lines(path):
        value = json.loads(line)
        if not isinstance(value, dict):
            raise _NotStreamable
        objects.append(value)
        if len(objects) == _BATCH:
            yield _columns_of_objects(objects, wanted, names)
            objects = []
    if objects:
        yield _columns_of_objects(objects, wanted, names)


def _columns_of_objects(objects: list[dict[str, Any]], wanted: Sequence[str], names: dict[str, None]) -> Batch:
    for value in objects:
        names.update(dict.fromkeys(value))
    return {name: [value.get(name, ABSENT) for value in objects] for name in wanted if name in names}


def _stream_parquet_batches(path: Path, wanted: Sequence[str], names: dict[str, None]) -> Iterator[Batch]:
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path, pre_buffer=False) as file:
            if file.metadata.num_rows <= LARGE or len(set(file.schema_arrow.names)) < len(file.schema_arrow.names):
                raise _NotStreamable
            names.update(dict.fromkeys(file.schema_arrow.names))
            present = [name for name in wanted if name in names]
            for batch in file.iter_batches(batch_size=_BATCH, columns=present):
                yield {name: batch.column(name).to_pylist() for name in present}
    except pyarrow.ArrowException:
        raise _NotStreamable from None


def _stream_lines(path: Path) -> Iterator[str]:
    """Yield the lines of a JSONL file that hold something, as `tables.read_json_table_objects` splits it."""
    with path.open(encoding="utf-8-sig", newline="\n") as file:
        for line in file:
            if line.strip():
                yield line
