"""Estimate shares, means, differences and perplexities with intervals, from arrays."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np
import scipy

from auditor.core.arrays import Bools, Floats, Ints
from auditor.core.result import Measurement
from auditor.statistics import bootstrap
from auditor.statistics.bootstrap import CONFIDENCE

# Half-width of a normal distribution's interval at CONFIDENCE, in standard deviations. A literal,
# because importing scipy.special takes a fifth of the time of a gate.
Z = 1.959963984540054


@lru_cache(maxsize=4096)
def clopper_pearson(hits: int, n: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Return the exact two-sided interval for a binomial share; [0, 1] for n = 0."""
    tail = (1 - confidence) / 2
    if n == 0 or tail == 0:
        return 0.0, 1.0
    # Without hits (1 - high)^n = tail, and with only hits low^n = tail: neither needs
    # scipy.special.
    if hits == 0:
        return 0.0, -math.expm1(math.log(tail) / n)
    if hits == n:
        return math.exp(math.log(tail) / n), 1.0
    low = float(scipy.special.betaincinv(hits, n - hits + 1, tail))
    high = float(scipy.special.betaincinv(hits + 1, n - hits, 1 - tail))
    return low, high


def measure_share(name: str, hit: Bools, note: str = "") -> Measurement:
    """Return a share with its Clopper-Pearson interval; NaN for an empty array."""
    n = len(hit)
    hits = int(hit.sum())
    low, high = clopper_pearson(hits, n)
    return Measurement(name, hits / n if n else math.nan, low, high, n, note=note)


def subtract_nonmember_share(name: str, members: Bools, nonmembers: Bools) -> Measurement:
    """Return the members' share minus the non-members' share.

    The interval is Newcombe's hybrid score interval (1998, method 10). members, nonmembers:
    (secrets,).
    """
    sides = [(len(hit), int(hit.sum())) for hit in (members, nonmembers)]
    return subtract_nonmember_mean(
        name,
        *(Measurement(name, hits / n, *compute_wilson_interval(hits, n), n) for n, hits in sides),
    )


def compute_wilson_interval(hits: int, n: int) -> tuple[float, float]:
    """Return Wilson's score interval for a binomial share."""
    p = hits / n
    scale = 1 + Z * Z / n
    centre = (p + Z * Z / (2 * n)) / scale
    half = Z * math.sqrt(p * (1 - p) / n + Z * Z / (4 * n * n)) / scale
    return max(0.0, centre - half), min(1.0, centre + half)


def estimate_perplexity(
    texts: Sequence[tuple[float, int]], name: str = "perplexity"
) -> Measurement:
    """Return the perplexity, the exponential of the mean nll per token.

    texts: (summed nll in nats, number of tokens) for each text. If a text has probability 0, the
    perplexity is infinite, and the note gives the number of such texts and the perplexity of the
    others.
    """
    nll, tokens = (np.array(column, dtype=float) for column in zip(*texts, strict=True))
    n = len(nll)
    impossible = np.isinf(nll)
    note = ""
    log_ends = np.array(bootstrap.estimate_mean_rate(nll, tokens, "perplexity"))
    if impossible.any():
        note = f"{impossible.sum():,} of {n:,} texts have a token of probability 0"
        if not impossible.all():
            note += (
                f"; {np.exp(nll[~impossible].sum() / tokens[~impossible].sum()):.2f} over the "
                "others"
            )
    # the nll of a token is never below 0
    value, low, high = np.exp(np.maximum(log_ends, 0.0)).tolist()
    return Measurement(name, value, low, high, n, "perplexity", note)


def compute_mean_probability(name: str, values: Floats, note: str = "") -> Measurement:
    """Return a mean probability with the interval of `compute_gaffke_interval`; NaN if empty."""
    n = len(values)
    if not n:
        return Measurement(name, math.nan, 0.0, 1.0, 0, "probability", note)
    return Measurement(
        name, float(values.mean()), *compute_gaffke_interval(values, name), n, "probability", note
    )


def contain_unit_interval(m: Measurement, values: Floats, unit: Ints) -> Measurement:
    """Widen the interval of a mean probability for dependent records.

    Records that share a person or document are dependent. Each person or document contributes one
    number, the sum of these probabilities.

    values: (records,) probabilities with this mean; unit: (records,) codes of person or document.
    """
    of = np.unique(unit, return_inverse=True)[1]
    sizes = np.bincount(of) if len(of) else np.ones(1)
    scale = len(sizes) / max(1, len(of))  # the mean of the sums is then that of the records
    sums = np.asarray(scale * np.bincount(of, values), dtype=np.float64)
    wide = estimate_bounded_mean(m.name, sums, scale * float(sizes.max()), m.unit)
    return replace(m, low=min(m.low, wide.low), high=min(1.0, max(m.high, wide.high)))


