"""Open tables whose file is compressed, such as `notes.jsonl.gz`; the name's ending says how."""

from __future__ import annotations

import bz2
import gzip
import lzma
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from auditor.core.errors import AuditError


def _open_zstd(path: Path) -> BinaryIO:
    import pyarrow

    stream: Any = pyarrow.CompressedInputStream(pyarrow.OSFile(str(path)), "zstd")
    return stream


_OPENERS: dict[str, Callable[[Path], Any]] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
    ".zst": _open_zstd,
}
COMPRESSED = tuple(_OPENERS)
_TEXTS = (".jsonl", ".json", ".csv", ".tsv")


def find_table_ending(path: Path) -> str:
    """Return the ending of a table's name in small letters: `.jsonl`, also of `notes.jsonl.gz`."""
    endings = [ending.lower() for ending in path.suffixes[-2:]]
    if len(endings) == 2 and endings[0] in _TEXTS and endings[1] in _OPENERS:
        return endings[0]
    return path.suffix.lower()


def open_table_file(path: Path) -> BinaryIO:
    """Open a file for reading bytes, decompressed if its name ends as a compressed file does."""
    opener = _OPENERS.get(path.suffix.lower())
    if opener is None:
        return path.open("rb")
    stream: BinaryIO = opener(path)
    return stream


def read_table_bytes(where: str, path: Path, size: int = -1) -> bytes:
    """Return the first `size` bytes of a file (-1: all), decompressed.

    where: how error messages start. Raise AuditError if the compressed file is broken.
    """
    if path.suffix.lower() not in _OPENERS:
        with path.open("rb") as file:
            return file.read(size)
    try:
        with open_table_file(path) as file:
            return file.read() if size < 0 else file.read(size)
    except (EOFError, OSError, lzma.LZMAError, zlib.error):
        raise AuditError(
            f"{where}: not a whole {path.suffix} file: it is broken or breaks off"
        ) from None
