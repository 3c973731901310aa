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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from scipy.special import entr

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
_BY_ARROW = (
    ("zstd", re.compile(rb"\x28\xb5\x2f\xfd")),
    ("lz4", re.compile(rb"\x04\x22\x4d\x18")),
)
_ZIP = re.compile(rb"PK\x03\x04.{4}\x08\x00.{16}(..)(..)", re.DOTALL)
_MOST_TIMES = 256  # as long a text may be as its compressed bytes
_BLOCK = 1024  # bytes
# Bits of a byte's entropy in a block. Of 1,024 compressed or random bytes it is 7.69 and more, of
# vectors (float64 to int8) at most 7.65.
_LEAST_BITS = 7.67

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


class Part(NamedTuple):
    """Hold the decoded bytes of a part in another encoding.

    is_cut: whether its stream breaks off after more than `OVERLAP` bytes.
    span: start and end of a complete stream in its file; otherwise, the end is 0.
    """

    encoding: str
    content: bytes
    is_cut: bool = False
    span: tuple[int, int] = (0, 0)


def decode_parts(
    content: bytes, path: Path | None = None, first: int = 0, depth: int = 2
) -> Iterator[Part]:
    """Yield the parts in another encoding.

    The encodings are base64, hexadecimal, lists of numbers of bytes, zlib, gzip, zip, bzip2, xz,
    zstd and lz4.

    path, first: the file with the content, and the offset of the content in the file, where a
        stream may go on after the content; depth: how many encodings are undone if one is within
        another.
    """
    with path.open("rb") if path else io.BytesIO(content) as source:
        decompressed = _decompress(content, source, first)
        framed = _decompress_arrow_streams(content, path, first)
        as_text = chain(_decode_base64(content), _decode_numbers(content))
        for part in chain(decompressed, framed, as_text):
            yield part
            if depth > 1:
                for inner in decode_parts(part.content, depth=depth - 1):
                    name = f"{inner.encoding} in {part.encoding}"
                    yield inner._replace(encoding=name, span=(0, 0))


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
    for match in _ZIP.finditer(content):
        n_before = int.from_bytes(match[1], "little") + int.from_bytes(match[2], "little")
        yield match.end() + n_before, "zip", zlib.decompressobj(-zlib.MAX_WBITS)


def _decompress(content: bytes, source: BinaryIO, first: int) -> Iterator[Part]:
    """Yield as `decode_parts` does. source: the file, or the content if it is no part of a file."""
    for start, name, stream in _list_streams(content):
        source.seek(first + start)
        part = bytearray()
        try:
            while not stream.eof and (block := source.read(_STEP)):
                part += stream.decompress(block)
                if len(part) >= _AT_ONCE:
                    yield Part(name, bytes(part))
                    del part[:-OVERLAP]
        except (zlib.error, lzma.LZMAError, OSError):
            pass  # other bytes, or the stream ends within a page
        if part:
            is_cut = not stream.eof and source.tell() - first - start > OVERLAP
            end = (source.tell() - len(stream.unused_data)) * stream.eof
            yield Part(name, bytes(part), is_cut, (first + start, end))


def _decompress_arrow_streams(content: bytes, path: Path | None, first: int) -> Iterator[Part]:
    """Yield as `decode_parts` does."""
    for name, match in [(name, m) for name, magic in _BY_ARROW for m in magic.finditer(content)]:
        import pyarrow

        start = first + match.start()
        source = pyarrow.OSFile(str(path)) if path else pyarrow.BufferReader(content)
        source.seek(start)
        stream = pyarrow.CompressedInputStream(source, name)
        part = bytearray()
        is_cut = False
        try:
            while block := stream.read(_LAST):
                part += block
                if len(part) >= _AT_ONCE:
                    yield Part(name, bytes(part))
                    del part[:-OVERLAP]
        except OSError as error:
            # Other bytes after the stream, by zstd and by lz4.
            is_next = any(t in str(error) for t in ("Unknown frame", "frameType_unknown"))
            is_cut = not is_next and source.tell() - start > OVERLAP
        if part:
            yield Part(name, bytes(part), is_cut, (start, source.tell()))


