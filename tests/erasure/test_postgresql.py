"""PostgreSQL: what a deletion leaves in tables, indexes, statistics and the log, and what removes
it.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from auditor.erasure.examine import Erasure
from tests.conftest import check_command
from tests.erasure.stored import (
    Row,
    count_leftovers,
    examine,
    make_rows,
    split_rows,
    verdicts_by_layer,
    write_rows,
)

TABLES, LOG, STATISTICS = "bytes of tables", "bytes of pg_wal", "bytes of pg_statistic"
VIEW, WORD_INDEX, ROWS = "planner's statistics", "bytes of index public.notes_words", "rows"


def find_programs() -> Path:
    """Return the folder of a server's programs; one with pgvector if there is one."""
    folders = [Path(os.environ.get("AUDIT_TEST_POSTGRESQL", "/nowhere"))]
    folders += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    for folder in folders:
        if (folder / "initdb").is_file():
            return folder
    pytest.skip("apt-get install postgresql")


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """Yield the address of a new server on loopback, without the database."""
    pytest.importorskip("psycopg", reason="pip install 'audit-lm[stores]'")
    programs = find_programs()
    user = "postgres" if os.getuid() == 0 else None  # the server refuses root
    folder = Path(tempfile.mkdtemp(prefix="audit-postgresql-"))
    if user:
        shutil.chown(folder, user)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    data = folder / "data"
    options = f"-p {port} -k {folder} -c listen_addresses=127.0.0.1 -c fsync=off"
    start = ["pg_ctl", "-D", data, "-w", "-l", folder / "log", "-o", options, "start"]

    def run(*words: Any) -> None:
        command = [programs / words[0], *words[1:]]
        subprocess.run(command, check=True, user=user, cwd=folder, stdout=subprocess.DEVNULL)

    try:
        run("initdb", "-D", data, "-U", "audit", "-A", "trust", "--no-sync", "-E", "UTF8")
        run(*start)
        try:
            yield f"postgresql://audit@127.0.0.1:{port}/"
        finally:
            run("pg_ctl", "-D", data, "-m", "immediate", "stop")
    finally:
        shutil.rmtree(folder)


class Database:
    """A new database with a table of notes."""

    def __init__(self, server: str, name: str) -> None:
        import psycopg

        with psycopg.connect(f"{server}postgres", autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}")
        self.address = f"{server}{name}"
        self.connection = psycopg.connect(self.address, autocommit=True)
        found = self.run("SELECT 1 FROM pg_available_extensions WHERE name = 'vector'").fetchone()
        self.vector = "vector(32)" if found else "real[]"
        if found:
            self.run("CREATE EXTENSION vector")
        self.run(f"CREATE TABLE notes (id text PRIMARY KEY, text text, embedding {self.vector})")
        self.run("CREATE INDEX notes_words ON notes USING gin (to_tsvector('simple', text))")

    def run(self, *statements: str, values: Sequence[Any] = ()) -> Any:
        for statement in statements:
            result = self.connection.execute(statement, values or None)
        return result

    def insert(self, rows: Sequence[Row]) -> None:
        statement = f"INSERT INTO notes VALUES (%s, %s, %s::{self.vector})"
        for row in rows:
            listed = str(row["embedding"])
            vector = listed if self.vector == "vector(32)" else f"{{{listed[1:-1]}}}"
            self.run(statement, values=(row["id"], row["text"], vector))

    def delete(self, rows: Sequence[Row]) -> None:
        self.run("DELETE FROM notes WHERE id = ANY(%s)", values=([row["id"] for row in rows],))

    def overwrite_log(self) -> None:
        """Follow the advice for pg_wal."""
        switch = ("SELECT pg_logical_emit_message(true, 'audit', 'x')", "SELECT pg_switch_wal()")
        self.run(*switch, "CHECKPOINT")
        (n_files,) = self.run("SELECT count(*) FROM pg_ls_waldir()").fetchone()
        self.run(*switch * n_files)


@pytest.fixture
def database(server: str, request: pytest.FixtureRequest) -> Iterator[Database]:
    made = Database(server, f"t{abs(hash(request.node.name))}")
    yield made
    made.connection.close()


def find_remedy(erasure: Erasure, layer: str) -> str:
    return next(one.remedy for one in erasure.verdicts if one.layer == layer and one.leftovers)


