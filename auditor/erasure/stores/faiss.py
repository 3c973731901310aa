"""Read a faiss index file: vectors and bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from auditor.core.arrays import Floats
from auditor.erasure.layers import Layer, Piece
from auditor.erasure.store import Store
from auditor.erasure.stores.sqlite import read_start
from auditor.erasure.windows import VECTORS

# First bytes by faiss.write_index: flat, inverted lists, graphs, maps of ids, transforms.
_AT_ONCE = 10_000  # vectors
_MAGIC = (b"IxF", b"IwF", b"IwS", b"IwP", b"IxS", b"IxP", b"IHN", b"IHS", b"IxM", b"IxT")


class FaissStore(Store):
    """Read a file of faiss.write_index, and files of inverted lists that share its name's start."""

    name = "faiss"
    package = "faiss-cpu"
    tested = ("1.15.",)
    kinds = (VECTORS,)
    remedies = ((r".", "index.remove_ids(...), write_index; lists on disk: build the index again"),)

    @classmethod
    def recognises(cls, path: Path) -> bool:
        return path.is_file() and path.stat().st_size >= 33 and read_start(path, 3) in _MAGIC

    @cached_property
    def _index(self) -> Any:
        import faiss

        index = faiss.read_index(str(self.path))
        inner = faiss.downcast_index(getattr(index, "index", index))
        if hasattr(inner, "set_direct_map_type"):
            # A map by position fails after remove_ids.
            inner.set_direct_map_type(faiss.DirectMap.Hashtable)
        inner.referenced_objects = [index]  # which owns the memory
        return inner

    def list_library_layers(self) -> Iterator[Layer]:
        yield Layer("vectors of the index", self._read_vectors, (VECTORS,))

    def _read_vectors(self) -> Iterator[Piece]:
        import faiss

        numbers: Sequence[int] = range(self._index.ntotal)
        lists = getattr(self._index, "invlists", None)
        if lists is not None:
            ids = []
            for i in range(lists.nlist):
                if lists.list_size(i):
                    ids.append(faiss.rev_swig_ptr(lists.get_ids(i), lists.list_size(i)).copy())
            if ids:
                numbers = np.concatenate(ids).tolist()
            else:
                numbers = []
        for start in range(0, len(numbers), _AT_ONCE):
            batch = numbers[start : start + _AT_ONCE]
            vectors = [self._index.reconstruct(int(number)) for number in batch]
            yield Piece(self.path.name, np.array(vectors))

    def search_nearest(self, vectors: Floats) -> Iterator[Piece]:
        if self._index.d == vectors.shape[1] and self._index.ntotal:
            _, ids = self._index.search(vectors.astype(np.float32), 1)
            nearest = []
            for i in np.unique(ids):
                if i >= 0:
                    nearest.append(self._index.reconstruct(int(i)))
            yield Piece(self.path.name, np.array(nearest))
