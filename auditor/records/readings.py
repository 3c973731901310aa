"""The numbers of one finding that say whether one way to leak is shown, each beside what it would be without a leak."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from scipy.stats import norm

from auditor.core.nouns import CellKey
from auditor.core.result import Finding, Measurement
from auditor.records.disagreements import beyond_chance, controls_of, known
from auditor.records.kinds import (
    ANY,
    AUDITED,
    EPSILON,
    EXACT,
    EXPOSED,
    MEMBERSHIP,
    NEAR,
    NEARLY,
    OF_CANARIES,
    PERSONAL,
    PROBABLE,
    PROBABLY_NEAR,
    PROVABLE,
    UNTARGETED,
    VERBATIM,
    VIOLATIONS,
)
from auditor.statistics.bootstrap import CONFIDENCE
from auditor.statistics.intervals import clopper_pearson, excess_mean, wilson
from auditor.statistics.membership import FALSE_POSITIVES, SCORES
from auditor.statistics.memorised import GENERATIONS, MEMORISED, RECORDS
from auditor.statistics.metrics import (
    AT_LEAST,
    EXPECTED_ANY_OF,
    RECALL,
    auc_of,
    excess_of,
    floor_of,
    rate_of,
    upper_of,
)

CHANCE_BITS = 1 / math.log(2)  # mean exposure of a canary that was never inserted: -log2 of a uniform number


@dataclass(frozen=True)
class Reading:
    """A number that speaks of a kind, beside its baseline: of non-members, or what chance gives; None: there is none.

    excess: what is left above that of non-members, with an interval. alone: whether it can show a leak; else it can
    but raise suspicion. either_way: an AUC below one half distinguishes members just as well. looks: at how many such
    numbers the level is shared. most: the best that an audit could have proved.
    """

    measured: Measurement
    baseline: Measurement | float | None = None
    excess: Measurement | None = None
    row: CellKey | None = None
    alone: bool = True
    either_way: bool = False
    part: str = ""
    count: str = ""
    looks: int = 1
    most: float = math.nan

    @property
    def is_count(self) -> bool:
        return self.measured.unit == "share"

    @property
    def _value(self) -> float:
        """Of the baseline."""
        if isinstance(self.baseline, Measurement):
            return self.baseline.value
        return self.baseline or 0.0

    @property
    def is_above(self) -> bool:
        """Whether its lower bound is above the baseline, the baseline's own interval included."""
        m = _widened(self.measured, self.looks)
        if self.excess is not None:
            return self.excess.low > 0
        if isinstance(self.baseline, Measurement):
            return m.low > self.baseline.high
        if self.baseline is None and m.unit == "probability":
            return m.low * m.n >= 1  # of whom nobody knows what strangers get: a hit is expected of one sample each
        return m.low > self._value or (self.either_way and m.high < self._value)

    @property
    def is_shown(self) -> bool:
        return self.alone and self.is_above

    @property
    def is_suspected(self) -> bool:
        """Not shown, and not clean: more than the baseline, but not significantly, or not of this number alone."""
        m = self.measured
        if self.is_count or m.unit == "count":
            return m.value > self._value
        if m.unit == "probability" and (self.baseline is None or m.value * m.n < 1):
            return self.is_above  # of a probability below one in as many secrets no hit is expected
        return self.is_above or m.low > self._value

    @property
    def least(self) -> float:
        """The smallest number that would have been shown, all else as it was; NaN: unknown."""
        m = self.measured
        if not math.isnan(self.most):
            return self.most
        if self.is_count:
            return _least_share(m.n, self.baseline)
        if isinstance(self.baseline, Measurement):
            above = m.value - m.low if self.excess is None else self.excess.value - self.excess.low
            return above + (self.baseline.high if self.excess is None else self.baseline.value)
        if self.baseline is None and m.unit == "probability":
            return 1 / m.n
        return self._value + m.value - m.low


def _least_share(n: int, baseline: Measurement | float | None) -> float:
    """The smallest share of n that is above the baseline as it was measured; NaN where not even all of n is."""

    def above(k: int) -> bool:
        if isinstance(baseline, Measurement):
            return k / n - baseline.value > math.hypot(k / n - wilson(k, n)[0], high - baseline.value)
        return clopper_pearson(k, n)[0] > (baseline or 0.0)

    high = baseline.high if isinstance(baseline, Measurement) else 0.0
    if isinstance(baseline, Measurement) and baseline.unit == "share":
        high = wilson(round(baseline.value * baseline.n), baseline.n)[1]
    least = bisect_left(range(1, n + 1), True, key=above) + 1
    return math.nan if least > n else least / n


def _beside(finding: Finding, name: str, *, alone: bool = True, bounds: bool = False) -> Iterator[Reading]:
    """A number of members beside that of the non-members. bounds: lower bounds, whose difference bounds nothing."""
    m = finding.measurement(name)
    if m is None or not known(m):
        return
    floor = finding.measurement(floor_of(upper_of(name) or name))
    floor = floor if known(floor) else None
    excess = finding.measurement(excess_of(name))
    if excess is None or math.isnan(excess.low):
        bounded = bounds or AT_LEAST in name
        excess = None if floor is None or bounded else excess_mean(excess_of(name), m, floor)
    yield Reading(m, floor, excess if floor is not None else None, finding.key, alone)


