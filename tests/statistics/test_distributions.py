"""Tails and quantiles of binomial and hypergeometric distributions, against `scipy.stats`."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from auditor.statistics import distributions, intervals

SIZES, SHARES = (1, 5, 59, 1000, 10**6), (0.0, 1e-6, 0.01, 0.5, 0.999, 1.0)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("p", SHARES)
def test_tails_and_quantiles_are_those_of_scipy(n: int, p: float) -> None:
    counts = np.unique([-1, 0, 1, n // 2, n - 1, n, n + 1, int(n * p)])
    close = {"rel": 1e-9, "abs": 1e-300}
    expected = stats.binom.cdf(counts, n, p)
    assert distributions.compute_binomial_cdf(counts, n, p) == pytest.approx(expected, **close)
    expected = stats.binom.sf(counts, n, p)
    assert distributions.compute_binomial_sf(counts, n, p) == pytest.approx(expected, **close)
    inside = counts[(counts >= 0) & (counts <= n)]
    mass = distributions.compute_binomial_pmf(inside, n, np.array(p))
    assert mass == pytest.approx(stats.binom.pmf(inside, n, p), rel=1e-8, abs=1e-300)
    for share in (0.001, 0.025, 0.5, 0.975):
        assert distributions.find_binomial_quantile(share, n, p) == stats.binom.ppf(share, n, p)
        assert distributions.find_binomial_upper_quantile(share, n, p) == stats.binom.isf(
            share, n, p
        )


def test_a_sign_test_is_exact() -> None:
    for n in (1, 2, 7, 30):
        for k in range(n + 1):
            expected = stats.binomtest(k, n).pvalue
            assert distributions.compute_sign_test_p_value(k, n) == pytest.approx(expected)
    assert distributions.compute_sign_test_p_value(0, 0) == 1.0


@pytest.mark.parametrize(
    "table",
    [[[9, 4], [3, 12]], [[5, 5], [5, 6]], [[30, 10, 2], [8, 20, 7]], [[1, 2], [3, 4], [9, 1]]],
)
def test_homogeneity_is_tested_as_by_scipy(table: list[list[int]]) -> None:
    expected = stats.chi2_contingency(table).pvalue
    assert distributions.compute_homogeneity_p_value(table) == pytest.approx(expected, rel=1e-12)


def test_quantiles_and_exact_intervals_without_scipy_are_those_of_scipy() -> None:
    assert stats.norm.ppf((1 + intervals.CONFIDENCE) / 2) == intervals.Z
    for p in (1e-12, 0.025, 0.4, 0.5, 0.999):
        assert distributions.compute_normal_quantile(p) == pytest.approx(
            stats.norm.ppf(p), rel=1e-14
        )
    for n in (1, 59, 10**6):
        for confidence in (0.95, 1 - 1e-9):
            exact = stats.binomtest(0, n).proportion_ci(confidence)
            assert intervals.clopper_pearson(0, n, confidence) == pytest.approx(exact, rel=1e-9)
            exact = stats.binomtest(n, n).proportion_ci(confidence)
            assert intervals.clopper_pearson(n, n, confidence) == pytest.approx(exact, rel=1e-9)
    assert intervals.clopper_pearson(0, 0) == (0, 1)
    assert intervals.clopper_pearson(0, 9, 1.0) == (0, 1)


@pytest.mark.parametrize("population", [1, 7, 60, 5_000, 1_000_000])
def test_hypergeometric_tails_are_those_of_scipy(population: int) -> None:
    rng = np.random.default_rng(population)
    for _ in range(40):
        hits, n = (int(x) for x in rng.integers(0, population + 1, 2))
        n = min(n, 20_000)
        k = int(rng.integers(-1, n + 2))
        law = stats.hypergeom(population, hits, n)
        cdf = distributions.compute_hypergeometric_cdf(k, population, hits, n)
        sf = distributions.compute_hypergeometric_sf(k, population, hits, n)
        assert cdf == pytest.approx(law.cdf(k), rel=1e-6, abs=1e-9)
        assert sf == pytest.approx(law.sf(k), rel=1e-6, abs=1e-9)
