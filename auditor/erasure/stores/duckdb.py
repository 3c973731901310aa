"""Read DuckDB: tables, and the blocks of the database file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pyarrow

from auditor.erasure.layers import Layer, Piece
from auditor.erasure.store import Store
from auditor.erasure.stores.lancedb import read_arrow
from auditor.erasure.stores.sqlite import quote, read_start


class DuckDBStore(Store):
    """Read a database file and the `.wal` file next to it."""

    name = "duckdb"
    package = "duckdb"
    tested = ("2.0.",)
    remedies = (
        (r"^rows", "DELETE the rows, then COPY FROM DATABASE to a new file"),
        (r".", "COPY FROM DATABASE to a new file, then delete this one"),
    )

    @classmethod
    def recognises(cls, path: Path) -> bool:
        return path.is_file() and read_start(path, 12)[8:] == b"DUCK"

    def list_library_layers(self) -> Iterator[Layer]:
        yield Layer("rows", self._read_rows, other_texts=True)

    def _read_rows(self) -> Iterator[Piece]:
        import duckdb

        with closing(duckdb.connect(str(self.path), read_only=True)) as database:
            database.execute("SET enable_progress_bar = false")
            tables = database.execute("SELECT schema_name, table_name FROM duckdb_tables()")
            for schema, table in tables.fetchall():
                rows = database.sql(f"SELECT * FROM {quote(schema)}.{quote(table)}")
                for batch in rows.to_arrow_reader(10_000):
                    yield from read_arrow(f"table {table}", pyarrow.Table.from_batches([batch]))
