"""What a run says of each way in which a model can leak: shown, not shown, or not tested. It is
decided here alone.

Whatever speaks of leakage (headline, verdict, screen, page, advice, next command, EDPB answers,
history) reads it here. Reassurance must be earned: `shows_no_leakage` only where no signal is above
its baseline, what was measured agrees with itself, and nothing may have hidden a leak from the
audit. Knows a result alone; its words are the reports'.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from auditor.conclusions.disagreements import (
    contradiction_doubts_about_target,
    is_measured,
    member_mismatch_doubts,
)
from auditor.conclusions.leak_kinds import LeakKind, LeakReading, bonferroni_adjusted_leak_readings
from auditor.conclusions.leak_readings import GREEDILY, GREEDY, KINDS, PERSONAL, VERBATIM
from auditor.conclusions.strata import worst_group, worst_stratum
from auditor.core.counts import counted
from auditor.core.nouns import UNDEFENDED, CellKey
from auditor.core.result import (
    NO_TIME,
    RELEASED_TEXT,
    AuditResult,
    Doubt,
    Finding,
    Measurement,
    Stratum,
)
from auditor.statistics.intervals import clopper_pearson
from auditor.statistics.metrics import RECALL
from auditor.statistics.roc import AUC

Status = Literal["shown", "not shown", "not tested"]
SHOWN: Status = "shown"  # above its baseline, at 95%
NOT_SHOWN: Status = "not shown"
NOT_TESTED: Status = "not tested"
SETTINGS = ("text-only", "white-box")


@dataclass(frozen=True)
class LeakSignal:
    """One kind of leakage of one target at one access: the number that decides, beside its
    baseline.

    setting: "" where it was tested at neither. baseline: of non-members, or what chance gives;
    None: there is none.
    suspected: not shown, and no all-clear either: seen, or above the baseline, but not
    significantly. least: the smallest number that would have been shown; NaN: unknown. part, count:
    of which secrets only. why: it was not tested. blind: the same number without any model. excess:
    what is left above the non-members, if that decides.
    alone: whether such a number can show a leak by itself.
    """

    kind: LeakKind
    target: str
    setting: str
    status: Status
    measured: Measurement | None = None
    baseline: Measurement | float | None = None
    row: CellKey | None = None
    suspected: bool = False
    least: float = math.nan
    part: str = ""
    count: str = ""
    why: str = ""
    blind: Measurement | None = None
    # of copied records, the number of copies of which most were extracted
    worst: Stratum | None = None
    worst_group: tuple[str, Measurement] | None = None  # of the data's own groups, by name
    looks: int = 1
    excess: Measurement | None = None
    alone: bool = True

    @property
    def gate_rule(self) -> str:
        """`membership_auc=0.6`: a rule for a gate that does not hold where the signal is shown; "":
        a gate has none."""
        m = self.measured
        limits = dict(self.kind.limits)
        most = (
            None
            if m is None
            else limits.get(m.name, self.kind.limits[0][1] if m.unit == AUC else None)
        )
        if m is None or most is None or (self.part and self.kind is VERBATIM):
            return ""  # a gate has no rule for one of the data's groups
        # An AUC below one half distinguishes members just as well: its mirror image counts.
        value = max(m.value, 1 - m.value) if m.unit == AUC else m.value
        if (
            self.status == SHOWN and value < most
        ):  # two digits, rounded down: the upper bound is above it
            scale = 10.0 ** (1 - math.floor(math.log10(value))) if value > 0 else 1.0
            most = math.floor(value * scale) / scale
        part = (
            f"(kind={self.part})"
            if self.kind is PERSONAL
            else f"(count={self.count})"
            if self.count
            else ""
        )
        return f"{m.name}{part}={most:g}"


@dataclass(frozen=True)
class LeakAssessment:
    """Of the targets that were asked for, the undefended one first: every kind, access by access,
    in the kinds' order.

    contradictions: by target, measurements that cannot both be right; doubts: by target, what may
    have hidden a leak.
    """

    signals: tuple[LeakSignal, ...]
    contradictions: dict[str, tuple[Doubt, ...]]
    doubts: dict[str, tuple[Doubt, ...]]
    unasked: int = 0  # records that were not asked for lack of time

    def signals_of_target(self, target: str) -> tuple[LeakSignal, ...]:
        return tuple(s for s in self.signals if s.target == target)

    def shown_signals(self, target: str) -> tuple[LeakSignal, ...]:
        return tuple(s for s in self.signals_of_target(target) if s.status == SHOWN)

    def tested_signals(self, target: str) -> tuple[LeakSignal, ...]:
        return tuple(s for s in self.signals_of_target(target) if s.status != NOT_TESTED)

    def doubts_about(self, target: str) -> tuple[Doubt, ...]:
        """Contradictions and doubts alike: whatever forbids a conclusion from what was not seen."""
        return (*self.contradictions.get(target, ()), *self.doubts.get(target, ()))

    def shows_no_leakage(self, target: str) -> bool:
        """Whether "no leakage seen" may be said of it."""
        tested = self.tested_signals(target)
        seen = any(s.status == SHOWN or s.suspected for s in tested)
        return bool(tested) and not seen and not self.doubts_about(target) and not self.unasked

    @property
    def targets(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(s.target for s in self.signals))

    def signal_for_gate(self, target: str | None = None) -> LeakSignal | None:
        """What a gate should be about: what leaks, of the targets that a gate judges first; else
        what was measured.

        target: of this one alone. None where no gate has a rule for it.
        """
        asked = self.signals if target is None else self.signals_of_target(target)
        # A gate judges defended targets; the undefended one where there is no other.
        judged = [s for s in asked if s.target != UNDEFENDED]
        leaking = [s for s in (*judged, *asked) if s.status == SHOWN]
        others = sorted(
            (s for s in (*judged, *asked) if s.gate_rule), key=lambda s: not s.suspected
        )
        return next((s for s in (leaking or others) if s.gate_rule), None)


def assess_signals(result: AuditResult) -> LeakAssessment:
    """All signals of a result, of all targets but the control rows."""
    named = [target.name for target in result.targets if not target.companion]
    companions = {target.name for target in result.targets if target.companion}
    found = (finding.target for finding in result.findings if finding.target not in companions)
    targets = sorted(dict.fromkeys((*named, *found)), key=lambda name: name != UNDEFENDED)

    signals = tuple(s for target in targets for s in _leak_signals_of_target(result, target))
    greedy = _greedy_recall_signal(result).measured
    contradictory = {
        target: tuple(contradiction_doubts_about_target(result, target, greedy))
        for target in targets
    }
    of_data = (*member_mismatch_doubts(result), *result.benchmark.doubts)
    doubts = dict.fromkeys(targets, of_data)
    # their likelihood says nothing more
    leaking = {signal.target for signal in signals if signal.status == SHOWN}
    for record in result.targets:
        if record.name in doubts:
            said = (
                one
                for one in record.doubts
                if one.kind != "likelihood" or record.name not in leaking
            )
            doubts[record.name] = (*of_data, *said)
    counts = result.benchmark.records.get("members")
    unasked = 0 if counts is None else counts.not_attacked.get(NO_TIME, 0)
    return LeakAssessment(signals, contradictory, doubts, unasked)


# --- from readings to signals
# -----------------------------------------------------------------------------------------------


def _leak_signals_of_target(result: AuditResult, target: str) -> Iterator[LeakSignal]:
    """One a kind and access at which it was tested; else one that says why it was not.

    What released text tells is one question: its signals share the level.
    """
    rows = [f for f in result.findings if f.target == target]
    told = [
        (kind, setting, reading)
        for kind in KINDS
        for setting in SETTINGS
        for finding in rows
        if finding.setting == setting and not finding.not_applicable
        for reading in kind.read(finding)
    ]
    if result.family == RELEASED_TEXT:
        shared = bonferroni_adjusted_leak_readings([reading for *_, reading in told])
        told = [
            (kind, setting, reading)
            for (kind, setting, _), reading in zip(told, shared, strict=True)
        ]
    for kind in KINDS:
        own = [(setting, reading) for other, setting, reading in told if other is kind]
        if kind is GREEDILY and any(
            f.decodes_greedily and is_measured(f.measurement(RECALL)) for f in rows
        ):
            continue  # it is what the verbatim signal says: one measurement is not two signals
        if kind is GREEDILY and target == UNDEFENDED:
            yield _greedy_recall_signal(result)
        elif kind is GREEDILY:
            yield LeakSignal(kind, target, "", NOT_TESTED, why="undefended model only")
        elif not own:
            yield LeakSignal(
                kind, target, "", NOT_TESTED, why=_unmeasured_signal_reason(result, rows, kind)
            )
        for setting in dict.fromkeys(setting for setting, _ in own):
            signal = _signal_from_readings(
                kind, target, setting, [reading for at, reading in own if at == setting]
            )
            yield _complete_verbatim_signal(signal, rows) if kind is VERBATIM else signal


def _complete_verbatim_signal(signal: LeakSignal, rows: Sequence[Finding]) -> LeakSignal:
    """Return the signal with its worst stratum and group; of greedy decoding judged as greedy
    recall is: one record is enough."""
    groups = [
        group
        for row in rows
        if row.setting == signal.setting and (group := worst_group(row)) is not None
    ]
    signal = replace(
        signal,
        worst=_worst_stratum_of_rows(rows, signal.setting),
        worst_group=max(groups, key=lambda group: group[1].low, default=None),
    )
    m, floor = signal.measured, signal.baseline
    is_greedy = any(row.decodes_greedily for row in rows if row.cell_key == signal.row)
    if m is None or not is_greedy or not signal.suspected:
        return signal
    if isinstance(floor, Measurement) and m.value <= floor.value:
        return signal
    return replace(signal, status=SHOWN, suspected=False, least=1 / m.n)


def _worst_stratum_of_rows(rows: Sequence[Finding], setting: str) -> Stratum | None:
    """Return the worst stratum that any attack at this access found; None: no copied record was
    extracted."""
    worst = [
        found
        for row in rows
        if row.setting == setting and (found := worst_stratum(row)) is not None
    ]
    return max(
        worst, key=lambda stratum: (stratum.extracted.value, stratum.copies or 0), default=None
    )


def _signal_from_readings(
    kind: LeakKind, target: str, setting: str, readings: Sequence[LeakReading]
) -> LeakSignal:
    """By the reading that says most: a shown one, a suspected one, else the kind's own number at
    its highest.

    Of several that are zero, the one that leaves most open.
    """
    shown = [r for r in readings if r.is_shown]
    suspected = [] if shown else [r for r in readings if r.is_suspected]
    first = {name: i for i, (name, _) in enumerate(kind.limits)}
    least = min(reading.looks for reading in readings)

    def place(reading: LeakReading) -> tuple[bool, bool, int, float, float]:
        m = reading.corrected
        # Of AUCs the one that is surely farthest from chance: that of a small group is often far by
        # chance.
        size = max(m.low, 1 - m.high) if reading.either_way else m.value
        shared, named = reading.looks > least, first.get(m.name, len(first))
        # The least is best: able to show a leak, at its own level, high among the limits, large; of
        # zeros the widest.
        return not reading.alone, shared, named, -size, -m.n if size else -m.high

    best = min(shown or suspected or readings, key=place)
    return LeakSignal(
        *(
            kind,
            target,
            setting,
            SHOWN if shown else NOT_SHOWN,
            best.corrected,
            best.baseline,
            best.row,
        ),
        suspected=bool(suspected),
        looks=best.looks,
        least=best.smallest_detectable_value,
        part=best.part,
        count=best.count,
        blind=best.blind,
        excess=best.excess,
        alone=best.alone,
    )


def _greedy_recall_signal(result: AuditResult) -> LeakSignal:
    """Of the undefended model, which alone is asked, over all repeat counts.

    One hit counts, unless as large a share of the non-members is given.
    """
    told = {count: m for count, m in result.benchmark.greedy_recall.items() if is_measured(m)}
    if not told:
        return LeakSignal(GREEDILY, UNDEFENDED, "", NOT_TESTED)
    hits, n = sum(round(m.value * m.n) for m in told.values()), sum(m.n for m in told.values())
    low, high = clopper_pearson(hits, n)
    measured, baseline = (
        Measurement(GREEDY, hits / n, low, high, n),
        result.benchmark.greedy_nonmembers,
    )
    above = hits > 0 and (baseline is None or measured.value > baseline.value)
    worst = max(told, key=lambda count: (told[count].value, told[count].n))
    part = ""
    if hits and len(told) > 1 and worst.isdecimal():
        of = told[worst]
        part = (
            f"{round(of.value * of.n):,}/{of.n:,} of those trained on {counted(int(worst), 'time')}"
        )
    return LeakSignal(
        *(GREEDILY, UNDEFENDED, "", SHOWN if above else NOT_SHOWN, measured, baseline),
        suspected=hits > 0 and not above,
        least=1 / n,
        part=part,
    )


def _unmeasured_signal_reason(result: AuditResult, rows: Sequence[Finding], kind: LeakKind) -> str:
    """Why no attack or probe measured this kind; "": none that could have was asked for."""
    if (
        kind.alike
        and (unlike := member_mismatch_doubts(result))
        and any(f.measurement(kind.main) for f in rows)
    ):
        return unlike[0].sentence
    if kind is PERSONAL and any(is_measured(f.measurement(RECALL)) for f in rows):
        return "no personal data lies in the attacked suffixes"
    measuring = result.methods_measuring(*kind.measured_by)
    return "; ".join(
        dict.fromkeys(f.not_applicable for f in rows if f.not_applicable and f.attack in measuring)
    )
