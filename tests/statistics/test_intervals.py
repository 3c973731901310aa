"""Intervals of shares and of their differences: the tables of Newcombe's papers of 1998."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import binomtest, ttest_ind

from auditor.core.errors import AuditError
from auditor.statistics.bounds import count_discordant_pairs
from auditor.statistics.compare import (
    compute_welch_interval,
    measure_mean_difference,
    paired_difference,
)
from auditor.statistics.intervals import (
    clopper_pearson,
    compute_gaffke_interval,
    compute_wilson_interval,
    estimate_mean,
    subtract_nonmember_share,
)
from auditor.statistics.rank_tests import estimate_rank_bits


@pytest.mark.parametrize(
    ("hits", "n", "low", "high"),
    [
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson(hits: int, n: int, low: float, high: float) -> None:
    """Statistics in Medicine 17, 857-872, Table I, method 3; and the mirror of each."""
    assert compute_wilson_interval(hits, n) == pytest.approx((low, high), abs=5.1e-5)
    assert compute_wilson_interval(n - hits, n) == pytest.approx((1 - high, 1 - low), abs=5.1e-5)


@pytest.mark.parametrize(
    ("a", "m", "b", "n", "low", "high"),
    [
        (56, 70, 48, 80, 0.0524, 0.3339),
        (9, 10, 3, 10, 0.1705, 0.8090),
        (0, 10, 0, 20, -0.1611, 0.2775),
    ],
)
def test_a_difference_of_shares(a: int, m: int, b: int, n: int, low: float, high: float) -> None:
    """Statistics in Medicine 17, 873-890, Table II, method 10."""
    found = subtract_nonmember_share("excess", np.arange(m) < a, np.arange(n) < b)
    assert (found.value, found.low, found.high) == pytest.approx(
        (a / m - b / n, low, high), abs=5.1e-5
    )
    assert found.n == m + n


@pytest.mark.parametrize(
    ("wins", "losses", "same", "said"),
    [(6, 1, 13, "0.12"), (1, 6, 13, "0.12"), (9, 0, 11, "0.0039")],
)
def test_a_paired_difference_says_mcnemars_p(wins: int, losses: int, same: int, said: str) -> None:
    """By hand: 2 (1 + 7) / 2^7, and 2 / 2^9; pairs that agree tell nothing of either."""
    first = np.array([True] * wins + [False] * losses + [True, False] * same)
    second = np.array([False] * wins + [True] * losses + [True, False] * same)
    found = measure_mean_difference("recall", "share", first, second)
    assert found.note == f"exact McNemar p = {said}" and found.n == wins + losses + 2 * same
    assert (
        found.value == pytest.approx((wins - losses) / found.n)
        and found.low < found.value < found.high
    )


@pytest.mark.parametrize(
    ("wins", "losses", "n"), [(0, 0, 30), (30, 0, 30), (1, 0, 300), (6, 2, 40), (40, 90, 500)]
)
def test_a_paired_difference_of_hits_is_shown_as_a_gate_decides_it(
    wins: int, losses: int, n: int
) -> None:
    at = np.arange(n)
    new, base = at < wins, (at >= wins) & (at < wins + losses)
    exact = count_discordant_pairs(new, base)
    shown = measure_mean_difference("recall", "share", new, base)
    ends = exact.value, exact.low(0.025), exact.high(0.025)
    assert (shown.value, shown.low, shown.high) == ends
    assert (
        shown == replace(paired_difference(new, base), name="recall") and shown.low < shown.high
    )  # also where all pairs agree


@pytest.mark.parametrize(("ones", "n"), [(3, 40), (20, 40), (39, 40)])
def test_of_zeros_and_ones_it_is_the_exact_interval(ones: int, n: int) -> None:
    found = compute_gaffke_interval((np.arange(n) < ones).astype(float), "shares")
    assert found == pytest.approx(clopper_pearson(ones, n), abs=0.01)


def test_hits_of_the_same_secrets_are_compared_in_pairs() -> None:
    new, base = np.array([1] * 30 + [0] * 70), np.array([1] * 10 + [0] * 90)
    found = paired_difference(new, base)
    assert found.value == pytest.approx(0.2) and found.note.endswith(
        f"{binomtest(20, 20).pvalue:.2g}"
    )
    assert 0.1 < found.low < 0.2 < found.high < 0.3
    assert paired_difference(base, new).value == -found.value
    assert paired_difference(2.5 * new, base).value == pytest.approx(0.65)


@pytest.mark.parametrize(("new", "base"), [([1, 0], [1]), ([], []), ([1, math.nan], [1, 0])])
def test_numbers_of_other_secrets_are_not_compared(new: list[float], base: list[float]) -> None:
    with pytest.raises(AuditError):
        paired_difference(new, base)


@pytest.mark.parametrize("level", [0.025, 0.05, 0.3])
def test_welchs_interval_is_above_0_where_the_one_sided_test_says_higher(level: float) -> None:
    rng, higher = np.random.default_rng(0), 0
    for _ in range(50):
        own, other = rng.normal(0.5, 1, rng.integers(2, 20)), rng.normal(0, 3, rng.integers(2, 20))
        p = ttest_ind(own, other, equal_var=False, alternative="greater").pvalue
        assert (compute_welch_interval(own, other, 1 - 2 * level)[0] > 0) == (p < level)
        higher += p < level
    assert 0 < higher < 50


@pytest.mark.parametrize("own", [[1.0], [2.0, 2.0], [1.0, -math.inf], []])
def test_of_groups_without_a_spread_welch_has_no_interval(own: list[float]) -> None:
    assert np.isnan(compute_welch_interval(np.array(own), np.array([1.0, 1.0]))).all()


@pytest.mark.parametrize("n", [1, 3, 10, 40])
def test_a_mean_of_bits_is_covered_by_few_numbers_too(n: int) -> None:
    """Ranks among 99 alternatives by chance, and numbers of any unit by a normal distribution."""
    rng, misses = np.random.default_rng(n), np.zeros(2)
    places = np.arange(1, 101)
    expected = np.log2(100 / places).mean()
    for _ in range(200):
        p_values = rng.choice(places, n) / 100
        bits = estimate_rank_bits(p_values, np.full(n, 99.0))
        misses[0] += not bits.low <= expected <= bits.high
        score = estimate_mean("score", rng.normal(size=n), "score")
        misses[1] += not score.low <= 0 <= score.high
    assert (misses / 200 <= 0.08).all()


def test_equal_ranks_leave_an_interval() -> None:
    bits = estimate_rank_bits(np.full(20, 0.01), np.full(20, 99.0))
    assert bits.value == bits.high == pytest.approx(math.log2(100)) and bits.low < 0.9 * bits.value


def test_a_rare_large_change_of_members_is_within_the_interval() -> None:
    """One in fifty loses 0.9: most samples of 30 have none."""
    rng, misses = np.random.default_rng(0), 0
    for _ in range(100):
        noise = rng.normal(0, 0.005, (2, 30))
        new = 0.5 + np.where(rng.random(30) < 0.02, 0.4, 0.0) + noise[0]
        floor = np.full(30, 0.5) + noise[1], np.full(30, 0.5)
        change = measure_mean_difference("p", "probability", new, np.full(30, 0.5), floor)
        misses += not change.low <= 0.008 <= change.high
    assert misses <= 5
