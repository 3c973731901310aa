"""The convex frontier by hand and by a slow twin, rates against `roc`, and how seldom a winner is
named in vain."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from auditor.core.secret_randomness import make_keyed_generator
from auditor.statistics import bootstrap, frontier, intervals
from auditor.statistics.bounds import count_discordant_pairs
from auditor.statistics.compare import resample_paired_means
from auditor.statistics.frontier import (
    ModelLeakage,
    find_convex_frontier,
    select_possibly_least_leaking,
)
from auditor.statistics.roc import auc, tpr_at_fpr

# --- the convex frontier ---


@pytest.mark.parametrize(
    ("points", "corners"),
    [
        ([(1, 9), (2, 4), (3, 1)], [0, 1, 2]),
        ([(1, 9), (2, 6), (3, 1)], [0, 2]),  # above the line between its neighbours
        ([(1, 9), (2, 5), (3, 1)], [0, 2]),  # on it
        ([(1, 9), (2, 10), (3, 1), (4, 1)], [0, 2]),  # dominated
        ([(3, 1), (1, 9), (2, 4)], [1, 2, 0]),
        ([(1, 5), (1, 3), (1, 3)], [1]),
        ([(1, 1)], [0]),
        ([], []),
    ],
)
def test_corners_by_hand(points: list[tuple[float, float]], corners: list[int]) -> None:
    assert find_convex_frontier(points) == corners


def slow_corners(points: list[tuple[int, int]]) -> set[tuple[int, int]]:
    """Points that no other dominates, and that no line between two others passes at or below; whole
    numbers."""

    def is_corner(p: tuple[int, int]) -> bool:
        others = set(points) - {p}
        if any(q[0] <= p[0] and q[1] <= p[1] for q in others):
            return False
        lines = ((a, b) for a in others for b in others if a[0] < p[0] < b[0])
        return not any(
            (b[1] - a[1]) * (p[0] - a[0]) <= (p[1] - a[1]) * (b[0] - a[0]) for a, b in lines
        )

    return {p for p in points if is_corner(p)}


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=12))
def test_corners_are_those_of_the_slow_twin(points: list[tuple[int, int]]) -> None:
    found = [points[i] for i in find_convex_frontier(points)]
    assert len(found) == len(set(found)) and set(found) == slow_corners(points)


@given(st.lists(st.tuples(st.floats(-5, 5), st.floats(0, 1)), min_size=1, max_size=30))
def test_no_point_is_better_than_a_corner_or_below_the_line_between_two(
    points: list[tuple[float, float]],
) -> None:
    corners = [points[i] for i in find_convex_frontier(points)]
    assert not any(q != p and q[0] <= p[0] and q[1] <= p[1] for p in corners for q in points)
    for (x0, y0), (x1, y1) in pairwise(corners):
        assert all(
            y >= y0 + (y1 - y0) * (x - x0) / (x1 - x0) - 1e-9 for x, y in points if x0 < x < x1
        )


# --- numbers of points ---


def test_a_difference_is_what_a_gate_decides_on() -> None:
    rng = np.random.default_rng(3)
    values = rng.random((2, 80)) ** 4
    one, other = frontier.estimate_mean_leakages(values)
    ours, theirs = (
        frontier.compare_paired_leakage(one, other),
        resample_paired_means(values[0], values[1]),
    )
    assert ours.value == pytest.approx(theirs.value)
    for level in (0.025, 0.2):
        assert (ours.low(level), ours.high(level)) == pytest.approx(
            (theirs.low(level), theirs.high(level)), abs=0.01
        )


def test_shares_are_held_to_their_exact_interval() -> None:
    hits = np.zeros((2, 40))
    hits[0, :6] = 1
    one, other = frontier.estimate_mean_leakages(hits)
    exact = count_discordant_pairs(hits[0] == 1, hits[1] == 1)
    assert frontier.compare_paired_leakage(one, other).low(0.01) <= exact.low(0.01)
    assert other.leakage_measurement("recall", "share").high == pytest.approx(
        intervals.clopper_pearson(0, 40)[1]
    )
    assert one.leakage_measurement("recall", "share").low >= 0


def test_rates_are_those_of_every_single_resample() -> None:
    """The slow twin: `roc.tpr_at_fpr` on each resample, written out."""
    rng = np.random.default_rng(5)
    # ties
    own, others = (
        rng.integers(0, 40, 30).astype(float),
        rng.integers(-20, 20, 50).astype(float),
    )
    [leak] = frontier.estimate_tpr_leakages([[(own, others)]], 0.05)
    members = next(bootstrap.draw_resample_blocks(30, bootstrap.MEMBERS, frontier.RESAMPLES))
    nonmembers = next(bootstrap.draw_resample_blocks(50, bootstrap.NONMEMBERS, frontier.RESAMPLES))
    slow = [
        tpr_at_fpr(np.repeat(own, a), np.repeat(others, b), 0.05).value
        for a, b in zip(members[:200], nonmembers[:200], strict=True)
    ]
    assert leak.draws[:200] == pytest.approx(slow)
    assert leak.value == pytest.approx(tpr_at_fpr(own, others, 0.05).value)


def test_members_that_are_less_likely_than_others_are_found_too() -> None:
    """As behind a filter of the training data: whatever it forbids was in it."""
    rng = np.random.default_rng(8)
    own, others = rng.normal(2, 1, 40), rng.normal(0, 1, 60)
    forbidden = np.where(rng.random(40) < 0.5, -np.inf, own)
    as_it_is, turned, filtered = frontier.estimate_tpr_leakages(
        [[(own, others)], [(-own, -others)], [(forbidden, others)]], 0.05
    )
    assert as_it_is.value == turned.value == tpr_at_fpr(own, others, 0.05).value
    assert as_it_is.draws == pytest.approx(turned.draws)
    assert filtered.value >= np.isinf(forbidden).mean() > tpr_at_fpr(forbidden, others, 0.05).value


def test_aucs_are_those_of_every_single_resample_in_one_direction() -> None:
    """The slow twin: `roc.auc` on each resample, written out; below 1/2 it is read the other
    way."""
    rng = np.random.default_rng(5)
    # ties
    own, others = (
        rng.integers(0, 40, 30).astype(float),
        rng.integers(-20, 20, 50).astype(float),
    )
    first, turned = frontier.estimate_auc_leakages([[(own, others)], [(-own, -others)]])
    members = next(bootstrap.draw_resample_blocks(30, bootstrap.MEMBERS, frontier.RESAMPLES))
    nonmembers = next(bootstrap.draw_resample_blocks(50, bootstrap.NONMEMBERS, frontier.RESAMPLES))
    slow = [
        auc(np.repeat(own, a), np.repeat(others, b))
        for a, b in zip(members[:100], nonmembers[:100], strict=True)
    ]
    assert first.draws[:100] == pytest.approx(slow) and first.value == pytest.approx(
        auc(own, others)
    )
    assert 1 - turned.draws == pytest.approx(first.draws)
    measured, mirrored = (leak.leakage_measurement("auc", "AUC") for leak in (first, turned))
    assert (mirrored.value, mirrored.low, mirrored.high) == pytest.approx(
        (measured.value, measured.low, measured.high)
    )
    chance = frontier.estimate_auc_leakages([[(rng.normal(size=30), rng.normal(size=50))]])[
        0
    ].leakage_measurement("membership_auc", "AUC")
    assert chance.low < 0.5 <= chance.value


def test_rates_of_several_seeds_are_their_mean() -> None:
    rng = np.random.default_rng(6)
    seeds = [(rng.normal(1, 1, 30), rng.normal(0, 1, 50)) for _ in range(2)]
    [both], *single = (
        frontier.estimate_tpr_leakages([seeds], 0.1),
        *(frontier.estimate_tpr_leakages([[one]], 0.1) for one in seeds),
    )
    assert both.value == pytest.approx(np.mean([leak.value for [leak] in single]))
    assert both.draws == pytest.approx(np.mean([leak.draws for [leak] in single], axis=0))


def test_seeds_of_a_model_have_one_direction() -> None:
    rng = np.random.default_rng(7)
    up = rng.normal(1, 1, 30), rng.normal(0, 1, 50)
    down = rng.normal(-0.5, 1, 30), rng.normal(0, 1, 50)
    [leak] = frontier.estimate_tpr_leakages([[up, down]], 0.1)
    rates = [tpr_at_fpr(*sides, 0.1).value for sides in (up, down)]
    assert leak.value == pytest.approx(np.mean(rates))


def test_perplexity_ratios_by_hand_paired_by_text() -> None:
    tokens, base = np.array([[10.0, 30.0]]), np.array([[20.0, 90.0]])
    nll = np.array([base, base + 0.1 * tokens, np.where([True, False], np.inf, base)])
    own, same, never = frontier.estimate_perplexity_ratios(nll, tokens, base)
    assert (own.value, own.low, own.high) == (1, 1, 1)
    # each text by as much: no width
    assert (same.value, same.low, same.high) == pytest.approx((math.exp(0.1),) * 3)
    assert math.isinf(never.value) and math.isinf(never.high)


def test_perplexity_ratios_of_seeds_are_their_geometric_mean() -> None:
    tokens = np.full((2, 4), 10.0)
    nll = np.array([np.zeros((2, 4)), [[1.0] * 4, [3.0] * 4]])
    assert frontier.estimate_perplexity_ratios(nll, tokens, nll[0])[1].value == pytest.approx(
        math.exp(0.2)
    )


# --- who leaks least ---


def leaks(values: list[list[float]]) -> list[ModelLeakage]:
    return frontier.estimate_mean_leakages(np.array(values))


def least(found: list[ModelLeakage]) -> list[bool]:
    return select_possibly_least_leaking(
        len(found), lambda i, j: frontier.compare_paired_leakage(found[i], found[j])
    )


def test_a_clear_winner_is_alone() -> None:
    noise = np.random.default_rng(0).random(200) * 0.01
    assert least(leaks([list(noise + 0.3), list(noise), list(noise + 0.2)])) == [False, True, False]


def test_equals_are_not_told_apart_and_the_worse_is() -> None:
    rng = np.random.default_rng(1)
    base = rng.random(300) * 0.2
    one, other = base + rng.normal(0, 0.01, 300), base + rng.normal(0, 0.01, 300)
    assert least(leaks([list(one), list(other), list(base + 0.5)])) == [True, True, False]


def test_copies_of_one_distribution_are_all_left_and_one_alone_is_the_least() -> None:
    values = list(np.random.default_rng(2).random(50))
    assert least(leaks([values] * 4)) == [True] * 4
    assert (
        least(leaks([values])) == [True]
        and select_possibly_least_leaking(
            0, lambda i, j: count_discordant_pairs(*[np.ones(1, bool)] * 2)
        )
        == []
    )


def test_a_winner_is_what_testing_all_pairs_leaves() -> None:
    """The slow twin, with the gate's own bootstrap."""
    rng = np.random.default_rng(7)
    values = np.clip(rng.random((4, 60)) + np.array([[0.0], [0.02], [0.3], [0.6]]), 0, 1)
    side = 0.05 / (2 * 3)
    slow = [
        not any(resample_paired_means(a, b).low(side) > 0 for b in values if b is not a)
        for a in values
    ]
    assert least(frontier.estimate_mean_leakages(values)) == slow == [True, True, False, False]


