"""Find pairs of texts a few token edits apart without comparing every pair.

If a text is cut into d + 1 pieces, every text within d edits of it contains one of the pieces
unchanged, near its position (Li et al. 2011, PASS-JOIN). Only such texts are compared, so the
search is fast and misses no pair.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from rapidfuzz.distance import Levenshtein
from rapidfuzz.process import cdist, cpdist

from auditor.core.arrays import Ints
from auditor.core.nouns import Tokens
from auditor.statistics.hashed_ngrams import HashedNGrams, hash_token_pieces, join_texts

_ROWS = 256  # texts compared with others at once, to bound the memory
_WORTH = 4  # one look-up of a piece takes as long as this many comparisons
_SHARE = 32  # if more than one pair in this many is a candidate, compare all pairs


def index_pairs_within_edit_limits(
    texts: Sequence[Tokens], others: Sequence[Tokens], limits: Sequence[int]
) -> Iterator[tuple[Ints, Ints]]:
    """Yield blocks of near pairs as two (k,) arrays: indices in `texts` and in `others`.

    limits: for each text, the maximum number of token edits (Levenshtein).
    """
    index = HashedNGrams(*join_texts(others))
    shapes = np.column_stack([[*map(len, texts)], limits]).astype(np.int64)
    groups, codes = np.unique(shapes, axis=0, return_inverse=True)
    # In the order of piece sizes, because the index caches neighbouring sizes.
    for code in np.argsort(groups[:, 0] // (groups[:, 1] + 1), kind="stable"):
        length, limit = groups[code].tolist()
        rows = np.flatnonzero(codes == code)
        columns = np.flatnonzero(abs(index.text_lengths - length) <= limit)
        ends = [length * i // (limit + 1) for i in range(limit + 2)]
        is_worth = (limit + 1) * _WORTH * (len(rows) + len(columns)) < len(rows) * len(columns)
        for start in range(0, len(rows), _ROWS):
            batch = rows[start : start + _ROWS]
            batch_texts = [texts[i] for i in batch]
            pairs = None
            if length > limit and is_worth:
                most = len(batch) * len(columns) // _SHARE
                pairs = _find_pairs_sharing_a_piece(index, batch_texts, ends, limit, most)
            # The distance stops at the limit: any larger distance is returned as limit + 1.
            measure: dict[str, Any] = {"scorer": Levenshtein.distance, "score_cutoff": limit}
            if pairs is None:
                other_texts = [others[j] for j in columns.tolist()]
                at, of = np.nonzero(cdist(batch_texts, other_texts, **measure) <= limit)
                of = columns[of]
            else:
                at, of = pairs
                candidates = [texts[i] for i in batch[at]], [others[j] for j in of.tolist()]
                near = cpdist(*candidates, **measure) <= limit
                at, of = (side[near] for side in pairs)
            yield batch[at], of


def label_connected_texts(n_texts: int, pairs: Iterable[tuple[Ints, Ints]]) -> Ints:
    """Return the group code of each text, of shape (texts,); pairs connect texts into groups.

    Groups are numbered from 0 in the order of their first texts.
    """
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    # Connect each text with itself, so that the arrays are never empty.
    self_pairs = np.arange(n_texts)
    at, of = (np.concatenate(side) for side in zip((self_pairs, self_pairs), *pairs, strict=True))
    related = coo_array((np.ones(len(at), dtype=bool), (at, of)), shape=(n_texts, n_texts))
    return np.asarray(connected_components(related, directed=False)[1], dtype=np.int64)


def _find_pairs_sharing_a_piece(
    index: HashedNGrams, texts: Sequence[Tokens], ends: Sequence[int], limit: int, most: int
) -> tuple[Ints, Ints] | None:
    """Return pairs of a text and an indexed text that share a piece; None if more than `most`.

    Each text is divided into pieces at the same positions. Two texts share a piece if its positions
    in them differ by at most `limit` tokens, and if so do the lengths of the texts.

    Args:
        index: the indexed texts.
        texts: texts of one length.
        ends: where pieces begin and end: pieces are ends[0]:ends[1], ends[1]:ends[2] and so on.
        limit: see above, in tokens.
        most: largest number of places to compare.
    """
    tokens = np.array(texts, dtype=np.uint32)
    lengths = index.text_lengths
    pair_codes = list[Ints]()
    for begin, end in pairwise(ends):
        low, high = index.find_hashes(hash_token_pieces(tokens[:, begin:end]), end - begin)
        counts = high - low
        if (most := most - int(counts.sum())) < 0:
            return None
        at = np.repeat(np.arange(len(texts)), counts)
        # The keys low:high of each text, one text after another.
        selection = np.arange(len(at)) + np.repeat(high - counts.cumsum(), counts)
        places = index.list_positions(end - begin, selection)
        of = index.find_owners(places)
        is_near = abs(places - index.starts[of] - begin) <= limit
        is_near &= abs(lengths[of] - tokens.shape[1]) <= limit
        # A pair as a single number.
        pair_codes.append((at * len(lengths) + of)[is_near])
    return np.divmod(np.unique(np.concatenate(pair_codes)), len(lengths))
