"""Compute tails and quantiles of distributions with `scipy.special`.

`scipy.stats` has these functions too, but importing it takes longer than running a gate or a
report.
"""

from __future__ import annotations

from statistics import NormalDist
from typing import Any

import numpy as np
import scipy
from numpy.typing import ArrayLike

from auditor.core.arrays import Floats, Ints


def compute_normal_quantile(p: float) -> float:
    """Return the standard normal quantile of p in (0, 1) without importing scipy.special."""
    return NormalDist().inv_cdf(p)


def compute_binomial_cdf(k: ArrayLike, n: ArrayLike, p: ArrayLike) -> Floats:
    """Return P[B <= k] for a binomial B of n draws with probability p.

    The result is 0 for k < 0, and 1 for k >= n.
    """
    return _compute_binomial_tail(scipy.special.betaincc, k, n, p, at_end=1.0)


def compute_binomial_sf(k: ArrayLike, n: ArrayLike, p: ArrayLike) -> Floats:
    """Return P[B > k] for a binomial B of n draws with probability p.

    The result is 1 for k < 0, and 0 for k >= n.
    """
    return _compute_binomial_tail(scipy.special.betainc, k, n, p, at_end=0.0)


def compute_binomial_pmf(k: Ints, n: int, p: Floats) -> Floats:
    """Return P[B = k] for a binomial B of n draws with probability p."""
    log_ways = compute_log_choose(n, k)
    return np.exp(log_ways + scipy.special.xlogy(k, p) + scipy.special.xlog1py(n - k, -p))


def compute_hypergeometric_cdf(k: int, population: int, hits: int, n: int) -> float:
    """Return P[H <= k] for the number H of hits among n records drawn without replacement.

    population: number of records; `hits` of them are hits.
    """
    least = max(0, n - (population - hits))
    drawn_hits = np.arange(least, min(k, n, hits) + 1)
    log_ways = compute_log_choose(hits, drawn_hits) + compute_log_choose(
        population - hits, n - drawn_hits
    )
    return min(1.0, float(np.exp(log_ways - compute_log_choose(population, n)).sum()))


def compute_hypergeometric_sf(k: int, population: int, hits: int, n: int) -> float:
    """Return P[H > k]; see `compute_hypergeometric_cdf`."""
    # More than k hits are at most n - k - 1 misses.
    return compute_hypergeometric_cdf(n - k - 1, population, population - hits, n)


def compute_sign_test_p_value(k: int, n: int) -> float:
    """Return the exact two-sided p-value of k heads among n fair coins."""
    return min(1.0, 2 * float(compute_binomial_cdf(min(k, n - k), n, 0.5)))


def compute_homogeneity_p_value(counts: ArrayLike) -> float:
    """Return Pearson's chi-square p-value for "all rows have the same distribution".

    counts: (rows, columns) without empty rows or columns. With one degree of freedom, the
    statistic has Yates's correction.
    """
    table = np.asarray(counts, dtype=float)
    expected = table.sum(1, keepdims=True) * table.sum(0, keepdims=True) / table.sum()
    distance = np.abs(table - expected)
    n_free = (table.shape[0] - 1) * (table.shape[1] - 1)
    if n_free == 1:
        distance = distance - np.minimum(0.5, distance)
    return float(scipy.special.chdtrc(n_free, (distance**2 / expected).sum()))


def find_binomial_quantile(share: float, n: ArrayLike, p: ArrayLike) -> Ints:
    """Return the smallest k with P[B <= k] >= share; B is binomial, n draws of probability p."""
    return _find_smallest_count(lambda k: compute_binomial_cdf(k, n, p) >= share, n, p)


def find_binomial_upper_quantile(share: float, n: ArrayLike, p: ArrayLike) -> Ints:
    """Return the smallest k with P[B > k] <= share; B is binomial, n draws of probability p."""
    return _find_smallest_count(lambda k: compute_binomial_sf(k, n, p) <= share, n, p)


def compute_log_choose(n: ArrayLike, k: ArrayLike) -> Floats:
    """Return log(n choose k), in nats."""
    k = np.asarray(k)
    n = np.asarray(n)
    log_ways: Floats = (
        scipy.special.gammaln(n + 1)
        - scipy.special.gammaln(k + 1)
        - scipy.special.gammaln(n - k + 1)
    )
    return log_ways


def _compute_binomial_tail(
    incomplete_beta: Any, k: ArrayLike, n: ArrayLike, p: ArrayLike, at_end: float
) -> Floats:
    """Return a binomial tail by a regularised incomplete beta function.

    For example, P[B > k] = I_p(k + 1, n - k). at_end: the tail's value for k >= n.
    """
    k = np.asarray(k)
    n = np.asarray(n)
    # `np.clip` takes twice as long for a few numbers, of which audits have many.
    inside = np.minimum(np.maximum(k, 0), np.maximum(n - 1, 0))
    tail = incomplete_beta(inside + 1.0, np.maximum(n - inside, 1.0), p)
    return np.where(k < 0, 1 - at_end, np.where(k >= n, at_end, tail))


def _find_smallest_count(is_reached: Any, n: ArrayLike, p: ArrayLike) -> Ints:
    """Bisect for the smallest count for which `is_reached` is True, all entries at once."""
    high = np.broadcast_arrays(np.asarray(n, dtype=np.int64), p)[0].copy()
    low = np.full_like(high, -1)
    while np.any(high - low > 1):
        middle = (low + high) // 2
        reached = is_reached(middle)
        low = np.where(reached, low, middle)
        high = np.where(reached, middle, high)
    return high
