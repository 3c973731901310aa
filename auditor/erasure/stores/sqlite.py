"""Read SQLite: rows, word indexes (FTS3 to FTS5), free pages and the write-ahead log."""

from __future__ import annotations

import itertools
import re
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import ClassVar

from auditor.core.counts import format_count
from auditor.core.errors import AuditError
from auditor.erasure.encodings import join_cells
from auditor.erasure.layers import Layer, PartlyReadError, Piece
from auditor.erasure.store import Store
from auditor.erasure.windows import TEXT, VECTORS, WORDS
from auditor.erasure.word_index import list_index_words, rebuild_index_texts

_MAGIC = b"SQLite format 3\0"
_AT_ONCE = 2_000  # rows
_MOST_TRIGRAMS = 2**26  # bytes of an index, which are read in 30 s
FREE = "free space"
_TRIGRAMS = re.compile(r"\btokenize\s*=\s*['\"]?\s*trigram", re.I)


class SQLiteStore(Store):
    """Read a database file, and the `-wal` and `-journal` files next to it."""

    name = "sqlite"
    holds_no: ClassVar[Mapping[str, str]] = {TEXT: r"-shm$", VECTORS: r"-shm$"}
    remedies: ClassVar[tuple[tuple[str, str], ...]] = (
        (
            r"vocabulary",
            "INSERT INTO {table}({table}) VALUES ('rebuild') (a contentless index: make it again), "
            "then VACUUM",
        ),
        (r"table sqlite_stat", "ANALYZE, then VACUUM"),
        (r"word index", "INSERT INTO {table}({table}) VALUES ('optimize'), then VACUUM"),
        (r"rows", "DELETE the rows, then VACUUM"),
        (r"-wal$", "VACUUM, then PRAGMA wal_checkpoint(TRUNCATE)"),
        (r"free space|\.", "VACUUM, then in WAL mode PRAGMA wal_checkpoint(TRUNCATE)"),
    )

    @classmethod
    def recognises(cls, path: Path) -> bool:
        return path.is_file() and read_start(path, 16) == _MAGIC

    def check(self) -> None:
        for path in self.list_databases():
            page_size, n_pages = read_page_counts(path)
            if n_pages and path.stat().st_size < page_size * n_pages:
                raise AuditError(
                    f"expected {n_pages:,} pages of {page_size:,} bytes in {path.name}, as its "
                    "header says, got fewer: it is damaged, or was copied while it was written"
                )

    def describe(self) -> list[str]:
        with closing(sqlite3.connect(":memory:")) as database:
            options = set()
            for row in database.execute("PRAGMA compile_options"):
                options.add(row[0])
        if "SECURE_DELETE" in options:
            secure = "with"
        else:
            secure = "without"
        modes = set(map(read_journal_mode, self.list_databases()))
        return [
            *super().describe(),
            f"SQLite {sqlite3.sqlite_version} {secure} SECURE_DELETE reads it (another build may "
            f"write it); journal mode {', '.join(sorted(modes))}",
        ]

    def list_databases(self) -> list[Path]:
        return [path for path in self.list_files() if read_start(path, 16) == _MAGIC]

    def find_locator(self, path: Path) -> Callable[[int], str] | None:
        if read_start(path, 16) == _MAGIC:
            return TableLocator(path)
        return None

    def list_library_layers(self) -> Iterator[Layer]:
        for path in self.list_databases():
            if path == self.path:
                suffix = ""
            else:
                suffix = f" of {path.relative_to(self.folder)}"
            tables = list_tables(path)
            indexes = [name for name, sql in tables.items() if is_word_index(sql)]
            blocks = {name: list_segment_tables(name, tables) for name in indexes}
            segments = {name for names in blocks.values() for name in names}
            plain = []
            for n, sql in tables.items():
                if not is_virtual(sql) and n not in segments:
                    plain.append(n)
            yield Layer(
                f"rows{suffix}",
                partial(read_tables, path, plain),
                other_texts=True,
            )
            for index in indexes:
                name = f"word index {index}{suffix}"
                if _TRIGRAMS.search(tables[index]):
                    read_texts = partial(read_trigrams, path, index, tables[index])
                    yield Layer(name, read_texts, (TEXT,))
                    continue
                read_blocks = partial(read_tables, path, blocks[index])
                if blocks[index] == [f"{index}_data"]:
                    read_blocks = partial(read_segments, path, index)
                yield Layer(name, read_blocks, (WORDS,))
                read_words = partial(read_vocabulary, path, index)
                yield Layer(f"vocabulary of {name}", read_words, (WORDS,))

    def find_remedy(self, layer: str, places: Iterable[str]) -> str:
        table = layer.removeprefix("vocabulary of ").removeprefix("word index ").split(" ")[0]
        return super().find_remedy(layer, places).replace("{table}", table)


