"""Each kind of store with its real package: what a deletion leaves, and that the advice removes it.

Versions are those of the extra `stores`; a package that is absent skips its tests.
"""

from __future__ import annotations

import multiprocessing
import sqlite3
import subprocess
import sys
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from auditor.erasure.examine import Erasure
from tests.erasure.memories import close_memory, has_mem0, open_memory, remember
from tests.erasure.stored import (
    Row,
    count_leftovers,
    examine,
    make_rows,
    split_rows,
    vector_bytes,
    verdicts_by_layer,
)

# Libraries of others warn of what they import; what we do with them is tested.
pytestmark = pytest.mark.filterwarnings("ignore")
N_DELETED = 12


def list_ids(rows: list[Row]) -> list[str]:
    return [row["id"] for row in rows]


def list_embeddings(rows: list[Row]) -> Any:
    return np.array([row["embedding"] for row in rows], np.float32)


def find_remedies(erasure: Erasure) -> str:
    return " | ".join(one.remedy for one in erasure.verdicts if one.leftovers)


# --- Chroma ---


def fill_chroma(folder: Path, rows: list[Row], name: str = "notes", **settings: Any) -> Any:
    chromadb = pytest.importorskip("chromadb", reason="pip install 'audit-lm[stores]'")
    client = chromadb.PersistentClient(
        str(folder), chromadb.config.Settings(anonymized_telemetry=False, allow_reset=True)
    )
    collection = client.create_collection(name, embedding_function=None, **settings)
    texts = [row["text"] for row in rows]
    collection.add(ids=list_ids(rows), documents=texts, embeddings=list_embeddings(rows))
    return client, collection


def fill_new_chroma(folder: Path, rows: list[Row]) -> None:
    """Fill a store in a process that never had other rows.

    The unused part of an index file holds whatever the writing process had in memory there.
    """
    writing = multiprocessing.get_context("spawn").Process(target=fill_chroma, args=(folder, rows))
    writing.start()
    writing.join()
    assert writing.exitcode == 0


def test_chroma_keeps_deleted_records_in_its_queue(tmp_path: Path) -> None:
    deleted, kept = split_rows(make_rows(), N_DELETED)
    _, collection = fill_chroma(tmp_path / "chroma", [*kept, *deleted])
    collection.delete(ids=list_ids(deleted))
    erasure = examine(tmp_path, deleted, kept, str(tmp_path / "chroma"))
    left = count_leftovers(erasure)
    assert left["bytes of chroma.sqlite3", "text"] == N_DELETED
    assert left["rows of chroma.sqlite3", "vectors"] == N_DELETED
    assert "embeddings_queue" in " ".join(p for one in erasure.verdicts for p in one.places)
    for kind in ("text", "vectors"):
        assert verdicts_by_layer(erasure)["collections", kind] == "gone"
    assert verdicts_by_layer(erasure)["nearest neighbours", "vectors"] == "gone"
    assert "copy the kept records into a new folder" in find_remedies(erasure)
    fill_new_chroma(tmp_path / "new", kept)
    clean = examine(tmp_path, deleted, kept, str(tmp_path / "new"))
    assert not any(one.leftovers for one in clean.verdicts)


def test_chroma_keeps_vectors_in_an_index_that_was_written(tmp_path: Path) -> None:
    deleted, kept = split_rows(make_rows(), N_DELETED)
    settings = {"configuration": {"hnsw": {"sync_threshold": 60, "batch_size": 60}}}
    _, collection = fill_chroma(tmp_path / "chroma", [*deleted, *kept], **settings)
    collection.delete(ids=list_ids(deleted))
    erasure = examine(tmp_path, deleted, kept, str(tmp_path / "chroma"))
    assert count_leftovers(erasure)["bytes of */data_level0.bin", "vectors"] == N_DELETED


def test_chroma_keeps_the_folder_of_a_dropped_collection(tmp_path: Path) -> None:
    deleted, kept = split_rows(make_rows(), N_DELETED)
    settings = {"configuration": {"hnsw": {"sync_threshold": 10, "batch_size": 10}}}
    client, _ = fill_chroma(tmp_path / "chroma", deleted, "dropped", **settings)
    folders = {path for path in (tmp_path / "chroma").iterdir() if path.is_dir()}
    client.delete_collection("dropped")
    fill_new_chroma(tmp_path / "chroma", kept)
    erasure = examine(tmp_path, deleted, kept, str(tmp_path / "chroma"))
    (index,) = (one for one in erasure.verdicts if "data_level0" in one.layer and one.leftovers)
    assert "which no collection has" in index.places[0] and "delete that folder" in index.remedy
    for folder in folders:
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()
    left = examine(tmp_path, deleted, kept, str(tmp_path / "chroma"))
    assert not any(one.leftovers for one in left.verdicts if "data_level0" in one.layer)


