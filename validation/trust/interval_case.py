"""Measure a number of known truth many times, and count errors of its interval and of a gate on
it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from auditor.core.result import Measurement
from auditor.core.secret_randomness import make_keyed_generator
from auditor.gate.decide import compute_rule_bounds
from auditor.statistics.audited import LEVEL
from auditor.statistics.bounds import BoundedNumber
from auditor.statistics.intervals import clopper_pearson

SIDE = 0.025
Rng = np.random.Generator
Floats = NDArray[np.float64]
# Ends of the 95% interval, and one-sided bounds at 5%, by which a gate fails and holds.
Ends = tuple[float, float, float, float]


@dataclass(frozen=True)
class IntervalCase:
    """A number with a known truth on one distribution.

    audit: draws records and measures the number; part: share of the audits, less than 1 for slow
    cases.
    """

    quantity: str
    distribution: str
    size: str
    truth: float
    audit: Callable[[Rng], Ends]
    part: float = 1.0


@dataclass(frozen=True)
class IntervalErrors:
    """Errors in a number of audits.

    wrong: how often the interval misses, a gate at the truth fails, and such a gate holds.
    """

    case: IntervalCase
    audits: int
    wrong: tuple[int, int, int]

    @property
    def failed(self) -> bool:
        return any(clopper_pearson(count, self.audits)[0] > LEVEL for count in self.wrong)

    @property
    def verdict(self) -> str:
        return "**too often wrong**" if self.failed else "holds"


def ends(found: BoundedNumber) -> Ends:
    return found.low(SIDE), found.high(SIDE), found.low(LEVEL), found.high(LEVEL)


def of(found: Measurement) -> Ends:
    """Return a measurement's ends in a report and in a gate."""
    seen = compute_rule_bounds(found)
    return found.low, found.high, seen.low(LEVEL), seen.high(LEVEL)


def lower(bound: float) -> Ends:
    return bound, math.inf, bound, math.inf


def simulated(case: IntervalCase, audits: int, seed: int = 0) -> IntervalErrors:
    rng = make_keyed_generator("intervals", case.quantity, case.distribution, case.size, seed)
    missed = fails = holds = 0
    count = max(20, round(audits * case.part))
    for _ in range(count):
        low, high, least, most = case.audit(rng)
        missed += not low - 1e-12 <= case.truth <= high + 1e-12
        fails += least > case.truth + 1e-12
        holds += most < case.truth - 1e-12
    return IntervalErrors(case, count, (missed, fails, holds))
