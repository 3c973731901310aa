"""Exposure in bits from ranks, from uniform references and from weighted draws (formulas.md B6). Numbers in and out.

exposure = log2|R| - log2 rank, rank = #{r in R: nll(r) <= nll(canary)}, itself included: ties count against exposure.
Null distribution: over a canary that was drawn uniformly and never inserted, P(exposure >= e) <= 2^-e. nll in nats
throughout.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.stats import kstest, skewnorm

from auditor.statistics import bootstrap
from auditor.statistics.bootstrap import CONFIDENCE
from auditor.statistics.intervals import clopper_pearson

_IMPOSSIBLE = 1e4  # nats: in place of infinity, where a distribution gives a text no probability at all


def exposure_from_rank(rank: float, bits: float) -> float:
    """bits: log2 of the size of the space."""
    return bits - math.log2(rank)


def sampled_exposure(nll: float, references: NDArray[np.float64]) -> float:
    """log2 n - log2(c + 1), c of n uniform references at most as high; cannot exceed log2 n (TF Privacy)."""
    return math.log2(len(references)) - math.log2(1 + int((references <= nll).sum()))


def canary_null_p_value(nll: float, references: NDArray[np.float64]) -> float:
    """(c + 1) / (n + 1): exact, since a canary that was never inserted is exchangeable with its references."""
    return (1 + int((references <= nll).sum())) / (1 + len(references))


def null_exposure_tail_bound(bits: float, n: int) -> float:
    """Upper bound (95%), at all bits at once, of the share of n canaries with this exposure or more, were none learnt.

    Dvoretzky-Kiefer-Wolfowitz, one-sided with Massart's constant (1990, Theorem 1; confidence >= 1/2): of n independent
    draws P(the tail exceeds its distribution somewhere by more than t) <= exp(-2 n t^2). The distribution is at most
    2^-bits.
    """
    return min(1.0, 2.0**-bits + math.sqrt(-math.log(1 - CONFIDENCE) / (2 * n)))


# --- weighted draws ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WeightedDraws:
    """n draws by which ranks in a large space are estimated: the first `drawn` from q, the others uniform.

    nll, log_q: (n,) nats; counts: (n,) whether a draw is a text of the space as the tokenizer writes it.
    """

    texts: tuple[str, ...]
    nll: NDArray[np.float64]
    log_q: NDArray[np.float64]
    counts: NDArray[np.bool_]
    drawn: int
    size: int  # of the space

    @property
    def weights(self) -> NDArray[np.float64]:
        """1/density of each draw in the mixture of both distributions: at most n/uniform * size, however small q is."""
        n = len(self.nll)
        with np.errstate(divide="ignore"):  # no draw from one of the two
            own, other = np.log(self.drawn / n), np.log(1 - self.drawn / n)
        weights: NDArray[np.float64] = np.exp(-np.logaddexp(self.log_q + own, other - math.log(self.size)))
        return np.where(self.counts, weights, 0.0)

    def largest_draw_weight(self, nll: float) -> float:
        """The most that a draw of at most this nll can weigh: q is no less than the model's own probability."""
        n, uniform = len(self.nll), len(self.nll) - self.drawn
        # The largest float is about e^709.
        from_model = n / self.drawn * math.exp(min(nll, 700.0)) if self.drawn else math.inf
        return min(from_model, n / uniform * self.size if uniform else math.inf)


@dataclass(frozen=True)
class RankEstimate:
    """A rank with its two-sided 95% interval."""

    rank: float
    low: float
    high: float


def estimate_canary_rank(nll: float, text: str, draws: WeightedDraws) -> RankEstimate:
    """The rank of a canary: 1 + E[weight 1{nll(r) <= nll, r another text}], unbiased (formulas.md A8).

    The interval is a bootstrap's, and reaches at least as far up as a hit that n draws can miss (Clopper-Pearson's
    bound for no hit, times the largest weight). Two bounds hold for certain: rank <= e^nll, since texts that are as
    likely as the canary share a mass of at most 1, and rank <= |R|.
    """
    n = len(draws.nll)
    other = np.array([drawn != text for drawn in draws.texts], dtype=bool)
    values = np.where((draws.nll <= nll) & other, draws.weights, 0.0)
    low, high = bootstrap.percentile_interval(bootstrap.resampled_means(values, "exposure"))
    # No resample holds a draw that the sample missed.
    missed = clopper_pearson(0, n)[1] * draws.largest_draw_weight(nll)
    most = rank_upper_bound(nll, draws.size)
    rank, low, high = (min(most, 1 + x) for x in (float(values.mean()), low, max(high, missed)))
    return RankEstimate(rank, low, high)


def rank_upper_bound(nll: float, size: int) -> float:
    """The worst rank that a text of this nll can have, whatever the others': probabilities sum to at most 1."""
    return max(1.0, min(float(size), math.exp(min(nll, 700.0))))


# --- extrapolation ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SkewNormal:
    """A skew-normal distribution fitted to the references' nll, and how badly it fits."""

    parameters: tuple[float, float, float]  # shape, location, scale
    ks_p: float  # of a Kolmogorov-Smirnov test against the references; small: the distribution does not fit

    def extrapolated_exposure_bits(self, nll: float, most: float) -> float:
        """Exposure: -log2 of the cdf, at most `most`. It has no interval: far out in a tail nobody knows the family."""
        _, location, scale = self.parameters
        if scale == 0:  # all references alike
            return 0.0 if nll >= location else most
        return min(most, float(-skewnorm.logcdf(nll, *self.parameters)) / math.log(2))


def fit_skew_normal(references: NDArray[np.float64]) -> SkewNormal:
    """Maximum likelihood, as TF Privacy extrapolates. What it says far out in the tail is what its shape says."""
    references = np.minimum(references, _IMPOSSIBLE)
    if np.ptp(references) < 1e-9:
        return SkewNormal((0.0, float(references.mean()), 0.0), 0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # on its way the optimiser tries impossible parameters
        shape, location, scale = map(float, skewnorm.fit(references))
    ks_p = float(kstest(references, skewnorm(shape, location, scale).cdf).pvalue) if scale > 0 else 0.0
    return SkewNormal((shape, location, scale), ks_p)
