"""Why a defended model leaks less: the step from each row of a chain to the next, paired by secret.

Pure functions on what rows found out about each secret. Knows neither models nor how rows are chosen.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import scipy.stats
from numpy.typing import NDArray

from auditor.core.result import Chain, Measurement, Step
from auditor.plugins.defense import Cause
from auditor.statistics import intervals
from auditor.statistics.bounds import paired_means
from auditor.statistics.metrics import ABOVE

_TAIL = (1 - intervals.CONFIDENCE) / 2


@dataclass(frozen=True)
class Answers:
    """A row's main number, the members' mean, taken apart: finite values by secret.

    floor: values of non-members, whose mean is no memory and is taken off; empty: nothing is.
    """

    name: str
    unit: str
    values: Mapping[str, float]
    floor: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Rung:
    """A row of a chain. answers: None where it was not measured, `absent` then says what is missing."""

    cause: Cause
    target: str
    answers: Answers | None
    absent: str = ""


def chain(target: str, base: tuple[str, Answers], rungs: Sequence[Rung]) -> Chain | None:
    """The steps from the base row, by its name, over these rungs, one of which is the target's own.

    Causes whose row is missing are one step with the next one. None where the target's own row was not measured, or
    where no secret was answered in all rows.
    """
    start, answers = base
    rows = {start: answers, **{rung.target: rung.answers for rung in rungs if rung.answers is not None}}
    secrets = sorted(set.intersection(*(set(row.values) for row in rows.values())))
    others = sorted(set.intersection(*(set(row.floor) for row in rows.values())))
    if target not in rows or not secrets:
        return None

    def minus(after: str, before: str) -> Measurement:
        return difference(rows[after], rows[before], secrets, others)

    steps, at = [], start
    waiting: list[Rung] = []
    for rung in rungs:
        waiting.append(rung)
        if rung.target in rows:
            moved = minus(rung.target, at) if rung.target != at else None
            note = _apart(waiting) if moved else f"the {at} target is that row"
            steps.append(Step(_changes(waiting), at, rung.target, moved, note))
            at, waiting = rung.target, []
    if waiting:
        steps.append(Step(_changes(waiting), at, "", None, f"not measured, for want of {_wanted(waiting)}"))
    return Chain(tuple(steps), minus(target, start))


def difference(new: Answers, base: Answers, secrets: Sequence[str], others: Sequence[str] = ()) -> Measurement:
    """The mean of `new` minus that of `base` over these secrets, with its paired 95% interval.

    others: non-members of both floors; what they changed by is taken off: two independent means of paired differences
    (Welch).
    """
    name = f"{base.name}_difference"
    first, second = (np.array([row.values[secret] for secret in secrets]) for row in (new, base))
    if others:
        third, fourth = (np.array([row.floor[secret] for secret in others]) for row in (new, base))
        with np.errstate(invalid="ignore"):  # -inf less -inf
            return _welch(name, base.unit, first - second, third - fourth)
    if base.unit == "share":
        return intervals.difference(name, first == 1, second == 1)
    found = paired_means(first, second)
    return Measurement(name, found.value, found.low(_TAIL), found.high(_TAIL), found.n, base.unit)


def _welch(name: str, unit: str, own: NDArray[np.float64], other: NDArray[np.float64]) -> Measurement:
    """The difference of two means with Welch's interval; none where a group of one says nothing of its spread."""
    if not (np.isfinite(own).all() and np.isfinite(other).all()):  # a law that gives a true token nothing
        return Measurement(name, math.nan, math.nan, math.nan, len(own), unit, ABOVE)
    value = float(own.mean() - other.mean())
    if min(len(own), len(other)) < 2 or own.std() + other.std() == 0:
        return Measurement(name, value, math.nan, math.nan, len(own), unit, ABOVE)
    found = scipy.stats.ttest_ind(own, other, equal_var=False).confidence_interval(intervals.CONFIDENCE)
    return Measurement(name, value, float(found.low), float(found.high), len(own), unit, ABOVE)


def _changes(rungs: Sequence[Rung]) -> dict[str, str]:
    return {rung.cause.name: rung.cause.changes for rung in rungs}


def _apart(rungs: Sequence[Rung]) -> str:
    """That several causes are one step, and what would tell them apart."""
    return f"not told apart, for want of {_wanted(rungs[:-1])}" if len(rungs) > 1 else ""


def _wanted(rungs: Sequence[Rung]) -> str:
    return " and ".join(rung.absent for rung in rungs)
