"""What copies do: predictions against a training by hand, intervals against simulation, parts
against chance."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from auditor.statistics.copies_effect import find_most_concentrated_part, predict_recall
from auditor.statistics.intervals import clopper_pearson


def test_all_above_leak_as_the_limit_does() -> None:
    repeats = [1] * 10 + [4] * 6 + [16] * 4
    hit = np.array([False] * 10 + [True] * 3 + [False] * 3 + [True] * 4)
    left = predict_recall(repeats, hit, np.minimum(repeats, 4).tolist())
    assert left.value == pytest.approx((10 * 0 + 10 * 0.5) / 20) and left.n == 20
    assert predict_recall(repeats, hit, np.minimum(repeats, 16).tolist()).value == pytest.approx(
        hit.mean()
    )
    once = predict_recall(repeats, hit, np.minimum(repeats, 1).tolist())
    assert (once.value, once.low, once.high) == (0.0, 0.0, clopper_pearson(0, 10)[1])
    with pytest.raises(ValueError, match="a count that was measured, got 3"):
        predict_recall(repeats, hit, np.minimum(repeats, 3).tolist())


def test_the_interval_holds_what_a_run_with_fewer_copies_would_have() -> None:
    """Of 400 audits, at least 95% minus their own error hold the true recall under the limit."""
    noise, rates, sizes = (
        np.random.default_rng(0),
        {1: 0.02, 4: 0.2, 16: 0.9},
        {1: 80, 4: 40, 16: 20},
    )
    truth = (80 * 0.02 + 60 * 0.2) / 140
    repeats = [count for count, n in sizes.items() for _ in range(n)]
    held = 0
    for _ in range(400):
        hit = np.concatenate([noise.random(n) < rates[count] for count, n in sizes.items()])
        left = predict_recall(repeats, hit, np.minimum(repeats, 4).tolist())
        held += left.low <= truth <= left.high
    assert held >= 0.95 * 400 - 2 * np.sqrt(400 * 0.95 * 0.05)


def test_a_part_is_named_where_it_leads_beyond_chance() -> None:
    hit = np.array([True] * 10 + [False] * 30)
    few, half, none = np.arange(40) < 12, np.arange(40) % 2 == 0, np.arange(40) >= 30
    found = find_most_concentrated_part({"few": few, "half": half, "none": none}, hit, 0.05)
    assert found is not None and (found.part, found.hits, found.of_hits, found.members) == (
        "few",
        10,
        10,
        12,
    )
    # Rows: in the part or not; columns: extracted or not.
    fisher = stats.fisher_exact([[10, 2], [0, 28]], alternative="greater")
    assert found.p == pytest.approx(3 * fisher.pvalue, rel=1e-10)
    assert (
        find_most_concentrated_part({"half": half}, hit, 0.05) is None
        and find_most_concentrated_part({}, hit, 0.05) is None
    )


def test_chance_is_not_advised() -> None:
    """Many parts of nothing: at most one audit in twenty names one."""
    noise = np.random.default_rng(1)
    named = 0
    for _ in range(300):
        hit, of = noise.random(100) < 0.2, noise.integers(0, 10, 100)
        named += (
            find_most_concentrated_part({str(part): of == part for part in range(10)}, hit, 0.05)
            is not None
        )
    assert named / 300 <= 0.05 + 2 * np.sqrt(0.05 * 0.95 / 300)
