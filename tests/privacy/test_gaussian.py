"""Accounting of the subsampled Gaussian: known answers of other libraries, and the noise solved
for."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as example_settings
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.optimize import brentq
from scipy.special import logsumexp
from scipy.stats import chi2, norm

from auditor.core.errors import AuditError
from auditor.privacy import gaussian
from auditor.privacy.gaussian import (
    compute_noise_scale_divergence,
    compute_noise_scale_epsilon,
    compute_pld_epsilon,
    compute_quick_rdp_epsilon,
    compute_rdp_epsilon,
    compute_tightest_epsilon,
    find_noise_multiplier,
)

# q, sigma, T, delta, PLD, RDP
KNOWN = [
    (0.01, 1.0, 1000, 1e-5, 1.828244, 2.101367),
    (0.01, 1.1, 10000, 1e-5, 5.192620, 5.632011),
    (256 / 60000, 1.1, 14062, 1e-5, 2.381686, 2.596556),
    (4096 / 230000, 1.0, 1123, 1 / 230000, 3.828546, 4.226221),
    (4096 / 230000, 5.0, 1123, 1 / 230000, 0.447944, 0.490190),
    (0.002, 0.6, 2000, 1e-6, 3.463858, 4.331679),
    (0.1, 2.0, 500, 1e-5, 5.555470, 6.034562),
    (1.0, 5.0, 1, 1e-5, 0.725522, 0.794522),
    (1.0, 20.0, 100, 1e-5, 1.993091, 2.165716),
    (0.001, 0.5, 100, 1e-6, 3.144507, 4.420477),
]


@pytest.mark.parametrize(("q", "sigma", "steps", "delta", "pld", "rdp"), KNOWN)
def test_known_answers(
    q: float, sigma: float, steps: int, delta: float, pld: float, rdp: float
) -> None:
    assert compute_pld_epsilon(sigma, q, steps, delta) == pytest.approx(pld, abs=2e-6)
    assert compute_rdp_epsilon(sigma, q, steps, delta) == pytest.approx(rdp, abs=2e-6)
    assert pld < rdp - 2e-6 <= compute_quick_rdp_epsilon(sigma, q, steps, delta) < 1.1 * rdp


def gaussian_delta(epsilon: float, mu: float) -> float:
    """Balle and Wang 2018: the exact delta of a Gaussian mechanism, mu = sensitivity / sigma; no
    library."""
    return float(
        norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu)
    )


@pytest.mark.parametrize(("sigma", "steps"), [(5.0, 1), (20.0, 100), (3.0, 7)])
def test_without_subsampling_it_is_the_exact_gaussian(sigma: float, steps: int) -> None:
    exact = brentq(lambda e: gaussian_delta(e, math.sqrt(steps) / sigma) - 1e-5, 1e-6, 50)
    assert exact - 1e-9 <= compute_pld_epsilon(sigma, 1.0, steps, 1e-5) <= exact + 1e-4


@given(st.floats(0.5, 10), st.floats(0.01, 1), st.integers(1, 40))
@example_settings(max_examples=8)
def test_more_noise_and_fewer_steps_cost_less(sigma: float, q: float, steps: int) -> None:
    here = compute_quick_rdp_epsilon(sigma, q, steps, 1e-5)
    assert (
        compute_quick_rdp_epsilon(1.1 * sigma, q, steps, 1e-5)
        <= here
        <= compute_quick_rdp_epsilon(sigma, q, steps + 1, 1e-5)
    )
    assert here <= compute_quick_rdp_epsilon(sigma, min(1.0, 1.1 * q), steps, 1e-5)
    assert compute_quick_rdp_epsilon(sigma, q, 0, 1e-5) == 0


@pytest.mark.parametrize(
    ("epsilon", "q", "steps"), [(3.0, 1.0, 1), (0.1, 0.05, 200), (1.0, 0.01, 1000)]
)
def test_the_noise_solved_for_spends_the_epsilon_and_no_more(
    epsilon: float, q: float, steps: int
) -> None:
    sigma = find_noise_multiplier(epsilon, 1e-5, q, steps)
    assert 0.999 * epsilon <= compute_pld_epsilon(sigma, q, steps, 1e-5) <= epsilon


def renyi_epsilon(sigma: float, q: float, steps: int, delta: float) -> float:
    """An upper bound without the library: whole orders (Mironov, Talwar and Zhang 2019, Eq. 3;
    Balle et al. 2020)."""

    def at(order: int) -> float:
        parts = [
            math.log(math.comb(order, k))
            + (k * math.log(q) if k else 0.0)
            + ((order - k) * math.log1p(-q) if k < order else 0.0)
            + k * (k - 1) / (2 * sigma**2)
            for k in range(order + 1)
        ]
        divergence = float(logsumexp(parts)) / (order - 1)
        return (
            steps * divergence
            + math.log1p(-1 / order)
            - (math.log(delta) + math.log(order)) / (order - 1)
        )

    return min(map(at, range(2, 200)))


@pytest.mark.parametrize(("delta", "q", "steps"), [(1e-14, 0.01, 1000), (1e-15, 0.1, 100)])
def test_the_noise_solved_for_is_enough_at_a_tiny_delta(delta: float, q: float, steps: int) -> None:
    """What PLD cuts off is no longer small beside delta: its epsilon is 9.45, or infinite, where
    RDP proves 8."""
    sigma = find_noise_multiplier(8.0, delta, q, steps)
    epsilon, accountant = compute_tightest_epsilon(sigma, q, steps, delta)
    assert 7.99 <= epsilon <= 8 and accountant == "dp-accounting RDP"
    assert epsilon == compute_rdp_epsilon(sigma, q, steps, delta)
    assert epsilon <= renyi_epsilon(sigma, q, steps, delta) < 8.3
    assert renyi_epsilon(1.03 * sigma, q, steps, delta) <= 8


def test_hardly_any_noise_is_accounted_by_renyi_and_says_so() -> None:
    epsilon, accountant = compute_tightest_epsilon(1e-3, 0.1, 10, 1e-5)
    assert epsilon > 1e5 and accountant == "dp-accounting RDP"
    assert compute_tightest_epsilon(5.0, 1.0, 1, 1e-5) == (
        pytest.approx(0.725522, abs=2e-6),
        "dp-accounting PLD",
    )


@pytest.mark.parametrize(
    ("mechanism", "sentence"),
    [
        ((0.0, 0.1, 1, 1e-5), "noise multiplier > 0, got 0.0: without noise there is no epsilon"),
        ((1.0, 0.0, 1, 1e-5), r"sampling rate in \(0, 1\], got 0.0"),
        ((1.0, 1.5, 1, 1e-5), r"sampling rate in \(0, 1\], got 1.5"),
        ((1.0, 0.1, 1, 0.0), r"delta in \(0, 1\), got 0.0"),
        ((1.0, 0.1, -1, 1e-5), "steps >= 0, got -1"),
        ((math.nan, 0.1, 1, 1e-5), "noise multiplier > 0, got nan"),
    ],
)
def test_mechanisms_that_do_not_exist_are_refused(
    mechanism: tuple[float, float, int, float], sentence: str
) -> None:
    for epsilon in (compute_pld_epsilon, compute_rdp_epsilon):
        with pytest.raises(AuditError, match=sentence):
            epsilon(*mechanism)


def test_an_epsilon_out_of_reach_is_refused() -> None:
    with pytest.raises(AuditError, match="epsilon > 0 and at most 1000, got 0"):
        find_noise_multiplier(0.0, 1e-5, 0.1, 10)
    with pytest.raises(AuditError, match="none is enough"):
        find_noise_multiplier(1e-6, 1e-9, 1.0, 10**6)


@pytest.mark.parametrize(
    ("epsilon", "q", "steps", "most"), [(3.0, 1.0, 1, 3), (0.1, 0.05, 200, 3), (1.0, 0.01, 1000, 5)]
)
def test_noise_is_solved_for_in_few_looks_at_the_loss_distribution(
    epsilon: float, q: float, steps: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each takes seconds: two ends of a bracket, and straight lines between them until one is close
    enough."""
    looks, solved = 0, find_noise_multiplier(epsilon, 1e-5, q, steps)

    def counted(*arguments: Any) -> float:
        nonlocal looks
        looks += 1
        return compute_pld_epsilon(*arguments)

    monkeypatch.setattr(gaussian, "compute_pld_epsilon", counted)
    assert gaussian.find_noise_multiplier.__wrapped__(epsilon, 1e-5, q, steps) == solved
    assert looks <= most


