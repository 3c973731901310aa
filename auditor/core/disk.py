"""Files and folders that are there whole or not at all, for their owner only: what a run keeps
tells what leaks.

One way to write for all of ours, and space that does not stay. Knows paths and bytes; nothing of
what they say.
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
except (
    ImportError
):  # Windows, where nothing tells whether the process that made a folder is still there
    fcntl = None  # type: ignore[assignment]

_BEFORE, _BEHIND = ".audit-", ".tmp"  # names of files that are not there yet


def replace_atomically(path: Path, content: str | bytes, *, sync: bool = False) -> None:
    """Puts the content at `path` in one step, 0600; its folder is made where it is missing.

    sync: outlasts a power cut once this returns, for what a promise depends on. Raises AuditError
    where it cannot be written; what was there before is then still there.
    """
    with atomic_replacement_file(path, sync=sync) as scratch:
        scratch.write_bytes(content.encode() if isinstance(content, str) else content)


@contextmanager
def atomic_replacement_file(path: Path, *, sync: bool = False) -> Iterator[Path]:
    """An empty file beside `path`, 0600, that takes its place when the block ends and goes away
    when it raises."""
    scratch = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # mkstemp's are 0600
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=_BEFORE, suffix=_BEHIND)
        os.close(handle)
        scratch = Path(name)
        yield scratch
        if sync:
            fsync(scratch)
        os.replace(scratch, path)
        if sync:
            fsync(path.parent)  # the new name is the folder's: a power cut could take it back
    except OSError as error:
        raise unwritable_path_error(path, error) from error
    finally:
        if scratch is not None:
            with suppress(OSError):
                scratch.unlink(missing_ok=True)


@contextmanager
def create_atomically(path: Path) -> Iterator[Path]:
    """A free path for a file or folder that is moved to `path` when the block ends, and removed
    when it fails.

    For what a library writes: all of it is for its owner only. Whoever makes one holds a lock on
    `path`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with scratch_folder(path.parent, path.name) as scratch:
        yield scratch / path.name
        os.replace(scratch / path.name, path)


def replace_symlink(link: Path, target: str) -> None:
    """A symbolic link to the target, put in the place of another in one step."""
    scratch = link.with_name(f".{link.name}-{os.getpid()}")
    scratch.symlink_to(target)  # which replaces nothing; a rename does
    os.replace(scratch, link)


def append_durably(path: Path, text: str) -> int:
    """Adds to a file, 0600 where it is new; on disk when this returns. Returns where in the file
    the text begins.

    Raises AuditError where it cannot be; what part of the text was written is then taken back.
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
            # which holds the name: without it a power cut could take the file away
            fsync(path.parent)
    except OSError as error:
        if begin is not None:
            with suppress(OSError):
                os.truncate(path, begin)
        raise unwritable_path_error(path, error) from error
    return begin


def truncate(path: Path, size: int) -> None:
    """Takes away what a file holds beyond so many bytes. Raises AuditError where it cannot be."""
    try:
        if path.stat().st_size > size:
            os.truncate(path, size)
            fsync(path)
    except OSError as error:
        raise unwritable_path_error(path, error) from error


def fsync(path: Path) -> None:
    """Waits until the file, or the names in the folder, are on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def fsync_tree(folder: Path) -> None:
    """`fsync` for all there is in the folder: what others wrote there. Raises AuditError where it
    cannot be."""
    try:
        for path in (*folder.rglob("*"), folder):
            fsync(path)
    except OSError as error:
        raise unwritable_path_error(folder, error) from error


def unwritable_path_error(path: Path, error: OSError) -> AuditError:
    return AuditError(f"{path}: cannot be written: {error.strerror or error}")


def is_scratch_file(path: Path) -> bool:
    """Whether a process that was killed left it: a file that was never put in its place."""
    return path.name.startswith(_BEFORE) and path.name.endswith(_BEHIND)


def remove_scratch_files(folder: Path) -> None:
    """Takes away what killed processes left. Only for who holds the folder's lock: others may be
    writing."""
    for path in folder.iterdir():
        if is_scratch_file(path):
            path.unlink(missing_ok=True)


def cache_folder() -> Path:
    """AUDIT_CACHE, or where the platform keeps caches (XDG_CACHE_HOME, ~/.cache); readable by its
    owner only.

    It holds training text.
    """
    folder = Path(os.environ.get("AUDIT_CACHE") or user_cache_path("audit", appauthor=False))
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise AuditError(
            f"cannot create the cache folder {str(folder)!r}: {error.strerror}; set AUDIT_CACHE"
        ) from error
    return folder


# --- space that does not stay ---


@contextmanager
def scratch_folder(parent: Path, name: str) -> Iterator[Path]:
    """A folder for its owner only, gone when the block is left. What a killed process left under
    this name goes too.

    It is locked while the block lasts; the system frees the lock when the process ends, however it
    ends. Whatever is created meanwhile, by a library too, is for its owner only: folders 0700,
    files 0600.
    """
    prefix = f".{name}.audit-scratch-"
    for left in parent.glob(f"{glob.escape(prefix)}*") if fcntl else ():
        with suppress(OSError), _folder_flock_context(left):  # BlockingIOError: its process lives
            shutil.rmtree(left)
    # the umask is the whole process's: what other threads create meanwhile is for the owner only,
    # too
    folder, umask_before = Path(tempfile.mkdtemp(prefix=prefix, dir=parent)), os.umask(0o077)
    try:
        with _folder_flock_context(folder):
            yield folder
    finally:
        os.umask(umask_before)
        shutil.rmtree(folder, ignore_errors=True)


class UnnamedFile:
    """A file that nobody else can open, gone when it is closed or its process ends: where TMPDIR
    says, made when used.

    `add` raises AuditError where there is no room.
    """

    def __init__(self) -> None:
        self._file: IO[bytes] | None = None
        self._end = 0

    def add(self, data: bytes) -> tuple[int, int]:
        """Appends the data; returns (begin, size), as `read` takes them."""
        begin = self._end
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(prefix=_BEFORE)  # noqa: SIM115 (it stays open)
            self._file.seek(begin)
            self._file.write(data)
            self._file.flush()
        except OSError as error:
            raise unwritable_path_error(Path(tempfile.gettempdir()), error) from error
        self._end += len(data)
        return begin, len(data)

    def read(self, begin: int, size: int) -> bytes:
        assert self._file is not None  # something was added
        self._file.seek(begin)
        return self._file.read(size)

    def close(self) -> None:
        if self._file is not None:
            with suppress(OSError):  # what could not be written is not missed
                self._file.close()


@contextmanager
def _folder_flock_context(folder: Path) -> Iterator[None]:
    """Raises BlockingIOError where another process holds it. Without locks of the system, nothing
    is held."""
    if fcntl is None:
        yield
        return
    # closing it lets go of the lock, as does the end of the process; programs that are started do
    # not inherit it
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(handle)
