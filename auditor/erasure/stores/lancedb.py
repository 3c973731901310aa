"""Read LanceDB on disk: tables, older versions of tables, data files and index files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow

from auditor.core.arrays import Floats
from auditor.erasure.layers import Layer, Piece
from auditor.erasure.store import Store
from auditor.erasure.windows import TEXT, VECTORS

_AT_ONCE = 10_000  # rows
_RETENTION = "optimize(cleanup_older_than=timedelta(0), delete_unverified=True)"
_LISTS = (pyarrow.types.is_list, pyarrow.types.is_large_list, pyarrow.types.is_fixed_size_list)
_NO_RECORDS = r"/_versions/|/_transactions/|/_deletions/"


class LanceDBStore(Store):
    """Read a folder of lancedb.connect, which has a folder NAME.lance for each table."""

    name = "lancedb"
    package = "lancedb"
    tested = ("0.40.",)
    owns_folder = True
    holds_no: ClassVar[Mapping[str, str]] = {TEXT: _NO_RECORDS, VECTORS: _NO_RECORDS}
    remedies = (
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
            sizes = {}
            for field in table.schema:
                sizes[field.name] = _count_dimensions(field.type)
            for column in [name for name, size in sizes.items() if size == vectors.shape[1]]:
                search = table.search(list(vectors.astype(np.float32)), vector_column_name=column)
                yield from read_arrow(f"table {table.name}", search.limit(1).to_arrow())


def _read_table(place: str, table: Any) -> Iterator[Piece]:
    for batch in table.search().to_batches(_AT_ONCE):
        yield from read_arrow(place, pyarrow.Table.from_batches([batch]))


def _count_dimensions(kind: pyarrow.DataType) -> int:
    if pyarrow.types.is_fixed_size_list(kind):
        return int(kind.list_size)
    return 0


def is_text(kind: pyarrow.DataType) -> bool:
    types = pyarrow.types
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def read_arrow(place: str, table: pyarrow.Table) -> Iterator[Piece]:
    """Yield the texts and vectors of an Arrow table, also those inside records and lists."""
    for column in table.columns:
        yield from _read_column(place, column.combine_chunks())


def _read_column(place: str, column: pyarrow.Array) -> Iterator[Piece]:
    if is_text(column.type):
        yield Piece(place, [text for text in column.to_pylist() if text is not None])
    elif pyarrow.types.is_struct(column.type):
        for inner in column.flatten():
            yield from _read_column(place, inner)
    elif any(is_kind(column.type) for is_kind in _LISTS):
        yield from _read_lists(place, column.drop_null())


def _read_lists(place: str, lists: pyarrow.Array) -> Iterator[Piece]:
    if not is_number(lists.type.value_type):
        yield from _read_column(place, lists.flatten())
        return
    size = _count_dimensions(lists.type)
    if not size and len(lists):
        lengths = lists.value_lengths().unique()
        if len(lengths) == 1:  # rows of one length are vectors
            size = lengths[0].as_py()
    if size and len(lists):
        flat = lists.flatten().to_numpy(zero_copy_only=False)
        yield Piece(place, flat.reshape(-1, size))


def is_number(kind: pyarrow.DataType) -> bool:
    return bool(pyarrow.types.is_floating(kind) or pyarrow.types.is_integer(kind))
