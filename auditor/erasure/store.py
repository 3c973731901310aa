"""Define the base of all stores: copied files, layers of file bytes, and the detection of stores.

Each file in `auditor/erasure/stores/` defines a named subclass of `Store`.
"""

from __future__ import annotations

import glob
import importlib
import importlib.metadata
import inspect
import os
import pkgutil
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from auditor.core.arrays import Floats
from auditor.core.errors import AuditError, refuse_unknown_names, wrap_library_errors
from auditor.erasure.encodings import OVERLAP
from auditor.erasure.layers import Layer, Piece
from auditor.erasure.windows import TEXT, VECTORS, WORDS

INSTALL = "pip install 'audit-lm[stores]'"
BYTES = "bytes of "  # prefix of the names of file layers
NEAREST = "nearest neighbours"
SCORES = "full-text scores"
NearestSearch = Callable[[Floats], Iterator[Piece]]
_AT_ONCE = 2**22  # bytes of a file
# Generated parts of file names: files that differ only in them share a layer.
_MADE_UP = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|[0-9a-f]{12,}|\d{5,}")


@dataclass(frozen=True)
class Store:
    """Define the base of all stores, such as a vector database on disk.

    path: the copy to examine; reading it may change it.
    package: the library that reads the store; tested: prefixes of its tested versions.
    kinds: the kinds of content that such a store may have.
    holds_no: for each kind of content, a pattern of files whose format cannot have it. The report
        mentions these files only if records are found in them.
    remedies: pairs (pattern, call). If the pattern matches a layer and a position, the call removes
        leftovers there. Each call was tested.
    schemes: URL schemes of a store on a server, such as `postgresql`.
    owns_folder: whether all files in the store's folder belong to the store.
    """

    path: Path

    name: ClassVar[str] = ""
    package: ClassVar[str] = ""
    tested: ClassVar[tuple[str, ...]] = ()
    kinds: ClassVar[tuple[str, ...]] = (TEXT, WORDS, VECTORS)
    holds_no: ClassVar[Mapping[str, str]] = {}
    remedies: ClassVar[tuple[tuple[str, str], ...]] = ()
    schemes: ClassVar[tuple[str, ...]] = ()
    owns_folder: ClassVar[bool] = False

    @classmethod
    def open(cls, source: str, scratch: Path) -> Store:
        """Copy the store at a path or an address into a folder, and return the copy."""
        return cls(copy_store(Path(source), scratch))

    @classmethod
    def recognises(cls, path: Path) -> bool:
        """Return whether the path is a store of this kind, by its file names and leading bytes."""
        raise NotImplementedError

    def check(self) -> None:
        """Raise AuditError if the copy is damaged or has a version that this tool does not know."""

    def describe(self) -> list[str]:
        """Return versions and settings of the library that wrote the store.

        The verdicts hold only for these versions and settings.
        """
        version = self.package_version
        return [f"{self.package} {version}"] if version else []

    def list_layers(self) -> Iterator[Layer]:
        """Yield all layers, those of file bytes first."""
        yield from self.list_file_layers()
        if self.package and not self.package_version:
            return
        with wrap_library_errors(f"{self.package or self.name} cannot read {self.path.name!r}"):
            yield from self.list_library_layers()

    def list_library_layers(self) -> Iterator[Layer]:
        """Yield layers that read the store with its library."""
        return iter(())

    def list_nearest_searches(self) -> Iterator[tuple[str, NearestSearch]]:
        """Yield (layer name, search) for each search for nearest neighbours by the library."""
        has_search = type(self).search_nearest is not Store.search_nearest
        if has_search and self.package_version:
            yield NEAREST, self.search_nearest

    @property
    def has_scores(self) -> bool:
        """Return whether the library has a full-text index, whose scores count rows."""
        return False

    def search_scores(self, texts: Sequence[str]) -> Iterator[Piece]:
        """Yield those of the texts that are rows or that the scores of other rows still count.

        The copy may be changed: it is the last search.
        """
        return iter(())

    def search_nearest(self, vectors: Floats) -> Iterator[Piece]:
        """Yield the stored vectors that the library finds nearest to each query vector, (n, d)."""
        return iter(())

    @property
    def package_version(self) -> str | None:
        """The installed version of the store's library; None if it is not installed."""
        try:
            if self.package:
                return importlib.metadata.version(self.package)
            return None
        except importlib.metadata.PackageNotFoundError:
            return None

    def check_package(self) -> None:
        """Raise AuditError if the installed version of the library is not a tested one."""
        version = self.package_version
        if version and not version.startswith(self.tested):
            raise AuditError(
                f"expected {self.package} {' or '.join(self.tested)}, whose layers are known; got "
                f"{version}; files:PATH searches only the bytes of its files"
            )

    def find_remedy(self, layer: str, places: Iterable[str]) -> str:
        """Return the calls that remove leftovers from these positions of a layer; "" if unknown."""
        remedies_by_text = dict[str, None]()
        for place in places:
            for pattern, remedy in self.remedies:
                if re.search(pattern, f"{layer} | {place}"):
                    remedies_by_text[remedy] = None
                    break
        return "; ".join(remedies_by_text)

    def lacks(self, kind: str, layer: str) -> bool:
        """Return whether the format of a layer's files cannot have this kind of content."""
        return re.search(self.holds_no.get(kind, r"(?!)"), layer) is not None

    # --- files ---

    @property
    def folder(self) -> Path:
        if self.path.is_dir():
            return self.path
        return self.path.parent

    def list_files(self) -> list[Path]:
        """Return the store's nonempty files."""
        paths = sorted(path for path in self.folder.rglob("*") if path.is_file())
        return [path for path in paths if path.stat().st_size]

    def list_file_layers(self) -> Iterator[Layer]:
        """Yield a layer for each file; files with generated names share a layer."""
        groups: dict[str, list[Path]] = {}
        for path in self.list_files():
            group = _MADE_UP.sub("*", str(path.relative_to(self.folder)))
            groups.setdefault(group, []).append(path)
        for group, paths in groups.items():
            if len(paths) == 1:
                locate = self.find_locator(paths[0])
            else:
                locate = None
            names_by_path = [(path, self.name_file(path)) for path in paths]
            yield Layer(f"{BYTES}{group}", partial(read_files, names_by_path), locate=locate)

    def name_file(self, path: Path) -> str:
        """Return the file's name for reports."""
        return str(path.relative_to(self.folder))

    def find_locator(self, path: Path) -> Callable[[int], str] | None:
        """Return a function that maps a byte offset in this file to a table's name.

        Return None if the file has no tables.
        """
        return None


