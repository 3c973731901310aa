"""Measure the errors and the cost of `audit erase` on stores whose truth is known.

    python -m validation.trust.erasure [--stores 50] [--seed 0] [--kinds postgresql ...]
        [--out FOLDER]  (15 minutes)
    python -m validation.trust.erasure --rows 1000000 [--kinds sqlite lancedb]  (ten minutes)

Clean stores never contained the deleted records, and the process that writes them never read these;
in the others, only the store's own delete call removed them. PostgreSQL runs on loopback (Debian:
apt-get install postgresql). With --rows: processor time and peak memory of the command.
"""

from __future__ import annotations

import atexit
import json
import logging
import multiprocessing
import os
import random
import sqlite3
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, closing
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from auditor.core.errors import AuditError
from auditor.erasure.examine import examine_erased_stores
from auditor.erasure.records import read_erasure_records
from tests.erasure.memories import close_memory, open_memory, remember
from tests.erasure.postgresql import Database, find_programs, serve_postgresql
from validation.harness import Page, run, share, write_rows

DIMENSIONS = 32
Row = dict[str, Any]


def make_rows(n_rows: int, seed: int) -> list[Row]:
    """Return rows with 20 words from a list, a number and a vector each."""
    draw, normal = random.Random(seed), np.random.default_rng(seed)
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["".join(draw.choices(letters, k=draw.randint(3, 11))) for _ in range(2_000)]
    vectors = normal.normal(size=(n_rows, DIMENSIONS)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    return [
        {
            "id": i,
            "text": f"It was noted: {' '.join(draw.choices(words, k=20))} {draw.randrange(10**9)}",
            "embedding": vector.tolist(),
        }
        for i, vector in enumerate(vectors)
    ]


def list_vectors(rows: Sequence[Row]) -> np.ndarray:
    return np.array([row["embedding"] for row in rows], np.float32)


def fill_sqlite(path: Path, rows: Sequence[Row], deleted: Sequence[int]) -> Path:
    with closing(sqlite3.connect(path / "notes.db")) as database:
        database.execute("PRAGMA secure_delete = off")
        database.execute("CREATE TABLE notes (id INTEGER PRIMARY KEY, text TEXT, vector BLOB)")
        vectors = list_vectors(rows)
        values = [(r["id"], r["text"], v.tobytes()) for r, v in zip(rows, vectors, strict=True)]
        database.executemany("INSERT INTO notes VALUES (?, ?, ?)", values)
        database.execute("CREATE VIRTUAL TABLE words USING fts5(text)")
        database.execute("INSERT INTO words(rowid, text) SELECT id, text FROM notes")
        database.commit()
        ids = [(number,) for number in deleted]
        database.executemany("DELETE FROM notes WHERE id = ?", ids)
        database.executemany("DELETE FROM words WHERE rowid = ?", ids)
        database.commit()
    return path / "notes.db"


def fill_chroma(path: Path, rows: Sequence[Row], deleted: Sequence[int]) -> Path:
    import chromadb
    from chromadb.config import Settings

    client = chromadb.PersistentClient(str(path), Settings(anonymized_telemetry=False))
    collection = client.create_collection("notes", embedding_function=None)
    collection.add(
        ids=[str(row["id"]) for row in rows],
        documents=[row["text"] for row in rows],
        embeddings=list_vectors(rows),
    )
    if deleted:
        collection.delete(ids=[str(number) for number in deleted])
    return path


def fill_lancedb(path: Path, rows: Sequence[Row], deleted: Sequence[int]) -> Path:
    import lancedb
    import lancedb.index
    import pyarrow

    flat = list_vectors(rows).ravel()
    columns = {
        "id": [row["id"] for row in rows],
        "text": [row["text"] for row in rows],
        "vector": pyarrow.FixedSizeListArray.from_arrays(flat, DIMENSIONS),
    }
    table = lancedb.connect(str(path)).create_table("notes", pyarrow.table(columns))
    table.create_index("text", config=lancedb.index.FTS())
    if deleted:
        table.delete(f"id IN ({', '.join(map(str, deleted))})")
    return path


def fill_qdrant(path: Path, rows: Sequence[Row], deleted: Sequence[int]) -> Path:
    from qdrant_client import QdrantClient, models

    client = QdrantClient(path=str(path))
    size = models.VectorParams(size=DIMENSIONS, distance=models.Distance.COSINE)
    client.create_collection("notes", vectors_config=size)
    points = [
        models.PointStruct(id=row["id"], vector=row["embedding"], payload={"text": row["text"]})
        for row in rows
    ]
    client.upsert("notes", points)
    if deleted:
        client.delete("notes", list(deleted))
    client.close()
    return path


def fill_usearch(path: Path, rows: Sequence[Row], deleted: Sequence[int]) -> Path:
    from usearch.index import Index

    index = Index(ndim=DIMENSIONS, metric="cos", dtype="f32")
    index.add(np.array([row["id"] for row in rows]), list_vectors(rows))
    if deleted:
        index.remove(np.array(deleted), compact=True)
    index.save(str(path / "notes.usearch"))
    return path / "notes.usearch"


def fill_faiss(path: Path, rows: Sequence[Row], deleted: Sequence[int]) -> Path:
    import faiss

    index = faiss.IndexIDMap2(faiss.IndexFlatL2(DIMENSIONS))
    index.add_with_ids(list_vectors(rows), np.array([row["id"] for row in rows]))
    index.remove_ids(np.array(deleted, np.int64))
    faiss.write_index(index, str(path / "notes.faiss"))
    return path / "notes.faiss"


def fill_duckdb(path: Path, rows: Sequence[Row], deleted: Sequence[int]) -> Path:
    import duckdb

    with duckdb.connect(str(path / "notes.duckdb")) as database:
        database.execute(f"CREATE TABLE notes (id INT, text VARCHAR, vector FLOAT[{DIMENSIONS}])")
        values = [[row["id"], row["text"], row["embedding"]] for row in rows]
        database.executemany("INSERT INTO notes VALUES (?, ?, ?)", values)
        database.execute("CHECKPOINT")
        for number in deleted:
            database.execute("DELETE FROM notes WHERE id = ?", [number])
        database.execute("CHECKPOINT")
    return path / "notes.duckdb"


def fill_langgraph(path: Path, rows: Sequence[Row], deleted: Sequence[int]) -> Path:
    from langchain_core.messages import HumanMessage, RemoveMessage
    from langgraph.checkpoint.sqlite import SqliteSaver
    from langgraph.graph import START, MessagesState, StateGraph

    graph = StateGraph(MessagesState)
    graph.add_node("answer", lambda state: {"messages": []})
    graph.add_edge(START, "answer")
    thread = {"configurable": {"thread_id": "1"}}
    with closing(sqlite3.connect(path / "memory.db", check_same_thread=False)) as database:
        app = graph.compile(checkpointer=SqliteSaver(database))
        app.invoke({"messages": [HumanMessage(r["text"], id=str(r["id"])) for r in rows]}, thread)
        if deleted:
            removals = [RemoveMessage(str(number)) for number in deleted]
            app.update_state(thread, {"messages": removals})
    return path / "memory.db"


def fill_parquet(path: Path, rows: Sequence[Row], deleted: Sequence[int]) -> Path:
    import pandas as pd

    frame = pd.DataFrame(rows).astype({"text": "category"})
    frame[~frame["id"].isin(deleted)].to_parquet(path / "notes.parquet")
    return path / "notes.parquet"


def fill_mem0(path: Path, rows: Sequence[Row], deleted: Sequence[int]) -> Path:
    memory = open_memory(path, rows)
    remember(memory, rows)
    for number in deleted:
        memory.delete_all(user_id=str(number))
    close_memory(memory)
    return path


def fill_postgresql(path: Path, rows: Sequence[Row], deleted: Sequence[int]) -> str:
    database = Database(start_postgresql(), f"notes{time.monotonic_ns()}")
    database.insert(rows)
    database.run("ANALYZE notes")
    database.delete([rows[number] for number in deleted])
    database.run("CHECKPOINT")
    database.connection.close()
    return database.address


@cache
def start_postgresql() -> str:
    """Start a server that stops at the end of this process, and return its address."""
    programs = find_programs()
    if programs is None:
        raise AuditError("no PostgreSQL server is installed: expected other --kinds")
    stack = ExitStack()
    atexit.register(stack.close)
    return stack.enter_context(serve_postgresql(programs, "-c max_wal_size=64MB"))


def drop_database(address: str) -> None:
    import psycopg

    server, _, name = address.rpartition("/")
    with psycopg.connect(f"{server}/postgres", autocommit=True) as connection:
        connection.execute(f"DROP DATABASE {name}")  # type: ignore[arg-type]


FILLERS: dict[str, Callable[[Path, Sequence[Row], Sequence[int]], Path | str]] = {
    name.removeprefix("fill_"): value
    for name, value in list(globals().items())
    if name.startswith("fill_")
}


def examine_made(
    kind: str, seed: int, clean_writer: ProcessPoolExecutor | None
) -> tuple[int, int, int]:
    """Make and examine a store; return how many records were deleted and how many are found.

    The third number is how many layers cannot tell.

    clean_writer: a process that has read no deleted record and writes a clean store, because a
        library may write parts of its process's memory to a file; None for a store with leftovers.
    """
    draw = random.Random(seed)
    rows = make_rows(draw.randint(60, 150), seed)
    deleted = sorted(draw.sample(range(len(rows)), draw.randint(1, len(rows) // 11)))
    kept = [row for row in rows if row["id"] not in deleted]
    with tempfile.TemporaryDirectory() as folder:
        top = Path(folder)
        (top / "store").mkdir()
        write_rows(top / "gone.jsonl", [rows[number] for number in deleted])
        write_rows(top / "kept.jsonl", kept)
        if clean_writer is not None:
            store = clean_writer.submit(FILLERS[kind], top / "store", kept, []).result()
        else:
            store = FILLERS[kind](top / "store", rows, deleted)
        records = read_erasure_records(top / "gone.jsonl", top / "kept.jsonl")
        if isinstance(store, str):
            erasure = examine_erased_stores([store], records, lambda _: None)
            drop_database(store)
        else:
            erasure = examine_erased_stores([f"{kind}:{store}"], records, lambda _: None)
    return len(deleted), erasure.n_left, sum(v.verdict == "cannot tell" for v in erasure.verdicts)


def write_large_store(kind: str, n_rows: int, seed: int, top: Path) -> None:
    """Write a store whose every thousandth row is deleted, and both record files."""
    rows = make_rows(n_rows, seed)
    deleted = list(range(0, n_rows, max(1, n_rows // 1_000)))
    removed = set(deleted)
    (top / "store").mkdir()
    store = FILLERS[kind](top / "store", rows, deleted)
    (top / "path").write_text(str(store))
    write_rows(top / "gone.jsonl", [rows[number] for number in deleted])
    write_rows(top / "kept.jsonl", (row for row in rows if row["id"] not in removed))


def measure_large_store(kind: str, n_rows: int, seed: int, page: Page) -> None:
    """Measure the command for a store of this kind."""
    with tempfile.TemporaryDirectory() as folder:
        top = Path(folder)
        # In a separate process: the peak memory of a child includes its parent's at the start.
        arguments = (kind, n_rows, seed, top)
        writer = multiprocessing.get_context("spawn").Process(
            target=write_large_store, args=arguments
        )
        writer.start()
        writer.join()
        n_bytes = sum(path.stat().st_size for path in (top / "store").rglob("*"))
        store = (top / "path").read_text()
        flags = ["--deleted", str(top / "gone.jsonl"), "--kept", str(top / "kept.jsonl"), "--json"]
        command = [sys.executable, "-m", "auditor.cli", "erase", f"{kind}:{store}", *flags]
        with (top / "erasure.json").open("w+") as written:
            process = subprocess.Popen(command, stdout=written)
            _, code, used = os.wait4(process.pid, 0)
            written.seek(0)
            verdicts = json.load(written)["verdicts"] if code == 0 else []
    page.row(
        kind,
        f"{n_rows:,}",
        f"{n_bytes / 2**20:,.0f} MiB",
        f"{used.ru_utime + used.ru_stime:.0f} s",
        f"{used.ru_maxrss / 2**20:.2f} GiB",
        "; ".join(f"{v['layer']}, {v['kind']}: {len(v['leftovers'])}" for v in verdicts),
    )


def silence_libraries() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)


def main(
    stores: int = 50,
    rows: int = 0,
    seed: int = 0,
    kinds: tuple[str, ...] = (),
    out: Path | None = None,
) -> None:
    silence_libraries()
    page = Page(out / "erasure.md" if out else None)
    if rows:
        page.head("store", "rows", "size", "processor", "peak memory", "seen")
        for kind in kinds or ("sqlite", "lancedb"):
            measure_large_store(kind, rows, seed, page)
        return
    if "postgresql" in (kinds or FILLERS):
        start_postgresql()
    page.head("store", "clean stores", "false alarms", "layers that cannot tell", "planted", "seen")
    for kind in kinds or tuple(FILLERS):
        spawning = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, spawning, initializer=silence_libraries) as clean_writer:
            clean = [examine_made(kind, seed + i, clean_writer) for i in range(stores)]
        planted = [examine_made(kind, seed + i, None) for i in range(max(1, stores // 5))]
        alarms = sum(n_left > 0 for _, n_left, _ in clean)
        unclear = f"{sum(n for _, _, n in clean) / len(clean):.1f}"
        n_seen = f"{sum(n for _, n, _ in planted)} of {sum(n for n, _, _ in planted)}"
        page.row(kind, stores, share(alarms, stores), unclear, f"{len(planted)} stores", n_seen)


if __name__ == "__main__":
    raise SystemExit(run(main))
