"""Recall of guesses ranked by their scores, while so many wrong ones are allowed: alone and at
every resample.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from auditor.core.arrays import Bools, Floats, Ints
from auditor.core.result import Measurement
from auditor.statistics import bootstrap
from auditor.statistics.intervals import measure_share
from auditor.statistics.judging import Outcome


def rank_guesses(
    hit: Bools,
    score: Floats,
) -> tuple[Bools, Ints]:
    """Hits by falling score (equal scores: wrong ones first: ties never flatter), and wrong ones
    before each.
    """
    order = np.lexsort((hit, -score))
    ranked = hit[order]
    return ranked, np.cumsum(~ranked) - ~ranked


def measure_error_recall(name: str, outcome: Outcome, errors: int) -> Measurement:
    """Share of secrets solved by guesses that rank before the `errors`-th wrong one (Recall@100:
    errors=100).
    """
    hit, _ = rank_guesses(outcome.hit, outcome.score)
    return measure_ranked_recall(name, np.arange(len(hit)), hit, len(hit), errors)


def measure_ranked_recall(
    name: str, secret: Ints, right: Bools, n: int, errors: int
) -> Measurement:
    """Share of n secrets that a right guess with fewer than `errors` wrong ones before it solves.

    secret, right: (guesses,), surest first: whose guess it is, as an index below n, and whether it
    is the answer. A secret may have none or several; it is solved once, while each wrong guess is
    an error. Interval: bootstrap over secrets, each with all its guesses; where it has no width, or
    fewer errors exist, Clopper-Pearson of the same count.
    """
    # (solved secrets,) the guess that solves each
    solver = find_first_right_guesses(secret, right)

    def solvers(weight: Ints) -> Ints:
        """The guesses of `solver` that still count when secret i stands weight[i] times in the
        list.
        """
        wrong = weight[secret] * ~right
        counted: Ints = solver[(np.cumsum(wrong) - wrong)[solver] < errors]
        return counted

    solved = np.zeros(n, dtype=bool)
    solved[secret[solvers(np.ones(n, dtype=np.int64))]] = True
    if int((~right).sum()) < errors:
        if len(np.unique(secret)) == len(secret):
            equal_metric = "recall"
        else:
            equal_metric = "the recall of all guesses"
        return measure_share(
            name,
            solved,
            f"fewer than {errors} errors: equals {equal_metric}",
        )
    recalls = bootstrap.compute_resampled_statistic(
        n, lambda draws: [draw[secret[solvers(draw)]].sum() / n for draw in draws], name
    )
    low, high = bootstrap.compute_percentile_interval(recalls)
    if low == high:
        return measure_share(name, solved)
    return Measurement(name, float(solved.mean()), low, high, n)


def find_first_right_guesses(
    secret: Ints,
    right: Bools,
) -> Ints:
    """Positions, in the order of the guesses, of the first right guess of every secret that has
    one.
    """
    hits = np.flatnonzero(right)
    # `unique` points at the first of each, and sorts by secret: back into the order of the guesses
    return hits[np.sort(np.unique(secret[hits], return_index=True)[1])]


def compute_resampled_recall(hit: Bools, score: Floats, draws: NDArray[Any], errors: int) -> Floats:
    """Recall at `errors` errors of each resample. hit, score: (n,); draws: (resamples, n), how
    often each.
    """
    order = np.lexsort((hit, -score))  # equal scores: wrong ones first
    right = hit[order]
    ranked_draws = draws[:, order]
    wrong = ranked_draws * ~right
    solved: Floats = (ranked_draws * right * ((np.cumsum(wrong, axis=1) - wrong) < errors)).sum(
        1
    ) / ranked_draws.sum(1)
    return solved