def read_files(files: Iterable[tuple[Path, str]]) -> Iterator[Piece]:
    """Yield the bytes of files in overlapping blocks: each repeats the end of the previous block.

    files: (path, name for reports).
    """
    for path, place in files:
        with path.open("rb") as file:
            start = 0
            rest = b""
            while block := file.read(_AT_ONCE):
                yield Piece(place, rest + block, start - len(rest), path)
                start += len(block)
                rest = block[-OVERLAP:]


def list_texts(value: Any) -> Iterator[str]:
    """Yield every text inside a value: in its containers, and in messages with a `content`."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from list_texts(inner)
    elif isinstance(value, list | tuple | set):
        for inner in value:
            yield from list_texts(inner)
    elif hasattr(value, "content"):
        yield from list_texts(value.content)


def list_store_kinds() -> dict[str, type[Store]]:
    """Return the store classes, keyed and sorted by name, with plain files last."""
    package = importlib.import_module("auditor.erasure.stores")
    kinds = dict[str, type[Store]]()
    for module in pkgutil.iter_modules(package.__path__):
        for value in vars(importlib.import_module(f"{package.__name__}.{module.name}")).values():
            if inspect.isclass(value) and issubclass(value, Store) and value.name:
                kinds[value.name] = value
    return dict(sorted(kinds.items(), key=lambda item: (item[0] == "files", item[0])))


def find_store_kind(argument: str) -> tuple[type[Store], str]:
    """Split `PATH`, `KIND:PATH` or `SCHEME://...` into the store's class and its path or address.

    Raise AuditError if no store kind matches.
    """
    kinds = list_store_kinds()
    prefix, colon, rest = argument.partition(":")
    for kind in kinds.values():
        if prefix in kind.schemes and rest.startswith("//"):
            return kind, argument
    if colon and not Path(argument).exists():
        refuse_unknown_names("store", [prefix], kinds)
        path = Path(rest)
    else:
        prefix = ""
        path = Path(argument)
    if not path.exists():
        raise AuditError(f"expected a store, got {str(path)!r}, which does not exist")
    if prefix:
        if not kinds[prefix].recognises(path):
            raise AuditError(f"expected a store of {prefix} at {str(path)!r}, got something else")
        return kinds[prefix], str(path)
    kind = next(kind for kind in kinds.values() if kind.recognises(path))
    if kind.name in ("files", "sqlite"):
        _refuse_part(kind, path.resolve(), kinds.values())
    return kind, str(path)


def _refuse_part(kind: type[Store], path: Path, kinds: Iterable[type[Store]]) -> None:
    """Raise AuditError if the path is in the folder of another store, of which it may be a part."""
    for owner in kinds:
        if owner.owns_folder and owner.recognises(path.parent):
            raise AuditError(
                f"expected a store, got {path.name!r} in a folder of {owner.name}: give "
                f"{str(path.parent)!r}, or '{kind.name}:{path}' if this is no part of it"
            )


def copy_store(path: Path, scratch: Path) -> Path:
    """Copy a store, and return the path of the copy.

    If the store is a file, all files whose names begin with the store's name are copied. Links are
    followed. Raise AuditError if the store is empty, is locked, or changes meanwhile.
    """
    path_given = path
    path = path.resolve()  # a store's other files are next to the file itself, not next to a link
    top = path if path.is_dir() else path.parent
    files = _list_store_files(path)
    before = _stat_files(files)
    if not any(size for size, _, _ in before.values()):
        raise AuditError(f"expected a store, got {str(path_given)!r}, which is empty")
    _refuse_locked(path_given, files)
    changed = AuditError(
        f"{str(path_given)!r} was written while it was copied: stop the process that writes it"
    )
    for file in files:
        copy = scratch / path.name / file.relative_to(top)
        copy.parent.mkdir(parents=True, exist_ok=True)
        try:
            shutil.copyfile(file, copy)
        except FileNotFoundError:
            raise changed from None
    if _stat_files(_list_store_files(path)) != before:
        raise changed
    if path.is_dir():
        return scratch / path.name
    return scratch / path.name / path.name


def _list_store_files(path: Path) -> list[Path]:
    """Return the files of a store, also those in linked folders.

    Raise AuditError if a folder cannot be read.
    """
    if not path.is_dir():
        siblings = path.parent.glob(f"{glob.escape(path.name)}*")
        return sorted(entry for entry in siblings if entry.is_file())
    files = []
    for folder, folder_names, names in os.walk(path, onerror=_refuse_folder, followlinks=True):
        files += [Path(folder, name) for name in names]
        around = {Path(folder).resolve()}
        for outer in Path(folder).parents:
            if outer.is_relative_to(path):
                around.add(outer.resolve())
        # Skip a link to a folder that contains it: it has no other files, and would never end.
        folder_names[:] = [n for n in folder_names if Path(folder, n).resolve() not in around]
    return sorted(file for file in files if file.is_file())


def _refuse_folder(error: OSError) -> None:
    raise AuditError(f"{error.filename!r} cannot be read: {error.strerror}")


def _stat_files(files: Iterable[Path]) -> dict[Path, tuple[int, int, int]]:
    """Return (size, modification time, inode) of each file that exists."""
    stats = {}
    for file in files:
        if file.exists():
            stat = file.stat()
            stats[file] = stat.st_size, stat.st_mtime_ns, stat.st_ino
    return stats


def _refuse_locked(path: Path, files: Iterable[Path]) -> None:
    """Raise AuditError if a process has a write lock on one of the files (/proc/locks)."""
    locks = Path("/proc/locks")
    if not locks.exists():
        return
    holders = dict[tuple[str, int], str]()
    for line in locks.read_text().splitlines():
        fields = line.split()
        if "WRITE" in fields and "->" not in fields:
            kind = fields.index("WRITE")
            device, _, inode = fields[kind + 2].rpartition(":")
            holders[device, int(inode)] = fields[kind + 1]
    for file in files:
        stat = file.stat()
        device = f"{os.major(stat.st_dev):02x}:{os.minor(stat.st_dev):02x}"
        if holder := holders.get((device, stat.st_ino)):
            raise AuditError(
                f"{str(path)!r} is locked by process {holder}, which may write it: close it first"
            )
