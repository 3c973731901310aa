"""Exact tests by rank: of a value among its alternatives."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest

from auditor.statistics.rank_tests import (
    adjust_false_discovery,
    compute_rank_p_values,
    compute_uniformity_p_value,
    count_alternatives_above,
)


def test_counts_above_and_ties_solved_by_hand() -> None:
    nlls = np.array([1.0, 2.0, 2.0 + 1e-9, 2.0 - 1e-9, 3.0])
    assert count_alternatives_above(2.0, 2.0 + 1e-5, nlls) == (1, 3)


def test_p_values_are_exact_however_many_are_tied() -> None:
    """Of every list of three scores on a scale of three, each place the true one in turn."""
    p_values = []
    for scores in product(range(3), repeat=3):
        others = np.array(scores[1:], dtype=float)
        above, tied = count_alternatives_above(scores[0], scores[0] + 1e-6, others)
        p_values.append(float(compute_rank_p_values(*map(np.float64, (above, tied, 2)))))
    for level in (1 / 3, 2 / 3, 1):
        assert np.mean(np.array(p_values) <= level + 1e-9) <= level


def test_without_ties_p_values_are_uniform() -> None:
    noise = np.random.default_rng(0)
    p_values = []
    for _ in range(2000):
        nlls = noise.random(20)
        above, tied = count_alternatives_above(nlls[0], nlls[0] + 1e-9, nlls[1:])
        p_values.append((above + tied + 1) / 20)
    share = np.mean(np.array(p_values) <= 0.05 + 1e-9)
    assert share == pytest.approx(0.05, abs=3 * math.sqrt(0.05 * 0.95 / 2000))


def test_false_discoveries_solved_by_hand() -> None:
    adjusted = adjust_false_discovery(np.array([0.01, 0.04, 0.02, 0.9]))
    np.testing.assert_allclose(adjusted, [0.04, 0.16 / 3, 0.04, 0.9])
    assert len(adjust_false_discovery(np.array([]))) == 0


@pytest.mark.parametrize(("shift", "is_uniform"), [(0, True), (30, False)])
def test_ranks_that_are_not_uniform_are_seen_ties_or_not(shift: int, is_uniform: bool) -> None:
    noise = np.random.default_rng(1)
    above = np.clip(noise.integers(100, size=200) // 10 * 10 - shift, 0, 99).astype(float)
    tied, alternatives = np.full(200, 9.0), np.full(200, 99.0)
    p_value = compute_uniformity_p_value(above, tied, alternatives, noise.random(200))
    assert (p_value > 0.01) is is_uniform
    few = [column[:19] for column in (above, tied, alternatives, noise.random(200))]
    assert math.isnan(compute_uniformity_p_value(*few))