def read_start(path: Path, n_bytes: int) -> bytes:
    with path.open("rb") as file:
        return file.read(n_bytes)


def read_page_counts(path: Path) -> tuple[int, int]:
    """Return the page size in bytes, and the number of pages.

    The number of pages is from the header; it is 0 if the header has no valid number.
    """
    header = read_start(path, 100)
    page_size = int.from_bytes(header[16:18], "big")
    is_valid = header[24:28] == header[92:96]
    if is_valid:
        n_pages = int.from_bytes(header[28:32], "big")
    else:
        n_pages = 0
    return 65536 if page_size == 1 else page_size, n_pages


def read_journal_mode(path: Path) -> str:
    if read_start(path, 20)[18:20] == b"\2\2":
        return "WAL"
    return "rollback"


def quote(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def is_virtual(sql: str) -> bool:
    return sql.upper().startswith("CREATE VIRTUAL TABLE")


def is_word_index(sql: str) -> bool:
    return is_virtual(sql) and re.search(r"\bUSING\s+fts[345]\b", sql, re.I) is not None


def list_segment_tables(index: str, tables: Iterable[str]) -> list[str]:
    """Return the tables with the words of a full-text index: of FTS5, or of FTS3 and FTS4."""
    names = (f"{index}_data", f"{index}_segments", f"{index}_segdir")
    return [name for name in names if name in tables]


@contextmanager
def _open_database(path: Path) -> Iterator[sqlite3.Connection]:
    """Open a database file for the block; raise AuditError if the file is damaged."""
    try:
        with closing(sqlite3.connect(path)) as database:
            yield database
    except sqlite3.DatabaseError as error:
        raise AuditError(f"{path.name} cannot be read as SQLite: {error}") from None


def list_tables(path: Path) -> dict[str, str]:
    """Return CREATE statements keyed by table; raise AuditError if the file is damaged."""
    with _open_database(path) as database:
        return list_sql(database)


def list_sql(database: sqlite3.Connection) -> dict[str, str]:
    """Return CREATE statements keyed by table."""
    rows = database.execute("SELECT name, sql FROM sqlite_master WHERE type = 'table'")
    return {name: sql or "" for name, sql in rows}


def read_tables(path: Path, tables: Iterable[str]) -> Iterator[Piece]:
    """Yield texts and bytes of all rows; raise AuditError if the file is damaged."""
    with _open_database(path) as database:
        database.text_factory = lambda content: content.decode(errors="replace")
        for table in tables:
            rows = database.execute(f"SELECT * FROM {quote(table)}")
            while batch := rows.fetchmany(_AT_ONCE):
                cells = list(itertools.chain.from_iterable(batch))
                yield Piece(f"table {table}", [c for c in cells if isinstance(c, str)])
                blobs = [cell for cell in cells if isinstance(cell, bytes)]
                if blobs:
                    yield Piece(f"table {table}", join_cells(blobs))


def read_vocabulary(path: Path, index: str) -> Iterator[Piece]:
    """Yield the words that a search in an index finds, also of rows that its table lost."""
    module = "fts4aux(main, {})"
    if f"{index}_segdir" not in list_tables(path):
        module = "fts5vocab(main, {}, 'row')"
    create = f"CREATE VIRTUAL TABLE temp.vocabulary USING {module.format(quote(index))}"
    try:
        with closing(sqlite3.connect(path)) as database:
            database.text_factory = lambda content: content.decode(errors="replace")
            database.execute(create)
            yield from _read_words(database, index, lambda: _list_vocabulary(database))
    except sqlite3.OperationalError as error:  # such as a tokenizer of another program
        raise PartlyReadError(error) from None


def _list_vocabulary(database: sqlite3.Connection) -> Iterator[str]:
    for (word,) in database.execute("SELECT DISTINCT term FROM temp.vocabulary"):
        yield word


def read_segments(path: Path, index: str) -> Iterator[Piece]:
    """Yield the words of an FTS5 index's segments, also of rows that were deleted from it."""
    question = f"SELECT id, block FROM {quote(f'{index}_data')}"
    with _open_database(path) as database:
        yield from _read_words(
            database, index, lambda: list_index_words(database.execute(question))
        )


def _read_words(
    database: sqlite3.Connection, index: str, list_index: Callable[[], Iterator[str]]
) -> Iterator[Piece]:
    """Yield the words of an index; raise PartlyReadError if its table's rows lack some of them.

    The search would miss such words of deleted rows if they are short, or stems.
    """
    surplus = set[str]()
    words = list_index()
    while batch := list(itertools.islice(words, 10 * _AT_ONCE)):
        surplus.update(batch)
        yield Piece(f"word index {index}", batch)
    try:
        # Without a commit, so that the index stays as it was.
        for command in ("rebuild", "optimize"):  # which writes all words to segments
            database.execute(f"INSERT INTO {quote(index)}({quote(index)}) VALUES ('{command}')")
    except sqlite3.OperationalError:  # the index has no table
        if re.search(r"\bporter\b", list_sql(database)[index], re.I):
            raise PartlyReadError("it has stems of words, and no rows to compare") from None
        return
    surplus.difference_update(list_index())
    database.rollback()
    if surplus:
        raise PartlyReadError(f"{format_count(len(surplus), 'word')} of it are in no row")


def read_trigrams(path: Path, index: str, sql: str) -> Iterator[Piece]:
    """Yield the texts that the trigrams of an FTS5 index spell, also of deleted rows.

    sql: its CREATE statement.
    """
    if re.search(r"\bdetail\s*=\s*['\"]?(none|column)", sql, re.I):
        raise PartlyReadError("its trigrams have no positions (detail)")
    with _open_database(path) as database:
        data = quote(f"{index}_data")
        (size,) = database.execute(f"SELECT total(length(block)) FROM {data}").fetchone()
        if size > _MOST_TRIGRAMS:
            limit = f"{_MOST_TRIGRAMS / 2**20:.0f} MiB"
            raise PartlyReadError(f"its trigrams take {size / 2**20:,.0f} MiB, more than {limit}")
        texts = rebuild_index_texts(database.execute(f"SELECT id, block FROM {data} ORDER BY id"))
        while batch := list(itertools.islice(texts, _AT_ONCE)):
            yield Piece(f"trigrams of {index}", batch)


class TableLocator:
    """Map a byte offset in a database file to a table's name, by `dbstat`.

    An offset outside all tables is free space.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._pages: dict[int, str] | None = None

    def __call__(self, place: int) -> str:
        if self._pages is None:
            self._pages = self._list_pages()
        if not self._pages:
            return ""
        page = place // read_page_counts(self._path)[0] + 1
        table = self._pages.get(page)
        return f"{self._path.name}, {f'table {table}' if table else FREE}"

    def _list_pages(self) -> dict[int, str]:
        """Return each used page's table, keyed by page number; {} if this SQLite lacks `dbstat`."""
        try:
            with closing(
                sqlite3.connect(f"{self._path.as_uri()}?immutable=1", uri=True)
            ) as database:
                return dict(database.execute("SELECT pageno, name FROM dbstat"))
        except sqlite3.DatabaseError:
            return {}
