"""Read a usearch index file: keys and bytes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from auditor.core.arrays import Floats
from auditor.erasure.layers import Layer, Piece
from auditor.erasure.store import Store
from auditor.erasure.windows import VECTORS

_MAGIC = b"usearch"
_AT_ONCE = 10_000  # vectors


class USearchStore(Store):
    """Read a file written by usearch's Index.save."""

    name = "usearch"
    package = "usearch"
    tested = ("2.26.",)
    kinds = (VECTORS,)
    remedies = ((r".", "no call in place: a new Index of np.array(index.get(index.keys))"),)

    @classmethod
    def recognises(cls, path: Path) -> bool:
        """Return whether the path is a usearch file.

        Such a file begins with the row count, the row size and the rows, followed by the format's
        name.
        """
        if not path.is_file():
            return False
        with path.open("rb") as file:
            n_rows, n_bytes = (int.from_bytes(file.read(4), "little") for _ in range(2))
            if n_rows * n_bytes > path.stat().st_size:
                return False
            file.seek(n_rows * n_bytes, 1)
            return file.read(len(_MAGIC)) == _MAGIC

    @cached_property
    def _index(self) -> Any:
        from usearch.index import Index

        return Index.restore(str(self.path))

    def list_library_layers(self) -> Iterator[Layer]:
        yield Layer("keys of the index", self._read_keys, (VECTORS,))

    def _read_keys(self) -> Iterator[Piece]:
        keys = np.array(list(self._index.keys), np.uint64)
        for start in range(0, len(keys), _AT_ONCE):
            yield self._get(keys[start : start + _AT_ONCE])

    def search_nearest(self, vectors: Floats) -> Iterator[Piece]:
        if self._index.ndim == vectors.shape[1] and len(self._index):
            matches = self._index.search(vectors.astype(np.float32), 1)
            yield self._get(np.unique(np.array(matches.keys).ravel()))

    def _get(self, keys: NDArray[Any]) -> Piece:
        vectors = np.asarray(self._index.get(keys, dtype=np.float32))
        return Piece(self.path.name, vectors.reshape(-1, vectors.shape[-1]))
