"""Undo ordinary changes of texts by pipelines that store them: markup, escapes, compression.

Two texts with equal letters and digits count as the same text.
"""

from __future__ import annotations

import base64
import bz2
import html
import io
import lzma
import re
import string
import unicodedata
import zlib
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from auditor.core.arrays import Ints

_SURROGATES = "surrogatepass"
OVERLAP = 2**16  # bytes that two blocks in a row share: no page of SQLite is longer
_AT_ONCE = 2**22  # decompressed bytes to search
_STEP = 256  # compressed bytes to read at once, as what follows may be of another page
_LAST = 16  # bytes of a stream to read at once, as the last ones may be lost
_RUN = 64  # least characters of a text in base64 or in hexadecimal
_BASE64 = re.compile(rb"[\w+/-]{64,}(?:(?:\\[rn]|\s)+[\w+/-]+)*")
_DIGITS = string.digits.encode()
_NUMBERS = 47  # least characters of 16 numbers of two digits
_NUMBER = re.compile(rb"-?\d+")
_KEY = re.compile(rb"['\"]\d+\\*['\"]\s*:")
_OF_NUMBERS = _DIGITS + b"-,:'\"\\rn \r\n\t"
_IS_NUMBERS = bytes.maketrans(_OF_NUMBERS + b"\1", b"\1" * len(_OF_NUMBERS) + b"\0")
_MARKED_RUN = re.compile(b"\1+")
# Numbers of bytes, with or without a sign.
_BYTES = {str(number).encode(): bytes([number % 256]) for number in range(-128, 256)}
# Each byte follows the mark of its type: pickle's K, UBJSON's i and U.
_TYPED = re.compile(rb"[KUi].[KUi].[KUi].(?:[KUi].){13,}", re.DOTALL)
_LINE_BREAKS = re.compile(rb"\\[rn]|\s")
_HEXADECIMAL = re.compile(rb"[0-9a-fA-F]{64,}")
_ALPHABET = (string.ascii_letters + string.digits).encode()
_IS_BASE64 = bytes.maketrans(_ALPHABET + b"+/_-\1", b"\1" * 66 + b"\0")
_IS_LEVEL = np.isin(np.arange(256), list(b"\x01\x5e\x9c\xda"))  # the second byte of zlib
_STREAMS: tuple[tuple[str, re.Pattern[bytes], Callable[[], Any]], ...] = (
    ("gzip", re.compile(rb"\x1f\x8b\x08"), lambda: zlib.decompressobj(zlib.MAX_WBITS | 16)),
    ("bzip2", re.compile(rb"BZh[1-9]1AY&SY"), bz2.BZ2Decompressor),
    ("xz", re.compile(rb"\xfd7zXZ\0"), lzma.LZMADecompressor),
)
_ZSTD = re.compile(rb"\x28\xb5\x2f\xfd")

# --- letters and digits ---


def _fold_letter(letter: str) -> str:
    """Return a letter in lower case without its accents."""
    parts = unicodedata.normalize("NFKD", letter.casefold())
    return "".join(part for part in parts if not unicodedata.combining(part))


def _make_pair_table() -> Ints:
    """Return the replacement of each pair of bytes of UTF-8, (65536,); 0 removes a symbol."""
    table = np.arange(2**16)
    for letter in map(chr, range(0xC0, 0x800)):  # Latin to Arabic: two bytes
        folded = _fold_letter(letter).encode()
        if letter.isalpha() and len(folded) <= 2:
            table[int.from_bytes(letter.encode(), "big")] = int.from_bytes(folded, "big")
    table[0xC280:0xC2C0] = 0  # signs such as hard blanks
    table[0xCC80:0xCDB0] = 0  # accents that follow their letter
    table[_TRIPLES] = 0
    return table


# The first two bytes of punctuation, symbols, blanks of CJK, and byte order marks.
_TRIPLES = np.array([*range(0xE280, 0xE2B0), 0xE380, 0xEFB8, 0xEFBB])
_PAIRS = _make_pair_table()
_IS_CHANGED = np.arange(2**16) != _PAIRS
_IS_TRIPLE = np.isin(np.arange(2**16), _TRIPLES)


