"""Read Chroma on disk: collections, the queue of writes, and index folders."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from auditor.core.arrays import Floats
from auditor.erasure.layers import Layer, Piece
from auditor.erasure.store import list_texts
from auditor.erasure.stores.sqlite import SQLiteStore
from auditor.erasure.windows import TEXT, VECTORS

_FILE = "chroma.sqlite3"
_AT_ONCE = 10_000  # rows
_NEW = (
    "no call in place: copy the kept records into a new folder, in a process that never read the "
    "deleted ones"
)
_NO_VECTORS = r"/header\.bin|/length\.bin|/link_lists\.bin|\.pickle"


class ChromaStore(SQLiteStore):
    """Read a folder written by chromadb.PersistentClient."""

    name = "chroma"
    package = "chromadb"
    tested = ("1.5.",)
    owns_folder = True
    holds_no: ClassVar[Mapping[str, str]] = {
        TEXT: rf"\.bin|{_NO_VECTORS}",
        VECTORS: _NO_VECTORS,
    }
    remedies = (
        (r"no collection has", "delete that folder while no client is open"),
        (r"collections", "collection.delete(ids=...), then copy the rest into a new folder"),
        (r".", _NEW),
    )

    @classmethod
    def recognises(cls, path: Path) -> bool:
        return path.is_dir() and SQLiteStore.recognises(path / _FILE)

    @cached_property
    def _segments(self) -> set[str]:
        """The ids of all segments; the folder of an index in use is named after one."""
        with closing(sqlite3.connect(self.path / _FILE)) as database:
            return {row[0] for row in database.execute("SELECT id FROM segments")}

    def name_file(self, path: Path) -> str:
        name = super().name_file(path)
        is_index = path.parent != self.path and path.parent.name not in self._segments
        if is_index:
            return f"{name}, which no collection has"
        return name

    @cached_property
    def _collections(self) -> list[Any]:
        """The collections of all tenants and of all their databases."""
        import chromadb
        from chromadb.config import Settings

        with closing(sqlite3.connect(self.path / _FILE)) as database:
            owners = database.execute("SELECT tenant_id, name FROM databases").fetchall()
        collections = []
        for tenant, name in owners:
            settings = Settings(anonymized_telemetry=False)
            client = chromadb.PersistentClient(str(self.path), settings, tenant, name)
            collections += client.list_collections()
        return collections

    def list_library_layers(self) -> Iterator[Layer]:
        yield from super().list_library_layers()
        yield Layer("collections", self._read_collections, other_texts=True)

    def _read_collections(self) -> Iterator[Piece]:
        for collection in self._collections:
            place = f"collection {collection.name}"
            for start in range(0, collection.count(), _AT_ONCE):
                rows = collection.get(
                    limit=_AT_ONCE,
                    offset=start,
                    include=["documents", "embeddings", "metadatas"],
                )
                texts = list(list_texts([rows["documents"], rows["metadatas"]]))
                yield Piece(place, texts)
                yield Piece(place, np.asarray(rows["embeddings"]))

    def search_nearest(self, vectors: Floats) -> Iterator[Piece]:
        for collection in self._collections:
            if collection.count() and _count_dimensions(collection) == vectors.shape[1]:
                rows = collection.query(
                    query_embeddings=vectors.astype(np.float32), n_results=1, include=["embeddings"]
                )
                nearest = []
                for row in rows["embeddings"]:
                    if len(row):
                        nearest.append(row[0])
                yield Piece(f"collection {collection.name}", np.asarray(nearest))


def _count_dimensions(collection: Any) -> int:
    return len(collection.get(limit=1, include=["embeddings"])["embeddings"][0])
