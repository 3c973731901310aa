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
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

from filelock import FileLock, Timeout

from auditor.core import disk
from auditor.core.errors import AuditError

_PIECES = "pieces"  # folder of what was trained apart, until its part takes it
_SECONDS, _SUMS = "seconds.json", "sha256.json"  # what building a part took; what it wrote
_BETWEEN = 1.0  # seconds from one look at another process, or one word to it, to the next

Progress = Callable[[str, int, int], None]  # (what, done, of how many)
T = TypeVar("T")


@dataclass(frozen=True)
class SeparatelyTrainable:
    """One model that can be trained apart from all others. there: whether it is trained already."""

    there: bool
    train: Callable[[], object]


@dataclass(frozen=True)
class LabParts:
    """The lab's parts below one folder.

    makes: whether what is missing is built; else that is refused. first: the part that all others
    are built on.
    foundations: how the names of the parts begin that others are built on. told: what the user must
    know. progress:
    of what is built here, or by another process that this one waits for.
    """

    folder: Path
    makes: bool
    first: str
    foundations: tuple[str, ...]
    told: Callable[[str], None]
    progress: Progress = lambda what, done, total: None
    seconds: dict[str, float] = field(default_factory=dict)  # what building each part took
    # parts, and when others were last told of them
    _under_way: list[tuple[Path, float]] = field(default_factory=list)

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
            # By no name: `with` takes the lock a second time and gives back one; the other goes
            # with the object.
            with self._acquire_part_lock(final):
                # Looked at again under the lock: another process may have built it meanwhile.
                if final.is_dir() and not _is_cached_part_intact(final):
                    self._remove_damaged_and_dependent(final)
                    self.told(
                        f"the lab's {name} in the cache was not as it was built: it was built anew"
                    )
                if not final.is_dir():
                    self._build_part_from_pieces(final, build)
        self.seconds[name] = _recorded_part_build_seconds(final)
        return load(final)

    def report_build_progress(self, what: str, done: int, total: int) -> None:
        """How far the part is that is under way: to whoever asked for it here, and to processes
        that wait for it."""
        self.progress(what, done, total)
        if self._under_way and time.monotonic() - self._under_way[-1][1] >= _BETWEEN:
            final, _ = self._under_way.pop()
            disk.replace_atomically(_part_progress_path(final), json.dumps([what, done, total]))
            self._under_way.append((final, time.monotonic()))

    def _acquire_part_lock(self, final: Path) -> FileLock:
        """The lock on a part, taken; while another process has it, how far that one is gets
        told."""
        lock = FileLock(self.folder / f"{final.name}.lock")
        while True:
            try:
                lock.acquire(timeout=_BETWEEN)
                return lock
            except Timeout:
                with suppress(OSError, ValueError):  # it has said nothing yet
                    self.progress(*json.loads(_part_progress_path(final).read_text()))

    def separately_trainable_model(
        self, part: str, make: Callable[[], object]
    ) -> SeparatelyTrainable:
        """A part that is one model."""
        return SeparatelyTrainable((self.folder / part).is_dir(), make)

    def separately_trainable_piece(
        self, part: str, index: int, build: Callable[..., None]
    ) -> SeparatelyTrainable:
        """One model of a part of several: trained into a folder of its own, which the part then
        takes as it is."""
        name = f"{_PIECES}/{part}-{index:03d}"
        there = (self.folder / part).is_dir() or _is_cached_part_intact(self.folder / name)
        return SeparatelyTrainable(
            there, lambda: self.load_or_build(name, partial(build, only=index), lambda path: None)
        )

    def _remove_damaged_and_dependent(self, damaged: Path) -> None:
        """A part, and what was built on it: built again, its weights may differ in their last
        bits."""
        # What begins with a dot is being written, by this process or another.
        others = [
            path for path in self.folder.glob("[!.]*") if path.is_dir() and path.name != self.first
        ]
        for path in {damaged, *(others if damaged.name.startswith(self.foundations) else ())}:
            shutil.rmtree(path)

    def _build_part_from_pieces(self, final: Path, build: Callable[[Path], None]) -> None:
        pieces = [
            one
            for one in (self.folder / _PIECES).glob(f"{final.name}-[0-9][0-9][0-9]")
            if _is_cached_part_intact(one)
        ]
        with disk.create_atomically(final) as made:
            made.mkdir()
            start = time.perf_counter()
            # Copied, and removed only when the part is there: a build killed half-way loses no
            # training.
            for piece in pieces:
                shutil.copytree(
                    piece, made, dirs_exist_ok=True, ignore=shutil.ignore_patterns(_SECONDS, _SUMS)
                )
            self._under_way.append((final, time.monotonic()))
            try:
                build(made)
            finally:
                self._under_way.pop()
                _part_progress_path(final).unlink(missing_ok=True)
            elsewhere = sum(_recorded_part_build_seconds(piece) for piece in pieces)
            (made / _SECONDS).write_text(json.dumps(time.perf_counter() - start + elsewhere))
            (made / _SUMS).write_text(json.dumps(_part_file_digests(made)))
        for piece in pieces:
            shutil.rmtree(piece)


def _part_progress_path(final: Path) -> Path:
    return final.with_name(f"{final.name}.progress")


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
