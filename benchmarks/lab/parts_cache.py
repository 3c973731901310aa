"""A cache of what takes long to make: each part a folder that is there whole, as it was built, or
not at all.

Knows folders, sums and seconds; not what a part holds.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from filelock import AcquireReturnProxy, FileLock, Timeout

from auditor.core import disk
from auditor.core.errors import AuditError

_SECONDS, _SUMS = "seconds.json", "sha256.json"  # what building a part took; what it wrote
_PATIENCE = 1.0  # seconds until the user is told that another process is waited for

Progress = Callable[[str, int, int], None]  # (what, done, of how many)
T = TypeVar("T")


@dataclass(frozen=True)
class LabParts:
    """The lab's parts below one folder.

    makes: whether what is missing is built; else that is refused. first: the part that all others
    are built on.
    foundations: how the names of the parts begin that others are built on. told: what the user must
    know. progress: is told of another process that this one waits for.
    """

    folder: Path
    makes: bool
    first: str
    foundations: tuple[str, ...]
    told: Callable[[str], None]
    progress: Progress = lambda what, done, total: None
    seconds: dict[str, float] = field(default_factory=dict)  # what building each part took

    def load_or_build(
        self, name: str, build: Callable[[Path], None], load: Callable[[Path], T], version: str = ""
    ) -> T:
        """Loads a part, building it first where it is missing; a part may come in several versions.

        A lock keeps two processes from building at once; the folder appears by one rename when all
        of it is written, so a build killed half-way leaves nothing that looks finished. A part that
        is no longer what was built is built anew, and the user is told. Raises AuditError for a
        missing one where nothing is made.
        """
        final = self.folder / f"{name}{version}"
        if not self.makes and not _is_cached_part_intact(final):
            raise AuditError(
                f"expected the lab's {name} in {str(final)!r}, where a run puts it: run the audit "
                "once, and for workers on other machines set AUDIT_CACHE to a folder that all of "
                "them share"
            )
        if not _is_cached_part_intact(final):
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            with self._acquire_part_lock(final):
                # Looked at again under the lock: another process may have built it meanwhile.
                if final.is_dir() and not _is_cached_part_intact(final):
                    self._remove_damaged_and_dependent(final)
                    self.told(
                        f"the lab's {name} in the cache was not as it was built: it was built anew"
                    )
                if not final.is_dir():
                    _build_part(final, build)
        self.seconds[name] = _recorded_part_build_seconds(final)
        return load(final)

    def _acquire_part_lock(self, final: Path) -> AcquireReturnProxy:
        """Take the lock on a part; say so if another process has it."""
        lock = FileLock(self.folder / f"{final.name}.lock")
        try:
            return lock.acquire(timeout=_PATIENCE)
        except Timeout:
            self.progress(f"another process builds the lab's {final.name}: waiting", 0, 1)
            return lock.acquire()

    def _remove_damaged_and_dependent(self, damaged: Path) -> None:
        """A part, and what was built on it: built again, its weights may differ in their last
        bits."""
        # What begins with a dot is being written, by this process or another.
        others = [
            path for path in self.folder.glob("[!.]*") if path.is_dir() and path.name != self.first
        ]
        for path in {damaged, *(others if damaged.name.startswith(self.foundations) else ())}:
            shutil.rmtree(path)


def _build_part(final: Path, build: Callable[[Path], None]) -> None:
    with disk.create_atomically(final) as made:
        made.mkdir()
        start = time.perf_counter()
        build(made)
        (made / _SECONDS).write_text(json.dumps(time.perf_counter() - start))
        (made / _SUMS).write_text(json.dumps(_part_file_digests(made)))


def _part_file_digests(folder: Path) -> dict[str, str]:
    """SHA-256 of every file, by its path in the folder."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != _SUMS)
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }


def _recorded_part_build_seconds(part: Path) -> float:
    return float(json.loads((part / _SECONDS).read_text()))


def _is_cached_part_intact(part: Path) -> bool:
    """Whether a part of the cache is there, as it was built."""
    try:
        return bool(json.loads((part / _SUMS).read_text()) == _part_file_digests(part))
    except (OSError, ValueError, RecursionError):
        return False
