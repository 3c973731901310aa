"""Find all occurrences of token sequences in texts, by sorted hashes of n-grams.

A key holds the upper bits of an n-gram's 64-bit hash and, in its lower bits, the position of the
n-gram. Sorted keys of one hash therefore follow the order of the texts. Different n-grams may share
a hash, so callers compare the tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from auditor.core.arrays import Ints

TokenArray = NDArray[np.uint32]
Hashes = NDArray[np.uint64]
NGRAMS_AT_ONCE = 2**20  # n-grams hashed at once
# Base of the polynomial hash modulo 2^64; odd.
_BASE = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, eq=False)
class HashedNGrams:
    """An index of the n-grams of texts, for any n.

    tokens: all texts, one after another.
    starts: (texts + 1,) the position where each text starts, then the total length.
    """

    tokens: TokenArray
    starts: Ints
    _keys: dict[int, Hashes] = field(default_factory=dict, repr=False)  # by the length of n-grams

    @property
    def text_lengths(self) -> Ints:
        """Return the number of tokens of each text, of shape (texts,)."""
        return np.diff(self.starts)

    def find_hashes(self, hashes: Hashes, n: int) -> tuple[Ints, Ints]:
        """Find, for each hash, the sorted keys that match it.

        There is one key per n-gram in the texts: the upper bits of its hash, then its position.
        Return arrays low and high of shape (k,): keys[low:high] match the hash. n: the length of
        the n-grams.
        """
        keys = self._sort_keys(n)
        return (
            np.searchsorted(keys, hashes & ~self._place_bits),
            np.searchsorted(keys, hashes | self._place_bits, side="right"),
        )

    def list_positions(self, n: int, selection: Ints | slice) -> Ints:
        """Return the positions in `tokens` at which the n-grams of the selected keys begin."""
        return (self._sort_keys(n)[selection] & self._place_bits).astype(np.int64)

    def find_owners(self, places: Ints) -> Ints:
        """Return the index of the text that contains each position, of shape (k,)."""
        return np.searchsorted(self.starts, places, side="right") - 1

    @property
    def _place_bits(self) -> np.uint64:
        return np.uint64(2 ** len(self.tokens).bit_length() - 1)

    def _sort_keys(self, n: int) -> Hashes:
        if n not in self._keys:
            # Callers that need several lengths request neighbouring lengths one after another.
            for length in [length for length in self._keys if abs(length - n) > 1]:
                del self._keys[length]
            keys = np.empty(int(np.maximum(self.text_lengths - n + 1, 0).sum()), dtype=np.uint64)
            filled = 0
            for at, hashes in hash_ngrams(self.tokens, self.starts, n):
                keys[filled : filled + len(at)] = hashes & ~self._place_bits | at.astype(np.uint64)
                filled += len(at)
            keys.sort()
            self._keys[n] = keys
        return self._keys[n]


def join_texts(texts: Sequence[Any]) -> tuple[TokenArray, Ints]:
    """Return the tokens of all texts, concatenated, and the starts, of shape (texts + 1,).

    The starts are the position of each text's first token, followed by the total length.
    """
    starts = np.cumsum([0, *map(len, texts)], dtype=np.int64)
    tokens = np.empty(starts[-1], dtype=np.uint32)
    for text, (start, end) in zip(texts, pairwise(starts), strict=True):
        tokens[start:end] = text
    return tokens, starts


def view_ngrams(tokens: TokenArray, n: int) -> TokenArray:
    """Return a view of all n-grams, of shape (positions, n)."""
    if len(tokens) < n:
        return np.empty((0, n), dtype=tokens.dtype)
    return np.lib.stride_tricks.sliding_window_view(tokens, n)


def hash_ngrams(tokens: TokenArray, starts: Ints, n: int) -> Iterator[tuple[Ints, Hashes]]:
    """Yield blocks of two arrays: the positions at which n-grams begin, and the hash of each.

    `tokens`: all texts, concatenated. `starts`: start of each text, then the end of the last text.
    No n-gram extends beyond the end of its text.
    """
    is_whole = np.ones(len(tokens), dtype=bool)
    for start, end in pairwise(starts.tolist()):
        is_whole[max(start, end - n + 1) : end] = False
    ngrams = view_ngrams(tokens, n)
    for start in range(0, max(1, len(ngrams)), NGRAMS_AT_ONCE):
        at = np.flatnonzero(is_whole[start : start + NGRAMS_AT_ONCE])
        yield start + at, hash_token_pieces(ngrams[start : start + NGRAMS_AT_ONCE])[at]


def hash_token_pieces(pieces: TokenArray) -> Hashes:
    """Return the hash of each piece, of shape (n,); pieces: (n, size) token ids."""
    # Arrays of uint64 wrap without a warning. Two pieces with the same hash only cost a comparison;
    # they do not form a pair.
    total = np.zeros(len(pieces), dtype=np.uint64)
    for i in range(pieces.shape[1]):
        total = total * _BASE + pieces[:, i] + np.uint64(1)
    return total
