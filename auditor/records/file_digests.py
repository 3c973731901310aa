"""Identify a run's weights by the SHA-256 of every file of its models, adapters and tokenizers.

A file can change without a change of its path. Resuming a run or repeating a sweep is then refused,
with the name of a changed file. Models are not loaded.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from auditor.core.disk import find_cache_folder
from auditor.core.errors import AuditError, refuse_unreadable_path
from auditor.core.jsonable import write_json

# Files that transformers and PEFT read from a folder: weights, configurations, tokenizers,
# templates, code.
_READ = (".safetensors", ".bin", ".json", ".model", ".tiktoken", ".txt", ".jinja", ".py", ".gguf")

# records of the training, which no model is loaded from
_ABOUT = (
    "training.json",
    "trainer_state.json",
    "seconds.json",
)

# seconds: a file may change again within a tick of the coarsest file system's clock
_SETTLED = 2.0


def digest_model_files(
    models_by_role: Mapping[str, tuple[str, str | None]],
    progress: Callable[[str, int, int], None] | None = None,
) -> dict[str, str]:
    """Return the SHA-256 of each file, keyed by `role/file`.

    Args:
        models_by_role: each role's model (folder or hub id) and its hub revision.
        progress: called with (description, done, total). Pass it if a decision depends on the
            digests: then all bytes are read, and no cached digest is used.
    """
    cache = _DigestCache()
    paths = dict(_list_role_files(models_by_role))
    digests = {}
    for n_read, (name, path) in enumerate(paths.items()):
        if progress is None:
            digests[name] = cache.cached_sha256_hex(path)
        else:
            progress(f"reading {name}", n_read, len(paths))
            digests[name] = digest_file(path)
    cache.save_digests()
    return digests


def digest_file(path: Path) -> str:
    """Return the SHA-256 of a file in hex; raise AuditError if the file is unreadable."""
    with refuse_unreadable_path(path), path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _list_role_files(
    models_by_role: Mapping[str, tuple[str, str | None]],
) -> Iterator[tuple[str, Path]]:
    """Yield each file's `role/file` name and path."""
    for role, (place, revision) in models_by_role.items():
        yield from _list_loaded_files(place, revision, role)
        base = _find_adapter_base(_find_model_folder(place, revision) / "adapter_config.json")
        if base is not None and base != place:
            # Without a revision: the adapter's revision belongs to its own repository.
            yield from _list_loaded_files(base, None, f"{role} base")


def check_model_files_unchanged(
    recorded: Mapping[str, str] | None, now: Mapping[str, str], description: str
) -> None:
    """Raise AuditError, which names the file, if a file changed, vanished or appeared.

    A model is skipped if `recorded` or `now` has none of its files.

    Args:
        recorded: earlier SHA-256 of each file, keyed by `role/file`; None if they were not
            recorded.
        now: current SHA-256 of each file, keyed by `role/file`.
        description: source of the earlier digests, for the message.
    """
    if recorded is None:
        if now:
            raise AuditError(
                f"expected {description} to say which weights it was made with, but an older "
                "version made it: start again"
            )
        return
    for name, change in find_changed_files(recorded, now):
        raise AuditError(
            f"expected the files that {description} was made with, but {name} {change} since: "
            "give a new folder"
        )


def find_changed_files(
    recorded: Mapping[str, str], now: Mapping[str, str]
) -> Iterator[tuple[str, str]]:
    """Yield (file, description of the change) for each changed file.

    A model is skipped if `recorded` or `now` has none of its files.

    Args:
        recorded: earlier SHA-256 of each file, keyed by `role/file`.
        now: current SHA-256 of each file, keyed by `role/file`.
    """
    shared_roles = list_model_roles(recorded) & list_model_roles(now)
    for name in sorted({*recorded, *now}):
        if recorded.get(name) != now.get(name) and list_model_roles([name]) <= shared_roles:
            if name not in now:
                yield name, "is gone"
            else:
                yield name, "has changed" if name in recorded else "is new"


def list_model_roles(names: Iterable[str]) -> set[str]:
    return {name.partition("/")[0] for name in names}