@pytest.mark.parametrize("n_deleted", [1, 12, 13])
def test_each_layer_keeps_deleted_rows_until_its_advice_is_followed(
    tmp_path: Path, database: Database, n_deleted: int
) -> None:
    rows = make_rows(seed=100 + n_deleted)
    deleted, kept = split_rows(rows, n_deleted)
    database.insert(rows)
    database.run("CHECKPOINT", "ANALYZE notes")
    database.delete(deleted)
    database.run("CHECKPOINT")
    left = examine(tmp_path, deleted, kept, database.address)
    counts, verdicts = count_leftovers(left), verdicts_by_layer(left)
    for layer in (TABLES, LOG):
        assert counts[layer, "text"] == counts[layer, "vectors"] == n_deleted
    assert counts[WORD_INDEX, "words"] == n_deleted
    assert verdicts[ROWS, "text"] == verdicts[ROWS, "vectors"] == "gone"
    if n_deleted > 1:  # the statistics quote a sample
        assert counts[VIEW, "text"] >= n_deleted // 2
        assert find_remedy(left, VIEW) == "ANALYZE"
    assert "VACUUM FULL of the table" in find_remedy(left, TABLES)
    assert "pg_switch_wal()" in find_remedy(left, LOG)
    database.run("VACUUM FULL notes", "CHECKPOINT")
    left = examine(tmp_path, deleted, kept, database.address)
    verdicts = verdicts_by_layer(left)
    assert verdicts[TABLES, "text"] == verdicts[TABLES, "vectors"] == "gone"
    assert verdicts[WORD_INDEX, "words"] == "gone"
    assert count_leftovers(left)[LOG, "text"] == n_deleted
    if n_deleted > 1:
        assert count_leftovers(left)[VIEW, "text"] >= n_deleted // 2
    database.run("ANALYZE notes", "VACUUM FULL pg_catalog.pg_statistic", "CHECKPOINT")
    assert verdicts_by_layer(examine(tmp_path, deleted, kept, database.address))[VIEW, "text"] == (
        "gone"
    )
    database.overwrite_log()
    clean = examine(tmp_path, deleted, kept, database.address)
    assert not clean.n_left
    # Nothing of kept rows is in the log either, which then tells nothing.
    assert verdicts_by_layer(clean)[LOG, "text"] == "cannot tell"
    database.run("VACUUM FULL notes", "CHECKPOINT")
    clean = verdicts_by_layer(examine(tmp_path, deleted, kept, database.address))
    assert clean[LOG, "text"] == clean[LOG, "vectors"] == clean[TABLES, "text"] == "gone"


def test_pgvector_keeps_vectors_in_its_index_and_statistics(
    tmp_path: Path, database: Database
) -> None:
    if database.vector != "vector(32)":
        pytest.skip("the server has no pgvector")
    rows = make_rows(seed=200)
    deleted, kept = split_rows(rows, 12)
    database.run("CREATE INDEX near ON notes USING hnsw (embedding vector_l2_ops)")
    database.insert(rows)
    database.run("ANALYZE notes")
    database.delete(deleted)
    database.run("CHECKPOINT")
    left = examine(tmp_path, deleted, kept, database.address)
    assert count_leftovers(left)["bytes of index public.near", "vectors"] == 12
    assert count_leftovers(left)[VIEW, "vectors"] >= 6
    assert verdicts_by_layer(left)["nearest neighbours", "vectors"] == "gone"
    database.run("VACUUM notes", "CHECKPOINT", "ANALYZE notes")
    left = count_leftovers(examine(tmp_path, deleted, kept, database.address))
    assert left["bytes of index public.near", "vectors"] == left[VIEW, "vectors"] == 0


def test_compressed_texts_cannot_be_judged_by_short_ones(
    tmp_path: Path, database: Database
) -> None:
    rows = make_rows(seed=300)
    deleted, kept = split_rows(rows, 12)
    for row in deleted:
        row["text"] = f"{row['text']} " * 40
    database.insert(rows)
    database.delete(deleted)
    database.run("CHECKPOINT")
    erasure = examine(tmp_path, deleted, kept, database.address)
    long = [one for one in erasure.verdicts if "tables, texts from" in one.layer]
    assert [one.verdict for one in long] == ["cannot tell"]
    assert (TABLES, "text") not in verdicts_by_layer(erasure)


