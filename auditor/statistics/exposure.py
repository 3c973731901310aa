"""Compute exposure in bits, from ranks, uniform references or weighted draws (formulas.md B6).

exposure = log2|R| - log2 rank, if R is the space of possible canaries. rank = #{r in R: nll(r) <=
nll(canary)} counts the canary itself, and ties lower the exposure. If a canary was drawn uniformly
and never inserted, P(exposure >= e) <= 2^-e. nll is in nats.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass

import numpy as np
import scipy

from auditor.core.arrays import Bools, Floats
from auditor.core.secret_randomness import make_keyed_generator
from auditor.statistics import bootstrap
from auditor.statistics.bootstrap import CONFIDENCE
from auditor.statistics.intervals import clopper_pearson

# Nats, in place of infinity, if a distribution gives a text probability 0.
_IMPOSSIBLE = 1e4


def compute_exposure(rank: float, bits: float) -> float:
    """Return the exposure, bits - log2(rank), for bits = log2 |R|."""
    return bits - math.log2(rank)


def estimate_sampled_exposure(nll: float, references: Floats) -> float:
    """Estimate exposure from n uniform references as log2 n - log2(c + 1) (TF Privacy).

    c is the number of references with at most the canary's nll. references: (n,) their nll in nats.
    """
    return math.log2(len(references)) - math.log2(1 + int((references <= nll).sum()))


def compute_canary_p_value(nll: float, references: Floats) -> float:
    """Return the exact p-value (c + 1) / (n + 1) for "the canary was not inserted".

    A canary that was not inserted is exchangeable with its n references. c is the number of
    references with at most the canary's nll.
    """
    return (1 + int((references <= nll).sum())) / (1 + len(references))


def bound_null_exposure_tail(bits: float, n: int) -> float:
    """Return a 95% upper bound on the share of canaries that reach an exposure by chance.

    bits: the exposure. n: the number of canaries, all outside the training data.

    The bound holds for all `bits` at once, by the inequality of Dvoretzky, Kiefer and Wolfowitz
    with Massart's constant (1990, Theorem 1; confidence >= 1/2): P(for any `bits`, the observed
    share exceeds its expectation by more than t) <= exp(-2 n t^2). The expectation is at most
    2^-bits.
    """
    return min(1.0, 2.0**-bits + math.sqrt(-math.log(1 - CONFIDENCE) / (2 * n)))


# --- weighted draws ---


@dataclass(frozen=True)
class WeightedDraws:
    """Texts drawn at random, to estimate a canary's rank in a large space of `size` texts.

    The first `n_from_q` draws are from a distribution q, the others uniform.
    nll: (n,) by the model, in nats.
    log_q: (n,) log q of each draw.
    counts: (n,) mask of the valid draws. A draw is valid if it is a text of the space, and if its
    tokens are those that the tokenizer gives the text.
    """

    texts: tuple[str, ...]
    nll: Floats
    log_q: Floats
    counts: Bools
    n_from_q: int
    size: int  # number of texts in the space

    @property
    def weights(self) -> Floats:
        """Return the importance weight of each draw, of shape (n,).

        The weight of an invalid draw is 0. Otherwise it is 1 / density, where density is that of
        the mixture of q and uniform. No weight exceeds `size` times n / (number of uniform draws).
        """
        share = self.n_from_q / len(self.nll)
        # log 0, if all draws come from one of the two distributions
        with np.errstate(divide="ignore"):
            log_drawn, log_uniform = np.log([share, 1 - share])
        log_density = np.logaddexp(self.log_q + log_drawn, log_uniform - math.log(self.size))
        return np.where(self.counts, np.exp(-log_density), 0.0)

    def bound_draw_weight(self, nll: float) -> float:
        """Return the largest weight that a draw with at most this nll can have.

        The bound holds if q is at least the model's probability.
        """
        n = len(self.nll)
        bounds = []
        if self.n_from_q:
            # The largest float is about e^709.
            bounds.append(n / self.n_from_q * math.exp(min(nll, 700.0)))
        if self.n_from_q < n:
            bounds.append(n / (n - self.n_from_q) * self.size)
        return min(bounds)


@dataclass(frozen=True)
class RankEstimate:
    """Hold a rank and its two-sided 95% interval."""

    rank: float
    low: float
    high: float


def estimate_canary_rank(nll: float, text: str, draws: WeightedDraws) -> RankEstimate:
    """Return an unbiased estimate of a canary's rank, with a 95% interval (formulas.md A8).

    The rank is 1 + E[weight 1{nll(r) <= nll, r not the canary}]. The interval is a bootstrap's.

    Two bounds always hold: rank <= |R|, and rank <= e^nll because the texts at least as likely as
    the canary have a total probability of at most 1. Even if no draw is more likely than the
    canary, some text may be. So the upper end is at least 1 + p w: p is Clopper and Pearson's bound
    on the probability of an event that none of n draws shows, and w is the largest weight of a
    draw.
    """
    n = len(draws.nll)
    other = np.array([draw_text != text for draw_text in draws.texts], dtype=bool)
    values = np.where((draws.nll <= nll) & other, draws.weights, 0.0)
    low, high = bootstrap.compute_percentile_interval(
        bootstrap.compute_resampled_means(values, "exposure")
    )
    # No resample contains a draw that the sample missed.
    missed = clopper_pearson(0, n)[1] * draws.bound_draw_weight(nll)
    most = rank_upper_bound(nll, draws.size)
    rank, low, high = (min(most, 1 + x) for x in (float(values.mean()), low, max(high, missed)))
    return RankEstimate(rank, low, high)


def rank_upper_bound(nll: float, size: int) -> float:
    """Return the largest possible rank of a text with this nll.

    At most e^nll texts can be as likely, because probabilities sum to at most 1. size: the number
    of texts in the space.
    """
    return max(1.0, min(float(size), math.exp(min(nll, 700.0))))


# --- extrapolation ---


@dataclass(frozen=True)
class SkewNormal:
    """Hold a skew-normal distribution fitted to the nll of references.

    fit_p: the p-value for "the references are skew-normal".
    """

    parameters: tuple[float, float, float]  # shape, location, scale
    fit_p: float

    def extrapolate_exposure(self, nll: float, most: float) -> float:
        """Return -log2 of the fitted cdf at this nll, but at most `most` bits.

        The result has no interval, because the shape of the far tail is unknown.
        """
        _, location, scale = self.parameters
        if scale == 0:  # all references are equal
            return 0.0 if nll >= location else most
        return min(most, float(-scipy.stats.skewnorm.logcdf(nll, *self.parameters)) / math.log(2))


def fit_skew_normal(references: Floats) -> SkewNormal:
    """Fit a skew-normal distribution by maximum likelihood, as TF Privacy does.

    Far in the tail, estimates rest only on the assumed shape.
    """
    references = np.minimum(references, _IMPOSSIBLE)
    if np.ptp(references) < 1e-9:
        return SkewNormal((0.0, float(references.mean()), 0.0), 0.0)
    with warnings.catch_warnings():
        # The optimiser tries impossible parameters on its way.
        warnings.simplefilter("ignore", RuntimeWarning)
        shape, location, scale = map(float, scipy.stats.skewnorm.fit(references))
    noise = make_keyed_generator("skew-normal fit")
    return SkewNormal(
        (shape, location, scale),
        compute_skew_normal_p_value(references, noise) if scale > 0 else 0.0,
    )


_SIMULATED = 299  # number of samples from the fitted distribution
# delta = shape / sqrt(1 + shape^2); towards 1 it is a half-normal distribution (Azzalini 1985).
_LARGEST_DELTA = 0.9999
_MAYBE_SKEWEST = 0.9


def compute_skew_normal_p_value(values: Floats, noise: np.random.Generator) -> float:
    """Return the p-value for "the values are independent skew-normal draws"; values: (n,).

    Two statistics share the significance level: the Kolmogorov-Smirnov distance, and, to test the
    tails, the absolute difference between the excess kurtosis and the kurtosis that the skewness
    implies. Each is compared with its values in `_SIMULATED` simulated samples.

    The parameters are refitted to each sample; without this the test would almost never reject
    (Lilliefors 1967).
    """
    delta, kurtosis, distance = _measure_skew_normal_misfit(values[None])
    normals = noise.normal(size=(2, _SIMULATED, len(values)))
    # Few values determine the skewness badly, and a half-normal distribution has the heaviest tail:
    # both distributions must be refuted.
    skewest = math.copysign(_LARGEST_DELTA, delta[0])
    deltas = [float(delta[0]), *([skewest] if abs(delta[0]) > _MAYBE_SKEWEST else [])]
    return max(
        _compute_misfit_p_value(kurtosis[0], distance[0], candidate, normals)
        for candidate in deltas
    )


def _compute_misfit_p_value(
    kurtosis: float, distance: float, delta: float, normals: Floats
) -> float:
    """Return the joint p-value of the two statistics of `compute_skew_normal_p_value`.

    kurtosis, distance: the observed statistics. delta: the fitted skewness parameter, with which
    samples are simulated. normals: (2, m, n) standard normal draws for m samples.
    """
    # Azzalini 1985: delta |u| + sqrt(1 - delta^2) v of independent standard normal u, v.
    samples = delta * np.abs(normals[0]) + math.sqrt(1 - delta**2) * normals[1]
    _, kurtoses, distances = _measure_skew_normal_misfit(samples)
    p_values = [
        2 * _compute_exceeded_share(kurtosis, kurtoses),
        2 * _compute_exceeded_share(-kurtosis, -kurtoses),
        _compute_exceeded_share(distance, distances),
    ]
    # Bonferroni: half of the level for each statistic.
    return min(1.0, 2 * min(p_values))


def _compute_exceeded_share(value: float, simulated: Floats) -> float:
    return (1 + int((simulated >= value).sum())) / (1 + len(simulated))


def _measure_skew_normal_misfit(samples: Floats) -> tuple[Floats, Floats, Floats]:
    """Return delta, kurtosis misfit and Kolmogorov's distance of each sample, (m,) each.

    The kurtosis misfit is the excess kurtosis minus the kurtosis that delta implies. samples: (m,
    n).
    """
    z = samples - samples.mean(-1, keepdims=True)
    z /= z.std(-1, keepdims=True)
    skewness = (z**3).mean(-1)
    kurtosis = (z**4).mean(-1) - 3
    # Moments: skewness = (4 - pi)/2 m^3 / (1 - m^2)^(3/2) with m = delta sqrt(2/pi), the mean.
    cubed = np.cbrt(2 * np.abs(skewness) / (4 - math.pi)) ** 2
    delta = np.minimum(np.sqrt(math.pi / 2 * cubed / (1 + cubed)), _LARGEST_DELTA) * np.sign(
        skewness
    )
    mean = delta * math.sqrt(2 / math.pi)
    implied = 2 * (math.pi - 3) * mean**4 / (1 - mean**2) ** 2
    shape = delta / np.sqrt(1 - delta**2)
    scale = np.sqrt(1 - mean**2)
    # Standardised samples have mean 0 and deviation 1, and so has the fitted distribution.
    cdf = scipy.stats.skewnorm.cdf(
        np.sort(z, axis=-1) * scale[:, None] + mean[:, None], shape[:, None]
    )
    steps = np.arange(samples.shape[-1] + 1) / samples.shape[-1]
    distance = np.maximum(cdf - steps[:-1], steps[1:] - cdf).max(-1)
    return delta, kurtosis - implied, distance
