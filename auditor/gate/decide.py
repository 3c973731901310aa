"""Decides rules on a finished run, alone or against a baseline: held, failed or inconclusive. Works from the records.

A rule is held where the upper bound is within its limit, failed where the lower bound is beyond it. A gate passes only
if all rules do, so an upper bound of 95% each keeps a false pass to 5% (an intersection-union test); it fails if any
rule does, so lower bounds are corrected for the number of decisions (Holm), which keeps a false alarm to 5% too.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from auditor.core.errors import AuditError, unknown
from auditor.core.nouns import UNDEFENDED, CellKey
from auditor.core.result import AuditResult, Finding, Measurement
from auditor.gate.comparable import check_comparable
from auditor.gate.contradictions import contradictions
from auditor.gate.policy import Policy, Rule, check_share
from auditor.gate.rulings import Decision, Ruling, Verdict
from auditor.records import outcomes
from auditor.records.outcomes import PerSecret, Run
from auditor.statistics.bounds import LEVEL, BinomialCount, Evidence, RecordedInterval
from auditor.statistics.holm import level_of_each
from auditor.statistics.metrics import SHARES, find


def read_run(folder: Path) -> Run:
    """A run folder. Raises AuditError where it holds no finished run."""
    from auditor.records import saved

    return Run(str(folder), saved.read(folder), outcomes.of_folder(folder))


def decide(
    run: Run,
    policy: Policy,
    baseline: Run | None = None,
    *,
    target: str | None = None,
    setting: str | None = None,
    attack: str | None = None,
) -> Decision:
    """All rules on one run. Raises AuditError for a baseline that is missing or cannot be compared.

    A run that contradicts itself fails, whatever the rules; so does an attack that was asked for and applied to no row
    of a judged target, unless the policy says that it need not.
    """
    check_policy(policy, baseline)
    for name, given in (("target", target), ("setting", setting), ("attack", attack)):
        if given == "":
            raise AuditError(f"expected the name of a {name} to judge, got an empty one")
    if baseline is not None:
        check_comparable(run, baseline, "baseline")
    rulings = [*_contradicted(run, "this run"), *(_contradicted(baseline, "the baseline") if baseline else ())]
    rulings += judge(run.result, policy.rules, run.outcomes, baseline, target=target, setting=setting, attack=attack)
    if not policy.allow_not_applicable:
        rulings += _never_applied(run.result, dict.fromkeys(ruling.target for ruling in rulings), attack)
    return Decision(run.name, baseline.name if baseline else "", tuple(rulings), policy.inconclusive)


def _contradicted(run: Run, what: str) -> list[Ruling]:
    found = list(contradictions(run.result, run.outcomes))
    if not run.outcomes and any(finding.measurements for finding in run.result.findings):
        found.append((CellKey("", "", ""), f"it has numbers, but no {outcomes.OUTCOMES} that they are of"))
    return [_failed(row, f"the result contradicts itself: {why}", f"{what} agrees with itself") for row, why in found]


def _never_applied(result: AuditResult, targets: Collection[str], attack: str | None) -> list[Ruling]:
    """Of the judged targets, the attacks and probes that say nothing of it though they were to."""
    rulings = []
    for target in targets:
        for asked in dict.fromkeys(result.plan.get("attack", ())):
            rows = [f for f in result.findings if (f.target, f.attack) == (target, asked)]
            if rows and attack in (None, asked) and all(row.not_applicable for row in rows):
                why = f"asked for and never applied ({rows[-1].not_applicable}); --allow-not-applicable lets it pass"
                rulings.append(_failed(CellKey(target, "", asked), why, "every attack applies"))
    return rulings


def _failed(row: CellKey, reason: str, rule: str) -> Ruling:
    return Ruling(*row, "", math.nan, math.nan, math.nan, "failed", reason, rule)


def check_policy(policy: Policy, baseline: Run | None) -> None:
    """Raises AuditError for a policy without rules, or with one that needs a baseline where there is none."""
    if not policy.rules:
        raise AuditError("expected at least one rule: --max metric=limit, --policy FILE or --baseline RUN, got none")
    for rule in policy.rules:
        if rule.against_baseline and baseline is None:
            raise AuditError(f"the rule '{rule}' needs a baseline: give --baseline RUN")


def check_rows(policy: Policy, rows: Collection[CellKey]) -> None:
    """Raises AuditError for a rule about a row that a run with these rows will not have."""
    for rule in policy.rules:
        scope = (rule.target, rule.setting, rule.attack)
        _check_names(scope, rows)
        if not any(all(wanted in (None, held) for wanted, held in zip(scope, row, strict=True)) for row in rows):
            raise AuditError(f"the rule '{rule}' is for {' '.join(filter(None, scope))}, a row this run does not have")


def _check_names(scope: Sequence[str | None], rows: Collection[CellKey]) -> None:
    for i, (kind, wanted) in enumerate(zip(("target", "setting", "attack"), scope, strict=True)):
        known = {row[i] for row in rows}
        if wanted is not None and wanted not in known:
            raise unknown(kind, wanted, known)


def judge(
    result: AuditResult,
    rules: Sequence[Rule],
    own: Mapping[CellKey, PerSecret] | None = None,
    baseline: Run | None = None,
    *,
    target: str | None = None,
    setting: str | None = None,
    attack: str | None = None,
) -> list[Ruling]:
    """A ruling for each rule and row: those of the defended targets (of the undefended one where there is no other).

    A rule is for the attacks and probes that measure its metric somewhere; where none does, it fails on every row.
    Companion rows such as the unmixed ensemble are judged only by name. An empty run, a missing metric or a NaN fails.
    own, baseline: the run's outcomes and the run it is held against, for rules against a baseline.
    """
    cases: list[_Case] = []
    for rule in rules:
        scope = {
            "target": rule.target or target,
            "setting": rule.setting or setting,
            "attack": rule.attack or attack,
        }
        _check_names(tuple(scope.values()), [finding.key for finding in result.findings])
        judged = [scope["target"]] if scope["target"] else list(result.plan.get("defense", ())) or [UNDEFENDED]
        for name in dict.fromkeys(judged):
            rows = _rows(result, name, scope["setting"], scope["attack"])
            cases += [_case(row, rule, own or {}, baseline) for row in _rows_for(rule.metric, rows, result)]
            if not rows:  # another target's rows do not answer for this one
                row = CellKey(name, scope["setting"] or "", scope["attack"] or "")
                cases.append(_Case(row, rule, "no row was measured"))
    level = level_of_each([partial(_exceeds, case) for case in cases if isinstance(case.seen, _Number)], LEVEL)
    return [_ruling(case, level) for case in cases]


@dataclass(frozen=True)
class _Number:
    """What a rule is decided on: the number with its bounds, and how to say it."""

    evidence: Evidence
    words: str


@dataclass(frozen=True)
class _Case:
    """A rule on a row, with what was seen of it or why nothing was."""

    row: CellKey
    rule: Rule
    seen: _Number | str


def _rows(result: AuditResult, target: str, setting: str | None, attack: str | None) -> list[Finding]:
    return [
        f
        for f in result.findings
        if f.target == target and setting in (None, f.setting) and attack in (None, f.attack) and not f.not_applicable
    ]


def _rows_for(metric: str, rows: list[Finding], result: AuditResult) -> list[Finding]:
    """The rows that answer for a metric: a probe has no recall, and an attack no exact probability."""
    measuring = {finding.attack for finding in result.findings if finding.measurement(metric)}
    return [row for row in rows if row.attack in measuring] or rows


def _case(finding: Finding, rule: Rule, own: Mapping[CellKey, PerSecret], baseline: Run | None) -> _Case:
    measured = _measured(finding, rule)
    if isinstance(measured, Measurement):
        seen = _paired(finding, rule, measured, own, baseline) if rule.against_baseline else _alone(rule, measured)
        if measured.unit in SHARES:
            check_share(rule)
        return _Case(finding.key, rule, seen)
    return _Case(finding.key, rule, measured)


def _measured(finding: Finding, rule: Rule) -> Measurement | str:
    """The rule's number in this row, or why it has none."""
    measurement = finding.measurement(rule.metric)
    if measurement is None:
        return f"this row has no {rule.metric} (it has: {', '.join(m.name for m in finding.measurements)})"
    if rule.count is not None and not rule.against_baseline:
        if finding.main is not measurement or not finding.by_repeats:
            return f"this row has no {rule.metric} by repeat count"
        found = finding.by_repeats.get(str(rule.count))
        if found is None:
            return f"this row has no {rule.name} (repeat counts: {', '.join(finding.by_repeats)})"
        measurement = replace(found, name=rule.metric)
    if math.isnan(measurement.value) or measurement.n == 0:
        return f"{rule.name} is not a number: nothing was measured"
    return measurement


