"""Sample a table that is too large to tokenise: count all rows in one pass, and read only a sample.

This is done only with --limit, for JSONL, CSV and Parquet. The pass reads the file in blocks, which
workers can share. It needs memory for the sample and 24 bytes per row, plus 16 bytes per row each
for --group-column and --user-column.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from auditor.benchmarks.data import columns
from auditor.benchmarks.data.columns import (
    ColumnKinds,
    DataTable,
    UnreadRows,
    hash_texts,
)
from auditor.benchmarks.data.json_rows import ABSENT, parse_table_json, require_json_object
from auditor.benchmarks.data.tables import (
    FIRST,
    find_text_columns,
    list_arrow_rows,
    stream_csv_table_rows,
)
from auditor.core.arrays import Ints
from auditor.core.errors import AuditError
from auditor.statistics.extraction import format_copies

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


@dataclass(frozen=True)
class LargeTableTexts:
    """Iterate over the texts of all rows of a file, reading it again each time.

    label: how error messages start; layout: the columns of the records, as of `DataTable`.
    """

    label: str
    path: Path
    layout: tuple[str, ...]

    def __iter__(self) -> Iterator[str]:
        for block in split_into_blocks(self.path):
            for _, batch in stream_batches(self.label, self.path, block, self.layout):
                n = len(batch[self.layout[0]])
                table = DataTable(
                    *(self.label, self.layout, n, batch.__getitem__), given_layout=self.layout
                )
                yield from table.list_texts(may_be_null=True)


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
            header = next(rows, [])
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


def stream_nonblank_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines of a text file that are not blank, each with the number of lines before."""
    block = TableBlock(0, 0, path.stat().st_size)
    for number, line in enumerate(_stream_lines(path, block)):
        if line.strip():
            yield number, line


def _stream_lines(path: Path, block: TableBlock) -> Iterator[str]:
    """Yield the lines of a block, blank lines included, split as in `stream_json_rows`."""
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
    except (pyarrow.ArrowException, OverflowError):  # a date that Python does not have
        raise NotStreamable from None


LARGE = 50_000  # rows: of a larger table, count all rows by text and tokenise only a sample
SAMPLE = 20_000  # rows of that sample, at least
# rows of the sample for each record of --limit: some are too short, or auxiliary data
_SAMPLES_PER_LIMIT = 4
_SUFFIXES = (".jsonl", ".csv", ".parquet")
# besides `columns.REPEATS`
_GROUPS = "group of a row"
_USERS = "user of a row"


@dataclass(frozen=True)
class BlockCounts:
    """The hashes of the rows in a batch or block of a table, or in all of it.

    hashes: (rows,) hash of each row.
    numbers: (rows,) arrays: the repeats, and the hashes of the group and of the user, if the table
        has these columns.
    names: names of the columns.
    kinds: see `UnreadRows`.
    """

    hashes: Ints
    numbers: Mapping[str, Ints]
    names: tuple[str, ...]
    kinds: ColumnKinds


def _join_counts(parts: Iterable[BlockCounts]) -> BlockCounts:
    hashes = [np.empty(0, np.int64)]
    numbers: dict[str, list[Ints]] = {}
    names = dict[str, None]()
    kinds: ColumnKinds = {}
    for part in parts:
        hashes.append(part.hashes)
        for name, values in part.numbers.items():
            numbers.setdefault(name, []).append(values)
        names |= dict.fromkeys(part.names)
        kinds = columns.join_nested_kinds(kinds, part.kinds)
    joined = {name: np.concatenate(values) for name, values in numbers.items()}
    return BlockCounts(np.concatenate(hashes), joined, tuple(names), kinds)


