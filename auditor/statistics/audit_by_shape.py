"""Bound epsilon from below by assuming the shape of the canaries' likelihood ratios.

The shape is the distribution of a canary's log-likelihood ratio, included against excluded. The
assumed shape is that of T steps of a Gaussian mechanism of unknown noise, with sampling rate q, as
in DP-SGD; (q, T) = (1, 1) is the Gaussian mechanism. Canaries share some randomness that the
release reveals. Given this shared randomness, the bound assumes that canaries are independent, and
that no canary is distinguished better than the shape with some noise allows. The shared randomness
may determine this noise.

Proof. Given the shared randomness Z, take the r surest of m guesses. The number of right guesses
among them is at most that of the shape (order statistics; Xiang et al. 2025 use a Chernoff bound,
here the probability is exact). This bounds the noise, with part of the significance level. The
mechanism's epsilon at delta covers all Z, so delta_Z(epsilon) has a mean of at most delta. With
error probability equal to the other part of the level, delta_Z is at most delta / part (Markov).
The bound is the epsilon of the refuted noise at this larger delta. It also covers a mechanism that
tosses a further coin to decide whether to reveal every coin or none.

The surer half of the guesses bounds the noise. The surest eighth checks the shape. The bound is 0
if this eighth has fewer right guesses than 95% of audits at the bounded noise would have. This
check detects most mechanisms of a different shape.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import scipy

from auditor.core.arrays import Floats
from auditor.core.errors import AuditError
from auditor.statistics.distributions import compute_binomial_cdf, compute_binomial_sf
from auditor.statistics.one_run import Counts, find_largest_refuted_value, list_guess_counts

Sampling = tuple[float, int]  # rate q, steps T

GAUSSIAN: Sampling = (1.0, 1)
_SHARED = 0.6  # share of the level for the common coin of the canaries
_POINTS = 2**13
_TAILS = 9.0
_CELLS = 4001
_MOST_COUNTS = 1000
# numbers of halvings of the guesses: the bound uses a half, the check an eighth
_BOUNDED_BY = 1
_CHECKED_BY = 3
_CONTRADICTED = 0.05
_STEP = 1.005  # ratio of two neighbouring noises to try
_LEAST_NOISE = 0.05
_MOST_NOISE = 100.0
_N_NOISES = math.ceil(math.log(_MOST_NOISE / _LEAST_NOISE, _STEP))
_FINE = 1e-6
_NOTHING = 1e-14  # a probability this small counts as 0


class LikelihoodRatioDistribution(NamedTuple):
    """Describe the distribution of a canary's log-likelihood ratio.

    log_ratios: the possible values, in nats.
    inside, out: the probability of each value for an included and for an excluded canary.
    """

    log_ratios: Floats
    inside: Floats
    out: Floats

    def delta(self, epsilon: float) -> float:
        """Return the smallest delta that makes the mechanism (epsilon, delta)-DP.

        epsilon: in nats.
        """
        factor = math.exp(min(epsilon, 700.0))
        more = self.inside - factor * self.out
        less = self.out - factor * self.inside
        return float(max(np.maximum(more, 0).sum(), np.maximum(less, 0).sum()))

    def compute_guess_probabilities(self) -> tuple[Floats, Floats]:
        """Return two cumulative probabilities for each level of sureness, highest first.

        These are P[a guess is at least this sure] and P[a guess is at least this sure and is
        right].
        """
        order = np.argsort(-np.abs(self.log_ratios), kind="stable")
        said_in = self.log_ratios[order] > 0
        inside = self.inside[order]
        out = self.out[order]
        return np.cumsum(inside + out) / 2, np.cumsum(np.where(said_in, inside, out)) / 2


@lru_cache(maxsize=1024)
def compute_likelihood_ratio_distribution(
    noise: float, sampling: Sampling
) -> LikelihoodRatioDistribution:
    """Return the distribution of the log-likelihood ratio of all T steps, by Fourier transforms.

    For an included canary, a step outputs x ~ (1 - q) N(0, noise^2) + q N(1, noise^2); for an
    excluded canary, x ~ N(0, noise^2). sampling: (q, T).
    """
    q, steps = sampling
    x = np.linspace(-_TAILS * noise, 1 + _TAILS * noise, _CELLS)
    # The log-ratio of included to excluded at x is log(1 - q + q e^((2x - 1) / (2 noise^2))), and
    # never below log(1 - q).
    ratio = np.logaddexp(
        math.log1p(-q) if q < 1 else -math.inf, math.log(q) + (2 * x - 1) / (2 * noise**2)
    )
    middle = (ratio[1:] + ratio[:-1]) / 2
    inside, out = (np.diff(mass) for mass in _compute_step_cdfs(x, noise, q))
    means = float(inside @ middle), float(out @ middle)
    spread = math.sqrt(max(0.0, float(inside @ middle**2) - means[0] ** 2))
    # The transform wraps around, so the grid must contain the sum up to _TAILS deviations, and any
    # single step.
    reach = (
        steps * max(abs(means[0]), abs(means[1]))
        + _TAILS * spread * math.sqrt(steps)
        + max(-float(ratio[0]), float(ratio[-1]))
    )
    width = 2 * reach / _POINTS
    at: Floats = (np.arange(_POINTS, dtype=np.float64) - _POINTS // 2) * width
    # The ratio rises with x: find x at the lower edge of each cell.
    with np.errstate(divide="ignore", over="ignore"):
        # A cell below the smallest ratio begins at x = -inf and is empty; the last cell contains
        # everything above it.
        edges = noise**2 * np.log(np.maximum((np.exp(at - width / 2) - (1 - q)) / q, 0)) + 0.5
    composed = (
        _compose_steps(np.diff(np.append(mass, 1.0)), steps)
        for mass in _compute_step_cdfs(edges, noise, q)
    )
    return LikelihoodRatioDistribution(at, *composed)


def compute_final_model_distribution(
    noise_multiplier: float, sampling: Sampling, copies: int
) -> LikelihoodRatioDistribution:
    """Return the distribution of a canary's log-likelihood ratio given only the sum of all T steps.

    A finished model reveals only this sum. A canary has k copies, each clipped to norm C. They move
    the sum along the canary's direction by Binomial(k T, q) C. The noise of the sum has the
    standard deviation sqrt(T) sigma C.

    If the noise is much larger than C, the sums with and without the canary are close to two
    Gaussians. The distance of their means, divided by the root of their mean variance, is d = k T q
    / sqrt(T sigma^2 + k T q (1 - q) / 2).

    Args:
        noise_multiplier: sigma.
        sampling: (q, T), the sampling rate and the number of steps.
        copies: k.
    """
    q, steps = sampling
    draws = copies * steps
    spread = math.sqrt(draws * q * (1 - q))
    lowest = max(0, int(draws * q - _TAILS * spread) - 1)
    highest = min(draws, int(draws * q + _TAILS * spread) + 9)
    # Keep about _MOST_COUNTS of many counts; each also represents the counts since the previous
    # one.
    counts = np.unique(
        np.linspace(lowest, highest, min(highest - lowest, _MOST_COUNTS) + 1).round()
    )
    mass = np.diff(compute_binomial_cdf(counts, draws, q), prepend=0.0)
    noise = math.sqrt(steps) * noise_multiplier
    x = np.linspace(-_TAILS * noise, highest + _TAILS * noise, _CELLS)
    out = np.diff(scipy.special.ndtr(x / noise))
    inside = np.diff(scipy.special.ndtr((x[:, None] - counts) / noise) @ mass)
    with np.errstate(divide="ignore", invalid="ignore"):
        # A cell without mass on either side has no ratio and is never reached.
        at = np.nan_to_num(np.log(inside) - np.log(out), nan=0.0, posinf=np.inf, neginf=-np.inf)
    return LikelihoodRatioDistribution(at, inside, out)


def _compute_step_cdfs(x: Floats, noise: float, q: float) -> tuple[Floats, Floats]:
    """Return P[a step outputs at most x] for an included canary and for an excluded canary."""
    out = scipy.special.ndtr(x / noise)
    return (1 - q) * out + q * scipy.special.ndtr((x - 1) / noise), out


def _compose_steps(step: Floats, steps: int) -> Floats:
    if steps == 1:
        return step
    # Index 0 of the transform is a ratio of 0, which is in the middle of the grid.
    spectrum = np.fft.rfft(np.fft.ifftshift(step)) ** steps
    # Values below 0 are rounding errors of the transform.
    return np.asarray(
        np.maximum(np.fft.fftshift(np.fft.irfft(spectrum, _POINTS)), 0), dtype=np.float64
    )


@lru_cache(maxsize=1024)
def _compute_nonempty_guess_probabilities(
    noise: float, sampling: Sampling
) -> tuple[Floats, Floats]:
    """Return `compute_guess_probabilities` without the entries of (almost) zero probability."""
    as_sure, right = compute_likelihood_ratio_distribution(
        noise, sampling
    ).compute_guess_probabilities()
    nonempty = np.diff(as_sure, prepend=0.0) > _NOTHING
    return np.minimum(as_sure[nonempty], 1.0), right[nonempty]


@lru_cache(maxsize=2**16)
def compute_canary_shape_p_value(m: int, r: int, v: int, noise: float, sampling: Sampling) -> float:
    """Return P[at least v of the r surest of m guesses are right] for independent canaries.

    The share of canaries surer than the (r+1)-th surest is Beta(r + 1, m - r) distributed. Given
    this share, the r guesses are right independently of each other, with a binomial tail. The
    result is the mean tail.
    """
    if v > r:
        return 0.0
    as_sure, right = _compute_nonempty_guess_probabilities(noise, sampling)
    if r == m:
        return float(compute_binomial_sf(v - 1, r, min(right[-1] / as_sure[-1], 1.0)))
    mass = np.diff(scipy.special.betainc(r + 1, m - r, as_sure), prepend=0.0)
    nonempty = mass > _NOTHING
    # The probability that a guess at least as sure as this one is right.
    chance = np.minimum(right[nonempty] / np.maximum(as_sure[nonempty], 1e-300), 1.0)
    return min(1.0, float(mass[nonempty] @ compute_binomial_sf(v - 1, r, chance)))


@lru_cache(maxsize=2**14)
def bound_shape_epsilon(
    m: int,
    right: Counts,
    delta: float,
    level: float = 0.05,
    copies: int = 1,
    sampling: Sampling = GAUSSIAN,
) -> float:
    """Return a lower bound on epsilon at `delta`, assuming DP-SGD with the given sampling.

    With more noise, fewer guesses are right. The guesses refute a noise if so many right guesses
    are too unlikely with it. The result is the epsilon of the smallest refuted noise, or 0 if no
    noise is refuted. The result is also 0 if, at that noise, the surest eighth of the guesses has
    too few right guesses: then the scores are not distributed as assumed.

    Raise AuditError for several copies of sampled canaries.

    Args:
        m: number of canaries.
        right: number of right guesses among the r surest, for each r in `list_guess_counts(m)`.
        delta: delta of the bound.
        level: significance level.
        copies: number of insertions of each canary.
        sampling: (q, T), the sampling rate and the number of steps.
    """
    if copies > 1 and sampling != GAUSSIAN:
        raise AuditError(
            f"expected canaries that are sampled to be inserted once, got {copies} copies"
        )
    counts = list_guess_counts(m)
    bounding, checking = (min(i, len(counts) - 1) for i in (_BOUNDED_BY, _CHECKED_BY))
    most = _find_least_refuted_noise(
        m, counts[bounding], right[bounding], (1 - _SHARED) * level, sampling
    )
    if most is None:
        return 0.0
    # The probability of at most as many right guesses as were observed, at the refuted noise.
    if (
        1 - compute_canary_shape_p_value(m, counts[checking], right[checking] + 1, most, sampling)
        < _CONTRADICTED
    ):
        return 0.0
    # The docstring of this file explains Markov's bound for delta. The audit observed groups of
    # copies: relative to one record, the noise is `copies` times as large.
    return convert_shape_noise(most * copies, sampling, min(1.0, delta / (_SHARED * level)))


def bound_shape_mu(m: int, right: Counts, level: float, copies: int) -> tuple[float, float]:
    """Return a two-sided interval for one record's mu, assuming independent Gaussian canaries.

    Both ends follow from the number of right guesses among the surer half of the guesses. Each end
    has half the significance level. The upper end holds only for these scores: a better score may
    reveal more.
    """
    counts = list_guess_counts(m)
    bounding = min(_BOUNDED_BY, len(counts) - 1)
    r = counts[bounding]
    v = right[bounding]
    most = _find_least_refuted_noise(m, r, v, level / 2, GAUSSIAN)
    low = 0.0
    if most is not None:
        low = 1 / (most * copies)

    def leaks_more(noise: float) -> bool:
        """Return whether so few right guesses are too unlikely with this noise.

        Too unlikely: a probability below half the significance level.
        """
        return 1 - compute_canary_shape_p_value(m, r, v + 1, noise, GAUSSIAN) < level / 2

    least = find_largest_passing_noise(leaks_more)
    high = math.inf
    if least is not None:
        high = 1 / (least * copies)
    return low, high


def convert_shape_noise(noise: float, sampling: Sampling, delta: float) -> float:
    """Return the epsilon (nats) at `delta` of the mechanism with this noise and sampling."""
    distribution = compute_likelihood_ratio_distribution(noise, sampling)
    return find_largest_refuted_value(
        lambda epsilon: distribution.delta(epsilon) > delta,
        float(distribution.log_ratios[-1]),
        _FINE,
    )


def find_largest_passing_noise(enough: Callable[[float], bool]) -> float | None:
    """Return the largest noise that passes `enough`, in steps of half a percent; None if none does.

    If `enough` is True for a noise, it must be True for every smaller noise.
    """
    n_passing = bisect_left(
        range(_N_NOISES), True, key=lambda k: not enough(_LEAST_NOISE * _STEP**k)
    )
    if not n_passing:
        return None
    return _LEAST_NOISE * _STEP ** (n_passing - 1)


def _find_least_refuted_noise(
    m: int, r: int, v: int, level: float, sampling: Sampling
) -> float | None:
    """Return the smallest refuted noise, in steps of half a percent; None if none is refuted.

    Every larger noise is refuted too.
    """

    def refuted(k: int) -> bool:
        return compute_canary_shape_p_value(m, r, v, _LEAST_NOISE * _STEP**k, sampling) < level

    if refuted(_N_NOISES):
        return _LEAST_NOISE * _STEP ** bisect_left(range(_N_NOISES), True, key=refuted)
    return None
