"""Read Qdrant's local mode: points, which are in one SQLite file per collection."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from auditor.core.arrays import Floats
from auditor.erasure.layers import Layer, Piece
from auditor.erasure.store import list_texts
from auditor.erasure.stores.sqlite import SQLiteStore
from auditor.erasure.windows import TEXT, VECTORS

_AT_ONCE = 1_000  # points
_NO_RECORDS = r"meta\.json|\.lock"


class QdrantStore(SQLiteStore):
    """Read a folder written by QdrantClient(path=...)."""

    name = "qdrant"
    package = "qdrant-client"
    tested = ("1.20.",)
    owns_folder = True
    holds_no: ClassVar[Mapping[str, str]] = {TEXT: _NO_RECORDS, VECTORS: _NO_RECORDS}
    remedies = (
        (r"^rows|points of", "client.delete(...), then VACUUM of its storage.sqlite"),
        (r".", "close the client, then VACUUM of its storage.sqlite"),
    )

    @classmethod
    def recognises(cls, path: Path) -> bool:
        return (path / "meta.json").is_file() and (path / "collection").is_dir()

    @cached_property
    def _client(self) -> Any:
        from qdrant_client import QdrantClient

        return QdrantClient(path=str(self.path))

    def list_library_layers(self) -> Iterator[Layer]:
        yield from super().list_library_layers()
        yield Layer("points of collections", self._read_points, other_texts=True)

    def _list_collections(self) -> list[str]:
        return [entry.name for entry in self._client.get_collections().collections]

    def _read_points(self) -> Iterator[Piece]:
        for name in self._list_collections():
            offset = None
            while True:
                points, offset = self._client.scroll(
                    name, limit=_AT_ONCE, offset=offset, with_payload=True, with_vectors=True
                )
                texts = list(list_texts([point.payload for point in points]))
                yield Piece(f"collection {name}", texts)
                yield from _list_vectors(f"collection {name}", points)
                if offset is None:
                    break

    def search_nearest(self, vectors: Floats) -> Iterator[Piece]:
        for name in self._list_collections():
            params = self._client.get_collection(name).config.params.vectors
            by_vector_name = {None: params}
            if isinstance(params, dict):
                by_vector_name = params
            for vector_name, vector_params in by_vector_name.items():
                if getattr(vector_params, "size", 0) != vectors.shape[1]:
                    continue
                for vector in vectors.tolist():
                    response = self._client.query_points(
                        name, vector, using=vector_name, limit=1, with_vectors=True
                    )
                    yield from _list_vectors(f"collection {name}", response.points)


def _list_vectors(place: str, points: list[Any]) -> Iterator[Piece]:
    for point in points:
        if isinstance(point.vector, dict):
            vectors_by_name = point.vector
        else:
            vectors_by_name = {"": point.vector}
        for vector in vectors_by_name.values():
            if isinstance(vector, list):
                yield Piece(place, np.atleast_2d(np.array(vector, dtype=np.float64)))
