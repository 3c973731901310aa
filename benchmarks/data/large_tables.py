"""Tables too large to tokenise: counts every row by its text in one streamed pass, and reads a
sample of the rows.

Only with --limit, and only for texts (`columns.PLAIN`) in JSONL, CSV and Parquet. The pass goes
block by block, so that workers can share it. Memory: 16 bytes a row, and the sample.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pandas
from numpy.typing import NDArray

from auditor.benchmarks.data import columns
from auditor.benchmarks.data.table_blocks import (
    BATCH,
    NotStreamable,
    TableBlock,
    count_lines,
    make_whole_file_block,
    open_parquet,
    split_into_blocks,
    stream_batches,
    stream_nonblank_lines,
    stream_objects,
    stream_raw_lines,
)
from auditor.benchmarks.data.tables import (
    ABSENT,
    FIRST,
    RecordTable,
    columns_with_texts,
    parse_json_of_table,
)
from auditor.core.errors import AuditError
from auditor.statistics.extraction import format_copies

LARGE = 50_000  # rows, above which a table is counted by text and only a sample of it is tokenised
SAMPLE = 20_000  # rows of that sample, at least
# rows of the sample for each record of --limit: some are too short, or auxiliary data
_SAMPLES_PER_LIMIT = 4
_SUFFIXES = (".jsonl", ".csv", ".parquet")


def hash_texts(texts: Sequence[str]) -> NDArray[np.int64]:
    """Return a hash of each text, (texts,): equal in every process and on every machine."""
    return pandas.util.hash_array(np.array(texts, dtype=object), categorize=False).view(np.int64)


@dataclass(frozen=True)
class UnreadRows:
    """What is known of a table of which only a sample was read.

    rows: (sample,), each one's number in the table; copies: (sample,), how often its text occurs in
    the table (by the repeats column if there is one); columns, texts: of the table; n_rows: rows of
    the whole table; n_distinct: distinct texts that were not read; by_copies: these, by
    `format_copies`; text_hashes: sorted, of all texts.
    """

    rows: tuple[int, ...]
    copies: tuple[int, ...]
    columns: tuple[str, ...]
    texts: tuple[str, ...]
    n_rows: int
    n_distinct: int
    by_copies: Counter[str] = field(default_factory=Counter)
    text_hashes: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))

    def contains_text(self, text: str) -> bool:
        """Return whether some row of the table has exactly this text."""
        (text_hash,) = hash_texts([text])
        place = int(np.searchsorted(self.text_hashes, text_hash))
        return place < len(self.text_hashes) and bool(self.text_hashes[place] == text_hash)


@dataclass(frozen=True)
class BlockCounts:
    """What one block holds. hashes, repeats: (rows,), of each row's text and how often it counts,
    None: once.

    is_faulty: a row cannot be used, and nothing else is filled.
    """

    block: TableBlock
    hashes: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    repeats: NDArray[np.int64] | None = None
    names: tuple[str, ...] = ()
    is_faulty: bool = False


@dataclass(frozen=True)
class BlockHashing:
    """Hashes blocks of one file, each on its own: work for an engine. layout: columns of a row's
    text."""

    where: str
    path: Path
    layout: tuple[str, ...]
    has_repeats: bool
    portion: ClassVar[int] = 1

    def results_at_workplace(
        self, place: Any, items: Sequence[TableBlock]
    ) -> Iterator[BlockCounts]:
        for block in items:
            try:
                yield self.hash_block(block)
            except (
                AuditError,
                NotStreamable,
                ValueError,
                OSError,
            ):  # whoever has the blocks before names the row
                yield BlockCounts(block, is_faulty=True)

    def hash_block(self, block: TableBlock, first_row: int = 0, first_line: int = 0) -> BlockCounts:
        """Return what the block holds. Raises AuditError with the row; first_row, first_line: those
        before it."""
        names, wanted = (
            dict[str, None](),
            (*self.layout, *((columns.REPEATS,) if self.has_repeats else ())),
        )
        hashes, repeats = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        n_rows = first_row
        for batch in stream_batches(
            self.where, self.path, block, wanted, names, (first_row, first_line)
        ):
            n = len(batch[wanted[0]])
            table = RecordTable(self.where, wanted, n, batch.__getitem__, first_row=n_rows)
            hashes.append(hash_texts(columns.joined_layout_texts(table, self.layout)))
            if self.has_repeats:
                repeats.append(np.array(columns.row_repeat_counts(table), np.int64))
            n_rows += n
        counted = np.concatenate(repeats) if self.has_repeats else None
        return BlockCounts(block, np.concatenate(hashes), counted, tuple(names))


def hash_blocks_here(work: BlockHashing, blocks: Sequence[TableBlock]) -> Iterator[BlockCounts]:
    """Yield the counts of each block, one after the other in this process."""
    yield from work.results_at_workplace(None, blocks)


HashBlocks = Callable[[BlockHashing, Sequence[TableBlock]], Iterator[BlockCounts]]


@dataclass(frozen=True)
class TableCounting:
    """Has large tables counted, once: `hash_blocks` in any order, and what was `counted`, by flag
    and name."""

    hash_blocks: HashBlocks = hash_blocks_here
    counted: dict[str, UnreadRows] = field(default_factory=dict)


def read_sample_of_large_table(
    where: str,
    path: Path,
    wanted: Sequence[str],
    limit: int,
    draw_order: Callable[[int], NDArray[np.int64]],
    copied_first: bool,
    counting: TableCounting,
) -> tuple[RecordTable, UnreadRows] | None:
    """Return a sample of the distinct rows of a large table and what is known of the others; None:
    read it whole.

    wanted: columns; limit: secrets that are attacked; draw_order: gives the numbers below n in
    random order;
    copied_first: half of the sample are the rows with most copies; the rest, or else all of it, is
    drawn at random.
    counting: what was counted already is not counted again. Raises AuditError with the first row
    that cannot be used.
    """
    if path.suffix.lower() not in _SUFFIXES or not path.is_file():
        return None
    try:
        if where not in counting.counted:
            head = _read_head_of_large_table(where, path)
            if head is None or (layout := _plain_layout_of_table(head)) is None:
                return None
            work = BlockHashing(where, path, layout, columns.REPEATS in head.columns)
            hashes, times, table = _scan_texts(work, head, counting.hash_blocks)
            size = max(SAMPLE, _SAMPLES_PER_LIMIT * limit)
            if len(hashes) <= max(LARGE, size):
                return None
            counting.counted[where] = _choose_sample(
                hashes, times, table, size, draw_order, copied_first
            )
        unread = counting.counted[where]
        read = [name for name in wanted if name in unread.columns]
        return replace(
            _read_rows(where, path, read, unread.rows), columns=unread.columns, texts=unread.texts
        ), unread
    except (NotStreamable, ValueError, OSError):
        # whoever reads the whole table finds the same fault before its first row, and names it
        return None


def is_large_table_of_texts(where: str, path: Path) -> bool:
    """Return whether a file is a large table without conversations, by its first rows."""
    if path.suffix.lower() not in _SUFFIXES or not path.is_file():
        return False
    try:
        head = _read_head_of_large_table(where, path)
    except (NotStreamable, ValueError, OSError):
        return False
    return head is not None and _plain_layout_of_table(head) is not None


def _plain_layout_of_table(table: RecordTable) -> tuple[str, ...] | None:
    """Return the columns of a row's text; None for conversations, and for columns that are
    refused."""
    try:
        layout = columns.detect_column_layout(table)
    except AuditError:
        return None
    return layout if layout in columns.PLAIN else None


def _read_head_of_large_table(where: str, path: Path) -> RecordTable | None:
    """Return the first rows, by which layout and columns with texts are told; None for a table that
    is not large."""
    objects: list[dict[str, Any]]
    if path.suffix.lower() == ".parquet":
        with open_parquet(path) as file:
            if file.metadata.num_rows <= LARGE:
                return None
            names = tuple(file.schema_arrow.names)
            objects = next(file.iter_batches(FIRST)).to_pylist()
    else:
        if sum(1 for _ in islice(stream_nonblank_lines(path), LARGE + 1)) <= LARGE:
            return None
        objects = list(islice(stream_objects(where, path, split_into_blocks(path)[0]), BATCH))
        names = tuple(dict.fromkeys(name for value in objects for name in value))
    values = {name: [value.get(name, ABSENT) for value in objects] for name in names}
    return RecordTable(where, names, len(objects), values.__getitem__, columns_with_texts(objects))


def _scan_texts(
    work: BlockHashing, head: RecordTable, hash_blocks: HashBlocks
) -> tuple[NDArray[np.int64], NDArray[np.int64] | None, RecordTable]:
    """Return the hash of each row's text, its repeats if the table has them, and the head with all
    columns.

    Raises AuditError with the first row that cannot be used: the block that holds it is read once
    more.
    """
    waiting: dict[int, BlockCounts] = {}
    done: list[BlockCounts] = []
    for counts in hash_blocks(work, split_into_blocks(work.path)):
        waiting[counts.block.number] = counts
        while (following := waiting.pop(len(done), None)) is not None:
            if following.is_faulty:
                n_rows = sum(len(block.hashes) for block in done)
                following = work.hash_block(
                    following.block, n_rows, count_lines(work.path, following.block.start)
                )
            done.append(following)
    names = tuple(
        dict.fromkeys((*head.columns, *(name for counts in done for name in counts.names)))
    )
    whole = replace(head, columns=names)
    columns.detect_column_layout(whole)
    if columns.REPEATS in names and not work.has_repeats:  # in later rows only
        columns.row_repeat_counts(replace(whole, rows=1, column=lambda name: [ABSENT]))
    repeats = np.concatenate(
        [counts.repeats for counts in done if counts.repeats is not None] or [np.empty(0, np.int64)]
    )
    return (
        np.concatenate([counts.hashes for counts in done]),
        repeats if work.has_repeats else None,
        whole,
    )


def _count_equal_texts(
    hashes: NDArray[np.int64], times: NDArray[np.int64] | None
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return of each distinct text its first row and its copies, by first row; and the distinct
    hashes, sorted.

    hashes, times: (rows,); times: how often each row counts, None: once.
    """
    distinct, first, of_row, copies = np.unique(
        hashes, return_index=True, return_inverse=True, return_counts=True
    )
    if times is not None:
        copies = np.zeros(len(distinct), np.int64)
        np.add.at(copies, of_row, times)
    by_row = np.argsort(first)
    return first[by_row], copies[by_row], distinct


