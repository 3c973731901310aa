"""Read LanceDB on disk: tables, older versions of tables, data files and index files."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow
from pyarrow import compute

from auditor.core.arrays import Floats
from auditor.core.counts import format_count
from auditor.erasure.encodings import join_cells
from auditor.erasure.layers import Layer, PartlyReadError, Piece
from auditor.erasure.store import SCORES, Store
from auditor.erasure.windows import TEXT, VECTORS

_AT_ONCE = 10_000  # rows
_RETENTION = "optimize(cleanup_older_than=timedelta(0), delete_unverified=True)"
_LISTS = (pyarrow.types.is_list, pyarrow.types.is_large_list, pyarrow.types.is_fixed_size_list)
_BYTES = (
    pyarrow.types.is_binary,
    pyarrow.types.is_large_binary,
    pyarrow.types.is_fixed_size_binary,
    pyarrow.types.is_binary_view,
)
_SHORTEST = 4  # letters of a word to ask a full-text index for
_MOST_WORDS = 12  # of a text
_MOST_HITS = 10  # rows of a word: the rarer it is, the more a deleted row lowers its score
_SAME = 1e-4  # difference of scores
_NO_RECORDS = r"/_versions/|/_transactions/|/_deletions/"


class LanceDBStore(Store):
    """Read a folder of lancedb.connect, which has a folder NAME.lance for each table."""

    name = "lancedb"
    package = "lancedb"
    tested = ("0.40.",)
    owns_folder = True
    holds_no: ClassVar[Mapping[str, str]] = {TEXT: _NO_RECORDS, VECTORS: _NO_RECORDS}
    remedies = (
        (SCORES, "create_index(COLUMN, config=FTS(), replace=True)"),
        (r"_indices", f"create_index(replace=True), then {_RETENTION}"),
        (r"older versions", f"{_RETENTION}; see what then stays in the data files"),
        (r"^rows", "table.delete(...), and the advice for the data files"),
        (r".", f"create_table(NAME, kept_rows, mode='overwrite'), then {_RETENTION}"),
    )

    @classmethod
    def recognises(cls, path: Path) -> bool:
        return path.is_dir() and any(path.glob("*.lance/_versions"))

    @cached_property
    def _tables(self) -> list[Any]:
        import lancedb

        database = lancedb.connect(str(self.path))
        return [database.open_table(path.stem) for path in sorted(self.path.glob("*.lance"))]

    def list_library_layers(self) -> Iterator[Layer]:
        yield Layer("rows", self._read_rows, other_texts=True)
        if any(len(table.list_versions()) > 1 for table in self._tables):
            yield Layer("older versions", self._read_older)

    def _read_rows(self) -> Iterator[Piece]:
        for table in self._tables:
            yield from _read_table(f"table {table.name}", table)

    def _read_older(self) -> Iterator[Piece]:
        for table in self._tables:
            for version in [entry["version"] for entry in table.list_versions()][:-1]:
                table.checkout(version)
                yield from _read_table(f"table {table.name}, version {version}", table)
            table.checkout_latest()

    def search_nearest(self, vectors: Floats) -> Iterator[Piece]:
        for table in self._tables:
            for field in table.schema:
                if getattr(field.type, "list_size", 0) == vectors.shape[1]:
                    queries = list(vectors.astype(np.float32))
                    search = table.search(queries, vector_column_name=field.name)
                    yield from read_arrow(f"table {table.name}", search.limit(1).to_arrow())

    def _list_full_text_indexes(self) -> Iterator[tuple[Any, Any]]:
        for table in self._tables:
            for index in table.list_indices():
                if index.index_type == "FTS" and len(index.columns) == 1:
                    yield table, index

    @property
    def has_scores(self) -> bool:
        return next(self._list_full_text_indexes(), None) is not None

    def search_scores(self, texts: Sequence[str]) -> Iterator[Piece]:
        unasked = set(texts)
        for table, index in self._list_full_text_indexes():
            place = f"full-text index {index.name} of table {table.name}"
            words = {}
            for text in texts:
                words[text] = _find_rare_word(table, index.columns[0], text)
                if words[text][0]:
                    unasked.discard(text)
            yield Piece(place, _list_counted_texts(table, index, words))
        if unasked:
            n_texts = format_count(len(unasked), "text")
            raise PartlyReadError(f"{n_texts} without a word that 1 to {_MOST_HITS - 1} rows have")


def _list_counted_texts(
    table: Any, index: Any, words: Mapping[str, tuple[str, float, bool]]
) -> list[str]:
    """Return the texts that are rows or that the full-text index counts, by the score of a word.

    A score falls with the number of texts that have the word. So it rises if the index, built again
    from the rows, no longer counts a text. words: for each text, by `_find_rare_word`.
    """
    from lancedb.index import FTS

    column = index.columns[0]
    counted = []
    asked = []
    for text, (word, before, is_row) in words.items():
        if is_row:
            counted.append(text)
        elif word:
            asked.append((text, word, before))
    if not asked:
        return counted
    settings = {}
    for field in fields(FTS):
        if field.name in index.index_details:
            settings[field.name] = index.index_details[field.name]
    table.create_index(column, config=FTS(**settings))
    for text, word, before in asked:
        if before < _search_word(table, column, word)[0] - _SAME:
            counted.append(text)
    return counted


def _find_rare_word(table: Any, column: str, text: str) -> tuple[str, float, bool]:
    """Return the word of a text that the fewest rows have, and its best score.

    The third value is whether a row is the text. The word is "" if no row has one of the words.
    """
    words = sorted(
        set(re.findall(rf"\w{{{_SHORTEST},}}", text)), key=lambda word: (-len(word), word)
    )
    rarest = ("", 0.0, False)
    fewest = _MOST_HITS
    for word in words[:_MOST_WORDS]:
        score, rows = _search_word(table, column, word)
        if text in rows:
            return word, score, True
        if 0 < len(rows) < fewest:
            fewest = len(rows)
            rarest = (word, score, False)
    return rarest


def _search_word(table: Any, column: str, word: str) -> tuple[float, list[str]]:
    """Return the best score of a word, and the rows that have it."""
    search = table.search(word, query_type="fts", fts_columns=column)
    rows = search.limit(_MOST_HITS).to_list()
    return max((row["_score"] for row in rows), default=0.0), [row[column] for row in rows]


def _read_table(place: str, table: Any) -> Iterator[Piece]:
    for batch in table.search().to_batches(_AT_ONCE):
        yield from read_arrow(place, pyarrow.Table.from_batches([batch]))


def is_text(kind: pyarrow.DataType) -> bool:
    types = pyarrow.types
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def read_arrow(place: str, table: pyarrow.Table) -> Iterator[Piece]:
    """Yield the texts, bytes and vectors of an Arrow table, also those inside nested values."""
    for column in table.columns:
        yield from _read_column(place, column.combine_chunks())


def _read_column(place: str, column: pyarrow.Array) -> Iterator[Piece]:
    types = pyarrow.types
    if isinstance(column, pyarrow.ExtensionArray):
        column = column.storage
    if types.is_run_end_encoded(column.type):
        column = compute.run_end_decode(column)
    if types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if is_text(column.type):
        yield Piece(place, [text for text in column.to_pylist() if text is not None])
    elif any(is_kind(column.type) for is_kind in _BYTES):
        yield Piece(place, join_cells(column.drop_null().to_pylist()))
    elif types.is_struct(column.type):
        for inner in column.flatten():
            yield from _read_column(place, inner)
    elif types.is_union(column.type):
        for i in range(column.type.num_fields):
            yield from _read_column(place, column.field(i))
    elif types.is_map(column.type):
        entries = column.drop_null()
        yield from _read_column(place, entries.keys)
        yield from _read_column(place, entries.items)
    elif any(is_kind(column.type) for is_kind in _LISTS):
        yield from _read_lists(place, column.drop_null())


def _read_lists(place: str, lists: pyarrow.Array) -> Iterator[Piece]:
    kind = lists.type.value_type
    if not (pyarrow.types.is_floating(kind) or pyarrow.types.is_integer(kind)):
        yield from _read_column(place, lists.flatten())
        return
    if pyarrow.types.is_integer(kind):
        numbers = lists.flatten().drop_null().to_numpy()
        if len(numbers) and numbers.min() >= -128 and numbers.max() < 256:
            yield Piece(place, (numbers & 0xFF).astype(np.uint8).tobytes())
    lengths = compute.list_value_length(lists).unique()
    if len(lengths) == 1 and lengths[0].as_py():  # rows of one length are vectors
        flat = lists.flatten().to_numpy(zero_copy_only=False)
        yield Piece(place, flat.reshape(-1, lengths[0].as_py()))
