"""Find records in bytes by their unique windows: 32-byte pieces of a text or a vector.

A store splits records at page and block boundaries, so a search for entire records would fail.
"""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from auditor.core.arrays import Bools, Floats, Ints
from auditor.erasure.encodings import drop_digits, extract_letters

TEXT = "text"
WORDS = "words"
VECTORS = "vectors"
LETTERS = "letters and digits"
SIZE = 32  # bytes of a window; a text below 32 bytes uses windows of 16
_WORD_SIZE = 8  # bytes from the end of a word, shorter than any other window
_SIZES = (SIZE, 16, _WORD_SIZE)
_MOST = 8  # windows of each form of a record; with few records, more
_MOST_OF_TEXT = 64  # windows of a form of a text, if there are few records
_MOST_IN_ALL = 100_000
_MOST_HITS = 50_000  # shared windows to find before they are discarded
_BLOCK = 4  # numbers in a part of a vector; kept vectors with a common part are found by it
_LEAST_BYTES = 7  # distinct values in a window of 32 bytes; empty pages have fewer
_BITS = 22  # hash table
# Odd factors, by which the first and the last word of a window are hashed.
_FIRST = np.uint64(0x9E3779B97F4A7C15)
_LAST = np.uint64(0xC2B2AE3D27D4EB4F)
_WORD = re.compile(r"\w{9,}")


@dataclass(frozen=True)
class Origin:
    """Describe the record from which a window was cut.

    record: index of the record; kind: kind of content; form: the encoding of the record.
    """

    record: int
    kind: str
    form: str


def write_text_forms(text: str) -> Mapping[str, bytes]:
    """Return a text in each encoding to search for, keyed by the encoding's name.

    The encodings are UTF-8, JSON, the letters and digits of the text, and its letters.
    """
    content = text.encode(errors="surrogatepass")
    forms = {
        LETTERS: extract_letters(content),
        "UTF-8": content,
        "JSON": json.dumps(text)[1:-1].encode(),
    }
    if not text.isascii():
        # A search of letters reads each byte of UTF-16 (and of Latin-1) as a letter.
        units = text.encode("utf-16-le", errors="surrogatepass")
        forms[f"{LETTERS} in UTF-16"] = extract_letters(units)
    forms["letters"] = drop_digits(forms[LETTERS])
    return _drop_equal_forms(forms)


def _drop_equal_forms(forms: dict[str, bytes]) -> Mapping[str, bytes]:
    """Keep only the first of several encodings with the same bytes."""
    names = {content: name for name, content in reversed(forms.items())}
    return {name: content for name, content in forms.items() if names[content] == name}


def write_vector_forms(values: Floats) -> Mapping[str, bytes]:
    """Return a vector (dimensions,) in each encoding that stores use, keyed by the encoding's name.

    Each encoding is written twice: unscaled, and scaled to length 1.
    """
    single = values.astype("<f4")
    length = np.sqrt((single * single).sum(dtype=np.float32))
    # Libraries normalise in two ways: they divide, or multiply by the reciprocal.
    units = {
        "float32 of length 1": single / length,
        "float32 of length 1, by reciprocal": single * (np.float32(1) / length),
    }
    scaled = units["float32 of length 1"] * 127
    forms = {
        "float32": single.tobytes(),
        **{name: unit.astype("<f4").tobytes() for name, unit in units.items()},
        "float16": single.astype("<f2").tobytes(),
        "float16 of length 1": units["float32 of length 1"].astype("<f2").tobytes(),
        "float64": values.astype("<f8").tobytes(),
        "float32 as float64": single.astype("<f8").tobytes(),
        "int8 of length 127": np.round(scaled).astype(np.int8).tobytes(),
        "int8 of length 127, cut": np.trunc(scaled).astype(np.int8).tobytes(),
        "int8": np.clip(np.round(single * 127), -128, 127).astype(np.int8).tobytes(),
    }
    for name, numbers in (("float64", values), ("float32", single)):
        listed = numbers.tolist()
        forms[f"{name}, decimals"] = json.dumps(listed).encode()[1:-1]
        forms[f"{name}, decimals without spaces"] = forms[f"{name}, decimals"].replace(b" ", b"")
        forms[f"{name}, pickled"] = pickle.dumps(listed, 4)[len(pickle.dumps([], 4)) :]
    return _drop_equal_forms(forms)


