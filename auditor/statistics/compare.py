"""One number of the same secrets held against another: each way to pair them, with bounds at any
level.

Plain arrays, `new` and `base` side by side; each index is a resampled unit, whatever it means: a
secret, a document, a person. Knows no metric and no record. Several comparisons at
once: `statistics.holm`.

A paired difference of shares has the exact bounds of `count_discordant_pairs` (bounds.py), and one
of other numbers those of a bootstrap, wherever it is shown: gates, causes and tables tell the same
interval. It covers at every level and every n: Holm's rule asks at level/m, where few resamples of
a bootstrap lie. Only a sum of several shares, or of means over seeds (conclusions/contrasts.py), is
resampled: what a secret adds to it takes more than three values, so that there is no count of wins
and losses to invert.

Against non-members two independent groups differ: Newcombe's rule of two shares (intervals.py),
Welch's of two changes.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import stdtrit

from auditor.core.arrays import Bools, Floats
from auditor.core.errors import AuditError
from auditor.core.result import Measurement
from auditor.statistics import bootstrap, roc
from auditor.statistics.bootstrap import CONFIDENCE, Draws, Values
from auditor.statistics.bounds import (
    BoundedNumber,
    DiscordantPairs,
    LeastIntervalWidth,
    ResampledNumber,
    count_discordant_pairs,
    make_measurement,
)
from auditor.statistics.distributions import compute_sign_test_p_value
from auditor.statistics.ranking import compute_resampled_recall, rank_guesses

ABOVE = "above non-members"  # note of a difference that what non-members changed by is taken off
_RESAMPLES = 4000
_AT_ONCE = 250


def compare_columns(
    new: tuple[Any, ...],
    base: tuple[Any, ...],
    *,
    errors: int | None = None,
    rate: float | None = None,
) -> BoundedNumber:
    """A number of `new` minus that of `base`, each of one or two columns; the arguments say which,
    and so its interval.

    Of one column of finite numbers: the means, exactly where all are 0 or 1. Of (hits, scores):
    recall before the `errors`-th wrong guess. Of (members' scores, non-members'): true-positive
    rates at a `rate` of false ones; 0: AUCs.
    """
    if rate is not None:
        return roc.TprDifference(new, base, rate) if rate else roc.compute_auc_difference(new, base)
    if errors is not None:
        return resample_paired_recall((new[0] == 1, new[1]), (base[0] == 1, base[1]), errors)
    new_values, base_values = *new, *base  # of one column each
    if np.isin([new_values, base_values], (0, 1)).all():
        return count_discordant_pairs(new_values == 1, base_values == 1)
    return resample_paired_means(new_values, base_values)


def measure_mean_difference(
    name: str,
    unit: str,
    new: NDArray[Any],
    base: NDArray[Any],
    floor: tuple[Floats, Floats] | None = None,
) -> Measurement:
    """The mean of `new` minus that of `base`, as `compare_columns` bounds it.

    Of hits the note has McNemar's exact p. floor: new and base of non-members, whose change is
    taken off: two independent means of paired differences (Welch).
    """
    if floor is not None:
        with np.errstate(invalid="ignore"):  # -inf less -inf
            return _measure_welch_difference(name, unit, new - base, np.subtract(*floor))
    difference = compare_columns((new,), (base,))
    note = ""
    if isinstance(difference, DiscordantPairs):
        wins = difference.wins
        discordant = difference.wins + difference.losses
        p = compute_sign_test_p_value(wins, discordant)
        note = f"exact McNemar p = {p:.2g}"
    return make_measurement(name, difference, unit, note)


def paired_difference(new: ArrayLike, base: ArrayLike) -> Measurement:
    """The mean of `new` minus that of `base`, numbers of the same secrets in one order, with its
    95% interval.

    new, base: (secrets,), finite. Raises AuditError for arrays that are not of the same secrets.
    """
    new_values, base_values = (np.asarray(values, dtype=np.float64) for values in (new, base))
    if new_values.ndim != 1 or new_values.shape != base_values.shape or not len(new_values):
        raise AuditError(
            f"expected a number of each of the same secrets, got arrays of {new_values.shape} and "
            f"{base_values.shape}",
        )
    if not (np.isfinite(new_values).all() and np.isfinite(base_values).all()):
        raise AuditError(
            "expected finite numbers of the same secrets, got some that are not: drop them from "
            "both",
        )
    shares = bool(np.isin([new_values, base_values], (0, 1)).all())
    return measure_mean_difference(
        "difference",
        "share" if shares else "number",
        new_values,
        base_values,
    )


def _measure_welch_difference(
    name: str,
    unit: str,
    members: Floats,
    nonmembers: Floats,
) -> Measurement:
    """The difference of two means with Welch's interval; none if a group has a single
    value, so that its spread is unknown."""
    # not where a distribution gives a true token nothing
    finite = np.isfinite(members).all() and np.isfinite(nonmembers).all()
    value = float(members.mean() - nonmembers.mean()) if finite else math.nan
    return Measurement(
        name,
        value,
        *compute_welch_interval(members, nonmembers),
        len(members),
        unit,
        ABOVE,
    )


def compute_welch_interval(
    first: Floats,
    second: Floats,
    confidence: float = CONFIDENCE,
) -> tuple[float, float]:
    """Welch's interval of mean(`own`) - mean(`other`); NaN of a group of one, two
    constant ones, or a -inf.

    Its lower end is above 0 just where Welch's one-sided test at (1 - confidence) / 2 shows `own`
    to be the higher.
    """
    finite = np.isfinite(first).all() and np.isfinite(second).all()
    if not finite or min(len(first), len(second)) < 2 or first.std() + second.std() == 0:
        return math.nan, math.nan
    variances = [float(side.var(ddof=1)) / len(side) for side in (first, second)]
    # Satterthwaite's degrees of freedom
    freedom = sum(variances) ** 2 / sum(
        variance**2 / (len(side) - 1)
        for variance, side in zip(variances, (first, second), strict=True)
    )
    reach = float(stdtrit(freedom, (1 + confidence) / 2)) * math.sqrt(sum(variances))
    difference = float(first.mean() - second.mean())
    return difference - reach, difference + reach


def resample_paired_means(new: Floats, base: Floats) -> ResampledNumber:
    """Mean of `new` minus mean of `base`, finite numbers of the same secrets: paired bootstrap."""
    delta = new - base
    n = len(delta)
    value = float(delta.mean())
    size = float(np.abs([new, base]).max())
    # one stream for all that a gate compares: numbers of the same secrets are read at the same
    # resamples
    draws = bootstrap.compute_resampled_means(delta, "gate", _RESAMPLES, _AT_ONCE)
    return ResampledNumber(value, n, draws, LeastIntervalWidth(value, n, max(1.0, size)))


def resample_paired_recall(
    new: tuple[Bools, Floats], base: tuple[Bools, Floats], errors: int
) -> ResampledNumber:
    """Recall before the `errors`-th wrong guess (ranking.measure_error_recall), new minus base:
    (hits, scores) of each.

    Paired bootstrap: a secret is drawn with its guesses in both runs. Never inside the bounds of
    the same counts with the two thresholds taken as given.
    """
    n = len(new[0])
    right = [np.zeros(len(new[0]), dtype=bool) for _ in (new, base)]
    for solved, (hit, score) in zip(right, (new, base), strict=True):
        ranked, before = rank_guesses(hit, score)
        # back into the order of the secrets
        solved[np.lexsort((hit, -score))] = ranked & (before < errors)
    floor = count_discordant_pairs(*right)

    def delta(draws: Draws) -> Values:
        return compute_resampled_recall(*new, draws, errors) - compute_resampled_recall(
            *base,
            draws,
            errors,
        )

    return ResampledNumber(
        floor.value,
        n,
        bootstrap.compute_resampled_statistic(n, delta, "gate", _RESAMPLES, _AT_ONCE),
        floor,
    )