@dataclass(frozen=True)
class BlockHashing:
    """Hash the rows of a file, block by block; an engine may distribute this work.

    label: how error messages start.
    layout: the columns of the records, as of `DataTable`.
    names: the columns to read.
    """

    label: str
    path: Path
    layout: tuple[str, ...]
    names: tuple[str, ...]
    group_column: str | None = None
    user_column: str | None = None
    portion: ClassVar[int] = 1

    def process_items(
        self, place: Any, items: Sequence[TableBlock]
    ) -> Iterator[tuple[int, BlockCounts | None]]:
        """Yield the number of each block with its counts; None if a row is unusable."""
        for block in items:
            try:
                yield block.number, self.hash_block(block)
            except (AuditError, NotStreamable, ValueError, OSError):  # `_scan_rows` names the row
                yield block.number, None

    def hash_block(self, block: TableBlock) -> BlockCounts:
        """Return the hashes of a block's rows; raise AuditError if a row is unusable."""
        return _join_counts(self._hash_batches(block))

    def _hash_batches(self, block: TableBlock) -> Iterator[BlockCounts]:
        n_rows = 0
        for names, batch in stream_batches(self.label, self.path, block, self.names):
            n = len(batch[self.names[0]])
            table = DataTable(
                *(self.label, self.names, n, batch.__getitem__),
                first_row=n_rows,
                given_layout=self.layout,
            )
            hashes = table.hash_rows()
            kinds: ColumnKinds = {}
            if table.has_conversations:
                if table.has_unclear_labels:
                    raise NotStreamable  # all rows together decide the meaning of a label
                kinds = table.infer_nested_kinds()
            yield BlockCounts(hashes, dict(self._number_rows(table)), tuple(names), kinds)
            n_rows += n

    def _number_rows(self, table: DataTable) -> Iterator[tuple[str, Ints]]:
        if columns.REPEATS in self.names:
            yield columns.REPEATS, np.array(table.list_repeat_counts(), np.int64)
        if self.group_column is not None:
            groups = table.list_groups(self.group_column, needed=True)
            yield _GROUPS, hash_texts(list(map(str, groups)))
        if self.user_column is not None:
            yield _USERS, hash_texts(table.list_user_names(self.user_column))


HashBlocks = Callable[
    [BlockHashing, Sequence[TableBlock]], Iterable[tuple[int, BlockCounts | None]]
]


@dataclass(frozen=True)
class TableCounting:
    """Remember the statistics of large tables, so that each table is counted only once.

    hash_blocks: function that hashes blocks, in any order; by default in this process.
    counted: statistics, keyed by the table's flag and name.
    """

    hash_blocks: HashBlocks = lambda work, blocks: work.process_items(None, blocks)
    counted: dict[str, UnreadRows] = field(default_factory=dict)


@dataclass(frozen=True)
class SamplingOrder:
    """Define which rows to read from a large table.

    limit: number of secrets to attack.
    draw_order: a function of n that returns the numbers below n in random order.
    copied_first: whether half of the sample is the most copied rows; the other half is random.
    required: rows of a second table that the sample must contain.
    group_column, user_column: names of these columns of the table.
    """

    limit: int
    draw_order: Callable[[int], Ints]
    copied_first: bool
    required: DataTable | None = None
    group_column: str | None = None
    user_column: str | None = None

    @property
    def size(self) -> int:
        """The number of rows to read in addition to the required rows."""
        return max(SAMPLE, _SAMPLES_PER_LIMIT * self.limit)


def sample_large_table(
    where: str,
    path: Path,
    columns: Sequence[str],
    order: SamplingOrder,
    counting: TableCounting,
) -> DataTable | None:
    """Return a sample of a large table's distinct rows, with statistics of the other rows.

    where: how error messages start. columns: columns to read. counting: holds earlier results.
    Return None if all rows must be read. Raise AuditError at the first unusable row.
    """
    try:
        if where not in counting.counted:
            unread = _count_large_table(where, path, order, counting.hash_blocks)
            if unread is None:
                return None
            counting.counted[where] = unread
        unread = counting.counted[where]
        names = [name for name in columns if name in unread.columns]
        return replace(
            _read_rows(where, path, names, unread.rows),
            columns=unread.columns,
            texts=unread.texts,
            unread=unread,
        )
    except (NotStreamable, ValueError, OSError):
        # Reading the complete table finds the same fault and names it, before its first row is
        # used.
        return None


