"""Numbers with intervals: shares, means, differences, perplexities. Pure functions on arrays; no torch, no files."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.stats import beta, binomtest, norm

from auditor.core.result import Measurement
from auditor.statistics import bootstrap
from auditor.statistics.bootstrap import CONFIDENCE


def clopper_pearson(hits: int, n: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Exact two-sided interval of a binomial share; [0, 1] for n = 0."""
    tail = (1 - confidence) / 2
    low = 0.0 if hits == 0 else float(beta.ppf(tail, hits, n - hits + 1))
    high = 1.0 if hits == n else float(beta.ppf(1 - tail, hits + 1, n - hits))
    return low, high


def share(name: str, hit: NDArray[np.bool_], note: str = "") -> Measurement:
    """A share with its Clopper-Pearson interval; NaN where there is nothing to take a share of."""
    n, hits = len(hit), int(hit.sum())
    low, high = clopper_pearson(hits, n)
    return Measurement(name, hits / n if n else math.nan, low, high, n, note=note)


def difference(name: str, first: NDArray[np.bool_], second: NDArray[np.bool_]) -> Measurement:
    """Recall of `first` minus `second` on the same secrets: paired bootstrap interval, exact McNemar p in the note.

    Where all pairs agree a bootstrap has no width: then exact bounds of the wins and of the losses are taken apart.
    """
    n = len(first)
    delta = first.astype(float) - second.astype(float)
    wins, losses = int((delta > 0).sum()), int((delta < 0).sum())
    p = binomtest(wins, wins + losses).pvalue if wins + losses else 1.0
    low, high = _interval_of_mean(delta, name)
    if low == high:
        (fewest, most), (least, worst) = clopper_pearson(wins, n), clopper_pearson(losses, n)
        low, high = fewest - worst, most - least
    return Measurement(name, float(delta.mean()), low, high, n, note=f"exact McNemar p = {p:.2g}")


def excess(name: str, members: NDArray[np.bool_], nonmembers: NDArray[np.bool_]) -> Measurement:
    """A share of members minus that of non-members, Newcombe's hybrid score interval (1998, method 10)."""
    a, b = members.mean(), nonmembers.mean()
    (a_low, a_high), (b_low, b_high) = (
        wilson(int(members.sum()), len(members)),
        wilson(int(nonmembers.sum()), len(nonmembers)),
    )
    low = a - b - math.hypot(a - a_low, b_high - b)
    high = a - b + math.hypot(a_high - a, b - b_low)
    return Measurement(name, float(a - b), float(low), float(high), len(members) + len(nonmembers))


def wilson(hits: int, n: int) -> tuple[float, float]:
    """Wilson's score interval of a binomial share."""
    z = float(norm.ppf((1 + CONFIDENCE) / 2))
    p, scale = hits / n, 1 + z * z / n
    centre, half = (p + z * z / (2 * n)) / scale, z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / scale
    return max(0.0, centre - half), min(1.0, centre + half)


def perplexity(texts: Sequence[tuple[float, int]], name: str = "perplexity") -> Measurement:
    """exp of the mean nll a token, from (summed nll in nats, tokens) of each text; `bootstrap.of_rates` over texts.

    Infinite where a text has probability 0: the note then says of how many that is so, and what the others have.
    """
    nll, tokens = (np.array(column, dtype=float) for column in zip(*texts, strict=True))
    n, impossible, note = len(nll), np.isinf(nll), ""
    found = bootstrap.of_rates([nll], [tokens], lambda each: (each[:, 0], np.ones_like(each)), "perplexity")
    if impossible.any():
        note = f"{impossible.sum():,} of {n:,} texts have a token of probability 0"
        if not impossible.all():
            note += f"; {np.exp(nll[~impossible].sum() / tokens[~impossible].sum()):.2f} over the others"
    value, low, high = np.exp(np.maximum(found, 0.0)).tolist()  # a token's nll is never below 0
    return Measurement(name, value, low, high, n, "perplexity", note)


def mean_probability(name: str, values: NDArray[np.float64], note: str = "") -> Measurement:
    """Mean of probabilities over secrets, bootstrap interval; NaN where there is nothing to take a mean of.

    A bootstrap cannot see a rare secret that the sample missed, so it is never narrower at the ends than n secrets
    allow: as wide as Clopper-Pearson's interval of 0 (above) and of n hits (below).
    """
    n = len(values)
    if not n:
        return Measurement(name, math.nan, 0.0, 1.0, 0, "probability", note)
    low, high = _interval_of_mean(values, name)
    low, high = min(low, clopper_pearson(n, n)[0]), max(high, clopper_pearson(0, n)[1])
    return Measurement(name, float(values.mean()), low, high, n, "probability", note)


def share_of_each(name: str, values: NDArray[np.float64]) -> Measurement:
    """Of what each secret holds, the share: exact where each holds one thing, as a mean of shares is no count."""
    whole = bool(np.isin(values, (0.0, 1.0)).all())
    return share(name, values == 1) if whole else mean_probability(name, values)


def excess_mean(name: str, members: Measurement, nonmembers: Measurement) -> Measurement:
    """Members minus non-members, the interval by Newcombe's rule from those of the two means."""
    low = members.value - nonmembers.value - math.hypot(members.value - members.low, nonmembers.high - nonmembers.value)
    high = (
        members.value - nonmembers.value + math.hypot(members.high - members.value, nonmembers.value - nonmembers.low)
    )
    return Measurement(name, members.value - nonmembers.value, low, high, members.n + nonmembers.n, members.unit)


def mean(name: str, values: NDArray[np.float64], unit: str) -> Measurement:
    """A mean with its bootstrap interval."""
    low, high = _interval_of_mean(values, name)
    return Measurement(name, float(values.mean()), low, high, len(values), unit=unit)


def _interval_of_mean(values: NDArray[np.float64], name: str) -> tuple[float, float]:
    n = len(values)
    return bootstrap.interval(bootstrap.resampled(n, lambda draws: draws @ values / n, name))
