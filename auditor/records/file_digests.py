"""Which weights a run is about: a SHA-256 of every file that its models, adapters and tokenizers
are read from.

A path is no promise of what lies there: a run that is gone on with, or a sweep that is run again,
after other weights were put in the same place is refused by the name of the file. Knows files;
loads no model.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from huggingface_hub import try_to_load_from_cache

from auditor.core import disk
from auditor.core.disk import cache_folder
from auditor.core.errors import AuditError

# What transformers and PEFT read of a folder: weights, configurations, tokenizers, templates, code
# of its own.
_READ = (".safetensors", ".bin", ".json", ".model", ".tiktoken", ".txt", ".jinja", ".py", ".gguf")

# of how it came about: no model is made of them
_ABOUT = (
    "training.json",
    "trainer_state.json",
    "seconds.json",
)

# seconds: a file may change again within one tick of the coarsest file system's clock
_SETTLED = 2.0


def model_sha256_by_file_name(named: Mapping[str, tuple[str, str | None]]) -> dict[str, str]:
    """`role/file` -> SHA-256. named: by role, the folder or hub id of a model, and its revision on
    the hub."""
    memory = _DigestCache()
    found = {name: memory.cached_sha256_hex(path) for name, path in _model_files_by_role(named)}
    memory.save_digests()
    return found


def model_sha256_by_file_name_uncached(
    named: Mapping[str, tuple[str, str | None]],
    said: Callable[[str, int, int], None] = lambda *told: None,
) -> dict[str, str]:
    """As `model_sha256_by_file_name`, with every byte read: who decides by it trusts no file's date
    and no kept digest.

    said: is told what is read, how many files of how many are done.
    """
    paths = dict(_model_files_by_role(named))
    found = {}
    for done, (name, path) in enumerate(paths.items()):
        said(f"reading {name}", done, len(paths))
        found[name] = file_sha256_hex(path)
    return found


def file_sha256_hex(path: Path) -> str:
    """In hex, of a file. Raises AuditError for one that cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise AuditError(f"{path}: cannot be read: {error.strerror}") from error


def _model_files_by_role(named: Mapping[str, tuple[str, str | None]]) -> Iterator[tuple[str, Path]]:
    """(`role/file`, where it lies)."""
    for role, (place, revision) in named.items():
        yield from (
            (f"{role}/{name}", path) for name, path in _files_read_to_load_model(place, revision)
        )
        base = _base_model_of_adapter(_local_model_folder(place, revision) / "adapter_config.json")
        if base is not None and base != place:
            # Without a revision: the adapter's is of its own repository.
            yield from (
                (f"{role} base/{name}", path)
                for name, path in _files_read_to_load_model(base, None)
            )


def check_model_files_unchanged(
    held: Mapping[str, str] | None, now: Mapping[str, str], what: str
) -> None:
    """Raises AuditError by the name of a file that has changed, gone or come since `what` was made
    with `held`.

    held: None where `what` does not say. A model of which one side holds nothing at all is not
    compared: what is not there cannot be mistaken for another, and whoever needs it fails to load
    it.
    """
    if held is None:
        if now:
            raise AuditError(
                f"expected {what} to say which weights it is of, but an older version made it: "
                "start anew"
            )
        return
    for name, how in changed_model_files(held, now):
        raise AuditError(
            f"expected the weights that {what} was made with, but {name} {how} since: give a new "
            "folder"
        )


def changed_model_files(
    held: Mapping[str, str], now: Mapping[str, str]
) -> Iterator[tuple[str, str]]:
    """(file, what became of it) of the models of which both sides hold something."""
    both = roles_of_model_files(held) & roles_of_model_files(now)
    for name in sorted({*held, *now}):
        if held.get(name) != now.get(name) and roles_of_model_files([name]) <= both:
            yield (
                name,
                "has changed"
                if name in held and name in now
                else "is new"
                if name in now
                else "is gone",
            )


def roles_of_model_files(names: Iterable[str]) -> set[str]:
    return {name.partition("/")[0] for name in names}


