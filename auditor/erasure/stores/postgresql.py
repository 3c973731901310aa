"""Read a PostgreSQL server: rows, the planner's statistics, nearest neighbours and files."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

import numpy as np

from auditor.core.arrays import Floats
from auditor.core.errors import AuditError, wrap_library_errors
from auditor.erasure.encodings import join_cells
from auditor.erasure.layers import Layer, Piece
from auditor.erasure.store import BYTES, INSTALL, NearestSearch, Store, read_files
from auditor.erasure.stores.sqlite import quote
from auditor.erasure.windows import TEXT, VECTORS, WORDS

_SERVERS = (15, 16, 18)  # tested major versions
_AT_ONCE = 2_000  # rows
_LARGEST_ROW = 1_800  # bytes; PostgreSQL compresses and moves values of rows from 2,032 bytes
_LONG_TEXT = 2_032  # bytes; no row of a table holds longer texts uncompressed
_LARGEST_KEY = 500  # bytes of a value in an index; larger ones are compressed
_LARGEST_NAME = 64  # bytes; an index of shorter values, such as ids, has no texts of records
_OTHER = "other files"
_TABLES = "tables"
_REWRITE = "VACUUM FULL of the table, then CHECKPOINT"
_LOG = "pg_wal"
_STATISTICS = "pg_statistic"
_KINDS = {"r": "table", "m": "view", "i": "index"}
_TEXT_CATEGORIES = ("S", "U", "A", "C", "X", "Z")  # of pg_type: texts, JSON, lists, and so on
_SYSTEM = ("pg_catalog", "pg_toast", "information_schema")
_VECTOR_TYPES = ("vector", "halfvec")
_NUMBER_LISTS = (*_VECTOR_TYPES, "_float4", "_float8")
_VECTOR = re.compile(r"\[([-+0-9.eE,]+)\]")
_COMPRESSED = "xm"  # pg_attribute.attstorage of columns whose values may be compressed
# Header of a compressed page in the log (XLogRecordBlockImageHeader), as the first block of a
# record: its number 0, flags, length of data, length of the page, offset of its hole, flags of the
# page, and the length of the hole. Then the tablespace and the database follow.
_COMPRESSED_PAGE = re.compile(
    rb"\0([\x10-\x13\x30-\x33\x50-\x53\x70-\x73])(..)(..)(..)"
    rb"(?:[\x04\x06\x08\x0a\x10\x12]()|[\x05\x07\x09\x0b\x11\x13](..))\Z",
    re.DOTALL,
)
_HEADER = 11  # bytes that the pattern needs at most
_HAS_DATA = 0x20  # flag of a block
_PAGE = 8_192  # bytes
# Fields: path in the data directory, schema, name, kind, and the table of a TOAST table.
_RELATIONS = """
SELECT pg_relation_filepath(c.oid), n.nspname, c.relname, c.relkind::text,
       coalesce(tn.nspname, n.nspname), coalesce(t.relname, c.relname)
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
LEFT JOIN pg_class t ON t.reltoastrelid = c.oid LEFT JOIN pg_namespace tn ON tn.oid = t.relnamespace
WHERE pg_relation_filepath(c.oid) IS NOT NULL"""
_COLUMNS = """
SELECT n.nspname, c.relname, a.attname, t.typname, t.typcategory::text, a.attstorage::text
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
JOIN pg_attribute a ON a.attrelid = c.oid JOIN pg_type t ON t.oid = a.atttypid
WHERE c.relkind IN ('r', 'm') AND a.attnum > 0 AND NOT a.attisdropped
  AND n.nspname NOT IN ('pg_catalog', 'pg_toast', 'information_schema')
  AND n.nspname NOT LIKE 'pg\\_temp%' ORDER BY 1, 2, a.attnum"""
# Fields: schema and name of the index, type of a key, and schema, table and column of the key
# ("": an expression).
_INDEXES = """
SELECT n.nspname, x.relname, t.typname, t.typcategory::text, tn.nspname, c.relname,
       coalesce(a.attname, '')
FROM pg_index i JOIN pg_class x ON x.oid = i.indexrelid
JOIN pg_namespace n ON n.oid = x.relnamespace
JOIN pg_class c ON c.oid = i.indrelid JOIN pg_namespace tn ON tn.oid = c.relnamespace
CROSS JOIN LATERAL unnest(i.indclass::oid[], (i.indkey::int2[])[0:i.indnkeyatts - 1])
     AS k(opclass, number)
