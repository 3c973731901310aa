"""A PostgreSQL server on loopback, and databases of notes."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.erasure.stored import Row


def find_programs() -> Path | None:
    """Return the folder of a server's programs, as AUDIT_TEST_POSTGRESQL names it or as Debian
    installs them.
    """
    folders = [Path(os.environ.get("AUDIT_TEST_POSTGRESQL", "/nowhere"))]
    folders += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    for folder in folders:
        if (folder / "initdb").is_file():
            return folder
    return None


@contextmanager
def serve_postgresql(programs: Path, settings: str = "", log_file_size: int = 16) -> Iterator[str]:
    """Start a new server, and yield its address without the database.

    settings: further options of `postgres`. log_file_size: of each file of pg_wal, in MB.
    """
    user = "postgres" if os.getuid() == 0 else None  # the server refuses root
    folder = Path(tempfile.mkdtemp(prefix="audit-postgresql-"))
    if user:
        shutil.chown(folder, user)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    data = folder / "data"
    # Autovacuum would analyse a table a minute after its change, which a slow test would see.
    options = f"-p {port} -k {folder} -c listen_addresses=127.0.0.1 -c fsync=off"
    options = f"{options} -c autovacuum=off {settings}"
    start = ["pg_ctl", "-D", data, "-w", "-l", folder / "log", "-o", options, "start"]

    def run(*words: Any) -> None:
        command = [programs / words[0], *words[1:]]
        subprocess.run(command, check=True, user=user, cwd=folder, stdout=subprocess.DEVNULL)

    try:
        made_with = ["-A", "trust", "--no-sync", "-E", "UTF8", f"--wal-segsize={log_file_size}"]
        run("initdb", "-D", data, "-U", "audit", *made_with)
        run(*start)
        try:
            yield f"postgresql://audit@127.0.0.1:{port}/"
        finally:
            run("pg_ctl", "-D", data, "-m", "immediate", "stop")
    finally:
        shutil.rmtree(folder)


def drop_spare_databases(server: str) -> None:
    """Leave template1 alone: a test reads the files of every database."""
    import psycopg

    with psycopg.connect(f"{server}template1", autocommit=True) as connection:
        connection.execute("ALTER DATABASE template0 IS_TEMPLATE false")
        for name in ("template0", "postgres"):
            connection.execute(f"DROP DATABASE {name}")


class Database:
    """A new database with a table of notes."""

    def __init__(self, server: str, name: str) -> None:
        import psycopg

        with psycopg.connect(f"{server}template1", autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}")
        self.server, self.name = server, name
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

    def drop(self) -> None:
        """Remove the database, and what it left in pg_wal."""
        import psycopg

        self.overwrite_log()
        self.connection.close()
        with psycopg.connect(f"{self.server}template1", autocommit=True) as connection:
            connection.execute(f"DROP DATABASE {self.name}")

    def insert(self, rows: Sequence[Row]) -> None:
        statement = f"INSERT INTO notes VALUES (%s, %s, %s::{self.vector})"
        for row in rows:
            listed = str(row["embedding"])
            vector = f"{{{listed[1:-1]}}}" if self.vector == "real[]" else listed
            self.run(statement, values=(row["id"], row["text"], vector))

    def delete(self, rows: Sequence[Row]) -> None:
        self.run("DELETE FROM notes WHERE id = ANY(%s)", values=([str(row["id"]) for row in rows],))

    def overwrite_log(self) -> None:
        """Follow the advice for pg_wal."""
        switch = ("SELECT pg_logical_emit_message(true, 'audit', 'x')", "SELECT pg_switch_wal()")
        self.run(*switch, "CHECKPOINT")
        (n_files,) = self.run("SELECT count(*) FROM pg_ls_waldir()").fetchone()
        self.run(*switch * n_files)