def _list_loaded_files(place: str, revision: str | None, name: str) -> Iterator[tuple[str, Path]]:
    """Yield (`name/file`, path) for all files of a model, an adapter or an ensemble's members.

    Args:
        place: a folder, a hub id or a single file.
        revision: hub revision.
    """
    if Path(place).is_file():
        yield f"{name}/{Path(place).name}", Path(place)
        return
    for path in _list_visible_entries(_find_model_folder(place, revision)):
        if path.is_file() and path.suffix in _READ and path.name not in _ABOUT:
            yield f"{name}/{path.name}", path
        elif (path / "adapter_config.json").is_file():  # a member of an ensemble
            yield from _list_loaded_files(str(path), None, f"{name}/{path.name}")


def _find_model_folder(place: str, revision: str | None) -> Path:
    folder = Path(place)
    if folder.is_dir():
        return folder
    return _find_hub_snapshot(place, revision) or folder


def _list_visible_entries(folder: Path) -> list[Path]:
    with refuse_unreadable_path(folder):
        if folder.is_dir():
            return sorted(path for path in folder.iterdir() if not path.name.startswith("."))
        return []


def _find_adapter_base(config: Path) -> str | None:
    """Return the name of an adapter's base model; None if the file does not name one."""
    try:
        base_name = json.loads(config.read_text(encoding="utf-8")).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError):
        return None  # no adapter; or a broken adapter, which does not load
    if isinstance(base_name, str) and base_name:
        return base_name
    return None


def _find_hub_snapshot(name: str, revision: str | None) -> Path | None:
    """Return the folder of the model's files in the hub's cache; None if no files are cached.

    Args:
        revision: hub revision; None for the default.
    """
    from huggingface_hub import try_to_load_from_cache  # takes a while to import

    for file in ("config.json", "adapter_config.json"):
        with suppress(ValueError):  # not a valid hub name
            # Search only on disk: download nothing.
            path = try_to_load_from_cache(name, file, revision=revision)
            if isinstance(path, str):  # else None, or the hub's mark for a file known to be missing
                return Path(path).parent
    return None


class _DigestCache:
    """Cache digests by path, size, times and inode, so that gigabytes are read only once.

    The cache is a file in the cache folder. ctime is part of the key, because every write changes
    ctime, even if mtime is restored. A file that has just changed is not cached, because it could
    change again without a trace. If the cache cannot be written, every file is read again.
    """

    def __init__(self) -> None:
        self._held: dict[str, list[object]] = {}
        self._path: Path | None = None
        with suppress(AuditError, OSError, ValueError):
            self._path = find_cache_folder() / "weights.json"
            digests = json.loads(self._path.read_text(encoding="utf-8"))
            if isinstance(digests, dict):
                self._held = digests
        self._new = False

    def cached_sha256_hex(self, path: Path) -> str:
        """Return the SHA-256 of a file in hex, from the cache if possible.

        Raise AuditError for an unreadable file.
        """
        with refuse_unreadable_path(path):
            key = str(path.resolve())
            fingerprint = _fingerprint_file(path)
            entry = self._held.get(key)
            if isinstance(entry, list) and entry[:-1] == fingerprint and isinstance(entry[-1], str):
                return entry[-1]
            digest = digest_file(path)
            changed_at = max(path.stat().st_mtime, path.stat().st_ctime)
            # Equal before and after: no change during the read.
            if fingerprint == _fingerprint_file(path) and time.time() - changed_at > _SETTLED:
                self._held[key], self._new = [*fingerprint, digest], True
            return digest

    def save_digests(self) -> None:
        if self._path is not None and self._new:
            # The later of two simultaneous runs wins: the other's digests are only computed again.
            existing = {}
            for path, digest in self._held.items():
                if os.path.exists(path):
                    existing[path] = digest
            with suppress(AuditError):
                write_json(self._path, existing)


def _fingerprint_file(path: Path) -> list[object]:
    state = os.stat(path)
    # A list, as JSON returns it: a tuple would never be equal.
    return [state.st_size, state.st_mtime_ns, state.st_ctime_ns, state.st_ino, state.st_dev]