def test_chroma_is_read_in_all_tenants_and_databases(tmp_path: Path) -> None:
    chromadb = pytest.importorskip("chromadb", reason="pip install 'audit-lm[stores]'")
    from chromadb.config import Settings

    deleted, kept = split_rows(make_rows(), N_DELETED)
    folder = str(tmp_path / "chroma")
    fill_chroma(tmp_path / "chroma", kept)
    settings = Settings(
        anonymized_telemetry=False,
        allow_reset=True,
        is_persistent=True,
        persist_directory=folder,
    )
    admin = chromadb.AdminClient(settings)
    admin.create_tenant("practice")
    admin.create_database("old", "practice")
    client = chromadb.PersistentClient(folder, settings, "practice", "old")
    collection = client.create_collection("notes", embedding_function=None)
    collection.add(
        ids=list_ids(deleted),
        documents=[row["text"] for row in deleted],
        embeddings=list_embeddings(deleted),
    )
    left = count_leftovers(examine(tmp_path, deleted, kept, folder))
    assert left["collections", "text"] == left["collections", "vectors"] == N_DELETED
    assert left["nearest neighbours", "vectors"] == N_DELETED


def test_chroma_vacuum_above_1000_writes_keeps_vectors_though_near_twins_stay(
    tmp_path: Path,
) -> None:
    rows = make_rows(1_500)
    deleted, kept = rows[:150], rows[150:]
    noise = np.random.default_rng(7).normal(scale=0.04, size=(150, 32))
    for row, twin, change in zip(deleted, kept, noise, strict=False):
        vector = np.array(row["embedding"]) + change  # cosine about .97
        twin["embedding"] = (vector / np.linalg.norm(vector)).tolist()
    folder = tmp_path / "chroma"
    _, collection = fill_chroma(folder, [*kept[:700], *deleted, *kept[700:]])
    verdicts = verdicts_by_layer(examine(tmp_path, deleted, kept, str(folder)))
    assert verdicts["nearest neighbours", "vectors"] == "still there"
    collection.delete(ids=list_ids(deleted))
    vacuum = [str(Path(sys.executable).with_name("chroma")), "vacuum", "--force", "--path"]
    subprocess.run([*vacuum, str(folder)], check=True, stdout=subprocess.DEVNULL)
    erasure = examine(tmp_path, deleted, kept, str(folder))
    left, verdicts = count_leftovers(erasure), verdicts_by_layer(erasure)
    assert left["bytes of */data_level0.bin", "vectors"] == 150
    assert left["word index embedding_fulltext_search of chroma.sqlite3", "text"] == 150
    for layer in ("bytes of chroma.sqlite3", "rows of chroma.sqlite3", "collections"):
        assert verdicts[layer, "text"] == "gone"
    for layer in ("collections", "nearest neighbours"):
        assert verdicts[layer, "vectors"] == "gone"


# --- LanceDB ---


def fill_lancedb(folder: Path, rows: list[Row], mode: str = "create") -> Any:
    lancedb = pytest.importorskip("lancedb", reason="pip install 'audit-lm[stores]'")
    import pyarrow

    vectors = pyarrow.FixedSizeListArray.from_arrays(list_embeddings(rows).ravel(), 32)
    columns = {"id": list_ids(rows), "text": [row["text"] for row in rows], "vector": vectors}
    return lancedb.connect(str(folder)).create_table("notes", pyarrow.table(columns), mode=mode)


