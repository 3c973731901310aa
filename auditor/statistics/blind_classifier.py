"""Compute the blind and the stacked score, by classifiers fitted to other records.

The blind score uses texts only; the stacked score combines other scores. Both are cross-fitted: the
classifier that scores a record is fitted to the other folds. Near-duplicates, the parts of one
record and the records of one person share a fold. A record's score therefore never uses its own
label or that of a related record. No language model is needed.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy

from auditor.core.arrays import Bools, Floats, Ints
from auditor.core.nouns import Secret, Tokens
from auditor.core.secret_table import SecretTable, build_secret_table
from auditor.statistics.hashed_ngrams import join_texts
from auditor.statistics.judging import compute_near_verbatim_limit
from auditor.statistics.near_pairs import index_pairs_within_edit_limits, label_connected_texts

FOLDS = 5
_LEAST_PREFIX = 8  # fewest tokens of a prefix that identify a record
_RECORDS_PER_FEATURE = 20  # fewest records for each feature, to avoid fitting noise


def compute_cross_fit_deviation_factor(member: Bools, group: Ints) -> float:
    """Return the factor on a cross-fitted AUC's standard deviation; 1 if there are too few groups.

    Two dependences increase the variance of a mean over J folds:

    - Classifiers of different folds share training texts. The variance is then not 1/J of a fold's
      variance, but (1/J + n_test/n_train) of it (Nadeau and Bengio 2003).
    - Texts of one group share words. The variance is multiplied by the mean group size, as if all
      scores in a group were equal (Kish 1965).

    member, group: (texts,).
    """
    folds = count_cross_fit_folds(member, group)
    if folds < 2:
        return 1.0
    of_folds = 1 + folds / (folds - 1)  # n_test / n_train = 1 / (J - 1)
    of_groups = float(np.bincount(group)[group].mean())
    return float(np.sqrt(of_folds * of_groups))


def group_related_texts(texts: Sequence[Tokens], *origins: Sequence[Hashable | None]) -> Ints:
    """Return the group code of each text, of shape (texts,).

    Two texts are related if they are near-duplicates or have an origin in common. Related texts
    share a group, directly or through other texts.

    Args:
        texts: token ids. Near-duplicates are within `compute_near_verbatim_limit` token edits.
        origins: kinds of origin, such as the document. Each gives the origin of every text; None if
            unknown.
    """
    limits = [compute_near_verbatim_limit(len(text)) for text in texts]
    pairs = list(index_pairs_within_edit_limits(texts, texts, limits))
    for origin in origins:
        first: dict[Hashable, int] = {}
        rows = np.array([i for i, key in enumerate(origin) if key is not None], dtype=np.int64)
        firsts = [first.setdefault(origin[i], i) for i in rows.tolist()]
        pairs.append((rows, np.array(firsts, dtype=np.int64)))
    return label_connected_texts(len(texts), pairs)


def group_related_secrets(secrets: Sequence[Secret]) -> Ints:
    """Return the group code of each secret, of shape (secrets,). Related secrets share a group.

    Secrets are related if they have a similar text, or the same document, person or prompt.
    Cross-fitting keeps each group in one fold.
    """
    table = build_secret_table(secrets)
    origins: list[Sequence[Hashable | None]] = [_number_prompts(table)]
    for name in ("document", "user"):
        if name in table.columns:
            origins.append(table.columns[name].tolist())
    return group_related_texts(table.texts, *origins)


def _number_prompts(secrets: SecretTable) -> list[Hashable | None]:
    """Return a key for each prefix that shows where its text comes from; otherwise None.

    A prefix, such as a prompt, shows this if it is long enough and if several texts share it, but
    at most a fifth of all. A prefix of more texts is only a common phrase, and its group would not
    fit into one fold.
    """
    numbers: list[Hashable | None] = [None] * len(secrets)
    n_prefix = secrets.lengths[:, 0]
    for length in np.unique(n_prefix[n_prefix >= _LEAST_PREFIX]):
        places = np.flatnonzero(n_prefix == length)
        prefixes = secrets.tokens[secrets.begins[places][:, None] + np.arange(length)]
        _, codes, counts = np.unique(prefixes, axis=0, return_inverse=True, return_counts=True)
        is_shared = (counts > 1) & (counts <= len(secrets) / FOLDS)
        for i in np.flatnonzero(is_shared[codes]):
            numbers[places[i]] = (int(length), int(codes[i]))
    return numbers


def predict_scores_from_texts(features: Any, scores: Floats, member: Bools, group: Ints) -> Floats:
    """Predict each score's rank in [0, 1] from the texts, of shape (2, records, k).

    The first prediction uses all features, the second only the few features most correlated with
    the score. Few records cannot fit many features, so all features together predict a score
    poorly, even if one of them, such as the length, explains it. The predictors are ridge
    regressions, cross-fitted like the blind score. Values are NaN if there are too few groups for
    folds. scores: (records, k).
    """
    from sklearn.linear_model import Ridge

    # the share of scores that do not exceed each score
    ranks = np.apply_along_axis(lambda s: np.searchsorted(np.sort(s), s, "right"), 0, scores)
    ranks = ranks / len(scores)
    expected = np.full((2, *ranks.shape), np.nan)
    for known, scored in _split_cross_fit_folds(member, group):
        known_features = features[known]
        # copy_X: scikit-learn would copy a matrix that it does not change
        fitted = Ridge(copy_X=False).fit(known_features, ranks[known])
        # scikit-learn drops the axis of a single target.
        expected[0, scored] = fitted.predict(features[scored]).reshape(len(scored), -1)
        if len(known) >= _RECORDS_PER_FEATURE * features.shape[1]:  # the few features are all
            expected[1, scored] = expected[0, scored]
            continue
        for i, few in enumerate(_screen_features(known_features, ranks[known])):
            fitted = Ridge(copy_X=False).fit(known_features[:, few], ranks[known, i])
            expected[1, scored, i] = fitted.predict(features[scored][:, few])
    return expected


def _screen_features(features: Any, ranks: Floats) -> Ints:
    """Return the few features most correlated with each column of ranks, of shape (k, few).

    ranks: (records, k).
    """
    from sklearn.preprocessing import StandardScaler

    deviations = StandardScaler(with_mean=False).fit(features).scale_
    correlation = np.abs(features.T @ (ranks - ranks.mean(0))) / deviations[:, None]
    few = max(1, len(ranks) // _RECORDS_PER_FEATURE)
    order: Ints = np.argsort(-correlation, axis=0, kind="stable")[:few].T
    return order


def build_text_features(texts: Sequence[Tokens], lengths: Floats) -> Any:
    """Return a sparse matrix (texts, features) of each text's token counts and sizes.

    lengths: (texts, k) further measures of each text's size.
    """
    from sklearn.feature_extraction.text import TfidfTransformer

    tokens, starts = join_texts(texts)
    sizes = np.log1p(np.column_stack([np.diff(starts), lengths]))
    words = np.unique(tokens)
    # Not `return_inverse`, which sorts indices of eight bytes. Token ids are below a vocabulary's
    # size.
    codes = np.zeros(words[-1] + 1, np.int32)
    codes[words] = np.arange(len(words))
    of = codes[tokens]
    del tokens
    # (texts, words): counts of each word in each text
    bag = scipy.sparse.csr_array((np.ones(len(of)), of, starts), shape=(len(texts), len(words)))
    bag.sum_duplicates()
    # All texts determine the weights of rare words: this uses no label.
    bag = TfidfTransformer(sublinear_tf=True).fit(bag).transform(bag, copy=False)
    return _join_sparse_columns(bag, scipy.sparse.csr_array(standardise_columns(sizes)))


def _join_sparse_columns(words: Any, sizes: Any) -> Any:
    """Join two sparse matrices (texts, k) side by side, in less memory than `hstack`."""
    dtype = scipy.sparse.get_index_dtype(maxval=words.nnz + sizes.nnz)
    starts = (words.indptr + sizes.indptr).astype(dtype)
    n_entries = np.column_stack([np.diff(words.indptr), np.diff(sizes.indptr)]).ravel()
    # (entries,) in each row, those of `sizes` are the last
    is_size = np.repeat(np.tile([False, True], words.shape[0]), n_entries)
    entries = np.empty(len(is_size))
    columns = np.empty(len(is_size), dtype)
    entries[is_size] = sizes.data
    columns[is_size] = sizes.indices + words.shape[1]
    is_word = np.logical_not(is_size, out=is_size)
    entries[is_word] = words.data
    columns[is_word] = words.indices
    shape = (words.shape[0], words.shape[1] + sizes.shape[1])
    return scipy.sparse.csr_array((entries, columns, starts), shape=shape)


def predict_membership(features: Any, member: Bools, group: Ints) -> Floats:
    """Predict the log-odds of membership by cross-fitted logistic regression, of shape (records,).

    Each group of related records is scored by a classifier fitted to other groups. Values are NaN
    if there are too few groups. features: (records, k) scores, or the result of
    `build_text_features`, which needs no language model. group: (records,) codes of related
    records.
    """
    from sklearn.linear_model import LogisticRegression

    log_odds = np.full(len(member), np.nan)
    for known, scored in _split_cross_fit_folds(member, group):
        # scikit-learn refuses to fit a single class.
        if member[known].all() or not member[known].any():
            return np.full(len(member), np.nan)
        fitted = LogisticRegression(class_weight="balanced", max_iter=1000).fit(
            features[known], member[known]
        )
        log_odds[scored] = fitted.decision_function(features[scored])
    return log_odds


def _split_cross_fit_folds(member: Bools, group: Ints) -> Iterator[tuple[Ints, Ints]]:
    """Yield the indices of the records to fit and of those to score, for each fold.

    Yield nothing if there are too few groups.
    """
    n_folds = count_cross_fit_folds(member, group)
    if n_folds < 2:
        return
    codes = np.unique(group, return_inverse=True)[1]
    # (groups, 2): non-members and members of each group
    sides = [np.bincount(codes, member == side) for side in (False, True)]
    counts = np.column_stack(sides).astype(np.int64)
    fold = _assign_group_folds(counts.tobytes(), n_folds)[codes]
    for i in range(n_folds):
        yield np.flatnonzero(fold != i), np.flatnonzero(fold == i)


@functools.lru_cache(maxsize=1)  # several classifiers use the same folds
def _assign_group_folds(counts: bytes, n_folds: int) -> Ints:
    """Return the fold of each group, (groups,), so that folds have equal shares of both classes.

    Groups are assigned one after the other, the most one-sided first, to the fold that makes the
    shares most equal. The folds are those of scikit-learn's StratifiedGroupKFold, which takes 13
    times as long.

    Args:
        counts: the bytes of an array (groups, 2) of numbers of non-members and of members.
        n_folds: number of folds.
    """
    by_group = np.frombuffer(counts, np.int64).reshape(-1, 2)
    shuffled = np.arange(len(by_group))
    np.random.RandomState(0).shuffle(shuffled)
    one_sided = np.std(by_group[shuffled].astype(float), axis=1)
    order = shuffled[np.argsort(-one_sided, kind="stable")]
    classes = [_FoldShares([0] * n_folds, int(total)) for total in by_group.sum(0)]
    chosen = []
    for new in by_group[order].tolist():
        spreads = [side.list_spreads(n) for side, n in zip(classes, new, strict=True)]
        best = 0
        least = math.inf
        fewest = 0
        for i, (first, second) in enumerate(zip(*spreads, strict=True)):
            spread = (first + second) / 2
            size = classes[0].counts[i] + classes[1].counts[i]
            is_equal = abs(spread - least) <= 1e-8 + 1e-5 * abs(least)  # as `numpy.isclose`
            if spread < least or (is_equal and size < fewest):
                best = i
                least = spread
                fewest = size
        for side, n in zip(classes, new, strict=True):
            side.counts[best] += n
        chosen.append(best)
    fold = np.empty(len(order), np.int64)
    fold[order] = chosen
    return fold


@dataclass
class _FoldShares:
    """Count the records of a class in each fold. total: the class's records in all folds."""

    counts: list[int]
    total: int

    def list_spreads(self, new: int) -> list[float]:
        """Return, for each fold, the standard deviation of the folds' shares if it got `new`."""
        shares = [count / self.total for count in self.counts]
        if not new:
            return [_compute_spread(shares)] * len(shares)
        spreads = []
        for i, count in enumerate(self.counts):
            shares[i] = (count + new) / self.total
            spreads.append(_compute_spread(shares))
            shares[i] = count / self.total
        return spreads


def _compute_spread(values: Sequence[float]) -> float:
    """Return the standard deviation with the roundings of `numpy.std`."""
    mean = functools.reduce(operator.add, values) / len(values)
    squares = [(value - mean) * (value - mean) for value in values]
    return math.sqrt(functools.reduce(operator.add, squares) / len(values))


def count_cross_fit_folds(member: Bools, group: Ints) -> int:
    """Return the number of folds, at most 5, that keep related records together.

    Each group of related records stays in one fold, and each fold has members and non-members.
    """
    return min(FOLDS, *(len(np.unique(group[member == side])) for side in (True, False)))


def standardise_columns(values: Floats) -> Floats:
    """Scale each column to mean 0 and standard deviation 1; a constant column becomes 0."""
    away = values - values.mean(0)
    spread = away.std(0)
    return np.divide(away, spread, out=np.zeros_like(away), where=spread > 0)