def rare(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """As exact extraction probabilities are: nearly all 0, some near 1."""
    return rng.random(shape) ** 0.1 * (rng.random(shape) < 0.1)


@pytest.mark.parametrize(
    "distribution",
    [rare, lambda rng, shape: rng.normal(8, 4, shape)],
    ids=["probabilities", "bits"],
)
@pytest.mark.parametrize("points", [2, 5])
def test_among_copies_of_one_distribution_a_winner_is_named_as_seldom_as_promised(
    distribution: Callable[[np.random.Generator, tuple[int, int]], np.ndarray], points: int
) -> None:
    rng, named, trials = make_keyed_generator("test", "frontier", points), 0, 300
    draws = np.concatenate(list(bootstrap.draw_resample_blocks(60, "null", 1500)))
    for _ in range(trials):
        values = distribution(rng, (points, 60))
        found = [ModelLeakage(draws @ row / 60, row) for row in values]
        named += sum(least(found)) == 1
    assert named <= at_most(trials)


def at_most(trials: int) -> int:
    """Names of a winner that 5% of so many trials exceed in one of a thousand cases."""
    from scipy.stats import binom

    return int(binom.ppf(0.999, trials, 0.05))


@settings(max_examples=25, deadline=None)
@given(st.lists(st.lists(st.floats(0, 1), min_size=5, max_size=5), min_size=2, max_size=5))
def test_the_lowest_is_always_left(values: list[list[float]]) -> None:
    found = [ModelLeakage(np.array([np.mean(row)] * 3), np.array(row)) for row in values]
    lowest = min(range(len(found)), key=lambda i: found[i].value)
    assert least(found)[lowest]


def test_few_non_members_leave_a_perfect_auc_uncertain() -> None:
    """3% of non-members exceed all members: 20 of them, of which none does, cannot show AUC 1."""
    sides = np.arange(300.0), -np.arange(1.0, 21.0)
    (leakage,) = frontier.estimate_auc_leakages([[sides]])
    measured = leakage.leakage_measurement("membership_auc", "AUC")
    assert measured.value == 1 and measured.low < 0.97
    difference = frontier.compare_paired_leakage(leakage, leakage)
    assert difference.low(0.05) < -0.03 and difference.high(0.05) > 0.03


def test_an_error_that_two_models_share_does_not_say_which_leaks_less() -> None:
    """Of two AUCs below one half by chance, the higher one seemed to leak significantly less."""
    rng = np.random.default_rng(3)
    members, others = rng.normal(-0.2, 1, 150), rng.normal(0, 1, 150)
    lower, higher = frontier.estimate_auc_leakages(
        [[(members, others)], [(members + 0.15, others)]]
    )
    assert lower.parts.mean() < higher.parts.mean() < 0.5 and lower.value > higher.value
    difference = frontier.compare_paired_leakage(lower, higher)
    assert difference.value > 0 > difference.low(0.0125)
    assert frontier.select_possibly_least_leaking(2, lambda i, j: difference) == [True, True]
    apart = frontier.compare_paired_leakage(
        *frontier.estimate_auc_leakages([[(members - 2, others)], [(members + 0.15, others)]])
    )
    assert apart.low(0.0125) > 0  # far from chance, the direction is known
