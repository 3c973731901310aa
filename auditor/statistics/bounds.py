"""Compute one-sided bounds for a gate: on shares, recorded intervals and paired differences.

`low(level)` is a lower bound that exceeds the true number with probability at most `level` (below
1/2); `high(level)` is the corresponding upper bound. Inputs are counts and arrays, not gate rules
or files.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from auditor.core.arrays import Bools, Floats, Ints
from auditor.core.result import Measurement
from auditor.statistics.bootstrap import CONFIDENCE
from auditor.statistics.distributions import (
    compute_binomial_pmf,
    compute_binomial_sf,
    compute_normal_quantile,
)
from auditor.statistics.intervals import clopper_pearson
from auditor.statistics.one_run import find_largest_refuted_value

LEVEL = 0.05  # bound on the rates of a gate's false alarms and false passes
_SIDE = (1 - CONFIDENCE) / 2
# Berger and Boos's gamma: the price, in the p-value, of leaving out improbable nuisances
_SURE = 1e-4
_NUISANCES = 25  # number of nuisance values over which the tail is maximised


@dataclass(frozen=True)
class BoundedNumber:
    """Hold a measured number with one-sided bounds at any significance level.

    Args:
        value: the number.
        n: sample size.
        low: maps a significance level to the lower bound.
        high: maps a significance level to the upper bound.
    """

    value: float
    n: int
    low: Callable[[float], float]
    high: Callable[[float], float]


def bound_binomial_share(hits: int, n: int) -> BoundedNumber:
    """Return a binomial share with exact bounds (Clopper and Pearson)."""
    # A one-sided bound at the level is an end of the two-sided interval of confidence 1 - 2 level.
    return BoundedNumber(
        hits / n,
        n,
        lambda level: clopper_pearson(hits, n, 1 - 2 * level)[0],
        lambda level: clopper_pearson(hits, n, 1 - 2 * level)[1],
    )


def bound_recorded_interval(m: Measurement) -> BoundedNumber:
    """Bound a number for which only a two-sided 95% interval is recorded.

    At significance levels of 2.5% and more, the bounds are the ends of the interval, which is
    conservative. At lower levels they move outwards as for a normal distribution. NaN stays NaN.
    """

    def stretch(level: float) -> float:
        return max(1.0, compute_normal_quantile(level) / compute_normal_quantile(0.025))

    return BoundedNumber(
        m.value,
        m.n,
        lambda level: m.value - (m.value - m.low) * stretch(level),
        lambda level: m.value + (m.high - m.value) * stretch(level),
    )


def bound_auc_either_way(auc: BoundedNumber) -> BoundedNumber:
    """Return the larger of an AUC and 1 - AUC, with bounds.

    Consistently lower scores of members reveal members too. The lower bound is the larger of two
    lower bounds, one for each direction, so each gets half the significance level. The upper bound
    is the larger of two upper bounds, each at the full level: only that of the true direction has
    to hold.
    """
    return BoundedNumber(
        max(auc.value, 1 - auc.value),
        auc.n,
        lambda level: max(auc.low(level / 2), 1 - auc.high(level / 2)),
        lambda level: max(auc.high(level), 1 - auc.low(level)),
    )


def share_level(number: BoundedNumber, tried: int) -> BoundedNumber:
    """Widen the bounds of the largest of `tried` numbers to allow for its selection.

    The lower bound uses level / tried. The upper bound uses the full significance level: because
    the number is the largest, its upper bound errs no more often than any other's.
    """
    return replace(number, low=lambda level: number.low(level / max(1, tried)))


def bound_part_share(parts: BoundedNumber, records: BoundedNumber) -> BoundedNumber:
    """Bound the share of extracted parts of records, such as windows or turns.

    Parts of one record are dependent, so an interval over parts is too short. Each bound is
    therefore the outer one of two: the bound for parts and the bound for records.

    parts: the share of parts; records: the share of records.
    """
    return BoundedNumber(
        parts.value,
        records.n,
        lambda level: min(parts.low(level), records.low(level)),
        lambda level: max(parts.high(level), records.high(level)),
    )


def bound_discordant_pairs(wins: int, losses: int, n: int) -> BoundedNumber:
    """Bound the difference of two shares of the same n secrets: the first share minus the second.

    wins: the number of secrets that are hits only in the first share.
    losses: the number of secrets that are hits only in the second share.

    Exact unconditional bounds invert the score test of a paired difference (Tango 1998, Statistics
    in Medicine 17:891). At a difference of 0, the statistic is McNemar's.
    """
    return BoundedNumber(
        (wins - losses) / n,
        n,
        lambda level: _bound_paired_difference(wins, losses, n, level),
        lambda level: -_bound_paired_difference(losses, wins, n, level),
    )


def count_discordant_pairs(new: Bools, base: Bools) -> BoundedNumber:
    """Return the share of hits in `new` minus the share of hits in `base`; both (secrets,)."""
    return bound_discordant_pairs(int((new & ~base).sum()), int((base & ~new).sum()), len(new))


def bound_resampled_number(
    value: float, n: int, draws: Floats, floor: BoundedNumber
) -> BoundedNumber:
    """Bound a number by its bootstrap draws, of shape (resamples,).

    The bounds are never narrower than those of `floor`, because no resample contains an event that
    the sample missed.
    """
    return BoundedNumber(
        value,
        n,
        lambda level: min(float(np.quantile(draws, level)), floor.low(level)),
        lambda level: max(float(np.quantile(draws, 1 - level)), floor.high(level)),
    )


def bound_unseen_value(value: float, n: int, size: float) -> BoundedNumber:
    """Return bounds on a mean over n secrets that allow for rare secrets that the sample missed.

    The value of a rare secret may differ from the others by `size`. At a significance level a, up
    to a share 1 - a^(1/n) of all secrets may be so. The mean may therefore differ from `value` by
    size (1 - a^(1/n)).
    """

    def missed(level: float) -> float:
        # 1 - level^(1/n): Clopper and Pearson's upper bound of a share with no hit among n.
        return -size * math.expm1(math.log(level) / n)

    return BoundedNumber(
        value, n, lambda level: value - missed(level), lambda level: value + missed(level)
    )


def make_measurement(
    name: str, number: BoundedNumber, unit: str = "share", note: str = ""
) -> Measurement:
    """Convert the number into a measurement with its two-sided 95% interval."""
    ends = (number.low(_SIDE), number.high(_SIDE))
    return Measurement(name, number.value, *ends, number.n, unit, note)


# --- the exact score test of a paired difference ---


def compute_tango_statistic(
    wins: NDArray[Any] | float, losses: NDArray[Any] | float, n: int, delta: float
) -> Floats:
    """Return Tango's z for the hypothesis that the difference of shares is delta.

    Under the hypothesis, the share q of losses is the larger root of 2n q^2 + (-wins - losses + (2n
    - wins + losses) delta) q - losses delta (1 - delta) = 0. The result is 0 if variance and
    deviation are 0.
    """
    wins = np.asarray(wins, dtype=float)
    losses = np.asarray(losses, dtype=float)
    b = -wins - losses + (2 * n - wins + losses) * delta
    c = -losses * delta * (1 - delta)
    # Only rounding can put the discriminant below 0.
    q = (np.sqrt(np.maximum(b * b - 8 * n * c, 0)) - b) / (4 * n)
    # The variance is n (wins + losses - delta^2) in shares, with a share q + delta of wins.
    spread = np.sqrt(n * np.maximum(2 * q + delta * (1 - delta), 0))
    distance = wins - losses - n * delta
    with np.errstate(divide="ignore", invalid="ignore"):
        z: Floats = np.where(np.abs(distance) < 1e-12 * n, 0.0, distance / spread)
    return z


def compute_paired_p_value(wins: int, losses: int, n: int, delta: float) -> float:
    """Return the exact, unconditional p-value of "the difference is at most delta".

    The discordance (the share of secrets that are a win or a loss) is unknown. The p-value is the
    largest probability, over the discordance, of a statistic at least as large as observed. The
    search covers only a confidence interval for the discordance, whose error probability gamma is
    added to the p-value (Berger and Boos 1994, JASA 89:1012).
    """
    if delta <= -1:
        return 0.0 if wins - losses > -n else 1.0
    # A statistic equal to the observed one counts as reached, even if rounding made it smaller.
    observed = float(compute_tango_statistic(wins, losses, n, delta)) - 1e-9
    discordant = clopper_pearson(wins + losses, n, 1 - _SURE)
    shares = np.linspace(max(discordant[0], abs(delta)), min(1.0, discordant[1]), _NUISANCES)
    if discordant[1] < abs(delta):  # this difference needs more discordant pairs than possible
        return _SURE if delta < (wins - losses) / n else 1.0
    lost = (shares - delta) / 2  # (nuisances,) share of losses
    won = shares - lost
    # A binomial's variance is at most n / 4: less than a tenth of gamma is beyond 4.5 deviations.
    if n > 200:
        half = math.ceil(4.5 * math.sqrt(n * 0.25)) + 10
    else:
        half = n
    centre = np.round(n * lost).astype(int)
    first = np.clip(centre - half, 0, n)
    width = min(n, 2 * half) + 1
    # (nuisances, width): possible numbers of losses
    grid = np.minimum(first[:, None] + np.arange(width), n)
    real = first[:, None] + np.arange(width) <= n  # the grid repeats n at its end: count it once
    # The wins needed with this many losses are the same at every discordance.
    least = int(first.min())
    needed = _find_needed_wins(np.arange(least, int(grid.max()) + 1), n, delta, observed)[
        grid - least
    ]
    rest = n - grid
    with np.errstate(divide="ignore", invalid="ignore"):
        # Given the losses, wins are binomial among the other pairs.
        win_probability = np.where(lost < 1, np.clip(won / (1 - lost), 0, 1), 0.0)[:, None]
    tail = (
        compute_binomial_pmf(grid, n, lost[:, None])
        * compute_binomial_sf(needed - 1, rest, win_probability)
        * real
    )
    return min(1.0, float(tail.sum(axis=1).max()) + _SURE)


def _find_needed_wins(losses: Ints, n: int, delta: float, observed: float) -> Ints:
    """Return the smallest number of wins for which the statistic reaches `observed`.

    There is one number for each entry of `losses`; n + 1 - losses if no number of wins suffices.
    """
    # The statistic rises with the wins: bisect for all losses at once.
    low = np.zeros_like(losses)
    high = n + 1 - losses
    while np.any(low < high):
        middle = (low + high) // 2
        enough = compute_tango_statistic(middle, losses, n, delta) >= observed
        open_ = low < high
        high = np.where(open_ & enough, middle, high)
        low = np.where(open_ & ~enough, middle + 1, low)
    return low


@lru_cache(maxsize=4096)
def _bound_paired_difference(wins: int, losses: int, n: int, level: float) -> float:
    """Return the lower bound on a difference of shares, to an accuracy of 2 / 2^16 = 3e-5.

    The bound is the largest d for which "the difference is at most d" is rejected at `level`.
    """
    observed = (wins - losses) / n
    return find_largest_refuted_value(
        lambda delta: compute_paired_p_value(wins, losses, n, delta) <= level,
        observed,
        close=(observed + 1) / 2**16,
        low=-1.0,
    )
