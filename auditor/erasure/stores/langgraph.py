"""Read LangGraph's SQLite checkpointer: current states of threads, and older checkpoints."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

from auditor.erasure.layers import Layer, Piece
from auditor.erasure.store import list_texts
from auditor.erasure.stores.sqlite import SQLiteStore, read_start
from auditor.erasure.windows import TEXT, WORDS


class LangGraphStore(SQLiteStore):
    """Read a database written by langgraph-checkpoint-sqlite's SqliteSaver."""

    name = "langgraph"
    package = "langgraph-checkpoint-sqlite"
    tested = ("3.1.",)
    kinds = (TEXT, WORDS)
    remedies = (
        (r"free space", "VACUUM, then in WAL mode PRAGMA wal_checkpoint(TRUNCATE)"),
        (
            r".",
            "SqliteSaver.delete_thread(thread_id), which removes the whole thread, then VACUUM, "
            "then PRAGMA wal_checkpoint(TRUNCATE)",
        ),
    )

    @classmethod
    def recognises(cls, path: Path) -> bool:
        if not SQLiteStore.recognises(path):
            return False
        start = read_start(path, 2**16)
        return b"checkpoint_ns" in start and b"parent_checkpoint_id" in start

    def list_library_layers(self) -> Iterator[Layer]:
        yield from super().list_library_layers()
        yield Layer("present state", partial(self._read_states, False), other_texts=True)
        yield Layer("older checkpoints", partial(self._read_states, True), other_texts=True)

    def _read_states(self, older: bool) -> Iterator[Piece]:
        from langgraph.checkpoint.sqlite import SqliteSaver

        newest = set[tuple[str, str]]()
        with closing(sqlite3.connect(self.path, check_same_thread=False)) as database:
            for state in SqliteSaver(database).list(None):  # the newest state of a thread first
                settings = state.config["configurable"]
                thread = (settings["thread_id"], settings.get("checkpoint_ns", ""))
                is_older = thread in newest
                newest.add(thread)
                if is_older == older:
                    texts = list(list_texts(state.checkpoint["channel_values"]))
                    yield Piece(f"thread {thread[0]}", texts)