# --- two scales of noise ---


@pytest.mark.parametrize(
    ("order", "one", "other"), [(2.0, 1.0, 0.8), (2.0, 0.8, 1.0), (5.0, 1.0, 1.3)]
)
def test_divergence_of_two_scales_is_the_integral(order: float, one: float, other: float) -> None:
    def integrand(x: float) -> float:
        return math.exp(
            order * norm.logpdf(x, scale=one) + (1 - order) * norm.logpdf(x, scale=other)
        )

    expected = math.log(quad(integrand, -60, 60, points=[0.0], limit=400)[0]) / (order - 1)
    assert compute_noise_scale_divergence(order, 1, one, other) == pytest.approx(expected, rel=1e-7)
    assert compute_noise_scale_divergence(order, 7, one, other) == pytest.approx(
        7 * expected, rel=1e-7
    )


def test_epsilon_of_two_scales_is_exact() -> None:
    """Against the integral of what exceeds e^epsilon, over the squared norm."""
    one, other, delta = 1.0, 0.8, 1e-3
    epsilon = compute_noise_scale_epsilon(3, one, other, delta)

    def delta_at(a: float, b: float) -> float:
        def above(x: float) -> float:
            p, q = (float(chi2.pdf(x / scale**2, 3)) / scale**2 for scale in (a, b))
            return max(p - math.exp(epsilon) * q, 0.0)

        return float(quad(above, 0, 200, limit=2000, points=np.linspace(1, 60, 40))[0])

    assert max(delta_at(one, other), delta_at(other, one)) == pytest.approx(delta, rel=1e-5)
    assert (
        compute_noise_scale_epsilon(3, 0.7, 0.7, delta) == 0
        and compute_noise_scale_epsilon(10**8, 1.0, 0.999, 1e-5) > 40
    )
    assert compute_noise_scale_divergence(2, 5, 1.0, 0.5) == math.inf
