"""A weighted share of a finite whole: solved cases, and the coverage of its interval by enumeration
and simulation."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import hypergeom

from auditor.statistics.strata import (
    StratumCount,
    compute_finite_population_interval,
    estimate_population_share,
)


def test_a_stratum_that_was_asked_whole_is_known_and_one_that_was_not_asked_may_be_anything() -> (
    None
):
    assert compute_finite_population_interval(StratumCount(12, 12, 3)) == (3, 3)
    assert compute_finite_population_interval(StratumCount(12, 0, 0)) == (0, 12)


def test_none_found_of_a_part_leaves_what_the_exact_test_leaves() -> None:
    """P(no hit among 38 of 123 | K) > 2.5% up to K = 9: 0.0327, and 0.0220 at 10."""
    assert compute_finite_population_interval(StratumCount(123, 38, 0)) == (0, 9)
    assert hypergeom.cdf(0, 123, 9, 38) > 0.025 >= hypergeom.cdf(0, 123, 10, 38)


def test_the_copied_records_count_by_their_part_of_the_whole() -> None:
    value, low, high = estimate_population_share(
        [StratumCount(12, 12, 12), StratumCount(123, 29, 0)]
    )
    assert value == low == pytest.approx(12 / 135)
    assert high == pytest.approx((12 + 12) / 135)
    assert np.isnan(estimate_population_share([StratumCount(12, 12, 0), StratumCount(3, 0, 0)])[0])


@pytest.mark.parametrize(("size", "asked"), [(10, 1), (30, 8), (60, 59), (25, 25)])
def test_the_interval_of_a_stratum_covers_every_truth(size: int, asked: int) -> None:
    """By enumeration: for each number of hits in the whole, the probability of an interval that
    holds it."""
    ends = [
        compute_finite_population_interval(StratumCount(size, asked, hits))
        for hits in range(asked + 1)
        if hits <= asked
    ]
    for truth in range(size + 1):
        p = hypergeom.pmf(np.arange(asked + 1), size, truth, asked)
        covered = sum(p[hits] for hits, (low, high) in enumerate(ends) if low <= truth <= high)
        assert covered >= 0.95 - 1e-12


def test_the_weighted_interval_covers_with_strata_asked_in_part() -> None:
    noise, sizes, asked = np.random.default_rng(3), (6, 20, 80), (6, 9, 15)
    for hits in ((0, 0, 0), (6, 3, 1), (1, 20, 40), (0, 1, 79)):
        truth, covered = sum(hits) / sum(sizes), 0
        for _ in range(400):
            counts = [
                StratumCount(size, n, int(noise.hypergeometric(k, size - k, n)))
                for size, n, k in zip(sizes, asked, hits, strict=True)
            ]
            _, low, high = estimate_population_share(counts)
            covered += low - 1e-12 <= truth <= high + 1e-12
        assert covered >= 0.95 * 400 - 3 * np.sqrt(400 * 0.05 * 0.95)


def test_more_hits_than_asked_are_refused() -> None:
    with pytest.raises(ValueError, match="hits <= asked"):
        StratumCount(5, 2, 3)
