"""What an audit would have caught, against audits that are played."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from auditor.core.result import Audited
from auditor.statistics.audit_by_shape import (
    GAUSSIAN,
    Sampling,
    compute_likelihood_ratio_distribution,
    convert_shape_noise,
    find_largest_passing_noise,
)
from auditor.statistics.audit_power import (
    SURE,
    USUAL,
    describe_detection_power,
    find_detectable_epsilon,
)
from auditor.statistics.audited import audit_epsilon_bounds
from auditor.statistics.games import audit_games
from auditor.statistics.one_run import (
    compute_one_run_p_value,
    find_refuting_right_counts,
    list_guess_counts,
)

DELTA, SAMPLED = 1e-5, (0.084, 48)


def audit(m: int, noise: float, sampling: Sampling, seed: int, copies: int = 1) -> Audited:
    rng, own = np.random.default_rng(seed), compute_likelihood_ratio_distribution(noise, sampling)
    coins = rng.random(m) < 0.5
    drawn = rng.random(m)
    inside, out = (
        own.at[np.searchsorted(np.cumsum(mass[:-1]), drawn)] for mass in (own.inside, own.out)
    )
    return audit_epsilon_bounds(
        np.where(coins, inside, out), coins, DELTA, copies=copies, sampling=sampling
    )[0]


@pytest.mark.parametrize(("sampling", "limit"), [(GAUSSIAN, 1.0), (GAUSSIAN, 2.5), (SAMPLED, 1.0)])
@pytest.mark.parametrize("power", [USUAL, SURE])
def test_played_audits_catch_it_so_often(sampling: Sampling, limit: float, power: float) -> None:
    """At least so often: any number of guesses may refute, and it goes by one. Hardly oftener: it
    is no mere bound."""
    m, runs = 300, 150
    found = find_detectable_epsilon(audit(m, 1.0, sampling, 0), limit, power)
    noise = find_largest_passing_noise(
        lambda noise: convert_shape_noise(noise, sampling, DELTA) >= found - 1e-4
    )
    assert noise is not None
    caught = sum(audit(m, noise, sampling, 1 + seed).epsilon > limit for seed in range(runs)) / runs
    spread = math.sqrt(power * (1 - power) / runs)
    assert power - 3 * spread <= caught <= power + (1 - power) / 2 + 3 * spread


def test_so_many_right_refute_alone_and_one_fewer_does_not() -> None:
    for m, epsilon, delta in [(100, 1.0, 0.0), (1000, 2.0, 1e-5), (1000, 0.5, 1e-3)]:
        needed, counts = find_refuting_right_counts(m, epsilon, delta, 0.05), list_guess_counts(m)
        for i, (r, v) in enumerate(zip(counts, needed, strict=True)):
            for right, refuted in ((v, True), (v - 1, False)):
                if right <= r:
                    shown = tuple(right if i == j else 0 for j in range(len(counts)))
                    assert (compute_one_run_p_value(m, shown, epsilon, delta) < 0.05) == refuted


def test_games_catch_it_so_often() -> None:
    rng, n, limit = np.random.default_rng(0), 1000, 2.0
    for power in (USUAL, SURE):
        found = find_detectable_epsilon(
            audit_games((n // 2, 0, 0, n // 2), DELTA, 0.05), limit, power
        )
        p = 1 / (1 + math.exp(-found))
        played = zip(rng.binomial(n // 2, p, 400), rng.binomial(n // 2, 1 - p, 400), strict=True)
        tables = [(int(tp), n // 2 - int(tp), int(fp), n // 2 - int(fp)) for tp, fp in played]
        caught = np.mean([audit_games(table, DELTA, 0.05).epsilon > limit for table in tables])
        assert power - 0.06 <= caught


def test_what_it_says() -> None:
    some = audit(1000, 1.0, GAUSSIAN, 0)
    assert describe_detection_power(some, 1.0) == (
        f"ε {find_detectable_epsilon(some, 1.0):.3g} of a Gaussian mechanism that its scores see "
        "in full would have been caught with 80% probability"
    )
    assert describe_detection_power(some, some.best).startswith("no ε of a Gaussian mechanism")
    assert "DP-SGD by its sampling and steps" in describe_detection_power(
        replace(some, sampling=SAMPLED), 1.0, SURE
    )
    assert "gives it away evenly" in describe_detection_power(
        audit_games((90, 10, 12, 88), DELTA, 0.05), 1.0
    )


def test_more_is_caught_where_more_is_seen() -> None:
    few, many = audit(100, 1.0, GAUSSIAN, 0), audit(2000, 1.0, GAUSSIAN, 0)
    assert (
        find_detectable_epsilon(many, 1.0)
        < find_detectable_epsilon(few, 1.0)
        < find_detectable_epsilon(few, 2.0)
        < math.inf
    )
    assert find_detectable_epsilon(few, 1.0) < find_detectable_epsilon(few, 1.0, SURE)
    twice = audit(2000, 1.0, GAUSSIAN, 0, copies=2)
    assert (
        0.4 * find_detectable_epsilon(many, 1.0)
        < find_detectable_epsilon(twice, 0.5)
        < find_detectable_epsilon(many, 1.0)
    )
