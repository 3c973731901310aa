"""Bound a mean by betting, so that a run can stop early.

The bounds hold however often the data are looked at. The run queries secrets in random order. A
gambler starts with capital 1 and bets against the hypothesis that numbers x in [0, 1] have a mean
of at most m. Betting a share f of the capital on each x multiplies the capital by 1 - f + f x / m.
If the hypothesis is true, the capital does not grow on average. By Ville's inequality it then ever
reaches 1 / level with probability at most `level`.

Waudby-Smith and Ramdas (2024, arXiv 2010.09686) choose each share f from the earlier numbers. Here
all shares f of a fixed grid are bet in parallel and their capitals averaged, as in Cover's
universal portfolio (Ryu and Bhatt, 2207.12382). A bound therefore does not depend on the order of
the secrets, and can be recomputed from the value recorded for each secret. Like bounds at a fixed
sample size, they are for the mean of the population from which the secrets are sampled.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from auditor.core.arrays import Floats, Ints
from auditor.statistics.bounds import BoundedNumber
from auditor.statistics.one_run import find_largest_refuted_value

# number of secrets at the first look, and growth of that number from look to look
_FIRST = 16
_GROWTH = 1.1
_RUNS = 1000  # number of simulated runs
# Share of the capital that the largest stake bets. This stake gains most if nothing leaks, but the
# first leak takes all of its share.
_ALL = 0.3
# few stakes: each has a larger share of the capital, so the best stake has more
STAKES = np.append(np.geomspace(0.008, 0.7, 8), 1.0)
CAPITAL = np.append(np.full(8, (1 - _ALL) / 8), _ALL)


def yield_look_sizes(n: int) -> Iterator[int]:
    """Yield how many secrets have been queried at each look at the results.

    These numbers depend only on n, the total number of secrets.
    """
    at = _FIRST
    while at < n:
        yield at
        at = math.ceil(at * _GROWTH)
    if n:
        yield n


def log_betting_capital(values: Floats, counts: Ints, mean: float) -> Floats:
    """Return the log-capital of a gambler who bets that the true mean exceeds `mean`.

    A large capital refutes "the true mean is at most `mean`". The gambler divides the capital among
    several stakes, so the result is the log of an average over stakes.

    Args:
        values: (v,) distinct numbers in [0, 1].
        counts: (..., v) the number of times that each value occurred.
        mean: the mean to refute.

    Returns:
        One log-capital for each row of `counts`, of shape (...).
    """
    with np.errstate(divide="ignore"):  # the largest stake loses everything at x = 0
        log_growth = np.log(1 - STAKES + STAKES * (values / mean)[:, None])  # (v, stakes)
    # Replace -inf by a finite number: a count of 0 times -inf would be NaN.
    log_growth[:, -1] = np.where(np.isinf(log_growth[:, -1]), -1e300, log_growth[:, -1])
    log_capital = counts @ log_growth
    # Subtract the peak before exp and add it after log: exp itself would underflow or overflow.
    peak = log_capital.max(-1, keepdims=True)
    averaged: Floats = peak[..., 0] + np.log(np.exp(log_capital - peak) @ CAPITAL)
    return averaged


def bound_betting_mean(values: Floats, minimum: float = 0.0) -> BoundedNumber:
    """Return the mean of numbers in [minimum, 1] with one-sided bounds, valid at every look."""
    # values scaled to [0, 1], and their counts, each of shape (v,)
    distinct, counts = np.unique((values - minimum) / (1 - minimum), return_counts=True)

    def low(level: float) -> float:
        return minimum + (1 - minimum) * _compute_lower_mean_bound(distinct, counts, level)

    def high(level: float) -> float:
        # 1 - x is in [0, 1] too: the upper bound of the mean of x is 1 minus the lower bound of its
        # mean.
        return 1 - (1 - minimum) * _compute_lower_mean_bound(1 - distinct, counts, level)

    mean = math.nan
    if len(values):
        mean = float(values.mean())
    return BoundedNumber(mean, len(values), low, high)


def _compute_lower_mean_bound(values: Floats, counts: Ints, level: float) -> float:
    """Return the largest m for which "the mean is at most m" is rejected; 0 if none is.

    level: the significance level.
    """
    most = float(values @ counts) / max(1, int(counts.sum()))
    if not most > 0:
        return 0.0

    def is_refuted(mean: float) -> bool:
        # Some number is above 0, so the mean is not 0.
        return mean == 0 or bool(log_betting_capital(values, counts, mean) >= -math.log(level))

    # The capital falls as the mean rises, so the refuted means are all those below one point.
    return find_largest_refuted_value(is_refuted, most, close=most / 2**40)


def simulate_stopping_sizes(
    values: Floats,
    odds: Floats,
    mean: float,
    level: float,
    most: int,
    runs: int = _RUNS,
    seed: int = 0,
) -> Ints:
    """Simulate how many secrets each run queries before it rejects "the mean is at most `mean`".

    The test is by betting: it may stop after any number of secrets.

    Args:
        values: (v,) the possible values of a secret.
        odds: (v,) their true probabilities.
        mean: the mean to refute.
        level: the significance level.
        most: largest number of secrets; a run that has not refuted by then gets 2 * most.
        runs: number of simulated runs.
        seed: seed of the simulation.

    Returns:
        One number of secrets per run, of shape (runs,).
    """
    rng = np.random.default_rng(seed)
    at = np.array([*yield_look_sizes(most)])
    # (runs, looks, v): cumulative counts of new values. All looks of a simulated run see the same
    # secrets.
    counts = rng.multinomial(np.diff(at, prepend=0), odds, size=(runs, len(at))).cumsum(axis=1)
    refuted = log_betting_capital(values, counts, max(mean, 1e-9)) >= -math.log(level)
    sizes: Ints = np.where(refuted.any(axis=1), at[refuted.argmax(axis=1)], 2 * most)
    return sizes


def bound_betting_excess(group: BoundedNumber, reference_group: BoundedNumber) -> BoundedNumber:
    """Return the mean of `group` minus the mean of `reference_group`, unpaired.

    Each bound combines a bound on each group's mean, both at half the significance level.
    """
    return BoundedNumber(
        group.value - reference_group.value,
        group.n + reference_group.n,
        lambda level: group.low(level / 2) - reference_group.high(level / 2),
        lambda level: group.high(level / 2) - reference_group.low(level / 2),
    )
