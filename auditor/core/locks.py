"""One process a folder: a second one that would write into it is refused with the pid of the first.

The lock is the system's (flock), so it ends with its process, however that ends. Knows folders; not
what is in them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from auditor.core import disk
from auditor.core.errors import AuditError

LOCK = ".lock"  # holds the pid of who has it, or had it last


def acquire_folder_lock(folder: Path, patience: float = 0.0) -> FileLock:
    """The folder's lock, held; what killed processes left half written in it is taken away.

    It is held until `release`, or until nobody refers to it; the same process may hold it several
    times over.
    patience: seconds to wait for another process to let go of it. Raises AuditError where it does
    not, and where the folder cannot be written to.
    """
    path = folder / LOCK
    try:
        # a singleton counts its holders: by a second handle, flock would refuse this very process
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
        raise disk.unwritable_path_error(path, error) from error
    return lock


@contextmanager
def locked_folder(folder: Path, mark: str) -> Iterator[None]:
    """Holds the lock of a folder, which is made where it is missing, 0700.

    mark: the file that makes it one of ours; where it is not there in the end, neither the lock nor
    a folder made here stays behind. Raises AuditError as `acquire_folder_lock`.
    """
    made = not folder.exists()
    try:
        # what is trained and found here tells of the records
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise disk.unwritable_path_error(folder, error) from error
    with acquire_folder_lock(folder):
        try:
            yield
        finally:
            if not (folder / mark).exists():
                # while it is held: once it is free, the file may be the lock of another process
                (folder / LOCK).unlink(missing_ok=True)
                if made:
                    with suppress(OSError):  # somebody may have put other things there
                        folder.rmdir()


def _lock_holder_label(path: Path) -> str:
    try:
        pid = path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        pid = ""
    return f"process {pid}" if pid.isdigit() else "another process"
