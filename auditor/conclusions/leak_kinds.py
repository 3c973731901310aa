"""Define a kind of leak: its numbers, their baselines, and default gate limits.

`conclusions.leak_readings` lists the kinds.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

from auditor.conclusions.disagreements import is_measured
from auditor.core.nouns import CellKey
from auditor.core.result import Finding, Measurement
from auditor.statistics.bootstrap import CONFIDENCE
from auditor.statistics.distributions import compute_normal_quantile
from auditor.statistics.intervals import (
    clopper_pearson,
    compute_wilson_interval,
    subtract_nonmember_mean,
)
from auditor.statistics.metrics import (
    AT_LEAST,
    SHARES,
    find_metric,
    name_excess_metric,
    name_nonmember_metric,
    name_upper_bound_metric,
)
from auditor.statistics.roc import AUC


@dataclass(frozen=True)
class LeakReading:
    """Number that measures a kind of leak, and the baseline with which to compare the number.

    Args:
        measured: the number with its interval.
        baseline: the same number for non-members or by chance; None if unknown.
        excess: the number minus the number for non-members, with an interval.
        cell: target, setting, and attack or probe of the measurement.
        can_show_leak: False if the number can raise suspicion but not show a leak.
        either_way: True for an AUC: it shows a leak if it is above or below one half.
        part: group of the data that the number covers; "" for all data.
        count: repeat count of the secrets that the number covers; "" for all secrets.
        n_tests: how many numbers are tested at one shared significance level.
        n_attacks: how many attacks share the level of the excess, in addition.
        least_shown: smallest value that shows a leak, if another test than the interval's decides.
        blind: the same number, computed from the data without a model.
    """

    measured: Measurement
    baseline: Measurement | float | None = None
    excess: Measurement | None = None
    cell: CellKey | None = None
    can_show_leak: bool = True
    either_way: bool = False
    part: str = ""
    count: str = ""
    n_tests: int = 1
    n_attacks: int = 1
    least_shown: float = math.nan
    blind: Measurement | None = None

    @property
    def _baseline_value(self) -> float:
        if isinstance(self.baseline, Measurement):
            return self.baseline.value
        return self.baseline or 0.0

    @property
    def family(self) -> tuple[CellKey | None, str]:
        """The attack, and which parts of the data share a level: "count", "group" or "" for all."""
        if self.count:
            return self.cell, "count"
        if self.part:
            return self.cell, "group"
        return self.cell, ""

    def widen_excess(self, n_tests: int) -> Measurement | None:
        """Return the excess, corrected for `n_tests` further tests (Bonferroni)."""
        if self.excess is None:
            return None
        return widen_leak_measurement(self.excess, n_tests)

    @property
    def is_above_baseline(self) -> bool:
        """True if the number is significantly above its baseline, given the intervals of both.

        If `either_way`, also True if the number is significantly below the baseline.
        """
        m = self.corrected
        if self.excess is not None:
            # The interval of the excess includes the baseline's error.
            return self.excess.low > 0
        if isinstance(self.baseline, Measurement):
            return m.low > self.baseline.high
        if self.baseline is None and m.unit == "probability":
            # The rate of non-members is unknown: require one expected hit at one sample per secret.
            return m.low * m.n >= 1
        return m.low > self._baseline_value or (self.either_way and m.high < self._baseline_value)

    @property
    def corrected(self) -> Measurement:
        """The number with its interval corrected for `n_tests` tests; this interval decides."""
        return widen_leak_measurement(self.measured, self.n_tests)

    @property
    def is_shown(self) -> bool:
        return self.can_show_leak and self.is_above_baseline

    @property
    def is_suspected(self) -> bool:
        """True if the number is above its baseline but shows no leak.

        Either the difference is not significant, or the number cannot show a leak by itself.
        """
        m = self.measured
        if m.unit in ("share", "count"):
            return m.value > self._baseline_value
        if m.unit == "probability" and (self.baseline is None or m.value * m.n < 1):
            # Below one hit over all secrets, no hit is expected.
            return self.is_above_baseline
        return self.is_above_baseline or m.low > self._baseline_value

    @property
    def smallest_detectable_value(self) -> float:
        """Smallest value that would show a leak if nothing else changed; NaN if unknown."""
        m = self.corrected
        if not math.isnan(self.least_shown):
            return self.least_shown
        if m.unit == "share":
            return self._find_smallest_shown_share()
        if isinstance(self.baseline, Measurement):
            if self.excess is None:
                margin = m.value - m.low
            else:
                margin = self.excess.value - self.excess.low
            return margin + (self.baseline.high if self.excess is None else self.baseline.value)
        if self.baseline is None and m.unit == "probability":
            return 1 / m.n
        return self._baseline_value + m.value - m.low

    def _find_smallest_shown_share(self) -> float:
        """Return the smallest share that would be above the baseline; NaN if no share would be."""
        n = self.measured.n

        def is_above(hits: int) -> bool:
            low, high = clopper_pearson(hits, n)
            supposed = replace(self.measured, value=hits / n, low=low, high=high)
            excess = self._suppose_excess(hits)
            return replace(self, measured=supposed, excess=excess).is_above_baseline

        # Bisect over counts: more hits stay above the baseline.
        least = bisect_left(range(1, n + 1), True, key=is_above) + 1
        return math.nan if least > n else least / n

    def _suppose_excess(self, hits: int) -> Measurement | None:
        """Return the excess as if so many secrets were extracted, corrected like the measured one.

        People and further tests have widened the measured interval by some factor; the supposed
        one is widened by the same.
        """
        if self.excess is None or not isinstance(self.baseline, Measurement):
            return self.excess
        measured_reach = self._reach_below_excess(self.measured.hits)
        if not measured_reach:
            return replace(self.excess, low=math.nan)
        factor = (self.excess.value - self.excess.low) / measured_reach
        value = hits / self.measured.n - self.baseline.value
        return replace(
            self.excess, value=value, low=value - factor * self._reach_below_excess(hits)
        )

    def _reach_below_excess(self, hits: int) -> float:
        """Return the distance from the excess to its lower end by Newcombe's rule."""
        assert isinstance(self.baseline, Measurement)
        n = self.measured.n
        floor = self.baseline
        # Excesses of all secrets have Wilson's intervals, those of parts have exact ones.
        interval = clopper_pearson if self.part or self.count else compute_wilson_interval
        high = interval(floor.hits, floor.n)[1] if floor.unit == "share" else floor.high
        return math.hypot(hits / n - interval(hits, n)[0], high - floor.value)