def _count_large_table(
    where: str, path: Path, order: SamplingOrder, hash_blocks: HashBlocks
) -> UnreadRows | None:
    """Count the rows of a large table, and choose those to read; None if all must be read."""
    head = _read_large_table_head(where, path)
    if head is None or (layout := _find_table_layout(head)) is None:
        return None
    labels = list(filter(None, (order.group_column, order.user_column)))
    if not set(head.columns).issuperset(labels):
        return None
    of_row = columns.CHAT if head.has_conversations else layout
    # A row of JSONL may have a column that no row before it has.
    is_open = path.suffix.lower() == ".jsonl" and head.has_conversations
    names = [name for name in of_row if is_open or name in head.columns]
    if columns.REPEATS in head.columns:
        names.append(columns.REPEATS)
    read_names = tuple(dict.fromkeys((*names, *labels)))
    work = BlockHashing(where, path, layout, read_names, order.group_column, order.user_column)
    scan = _scan_rows(work, head, hash_blocks)
    if len(scan.hashes) <= max(LARGE, order.size):
        return None
    return _choose_sample(work, scan, order, head.texts)


def is_large_text_table(where: str, path: Path) -> bool:
    """Return whether a file is a large table of texts, not conversations, by its leading rows."""
    try:
        head = _read_large_table_head(where, path)
    except (NotStreamable, ValueError, OSError):
        return False
    return head is not None and _find_table_layout(head) in columns.PLAIN


def _find_table_layout(table: DataTable) -> tuple[str, ...] | None:
    """Return the columns of the table's records; None if its columns are invalid."""
    try:
        return table.layout
    except AuditError:
        return None


def _read_large_table_head(where: str, path: Path) -> DataTable | None:
    """Return the first rows of a large table; None for small tables and other formats.

    These rows show which columns hold the records and other texts.
    """
    if path.suffix.lower() not in _SUFFIXES or not path.is_file():
        return None
    objects: list[dict[str, Any]]
    if path.suffix.lower() == ".parquet":
        with open_parquet(path) as file:
            if file.metadata.num_rows <= LARGE:
                return None
            names = tuple(file.schema_arrow.names)
            objects = list_arrow_rows(next(file.iter_batches(FIRST)))
    else:
        # Whether there is a line after the first LARGE lines.
        if next(islice(stream_nonblank_lines(path), LARGE, None), None) is None:
            return None
        objects = list(islice(stream_objects(where, path), BATCH))
        names = tuple(dict.fromkeys(chain.from_iterable(objects)))
    values = {name: [value.get(name, ABSENT) for value in objects] for name in names}
    return DataTable(where, names, len(objects), values.__getitem__, find_text_columns(objects))


def _scan_rows(work: BlockHashing, head: DataTable, hash_blocks: HashBlocks) -> BlockCounts:
    """Return the hashes of all rows of a table; `head` holds its first rows.

    Raise AuditError about the first unusable row, after a second pass.
    """
    blocks = split_into_blocks(work.path)
    counts = dict(hash_blocks(work, blocks))
    if None in counts.values():
        # In a block of the whole file, rows and lines have the numbers that they have in the file.
        work.hash_block(TableBlock(0, 0, blocks[-1].end))
        raise NotStreamable
    scan = _join_counts(filter(None, map(counts.get, range(len(blocks)))))
    scan = replace(scan, names=tuple(dict.fromkeys((*head.columns, *scan.names))))
    full_table = replace(head, columns=scan.names)
    if full_table.layout != work.layout:
        raise NotStreamable
    if columns.REPEATS in scan.names and columns.REPEATS not in work.names:  # in later rows only
        replace(full_table, rows=1, column=lambda name: [ABSENT]).list_repeat_counts()
    if _GROUPS in scan.numbers:
        assert work.group_column is not None
        n_groups = len(np.unique(scan.numbers[_GROUPS]))
        full_table.check_few_groups(work.group_column, n_groups)
    return scan


