"""Lock folders for one process. A second process gets an error with the first process's id.

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
    """Acquire the folder's lock, and remove unfinished files of killed processes.

    The lock is held until `release`, or until its last reference is deleted. The same process may
    acquire the lock several times. patience: seconds to wait for another process. Raise AuditError
    if another process keeps the lock, or if the folder is not writable.
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
    """Hold the lock of a folder during the block. A missing folder is created with mode 0700.

    mark: name of a file that a valid folder contains. If this file is missing after the block, the
    lock file and a new folder are removed. Raise AuditError like `acquire_folder_lock`.
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
                # While the lock is held: afterwards the file may be the lock of another process.
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
