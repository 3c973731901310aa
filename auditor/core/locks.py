"""Lock a folder for one process. A second process gets an error that gives the first one's id.

The system releases the lock (flock) whenever the process ends.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from auditor.core import disk
from auditor.core.errors import AuditError

LOCK = ".lock"  # contains the pid of its current or last holder


def acquire_folder_lock(folder: Path, patience: float = 0.0) -> FileLock:
    """Lock a folder, and remove the unfinished files that killed processes left in it.

    The lock is held until `release`, or until the last reference to it is deleted. One process may
    acquire the lock several times. `patience` is the number of seconds to wait for another process.
    Raise AuditError if another process still holds the lock then, or if the folder is not writable.
    """
    path = folder / LOCK
    try:
        # A singleton counts its holders: with a second handle, flock would refuse this very
        # process.
        lock = FileLock(
            path.resolve(), timeout=0, mode=0o600, thread_local=False, is_singleton=True
        )
        lock.acquire(timeout=patience)
        path.write_text(str(os.getpid()))
        disk.remove_scratch_files(folder)
    except Timeout:
        raise AuditError(
            f"{str(folder)!r} is in use by {_lock_holder_label(path)}: wait for it to end, or give "
            "another folder"
        ) from None
    except OSError as error:
        raise disk.make_unwritable_error(path, error) from error
    return lock


@contextmanager
def lock_folder(folder: Path, mark: str) -> Iterator[None]:
    """Hold the lock of a folder during the block. Create a missing folder with mode 0700.

    `mark` is the name of a file that a valid folder contains. If this file is missing after the
    block, remove the lock file, and the folder if it is new. Raise AuditError like
    `acquire_folder_lock`.
    """
    is_new = not folder.exists()
    try:
        # Trained models and results reveal the records.
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise disk.make_unwritable_error(folder, error) from error
    with acquire_folder_lock(folder):
        try:
            yield
        finally:
            if not (folder / mark).exists():
                # Remove it while the lock is held: afterwards the file may be the lock of another
                # process.
                (folder / LOCK).unlink(missing_ok=True)
                if is_new:
                    with suppress(OSError):  # other processes may have written files there
                        folder.rmdir()


def _lock_holder_label(path: Path) -> str:
    try:
        pid = path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        pid = ""
    if pid.isdigit():
        return f"process {pid}"
    return "another process"