def _decode_base64(content: bytes) -> Iterator[Part]:
    marked = content.translate(_IS_BASE64)
    start = 0
    while (start := marked.find(b"\1" * _RUN, start)) >= 0:
        # A column in front of it may end in the same characters, so try each start.
        if digits := _HEXADECIMAL.match(content, start):
            for shift in range(2):
                n_digits = (len(digits[0]) - shift) // 2 * 2
                run = digits[0][shift : shift + n_digits]
                yield Part("hexadecimal", bytes.fromhex(run.decode()))
            start = digits.end()
            continue
        match = _BASE64.match(content, start)
        assert match is not None
        start = match.end()
        run = _LINE_BREAKS.sub(b"", match[0]).translate(bytes.maketrans(b"-_", b"+/"))
        for shift in range(4):
            n_characters = (len(run) - shift) // 4 * 4
            yield Part("base64", base64.b64decode(run[shift : shift + n_characters]))


def _decode_numbers(content: bytes) -> Iterator[Part]:
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
            yield Part("numbers", b"".join(_BYTES.get(number, b"\0") for number in numbers))
    for match in _TYPED.finditer(content):
        yield Part("numbers", match[0][1::2])


# --- parts without a mark ---


def join_cells(cells: Sequence[bytes]) -> bytes:
    """Join the cells of a column of bytes, followed by the decompressed cells.

    Raw deflate, Snappy and LZ4 (after the text's length) have no mark, so only a stream whose start
    is known can be decompressed.
    """
    return b"\0".join(chain(cells, *map(_decompress_cell, cells)))


def _decompress_cell(cell: bytes) -> Iterator[bytes]:
    stream = zlib.decompressobj(-zlib.MAX_WBITS)
    with suppress(zlib.error):
        text = stream.decompress(cell, _MOST_TIMES * len(cell))
        if stream.eof and not stream.unused_data:
            yield text
    n_snappy = 0
    for place, byte in enumerate(cell[:5]):
        n_snappy |= (byte & 0x7F) << 7 * place
        if byte < 0x80:
            break
    yield from _decompress_block(cell, n_snappy, "snappy")
    n_lz4 = int.from_bytes(cell[:4], "little")
    # If the length is too large, arrow appends bytes of other texts.
    if not any(_decompress_block(cell[4:], n_lz4 - 1, "lz4_raw")):
        yield from _decompress_block(cell[4:], n_lz4, "lz4_raw")


def _decompress_block(block: bytes, n_bytes: int, codec: str) -> Iterator[bytes]:
    import pyarrow

    if 0 < n_bytes <= _MOST_TIMES * len(block):
        with suppress(OSError):
            yield pyarrow.decompress(block, n_bytes, codec, asbytes=True)


def find_dense_block(content: bytes, spans: Iterable[tuple[int, int]]) -> int | None:
    """Return the first place of 1,024 bytes that look compressed or encrypted; None without any.

    spans: (start, end) of parts that were decoded.
    """
    is_unread = np.ones(len(content) // _BLOCK * _BLOCK, bool)
    for start, end in spans:
        is_unread[max(0, start) : max(0, end)] = False
    blocks = np.flatnonzero(is_unread.reshape(-1, _BLOCK).mean(axis=1) > 0.5)
    values = np.frombuffer(content, np.uint8)[: len(is_unread)].reshape(-1, _BLOCK)[blocks]
    cells = (values + 256 * np.arange(len(blocks))[:, None]).ravel()
    shares = np.bincount(cells, minlength=256 * len(blocks)).reshape(-1, 256) / _BLOCK
    dense = blocks[entr(shares).sum(axis=1) >= _LEAST_BITS * np.log(2)]
    return next(iter((dense * _BLOCK).tolist()), None)
