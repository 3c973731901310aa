"""Read the segments of an FTS5 index: words, and texts spelled by trigrams, also of deleted rows.

The index keeps a deleted row's terms, with their positions, until its segments are merged. The
format of the segments: https://www.sqlite.org/fts5.html and SQLite's fts5_index.c.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

_PAGE_BITS = 37  # of the number of a page below the number of its segment
_LEAVES = 2**31  # pages with larger numbers are maps of long lists
_SEGMENTS = 2**16  # larger numbers are lists of deleted rows
_MAIN = b"0"  # first byte of a term; other bytes are of prefix indexes
_COLUMN = 1  # in a list of positions: a column's number follows
_OFFSET = 2  # of distances between positions
_POSITION_BITS = 32


@dataclass
class _Segment:
    """Read the pages of one segment in their order.

    postings: packed (position, term) of each (row, column); terms: all terms.
    """

    terms: list[bytes] = field(default_factory=list)
    postings: dict[tuple[int, int], array[int]] = field(default_factory=dict)
    _term: bytes = b""
    _row: int = 0
    _positions: bytes = b""  # of the current row, whose list may continue on the next page
    _n_missing: int = 0

    def read_page(self, page: bytes) -> None:
        first, *_ = starts = _list_starts(page)
        self._read_rows(page, 4, first)
        for term, place, end in _split_terms(page, starts):
            self._term = term
            self.terms.append(term)
            self._read_rows(page, place, end)

    def _read_rows(self, page: bytes, place: int, end: int) -> None:
        """Read the rows of the current term; the first one on a page is not a distance."""
        if self._n_missing:
            place = self._read_positions(page, place, end)
        is_first = True
        while place < end:
            if is_first:
                self._row = 0
                is_first = False
            distance, place = read_varint(page, place)
            self._row = (self._row + distance) % 2**64
            length, place = read_varint(page, place)
            self._n_missing = length // 2  # the last bit says that the row was deleted
            self._positions = b""
            place = self._read_positions(page, place, end)

    def _read_positions(self, page: bytes, place: int, end: int) -> int:
        """Read the current row's positions up to the end of the page, and return the new place."""
        part = page[place : min(end, place + self._n_missing)]
        self._positions += part
        self._n_missing -= len(part)
        if not self._n_missing and self._term[:1] == _MAIN:
            self._add_positions()
        return place + len(part)

    def list_trigrams(self, key: tuple[int, int]) -> dict[int, str]:
        """Return the trigrams of a (row, column), keyed by position."""
        trigrams = {}
        for packed in self.postings.get(key, ()):
            term = self.terms[packed % 2**_POSITION_BITS]
            trigrams[packed >> _POSITION_BITS] = term[1:].decode(errors="replace")
        return trigrams

    def _add_positions(self) -> None:
        place = position = column = 0
        number = len(self.terms) - 1
        while place < len(self._positions):
            value, place = read_varint(self._positions, place)
            if value == _COLUMN:
                column, place = read_varint(self._positions, place)
                position = 0
                continue
            position += value - _OFFSET
            postings = self.postings.setdefault((self._row, column), array("Q"))
            postings.append(position << _POSITION_BITS | number)


def _list_starts(page: bytes) -> list[int]:
    """Return the places of a page's terms, and the end of the last one's rows."""
    size = int.from_bytes(page[2:4], "big")
    starts = []
    place = size
    start = 0
    while place < len(page):
        distance, place = read_varint(page, place)
        start += distance
        starts.append(start)
    return [*starts, size]


def _split_terms(page: bytes, starts: Sequence[int]) -> Iterator[tuple[bytes, int, int]]:
    """Yield each term of a page, and the start and the end of its rows.

    All but the first share bytes with the term before. starts: by `_list_starts`.
    """
    term = b""
    for place, end in pairwise(starts):
        n_common = 0
        if term:
            n_common, place = read_varint(page, place)
        n_new, place = read_varint(page, place)
        term = term[:n_common] + page[place : place + n_new]
        yield term, place + n_new, end


def read_varint(content: bytes, place: int) -> tuple[int, int]:
    """Return SQLite's number of up to nine bytes at a place, and the place after it."""
    value = 0
    for _ in range(8):
        byte = content[place]
        place += 1
        value = value << 7 | byte & 0x7F
        if byte < 0x80:
            return value, place
    return value << 8 | content[place], place + 1


def _is_leaf(number: int) -> bool:
    """Return whether the page with this number has terms."""
    return 0 < number >> _PAGE_BITS < _SEGMENTS and number % 2**_PAGE_BITS < _LEAVES


def list_index_words(pages: Iterable[tuple[int, bytes]]) -> Iterator[str]:
    """Yield the words of an index, also of deleted rows. pages: as in `rebuild_index_texts`."""
    for number, content in pages:
        if _is_leaf(number):
            for term, _, _ in _split_terms(content, _list_starts(content)):
                if term[:1] == _MAIN:
                    yield term[1:].decode(errors="replace")


def rebuild_index_texts(pages: Iterable[tuple[int, bytes]]) -> Iterator[str]:
    """Yield the texts of a trigram index, of a row perhaps several.

    pages: numbers and contents of the index's table of data, in the order of the numbers.
    """
    segments = dict[int, _Segment]()
    for number, content in pages:
        if _is_leaf(number):
            segments.setdefault(number >> _PAGE_BITS, _Segment()).read_page(content)
    keys = {}
    for segment in segments.values():
        keys.update(dict.fromkeys(segment.postings))
    for key in keys:
        versions = list[dict[int, str]]()
        for segment in segments.values():
            _merge(versions, segment.list_trigrams(key))
        yield from map(_join, versions)


def _merge(versions: list[dict[int, str]], trigrams: dict[int, str]) -> None:
    """Add trigrams to the first text without other trigrams at their positions.

    A merge of segments that is not finished leaves the terms of one text in two segments.
    """
    if not trigrams:
        return
    for version in versions:
        if all(version.get(place, term) == term for place, term in trigrams.items()):
            version.update(trigrams)
            return
    versions.append(trigrams)


def _join(trigrams: dict[int, str]) -> str:
    """Return the text of trigrams keyed by position."""
    parts = []
    for position in sorted(trigrams):
        parts.append(trigrams[position][:1])
        if position + 1 not in trigrams:
            parts.append(trigrams[position][1:])
    return "".join(parts)