def _files_read_to_load_model(place: str, revision: str | None) -> Iterator[tuple[str, Path]]:
    """(name, path) of what is read of a model, an adapter or an ensemble's members; of a file,
    itself."""
    if Path(place).is_file():
        yield Path(place).name, Path(place)
        return
    for path in _visible_folder_entries(_local_model_folder(place, revision)):
        if path.is_file() and path.suffix in _READ and path.name not in _ABOUT:
            yield path.name, path
        elif (path / "adapter_config.json").is_file():  # a member of an ensemble
            yield from (
                (f"{path.name}/{name}", own)
                for name, own in _files_read_to_load_model(str(path), None)
            )


def _local_model_folder(place: str, revision: str | None) -> Path:
    folder = Path(place)
    return folder if folder.is_dir() else _cached_hub_snapshot(place, revision) or folder


def _visible_folder_entries(folder: Path) -> list[Path]:
    try:
        return (
            sorted(path for path in folder.iterdir() if not path.name.startswith("."))
            if folder.is_dir()
            else []
        )
    except OSError as error:
        raise AuditError(f"{folder}: cannot be read: {error.strerror}") from error


def _base_model_of_adapter(config: Path) -> str | None:
    """The model that an adapter is for, as it names it."""
    try:
        named = json.loads(config.read_text(encoding="utf-8")).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError):
        return None  # no adapter; or a broken one, which does not load
    return named if isinstance(named, str) and named else None


def _cached_hub_snapshot(name: str, revision: str | None) -> Path | None:
    """The folder that the hub's cache keeps a model's files in, by commit; None where it keeps
    none."""
    for file in ("config.json", "adapter_config.json"):
        with suppress(ValueError):  # no name that a hub could have
            # Looks on disk alone: nothing is downloaded.
            path = try_to_load_from_cache(name, file, revision=revision)
            if isinstance(
                path, str
            ):  # else None, or the hub's mark for a file that it is known not to have
                return Path(path).parent
    return None


class _DigestCache:
    """Digests by path, size, times and inode, in the cache folder: gigabytes are read once.

    ctime is among them: it moves with every change, also of a file whose mtime is put back. What
    changed within the last moments is not remembered: it could change again without a trace. Where
    nothing can be kept, all is read again.
    """

    def __init__(self) -> None:
        self._held: dict[str, list[object]] = {}
        self._path: Path | None = None
        with suppress(AuditError, OSError, ValueError):
            self._path = cache_folder() / "weights.json"
            held = json.loads(self._path.read_text(encoding="utf-8"))
            self._held = held if isinstance(held, dict) else {}
        self._new = False

    def cached_sha256_hex(self, path: Path) -> str:
        """SHA-256 in hex. Raises AuditError for a file that cannot be read."""
        try:
            key, seen = str(path.resolve()), _file_stat_fingerprint(path)
            held = self._held.get(key)
            if isinstance(held, list) and held[:-1] == seen and isinstance(held[-1], str):
                return held[-1]
            digest = file_sha256_hex(path)
            changed = max(path.stat().st_mtime, path.stat().st_ctime)
            # The same before and after: it was not changed while it was read.
            if seen == _file_stat_fingerprint(path) and time.time() - changed > _SETTLED:
                self._held[key], self._new = [*seen, digest], True
        except OSError as error:
            raise AuditError(f"{path}: cannot be read: {error.strerror}") from error
        return digest

    def save_digests(self) -> None:
        if self._path is not None and self._new:
            # Of two runs at once the later file stays: what the other had found is only read again.
            there = {path: held for path, held in self._held.items() if os.path.exists(path)}
            with suppress(AuditError):
                disk.replace_atomically(self._path, json.dumps(there))


def _file_stat_fingerprint(path: Path) -> list[object]:
    state = os.stat(path)
    # A list, as JSON gives it back: a tuple would never equal it.
    return [state.st_size, state.st_mtime_ns, state.st_ctime_ns, state.st_ino, state.st_dev]