JOIN pg_opclass o ON o.oid = k.opclass JOIN pg_type t ON t.oid = o.opcintype
LEFT JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum = k.number AND k.number > 0
WHERE n.nspname NOT IN ('pg_catalog', 'pg_toast')"""
_STATISTICS_QUERY = """
SELECT schemaname || '.' || tablename || '.' || attname,
       most_common_vals::text, histogram_bounds::text, most_common_elems::text
FROM pg_stats WHERE schemaname NOT IN ('pg_catalog', 'information_schema')
UNION ALL SELECT statistics_name, most_common_vals::text, NULL, NULL FROM pg_stats_ext
UNION ALL SELECT statistics_name, most_common_vals::text, histogram_bounds::text,
       most_common_elems::text FROM pg_stats_ext_exprs"""
_SETTINGS = """
SELECT name, setting FROM pg_settings WHERE name IN ('server_version', 'data_directory',
    'wal_level', 'wal_compression', 'default_toast_compression')
UNION ALL SELECT extname, extversion FROM pg_extension WHERE extname = 'vector'"""
_DATABASE = "SELECT oid::bigint FROM pg_database WHERE datname = current_database()"
_IDENTIFIER = "SELECT system_identifier FROM pg_control_system()"


@dataclass(frozen=True)
class _Column:
    """Describe a column of a table.

    schema, table, name: without quotes; type, category: from pg_type; storage: from
    pg_attribute.attstorage.
    """

    schema: str
    table: str
    name: str
    type: str
    category: str
    storage: str = ""

    @property
    def quoted_table(self) -> str:
        return f"{quote(self.schema)}.{quote(self.table)}"


@dataclass(frozen=True)
class PostgreSQLStore(Store):
    """Read a server's database, `postgresql://USER@HOST:PORT/DATABASE`.

    path: a copy of the server's files, or an empty folder.
    address: the address for the driver; relations: the rows of _RELATIONS; settings: the server's
        settings, keyed by name; reason: why the server's files cannot be read, or "".
    """

    address: str = ""
    relations: tuple[tuple[str, ...], ...] = ()
    settings: Mapping[str, str] = field(default_factory=dict)
    reason: str = ""

    name = "postgresql"
    schemes = ("postgresql", "postgres")
    package = "psycopg"
    tested = ("3.3.",)
    holds_no: ClassVar[Mapping[str, str]] = {TEXT: _OTHER, VECTORS: _OTHER}
    remedies = (
        (r"^rows|^words", f"DELETE the rows, then {_REWRITE}"),
        (r"^planner", "ANALYZE"),
        (_STATISTICS, "ANALYZE, VACUUM FULL pg_catalog.pg_statistic, CHECKPOINT"),
        (
            _LOG,
            "a write and pg_switch_wal(), CHECKPOINT, then a write and pg_switch_wal() for every "
            "file of pg_wal; copies in an archive or on a standby stay",
        ),
        (r"tables|index", _REWRITE),
    )

    @classmethod
    def recognises(cls, path: Path) -> bool:
        return False

    @classmethod
    def open(cls, source: str, scratch: Path) -> Store:
        address = urlsplit(source)
        if address.password or "password=" in address.query.lower():
            raise AuditError(
                "expected an address without a password, which reports would repeat: set "
                "PGPASSWORD, or write it into ~/.pgpass"
            )
        store = cls(scratch, source)
        with store._begin() as connection:
            major = connection.info.server_version // 10_000
            if major not in _SERVERS:
                known = ", ".join(map(str, _SERVERS))
                raise AuditError(
                    f"expected PostgreSQL {known}, whose layers are known; got {major}"
                )
            # Files first: the server may tidy the pages of a table that is read.
            relations = tuple(connection.execute(_RELATIONS).fetchall())
            settings = dict(connection.execute(_SETTINGS).fetchall())
            (number,) = connection.execute(_IDENTIFIER).fetchone()
            reason = _copy_data_directory(settings.get("data_directory", ""), number, scratch)
        return replace(store, relations=relations, settings=settings, reason=reason)

    @contextmanager
    def _begin(self) -> Iterator[Any]:
        """Yield a connection in a read-only transaction, and close it after the block."""
        try:
            import psycopg
        except ImportError:
            message = f"PostgreSQL is read with psycopg, which is not installed ({INSTALL})"
            raise AuditError(message) from None
        with wrap_library_errors(f"{self.address} cannot be read"):
            options = "-c default_transaction_read_only=on -c row_security=off"
            with psycopg.connect(self.address, connect_timeout=10, options=options) as connection:
                yield connection

    def describe(self) -> list[str]:
        settings = []
        for name, value in self.settings.items():
            if name != "data_directory":
                settings.append(f"{name} {value}")
        return [*super().describe(), *settings]

    # --- layers ---

    def list_nearest_searches(self) -> Iterator[tuple[str, NearestSearch]]:
        if any(column.type in _VECTOR_TYPES for column in self._columns):
            yield from super().list_nearest_searches()

    def list_layers(self) -> Iterator[Layer]:
        if self.reason:
            yield Layer("files of the server", list, (TEXT,), doubt=self.reason)
        else:
            yield from self._list_file_groups()
        yield Layer("rows", self._read_rows, other_texts=True)
        if self._word_columns:
            yield Layer("words of tsvector columns", self._read_words, (WORDS,))
        kinds = self._list_quoted_kinds()
        yield Layer("planner's statistics", self._read_statistics, kinds, quotes=True)

    def list_files(self) -> list[Path]:
        if self.reason:
            return []
        return super().list_files()

    def _list_file_groups(self) -> Iterator[Layer]:
        """Yield a layer for each group of files, such as the log or the files of one table."""
        groups: dict[str, list[tuple[Path, str]]] = {}
        names = self._name_relations()
        indexes = self._list_indexes()
        for path in self.list_files():
            relative = str(path.relative_to(self.path))
            group, place = names.get(re.sub(r"\.\d+$", "", relative), (_OTHER, relative))
            if relative.startswith("pg_wal/"):
                group = _LOG
            elif group.startswith("index ") and group not in indexes:
                group = _OTHER
            groups.setdefault(group, []).append((path, place))
        limit = self._find_largest_plain_text()
        doubt = self._doubt_long_texts()
        for group, files in sorted(groups.items()):
            layer = Layer(f"{BYTES}{group}", partial(read_files, files))
            if group in indexes:
                layer = replace(layer, kinds=indexes[group])
                yield from _split_lengths(layer, min(limit, _LARGEST_KEY), doubt)
            elif group == _STATISTICS:
                yield replace(layer, kinds=self._list_quoted_kinds(), quotes=True)
            elif group == _LOG:
                may_compress = self.settings.get("wal_compression") != "off"
                if may_compress or self._has_compressed_pages(path for path, _ in files):
                    layer = replace(layer, doubt="pages there may be compressed (wal_compression)")
                yield from _split_lengths(layer, limit, doubt)
            else:
                yield from _split_lengths(layer, limit, doubt)
            if group == _TABLES and self._word_columns:
                yield replace(layer, kinds=(WORDS,))

    def _doubt_long_texts(self) -> str:
        """Return why a search for long texts may miss deleted ones but find kept ones, or "".

        The reason is that PostgreSQL compresses some long texts, but not others.
        """
        with self._begin() as connection:
            for column in self._columns:
                is_text = column.category in _TEXT_CATEGORIES and column.type not in _NUMBER_LISTS
                if not is_text or column.storage not in _COMPRESSED:
                    continue
                if _measure_longest(connection, column) > _LARGEST_NAME:
                    name = f"{column.table}.{column.name}"
                    return f"PostgreSQL compresses texts of {name} of this length if they shrink"
        return ""

    def _has_compressed_pages(self, files: Iterable[Path]) -> bool:
        """Test whether files of the write-ahead log contain a compressed page of this database."""
        with self._begin() as connection:
            (number,) = connection.execute(_DATABASE).fetchone()
        database = int(number).to_bytes(4, sys.byteorder)
        for path in files:
            content = path.read_bytes()
            place = content.find(database)
            while place >= 0:
                end = max(0, place - 4)  # before the tablespace
                header = _COMPRESSED_PAGE.search(content, max(0, end - _HEADER), end)
                if header is not None and _is_consistent(header):
                    return True
                place = content.find(database, place + 1)
        return False

    def _name_relations(self) -> dict[str, tuple[str, str]]:
        """Return the layer and position (for reports) of each relation's file, keyed by path."""
        names = {}
        for path, schema, name, kind, owner_schema, owner in self.relations:
            place = f"{_KINDS.get(kind, kind)} {name}"
            if kind == "t":
                place = f"TOAST of table {owner}"
            group = _OTHER
            if owner in (_STATISTICS, "pg_statistic_ext_data"):
                group = _STATISTICS
            elif owner_schema not in _SYSTEM:
                group = _TABLES
                if kind == "i":
                    group = f"index {schema}.{name}"
            names[path] = (group, place)
        return names

    @cached_property
    def _columns(self) -> list[_Column]:
        with self._begin() as connection:
            return [_Column(*row) for row in connection.execute(_COLUMNS)]

    @property
    def _word_columns(self) -> list[_Column]:
        return [column for column in self._columns if column.type == "tsvector"]

    def _list_quoted_kinds(self) -> tuple[str, ...]:
        """Return the kinds of content that statistics of columns and of indexes may have."""
        is_indexed = any(WORDS in kinds for kinds in self._list_indexes().values())
        if is_indexed or self._word_columns:
            return (TEXT, VECTORS, WORDS)
        return (TEXT, VECTORS)

    def _list_indexes(self) -> dict[str, tuple[str, ...]]:
        """Return the kinds of content that each index may have, keyed by the index's layer."""
        indexes: dict[str, tuple[str, ...]] = {}
        with self._begin() as connection:
            for schema, name, type, category, column_schema, table, column in connection.execute(
                _INDEXES
            ).fetchall():
                kinds: tuple[str, ...] = ()
                if type == "tsvector":
                    kinds = (WORDS,)
                elif type in (*_VECTOR_TYPES, "sparsevec", "bit"):
                    kinds = (VECTORS,)
                elif category in _TEXT_CATEGORIES and type != "uuid":
                    key = _Column(column_schema, table, column, type, category)
                    if not column or _measure_longest(connection, key) > _LARGEST_NAME:
                        kinds = (TEXT,)
                if kinds:
                    group = f"index {schema}.{name}"
                    indexes[group] = (*indexes.get(group, ()), *kinds)
        return indexes

    def _find_largest_plain_text(self) -> int:
        """Return the length in bytes below which PostgreSQL does not compress any text."""
        limit = _LARGEST_ROW
        by_table: dict[str, list[_Column]] = {}
        for column in self._columns:
            by_table.setdefault(column.quoted_table, []).append(column)
        with self._begin() as connection:
            for table, columns in by_table.items():
                others = [c for c in columns if c.category not in _TEXT_CATEGORIES]
                others += [c for c in columns if c.type in _VECTOR_TYPES]
                for column in columns:
                    name = quote(column.name)
                    limit = _query_minimum(
                        connection,
                        f"SELECT min(octet_length({name}::text)) FROM {table} "
                        f"WHERE pg_column_compression({name}) IS NOT NULL",
                        limit,
                    )
                widths = [f"coalesce(pg_column_size({quote(c.name)}), 0)" for c in others]
                if widths:
                    width = " + ".join(widths)
                    question = (
                        f"SELECT {_LARGEST_ROW} - max({width}) FROM {table} "
                        f"WHERE {width} < {_LARGEST_ROW}"
                    )
                    limit = _query_minimum(connection, question, limit)
        return max(0, limit)

    # --- rows that the server returns ---

    def _read_rows(self) -> Iterator[Piece]:
        with self._begin() as connection:
            for column in self._columns:
                place = f"table {column.table}"
                name = quote(column.name)
                if column.type in _NUMBER_LISTS:
                    question = f"SELECT {name}::real[] FROM {column.quoted_table}"
                elif column.type == "bytea":
                    question = f"SELECT {name} FROM {column.quoted_table}"
                elif column.category in _TEXT_CATEGORIES:
                    question = f"SELECT {name}::text FROM {column.quoted_table}"
                else:
                    continue
                with connection.cursor(name="audit") as cursor:
                    cursor.execute(f"{question} WHERE {name} IS NOT NULL")
                    while rows := cursor.fetchmany(_AT_ONCE):
                        yield _make_piece(place, [row[0] for row in rows])

    def _read_words(self) -> Iterator[Piece]:
        with self._begin() as connection:
            for column in self._word_columns:
                question = f"SELECT {quote(column.name)} FROM {column.quoted_table}"
                rows = connection.execute("SELECT word FROM ts_stat(%s)", [question]).fetchall()
                yield Piece(f"table {column.table}", [word for (word,) in rows])

    def _read_statistics(self) -> Iterator[Piece]:
        with self._begin() as connection:
            for place, *values in connection.execute(_STATISTICS_QUERY):
                texts = [value for value in values if value is not None]
                yield Piece(place, texts)
                for text in texts:
                    vectors = [np.fromstring(match, sep=",") for match in _VECTOR.findall(text)]
                    if vectors and len({len(vector) for vector in vectors}) == 1:
                        yield Piece(place, np.array(vectors))

    def search_nearest(self, vectors: Floats) -> Iterator[Piece]:
        with self._begin() as connection:
            for column in self._columns:
                if column.type not in _VECTOR_TYPES:
                    continue
                name = quote(column.name)
                question = (
                    f"SELECT {name}::real[] FROM {column.quoted_table} "
                    f"WHERE vector_dims({name}) = {vectors.shape[1]} "
                    f"ORDER BY {name} <-> %s::{column.type} LIMIT 1"
                )
                for vector in vectors.tolist():
                    rows = connection.execute(question, [str(vector)]).fetchall()
                    if rows:
                        yield Piece(f"table {column.table}", np.array([rows[0][0]]))


