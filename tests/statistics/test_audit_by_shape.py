"""The law of the likelihood ratio against the accountant and a simulation; the bound against its
definition."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import binom, norm

from auditor.core.errors import AuditError
from auditor.privacy.gaussian import compute_pld_epsilon
from auditor.statistics.audit_by_shape import (
    GAUSSIAN,
    bound_shape_epsilon,
    bound_shape_mu,
    compute_canary_shape_p_value,
    compute_likelihood_ratio_distribution,
)
from auditor.statistics.audited import count_right_guesses
from auditor.statistics.one_run import (
    compute_gaussian_delta,
    compute_gaussian_epsilon,
    find_largest_refuted_value,
    list_guess_counts,
)

SAMPLED = (0.084, 48)


def test_the_gaussian_s_law_is_the_gaussian_s() -> None:
    for noise in (0.4, 1.0, 3.0):
        for epsilon in (0.0, 0.5, 2.0):
            assert compute_likelihood_ratio_distribution(noise, GAUSSIAN).delta(
                epsilon
            ) == pytest.approx(compute_gaussian_delta(epsilon, 1 / noise), abs=2e-5)


@pytest.mark.parametrize("noise", [0.74, 1.5])
def test_the_sampled_one_s_law_is_what_the_accountant_has(noise: float) -> None:
    own = compute_likelihood_ratio_distribution(noise, SAMPLED)
    for delta in (1e-5, 3e-4):
        epsilon = find_largest_refuted_value(lambda e, d=delta: own.delta(e) > d, 50.0, 1e-6)
        assert epsilon == pytest.approx(compute_pld_epsilon(noise, *SAMPLED, delta), rel=5e-3)


@pytest.mark.parametrize("sampling", [GAUSSIAN, SAMPLED])
def test_the_p_value_is_the_chance_in_a_simulated_game(sampling: tuple[float, int]) -> None:
    rng, noise, runs = np.random.default_rng(3), 0.9, 8000
    q, steps = sampling
    for m, r, v in [(12, 12, 9), (12, 5, 5), (40, 8, 7)]:
        coins, ratio = rng.random((runs, m)) < 0.5, np.zeros((runs, m))
        for _ in range(steps):
            x = (coins & (rng.random((runs, m)) < q)) + noise * rng.normal(size=(runs, m))
            ratio += np.log(1 - q + q * np.exp((2 * x - 1) / (2 * noise**2)))
        order = np.argsort(-np.abs(ratio), axis=1)[:, :r]
        seen = np.take_along_axis((ratio > 0) == coins, order, 1).sum(1) >= v
        found = compute_canary_shape_p_value(m, r, v, noise, sampling)
        assert found == pytest.approx(seen.mean(), abs=4 * seen.std() / math.sqrt(runs))


def test_where_all_are_guessed_it_is_a_binomial() -> None:
    p = norm.cdf(1 / 0.8 / 2)
    assert compute_canary_shape_p_value(50, 50, 40, 0.8, GAUSSIAN) == pytest.approx(
        binom.sf(39, 50, p), rel=1e-3
    )
    assert compute_canary_shape_p_value(50, 50, 51, 0.8, GAUSSIAN) == 0


def test_the_bound_is_of_a_noise_that_is_refuted_and_of_a_larger_delta() -> None:
    right, m = (840, 460, 245, 125, 62, 31), 1000
    found = bound_shape_epsilon(m, right, 1e-5)
    noise = min(
        k
        for k in np.geomspace(0.3, 2, 400)
        if compute_canary_shape_p_value(m, 500, 460, float(k), GAUSSIAN) < 0.02
    )
    assert found == pytest.approx(compute_gaussian_epsilon(1 / noise, 1e-5 / 0.03), rel=0.02)
    assert bound_shape_epsilon(m, right, 1e-5, copies=2) < found / 1.9
    with pytest.raises(AuditError, match="inserted once, got 2"):
        bound_shape_epsilon(m, right, 1e-5, copies=2, sampling=SAMPLED)


def test_a_shape_that_the_surest_contradict_is_none() -> None:
    """Nine of ten right, however sure: no Gaussian does that."""
    assert (
        bound_shape_epsilon(1000, tuple(int(0.9 * r) for r in list_guess_counts(1000)), 1e-5) == 0
    )
    assert bound_shape_epsilon(1000, list_guess_counts(1000), 1e-5) > 10


@pytest.mark.parametrize(("mu", "copies"), [(0.5, 1), (2.0, 1), (2.0, 4)])
def test_the_interval_of_mu_covers(mu: float, copies: int) -> None:
    """Audits of a Gaussian mechanism: of a group of copies mu is so many times one record's."""
    rng, m, audits = np.random.default_rng(0), 200, 120
    intervals = []
    for _ in range(audits):
        coins = rng.random(m) < 0.5
        right = count_right_guesses(mu * coins + rng.normal(size=m), coins)
        intervals.append(bound_shape_mu(m, right, 0.05, copies))
    low, high = np.array(intervals).T
    covered = ((low <= mu / copies) & (mu / copies <= high)).mean()
    # binomial: 4 deviations of 120 audits; informative: the median width
    assert covered >= 0.95 - 4 * math.sqrt(0.05 * 0.95 / audits)
    assert np.median(high - low) < 1.4 / copies


def test_mu_is_unbounded_if_every_guess_is_right() -> None:
    low, high = bound_shape_mu(100, list_guess_counts(100), 0.05, copies=1)
    assert 0 < low < high == math.inf
    # all right is as unlikely as half of the level, to a step of the search
    refuted, next_noise = (
        compute_canary_shape_p_value(100, 50, 50, noise, GAUSSIAN)
        for noise in (1 / low, 1 / low / 1.005)
    )
    assert refuted < 0.025 <= next_noise
    assert (
        bound_shape_mu(100, tuple(r // 2 for r in list_guess_counts(100)), 0.05, copies=1)[0] == 0
    )