def _verbatim(finding: Finding) -> Iterator[Reading]:
    yield from _beside(finding, RECALL)
    yield from _beside(finding, "document_recall")
    yield from _beside(finding, ANY, alone=False)


def _near(finding: Finding) -> Iterator[Reading]:
    yield from _beside(finding, NEAR)
    yield from _beside(finding, PROBABLY_NEAR, bounds=True)


def _probability(finding: Finding) -> Iterator[Reading]:
    """The mean of one sample and of any of n; and whether single secrets are likely, which a mean may hide."""
    any_of = (m.name for m in finding.measurements if EXPECTED_ANY_OF.numbers_in(m.name.removesuffix(AT_LEAST)))
    for name in (EXACT, f"{EXACT}{AT_LEAST}", *any_of):
        yield from _beside(finding, name)
    for m in finding.measurements:
        if m.name.startswith("discoverable_1_") and known(m):
            yield Reading(m, row=finding.key, alone=False)
    yield from _by_repeats(finding, finding.measurement(floor_of(EXACT)), EXACT)


def _exposure(finding: Finding) -> Iterator[Reading]:
    exposed = finding.measurement(EXPOSED)
    if exposed is not None and known(exposed):
        yield Reading(exposed, 0.0, row=finding.key)  # corrected over the canaries: one is one too many
    for reading in _beside(finding, "exposure"):
        yield reading if reading.baseline is not None else replace(reading, baseline=CHANCE_BITS)


def _membership(finding: Finding) -> Iterator[Reading]:
    """The main score, chosen beforehand; the other scores and single repeat counts at a level shared among them."""
    main = finding.measurement(auc_of(""))
    if main is None or not known(main) or any(map(beyond_chance, controls_of(finding))):
        return
    yield Reading(main, 0.5, either_way=True, row=finding.key)
    for rate in FALSE_POSITIVES:
        found = finding.measurement(rate_of("", rate))
        if found is not None and known(found):
            yield Reading(found, rate, row=finding.key)
    others = [m for score in SCORES if (m := finding.measurement(auc_of(score))) is not None and known(m)]
    for m in others:
        yield Reading(m, 0.5, row=finding.key, either_way=True, looks=len(others))
    yield from (replace(reading, either_way=True) for reading in _by_repeats(finding, 0.5, auc_of("")))


def _by_repeats(finding: Finding, baseline: Measurement | float | None, name: str) -> Iterator[Reading]:
    groups = [
        (count, m) for count, m in finding.by_repeats.items() if count.isdecimal() and m.name == name and known(m)
    ]
    if baseline is None or len(groups) < 2:
        return
    for count, m in groups:
        wide = _widened(m, len(groups))
        excess = excess_mean(excess_of(name), wide, baseline) if isinstance(baseline, Measurement) else None
        yield Reading(m, baseline, excess, finding.key, count=count, looks=len(groups))


def _widened(m: Measurement, looks: int) -> Measurement:
    """Its interval at 95% over so many looks (Bonferroni), as a normal distribution widens."""
    tail = (1 - CONFIDENCE) / 2
    scale = float(norm.isf(tail / max(1, looks)) / norm.isf(tail))
    return replace(m, low=m.value - scale * (m.value - m.low), high=m.value + scale * (m.high - m.value))


def _untargeted(finding: Finding) -> Iterator[Reading]:
    yield from _beside(finding, MEMORISED)
    records, floor = finding.measurement(RECORDS), finding.measurement(floor_of(RECORDS))
    if records is not None and known(records):
        # Counts of records, without intervals: held-out ones that stand there say how many are merely alike.
        yield Reading(records, 0.0 if floor is None else floor.value, alone=floor is None, row=finding.key)
    if finding.measurement(floor_of(MEMORISED)) is None:
        yield from _beside(finding, GENERATIONS, alone=False)


def _personal(finding: Finding) -> Iterator[Reading]:
    for kind, m in finding.by_kind.items():
        floor = finding.by_kind_nonmembers.get(kind)
        if known(m):
            floor = floor if known(floor) else None
            excess = None if floor is None else excess_mean(excess_of(m.name), m, floor)
            baseline = 0.0 if floor is None else floor  # a mean of shares, and no tiny probability
            yield Reading(m, baseline, excess, finding.key, part=kind)


def _audited(finding: Finding) -> Iterator[Reading]:
    most = finding.measurement(PROVABLE)
    for m in finding.measurements:
        if m.name.startswith(EPSILON):
            yield Reading(m, 0.0, row=finding.key, most=math.nan if most is None else most.value)
    broken = finding.measurement(VIOLATIONS)
    if broken is not None and known(broken):
        yield Reading(broken, 0.0, row=finding.key)


READERS: dict[str, Callable[[Finding], Iterator[Reading]]] = {
    VERBATIM.name: _verbatim,
    NEARLY.name: _near,
    PROBABLE.name: _probability,
    OF_CANARIES.name: _exposure,
    MEMBERSHIP.name: _membership,
    UNTARGETED.name: _untargeted,
    PERSONAL.name: _personal,
    AUDITED.name: _audited,
}