@dataclass(frozen=True)
class LeakKind:
    """Kind of leak, such as membership.

    Args:
        name: key of the kind.
        title: title in reports.
        short: title of one or two words.
        limits: pairs of a metric and its default limit in a gate.
        measured_by: values of `Attack.measures` that measure this kind, the usual value first.
        read_numbers: function that yields the kind's numbers in a finding.
        main: the metric that the title describes, so that reports need not name it.
        counted: words after a count of secrets, such as "extracted verbatim", keyed by metric.
        text: True if the leak shows text of the data.
        alike: True if the numbers are valid only if members and non-members are alike in kind.
    """

    name: str
    title: str
    short: str
    limits: tuple[tuple[str, float], ...] = ()
    measured_by: tuple[str, ...] = ()
    read_numbers: Callable[[Finding], Iterator[LeakReading]] = field(
        default=lambda finding: iter(()), compare=False
    )
    main: str = ""
    counted: Mapping[str, str] = field(default_factory=dict, compare=False)
    text: bool = False
    alike: bool = False


# --- helpers of all kinds ---


def read_nonmember_leaks(
    finding: Finding, name: str, *, can_show_leak: bool = True, are_lower_bounds: bool = False
) -> Iterator[LeakReading]:
    """Yield a metric of the finding, with the metric of its non-members as the baseline.

    Yield nothing if the metric was not measured.

    Args:
        finding: the finding.
        name: name of the metric.
        can_show_leak: whether the number can show a leak by itself.
        are_lower_bounds: True if the numbers of members and of non-members are both lower bounds.
            Their difference would not be a bound, and is left out.
    """
    m = finding.measurement(name)
    if not is_measured(m):
        return
    # Compare lower bounds with lower bounds: the upper bound of a beam search may be near 1.
    if are_lower_bounds:
        upper = name
    else:
        upper = name_upper_bound_metric(name) or name
    floor = finding.measurement(name_nonmember_metric(upper))
    floor = floor if is_measured(floor) else None
    excess = finding.measurement(name_excess_metric(name))
    if excess is None or math.isnan(excess.low):
        bounded = are_lower_bounds or AT_LEAST in name
        if floor is None or bounded:
            excess = None
        else:
            excess = subtract_nonmember_mean(name_excess_metric(name), m, floor)
    yield LeakReading(m, floor, excess if floor is not None else None, can_show_leak=can_show_leak)


