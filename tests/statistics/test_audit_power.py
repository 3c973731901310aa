"""What an audit would have caught, against audits that are played."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import binom

from auditor.core.nouns import Claim
from auditor.core.result import Audited
from auditor.statistics.audit_by_shape import (
    GAUSSIAN,
    Sampling,
    compute_final_model_distribution,
    compute_likelihood_ratio_distribution,
    convert_shape_noise,
    find_largest_passing_noise,
)
from auditor.statistics.audit_power import (
    SURE,
    USUAL,
    describe_audit_ceiling,
    describe_detection_power,
    estimate_median_epsilon,
    find_audit_ceiling,
    find_detectable_epsilon,
)
from auditor.statistics.audited import audit_epsilon_bounds, plan_epsilon_audit
from auditor.statistics.games import audit_games
from auditor.statistics.one_run import (
    compute_one_run_p_value,
    epsilon_one_run,
    find_refuting_right_counts,
    list_guess_counts,
)

DELTA, SAMPLED = 1e-5, (0.084, 48)


def audit(m: int, noise: float, sampling: Sampling, seed: int, copies: int = 1) -> Audited:
    rng, own = np.random.default_rng(seed), compute_likelihood_ratio_distribution(noise, sampling)
    coins = rng.random(m) < 0.5
    drawn = rng.random(m)
    inside, out = (
        own.log_ratios[np.searchsorted(np.cumsum(mass[:-1]), drawn)]
        for mass in (own.inside, own.out)
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
        needed, counts = (
            find_refuting_right_counts(m, epsilon, delta, 0.05, copies=1),
            list_guess_counts(m),
        )
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


# Noise multiplier of (4, 1e-5), and the medians of 125, 500 and 1,000 canaries, by simulated audits
# of two Gaussians d = T q / sqrt(T sigma^2 + T q (1 - q) / 2) apart.
CEILINGS = [
    (0.0082, 365, 0.626, (0.0, 0.1, 0.2)),
    (0.084, 48, 1.035, (0.18, 0.62, 0.75)),
    (0.25, 48, 2.127, (0.59, 1.04, 1.28)),
    (1.0, 8, 3.059, (0.72, 1.22, 1.46)),
]


@pytest.mark.parametrize(("q", "steps", "noise", "medians"), CEILINGS)
def test_the_ceiling_of_a_claimed_4(
    q: float, steps: int, noise: float, medians: tuple[float, ...]
) -> None:
    for m, median in zip((125, 500, 1000), medians, strict=True):
        assert estimate_median_epsilon(m, noise, (q, steps), DELTA, 0.05) == pytest.approx(
            median, abs=0.06
        )


def simulate_median(
    m: int, noise: float, sampling: Sampling, copies: int, audits: int = 24
) -> float:
    """The naive twin: draws each canary's number of steps, scores by the ratio of the two sides."""
    rng, (q, steps) = np.random.default_rng(5), sampling
    counts = np.arange(copies * steps + 1)
    variance = steps * noise**2
    bounds = []
    for _ in range(audits):
        coins = rng.random(m) < 0.5
        moved = rng.binomial(copies * steps, q, m) * coins
        x = moved + rng.normal(0, math.sqrt(variance), m)
        exponents = (2 * x[:, None] * counts - counts**2) / (2 * variance)
        ratio = np.exp(np.minimum(exponents, 600)) @ binom.pmf(counts, copies * steps, q)
        right = ((ratio > 1) == coins)[np.argsort(-np.abs(np.log(ratio)), kind="stable")]
        n_right = tuple(int(right[:r].sum()) for r in list_guess_counts(m))
        bounds.append(epsilon_one_run(m, n_right, DELTA, 0.05, copies))
    return float(np.median(bounds))


@pytest.mark.parametrize(
    ("noise", "sampling", "copies"),
    # the last two: with so little noise two Gaussians would give 1.07 and 0.72
    [(2.0, (0.1, 100), 1), (1.0, (0.1, 40), 4), (0.1, (0.03, 20), 1), (0.3, (0.05, 20), 1)],
)
def test_the_ceiling_is_the_median_of_played_audits(
    noise: float, sampling: Sampling, copies: int
) -> None:
    expected = simulate_median(400, noise, sampling, copies)
    found = estimate_median_epsilon(400, noise, sampling, DELTA, 0.05, copies)
    assert found == pytest.approx(expected, abs=0.12)


def test_many_steps_are_close_to_two_gaussians() -> None:
    q, steps, noise = 0.25, 10_000, 2.0
    separation = steps * q / math.sqrt(steps * noise**2 + steps * q * (1 - q) / 2)
    close = compute_likelihood_ratio_distribution(1 / separation, GAUSSIAN)
    exact = compute_final_model_distribution(noise, (q, steps), copies=1)
    assert exact.inside.sum() == pytest.approx(1, abs=1e-9)
    for epsilon in (1.0, 100.0):
        assert exact.delta(epsilon) == pytest.approx(close.delta(epsilon), rel=0.02)


def test_the_ceiling_of_what_an_audit_sees() -> None:
    details = {"noise_multiplier": 1.035, "sampling_rate": 0.084, "steps": 48.0}
    claim = Claim({"add_remove": 4.0}, DELTA, "add_remove", "record", None, "", "", details=details)
    finished, each = (
        plan_epsilon_audit(1000, DELTA),
        plan_epsilon_audit(1000, DELTA, sampling=SAMPLED),
    )
    ceilings = [find_audit_ceiling(planned, claim) or 0 for planned in (finished, each)]
    assert ceilings[0] < ceilings[1] < 4 < finished.best
    assert finished.epsilon == 0
    assert describe_audit_ceiling(each, claim) == (
        f"of the claimed ε 4 this audit could show at most about {ceilings[1]:.2f} (median, if the "
        "training is as it claims and the scores see all that each step of the training shows)"
    )
    assert "that the finished model shows" in describe_audit_ceiling(finished, claim)
    # Nothing is known of another mechanism, and games have an exact answer.
    assert describe_audit_ceiling(finished, replace(claim, details={"batch": 8.0})) == ""
    assert find_audit_ceiling(finished, None) is None
    assert find_audit_ceiling(audit_games((90, 10, 12, 88), DELTA, 0.05), claim) is None