def _choose_sample(
    hashes: NDArray[np.int64],
    times: NDArray[np.int64] | None,
    table: RecordTable,
    size: int,
    draw_order: Callable[[int], NDArray[np.int64]],
    copied_first: bool,
) -> UnreadRows:
    """Return which `size` of the distinct rows are read, and what is known of the others; see
    `_scan_texts`."""
    first, copies, distinct = _count_equal_texts(hashes, times)
    chosen = _choose_rows(copies, draw_order(len(first)), size, copied_first)
    others = np.delete(copies, chosen)
    values, counts = np.unique(others, return_counts=True)
    by_copies = Counter(
        {format_copies(int(value)): int(n) for value, n in zip(values, counts, strict=True)}
    )
    rows = tuple(first[chosen].tolist())
    n_copies = tuple(copies[chosen].tolist())
    return UnreadRows(
        rows,
        n_copies,
        table.columns,
        table.texts,
        len(hashes),
        len(others),
        by_copies,
        text_hashes=distinct,
    )


def _choose_rows(
    copies: NDArray[np.int64], order: NDArray[np.int64], size: int, copied_first: bool
) -> NDArray[np.int64]:
    """Return `size` of the distinct rows, ascending. copies: (distinct,); order: (distinct,), all
    of them at random."""
    if copied_first:
        most_copied = order[np.argsort(-copies[order], kind="stable")][: size // 2]
        most_copied = most_copied[copies[most_copied] > 1]
        order = np.concatenate((most_copied, order[~np.isin(order, most_copied)]))
    return np.sort(order[:size])


def _read_rows(where: str, path: Path, names: Sequence[str], rows: Sequence[int]) -> RecordTable:
    """Return these columns of these rows of a table; rows: in ascending order."""
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
    return RecordTable(where, tuple(names), len(rows), values.__getitem__)


def _stream_chosen_rows(
    where: str, path: Path, names: Sequence[str], rows: Sequence[int]
) -> Iterator[Mapping[str, Any]]:
    chosen = set(rows)
    if path.suffix.lower() == ".jsonl":
        numbered = enumerate(stream_raw_lines(path, make_whole_file_block(path)))
        nonblank = (
            pair
            for pair in numbered
            if pair[1].startswith(b"{") or pair[1].decode("utf-8-sig").strip()
        )
        for row, (number, line) in enumerate(nonblank):
            if row in chosen:
                yield parse_json_of_table(where, line.decode("utf-8-sig"), number)
    elif path.suffix.lower() == ".csv":
        blocks = split_into_blocks(path)
        yield from (
            value
            for row, value in enumerate(stream_objects(where, path, blocks[0]))
            if row in chosen
        )
    else:
        start, in_order = 0, np.array(rows)
        with open_parquet(path) as file:
            for batch in file.iter_batches(batch_size=BATCH, columns=list(names)):
                here = in_order[(in_order >= start) & (in_order < start + batch.num_rows)]
                yield from batch.take(here - start).to_pylist()
                start += batch.num_rows