def read_repeat_leaks(
    finding: Finding, baseline: Measurement | float | None, name: str
) -> Iterator[LeakReading]:
    """Yield the metric at each repeat count, next to its baseline.

    The repeat count of a secret is its number of copies in the training data. All repeat counts are
    tested together, at one significance level. Yield nothing for fewer than two repeat counts.

    Args:
        finding: the finding.
        baseline: the metric's value for non-members, or by chance; None if unknown.
        name: name of the metric.
    """
    shares = {}
    for count, m in finding.by_repeats.items():
        if count.isdecimal():
            shares[count] = m
    for count, reading in _read_part_leaks(shares, baseline, name):
        yield replace(reading, count=count)


def read_group_leaks(
    finding: Finding, baseline: Measurement | float | None, name: str
) -> Iterator[LeakReading]:
    """Yield the number with this name for each group of the data, next to the baseline.

    The user's data names the groups. The numbers share one significance level. Yield nothing for
    fewer than two groups.

    Args:
        finding: the finding.
        baseline: the number of non-members or by chance; None if unknown.
        name: name of the metric.
    """
    for group, reading in _read_part_leaks(finding.by_group, baseline, name):
        yield replace(reading, part=f"group {group}")


def _read_part_leaks(
    shares: Mapping[str, Measurement],
    baseline: Measurement | float | None,
    name: str,
) -> Iterator[tuple[str, LeakReading]]:
    """Yield (key, number) for each part of the secrets, such as the secrets with one repeat count.

    All numbers share one significance level. Yield nothing for fewer than two parts or without a
    baseline.

    Args:
        shares: the measurement of each part, by key.
        baseline: the number of non-members or by chance; None if unknown.
        name: name of the metric; other measurements in `shares` are skipped.
    """
    measured = {}
    for part, m in shares.items():
        if m.name == name and is_measured(m):
            measured[part] = m
    n_tests = len(measured)
    if baseline is None or n_tests < 2:
        return
    for part, m in measured.items():
        excess = None
        if isinstance(baseline, Measurement):
            wide = widen_leak_measurement(m, n_tests)
            excess = subtract_nonmember_mean(name_excess_metric(name), wide, baseline)
        yield part, LeakReading(m, baseline, excess, n_tests=n_tests)


def adjust_leak_readings(readings: Sequence[LeakReading]) -> list[LeakReading]:
    """Correct the numbers so that all share one significance level (Bonferroni)."""
    # k readings that already share a level count as a single test.
    levels = math.ceil(sum(1 / reading.n_tests for reading in readings if reading.can_show_leak))
    adjusted = []
    for reading in readings:
        excess = reading.widen_excess(levels)
        adjusted.append(replace(reading, excess=excess, n_tests=levels * reading.n_tests))
    return adjusted


def share_level_among_attacks(readings: Sequence[LeakReading]) -> list[LeakReading]:
    """Correct the excesses of one kind of leak for the number of attacks (Bonferroni).

    Attacks share one significance level for all secrets, and another level for parts of the data.
    An attack's groups count as one test, and its repeat counts as another test.
    """
    families = set()
    for reading in readings:
        if reading.can_show_leak and reading.excess is not None:
            families.add(reading.family)
    adjusted = []
    for reading in readings:
        n_attacks = 1
        if reading.excess is not None:
            is_part = bool(reading.family[1])
            n_attacks = max(1, sum(bool(part) == is_part for _, part in families))
        excess = reading.widen_excess(n_attacks)
        adjusted.append(replace(reading, excess=excess, n_attacks=n_attacks))
    return adjusted


def widen_leak_measurement(m: Measurement, n_tests: int) -> Measurement:
    """Widen a 95% interval for `n_tests` tests (Bonferroni), as if the number were normally
    distributed.
    """
    if n_tests < 2:
        return m
    scale = _compute_widening_factor(n_tests)
    low = m.value - scale * (m.value - m.low)
    high = m.value + scale * (m.high - m.value)
    if m.unit in (*SHARES, AUC) and not find_metric(m.name).signed:
        low = max(0.0, low)
        high = min(1.0, high)
    return replace(m, low=low, high=high)


@cache
def _compute_widening_factor(n_tests: int) -> float:
    """Return the factor that widens a 95% interval for `n_tests` tests (Bonferroni)."""
    tail = (1 - CONFIDENCE) / 2
    return compute_normal_quantile(tail / max(1, n_tests)) / compute_normal_quantile(tail)
