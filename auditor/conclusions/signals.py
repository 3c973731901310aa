"""Decide for each kind of leak whether the leak is shown, not shown, or not tested.

Every text on leakage (headline, verdict, screen, page, advice, next command, EDPB answers, history)
takes its decision from this module, and only puts the decision into words. `shows_no_leakage` has
three conditions. No signal is above its baseline, the measurements agree, and nothing may have
hidden a leak from the audit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from auditor.conclusions.disagreements import (
    is_measured,
    list_contradiction_doubts,
    list_nonmember_doubts,
)
from auditor.conclusions.leak_kinds import (
    LeakKind,
    LeakReading,
    adjust_leak_readings,
    share_level_among_attacks,
)
from auditor.conclusions.leak_readings import GREEDILY, GREEDY, KINDS, PERSONAL, VERBATIM
from auditor.conclusions.strata import find_worst_group, find_worst_stratum
from auditor.core.counts import format_count
from auditor.core.nouns import UNDEFENDED, CellKey
from auditor.core.result import (
    RELEASED_TEXT,
    AuditResult,
    Doubt,
    Finding,
    Measurement,
    Stratum,
)
from auditor.statistics.intervals import clopper_pearson, subtract_nonmember_share
from auditor.statistics.metrics import RECALL
from auditor.statistics.roc import AUC

Status = Literal["shown", "not shown", "not tested"]
SHOWN: Status = "shown"  # above its baseline, at 95%
NOT_SHOWN: Status = "not shown"
NOT_TESTED: Status = "not tested"
SETTINGS = ("text-only", "white-box")


@dataclass(frozen=True)
class LeakSignal:
    """Decision whether a target leaks in one way and access setting, with the deciding number.

    Args:
        kind: the kind of leak.
        target: name of the target.
        setting: access setting; "" if none was tested.
        status: whether the leak is shown, not shown, or not tested.
        measured: the deciding number.
        baseline: the same number for non-members or by chance; None if unknown.
        cell: target, setting, and attack or probe of the number.
        suspected: True if the number suggests but does not show a leak, for example because it is
            not significant.
        smallest_detectable: smallest number that would show a leak; NaN if unknown.
        part: group of the data that the number covers; "" for all data.
        count: repeat count of the secrets that the number covers; "" for all secrets.
        reason: why the kind was not tested; "" if it was.
        blind: the same number, computed from the data without a model.
        worst_stratum: the copied records with the number of copies that leaks most.
        worst_group: name and extracted share of the group of the data that leaks most.
        n_tests: how many numbers are tested at one shared significance level.
        excess: the number minus the number for non-members, if this difference decides.
        can_show_leak: whether the number can show a leak by itself.
    """

    kind: LeakKind
    target: str
    setting: str
    status: Status
    measured: Measurement | None = None
    baseline: Measurement | float | None = None
    cell: CellKey | None = None
    suspected: bool = False
    smallest_detectable: float = math.nan
    part: str = ""
    count: str = ""
    reason: str = ""
    blind: Measurement | None = None
    worst_stratum: Stratum | None = None
    worst_group: tuple[str, Measurement] | None = None
    n_tests: int = 1
    excess: Measurement | None = None
    can_show_leak: bool = True

    @property
    def gate_rule(self) -> str:
        """Gate rule that fails if this signal is significant, such as `membership_auc=0.6`; "" if
        no rule exists.
        """
        m = self.measured
        limits = dict(self.kind.limits)
        if m is None:
            limit = None
        else:
            limit = limits.get(m.name, self.kind.limits[0][1] if m.unit == AUC else None)
        if m is None or limit is None or (self.part and self.kind is VERBATIM):
            return ""  # a gate has no rule for a group of the data
        # An AUC below one half separates members equally well: use its mirror image.
        if m.unit == AUC:
            value = max(m.value, 1 - m.value)
        else:
            value = m.value
        if self.status == SHOWN and value < limit:
            # two digits, rounded down, so that the upper bound is above
            scale = 1.0
            if value > 0:
                scale = 10.0 ** (1 - math.floor(math.log10(value)))
            limit = math.floor(value * scale) / scale
        if self.kind is PERSONAL:
            part = f"(kind={self.part})"
        elif self.count:
            part = f"(count={self.count})"
        else:
            part = ""
        return f"{m.name}{part}={limit:g}"


@dataclass(frozen=True)
class LeakAssessment:
    """Signals of the requested targets, by kind and access; the undefended target comes first.

    A doubt is a sentence that tells why a number may be wrong.

    Args:
        signals: a signal for each target, kind of leak and access setting.
        contradictions: doubts about measurements that cannot all be right, by target.
        doubts: reasons why a leak may be hidden, by target.
        unasked: number of records not attacked for lack of time.
    """

    signals: tuple[LeakSignal, ...]
    contradictions: dict[str, tuple[Doubt, ...]]
    doubts: dict[str, tuple[Doubt, ...]]
    unasked: int = 0

    def list_target_signals(self, target: str) -> tuple[LeakSignal, ...]:
        return tuple(s for s in self.signals if s.target == target)

    def list_shown_signals(self, target: str) -> tuple[LeakSignal, ...]:
        return tuple(s for s in self.list_target_signals(target) if s.status == SHOWN)

    def list_tested_signals(self, target: str) -> tuple[LeakSignal, ...]:
        return tuple(s for s in self.list_target_signals(target) if s.status != NOT_TESTED)

    def list_suspected_signals(self, target: str) -> tuple[LeakSignal, ...]:
        return tuple(s for s in self.list_target_signals(target) if s.suspected)

    def list_target_doubts(self, target: str) -> tuple[Doubt, ...]:
        """Return the contradictions and doubts of the target.

        A single one of them means that no report may state "no leakage seen".
        """
        return (*self.contradictions.get(target, ()), *self.doubts.get(target, ()))

    def shows_no_leakage(self, target: str) -> bool:
        """Test if a report may state "no leakage seen" for the target."""
        leaking = self.list_shown_signals(target) or self.list_suspected_signals(target)
        in_doubt = self.list_target_doubts(target) or self.unasked
        return not leaking and not in_doubt and bool(self.list_tested_signals(target))

    @property
    def targets(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(s.target for s in self.signals))

    def find_gate_signal(self, target: str | None = None) -> LeakSignal | None:
        """Return the most important signal that has a gate rule; None if no signal has a rule.

        Leaks come first, then suspicions, then other signals; defended targets precede the
        undefended one.

        Args:
            target: if given, consider only this target.
        """
        candidates = self.signals
        if target is not None:
            candidates = self.list_target_signals(target)
        # A gate judges defended targets; the undefended model if there are none.
        leaking = [s for s in candidates if s.status == SHOWN]
        return min(
            (s for s in leaking or candidates if s.gate_rule),
            key=lambda s: (not s.suspected, s.target == UNDEFENDED),
            default=None,
        )


def assess_leak_signals(result: AuditResult) -> LeakAssessment:
    """Return all signals of a result, for all targets except controls.

    A signal is the decision whether a target leaks in one way. A control is a model that serves
    only to explain a defense.
    """
    records = {record.name: record for record in result.targets}
    names = dict.fromkeys(records)
    for finding in result.findings:
        names[finding.target] = None
    greedy = _build_greedy_signal(result).measured
    of_data = (*list_nonmember_doubts(result), *result.benchmark.doubts)
    signals = []
    contradictory = {}
    doubts = {}
    for target in sorted(names, key=lambda name: name != UNDEFENDED):
        record = records.get(target)
        if record and record.companion:
            continue
        is_leaking = False
        for signal in _assess_target_signals(result, target):
            signals.append(signal)
            is_leaking |= signal.status == SHOWN
        contradictory[target] = tuple(list_contradiction_doubts(result, target, greedy))
        doubts[target] = of_data
        if record is None:
            continue
        for doubt in record.doubts:
            # a doubt on likelihood adds nothing for a target that leaks
            if doubt.kind != "likelihood" or not is_leaking:
                doubts[target] += (doubt,)
    return LeakAssessment(tuple(signals), contradictory, doubts, result.benchmark.unasked)


# --- from readings to signals ---


def _assess_target_signals(result: AuditResult, target: str) -> Iterator[LeakSignal]:
    """Yield a signal for each kind of leak and tested access setting.

    If a kind was tested in no setting, yield one signal with the reason. All attacks that measure a
    kind share one significance level. In an audit of released text, which has no model, all signals
    share one: they answer a single question.
    """
    rows = result.select_findings(target)
    rows_by_setting = {setting: result.select_findings(target, setting) for setting in SETTINGS}
    readings = []
    for kind in KINDS:
        for setting in SETTINGS:
            for finding in rows_by_setting[setting]:
                if finding.not_applicable:
                    continue
                for reading in kind.read_numbers(finding):
                    readings.append((kind, setting, replace(reading, cell=finding.cell_key)))
    if result.family == RELEASED_TEXT:
        shared = adjust_leak_readings([reading for *_, reading in readings])
        for i, reading in enumerate(shared):
            readings[i] = (*readings[i][:2], reading)
    for kind in KINDS:
        by_setting: dict[str, list[LeakReading]] = {}
        for other, setting, reading in readings:
            if other is kind:
                by_setting.setdefault(setting, []).append(reading)
        if kind is GREEDILY:
            yield from _assess_greedy_decoding(result, target, rows)
        elif not by_setting:
            yield LeakSignal(
                kind, target, "", NOT_TESTED, reason=_explain_unmeasured_signal(result, rows, kind)
            )
        for setting, kind_readings in by_setting.items():
            if result.family != RELEASED_TEXT:
                kind_readings = share_level_among_attacks(kind_readings)
            signal = _build_signal(kind, target, setting, kind_readings)
            yield _complete_verbatim_signal(signal, rows) if kind is VERBATIM else signal


def _assess_greedy_decoding(
    result: AuditResult, target: str, rows: Sequence[Finding]
) -> Iterator[LeakSignal]:
    """Yield the signal of greedy decoding, unless a greedy attack already gives a verbatim signal.

    One measurement must not count as two signals.

    Args:
        result: result of the run.
        target: name of the target.
        rows: findings about the target.
    """
    for row in rows:
        if row.decodes_greedily and is_measured(row.measurement(RECALL)):
            return
    if target == UNDEFENDED:
        yield _build_greedy_signal(result)
    else:
        yield LeakSignal(GREEDILY, target, "", NOT_TESTED, reason="undefended model only")


def _complete_verbatim_signal(signal: LeakSignal, rows: Sequence[Finding]) -> LeakSignal:
    """Return a verbatim signal that also says which records leak most.

    These are the records with a certain number of copies (`worst_stratum`), and the records of a
    certain group (`worst_group`). If the attack decodes greedily, a single extracted record shows a
    leak, unless a non-member's record was extracted, too.

    Args:
        signal: the signal of verbatim extraction.
        rows: all findings of the target.
    """
    rows = [row for row in rows if row.setting == signal.setting]
    groups = filter(None, map(find_worst_group, rows))
    strata = filter(None, map(find_worst_stratum, rows))
    signal = replace(
        signal,
        # the number of copies with the largest extracted share, over all attacks
        worst_stratum=max(
            strata, key=lambda stratum: (stratum.extracted.value, stratum.copies or 0), default=None
        ),
        worst_group=max(groups, key=lambda group: group[1].low, default=None),
    )
    m = signal.measured
    floor = signal.baseline
    if m is None or not signal.suspected:
        return signal
    if isinstance(floor, Measurement) and floor.value > 0:
        return signal
    for row in rows:
        if row.cell_key == signal.cell and row.decodes_greedily:
            return replace(signal, status=SHOWN, suspected=False, smallest_detectable=1 / m.n)
    return signal


def _build_signal(
    kind: LeakKind, target: str, setting: str, readings: Sequence[LeakReading]
) -> LeakSignal:
    """Build the signal of a kind of leak in a setting from its most informative number.

    Prefer a number that shows a leak, then a number that raises suspicion, then the highest number.
    If all are zero, take the widest interval.

    Args:
        kind: the kind of leak.
        target: name of the target.
        setting: access setting.
        readings: numbers of this kind with their baselines.
    """
    first = {name: i for i, (name, _) in enumerate(kind.limits)}
    least = min(reading.n_tests for reading in readings)

    def rank(reading: LeakReading) -> tuple[bool, bool, bool, bool, int, float, float]:
        m = reading.corrected
        # Rank AUCs by the near end of their interval: a small group's AUC is often far from one
        # half by chance.
        if reading.either_way:
            size = max(m.low, 1 - m.high)
        else:
            size = m.value
        # `min` compares these in turn: shows a leak, is suspected, can show a leak, has a separate
        # level, is early among the limits, is large (or, if all are zero, has the widest interval).
        return (
            not reading.is_shown,
            not (reading.is_shown or reading.is_suspected),
            not reading.can_show_leak,
            reading.n_tests > least,
            first.get(m.name, len(first)),
            -size,
            -m.n if size else -m.high,
        )

    best = min(readings, key=rank)
    n_tests = best.n_tests
    status = SHOWN
    if not best.is_shown:
        status = NOT_SHOWN
        n_tests *= best.n_attacks  # reports then show the excess
    return LeakSignal(
        *(kind, target, setting, status),
        *(best.corrected, best.baseline, best.cell),
        suspected=best.is_suspected and not best.is_shown,
        n_tests=n_tests,
        smallest_detectable=best.smallest_detectable_value,
        part=best.part,
        count=best.count,
        blind=best.blind,
        excess=best.excess,
        can_show_leak=best.can_show_leak,
    )


def _build_greedy_signal(result: AuditResult) -> LeakSignal:
    """Return the signal of greedy decoding of the undefended model, over all its secrets.

    A single hit shows a leak. If non-members have hits, the share must be significantly above
    theirs.
    """
    recall_by_count = {}
    hits = 0
    n = 0
    for count, m in result.benchmark.greedy_recall.items():
        if is_measured(m):
            recall_by_count[count] = m
            hits += m.hits
            n += m.n
    if not recall_by_count:
        return LeakSignal(GREEDILY, UNDEFENDED, "", NOT_TESTED)
    low, high = clopper_pearson(hits, n)
    measured = Measurement(GREEDY, hits / n, low, high, n)
    baseline = result.benchmark.greedy_nonmembers
    is_above = hits > 0
    smallest = 1 / n
    if baseline is not None and baseline.value > 0:
        sides = np.arange(n) < hits, np.arange(baseline.n) < baseline.hits
        excess = subtract_nonmember_share(GREEDY, *sides)
        reading = LeakReading(measured, baseline, excess)
        is_above = reading.is_shown
        smallest = reading.smallest_detectable_value
    worst = max(
        recall_by_count, key=lambda count: (recall_by_count[count].value, recall_by_count[count].n)
    )
    part = ""
    if hits and len(recall_by_count) > 1 and worst.isdecimal():
        m = recall_by_count[worst]
        times = format_count(int(worst), "time")
        part = f"{m.hits:,}/{m.n:,} of those trained on {times}"
    return LeakSignal(
        *(GREEDILY, UNDEFENDED, "", SHOWN if is_above else NOT_SHOWN, measured, baseline),
        suspected=hits > 0 and not is_above,
        smallest_detectable=smallest,
        part=part,
    )


def _explain_unmeasured_signal(result: AuditResult, rows: Sequence[Finding], kind: LeakKind) -> str:
    """Return why no attack or probe measured this kind of leak; "" if the plan has none for it.

    `rows` are the findings about the target.
    """
    unlike = kind.alike and list_nonmember_doubts(result)
    measuring = result.list_measuring_methods(*kind.measured_by)
    reasons = dict[str, None]()  # an ordered set
    for f in rows:
        if unlike and f.measurement(kind.main):
            return unlike[0].sentence
        if kind is PERSONAL and is_measured(f.measurement(RECALL)):
            return "none was recognised in the attacked suffixes"
        if f.not_applicable and f.attack in measuring:
            reasons[f.not_applicable] = None
    return "; ".join(reasons)
