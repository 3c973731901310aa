"""Read a large table in blocks that workers can count separately."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from auditor.benchmarks.data.tables import (
    ABSENT,
    parse_table_json,
    require_json_object,
    stream_csv_table_rows,
)

if TYPE_CHECKING:
    from pyarrow import parquet

BATCH = 10_000  # rows in memory at once
_BLOCK = 2**24  # bytes of JSONL to count as one task

Batch = Mapping[str, Sequence[Any]]  # the values of each column


class NotStreamable(Exception):
    """Report that a table cannot be read block by block.

    The caller then reads the whole table, which also reports any mistake in it.
    """


@dataclass(frozen=True)
class TableBlock:
    """Describe a part of a file that is one task for a worker.

    start:end are the bytes of a JSONL or CSV file, or the row groups of a Parquet file. number:
    index of the block.
    """

    number: int
    start: int
    end: int


def split_into_blocks(path: Path) -> list[TableBlock]:
    """Return the blocks of a file in order.

    Blocks of JSONL end at the end of a line. A CSV file is one block, because fields may contain
    line ends.
    """
    if path.suffix.lower() == ".parquet":
        with open_parquet(path) as file:
            return [TableBlock(i, i, i + 1) for i in range(file.num_row_groups)]
    size = path.stat().st_size
    ends: list[int] = []
    if path.suffix.lower() == ".jsonl":
        with path.open("rb") as lines:
            while (ends[-1] if ends else 0) + _BLOCK < size:
                lines.seek(_BLOCK, 1)
                lines.readline()
                ends.append(lines.tell())
    return [TableBlock(i, *block) for i, block in enumerate(pairwise(sorted({0, *ends, size})))]


def stream_batches(
    where: str, path: Path, block: TableBlock, columns: Sequence[str]
) -> Iterator[tuple[Iterable[str], Batch]]:
    """Yield the names of all columns, and the values of some columns, a few rows at a time.

    where: how error messages start. columns: names of the columns to read. Only the schema of a
    Parquet file names all of its columns: no name is yielded.
    """
    if path.suffix.lower() == ".parquet":
        with open_parquet(path) as file:
            groups = range(block.start, block.end)
            for batch in file.iter_batches(
                batch_size=BATCH, row_groups=groups, columns=list(columns)
            ):
                yield (), batch.to_pydict()
        return
    objects = stream_objects(where, path, block)
    while rows := list(islice(objects, BATCH)):
        values = {name: [value.get(name, ABSENT) for value in rows] for name in columns}
        yield dict.fromkeys(chain.from_iterable(rows)), values


def stream_objects(
    where: str, path: Path, block: TableBlock | None = None
) -> Iterator[dict[str, Any]]:
    """Yield each row of a JSONL or CSV block as a dictionary, in the same way as `tables`.

    where: how error messages start. block: the block (None: the whole file). Raise AuditError, with
    the row in the block, if a row is invalid.
    """
    if path.suffix.lower() == ".csv":
        with path.open(encoding="utf-8-sig", newline="") as text:
            rows = stream_csv_table_rows(where, text)
            header = next(rows)
            if len(set(header)) < len(header):
                raise NotStreamable
            for fields in rows:
                yield dict(zip(header, fields, strict=True))
        return
    block = block or TableBlock(0, 0, path.stat().st_size)
    row = 0
    for number, line in enumerate(_stream_lines(path, block)):
        if line.strip():
            if row == 0 and block.start == 0 and line.lstrip().startswith("["):
                raise NotStreamable  # an array of all rows, or not an object
            yield require_json_object(where, row, parse_table_json(where, line, number))
            row += 1


def stream_nonblank_lines(path: Path) -> Iterator[str]:
    """Yield the lines of a text file that are not blank."""
    block = TableBlock(0, 0, path.stat().st_size)
    return filter(str.strip, _stream_lines(path, block))


def _stream_lines(path: Path, block: TableBlock) -> Iterator[str]:
    """Yield the lines of a block, blank lines included, split as in `read_json_table_objects`."""
    encoding = "utf-8-sig" if block.start == 0 else "utf-8"  # of the first line
    with path.open("rb") as file:
        file.seek(block.start)
        remaining = block.end - block.start
        while remaining > 0:
            line = file.readline()
            remaining -= len(line)
            yield line.decode(encoding)
            encoding = "utf-8"


@contextmanager
def open_parquet(path: Path) -> Iterator[parquet.ParquetFile]:
    """Open a Parquet file.

    Raise NotStreamable if the file has a duplicate column, or if reading it fails, also inside the
    with-block.
    """
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path, pre_buffer=False) as file:
            if len(set(file.schema_arrow.names)) < len(file.schema_arrow.names):
                raise NotStreamable
            yield file
    except pyarrow.ArrowException:
        raise NotStreamable from None