@pytest.mark.parametrize(("n_deleted", "n_left"), [(1, 1), (12, 12), (13, 0)])
def test_lancedb_keeps_vectors_up_to_a_tenth(tmp_path: Path, n_deleted: int, n_left: int) -> None:
    deleted, kept = split_rows(make_rows(), n_deleted)
    table = fill_lancedb(tmp_path / "lance", [*kept, *deleted])
    table.delete(" OR ".join(f"id = '{id}'" for id in list_ids(deleted)))
    erasure = examine(tmp_path, deleted, kept, str(tmp_path / "lance"))
    assert count_leftovers(erasure)["older versions", "vectors"] == n_deleted
    assert verdicts_by_layer(erasure)["rows", "vectors"] == "gone"
    table.optimize(cleanup_older_than=timedelta(0), delete_unverified=True)
    erasure = examine(tmp_path, deleted, kept, str(tmp_path / "lance"))
    assert count_leftovers(erasure)["bytes of notes.lance/data/*.lance", "vectors"] == n_left
    if n_left:
        assert "mode='overwrite'" in find_remedies(erasure)
        table = fill_lancedb(tmp_path / "lance", kept, mode="overwrite")
        table.optimize(cleanup_older_than=timedelta(0), delete_unverified=True)
        erasure = examine(tmp_path, deleted, kept, str(tmp_path / "lance"))
    assert not any(one.leftovers for one in erasure.verdicts)


def test_scores_of_lancedb_count_deleted_rows_until_the_index_is_made_again(tmp_path: Path) -> None:
    deleted, kept = split_rows(make_rows(), 11)
    table = fill_lancedb(tmp_path / "lance", [*kept, *deleted])
    from lancedb.index import FTS

    table.create_index("text", config=FTS(stem=False))
    table.delete(" OR ".join(f"id = '{id}'" for id in list_ids(deleted)))
    table.optimize(cleanup_older_than=timedelta(0), delete_unverified=True)
    layer = "full-text scores", "text"
    erasure = examine(tmp_path, deleted, kept, str(tmp_path / "lance"))
    assert verdicts_by_layer(erasure)["rows", "text"] == "gone"
    assert count_leftovers(erasure)[layer] >= 9  # others share no rare word with a kept row
    table.create_index("text", config=FTS(stem=False), replace=True)
    erasure = examine(tmp_path, deleted, kept, str(tmp_path / "lance"))
    assert verdicts_by_layer(erasure)[layer] == "gone"


def test_lancedb_scores_cannot_tell_of_texts_of_common_words(tmp_path: Path) -> None:
    """A word is in one row or in many, so no score tells whether a deleted text has it, too."""
    lancedb = pytest.importorskip("lancedb", reason="pip install 'audit-lm[stores]'")
    from lancedb.index import FTS

    rows = []
    for i in range(200):
        words = [f"word{chr(97 + (i >> bit) % 2)}{chr(97 + bit)}" for bit in range(8)]
        rows.append({"id": f"r{i}", "text": " ".join([*words, f"number{i:05d}"])})
    deleted, kept = split_rows(rows, 10)
    table = lancedb.connect(str(tmp_path / "lance")).create_table("notes", rows)
    table.create_index("text", config=FTS(stem=False))
    table.delete(" OR ".join(f"id = '{id}'" for id in list_ids(deleted)))
    verdicts = verdicts_by_layer(examine(tmp_path, deleted, kept, str(tmp_path / "lance")))
    assert verdicts["full-text scores", "text"] == "cannot tell"


# --- Qdrant ---