def _choose_sample(
    work: BlockHashing, scan: BlockCounts, order: SamplingOrder, texts: tuple[str, ...]
) -> UnreadRows:
    """Choose distinct rows to read, and return them with counts of the whole table.

    texts: names of the text columns. Raise NotStreamable if no row has a text, or if the table
    lacks a required row: the caller then reads the whole table to report it.
    """
    distinct, first, of_row, copies = np.unique(
        scan.hashes, return_index=True, return_inverse=True, return_counts=True
    )
    if columns.REPEATS in scan.numbers:
        copies = np.zeros(len(distinct), np.int64)
        np.add.at(copies, of_row, scan.numbers[columns.REPEATS])
    is_empty = distinct == columns.hash_texts([""])
    by_row = np.argsort(first)
    by_row = by_row[~is_empty[by_row]]
    if not len(by_row):
        raise NotStreamable
    left_out = {}
    if is_empty.any():
        left_out[columns.NO_TEXT[work.layout]] = int(np.count_nonzero(is_empty[of_row]))
    random_order = order.draw_order(len(by_row))
    chosen = _choose_rows(copies[by_row], random_order, order.size, order.copied_first)
    if order.required is not None:
        if _find_table_layout(order.required) is None:
            raise NotStreamable
        required_hashes = order.required.hash_rows()
        if not np.isin(required_hashes, distinct).all():
            raise NotStreamable
        chosen = np.union1d(chosen, np.flatnonzero(np.isin(distinct[by_row], required_hashes)))
    unread_copies = np.delete(copies[by_row], chosen)
    values, counts = np.unique(unread_copies, return_counts=True)
    labels = map(format_copies, values.tolist())
    by_copies = Counter(dict(zip(labels, counts.tolist(), strict=True)))
    places = by_row[chosen]  # of the sample, among the distinct rows by hash

    def find_mixed(name: str) -> frozenset[int]:
        if name not in scan.numbers:
            return frozenset()
        differs = scan.numbers[name] != scan.numbers[name][first][of_row]
        mixed = np.zeros(len(distinct), bool)
        mixed[of_row[differs]] = True
        return frozenset(np.flatnonzero(mixed[places]).tolist())

    return UnreadRows(
        tuple(first[places].tolist()),
        tuple(copies[places].tolist()),
        scan.names,
        texts,
        len(scan.hashes),
        len(unread_copies),
        by_copies,
        row_hashes=distinct,
        user_hashes=np.unique(scan.numbers.get(_USERS, np.empty(0, np.int64))),
        of_several_groups=find_mixed(_GROUPS),
        of_several_users=find_mixed(_USERS),
        kinds=scan.kinds,
        left_out=left_out,
    )


def _choose_rows(copies: Ints, order: Ints, size: int, copied_first: bool) -> Ints:
    """Return the ascending numbers of `size` distinct rows.

    copies: (distinct,) copies of each row; order: (distinct,) random permutation; copied_first:
    whether half of the rows are the most copied ones.
    """
    most_copied = order[:0]
    if copied_first:
        most_copied = order[copies[order] > 1]
        by_copies = np.argsort(-copies[most_copied], kind="stable")
        most_copied = most_copied[by_copies][: size // 2]
    is_chosen = np.zeros(len(copies), bool)
    is_chosen[most_copied] = True
    others = order[~is_chosen[order]][: size - len(most_copied)]
    return np.sort(np.concatenate((most_copied, others)))


def _read_rows(where: str, path: Path, names: Sequence[str], rows: Sequence[int]) -> DataTable:
    """Return the named columns of some rows of a table; rows: ascending row numbers."""
    values: dict[str, list[Any]] = {name: [] for name in names}
    n_read = 0
    for value in _stream_chosen_rows(where, path, names, rows):
        n_read += 1
        for name in names:
            values[name].append(value.get(name, ABSENT))
    if n_read != len(rows):
        raise AuditError(
            f"{where}: expected the {len(rows):,} rows that were counted, got {n_read:,}"
        )
    return DataTable(where, tuple(names), len(rows), values.__getitem__)


def _stream_chosen_rows(
    where: str, path: Path, names: Sequence[str], rows: Sequence[int]
) -> Iterator[Mapping[str, Any]]:
    chosen = set(rows)
    if path.suffix.lower() == ".jsonl":
        for row, (lines_before, line) in enumerate(stream_nonblank_lines(path)):
            if row in chosen:
                yield parse_table_json(where, line, lines_before)
    elif path.suffix.lower() == ".csv":
        for row, value in enumerate(stream_objects(where, path)):
            if row in chosen:
                yield value
    else:
        start = 0
        in_order = np.array(rows)
        with open_parquet(path) as file:
            for batch in file.iter_batches(batch_size=BATCH, columns=list(names)):
                in_batch = in_order[(in_order >= start) & (in_order < start + batch.num_rows)]
                yield from batch.take(in_batch - start).to_pylist()
                start += batch.num_rows
