"""Files that are there whole or not at all, readable by their owner only: what a run keeps tells what a model leaks.

One way to write for every file of ours. Knows paths and bytes; nothing of what they say.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from auditor.core.errors import AuditError

_BEFORE, _BEHIND = ".audit-", ".tmp"  # names of files that are not there yet
_OLDER = ".json.tmp"  # how older versions named them


def replace(path: Path, content: str | bytes, *, sync: bool = False) -> None:
    """Puts the content at `path` in one step, 0600; its folder is made where it is missing.

    sync: outlasts a power cut once this returns, for what a promise depends on. Raises AuditError where it cannot be
    written; what was there before is then still there.
    """
    with replacing(path, sync=sync) as scratch:
        scratch.write_bytes(content.encode() if isinstance(content, str) else content)


@contextmanager
def replacing(path: Path, *, sync: bool = False) -> Iterator[Path]:
    """An empty file beside `path`, 0600, that takes its place when the block ends and goes away when it raises."""
    scratch = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=_BEFORE, suffix=_BEHIND)  # mkstemp's are 0600
        os.close(handle)
        scratch = Path(name)
        yield scratch
        if sync:
            synced(scratch)
        os.replace(scratch, path)
        if sync:
            synced(path.parent)
    except OSError as error:
        raise unwritable(path, error) from error
    finally:
        if scratch is not None:
            with suppress(OSError):
                scratch.unlink(missing_ok=True)


def append(path: Path, text: str) -> None:
    """Adds to a file, 0600 where it is new; on disk when this returns. Raises AuditError where it cannot be."""
    try:
        new = not path.exists()
        with open(path, "a", encoding="utf-8", newline="\n", opener=_private) as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        if new:
            synced(path.parent)
    except OSError as error:
        raise unwritable(path, error) from error


def synced(path: Path) -> None:
    """Waits until the file, or the names in the folder, are on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_all(folder: Path) -> None:
    """`synced` for all there is in the folder: what others wrote there. Raises AuditError where it cannot be."""
    try:
        for path in (*folder.rglob("*"), folder):
            synced(path)
    except OSError as error:
        raise unwritable(folder, error) from error


def unwritable(path: Path, error: OSError) -> AuditError:
    return AuditError(f"{path}: cannot be written: {error.strerror or error}")


def is_scratch(path: Path) -> bool:
    """Whether a process that was killed left it: a file that was never put in its place."""
    return (path.name.startswith(_BEFORE) and path.name.endswith(_BEHIND)) or path.name.endswith(_OLDER)


def clear_scratch(folder: Path) -> None:
    """Takes away what killed processes left. Only for who holds the folder's lock: others may be writing."""
    for path in folder.iterdir():
        if is_scratch(path):
            path.unlink(missing_ok=True)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
