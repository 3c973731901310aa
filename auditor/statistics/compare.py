"""Compare a statistic of the same secrets in two runs, with bounds at any significance level.

The inputs are arrays `new` and `base`; each index is a resampled unit: a secret, a document or a
person. For several comparisons at once see `statistics.holm`.

A paired difference of shares always has the exact bounds of `count_discordant_pairs` (bounds.py).
Other differences have bootstrap bounds. Gates, causes and tables therefore show the same interval.
The exact bounds hold at every level and n; Holm's procedure needs level/m, where a bootstrap has
few resamples. Only a sum of several shares, or of means over seeds (conclusions/contrasts.py), is
resampled. A secret's contribution to such a sum takes more than three values, so wins and losses do
not determine it.

A comparison with non-members is between two independent groups: two shares use Newcombe's interval
(intervals.py), two changes of shares combine the bounds of both, others use Welch's.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import scipy
from numpy.typing import ArrayLike, NDArray

from auditor.core.arrays import Bools, Floats
from auditor.core.errors import AuditError
from auditor.core.result import Measurement
from auditor.statistics import bootstrap
from auditor.statistics.bootstrap import CONFIDENCE, Draws, Values
from auditor.statistics.bounds import (
    BoundedNumber,
    bound_resampled_number,
    bound_unseen_value,
    count_discordant_pairs,
    make_measurement,
)
from auditor.statistics.distributions import compute_sign_test_p_value
from auditor.statistics.intervals import subtract_nonmember_mean
from auditor.statistics.metrics import SHARES
from auditor.statistics.ranking import compute_resampled_recall, mark_solved_secrets

# note of a difference from which the non-members' change was subtracted
ABOVE = "above non-members"
_RESAMPLES = 4000


def compare_paired_values(new: NDArray[Any], base: NDArray[Any], unit: str) -> BoundedNumber:
    """Return the mean of `new` minus the mean of `base`, with bounds.

    If all values are 0 or 1, the bounds are exact; otherwise they are by bootstrap. new, base:
    (secrets,), finite. unit: of the values; a share or a probability changes by at most 1.
    """
    if np.isin([new, base], (0, 1)).all():
        return count_discordant_pairs(new == 1, base == 1)
    number = resample_paired_means(new, base)
    if unit not in SHARES:
        return number
    return BoundedNumber(
        number.value,
        number.n,
        lambda level: max(-1.0, number.low(level)),
        lambda level: min(1.0, number.high(level)),
    )


def measure_mean_difference(
    name: str,
    unit: str,
    new: NDArray[Any],
    base: NDArray[Any],
    floor: tuple[Floats, Floats] | None = None,
) -> Measurement:
    """Return the mean of `new` minus the mean of `base`, bounded by `compare_paired_values`.

    If the values are hits, the note gives McNemar's exact p. floor: the `new` and `base` values of
    non-members, whose change is subtracted. The result is then the difference of two independent
    means of paired differences: by MOVER for shares and probabilities, where few secrets may
    change much, and otherwise by Welch.
    """
    if floor is not None:
        if unit in SHARES:
            members = make_measurement(name, compare_paired_values(new, base, unit), unit)
            others = make_measurement(name, compare_paired_values(*floor, unit), unit)
            return replace(subtract_nonmember_mean(name, members, others), n=len(new), note=ABOVE)
        with np.errstate(invalid="ignore"):  # -inf minus -inf
            ends = _estimate_welch_difference(new - base, np.subtract(*floor))
        return Measurement(name, *ends, len(new), unit, ABOVE)
    difference = compare_paired_values(new, base, unit)
    note = ""
    if np.isin([new, base], (0, 1)).all():
        p = compute_sign_test_p_value(int((new > base).sum()), int((new != base).sum()))
        note = f"exact McNemar p = {p:.2g}"
    return make_measurement(name, difference, unit, note)


def paired_difference(new: ArrayLike, base: ArrayLike) -> Measurement:
    """Return the mean of `new` minus the mean of `base`, with its 95% interval.

    new, base: (secrets,), finite, for the same secrets in the same order. Raise AuditError for
    other arrays.
    """
    new_values, base_values = (np.asarray(values, dtype=np.float64) for values in (new, base))
    if new_values.ndim != 1 or new_values.shape != base_values.shape or not len(new_values):
        raise AuditError(
            f"expected a number of each of the same secrets, got arrays of {new_values.shape} and "
            f"{base_values.shape}"
        )
    if not (np.isfinite(new_values).all() and np.isfinite(base_values).all()):
        raise AuditError(
            "expected finite numbers of the same secrets, got some that are not: drop them from "
            "both"
        )
    shares = bool(np.isin([new_values, base_values], (0, 1)).all())
    return measure_mean_difference(
        "difference", "share" if shares else "number", new_values, base_values
    )


def _estimate_welch_difference(first: Floats, second: Floats) -> tuple[float, float, float]:
    # A mean is NaN if a distribution gives some true token probability 0.
    means = [side.mean() if np.isfinite(side).all() else math.nan for side in (first, second)]
    return float(means[0] - means[1]), *compute_welch_interval(first, second)


def compute_welch_interval(
    first: Floats, second: Floats, confidence: float = CONFIDENCE
) -> tuple[float, float]:
    """Return Welch's interval of mean(`first`) - mean(`second`).

    The ends are NaN if a group has only one value, if both groups are constant, or if a value is
    infinite. The lower end is above 0 exactly if Welch's one-sided test at (1 - confidence) / 2
    shows that `first` has the higher mean.
    """
    finite = np.isfinite(first).all() and np.isfinite(second).all()
    if not finite or min(len(first), len(second)) < 2 or first.std() + second.std() == 0:
        return math.nan, math.nan
    variances = np.array([first.var(ddof=1) / len(first), second.var(ddof=1) / len(second)])
    sizes = np.array([len(first), len(second)])
    # Satterthwaite's degrees of freedom; scipy.stats has the interval, but takes long to import
    freedom = variances.sum() ** 2 / (variances**2 / (sizes - 1)).sum()
    quantile = scipy.special.stdtrit(freedom, (1 + confidence) / 2)
    reach = float(quantile) * math.sqrt(variances.sum())
    difference = float(first.mean() - second.mean())
    return difference - reach, difference + reach


def resample_paired_means(new: Floats, base: Floats) -> BoundedNumber:
    """Bootstrap the mean of `new` minus the mean of `base`, paired by secret.

    All numbers must be finite.
    """
    delta = new - base
    n = len(delta)
    value = float(delta.mean())
    size = float(np.abs([new, base]).max())
    # All comparisons of a gate share one stream: numbers of the same secrets use the same
    # resamples.
    draws = bootstrap.compute_resampled_means(delta, "gate", _RESAMPLES)
    return bound_resampled_number(value, n, draws, bound_unseen_value(value, n, max(1.0, size)))


def resample_paired_recall(
    new: tuple[Bools, Floats], base: tuple[Bools, Floats], errors: int
) -> BoundedNumber:
    """Bootstrap the recall of `new` minus the recall of `base`, paired by secret.

    Recall is the share of secrets that are solved: hit before the `errors`-th wrong guess. new,
    base: (hits, scores), each of shape (secrets,). A bootstrap interval may be too short. So it
    always contains the exact interval of the paired difference between the shares of solved
    secrets.
    """
    n = len(new[0])
    floor = count_discordant_pairs(*(mark_solved_secrets(*run, errors) for run in (new, base)))

    def delta(draws: Draws) -> Values:
        recalls = (compute_resampled_recall(*run, draws, errors) for run in (new, base))
        return np.subtract(*recalls)

    draws = bootstrap.compute_resampled_statistic(n, delta, "gate", _RESAMPLES)
    return bound_resampled_number(floor.value, n, draws, floor)
