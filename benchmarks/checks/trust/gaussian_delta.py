"""The exact delta of the subsampled Gaussian mechanism, where it has a formula: no sampling, or at most two steps."""

from __future__ import annotations

import math
from dataclasses import dataclass

from scipy.integrate import quad
from scipy.stats import norm


@dataclass(frozen=True)
class GaussianSetting:
    """sigma, sampling rate and steps, of which the exact delta is known: q = 1, or at most two steps."""

    sigma: float
    q: float
    steps: int

    def __str__(self) -> str:
        return f"sigma {self.sigma:g}, q {self.q:g}, {self.steps:,} steps"


def gaussian_delta(epsilon: float, mu: float) -> float:
    """Of N(mu, 1) against N(0, 1) (Balle and Wang 2018, Theorem 5)."""
    return float(norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu))


def one_step_delta(epsilon: float, sigma: float, q: float, removed: bool) -> float:
    """Of one subsampled step; removed: of the data without the unit against the data with it."""
    bound = math.exp(-epsilon if removed else epsilon)  # on (with / without), whose rise is monotone in x
    if bound <= 1 - q:
        return 0.0 if removed else 1 - math.exp(epsilon)
    edge = sigma**2 * math.log((bound - (1 - q)) / q) + 0.5
    tail = norm.cdf if removed else norm.sf
    without, there = tail(edge / sigma), tail((edge - 1) / sigma)
    with_it = (1 - q) * without + q * there
    pair = (without, with_it) if removed else (with_it, without)
    return float(pair[0] - math.exp(epsilon) * pair[1])


def exact_delta(epsilon: float, setting: GaussianSetting) -> float:
    """The larger of both directions; of two steps by quadrature over the first."""
    sigma, q = setting.sigma, setting.q
    if q == 1:
        return gaussian_delta(epsilon, math.sqrt(setting.steps) / sigma)

    def of(removed: bool) -> float:
        if setting.steps == 1:
            return one_step_delta(epsilon, sigma, q, removed)

        def behind(x: float) -> float:
            without, there = norm.pdf(x, 0, sigma), norm.pdf(x, 1, sigma)
            loss = math.log((1 - q) + q * math.exp((2 * x - 1) / (2 * sigma**2)))
            mass = without if removed else (1 - q) * without + q * there
            return float(mass * one_step_delta(epsilon - (-loss if removed else loss), sigma, q, removed))

        return float(quad(behind, -12 * sigma, 1 + 12 * sigma, limit=400, points=[0.0, 0.5, 1.0])[0])

    return max(of(removed) for removed in (False, True))
