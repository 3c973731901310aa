"""Unseen species: intervals hold what a sampler with known species says, and formulas are those of
small cases."""

from __future__ import annotations

import numpy as np
import pytest

from auditor.statistics import unseen_species
from auditor.statistics.intervals import clopper_pearson

WORLDS = {
    "alike": np.full(200, 0.01),
    "rare": np.full(1000, 5e-4),
    "uneven": 0.3 * 0.97 ** np.arange(200),
    "Zipf": 0.1 / np.arange(1, 201),
}


@pytest.mark.parametrize("world", WORLDS)
def test_intervals_hold_what_is_to_come(world: str) -> None:
    p, draws, games = WORLDS[world], 500, 300
    noise = np.random.default_rng(0)
    held = bounded = 0
    values = []
    for _ in range(games):
        times = noise.binomial(draws, p)
        seen = times[times > 0]
        new = unseen_species.estimate_new_species("new", seen, draws, 1000)
        held += new.low <= 1000 * p[times == 0].sum() <= new.high
        total = unseen_species.estimate_species_richness("total", seen, draws, 10**6)
        assert total is not None
        bounded += total.low <= len(p)
        values.append(total.value)
    assert held / games > 0.92 and bounded / games > 0.92
    assert np.mean(values) < 1.03 * len(p)
    if world in ("alike", "rare"):
        assert np.mean(values) == pytest.approx(len(p), rel=0.03)


def test_a_case_by_hand() -> None:
    seen = np.array([1, 1, 1, 2, 5])
    new = unseen_species.estimate_new_species("new", seen, 10, 1000)
    # 3 + 1.96^2 / 2 + 1.96 sqrt(5 + 1.96^2 / 4)
    assert new.value == 300 and new.high == pytest.approx(100 * 9.70576, rel=1e-5)
    assert new.low == 0 and new.unit == "per 1,000" and new.n == 10
    total = unseen_species.estimate_species_richness("total", seen, 10, 100)
    assert total is not None and total.value == pytest.approx(5 + 0.9 * 3 * 2 / (2 * 2))
    # 5 + 1.35 exp(1.96 sqrt(log(1 + 5.60 / 1.35^2))) = 18.8, in whole ones
    assert (total.low, total.high) == (
        5,
        19,
    )


def test_with_nothing_seen_the_bound_is_that_of_no_draw_that_shows_one() -> None:
    none = np.array([], dtype=np.int64)
    new = unseen_species.estimate_new_species("new", none, 100, 1000)
    assert (new.value, new.low) == (0, 0) and new.high >= 1000 * clopper_pearson(0, 100)[1]


@pytest.mark.parametrize("expected", [0.1, 3.0, 5.0, 10.0])
def test_few_species_seen_once_bound_what_is_to_come(expected: float) -> None:
    noise, draws, missed = np.random.default_rng(0), 1000, np.zeros(2)
    p = np.full(1000, expected / 1000 / draws)
    for _ in range(300):
        times = noise.binomial(draws, p)
        new = unseen_species.estimate_new_species("new", times[times > 0], draws, 1)
        missed += np.array([new.low, -new.high]) > np.array([1, -1]) * p[times == 0].sum()
    assert (missed / 300 <= 0.05).all()


def test_there_are_no_more_species_than_there_are_records() -> None:
    total = unseen_species.estimate_species_richness("total", np.ones(30, dtype=np.int64), 100, 40)
    assert total is not None and (total.value, total.high) == (40, 40) and total.low <= 40
    all_often = unseen_species.estimate_species_richness("total", np.full(30, 9), 100, 40)
    assert all_often is not None and all_often.low == all_often.value == 30 and all_often.high == 31


def test_of_species_all_seen_twice_the_bound_is_poissons() -> None:
    """Each is missed with e^-2 = .135: (400 + 1.96 sqrt(400 x .135 x .865)) / .865 = 478.1."""
    total = unseen_species.estimate_species_richness("total", np.full(400, 2), 1000, 9999)
    assert total is not None and (total.value, total.high) == (400, 479)
