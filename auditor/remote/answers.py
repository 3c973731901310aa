"""Store paid answers of a server, so that a restarted run repeats no request.

The store is an SQLite file that only its owner can read. It also records each run's cost. An
answer's key includes the whole request and the sample's seed and index, so two samples are never
confused. Only keys, JSON and counts are stored.
"""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from auditor.core.errors import AuditError

_TABLES = """
create table if not exists answers (key blob primary key, answer text not null) without rowid;
create table if not exists spent (
    run text primary key, requests integer not null, again integer not null, read integer not null,
    written integer not null) without rowid;
create table if not exists became (
    run text not null, key blob not null, context blob not null, kind text not null, primary key (run, key)
) without rowid;
create table if not exists eras (ended integer primary key);
"""  # noqa: E501
_BUSY = 60.0  # seconds to wait for another run that writes


@dataclass(frozen=True)
class ServerUsage:
    """The requests and tokens of one run, in all its processes.

    `retries` is the number of repeated requests. `prompt_tokens` and `answer_tokens` are the
    server's counts, or the largest possible numbers if the server reports none.
    """

    requests: int = 0
    retries: int = 0
    prompt_tokens: int = 0
    answer_tokens: int = 0

    @property
    def paid_token_count(self) -> int:
        return self.prompt_tokens + self.answer_tokens


class ServerAnswerStore:
    """The file with a server's answers, shared by all threads and processes.

    Raise AuditError if the file cannot be read or written.
    """

    def __init__(self, path: Path) -> None:
        self.path, self._lock = path, threading.Lock()
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            # its journals inherit the file's permissions
            os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
            # All threads share the connection: `_lock` admits one at a time.
            self._file = sqlite3.connect(path, timeout=_BUSY, check_same_thread=False)
            weakref.finalize(self, self._file.close)
            self._file.executescript(_TABLES)
        except (OSError, sqlite3.Error) as error:
            raise self._store_error(error) from error

    def find_stored_answer(self, key: bytes) -> Any | None:
        rows = self._fetch_rows("select answer from answers where key = ?", key)
        return None if not rows else json.loads(rows[0][0])

    def store_charged_answers(
        self, run: str, cost: ServerUsage, answers: Mapping[bytes, Any]
    ) -> None:
        """Store the answers and add their cost to the run's cost, in one transaction."""
        with self._lock_transaction():
            rows = []
            for key, answer in answers.items():
                rows.append((key, json.dumps(answer)))
            self._file.executemany("insert or replace into answers values (?, ?)", rows)
            self._file.execute(
                "insert into spent values (?, ?, ?, ?, ?) on conflict (run) do update set requests "
                "= requests + excluded.requests, again = again + excluded.again, read = read + "
                "excluded.read, written = written + excluded.written",
                (run, cost.requests, cost.retries, cost.prompt_tokens, cost.answer_tokens),
            )

    def read_run_usage(self, run: str) -> ServerUsage:
        rows = self._fetch_rows(
            "select requests, again, read, written from spent where run = ?", run
        )
        return ServerUsage(*rows[0]) if rows else ServerUsage()

    # --- use of the answers ---

    def record_used_answers(self, run: str, answers: Sequence[tuple[bytes, bytes, str]]) -> None:
        """Record which answers a run used, each as (key, context, kind).

        An answer that is used repeatedly counts once.
        """
        with self._lock_transaction():
            rows = [(run, *answer) for answer in answers]
            self._file.executemany("insert or replace into became values (?, ?, ?, ?)", rows)

    def count_used_answers(self, runs: Sequence[str]) -> dict[str, int]:
        """Return the number of answers of each kind that these runs used."""
        marks = ",".join("?" * len(runs))
        return dict(
            self._fetch_rows(
                f"select kind, count(*) from became where run in ({marks}) group by kind", *runs
            )
        )

    def list_withheld_contexts(self, runs: Sequence[str], kinds: Sequence[str]) -> set[bytes]:
        """Return digests of the prompts to which these runs got a withheld answer.

        `kinds` are the kinds of withheld answer to look for, such as a filtered one.
        """
        marks, others = (",".join("?" * len(column)) for column in (runs, kinds))
        statement = (
            f"select distinct context from became where run in ({marks}) and kind in ({others})"
        )
        return {bytes(row[0]) for row in self._fetch_rows(statement, *runs, *kinds)}

    @property
    def invalidation_count(self) -> int:
        """Number of times that all stored answers were declared invalid."""
        return int(self._fetch_rows("select count(*) from eras")[0][0])

    def invalidate_stored_answers(self) -> None:
        """Declare all stored answers invalid because the server has changed."""
        with self._lock_transaction():
            self._file.execute("insert into eras default values")

    @contextmanager
    def _lock_transaction(self) -> Iterator[None]:
        try:
            with (
                self._lock,
                self._file,
            ):  # sqlite3: commits or rolls back at its end; does not close
                yield
        except sqlite3.Error as error:
            raise self._store_error(error) from error

    def _fetch_rows(self, statement: str, *values: Any) -> list[Any]:
        with self._lock_transaction(), closing(self._file.execute(statement, values)) as cursor:
            return cursor.fetchall()

    def _store_error(self, error: Exception) -> AuditError:
        return AuditError(f"{self.path}: cannot be used as the store of answers: {error}")


def digest_model_request(*parts: Any) -> bytes:
    """Return the SHA-256 of a request, whose parts are JSON values."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).digest()