def _alone(rule: Rule, measured: Measurement) -> _Number:
    return _Number(evidence(measured), f"{rule.name} {measured.value:.4g}")


def _paired(
    finding: Finding,
    rule: Rule,
    measured: Measurement,
    own: Mapping[CellKey, PerSecret],
    baseline: Run | None,
) -> _Number | str:
    row = finding.key
    assert baseline is not None  # `decide` has seen to it
    mine, theirs = own.get(row), baseline.outcomes.get(row)
    if mine is None or theirs is None:
        return f"{'this run' if mine is None else 'the baseline'} has no outcomes of this row to pair"
    found = outcomes.difference(rule.metric, rule.count, mine, theirs)
    if isinstance(found, str):
        return found
    return _Number(found, f"{rule.name} minus the baseline's {found.value:+.4g}, paired by secret,")


def _exceeds(case: _Case, level: float) -> bool:
    return isinstance(case.seen, _Number) and case.seen.evidence.low(level) > case.rule.limit


def _ruling(case: _Case, level: float) -> Ruling:
    limit, metric, words = case.rule.limit, case.rule.name, str(case.rule)
    if isinstance(case.seen, str):
        return Ruling(*case.row, metric, limit, math.nan, math.nan, "failed", case.seen, words)
    seen = case.seen.evidence
    low, high = seen.low(level), seen.high(LEVEL)
    if math.isnan(low) or math.isnan(high):
        why = f"the result contradicts itself: {case.seen.words} with bounds that are no numbers"
        return Ruling(*case.row, metric, limit, low, high, "failed", why, words)
    verdict: Verdict = "held" if high <= limit else "failed" if low > limit else "inconclusive"
    allowed = "allowed" if case.rule.against_baseline else "limit"
    reason = f"{case.seen.words} between {low:.4f} and {high:.4f} (n = {seen.n}), {allowed} {limit:g}"
    return Ruling(*case.row, metric, limit, low, high, verdict, reason, words, seen.value, seen.n)


def evidence(measurement: Measurement) -> Evidence:
    """One-sided bounds: exact for counts; for others from the two-sided 95% interval that is on record."""
    if find(measurement.name).exact:
        return BinomialCount(round(measurement.value * measurement.n), measurement.n)
    return RecordedInterval(measurement.value, measurement.low, measurement.high, measurement.n)
