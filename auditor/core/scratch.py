"""Space on a disk that does not stay, and files for nobody but their owner. Knows folders; not what is in them."""

from __future__ import annotations

import fcntl
import glob
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def owner_only() -> Iterator[None]:
    """Whatever is created meanwhile, by a library too, is for its owner only: folders 0700, files 0600."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


@contextmanager
def scratch_folder(parent: Path, name: str) -> Iterator[Path]:
    """A folder for its owner only, gone when the block is left. What a killed process left under this name goes too.

    Whoever uses one holds a lock on it, which the system takes back when the process ends, however it ends.
    """
    prefix = f".{name}.audit-scratch-"
    for left in parent.glob(f"{glob.escape(prefix)}*"):
        with suppress(OSError), _locked(left):
            shutil.rmtree(left)
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    try:
        with _locked(folder), owner_only():
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Raises BlockingIOError where another process holds it."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(handle)