def test_qdrant_keeps_points_if_its_sqlite_does_not_delete_securely(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    qdrant = pytest.importorskip("qdrant_client", reason="pip install 'audit-lm[stores]'")
    from qdrant_client.local import persistence

    real = sqlite3.connect

    def connect(*arguments: Any, **settings: Any) -> sqlite3.Connection:
        database = real(*arguments, **settings)
        database.execute("PRAGMA secure_delete = off")
        return database

    monkeypatch.setattr(persistence.sqlite3, "connect", connect)
    rows, models = make_rows(), qdrant.models
    deleted, kept = split_rows(rows, N_DELETED)
    client = qdrant.QdrantClient(path=str(tmp_path / "qdrant"))
    size = models.VectorParams(size=32, distance=models.Distance.COSINE)
    client.create_collection("notes", vectors_config=size)
    client.upsert(
        "notes",
        [
            models.PointStruct(id=i, vector=row["embedding"], payload={"text": row["text"]})
            for i, row in enumerate(rows)
        ],
    )
    client.delete("notes", [i for i, row in enumerate(rows) if row in deleted])
    client.close()
    monkeypatch.undo()
    erasure = examine(tmp_path, deleted, kept, str(tmp_path / "qdrant"))
    left, verdicts = count_leftovers(erasure), verdicts_by_layer(erasure)
    file = "bytes of collection/notes/storage.sqlite"
    assert left[file, "text"] >= N_DELETED // 2 and left[file, "vectors"] >= N_DELETED // 2
    assert verdicts["points of collections", "vectors"] == "gone"
    assert verdicts["nearest neighbours", "vectors"] == "gone"
    assert "VACUUM" in find_remedies(erasure)
    with closing(sqlite3.connect(tmp_path / "qdrant/collection/notes/storage.sqlite")) as database:
        database.execute("VACUUM")
    assert examine(tmp_path, deleted, kept, str(tmp_path / "qdrant")).verdict == "gone"


def test_qdrant_searches_named_vectors_and_reads_nested_payloads(tmp_path: Path) -> None:
    qdrant = pytest.importorskip("qdrant_client", reason="pip install 'audit-lm[stores]'")
    rows, models = make_rows(), qdrant.models
    deleted, kept = split_rows(rows, N_DELETED)
    client = qdrant.QdrantClient(path=str(tmp_path / "qdrant"))
    sizes = {"whole": 32, "half": 16}
    params = {name: models.VectorParams(size=n, distance="Cosine") for name, n in sizes.items()}
    client.create_collection("notes", vectors_config=params)
    points = []
    for i, row in enumerate(rows):
        vectors = {name: row["embedding"][:n] for name, n in sizes.items()}
        payload = {"note": {"parts": [row["text"], i]}}
        points.append(models.PointStruct(id=i, vector=vectors, payload=payload))
    client.upsert("notes", points)
    client.close()
    erasure = examine(tmp_path, deleted, kept, str(tmp_path / "qdrant"))
    by_layer = {(one.layer, one.kind): one for one in erasure.verdicts}
    for layer in (("nearest neighbours", "vectors"), ("points of collections", "text")):
        assert len(by_layer[layer].leftovers) == N_DELETED
        assert by_layer[layer].n_control == by_layer[layer].n_control_seen > 20


# --- indexes in a file ---


@pytest.mark.parametrize("kind", ["f32", "f16", "i8"])
def test_usearch_keeps_removed_vectors(tmp_path: Path, kind: str) -> None:
    index_module = pytest.importorskip("usearch.index", reason="pip install 'audit-lm[stores]'")
    rows, path = make_rows(), tmp_path / "notes.usearch"
    deleted, kept = split_rows(rows, N_DELETED)
    index = index_module.Index(ndim=32, metric="cos", dtype=kind)
    index.add(np.arange(len(rows)), list_embeddings(rows))
    index.remove(np.array([i for i, row in enumerate(rows) if row in deleted]), compact=True)
    index.save(str(path))
    erasure = examine(tmp_path, deleted, kept, str(path))
    assert count_leftovers(erasure)["bytes of notes.usearch", "vectors"] == N_DELETED
    assert verdicts_by_layer(erasure)["keys of the index", "vectors"] == "gone"
    assert verdicts_by_layer(erasure)["nearest neighbours", "vectors"] == "gone"
    new, keys = index_module.Index(ndim=32, metric="cos", dtype=kind), np.array(list(index.keys))
    new.add(keys, np.array(index.get(keys)))
    new.save(str(path))
    assert examine(tmp_path, deleted, kept, str(path)).verdict == "gone"


@pytest.mark.parametrize("kind", ["Flat", "IVF4,Flat"])
def test_faiss_removes_vectors_from_its_file(tmp_path: Path, kind: str) -> None:
    faiss = pytest.importorskip("faiss", reason="pip install 'audit-lm[stores]'")
    rows, path = make_rows(200), tmp_path / "notes.faiss"
    deleted, kept = split_rows(rows, N_DELETED)
    index = faiss.index_factory(32, kind)
    index.train(list_embeddings(rows))
    index.add(list_embeddings(rows))
    faiss.write_index(index, str(path))
    assert examine(tmp_path, deleted, kept, str(path)).n_left == N_DELETED
    index.remove_ids(np.array([i for i, row in enumerate(rows) if row in deleted]))
    faiss.write_index(index, str(path))
    erasure = examine(tmp_path, deleted, kept, str(path))
    assert len(erasure.verdicts) == 3 and erasure.verdict == "gone"


# --- DuckDB, sqlite-vec ---


def test_duckdb_keeps_deleted_texts_until_it_is_copied(tmp_path: Path) -> None:
    duckdb = pytest.importorskip("duckdb", reason="pip install 'audit-lm[stores]'")
    rows, path, new = make_rows(), tmp_path / "notes.duckdb", tmp_path / "new.duckdb"
    deleted, kept = split_rows(rows, N_DELETED)
    with duckdb.connect(str(path)) as database:
        database.execute("CREATE TABLE notes (id VARCHAR, text VARCHAR, vector FLOAT[32])")
        values = [[row["id"], row["text"], row["embedding"]] for row in rows]
        database.executemany("INSERT INTO notes VALUES (?, ?, ?)", values)
        for statement in (
            f"DELETE FROM notes WHERE id IN {tuple(list_ids(deleted))}",
            "CHECKPOINT",
        ):
            database.execute(statement)
        database.execute("VACUUM")
    erasure = examine(tmp_path, deleted, kept, str(path))
    assert count_leftovers(erasure)["bytes of notes.duckdb", "text"] == N_DELETED
    assert verdicts_by_layer(erasure)["rows", "vectors"] == "gone"
    assert "COPY FROM DATABASE" in find_remedies(erasure)
    with duckdb.connect(str(path)) as database:
        database.execute(f"ATTACH '{new}' AS fresh; COPY FROM DATABASE notes TO fresh")
    clean = examine(tmp_path, deleted, kept, str(new))
    assert not any(one.leftovers for one in clean.verdicts)
    assert verdicts_by_layer(clean)["bytes of new.duckdb", "text"] == "gone"


def test_sqlite_vec_keeps_text_columns_and_no_vectors(tmp_path: Path) -> None:
    sqlite_vec = pytest.importorskip("sqlite_vec", reason="pip install 'audit-lm[stores]'")
    apsw = pytest.importorskip("apsw", reason="pip install 'audit-lm[stores]'")
    rows, path = make_rows(), tmp_path / "notes.db"
    deleted, kept = split_rows(rows, N_DELETED)
    with closing(apsw.Connection(str(path))) as database:  # Python's may load no extensions
        database.enable_load_extension(True)
        database.load_extension(sqlite_vec.loadable_path())
        database.execute("PRAGMA secure_delete = off")
        database.execute("CREATE VIRTUAL TABLE notes USING vec0(vector float[32], +text TEXT)")
        values = [(i + 1, vector_bytes(row), row["text"]) for i, row in enumerate(rows)]
        database.executemany("INSERT INTO notes(rowid, vector, text) VALUES (?, ?, ?)", values)
        for i, row in enumerate(rows, 1):
            if row in deleted:
                database.execute("DELETE FROM notes WHERE rowid = ?", (i,))
        left = count_leftovers(examine(tmp_path, deleted, kept, str(path)))
        assert left["bytes of notes.db", "text"] >= N_DELETED // 2
        assert left["bytes of notes.db", "vectors"] == 0
        database.execute("VACUUM")
    assert examine(tmp_path, deleted, kept, str(path)).verdict == "gone"


# --- LangGraph ---


def test_langgraph_returns_removed_messages_from_older_checkpoints(tmp_path: Path) -> None:
    pytest.importorskip("langgraph.checkpoint.sqlite", reason="pip install 'audit-lm[stores]'")
    from langchain_core.messages import HumanMessage, RemoveMessage
    from langgraph.checkpoint.sqlite import SqliteSaver
    from langgraph.graph import START, MessagesState, StateGraph

    path, rows = tmp_path / "memory.db", make_rows()
    deleted, kept = split_rows(rows, N_DELETED)
    graph = StateGraph(MessagesState)
    graph.add_node("answer", lambda state: {"messages": []})
    graph.add_edge(START, "answer")
    mine, other = ({"configurable": {"thread_id": name}} for name in ("mine", "other"))
    with closing(sqlite3.connect(path, check_same_thread=False)) as database:
        database.execute("PRAGMA secure_delete = off")
        saver = SqliteSaver(database)
        app = graph.compile(checkpointer=saver)
        messages = {row["id"]: HumanMessage(row["text"], id=row["id"]) for row in rows}
        app.invoke({"messages": list(messages.values())}, mine)
        app.update_state(mine, {"messages": [RemoveMessage(id) for id in list_ids(deleted)]})
        app.invoke({"messages": [messages[id] for id in list_ids(kept)]}, other)
    erasure = examine(tmp_path, deleted, kept, str(path))
    left, verdicts = count_leftovers(erasure), verdicts_by_layer(erasure)
    assert left["older checkpoints", "text"] == left["bytes of memory.db", "text"] == N_DELETED
    assert verdicts["present state", "text"] == "gone"
    assert "delete_thread" in find_remedies(erasure)
    with closing(sqlite3.connect(path, check_same_thread=False)) as database:
        database.execute("PRAGMA secure_delete = off")
        SqliteSaver(database).delete_thread("mine")
    left = count_leftovers(examine(tmp_path, deleted, kept, str(path)))
    assert left["older checkpoints", "text"] == 0 and left["bytes of memory.db", "text"] > 0
    with closing(sqlite3.connect(path, isolation_level=None)) as database:
        database.execute("VACUUM")
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    assert examine(tmp_path, deleted, kept, str(path)).n_left == 0


# --- mem0 ---


needs_mem0 = pytest.mark.skipif(not has_mem0(), reason="pip install 'audit-lm[stores]'")


@needs_mem0
@pytest.mark.parametrize("provider", ["qdrant", "faiss"])
def test_mem0_keeps_deleted_memories_in_its_history(tmp_path: Path, provider: str) -> None:
    deleted, kept = split_rows(make_rows(), N_DELETED)
    folder, ids = tmp_path / "mem0", tuple(list_ids(deleted))
    memory = open_memory(folder, [*kept, *deleted], provider)
    remember(memory, [*kept, *deleted])
    for id in ids:
        memory.delete_all(user_id=id)
    close_memory(memory)
    erasure = examine(tmp_path, deleted, kept, str(folder))
    left = count_leftovers(erasure)
    for layer in ("history of memories", "last messages", "bytes of history.db"):
        assert left.pop((layer, "text")) == N_DELETED
    assert len(left) >= 3 and not any(left.values())
    assert {one.verdict for one in erasure.verdicts} == {"still there", "gone"}
    assert "DELETE FROM history" in find_remedies(erasure)
    assert examine(tmp_path, deleted, kept, str(folder / "history.db")).n_left == N_DELETED
    with closing(sqlite3.connect(folder / "history.db", isolation_level=None)) as database:
        scopes = [f"user_id={id}" for id in ids]
        marks = ", ".join("?" * N_DELETED)
        database.execute("PRAGMA secure_delete = off")
        database.execute(f"DELETE FROM messages WHERE session_scope IN ({marks})", scopes)
        database.execute(
            "DELETE FROM history WHERE memory_id IN (SELECT memory_id FROM history WHERE old_memory"
            f" IN ({marks}))",
            [row["text"] for row in deleted],
        )
        database.execute("VACUUM")
    assert examine(tmp_path, deleted, kept, str(folder)).verdict == "gone"


@needs_mem0
@pytest.mark.parametrize("provider", ["qdrant", "chroma", "faiss"])
def test_mem0_finds_the_neighbours_of_stored_vectors_alone(tmp_path: Path, provider: str) -> None:
    rows = make_rows(60)
    deleted, kept = split_rows(rows, N_DELETED)
    for present in (rows, kept):
        folder = tmp_path / f"mem0 of {len(present)}"
        memory = open_memory(folder, rows, provider)
        remember(memory, rows)
        for row in rows:
            if row not in present:
                memory.delete_all(user_id=row["id"])
        close_memory(memory)
        erasure = examine(tmp_path, deleted, kept, str(folder))
        nearest = [one for one in erasure.verdicts if one.layer.startswith("nearest neighbours of")]
        assert sum(len(one.leftovers) for one in nearest) == len(present) - len(kept)
        assert max(one.n_control_seen for one in nearest) == len(kept)


@needs_mem0
def test_mem0_keeps_the_old_text_of_an_updated_memory(tmp_path: Path) -> None:
    rows = make_rows()
    deleted, kept = split_rows(rows, N_DELETED)
    memory = open_memory(tmp_path / "mem0", rows)
    remember(memory, rows)
    for row in deleted:
        (stored,) = memory.get_all(filters={"user_id": row["id"]})["results"]
        memory.embedding_model.embed = lambda text, action=None: kept[0]["embedding"]
        memory.update(stored["id"], data="nothing")
    close_memory(memory)
    left = count_leftovers(examine(tmp_path, deleted, kept, str(tmp_path / "mem0")))
    assert left["history of memories", "text"] == N_DELETED
    assert left["points of collections of vectors", "text"] == 0
