"""Find pairs of texts that are near in token edits, without comparing every pair. This module knows
no secrets.

If a text is cut into d + 1 pieces, every text within d edits contains a piece unchanged, near its
place (Li et al. 2011, PASS-JOIN). Only such texts are compared, exactly: no near pair is missed,
and no other pair is returned.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rapidfuzz.distance import Levenshtein
from rapidfuzz.process import cdist
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from auditor.core.nouns import Tokens

Indices = NDArray[np.int64]
Hashes = NDArray[np.uint64]
_ROWS = 256  # texts compared with others at once: bounds the memory
_WORTH = 4  # comparisons that take as long as looking one piece of one text up
_SHARE = 32  # one in so many pairs to compare: above that all are compared at once
# odd: what the hash of a piece is a polynomial in, modulo 2^64
_BASE = np.uint64(0x9E3779B97F4A7C15)


def index_pairs_within_edit_limits(
    texts: Sequence[Tokens], others: Sequence[Tokens], limits: Sequence[int]
) -> Iterator[tuple[Indices, Indices]]:
    """Pairs, some at a time: (k,) indices of texts, and of others within `limits` token edits
    (Levenshtein) of them.
    """
    columns_by_length = _group_positions(list(map(len, others)))
    for (length, limit), rows in _group_positions(
        [(len(t), d) for t, d in zip(texts, limits, strict=True)],
    ).items():
        for long, columns in columns_by_length.items():
            if abs(length - long) <= limit:
                yield from _find_equal_length_pairs(texts, others, rows, columns, limit)


def group_texts_within_edit_limits(texts: Sequence[Tokens], limits: Sequence[int]) -> Indices:
    """Return the (texts,) group of each text: near texts share a group, directly or through others;
    never empty.
    """
    pairs = list(index_pairs_within_edit_limits(texts, texts, limits))
    at, of = (np.concatenate(side) for side in zip(*pairs, strict=True))  # each text is near itself
    near = coo_array((np.ones(len(at), dtype=bool), (at, of)), shape=(len(texts), len(texts)))
    return np.asarray(connected_components(near, directed=False)[1], dtype=np.int64)


def _group_positions(keys: Sequence[Any]) -> Mapping[Any, Indices]:
    """The positions of each distinct key."""
    positions: dict[Any, list[int]] = {}
    for i, key in enumerate(keys):
        positions.setdefault(key, []).append(i)
    return {key: np.array(indices, dtype=np.int64) for key, indices in positions.items()}


def _find_equal_length_pairs(
    texts: Sequence[Tokens], others: Sequence[Tokens], rows: Indices, columns: Indices, limit: int
) -> Iterator[tuple[Indices, Indices]]:
    """`index_pairs_within_edit_limits` of texts that all have one length, and of others that all
    have one.
    """
    looks = _list_unedited_pieces(len(texts[rows[0]]), len(others[columns[0]]), limit)
    worth = len(looks) * _WORTH * (len(rows) + len(columns)) < len(rows) * len(columns)
    pieces = _PieceIndex([others[j] for j in columns]) if looks and worth else None
    for start in range(0, len(rows), _ROWS):
        batch = rows[start : start + _ROWS]
        pairs = (
            None
            if pieces is None
            else pieces.index_pairs_sharing_a_piece([texts[i] for i in batch], looks)
        )
        if pairs is None:
            batch_texts = [texts[i] for i in batch]
            other_texts = [others[j] for j in columns]
            # A distance above the limit is not worked out: it comes back as limit + 1.
            at, of = np.nonzero(
                cdist(batch_texts, other_texts, scorer=Levenshtein.distance, score_cutoff=limit)
                <= limit,
            )
        else:
            at, of = pairs
            near = [
                Levenshtein.distance(texts[batch[i]], others[columns[j]], score_cutoff=limit)
                <= limit
                for i, j in zip(at.tolist(), of.tolist(), strict=True)
            ]
            at = at[near]
            of = of[near]
        if len(at):
            yield batch[at], columns[of]


def _list_unedited_pieces(length: int, long: int, limit: int) -> list[tuple[int, int, int]]:
    """(begin and size of a piece of the others, where a text may have it); none where the others
    have too few tokens.

    Before piece i at most i edits were made and behind it at most limit - i: with more there, fewer
    are left for another piece, which is then whole itself.
    """
    if long <= limit:
        return []
    ends = [long * i // (limit + 1) for i in range(limit + 2)]
    pieces = []
    for i, (begin, end) in enumerate(pairwise(ends)):
        # moved by at most i places counted from the front, and by at most limit - i counted from
        # the end
        first = max(0, begin - i, begin + length - long - (limit - i))
        last = min(length - (end - begin), begin + i, begin + length - long + (limit - i))
        pieces += [(begin, end - begin, at) for at in range(first, last + 1)]
    return pieces


class _PieceIndex:
    """An index of n texts of one length, by the hashes of their pieces."""

    def __init__(self, texts: Sequence[Tokens]) -> None:
        self._tokens = np.array(texts, dtype=np.uint64)
        self._sorted: dict[tuple[int, int], tuple[Hashes, Indices]] = {}

    def index_pairs_sharing_a_piece(
        self, texts: Sequence[Tokens], looks: Sequence[tuple[int, int, int]]
    ) -> tuple[Indices, Indices] | None:
        """Pairs with the hash of some piece in common, each once; None where these are too many."""
        tokens = np.array(texts, dtype=np.uint64)
        pair_codes = list[Indices]()
        n_allowed = len(texts) * len(self._tokens) // _SHARE
        for begin, size, at in looks:
            if (begin, size) not in self._sorted:
                hashes = hash_token_pieces(self._tokens[:, begin : begin + size])
                by_hash = np.argsort(hashes)
                self._sorted[begin, size] = hashes[by_hash], by_hash
            known, order = self._sorted[begin, size]
            piece_hashes = hash_token_pieces(tokens[:, at : at + size])
            first, end = (
                np.searchsorted(known, piece_hashes, side=side) for side in ("left", "right")
            )
            counts = end - first
            if (n_allowed := n_allowed - int(counts.sum())) < 0:
                return None
            hit = np.flatnonzero(counts)
            if len(hit):
                of = np.concatenate([order[first[i] : end[i]] for i in hit])
                # a pair as one number
                pair_codes.append(np.repeat(hit, counts[hit]) * len(self._tokens) + of)
        pairs = np.unique(np.concatenate(pair_codes)) if pair_codes else np.empty(0, dtype=np.int64)
        return np.divmod(pairs, len(self._tokens))


def hash_token_pieces(pieces: NDArray[np.uint64]) -> Hashes:
    """(n, size) tokens -> (n,)."""
    # Arrays of uint64 wrap without a warning; two pieces with one hash cost a comparison, and make
    # no pair.
    total = np.zeros(len(pieces), dtype=np.uint64)
    for i in range(pieces.shape[1]):
        total = total * _BASE + pieces[:, i] + np.uint64(1)
    return total