def test_older_versions_of_an_updated_row_and_a_dropped_table(
    tmp_path: Path, database: Database
) -> None:
    rows = make_rows(seed=400)
    deleted, kept = split_rows(rows, 12)
    database.insert(rows)
    for row in deleted:
        database.run("UPDATE notes SET text = 'x' WHERE id = %s", values=(row["id"],))
    database.run("CHECKPOINT")
    left = count_leftovers(examine(tmp_path, deleted, kept, database.address))
    # The server itself reuses the space of some older versions.
    assert left[TABLES, "text"] > 0 and left[LOG, "text"] == 12 and left[ROWS, "text"] == 0
    database.run("CREATE TABLE copies AS SELECT * FROM notes WHERE text <> 'x'")
    database.run("DROP TABLE notes", "CHECKPOINT")
    left = examine(tmp_path, deleted, kept, database.address)
    assert count_leftovers(left)[TABLES, "text"] == 0
    assert count_leftovers(left)[LOG, "text"] == 12


def test_files_that_cannot_be_read_cannot_tell(
    tmp_path: Path, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    from auditor.erasure.stores import postgresql

    deleted, kept = split_rows(make_rows(seed=500), 12)
    database.insert(kept)
    database.run("CREATE ROLE reader LOGIN", "GRANT SELECT ON notes TO reader")
    address = database.address.replace("audit@", "reader@")
    erasure = examine(tmp_path, deleted, kept, address)
    (files,) = [one for one in erasure.verdicts if one.layer == "files of the server"]
    assert files.verdict == "cannot tell" and "data_directory" in files.why
    assert verdicts_by_layer(erasure)[ROWS, "text"] == "gone"
    monkeypatch.setattr(postgresql, "_IDENTIFIER", "SELECT 1")
    erasure = examine(tmp_path, deleted, kept, database.address)
    (files,) = [one for one in erasure.verdicts if one.layer == "files of the server"]
    assert "another server's" in files.why


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda address: "postgresql://audit@127.0.0.1:1/db", "cannot be read"),
        (lambda address: address.replace("audit@", "nobody@"), "cannot be read"),
        (lambda address: f"{address}_missing", "cannot be read"),
    ],
)
def test_an_address_that_cannot_be_used_is_refused_in_one_sentence(
    tmp_path: Path,
    database: Database,
    capsys: pytest.CaptureFixture[str],
    change: Any,
    expected: str,
) -> None:
    deleted, kept = split_rows(make_rows(40), 3)
    gone = write_rows(tmp_path / "gone.jsonl", deleted)
    flags = ["--deleted", gone, "--kept", write_rows(tmp_path / "kept.jsonl", kept)]
    check_command("erase", change(database.address), *flags, code=2)
    told = " ".join(capsys.readouterr().err.split())
    assert expected in told and "Traceback" not in told


@pytest.mark.parametrize(
    "address",
    [
        "postgresql://audit:secret@127.0.0.1:1/db",
        "postgresql://audit@127.0.0.1:1/db?password=secret",
        "postgresql://audit@127.0.0.1:1/db?connect_timeout=1&sslpassword=secret",
    ],
)
def test_an_address_with_a_password_is_refused_and_not_repeated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], address: str
) -> None:
    deleted, kept = split_rows(make_rows(40), 3)
    gone = write_rows(tmp_path / "gone.jsonl", deleted)
    flags = ["--deleted", gone, "--kept", write_rows(tmp_path / "kept.jsonl", kept)]
    check_command("erase", address, *flags, code=2)
    told = " ".join(capsys.readouterr().err.split())
    assert "without a password" in told and "secret" not in told


def test_a_missing_driver_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    deleted, kept = split_rows(make_rows(40), 3)
    gone = write_rows(tmp_path / "gone.jsonl", deleted)
    flags = ["--deleted", gone, "--kept", write_rows(tmp_path / "kept.jsonl", kept)]
    check_command("erase", "postgresql://audit@127.0.0.1:1/db", *flags, code=2)
    assert "psycopg, which is not installed" in " ".join(capsys.readouterr().err.split())


def test_stores_that_never_had_the_records_raise_no_alarm(
    tmp_path: Path, database: Database
) -> None:
    rows = make_rows(seed=600)
    database.insert(rows)
    database.run("ANALYZE notes", "CHECKPOINT")
    for seed in range(5):
        never = make_rows(12, seed=700 + seed)
        assert not examine(tmp_path, never, rows, database.address).n_left