def compute_gaffke_interval(values: Floats, stream: str) -> tuple[float, float]:
    """Return a two-sided 95% interval for the mean of numbers in [0, 1].

    The method is by Gaffke 2005 and Learned-Miller and Thomas 2019. The upper end is a quantile of
    weighted means of the sample and one additional value 1, with weights uniform on the simplex.
    For the lower end, the additional value is 0. Unlike a bootstrap, the interval thus allows for a
    rare large value that the sample missed. If all values are 0 or 1, it is Clopper and Pearson's
    interval. Coverage is proved only for special cases such as this, but no counterexample is
    known. stream: a name that seeds the random weights.
    """
    n = len(values)
    means = bootstrap.compute_resampled_means(values, stream, draw=bootstrap.draw_dirichlet_weights)
    places = (np.arange(len(means)) + 0.5) / len(means)
    # The weight of one additional value has the distribution Beta(1, n): use its quantiles instead
    # of draws.
    beyond = 1 - (1 - places) ** (1 / n)
    (low, _), (_, high) = (
        bootstrap.compute_percentile_interval((1 - beyond) * means + beyond * end) for end in (0, 1)
    )
    # Quantiles of draws may not reach the exact ends for only ones or only zeros. Rounding may
    # exceed 1.
    return min(low, clopper_pearson(n, n)[0]), min(1.0, max(high, clopper_pearson(0, n)[1]))


def estimate_mean(name: str, values: Floats, unit: str, note: str = "") -> Measurement:
    """Return a mean, with an interval that depends on the unit.

    The interval is exact for shares (values 0 or 1), Gaffke's for probabilities, and otherwise that
    of `bootstrap.estimate_rate_statistic`, which is infinite for a single value.
    """
    if unit == "share":
        return measure_share(name, values == 1, note)
    if unit == "probability":
        return compute_mean_probability(name, values, note)
    # The stream is the name: numbers with the same name over the same number of secrets use the
    # same resamples.
    ends = bootstrap.estimate_mean_rate(values, np.ones(len(values)), name)
    return Measurement(name, *ends, len(values), unit, note)


def estimate_bounded_mean(
    name: str, values: Floats, most: float, unit: str, note: str = ""
) -> Measurement:
    """Return a mean of numbers in [0, most], with the interval of `compute_gaffke_interval`."""
    return scale_measurement(compute_mean_probability(name, values / most, note), most, unit)


def scale_measurement(m: Measurement, factor: float, unit: str) -> Measurement:
    """Return a share of a largest value `factor` in the unit of that value."""
    return replace(m, value=factor * m.value, low=factor * m.low, high=factor * m.high, unit=unit)


def estimate_mean_share(name: str, values: Floats) -> Measurement:
    """Return the mean of each secret's share; the interval is exact if every share is 0 or 1."""
    unit = "share" if np.isin(values, (0.0, 1.0)).all() else "probability"
    return estimate_mean(name, values, unit)


def subtract_nonmember_mean(
    name: str, members: Measurement, nonmembers: Measurement
) -> Measurement:
    """Return the members' mean minus the non-members' mean.

    The two intervals are combined by Newcombe's method.
    """
    ends = combine_independent_intervals([(1.0, members), (-1.0, nonmembers)])
    return Measurement(name, *ends, members.n + nonmembers.n, members.unit)


def combine_independent_intervals(
    terms: Iterable[tuple[float, Measurement]],
) -> tuple[float, float, float]:
    """Return (value, low, high) of a weighted sum of independent estimates, by MOVER.

    terms: (weight, estimate with its interval). The squared distance from the sum to its lower
    limit is the sum of the squared distances from each weighted estimate to its own lower limit;
    likewise for upper limits (Zou and Donner 2008).
    """
    value = reach_down = reach_up = 0.0
    for times, m in terms:
        # A negative coefficient swaps the ends.
        down, up = sorted((times * (m.low - m.value), times * (m.high - m.value)))
        value = value + times * m.value
        reach_down = math.hypot(reach_down, down)
        reach_up = math.hypot(reach_up, up)
    return value, value - reach_down, value + reach_up
