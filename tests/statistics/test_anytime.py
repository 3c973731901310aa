"""Bounds by betting: against bets written out, cases by hand, and coverage at every look, in any
order."""

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from auditor.statistics.anytime import (
    CAPITAL,
    STAKES,
    bound_betting_excess,
    bound_betting_mean,
    log_betting_capital,
    yield_look_sizes,
)
from auditor.statistics.intervals import clopper_pearson

LEVEL = 0.05
PATHS = 2000


def naive_low(values: list[float], level: float) -> float:
    """Each gambler's capital bet by bet, against every mean of a grid: the largest that is
    refuted."""
    refuted = 0.0
    for m in np.arange(0.0005, 1, 0.0005):
        capitals = []
        for stake in STAKES:
            capital = 1.0
            for x in values:
                capital *= 1 + stake / m * (x - m)
            capitals.append(capital)
        if sum(c * part for c, part in zip(capitals, CAPITAL, strict=True)) >= 1 / level:
            refuted = max(refuted, float(m))
    return refuted


@pytest.mark.parametrize(
    "values",
    [
        [1.0] * 5,
        [0.0] * 4 + [1.0] * 3,
        [0.1, 0.9, 0.9, 0.35, 0.0, 1.0, 0.9],
        [0.02, 0.01, 0.03] * 5,
    ],
)
def test_a_bound_is_that_of_bets_written_out(values: list[float]) -> None:
    seen = bound_betting_mean(np.array(values))
    assert seen.low(LEVEL) == pytest.approx(naive_low(values, LEVEL), abs=0.0006)
    assert 1 - seen.high(LEVEL) == pytest.approx(
        naive_low([1 - x for x in values], LEVEL), abs=0.0006
    )


def test_each_stake_is_fair_at_the_mean_and_loses_below_it() -> None:
    """The whole proof: the expected factor of a bet is 1 where the mean is m, and less where it is
    less."""
    for m in (0.01, 0.3, 0.9):
        heads, tails = 1 - STAKES + STAKES / m, 1 - STAKES
        assert m * heads + (1 - m) * tails == pytest.approx(1)
        assert (0.9 * m * heads + (1 - 0.9 * m) * tails < 1).all()
    assert STAKES.min() > 0
    assert STAKES.max() == 1 and CAPITAL.sum() == pytest.approx(1) and (CAPITAL > 0).all()


def test_zeros_alone_are_known_by_hand() -> None:
    """After t zeros a stake f against a mean of at least h has grown to (1 + f h / (1 - h))^t."""
    h, t = 0.05, 80
    by_hand = CAPITAL @ (1 + STAKES * h / (1 - h)) ** t
    assert log_betting_capital(np.array([1.0]), np.array([t]), 1 - h) == pytest.approx(
        math.log(by_hand)
    )
    assert (
        bound_betting_mean(np.zeros(t)).high(LEVEL)
        < 0.05
        < bound_betting_mean(np.zeros(t - 20)).high(LEVEL)
    )
    assert bound_betting_mean(np.zeros(t)).low(LEVEL) == 0


def test_nothing_seen_says_nothing() -> None:
    seen = bound_betting_mean(np.empty(0))
    assert math.isnan(seen.value)
    assert (seen.low(LEVEL), seen.high(LEVEL)) == (0, 1)


def test_bounds_do_not_depend_on_the_order_and_lie_around_the_mean() -> None:
    values = np.random.default_rng(0).beta(0.2, 1, 300)
    one, other = bound_betting_mean(values), bound_betting_mean(values[::-1].copy())
    assert one.low(LEVEL) == other.low(LEVEL) < one.value < one.high(LEVEL)
    assert one.low(0.01) < one.low(LEVEL)


