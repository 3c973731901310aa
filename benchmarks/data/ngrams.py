"""Find in which texts runs of tokens occur, exactly: one sorted table of hashes for each length.

A key of the table holds the upper bits of a 64-bit hash and, in its lower bits, where the n-gram
begins. What is found by its hash is compared token for token. Knows token ids; no tokenizer, model
or secret.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from auditor.core import machine_memory
from auditor.core.errors import AuditError
from auditor.core.nouns import Tokens
from auditor.statistics.memorised import NGramMatches
from auditor.statistics.near_pairs import Hashes, hash_token_pieces

_AT_ONCE = 2**20  # n-grams hashed at once
_BYTES_AT_ONCE = 40  # for each of them
_BYTES = 13  # for each indexed token: the token, its key, and whether an n-gram begins there
_ANCHOR = 8  # tokens of a whole text by whose rarest run it is looked up

Integers = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class NGramIndex:
    """The index. Texts that were trained on come first, each once, then held-out ones.

    tokens: of all texts, one text after another; starts: (texts + 1,) where each begins, and the
    end. copies: how often each trained text was trained on, None if nobody knows.
    """

    tokens: NDArray[np.uint32]
    starts: Integers
    copies: tuple[int | None, ...]
    _keys: dict[int, Hashes] = field(default_factory=dict, repr=False)  # of the last length only

    @property
    def text_lengths(self) -> Integers:
        """(texts,) tokens of each."""
        return np.diff(self.starts)

    def tokens_of_text(self, index: int) -> Tokens:
        """The tokens of a text."""
        return tuple(self.tokens[self.starts[index] : self.starts[index + 1]].tolist())

    def ngram_place_counts(self, n: int) -> tuple[int, int]:
        """Places at which an n-gram begins, in what was trained on and in held-out text."""
        places = np.maximum(self.text_lengths - n + 1, 0)
        known = len(self.copies)
        return int(places[:known].sum()), int(places[known:].sum())

    def match_ngrams(self, texts: Sequence[Tokens], n: int) -> list[NGramMatches]:
        """For each text, those of its n-grams that occur in the indexed texts."""
        tokens, starts = _join_texts([np.array(text, dtype=np.uint32) for text in texts])
        blocks = zip(*_hash_ngrams(tokens, starts, n), strict=True)
        at, hashes = (np.concatenate(column) for column in blocks)
        keys = self._sort_keys(n)
        low, high = self._find_hashes(keys, hashes)
        hit = np.flatnonzero(low < high)
        at, low, high = at[hit], low[hit], high[hit]
        # Keys of one hash are sorted by place, so texts are too: only the ends of a range count.
        first, last = self._read_places(keys[low]), self._read_places(keys[high - 1])
        ngrams, indexed = _view_ngrams(tokens, n)[at], _view_ngrams(self.tokens, n)
        is_same = (indexed[first] == ngrams).all(axis=1) & (indexed[last] == ngrams).all(axis=1)
        for i in np.flatnonzero(~is_same):  # another n-gram has the hash
            places = self._select_equal(self._read_places(keys[low[i] : high[i]]), ngrams[i])
            if len(places):
                first[i], last[i], is_same[i] = places[0], places[-1], True
        at = at[is_same]
        least, most = (self._find_owners(places[is_same]) for places in (first, last))
        record = np.where(least == most, least, -1)
        known = len(self.copies)
        slices = map(slice, *np.searchsorted(at, [starts[:-1], starts[1:]]).tolist())
        return [
            NGramMatches(at[own] - start, least[own] < known, most[own] >= known, record[own])
            for start, own in zip(starts, slices, strict=False)
        ]

    def find_texts_holding(self, text: Tokens) -> Integers:
        """Return the indices of the texts that contain the whole text, each once."""
        whole = np.array(text, dtype=np.uint32)
        n = min(_ANCHOR, len(whole))
        keys = self._sort_keys(n)
        low, high = self._find_hashes(keys, hash_token_pieces(_view_ngrams(whole, n)))
        rarest = int((high - low).argmin())
        places = self._read_places(keys[low[rarest] : high[rarest]]) - rarest
        places = self._select_equal(places, whole)
        owners = self._find_owners(places)
        return np.unique(owners[places + len(whole) <= self.starts[owners + 1]])

    def _select_equal(self, places: Integers, ngram: NDArray[np.uint32]) -> Integers:
        """The places from which on the tokens are these."""
        n = len(ngram)
        places = places[(places >= 0) & (places + n <= len(self.tokens))]
        return places[(_view_ngrams(self.tokens, n)[places] == ngram).all(axis=1)]

    def _find_owners(self, places: Integers) -> Integers:
        """(k,) the text that each place lies in."""
        return np.searchsorted(self.starts, places, side="right") - 1

    def _find_hashes(self, keys: Hashes, hashes: Hashes) -> tuple[Integers, Integers]:
        """(k,) and (k,): the keys low:high have the upper bits of this hash."""
        return (
            np.searchsorted(keys, hashes & ~self._place_bits),
            np.searchsorted(keys, hashes | self._place_bits, side="right"),
        )

    def _read_places(self, keys: Hashes) -> Integers:
        return (keys & self._place_bits).astype(np.int64)

    @property
    def _place_bits(self) -> np.uint64:
        return np.uint64(2 ** len(self.tokens).bit_length() - 1)

    def _sort_keys(self, n: int) -> Hashes:
        if n not in self._keys:
            self._keys.clear()
            keys = np.empty(sum(self.ngram_place_counts(n)), dtype=np.uint64)
            filled = 0
            for at, hashes in _hash_ngrams(self.tokens, self.starts, n):
                keys[filled : filled + len(at)] = hashes & ~self._place_bits | at.astype(np.uint64)
                filled += len(at)
            keys.sort()
            self._keys[n] = keys
        return self._keys[n]


def build_ngram_index(
    trained: Iterable[tuple[Tokens, int | None]], heldout: Iterable[Tokens]
) -> NGramIndex:
    """The index of what was trained on, with how often, and of held-out text; texts that are the
    same become one.

    Raises AuditError if it does not fit into memory, before it is made.
    """
    texts, copies = list[NDArray[Any]](), list[int | None]()
    seen: dict[bytes, int] = {}
    for tokens, times in trained:
        text = np.array(tokens, dtype=np.uint32)
        # By digest: the texts as keys would be in memory twice.
        at = seen.setdefault(hashlib.blake2b(text.tobytes(), digest_size=16).digest(), len(texts))
        if at == len(texts):
            texts.append(text)
            copies.append(times)
        elif times is not None and (before := copies[at]) is not None:
            copies[at] = before + times
        else:
            copies[at] = None
    if not any(map(len, texts)):
        raise AuditError("expected training data to index, got no text")
    texts += [np.array(tokens, dtype=np.uint32) for tokens in heldout]
    n_tokens = sum(map(len, texts))
    wanted = n_tokens * _BYTES + _AT_ONCE * _BYTES_AT_ONCE
    free = machine_memory.free_machine_memory_bytes()
    if wanted > free:
        raise AuditError(
            f"expected {wanted / 1e6:,.0f} MB of memory for the index of {n_tokens:,} tokens of "
            f"training data, got {free / 1e6:,.0f} MB free: give it more, or --data with fewer rows"
        )
    return NGramIndex(*_join_texts(texts), tuple(copies))


def _join_texts(texts: Sequence[NDArray[np.uint32]]) -> tuple[NDArray[np.uint32], Integers]:
    """Return all tokens, and (texts + 1,) where each text begins."""
    starts = np.cumsum([0, *map(len, texts)], dtype=np.int64)
    return np.concatenate([np.empty(0, np.uint32), *texts]), starts


def _view_ngrams(tokens: NDArray[np.uint32], n: int) -> NDArray[np.uint32]:
    """(places, n) without a copy."""
    if len(tokens) < n:
        return np.empty((0, n), dtype=tokens.dtype)
    return np.lib.stride_tricks.sliding_window_view(tokens, n)


def _hash_ngrams(
    tokens: NDArray[np.uint32], starts: Integers, n: int
) -> Iterator[tuple[Integers, Hashes]]:
    """Yield, block by block, where the n-grams of texts begin, and their hashes."""
    is_whole = np.ones(len(tokens), dtype=bool)
    for start, end in pairwise(starts.tolist()):
        is_whole[max(start, end - n + 1) : end] = False
    ngrams = _view_ngrams(tokens, n)
    for start in range(0, max(1, len(ngrams)), _AT_ONCE):
        at = np.flatnonzero(is_whole[start : start + _AT_ONCE])
        yield start + at, hash_token_pieces(ngrams[start : start + _AT_ONCE])[at]
