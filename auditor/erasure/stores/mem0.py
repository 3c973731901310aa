"""Read mem0: the history of memories, the last messages, and vector stores in the same folder."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import ClassVar

from auditor.erasure.layers import Layer
from auditor.erasure.store import BYTES, INSTALL, NearestSearch, Store, list_store_kinds
from auditor.erasure.stores.sqlite import SQLiteStore, list_tables, read_start, read_tables
from auditor.erasure.windows import TEXT, VECTORS

_OF = " of "  # between the names of a layer and of its vector store
_BY_HAND = "no call of mem0 but reset(), for all users: DELETE FROM {}, then VACUUM"
# By table: the layer's name, and whether only a part of the records may be in it.
_LAYERS = {"history": ("history of memories", False), "messages": ("last messages", True)}


class Mem0Store(SQLiteStore):
    """Read a history database of mem0, or a folder that has one and perhaps vector stores."""

    name = "mem0"
    remedies: ClassVar[tuple[tuple[str, str], ...]] = (
        (r"history of|table history", _BY_HAND.format("history WHERE memory_id = ...")),
        (r"last messages|table messages", _BY_HAND.format("messages WHERE session_scope = ...")),
        *SQLiteStore.remedies,
    )

    @classmethod
    def recognises(cls, path: Path) -> bool:
        if path.is_dir():
            return any(map(_is_history, path.iterdir()))
        return _is_history(path)

    def check(self) -> None:
        super().check()
        for store in self._vector_stores.values():
            store.check_package()
            store.check()

    def describe(self) -> list[str]:
        facts = super().describe()
        if not self._vector_stores:
            facts.append("its vector store is not in this folder: give its path, too")
        for name, store in self._vector_stores.items():
            facts += [f"{name}: {fact}" for fact in store.describe()]
        return facts

    @cached_property
    def _vector_stores(self) -> dict[str, Store]:
        """The vector stores (Qdrant, Chroma, faiss) in mem0's folder, keyed by path within it."""
        if not self.path.is_dir():
            return {}
        kinds = [kind for name, kind in list_store_kinds().items() if name not in ("files", "mem0")]
        stores = {}
        folders = [self.path]
        while folders:
            for path in sorted(folders.pop().iterdir()):
                kind = next((kind for kind in kinds if kind.recognises(path)), None)
                if kind is not None and not _is_history(path):
                    stores[str(path.relative_to(self.path))] = kind(path)
                elif path.is_dir():
                    folders.append(path)
        return stores

    def _split_name(self, layer: str) -> tuple[str, Store | None]:
        """Split a layer's name into the name within a vector store, and this vector store.

        If the layer belongs to no vector store, return the name unchanged, and None.
        """
        for name, store in self._vector_stores.items():
            file = layer.removeprefix(BYTES)
            if layer.startswith(BYTES) and (file == name or file.startswith(f"{name}/")):
                return BYTES + file[len(name) + 1 :], store
            if layer.endswith(f"{_OF}{name}"):
                return layer.removesuffix(f"{_OF}{name}"), store
        return layer, None

    def lacks(self, kind: str, layer: str) -> bool:
        inner_layer, store = self._split_name(layer)
        if store is not None:
            return kind not in store.kinds or store.lacks(kind, inner_layer)
        file = self.folder / layer.removeprefix(BYTES)
        # mem0's memories next to a faiss index are JSON without vectors.
        is_without_vectors = file.suffix == ".json" or _is_history(file)
        if (kind == VECTORS and is_without_vectors) or file.name == "config.json":
            return True
        return super().lacks(kind, layer)

    def list_library_layers(self) -> Iterator[Layer]:
        for path in filter(_is_history, self.list_databases()):
            tables = list_tables(path)
            for table, (name, quotes) in _LAYERS.items():
                if table in tables:
                    read_rows = partial(read_tables, path, [table])
                    yield Layer(name, read_rows, (TEXT,), other_texts=True, quotes=quotes)
        for name, store in self._vector_stores.items():
            if store.package and not store.package_version:
                reason = f"{store.package} is not installed ({INSTALL})"
                yield Layer(f"what its library returns{_OF}{name}", list, (TEXT,), doubt=reason)
                continue
            for layer in store.list_library_layers():
                yield replace(layer, name=f"{layer.name}{_OF}{name}")

    def list_nearest_searches(self) -> Iterator[tuple[str, NearestSearch]]:
        for name, store in self._vector_stores.items():
            for layer, search_nearest in store.list_nearest_searches():
                yield f"{layer}{_OF}{name}", search_nearest

    def find_remedy(self, layer: str, places: Iterable[str]) -> str:
        inner_layer, store = self._split_name(layer)
        if store is not None:
            return store.find_remedy(inner_layer, places)
        return super().find_remedy(layer, places)


def _is_history(path: Path) -> bool:
    """Return whether the file is a database of mem0's events and messages."""
    return (
        SQLiteStore.recognises(path)
        and b"old_memory" in (start := read_start(path, 2**16))
        and b"new_memory" in start
    )