def _fold_letters(content: bytes) -> bytes:
    """Fold the letters of UTF-8 beyond ASCII, and replace symbols by zeros."""
    raw = np.frombuffer(bytearray(content + bytes(2)), np.uint8)
    leads = np.flatnonzero(raw[:-2] >= 0xC2)
    pairs = raw[leads].astype(np.int64) << 8 | raw[leads + 1]
    is_changed = _IS_CHANGED[pairs]
    leads = leads[is_changed]
    pairs = pairs[is_changed]
    raw[leads[_IS_TRIPLE[pairs]] + 2] = 0
    folded = _PAIRS[pairs]
    raw[leads] = folded >> 8
    raw[leads + 1] = folded & 0xFF
    return raw.tobytes()


def _decode_unicode_escapes(match: re.Match[bytes]) -> bytes:
    """Decode `\\uXXXX`, also with several backslashes, and pairs of surrogates."""
    digits = match[0].replace(b"\\", b"").decode().split("u")[1:]
    units = bytes.fromhex("".join(digits))
    return units.decode("utf-16-be", "replace").encode()


def _decode_entity(match: re.Match[bytes]) -> bytes:
    return html.unescape(f"&{match[1].decode()};").encode(errors=_SURROGATES)


def _decode_byte(match: re.Match[bytes]) -> bytes:
    return bytes.fromhex(match[1].decode())


def _drop_marks(match: re.Match[bytes]) -> bytes:
    return match[0][1::2]


# CBOR and MessagePack write a mark before each byte of a letter beyond ASCII in a list of bytes.
_MARKED = re.compile(rb"[\x18\xcc][\xc2-\xf4](?:[\x18\xcc][\x80-\xbf])+")
# The first byte of each escape or markup, its pattern, and its text.
_ESCAPES: tuple[tuple[bytes, re.Pattern[bytes], Callable[[re.Match[bytes]], bytes] | bytes], ...]
_ESCAPES = (
    (b"\\", re.compile(rb"\\\\*u[0-9a-fA-F]{4}(?:\\+u[0-9a-fA-F]{4})*"), _decode_unicode_escapes),
    (b"&", re.compile(rb"&(?:amp;)*(#\d{1,7}|#[xX][0-9a-fA-F]{1,6}|\w{1,8});"), _decode_entity),
    (b"%", re.compile(rb"%([0-9a-fA-F]{2})"), _decode_byte),
    (b"=", re.compile(rb"=([0-9a-fA-F]{2})"), _decode_byte),
    (b"<", re.compile(rb"</?[a-zA-Z!][^<>\x00-\x08]{0,200}>"), b""),
    (b"\\", re.compile(rb"\\\\*x([0-9a-fA-F]{2})"), _decode_byte),
    (b"\\", re.compile(rb"\\\\*[nrtbf]"), b""),
    (b"\x18", _MARKED, _drop_marks),
    (b"\xcc", _MARKED, _drop_marks),
)
_LOWER = bytes(range(256)).lower()
_OTHERS = bytes(range(128)).translate(None, _ALPHABET)


def extract_letters(content: bytes) -> bytes:
    """Return the letters and digits of a text in UTF-8, in lower case and without accents.

    Markup, escapes (HTML, JSON, Markdown, URL, quoted-printable), blanks and punctuation are
    removed. Bytes that are no ASCII and no Latin to Arabic letters stay.
    """
    for first, pattern, replacement in _ESCAPES:
        if first in content:
            content = pattern.sub(replacement, content)
    if not content.isascii():
        content = _fold_letters(content)
    return content.translate(_LOWER, _OTHERS)


def drop_digits(letters: bytes) -> bytes:
    """Return the letters only, as a pipeline may number lines. letters: by `extract_letters`."""
    return letters.translate(None, _DIGITS)


# --- parts in another encoding ---


def decode_parts(
    content: bytes, path: Path | None = None, first: int = 0, depth: int = 2
) -> Iterator[tuple[str, bytes, bool]]:
    """Yield (encoding, decoded bytes, is cut) of the parts in another encoding.

    The encodings are base64, hexadecimal, lists of numbers of bytes, zlib, gzip, bzip2, xz and
    zstd. A part is cut if its stream breaks off after more than `OVERLAP` bytes.

    path, first: the file with the content, and the offset of the content in the file, where a
        stream may go on after the content; depth: how many encodings are undone if one is within
        another.
    """
    with path.open("rb") if path else io.BytesIO(content) as source:
        decompressed = _decompress(content, source, first)
        by_zstd = _decompress_zstd(content, path, first)
        as_text = chain(_decode_base64(content), _decode_numbers(content))
        for name, part, is_cut in chain(decompressed, by_zstd, as_text):
            yield name, part, is_cut
            if depth > 1:
                for inner_name, inner, inner_is_cut in decode_parts(part, depth=depth - 1):
                    yield f"{inner_name} in {name}", inner, inner_is_cut


