"""Read Parquet: rows, and column dictionaries, which may still hold values of dropped rows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow
from pyarrow import parquet

from auditor.erasure.layers import Layer, Piece
from auditor.erasure.store import Store
from auditor.erasure.stores.lancedb import is_text, read_arrow
from auditor.erasure.stores.sqlite import read_start
from auditor.erasure.windows import TEXT

_AT_ONCE = 10_000  # rows


class ParquetStore(Store):
    """Read a Parquet file or a folder of Parquet files."""

    name = "parquet"
    package = "pyarrow"
    tested = ("26.",)
    remedies = (
        (r"dictionaries", "write it again after cat.remove_unused_categories(), or as dtype str"),
        (r".", "write it again without these rows"),
    )

    @classmethod
    def recognises(cls, path: Path) -> bool:
        if path.is_dir():
            return any(map(_is_parquet, path.glob("*.parquet")))
        return _is_parquet(path)

    def list_library_layers(self) -> Iterator[Layer]:
        yield Layer("rows", self._read_rows, other_texts=True)
        yield Layer("dictionaries", self._read_dictionaries, (TEXT,), other_texts=True)

    def _read_rows(self) -> Iterator[Piece]:
        for path in filter(_is_parquet, self.list_files()):
            with parquet.ParquetFile(path) as file:
                for batch in file.iter_batches(_AT_ONCE):
                    yield from read_arrow(path.name, pyarrow.Table.from_batches([batch]))

    def _read_dictionaries(self) -> Iterator[Piece]:
        for path in filter(_is_parquet, self.list_files()):
            texts = list_text_columns(path)
            with parquet.ParquetFile(path, read_dictionary=texts) as file:
                for group in range(file.num_row_groups):
                    columns = file.read_row_group(group, columns=texts).columns
                    for name, column in zip(texts, columns, strict=True):
                        for chunk in column.chunks:
                            values = chunk.dictionary.drop_null().to_pylist()
                            yield Piece(f"{path.name}, column {name}", values)


def list_text_columns(path: Path) -> list[str]:
    """Return the names of the text columns, dictionary-encoded or not."""
    names = []
    for field in parquet.read_schema(path):
        kind = field.type
        if pyarrow.types.is_dictionary(kind):
            kind = kind.value_type
        if is_text(kind):
            names.append(field.name)
    return names


def _is_parquet(path: Path) -> bool:
    return path.is_file() and read_start(path, 4) == b"PAR1"
