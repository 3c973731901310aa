"""What a classifier learns of members and non-members, each told by what was learnt of others: blind and stacked.

Cross-fitted: a record is scored by a classifier that was fitted to the other folds. Near-duplicates, the parts of one
record and the records of one person are in one fold: neither a record's own label nor that of anything related to it
is ever used for its score. Knows no models.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_array, csr_array, hstack
from scipy.sparse.csgraph import connected_components

from auditor.core.nouns import Tokens
from auditor.statistics.judging import near_verbatim_edit_limit
from auditor.statistics.near_pairs import index_pairs_within_edit_limits

Floats = NDArray[np.float64]
FOLDS = 5


def cross_fit_deviation_factor(folds: int) -> float:
    """What a cross-fitted AUC's deviation is multiplied by: scores of one fold share a classifier.

    Nadeau and Bengio 2003: the variance of a mean over folds is 1/J + n_test/n_train of a fold's, not 1/J.
    """
    return float(np.sqrt(1 + folds / (folds - 1)))  # n_test / n_train = 1 / (J - 1)


def related_fold_groups(texts: Sequence[Tokens], *origins: Sequence[Hashable | None]) -> NDArray[np.int64]:
    """Return the (texts,) group of each text: related texts share one, directly or through others.

    Args:
        texts: near-duplicates are texts within `near_verbatim_edit_limit` token edits of each other.
        origins: of each text where it comes from, as its document or its person; None: not known.
    """
    limits = [near_verbatim_edit_limit(len(text)) for text in texts]
    pairs = list(index_pairs_within_edit_limits(texts, texts, limits))
    for origin in origins:
        first: dict[Hashable, int] = {}
        rows = np.array([i for i, key in enumerate(origin) if key is not None], dtype=np.int64)
        pairs.append((rows, np.array([first.setdefault(origin[i], i) for i in rows.tolist()], dtype=np.int64)))
    # Never empty: a text that has tokens is within 0 edits of itself.
    at, of = (np.concatenate(side) for side in zip(*pairs, strict=True))
    related = coo_array((np.ones(len(at), dtype=bool), (at, of)), shape=(len(texts), len(texts)))
    return np.asarray(connected_components(related, directed=False)[1], dtype=np.int64)


def blind_membership_scores(
    texts: Sequence[Tokens], lengths: Floats, member: NDArray[np.bool_], group: NDArray[np.int64]
) -> Floats:
    """(texts,) log-odds of membership that a bag of tokens and lengths gives away; it never sees a model.

    lengths: (texts, k) further sizes of each text, as many of all. NaN where there are too few groups to fold.
    """
    from sklearn.feature_extraction.text import TfidfTransformer

    counts = [len(text) for text in texts]
    sizes = np.log1p(np.column_stack([counts, lengths]))
    words, of = np.unique([token for text in texts for token in text], return_inverse=True)
    at = np.repeat(np.arange(len(texts)), counts)
    bag = csr_array((np.ones(len(at)), (at, of)), shape=(len(texts), len(words)))  # how often each word is in each text
    # Weights of words by how rare they are come from all texts: they tell no label.
    bag = TfidfTransformer(sublinear_tf=True).fit_transform(bag)
    return _cross_fitted_log_odds(hstack([bag, csr_array(_standardise_columns(sizes))], format="csr"), member, group)


def stacked_membership_scores(scores: Floats, member: NDArray[np.bool_], group: NDArray[np.int64]) -> Floats:
    """(records,) log-odds of membership by logistic regression on (records, k) finite scores."""
    return _cross_fitted_log_odds(_standardise_columns(scores), member, group)


def _cross_fitted_log_odds(features: Any, member: NDArray[np.bool_], group: NDArray[np.int64]) -> Floats:
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import StratifiedGroupKFold

    folds = cross_fit_fold_count(member, group)
    found = np.full(len(member), np.nan)
    if folds < 2:
        return found
    split = StratifiedGroupKFold(folds, shuffle=True, random_state=0).split(features, member, group)
    for known, asked in split:
        # scikit-learn refuses to fit one class alone.
        if member[known].all() or not member[known].any():
            return np.full(len(member), np.nan)
        fitted = LogisticRegression(class_weight="balanced", max_iter=1000).fit(features[known], member[known])
        found[asked] = fitted.decision_function(features[asked])
    return found


def cross_fit_fold_count(member: NDArray[np.bool_], group: NDArray[np.int64]) -> int:
    """Folds that members and non-members can be divided into, related records together: at most 5."""
    return min(FOLDS, *(len(np.unique(group[member == one])) for one in (True, False)))


def _standardise_columns(values: Floats) -> Floats:
    """Columns of mean 0 and deviation 1; a constant one is 0."""
    away = values - values.mean(0)
    spread = away.std(0)
    return np.divide(away, spread, out=np.zeros_like(away), where=spread > 0)