def _list_streams(content: bytes) -> Iterator[tuple[int, str, Any]]:
    """Yield (place, encoding, decompressor) for each place where a stream may start."""
    raw = np.frombuffer(content, np.uint8)
    starts = np.flatnonzero(raw[:-2] == ord("x"))
    is_type = raw[starts + 2] & 6 != 6  # there is no third type of blocks
    for start in starts[_IS_LEVEL[raw[starts + 1]] & is_type].tolist():
        yield start, "zlib", zlib.decompressobj()
    for name, pattern, make in _STREAMS:
        for match in pattern.finditer(content):
            yield match.start(), name, make()


def _decompress(content: bytes, source: BinaryIO, first: int) -> Iterator[tuple[str, bytes, bool]]:
    """Yield as `decode_parts` does. source: the file, or the content if it is no part of a file."""
    for start, name, stream in _list_streams(content):
        source.seek(first + start)
        part = bytearray()
        try:
            while not stream.eof and (block := source.read(_STEP)):
                part += stream.decompress(block)
                if len(part) >= _AT_ONCE:
                    yield name, bytes(part), False
                    del part[:-OVERLAP]
        except (zlib.error, lzma.LZMAError, OSError):
            pass  # other bytes, or the stream ends within a page
        if part:
            is_cut = not stream.eof and source.tell() - first - start > OVERLAP
            yield name, bytes(part), is_cut


def _decompress_zstd(
    content: bytes, path: Path | None, first: int
) -> Iterator[tuple[str, bytes, bool]]:
    """Yield as `decode_parts` does."""
    for match in _ZSTD.finditer(content):
        import pyarrow

        start = first + match.start()
        source = pyarrow.OSFile(str(path)) if path else pyarrow.BufferReader(content)
        source.seek(start)
        stream = pyarrow.CompressedInputStream(source, "zstd")
        part = bytearray()
        is_cut = False
        try:
            while block := stream.read(_LAST):
                part += block
                if len(part) >= _AT_ONCE:
                    yield "zstd", bytes(part), False
                    del part[:-OVERLAP]
        except OSError as error:
            is_next = "Unknown frame" in str(error)  # other bytes after the stream
            is_cut = not is_next and source.tell() - start > OVERLAP
        if part:
            yield "zstd", bytes(part), is_cut


def _decode_base64(content: bytes) -> Iterator[tuple[str, bytes, bool]]:
    marked = content.translate(_IS_BASE64)
    start = 0
    while (start := marked.find(b"\1" * _RUN, start)) >= 0:
        # A column in front of it may end in the same characters, so try each start.
        if digits := _HEXADECIMAL.match(content, start):
            for shift in range(2):
                n_digits = (len(digits[0]) - shift) // 2 * 2
                run = digits[0][shift : shift + n_digits]
                yield "hexadecimal", bytes.fromhex(run.decode()), False
            start = digits.end()
            continue
        match = _BASE64.match(content, start)
        assert match is not None
        start = match.end()
        run = _LINE_BREAKS.sub(b"", match[0]).translate(bytes.maketrans(b"-_", b"+/"))
        for shift in range(4):
            n_characters = (len(run) - shift) // 4 * 4
            yield "base64", base64.b64decode(run[shift : shift + n_characters]), False


def _decode_numbers(content: bytes) -> Iterator[tuple[str, bytes, bool]]:
    """Decode lists of byte values, as `decode_parts` yields parts; numbers of no byte become 0."""
    marked = content.translate(_IS_NUMBERS)
    start = 0
    while (start := marked.find(b"\1" * _NUMBERS, start)) >= 0:
        # A key is the position in the list, as JavaScript writes typed arrays.
        run = _MARKED_RUN.match(marked, start)
        assert run is not None
        numbers = _NUMBER.findall(_KEY.sub(b"", content[start : run.end()]))
        start = run.end()
        if len(numbers) >= 16:
            yield "numbers", b"".join(_BYTES.get(number, b"\0") for number in numbers), False
    for match in _TYPED.finditer(content):
        yield "numbers", match[0][1::2], False
