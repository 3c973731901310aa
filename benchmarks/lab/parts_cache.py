"""Cache the slow parts of a lab; each is a folder that is complete and unchanged, or absent."""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from filelock import AcquireReturnProxy, FileLock, Timeout

from auditor.core import disk
from auditor.core.errors import AuditError

# Names of files with the build time of a part, and with the checksums of its files.
_SECONDS = "seconds.json"
_SUMS = "sha256.json"
_PATIENCE = 1.0  # seconds before telling the user that another process holds the lock

Progress = Callable[[str, int, int], None]  # (description, done, total)


@dataclass(frozen=True)
class LabParts:
    """Manage the parts of a lab (models and files), each in a sub-folder of one folder.

    makes: whether to build missing parts; if not, a missing part is an error.
    root_part: the part from which all other parts are built.
    foundations: name prefixes of parts that other parts need.
    notify: receives messages for the user.
    progress: shows the wait for another process.
    seconds: build times of the parts that this process checked, keyed by part.
    """

    folder: Path
    makes: bool
    root_part: str
    foundations: tuple[str, ...]
    notify: Callable[[str], None]
    progress: Progress = lambda description, n_done, total: None
    seconds: dict[str, float] = field(default_factory=dict)

    def build_once(self, name: str, build: Callable[[Path], None]) -> Path:
        """Return the folder of a part; build the part first if it is missing or damaged.

        A lock keeps two processes from building at once. The folder gets its name only after all
        files are written, so that an interrupted build leaves no part. A damaged part is rebuilt,
        with a message. Raise AuditError if the part is missing and `makes` is false.
        """
        final = self.folder / name
        if name in self.seconds:
            return final  # checked before: its files are large
        if not self.makes and not _is_cached_part_intact(final):
            raise AuditError(
                f"expected the lab's {name} in {str(final)!r}, where a run writes it: run the "
                "audit once, and for workers on other machines set AUDIT_CACHE to a folder that "
                "all of them share"
            )
        if not _is_cached_part_intact(final):
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            with self._acquire_part_lock(final):
                # Check again under the lock: another process may have built the part meanwhile.
                if final.is_dir() and not _is_cached_part_intact(final):
                    self._remove_damaged_parts(final)
                    self.notify(
                        f"the lab's {name} in the cache had changed since it was built: it was "
                        "rebuilt"
                    )
                if not final.is_dir():
                    _build_part(final, build)
        self.seconds[name] = float(json.loads((final / _SECONDS).read_text()))
        return final

    def _acquire_part_lock(self, final: Path) -> AcquireReturnProxy:
        """Lock a part; notify the user if another process has the lock."""
        lock = FileLock(self.folder / f"{final.name}.lock")
        try:
            return lock.acquire(timeout=_PATIENCE)
        except Timeout:
            self.progress(f"another process builds the lab's {final.name}: waiting", 0, 1)
            return lock.acquire()

    def _remove_damaged_parts(self, damaged: Path) -> None:
        """Remove a damaged part.

        If other parts are built from it, remove them too, because rebuilt weights may differ
        slightly.
        """
        # This or another process is still writing names that begin with a dot.
        removed = {damaged}
        if damaged.name.startswith(self.foundations):
            for path in self.folder.glob("[!.]*"):
                if path.is_dir() and path.name != self.root_part:
                    removed.add(path)
        for path in removed:
            shutil.rmtree(path)


def _build_part(final: Path, build: Callable[[Path], None]) -> None:
    with disk.create_atomically(final) as folder:
        folder.mkdir()
        start = time.perf_counter()
        build(folder)
        (folder / _SECONDS).write_text(json.dumps(time.perf_counter() - start))
        (folder / _SUMS).write_text(json.dumps(_digest_part_files(folder)))


def _digest_part_files(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of every file, keyed by its path in the folder."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != _SUMS)
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }


def _is_cached_part_intact(part: Path) -> bool:
    """Return whether a part is in the cache and unchanged since it was built."""
    try:
        return bool(json.loads((part / _SUMS).read_text()) == _digest_part_files(part))
    except (OSError, ValueError, RecursionError):
        return False