def _is_consistent(header: re.Match[bytes]) -> bool:
    """Test whether these bytes may be the header of a compressed page."""
    flags, *numbers = [part or b"\0" for part in header.group(1, 2, 3, 4, 6)]
    data, page, offset, hole = [int.from_bytes(part, sys.byteorder) for part in numbers]
    if data and not flags[0] & _HAS_DATA:
        return False
    if bool(hole) != bool(offset):
        return False
    return 0 < page < _PAGE and offset + hole <= _PAGE


def _make_piece(place: str, cells: Sequence[Any]) -> Piece:
    """Return a column's cells as texts, bytes or, if all are lists of one length, vectors."""
    if isinstance(cells[0], str):
        return Piece(place, cells)
    if isinstance(cells[0], bytes):
        return Piece(place, join_cells(cells))
    lengths = {len(cell) for cell in cells}
    if len(lengths) == 1:
        return Piece(place, np.array(cells, np.float64))
    return Piece(place, [str(cell) for cell in cells])


def _measure_longest(connection: Any, column: _Column) -> int:
    """Return the length of the longest value of a column, in bytes."""
    question = f"SELECT max(octet_length({quote(column.name)}::text)) FROM {column.quoted_table}"
    (longest,) = connection.execute(question).fetchone()
    return longest or 0