def _cut_windows(content: bytes, most: int = _MOST) -> Iterator[bytes]:
    """Yield at most `most` evenly spaced windows; none if the content is below 16 bytes."""
    size = SIZE if len(content) >= SIZE else 16
    if len(content) < size:
        return
    last = len(content) - size
    starts = sorted({*range(0, last + 1, size), last})
    places = np.linspace(0, len(starts) - 1, min(len(starts), most)).round().astype(int)
    for place in places.tolist():
        window = content[starts[place] : starts[place] + size]
        if len(set(window)) >= min(_LEAST_BYTES, size):
            yield window


def _cut_blocks(values: Floats) -> Iterator[bytes]:
    """Yield the parts of 4 numbers of a vector (dimensions,), in float32."""
    content = values.astype("<f4").tobytes()
    size = 4 * _BLOCK
    for start in range(0, len(content) - size + 1, size):
        yield content[start : start + size]


def _cut_words(text: str) -> Iterator[bytes]:
    """Yield the last 8 bytes of each long word.

    A word index may store only the end of a word, because neighbouring words share their start.
    """
    for word in _WORD.findall(text.casefold()):
        yield word.encode()[-_WORD_SIZE:]


def _hash_words(words: NDArray[np.uint64], factor: np.uint64) -> Ints:
    """Return a hash below 2**22 of each word of 8 bytes. factor: multiplier of the hash."""
    return (words * factor >> np.uint64(64 - _BITS)).view(np.int64)


def _join_words(words: NDArray[np.uint64], n_words: int) -> NDArray[np.uint64]:
    """Return a word of 8 bytes for each run of `n_words` words in a row."""
    n_runs = max(0, len(words) - n_words + 1)
    joined = words[:n_runs]
    for i in range(1, n_words):
        joined = joined * _FIRST ^ words[i : n_runs + i]
    return joined


def _hash_blocks(words: NDArray[np.uint64]) -> Ints:
    """Return a hash below 2**22 of each block of two words."""
    return _hash_words(_join_words(words, 2)[::2], _LAST)