def test_a_paired_difference_lies_in_minus_one_to_one() -> None:
    alike = bound_betting_mean(np.zeros(400), minimum=-1.0)
    assert alike.low(LEVEL) == pytest.approx(-alike.high(LEVEL))
    assert -0.05 < alike.low(LEVEL) < 0
    assert bound_betting_mean(np.ones(60), minimum=-1.0).low(LEVEL) > 0.8


def test_what_is_above_non_members_is_bounded_by_both_sides() -> None:
    own, other = bound_betting_mean(np.ones(50)), bound_betting_mean(np.zeros(50))
    excess = bound_betting_excess(own, other)
    assert (excess.value, excess.n) == (1, 100)
    assert excess.low(LEVEL) == own.low(LEVEL / 2) - other.high(LEVEL / 2)
    assert excess.high(LEVEL) == 1


def test_looks_are_at_fixed_counts_up_to_all() -> None:
    assert list(yield_look_sizes(0)) == []
    assert list(yield_look_sizes(10)) == [10]
    assert list(yield_look_sizes(30)) == [16, 18, 20, 22, 25, 28, 30]
    assert set(yield_look_sizes(300)) - {300} < set(yield_look_sizes(10_000))


def ever_missed(paths: NDArray[np.float64], truth: float) -> tuple[float, float]:
    """(paths, n) of zeros and ones -> the shares of them whose lower, and upper, bound ever misses
    the truth."""
    n = paths.shape[1]
    missed = np.zeros((2, len(paths)), dtype=bool)
    for at in yield_look_sizes(n):
        hits = paths[:, :at].sum(1).astype(np.int64)
        counts = np.stack([at - hits, hits], axis=1)
        for side, values, mean in ((0, [0.0, 1.0], truth), (1, [1.0, 0.0], 1 - truth)):
            missed[side] |= log_betting_capital(np.array(values), counts, mean) >= -math.log(LEVEL)
    return float(missed[0].mean()), float(missed[1].mean())


@pytest.mark.parametrize("truth", [0.001, 0.01, 0.05, 0.2, 0.5])
def test_coverage_at_every_look(truth: float) -> None:
    paths = np.random.default_rng(1).random((PATHS, 2000)) < truth
    assert max(ever_missed(paths.astype(float), truth)) <= LEVEL + 3 * math.sqrt(
        LEVEL * (1 - LEVEL) / PATHS
    )


def test_exact_intervals_at_every_look_do_not_cover() -> None:
    """What the sequence is for: the check above fails the interval of a fixed size."""
    truth, missed = 0.05, np.zeros(PATHS, dtype=bool)
    paths = np.random.default_rng(1).random((PATHS, 2000)) < truth
    for at in yield_look_sizes(2000):
        hits = paths[:, :at].sum(1)
        low = np.array([clopper_pearson(k, at, 1 - 2 * LEVEL)[0] for k in range(hits.max() + 1)])
        missed |= low[hits] > truth
    assert missed.mean() > 2 * LEVEL


@pytest.mark.parametrize("of", [100, 300, 1000])
def test_coverage_of_a_finite_set_in_random_order(of: int) -> None:
    """Secrets are asked in random order and never twice: the share of all of them is covered as
    well."""
    rng = np.random.default_rng(2)
    for hits in (1, of // 20, of // 4):
        whole = np.zeros((PATHS, of))
        whole[:, :hits] = 1
        assert max(ever_missed(rng.permuted(whole, axis=1), hits / of)) <= LEVEL


def test_coverage_of_probabilities_at_every_look() -> None:
    """Extraction probabilities: mostly near nothing, sometimes near one."""
    rng, truth, missed, paths = np.random.default_rng(3), 0.05 / 0.55, 0, 300
    for _ in range(paths):
        values = rng.beta(0.05, 0.5, 600)
        seen = (
            log_betting_capital(values[:at], np.ones(at, dtype=np.int64), truth)
            for at in yield_look_sizes(600)
        )
        missed += any(found >= -math.log(LEVEL) for found in seen)
    assert missed / paths <= LEVEL
