"""Find the texts that contain given token n-grams.

The search is exact, because hash matches are compared token by token.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from auditor.core import machine_memory
from auditor.core.arrays import Ints
from auditor.core.errors import AuditError
from auditor.core.nouns import Tokens
from auditor.statistics.hashed_ngrams import (
    NGRAMS_AT_ONCE,
    HashedNGrams,
    TokenArray,
    hash_ngrams,
    hash_token_pieces,
    join_texts,
    view_ngrams,
)
from auditor.statistics.memorised import NGramMatches

_BYTES_AT_ONCE = 40  # for each n-gram that is hashed
_BYTES = 13  # for each indexed token: the token, its key, and whether an n-gram begins there
_ANCHOR = 8  # tokens of the runs whose rarest is looked up to find a complete text


@dataclass(frozen=True, eq=False)
class NGramIndex(HashedNGrams):
    """Index the n-grams of texts: first the distinct trained texts, then held-out texts.

    copies: each trained text's number of copies in training (None: unknown).
    """

    copies: tuple[int | None, ...] = ()

    def tokens_of_text(self, index: int) -> Tokens:
        return tuple(self.tokens[self.starts[index] : self.starts[index + 1]].tolist())

    def ngram_place_counts(self, n: int) -> tuple[int, int]:
        """Return the numbers of n-gram positions in the trained texts and in the held-out texts."""
        places = np.maximum(self.text_lengths - n + 1, 0)
        known = len(self.copies)
        return int(places[:known].sum()), int(places[known:].sum())

    def match_ngrams(self, texts: Sequence[Tokens], n: int) -> list[NGramMatches]:
        """Return the n-grams of each text that occur in the indexed texts."""
        tokens, starts = join_texts(texts)
        blocks = zip(*hash_ngrams(tokens, starts, n), strict=True)
        at, hashes = map(np.concatenate, blocks)
        low, high = self.find_hashes(hashes, n)
        hit = np.flatnonzero(low < high)
        at = at[hit]
        low = low[hit]
        high = high[hit]
        # Keys of one hash are in order of place, hence of text: only the ends of a range matter.
        first = self.list_positions(n, low)
        last = self.list_positions(n, high - 1)
        ngrams = view_ngrams(tokens, n)[at]
        indexed = view_ngrams(self.tokens, n)
        is_same = (indexed[first] == ngrams).all(axis=1) & (indexed[last] == ngrams).all(axis=1)
        for i in np.flatnonzero(~is_same):  # another n-gram has the hash
            places = self._select_equal(self.list_positions(n, slice(low[i], high[i])), ngrams[i])
            if len(places):
                first[i], last[i], is_same[i] = places[0], places[-1], True
        at = at[is_same]
        least = self.find_owners(first[is_same])
        most = self.find_owners(last[is_same])
        record = np.where(least == most, least, -1)
        known = len(self.copies)
        slices = map(slice, *np.searchsorted(at, [starts[:-1], starts[1:]]).tolist())
        matches = []
        for start, selection in zip(starts, slices, strict=False):
            matches.append(
                NGramMatches(
                    at[selection] - start,
                    least[selection] < known,
                    most[selection] >= known,
                    record[selection],
                )
            )
        return matches

    def find_texts_holding(self, text: Tokens) -> Ints:
        """Return the distinct indices of the indexed texts that contain the whole text."""
        searched = np.array(text, dtype=np.uint32)
        n = min(_ANCHOR, len(searched))
        low, high = self.find_hashes(hash_token_pieces(view_ngrams(searched, n)), n)
        rarest = int((high - low).argmin())
        places = self.list_positions(n, slice(low[rarest], high[rarest])) - rarest
        places = self._select_equal(places, searched)
        owners = self.find_owners(places)
        return np.unique(owners[places + len(searched) <= self.starts[owners + 1]])

    def _select_equal(self, places: Ints, ngram: TokenArray) -> Ints:
        """Return those positions in `places` at which the tokens `ngram` occur."""
        n = len(ngram)
        places = places[(places >= 0) & (places + n <= len(self.tokens))]
        return places[(view_ngrams(self.tokens, n)[places] == ngram).all(axis=1)]


def build_ngram_index(
    trained: Iterable[tuple[Tokens, int | None]], heldout: Iterable[Tokens]
) -> NGramIndex:
    """Build an index of trained texts with their copies, and of held-out texts.

    Equal trained texts are merged. Raise AuditError if the index would not fit into memory.
    """
    texts = list[NDArray[Any]]()
    copies = list[int | None]()
    index_of_digest: dict[bytes, int] = {}
    for tokens, times in trained:
        text = np.array(tokens, dtype=np.uint32)
        # By digest: the texts as keys would be in memory twice.
        at = index_of_digest.setdefault(
            hashlib.blake2b(text.tobytes(), digest_size=16).digest(), len(texts)
        )
        if at == len(texts):
            texts.append(text)
            copies.append(times)
        elif times is not None and (before := copies[at]) is not None:
            copies[at] = before + times
        else:
            copies[at] = None
    if not any(map(len, texts)):
        raise AuditError("expected training data to index, got no text")
    for tokens in heldout:
        texts.append(np.array(tokens, dtype=np.uint32))
    n_tokens = sum(map(len, texts))
    n_bytes = n_tokens * _BYTES + NGRAMS_AT_ONCE * _BYTES_AT_ONCE
    free = machine_memory.measure_free_memory()
    if n_bytes > free:
        raise AuditError(
            f"expected {n_bytes / 1e6:,.0f} MB of memory for the index of {n_tokens:,} tokens of "
            f"training data, got {free / 1e6:,.0f} MB free: give it more, or --data with fewer rows"
        )
    return NGramIndex(*join_texts(texts), copies=tuple(copies))