def _count_key_words(size: int) -> int:
    """Return how many words of 8 bytes at multiples of 8 each window of this size has."""
    return max(1, size // 8 - 1)


def _count_shifts(size: int) -> int:
    """Return how many starts of words to try: windows of 8 bytes have none at a multiple of 8."""
    return 8 if size == _WORD_SIZE else 1


def choose_window_count(n_records: int) -> int:
    """Return how many windows of one form of a text to search for: more if there are few records.

    Long texts from one template differ in few places.
    """
    return max(_MOST, min(_MOST_OF_TEXT, _MOST_IN_ALL // n_records))


@dataclass
class WindowIndex:
    """Map a window's bytes to its record; after `finish`, each window has exactly one record.

    A search hashes the first word of all windows in a buffer at once, and then the last word of the
    few possible matches. The index reads 130 MB a second; the Aho-Corasick automaton of
    `count_text_occurrences` reads 2 MB a second.

    most: the largest number of windows of one form of a text.
    """

    most: int = _MOST
    origins: dict[bytes, Origin] = field(default_factory=dict)
    _shared: set[bytes] = field(default_factory=set)
    _n_hits: int = 0  # shared windows found since the last `finish`
    _blocks: set[bytes] = field(default_factory=set)  # parts of vectors, in float32
    _block_table: Bools | None = None
    # By window size: for a hash of a key, the bits of its offsets in windows; whether a window has
    # a key with this other hash.
    _tables: dict[int, tuple[NDArray[np.uint8], Bools]] = field(default_factory=dict)

    def add_text(self, record: int, text: str) -> None:
        for form, content in write_text_forms(text).items():
            self._add(_cut_windows(content, self.most), Origin(record, TEXT, form))
        self._add(_cut_words(text), Origin(record, WORDS, "lower case"))

    def add_vector(self, record: int, values: Floats) -> None:
        for form, content in write_vector_forms(values).items():
            self._add(_cut_windows(content), Origin(record, VECTORS, form))
        self._blocks.update(_cut_blocks(values))
        self._block_table = None

    def _add(self, windows: Iterable[bytes], origin: Origin) -> None:
        for window in windows:
            first = self.origins.setdefault(window, origin)
            if first.record != origin.record:
                self._shared.add(window)

    def mark_shared(self, texts: Sequence[str], record: int | None = None) -> None:
        """Mark windows that occur in these texts but were cut from a record other than `record`.

        `finish` discards marked windows.
        """
        # In ASCII, a text has fewer forms.
        for is_ascii in (True, False):
            joined = "\0".join(text for text in texts if text.isascii() == is_ascii)
            self._mark(list(write_text_forms(joined).values()), record)

    def _mark(self, forms: Sequence[bytes], record: int | None) -> None:
        for _, window, origin in self.find(b"\0".join(forms)):
            if origin.record != record:
                self._shared.add(window)
                self._n_hits += 1
        if self._n_hits > _MOST_HITS:
            self.finish()

    def mark_shared_vectors(self, vectors: Floats) -> None:
        """Mark windows that occur in vectors (n, dimensions) of kept records.

        Only vectors that share a part with a record are written in all encodings. Each shared part
        counts once, so that a part that all vectors share costs little.
        """
        n_blocks = vectors.shape[1] // _BLOCK
        if not n_blocks or not self._blocks:
            return
        singles = np.ascontiguousarray(vectors[:, : n_blocks * _BLOCK], dtype="<f4")
        hashed = _hash_blocks(singles.view("<u8").ravel()).reshape(len(vectors), n_blocks)
        if self._block_table is None:
            self._block_table = np.zeros(2**_BITS, bool)
            words = np.frombuffer(b"".join(self._blocks), "<u8")
            self._block_table[_hash_blocks(words)] = True
        forms = list[bytes]()
        for row in np.flatnonzero(self._block_table[hashed].any(axis=1)).tolist():
            if shared := self._blocks.intersection(_cut_blocks(vectors[row])):
                self._blocks -= shared
                self._block_table = None
                forms += write_vector_forms(vectors[row]).values()
        if forms:
            self._mark(forms, None)

    def finish(self) -> None:
        """Discard all windows that occur in several records or were marked by `mark_shared`.

        Call this method after adding the last record, and again after the last text to discard.
        """
        for window in self._shared:
            self.origins.pop(window, None)
        self._shared.clear()
        self._n_hits = 0
        self._tables.clear()

    def list_records(self, kind: str, form: str = "") -> frozenset[int]:
        """Return the records with at least one unique window of this kind.

        form: how the encoding's name begins.
        """
        records = set()
        for origin in self.origins.values():
            if origin.kind == kind and origin.form.startswith(form):
                records.add(origin.record)
        return frozenset(records)

    def find(
        self, content: bytes, kinds: Sequence[str] = (TEXT, WORDS, VECTORS)
    ) -> Iterator[tuple[int, bytes, Origin]]:
        """Yield (offset, window, origin) for each window found in the bytes.

        kinds: the kinds of windows to find; other kinds may be yielded too.
        """
        if not self._tables:
            self._fill_tables()
        for size in self._tables:
            if size == _WORD_SIZE and WORDS not in kinds:
                continue
            for start in self._list_possible_starts(content, size):
                window = content[start : start + size]
                if (origin := self.origins.get(window)) is not None:
                    yield start, window, origin

    def _list_possible_starts(self, content: bytes, size: int) -> list[int]:
        """Return the sorted offsets in the bytes at which a window of this size may start."""
        offsets_by_hash, is_hash = self._tables[size]
        all_starts = [np.zeros(0, np.int64)]
        for shift in range(min(_count_shifts(size), max(0, len(content) - size + 1))):
            words = np.frombuffer(content, "<u8", (len(content) - shift) // 8, shift)
            keys = _join_words(words, _count_key_words(size))
            offsets = offsets_by_hash[_hash_words(keys, _FIRST)]
            places = np.flatnonzero(offsets != 0)
            places = places[is_hash[_hash_words(keys[places], _LAST)]]
            for offset in range(8):
                has_offset = offsets[places] >> offset & 1 == 1
                all_starts.append(places[has_offset] * 8 + shift - offset)
        starts = np.sort(np.concatenate(all_starts))
        return starts[starts >= 0].tolist()

    def _fill_tables(self) -> None:
        """Mark the hashes of all windows' keys, for `find`."""
        for size in _SIZES:
            windows = [window for window in self.origins if len(window) == size]
            if not windows:
                continue
            content = np.frombuffer(b"".join(windows), np.uint8).reshape(len(windows), size)
            n_words = _count_key_words(size)
            offsets_by_hash = np.zeros(2**_BITS, np.uint8)
            is_hash = np.zeros(2**_BITS, bool)
            for offset in range(9 - _count_shifts(size)):
                part = np.ascontiguousarray(content[:, offset : offset + 8 * n_words])
                keys = _join_words(part.view("<u8").ravel(), n_words)[::n_words]
                offsets_by_hash[_hash_words(keys, _FIRST)] |= np.uint8(1 << offset)
                is_hash[_hash_words(keys, _LAST)] = True
            self._tables[size] = (offsets_by_hash, is_hash)
