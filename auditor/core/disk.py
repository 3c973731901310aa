"""Write files and folders atomically, so that only their owner can read them.

A run's files reveal leaks. All files are written through this module, which also removes temporary
files.
"""

from __future__ import annotations

import glob
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO

from platformdirs import user_cache_path

from auditor.core.errors import AuditError

try:
    import fcntl
except ImportError:  # Windows cannot tell whether the process that created a folder still runs
    fcntl = None  # type: ignore[assignment]

# names of unfinished files
_BEFORE = ".audit-"
_BEHIND = ".tmp"


def replace_atomically(path: Path, content: str | bytes, *, sync: bool = False) -> None:
    """Write the content to `path` in one step, with mode 0600; create the folder if missing.

    If `sync` is True, wait until the content would survive a power cut; use this for files on which
    a claim depends. Raise AuditError if `path` cannot be written; the previous content then
    remains.
    """
    with open_atomic_replacement(path, sync=sync) as scratch:
        scratch.write_bytes(content.encode() if isinstance(content, str) else content)


@contextmanager
def open_atomic_replacement(path: Path, *, sync: bool = False) -> Iterator[Path]:
    """Yield an empty temporary file (mode 0600) that replaces `path` when the block ends.

    If the block raises, the temporary file is removed and `path` is unchanged. For `sync`, see
    `replace_atomically`.
    """
    scratch = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # mkstemp creates files with mode 0600.
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=_BEFORE, suffix=_BEHIND)
        os.close(handle)
        scratch = Path(name)
        yield scratch
        if sync:
            fsync(scratch)
        os.replace(scratch, path)
        if sync:
            # The folder stores the new name: without this, a power cut could undo the rename.
            fsync(path.parent)
    except OSError as error:
        raise make_unwritable_error(path, error) from error
    finally:
        if scratch is not None:
            with suppress(OSError):
                scratch.unlink(missing_ok=True)


@contextmanager
def create_atomically(path: Path) -> Iterator[Path]:
    """Yield a temporary path, and move the file or folder created there to `path` after the block.

    If the block raises, the file or folder is removed. Use this function for files that libraries
    write. Only the owner can read the result. The caller must hold a lock on `path`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with open_scratch_folder(path.parent, path.name) as scratch:
        yield scratch / path.name
        os.replace(scratch / path.name, path)


def replace_symlink(link: Path, target: str) -> None:
    """Create a symbolic link to `target`, or replace an existing link in one step."""
    scratch = link.with_name(f".{link.name}-{os.getpid()}")
    scratch.symlink_to(target)  # symlink_to replaces nothing; a rename does
    os.replace(scratch, link)


def append_durably(path: Path, text: str) -> int:
    """Append text to a file and sync it to disk. A new file gets mode 0600.

    Return the byte offset of the text in the file. If writing fails, remove the part already
    written and raise AuditError.
    """
    begin = None
    try:
        new = not path.exists()
        with open(path, "ab", opener=partial(os.open, mode=0o600)) as file:
            begin = file.tell()
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())
        if new:
            # The folder stores the name: without this, a power cut could remove the file.
            fsync(path.parent)
    except OSError as error:
        if begin is not None:
            with suppress(OSError):
                os.truncate(path, begin)
        raise make_unwritable_error(path, error) from error
    return begin


def truncate(path: Path, size: int) -> None:
    """Cut a file to `size` bytes. Raise AuditError if the file cannot be written."""
    try:
        if path.stat().st_size > size:
            os.truncate(path, size)
            fsync(path)
    except OSError as error:
        raise make_unwritable_error(path, error) from error


def fsync(path: Path) -> None:
    """Wait until a file's content, or a folder's list of names, is on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def fsync_tree(folder: Path) -> None:
    """Wait until all that a library wrote to a folder is on disk. Raise AuditError on failure."""
    try:
        for path in (*folder.rglob("*"), folder):
            fsync(path)
    except OSError as error:
        raise make_unwritable_error(folder, error) from error


def make_unwritable_error(path: Path, error: OSError) -> AuditError:
    return AuditError(f"{path}: cannot be written: {error.strerror or error}")


def is_scratch_file(path: Path) -> bool:
    """Test whether a file is an unfinished file left by a killed process."""
    return path.name.startswith(_BEFORE) and path.name.endswith(_BEHIND)


def remove_scratch_files(folder: Path) -> None:
    """Remove the unfinished files that killed processes left in a folder.

    The caller must hold the folder's lock, because other processes may be writing there.
    """
    for path in folder.iterdir():
        if is_scratch_file(path):
            path.unlink(missing_ok=True)


def find_cache_folder() -> Path:
    """Return the folder named by AUDIT_CACHE, or else the platform's cache folder.

    The platform's cache folder is in XDG_CACHE_HOME or ~/.cache. Only its owner can read the
    folder, because it contains training text.
    """
    folder = Path(os.environ.get("AUDIT_CACHE") or user_cache_path("audit", appauthor=False))
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise AuditError(
            f"cannot create the cache folder {str(folder)!r}: {error.strerror}; set AUDIT_CACHE"
        ) from error
    return folder


# --- temporary space ---


@contextmanager
def open_scratch_folder(parent: Path, name: str) -> Iterator[Path]:
    """Yield a folder that only its owner can read, and remove it after the block.

    Also remove folders with this name that killed processes left. The folder is locked during the
    block; the system releases the lock when the process ends. All files made in the block are
    readable only by the owner (folders 0700, files 0600), even if a library makes them.
    """
    prefix = f".{name}.audit-scratch-"
    for leftover in parent.glob(f"{glob.escape(prefix)}*") if fcntl else ():
        # BlockingIOError means that the folder's process is running.
        with suppress(OSError), _folder_flock_context(leftover):
            shutil.rmtree(leftover)
    # The umask belongs to the process: meanwhile, files of other threads are private, too.
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    umask_before = os.umask(0o077)
    try:
        with _folder_flock_context(folder):
            yield folder
    finally:
        os.umask(umask_before)
        shutil.rmtree(folder, ignore_errors=True)


class UnnamedFile:
    """Temporary file without a name, created in TMPDIR on first use and deleted when closed.

    `add` raises AuditError if the disk is full.
    """

    def __init__(self) -> None:
        self._file: IO[bytes] | None = None
        self._end = 0

    def add(self, data: bytes) -> tuple[int, int]:
        """Append the data and return its offset and length in bytes, which `read` takes."""
        begin = self._end
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(prefix=_BEFORE)  # noqa: SIM115 (it stays open)
            self._file.seek(begin)
            self._file.write(data)
            self._file.flush()
        except OSError as error:
            raise make_unwritable_error(Path(tempfile.gettempdir()), error) from error
        self._end += len(data)
        return begin, len(data)

    def read(self, begin: int, size: int) -> bytes:
        assert self._file is not None  # after an `add`
        self._file.seek(begin)
        return self._file.read(size)

    def close(self) -> None:
        if self._file is not None:
            with suppress(OSError):  # unwritten data is no longer needed
                self._file.close()


@contextmanager
def _folder_flock_context(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder during the block. Do nothing on systems without file locks.

    Raise BlockingIOError if another process holds the lock.
    """
    if fcntl is None:
        yield
        return
    # Closing releases the lock, as does the end of the process; child programs do not inherit it.
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(handle)