def _query_minimum(connection: Any, question: str, limit: int) -> int:
    """Return the smaller of `limit` and the query's result; `limit` if the result is NULL."""
    (answer,) = connection.execute(question).fetchone()
    if answer is None:
        return limit
    return min(limit, answer)


def _split_lengths(layer: Layer, limit: int, doubt: str) -> Iterator[Layer]:
    """Yield the layer twice: for short texts, and for texts that PostgreSQL may compress or move.

    limit: length of the shortest long text, in bytes; doubt: why the absence of long texts proves
        nothing, or "".
    """
    if layer.kinds == (WORDS,):  # words are separate keys
        yield layer
        return
    yield replace(layer, text_bytes=range(limit))
    kinds = tuple(kind for kind in layer.kinds if kind != VECTORS)
    if not kinds:
        return
    layer = replace(layer, kinds=kinds, doubt=layer.doubt or doubt)
    if not doubt:
        name = f"{layer.name}, texts of {limit:,} to {_LONG_TEXT - 1:,} bytes"
        yield replace(layer, name=name, text_bytes=range(limit, _LONG_TEXT))
        limit = max(limit, _LONG_TEXT)
    name = f"{layer.name}, texts from {limit:,} bytes"
    yield replace(layer, name=name, text_bytes=range(limit, sys.maxsize))


def _copy_data_directory(directory: str, identifier: int, scratch: Path) -> str:
    """Copy the server's data files to `scratch`; return why this is impossible, or "".

    identifier: the server's system identifier; a directory with a different one is not copied.
    """
    if not directory:
        return "the server does not tell this user its data_directory (role pg_read_all_settings)"
    top = Path(directory)
    try:
        start = (top / "global" / "pg_control").read_bytes()[:8]
        if int.from_bytes(start, sys.byteorder) != identifier:
            return f"the files in {directory} on this machine are another server's"
        for folder, _, names in os.walk(top, followlinks=True, onerror=_raise):
            for name in names:
                _copy_file(Path(folder, name), scratch / Path(folder).relative_to(top) / name)
    except OSError as error:
        return f"{directory} cannot be read on this machine ({error.strerror})"
    return ""


def _copy_file(file: Path, copy: Path) -> None:
    copy.parent.mkdir(parents=True, exist_ok=True)
    # The server may remove a file meanwhile.
    with suppress(FileNotFoundError):
        if file.is_file():
            shutil.copyfile(file, copy)


def _raise(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error
