"""Exact epsilons of many draws: closed forms, binomials by hand, and dp-accounting's bracket."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import binom, norm

from auditor.core.arrays import Floats
from auditor.core.errors import AuditError
from auditor.statistics.composition import (
    bound_game_epsilon,
    compute_best_game_advantage,
    compute_exact_game_epsilon,
)


def logs(*distributions: list[float]) -> list[Floats]:
    with np.errstate(divide="ignore"):
        return [np.log(np.array(distribution)) for distribution in distributions]


def binomial_delta(epsilon: float, p: float, q: float, draws: int) -> float:
    """Of `draws` coins of chance p against q, the larger of both directions."""
    heads = np.arange(draws + 1)
    one, other = binom.pmf(heads, draws, p), binom.pmf(heads, draws, q)
    return float(
        max(np.maximum(a - math.exp(epsilon) * b, 0).sum() for a, b in ((one, other), (other, one)))
    )


@pytest.mark.parametrize(
    "p, q, draws", [(0.5, 0.52, 1), (0.5, 0.52, 1024), (0.01, 0.013, 200), (0.9, 0.2, 7)]
)
@pytest.mark.parametrize("delta", [1e-6, 1e-3])
def test_coins_are_binomials(p: float, q: float, draws: int, delta: float) -> None:
    one, other = logs([p, 1 - p], [q, 1 - q])
    epsilon = compute_exact_game_epsilon(one, other, draws, delta)
    assert epsilon == compute_exact_game_epsilon(other, one, draws, delta)
    above, below = (binomial_delta(epsilon + by, p, q, draws) for by in (-1e-4, 1e-4))
    assert below <= delta <= above and (epsilon > 0) == (binomial_delta(0.0, p, q, draws) > delta)
    assert compute_best_game_advantage(one, other, draws) == pytest.approx(
        binomial_delta(0.0, p, q, draws), rel=1e-4
    )
    assert float(bound_game_epsilon(one, other, draws, delta)) >= epsilon


def test_pure_epsilons_in_closed_form() -> None:
    one, other = logs([0.75, 0.25], [0.25, 0.75])
    assert compute_exact_game_epsilon(one, other, 1, 0.0) == pytest.approx(math.log(3))
    assert compute_exact_game_epsilon(one, other, 9, 0.0) == pytest.approx(9 * math.log(3))
    assert float(bound_game_epsilon(one, other, 9, 0.0)) == pytest.approx(9 * math.log(3))


def test_what_one_distribution_never_says_costs_delta() -> None:
    one, other = logs([0.001, 0.999], [0.0, 1.0])
    assert compute_exact_game_epsilon(one, other, 1, 1e-4) == math.inf
    assert compute_exact_game_epsilon(one, other, 1, 2e-3) == 0.0
    assert compute_exact_game_epsilon(one, other, 1000, 2e-3) == math.inf
    assert compute_best_game_advantage(one, other, 1) == pytest.approx(0.001)


def test_distributions_that_are_the_same_are_not_apart() -> None:
    same, _ = logs([0.2, 0.3, 0.5], [1.0])
    for delta in (0.0, 1e-5):
        assert compute_exact_game_epsilon(same, same, 1024, delta) == pytest.approx(0, abs=1e-6)
    assert compute_best_game_advantage(same, same, 1024) == pytest.approx(0, abs=1e-6)


def test_against_dp_accounting() -> None:
    """From below and from above, on distributions of 200 tokens; google/differential-privacy's
    privacy loss distributions.

    Each as fine as it takes for bounds within a hundredth: finer ones, and many more draws, take
    minutes.
    """
    pld = pytest.importorskip("dp_accounting.pld.privacy_loss_distribution")
    rng = np.random.default_rng(0)
    cases = (
        (0.2, 128, 1e-5, 5e-5),
        (3.0, 1, 1e-5, 1e-5),
        (3.0, 5, 1e-3, 1e-3),
        (1.0, 30, 1e-5, 3e-4),
    )
    for scale, draws, delta, step in cases:
        base = rng.normal(size=200)
        one, other = (
            x - np.logaddexp.reduce(x) for x in (base, base + scale * rng.normal(size=200))
        )
        low, high = (
            max(
                pld.from_two_probability_mass_functions(
                    dict(enumerate(a)),
                    dict(enumerate(b)),
                    pessimistic_estimate=above,
                    value_discretization_interval=step,
                )
                .self_compose(draws)
                .get_epsilon_for_delta(delta)
                for a, b in ((one, other), (other, one))
            )
            for above in (False, True)
        )
        assert high - low < 0.011
        assert low - 1e-6 <= compute_exact_game_epsilon(one, other, draws, delta) <= high + 1e-6


def test_many_small_draws_are_a_gaussian() -> None:
    """(Dong, Roth and Su 2022, the central limit theorem of privacy): mu^2 = T chi^2."""
    one, other = logs([0.5, 0.5], [0.505, 0.495])
    mu, epsilon = math.sqrt(10_000) * 0.01, compute_exact_game_epsilon(one, other, 10_000, 1e-4)
    delta = norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu)
    assert delta == pytest.approx(1e-4, rel=0.02)


def test_many_pairs_at_once() -> None:
    rng = np.random.default_rng(1)
    ones, others = (np.log(rng.dirichlet(np.ones(6), size=(3, 2))) for _ in range(2))
    found = bound_game_epsilon(ones, others, 4, 1e-4)
    assert found.shape == (3, 2)
    for i in np.ndindex(3, 2):
        assert found[i] == pytest.approx(float(bound_game_epsilon(ones[i], others[i], 4, 1e-4)))
        assert found[i] >= compute_exact_game_epsilon(ones[i], others[i], 4, 1e-4)


def test_bad_input_is_refused() -> None:
    one, other = logs([0.5, 0.5], [0.4, 0.6])
    with pytest.raises(AuditError, match="expected draws >= 1 and delta in"):
        compute_exact_game_epsilon(one, other, 0, 1e-5)
    with pytest.raises(AuditError, match="expected draws >= 1 and delta in"):
        compute_exact_game_epsilon(one, other, 1, 1.0)
