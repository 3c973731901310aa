"""Measure the recall of ranked guesses before a number of wrong guesses, with intervals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from auditor.core.arrays import Bools, Floats, Ints
from auditor.core.result import Measurement
from auditor.statistics import bootstrap
from auditor.statistics.intervals import measure_share
from auditor.statistics.judging import Outcome


def rank_guesses(hit: Bools, score: Floats) -> tuple[Bools, Ints]:
    """Sort the hits by decreasing score, and count the wrong guesses before each guess.

    Among equal scores, wrong guesses come first, so that ties never raise recall.
    """
    order = np.lexsort((hit, -score))
    ranked = hit[order]
    return ranked, np.cumsum(~ranked) - ~ranked


def mark_solved_secrets(hit: Bools, score: Floats, errors: int) -> Bools:
    """Return whether each secret is hit before the `errors`-th wrong guess, (secrets,)."""
    ranked, before = rank_guesses(hit, score)
    order = np.argsort(np.lexsort((hit, -score)))  # of the secrets
    solved: Bools = (ranked & (before < errors))[order]
    return solved


def measure_error_recall(name: str, outcome: Outcome, errors: int) -> Measurement:
    """Return the share of secrets solved before the `errors`-th wrong guess.

    Recall@100 is this share for errors=100.
    """
    hit, _ = rank_guesses(outcome.hit, outcome.score)
    return measure_ranked_recall(name, np.arange(len(hit)), hit, len(hit), errors)


def measure_ranked_recall(
    name: str, secret: Ints, right: Bools, n: int, errors: int
) -> Measurement:
    """Return the share of n secrets with a right guess before the `errors`-th wrong guess.

    Guesses are sorted from the most to the least certain. secret: (guesses,) index of the guessed
    secret, from 0 to n - 1; right: (guesses,) True for a right guess. A secret may have any number
    of guesses: it is solved at most once, but each wrong guess is an error. The interval is a
    bootstrap over secrets with all their guesses. It is Clopper-Pearson's if the bootstrap interval
    has no width or there are fewer than `errors` wrong guesses. With one guess a secret, it
    contains Clopper-Pearson's: the bootstrap of few solved secrets is too short.
    """
    # (solved secrets,) the guess that solves each secret
    solver = find_first_right_guesses(secret, right)

    def solvers(weight: Ints) -> Ints:
        """Return the indices of the right guesses that solve secrets in a bootstrap resample.

        weight: (n,) how often each secret occurs in the resample.
        """
        wrong = weight[secret] * ~right
        counted: Ints = solver[(np.cumsum(wrong) - wrong)[solver] < errors]
        return counted

    solved = np.zeros(n, dtype=bool)
    solved[secret[solvers(np.ones(n, dtype=np.int64))]] = True
    has_several_guesses = len(np.unique(secret)) < len(secret)
    if int((~right).sum()) < errors:
        equal_metric = "recall"
        if has_several_guesses:
            equal_metric = "the recall of all guesses"
        return measure_share(name, solved, f"fewer than {errors} errors: equals {equal_metric}")
    recalls = bootstrap.compute_resampled_statistic(
        n, lambda draws: [draw[secret[solvers(draw)]].sum() / n for draw in draws], name
    )
    low, high = bootstrap.compute_percentile_interval(recalls)
    exact = measure_share(name, solved)
    if low == high or not has_several_guesses:
        return replace(exact, low=min(low, exact.low), high=max(high, exact.high))
    return replace(exact, low=low, high=high)


def find_first_right_guesses(secret: Ints, right: Bools) -> Ints:
    """Return the index of each solved secret's first right guess, in the order of the guesses."""
    hits = np.flatnonzero(right)
    # `unique` returns the first index of each secret, sorted by secret: sort by index again.
    return hits[np.sort(np.unique(secret[hits], return_index=True)[1])]


def compute_resampled_recall(hit: Bools, score: Floats, draws: NDArray[Any], errors: int) -> Floats:
    """Return the recall before `errors` wrong guesses in each resample, of shape (resamples,).

    hit, score: (n,); draws: (resamples, n) how often each secret was drawn.
    """
    order = np.lexsort((hit, -score))  # of equal scores, wrong guesses come first
    right = hit[order]
    ranked_draws = draws[:, order]
    wrong = ranked_draws * ~right
    solved: Floats = (ranked_draws * right * ((np.cumsum(wrong, axis=1) - wrong) < errors)).sum(
        1
    ) / ranked_draws.sum(1)
    return solved
