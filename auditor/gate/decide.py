"""Judge each rule on a finished run as held, failed or inconclusive, perhaps against a baseline.

A rule holds if the upper bound is within its limit, and fails if the lower bound is beyond the
limit. A gate passes only if all rules hold, so upper bounds at 95% each keep the rate of false
passes within 5% (an intersection-union test). A gate fails if any rule fails, so lower bounds are
corrected for the number of decisions (Holm), which keeps the rate of false alarms within 5%.

Epsilon has only a lower bound, because no audit shows that epsilon is small. A limit on epsilon
fails if the lower bound is above the limit. Otherwise, the limit holds if the audit was strong
enough to find a lower bound above it (`statistics.audited.explain_powerless_audit`). After a weaker
audit, the rule is inconclusive.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from auditor.conclusions import claims, outcomes
from auditor.conclusions.outcomes import RunOutcomes, ValuesBySecret
from auditor.conclusions.signals import assess_leak_signals
from auditor.core.errors import AuditError, refuse_unknown_names
from auditor.core.nouns import UNDEFENDED, CellKey
from auditor.core.result import Audited, AuditResult, Finding, Measurement
from auditor.gate import attest, objections, required_coverage
from auditor.gate.comparability import check_comparable
from auditor.gate.contradictions import find_result_contradictions
from auditor.gate.policy import Policy, Rule, check_share_limit
from auditor.gate.rule_scope import (
    check_rule_scope_names_exist,
    choose_baseline_rules,
    list_judged_targets,
    pair_rule_rows,
    select_strongest_group,
    suggest_rule_metrics,
)
from auditor.gate.rulings import Decision, Ruling, Verdict, make_gate_ruling
from auditor.statistics import documents
from auditor.statistics.audit_power import (
    SURE,
    describe_audit_ceiling,
    describe_detection_power,
    find_detectable_epsilon,
)
from auditor.statistics.audited import METRICS as BOUNDS
from auditor.statistics.audited import (
    describe_shape_mu,
    explain_powerless_audit,
    repeat_epsilon_audit,
)
from auditor.statistics.bounds import (
    LEVEL,
    BoundedNumber,
    bound_auc_either_way,
    bound_binomial_share,
    bound_part_share,
    bound_recorded_interval,
)
from auditor.statistics.holm import adjust_test_level
from auditor.statistics.metrics import (
    METRICS,
    RECALL,
    SHARES,
    find_metric,
    is_builtin_metric,
    name_auc,
)
from auditor.statistics.roc import AUC

_COUNTED_BY_COPIES = (RECALL, documents.RECALL)  # metrics whose strata count records by copies


def apply_gate_policy(
    run: RunOutcomes,
    policy: Policy,
    baseline: RunOutcomes | None = None,
    *,
    target: str | None = None,
    setting: str | None = None,
    attack: str | None = None,
    attested: Ruling | None = None,
) -> Decision:
    """Judge all rules on a run, and return the decision.

    The decision is also "failed" if the run contradicts itself, or if a requested attack could not
    run on a judged target in any setting. The policy can allow such attacks
    (`allow_not_applicable`).

    Args:
        run: the run.
        policy: the rules; without rules, those of `choose_baseline_rules`.
        baseline: run to compare with; None if no rule needs one.
        target: if given, judge only this target.
        setting: if given, judge only this access setting.
        attack: if given, judge only this attack or probe.
        attested: ruling on whether the run matches its signed attestation; None if no attestation
            was given.

    Raises:
        AuditError: for an unknown metric and for a missing or incomparable baseline.
    """
    narrowed = {"target": target, "setting": setting, "attack": attack}
    for name, choice in narrowed.items():
        if choice == "":
            raise AuditError(f"expected the name of a {name} to judge, got an empty one")
    if baseline is not None and not policy.rules:
        rules = choose_baseline_rules(run.result, baseline.result, [*narrowed.values()])
        policy = replace(policy, rules=rules)
    check_gate_policy(policy, baseline)
    check_rule_metrics(
        policy.rules, {m.name for finding in run.result.findings for m in finding.measurements}
    )
    if baseline is not None:
        check_comparable(run, baseline, "baseline")
    contradicted = _judge_contradictions(run, "this run")
    rulings = [*_judge_edits(run, "this run", True), *contradicted]
    if baseline is not None:
        rulings += _judge_edits(baseline, "the baseline", False)
        rulings += _judge_contradictions(baseline, "the baseline")
    rulings += judge_gate_rules(run.result, policy.rules, run.outcomes, baseline, **narrowed)
    if not contradicted:  # otherwise its numbers may be impossible
        assessment = assess_leak_signals(run.result)
        downgrade = partial(objections.downgrade_doubtful_ruling, run.result, assessment)
        rulings = list(map(downgrade, rulings))
    # "": a ruling on the entire run
    judged = dict.fromkeys(ruling.target for ruling in rulings if ruling.target)
    rulings += required_coverage.judge_required_attacks(run, policy.require, judged)
    if attested is not None or policy.require.attestation:
        request = "attestation: the policy requires one: give --attestation FILE --key PUBLIC_KEY"
        rulings.append(attested or make_gate_ruling(request, attest.SIGNED))
    if not policy.allow_not_applicable:
        rulings += _judge_unapplied_attacks(run.result, judged, attack)
    final_rulings = tuple(map(partial(objections.add_audited_share, run.result), rulings))
    return Decision(run.name, baseline.name if baseline else "", final_rulings, policy.inconclusive)


def _judge_contradictions(run: RunOutcomes, description: str) -> list[Ruling]:
    rule = f"{description} agrees with itself"
    rulings = []
    for cell, fault in find_result_contradictions(run.result, run.outcomes, run.listed):
        rulings.append(make_gate_ruling(f"the result contradicts itself: {fault}", rule, cell=cell))
    return rulings


def _judge_edits(run: RunOutcomes, description: str, is_whole: bool) -> list[Ruling]:
    sentences = run.edits.describe_edits(is_whole) if run.edits else ()
    rule = f"{description} is as it was when it ended"
    rulings = []
    for sentence in sentences:
        rulings.append(make_gate_ruling(f"{run.name}: {sentence} since the run ended", rule))
    return rulings


def _judge_unapplied_attacks(
    result: AuditResult, targets: Collection[str], attack: str | None
) -> list[Ruling]:
    """Return a failed ruling for each requested attack or probe that applied to none of the
    targets.
    """
    rulings = []
    for target in targets:
        for method in dict.fromkeys(result.plan.get("attack", ())):
            rows = result.select_findings(target, attack=method)
            if (
                rows
                and attack in (None, method)
                and all(finding.not_applicable for finding in rows)
            ):
                reason = (
                    f"requested and never applied ({rows[-1].not_applicable}); "
                    "--allow-not-applicable lets it pass"
                )
                cell = CellKey(target, "", method)
                rulings.append(make_gate_ruling(reason, "every attack applies", cell=cell))
    return rulings


def check_gate_policy(policy: Policy, baseline: RunOutcomes | None) -> None:
    """Raise AuditError if the policy has no rules, or if a rule needs a missing baseline."""
    if not policy.rules:
        raise AuditError(
            "expected at least one rule: --max metric=limit, --policy FILE or --baseline RUN, got "
            "none"
        )
    for rule in policy.rules:
        if rule.against_baseline and baseline is None:
            raise AuditError(f"the rule '{rule}' needs a baseline: give --baseline RUN")


def check_rule_metrics(rules: Sequence[Rule], measured: Collection[str] = ()) -> None:
    """Raise AuditError if a rule's metric is neither in the table of metrics nor in `measured`.

    This catches a mistyped metric. `measured` holds the names of metrics that plug-ins measured.
    """
    for rule in rules:
        if not is_builtin_metric(rule.metric):
            known = {metric.name for metric in METRICS}.union(measured)
            refuse_unknown_names("metric", [rule.metric], known)


def check_ruled_rows_exist(policy: Policy, rows: Collection[CellKey]) -> None:
    """Raise AuditError if a rule names a target, setting or attack that the run does not have.

    `rows` are the run's cells: target, setting, and attack or probe.
    """
    for rule in policy.rules:
        scope = (rule.target, rule.setting, rule.attack)
        check_rule_scope_names_exist(scope, rows)
        for cell in rows:
            if all(name in (None, part) for name, part in zip(scope, cell, strict=True)):
                break
        else:
            title = CellKey(*(part or "" for part in scope)).title
            raise AuditError(
                f"the rule '{rule}' is for {title}, a configuration this run does not have"
            )


def judge_gate_rules(
    result: AuditResult,
    rules: Sequence[Rule],
    values_by_cell: Mapping[CellKey, ValuesBySecret] | None = None,
    baseline: RunOutcomes | None = None,
    *,
    target: str | None = None,
    setting: str | None = None,
    attack: str | None = None,
) -> list[Ruling]:
    """Return a ruling for each rule and each finding of the judged targets.

    The judged targets are the defended targets, or the undefended target if no defense was audited.
    Control models, such as the unmixed ensemble, are judged only if a rule names them. A rule
    covers the attacks and probes that measure its metric. If no attack or probe measures the
    metric, if the run is empty or if the number is NaN, the rule fails.

    Args:
        result: the result of the run.
        rules: the rules.
        values_by_cell: results by secret, from which every number is recomputed. A limit does not
            hold if its number cannot be recomputed. None to trust the numbers in the result.
        baseline: the run to compare with.
        target: if given, judge only this target.
        setting: if given, judge only this access setting.
        attack: if given, judge only this attack or probe.
    """
    cases: list[_Case] = []
    for rule in rules:
        scope = {
            "target": rule.target or target,
            "setting": rule.setting or setting,
            "attack": rule.attack or attack,
        }
        check_rule_scope_names_exist(
            tuple(scope.values()), [finding.cell_key for finding in result.findings]
        )
        for name in [scope["target"]] if scope["target"] else list_judged_targets(result, rule):
            cell = CellKey(name, scope["setting"] or "", scope["attack"] or "")
            cases += _list_target_cases(result, cell, rule, values_by_cell, baseline)
    # numbers of copies with a separate rule
    counts = set()
    tests = []
    for rule in rules:
        if rule.metric in _COUNTED_BY_COPIES and rule.count is not None:
            counts.add(rule.count)
    for case in cases:
        # a case without evidence fails at every level, so it takes no share of Holm's level
        if not isinstance(case.evidence, str):
            tests.append(partial(_is_limit_exceeded, case))
    level = adjust_test_level(tests, LEVEL)
    return [_judge_case(case, level, counts) for case in cases]


def _list_target_cases(
    result: AuditResult,
    cell: CellKey,
    rule: Rule,
    values_by_cell: Mapping[CellKey, ValuesBySecret] | None,
    baseline: RunOutcomes | None,
) -> Iterator[_Case]:
    """Yield the cases of a rule on one target. A case is a rule with the evidence to judge it by.

    Args:
        result: result of the run.
        cell: target, setting and attack; "" for any setting or any attack.
        rule: the rule.
        values_by_cell: results by secret; None to trust the numbers in the result.
        baseline: run to compare with; None if there is none.
    """
    setting = cell.setting or None
    attack = cell.attack or None
    if rule.of_claim:
        yield _build_claim_case(result, cell.target, rule, setting, attack)
        return
    rows = []
    for finding in result.select_findings(cell.target, setting, attack):
        if not finding.not_applicable:
            rows.append(finding)
    pairs = pair_rule_rows(rule, rows, result)
    for finding, row_rule in pairs:
        row_rule = select_strongest_group(finding, row_rule)
        evidence = _find_evidence(finding, row_rule, values_by_cell, baseline)
        yield _Case(finding.cell_key, row_rule, evidence, finding)
    if not pairs:  # attacks on another target do not cover this target
        reason = "this run has no forms: --forms names them"
        if cell.target:
            reason = "nothing was measured"
        yield _Case(cell, rule, reason)


@dataclass(frozen=True)
class _Number:
    """Number that a rule limits, with its bounds.

    Args:
        evidence: the number with its bounds.
        words: the number as a phrase for the ruling.
        derived: True if the number was recomputed from each secret's results.
        parts: number of attacked parts of records, if the number is a share of these parts;
            otherwise 0.
    """

    evidence: BoundedNumber
    words: str
    derived: bool = True
    parts: int = 0


WeighClaim = Callable[..., claims.ClaimEvidence]  # of a significance level


@dataclass(frozen=True)
class _Case:
    """One rule on one cell (target, setting, attack or probe), with the evidence to judge by.

    Args:
        cell: target, setting, and attack or probe.
        rule: the rule.
        evidence: the limited number, a lower bound of epsilon (`Audited`), or a function that
            weighs the target's claim at a significance level. If there is no evidence, a text that
            gives the reason.
        finding: the finding of the cell; None for a rule on a claim.
    """

    cell: CellKey
    rule: Rule
    evidence: _Number | Audited | WeighClaim | str
    finding: Finding | None = None


def _build_claim_case(
    result: AuditResult, name: str, rule: Rule, setting: str | None, attack: str | None
) -> _Case:
    """Build the case of a rule on the claim of a target.

    The target's audits share the significance level.

    Args:
        result: result of the run.
        name: name of the target.
        rule: the rule.
        setting: if given, only audits in this access setting count.
        attack: if given, only audits by this probe count.
    """
    cell = CellKey(name, setting or "", attack or "")
    target = next((target for target in result.targets if target.name == name), None)
    if target is None or not result.select_findings(name):
        return _Case(cell, rule, "nothing was measured")
    # a function of the level: Holm needs all cases to determine it
    weigh_claim = partial(
        claims.weigh_claim_against_audits, result, target, setting=setting, attack=attack
    )
    if weigh_claim().claimed is None:
        nominal_epsilon = target.nominal_epsilon
        nominal = ""
        if nominal_epsilon is not None:
            nominal = f" (its nominal epsilon {nominal_epsilon:.4g} is none)"
        return _Case(
            cell, rule, f"it claims no epsilon{nominal}: there is nothing to compare it with"
        )
    return _Case(cell, rule, weigh_claim)


def _find_evidence(
    finding: Finding,
    rule: Rule,
    values_by_cell: Mapping[CellKey, ValuesBySecret] | None,
    baseline: RunOutcomes | None,
) -> _Number | Audited | str:
    measured, derived = _select_measurement(finding, rule, values_by_cell)
    if isinstance(measured, str):
        return measured
    if rule.metric in BOUNDS.values() and not rule.is_paired_difference:
        return _select_epsilon_audit(finding, rule.metric)
    if measured.unit in SHARES:
        check_share_limit(rule)
    if rule.is_paired_difference:
        return _compute_paired_difference(finding.cell_key, rule, values_by_cell or {}, baseline)
    row_values = (values_by_cell or {}).get(finding.cell_key)
    number = _build_limit_evidence(rule, measured, row_values, derived)
    of_records = _measure_records(finding, rule, row_values)
    if of_records is not None:
        evidence = bound_part_share(number.evidence, compute_rule_bounds(of_records))
        number = replace(number, evidence=evidence, parts=number.evidence.n)
    return number


def _measure_records(
    finding: Finding, rule: Rule, row_values: ValuesBySecret | None
) -> Measurement | None:
    """Return the share of whole records if the rule limits a share of parts of records.

    If the rule has a repeat count or a kind of personal data, use only records that have it. Return
    None if the rule limits another number, or if records have no parts.

    Args:
        finding: the finding.
        rule: the rule.
        row_values: results by secret of the finding's cell; None if there are none.
    """
    metric = outcomes.OF_RECORDS.get(rule.metric, "")
    recorded = finding.measurement(metric)
    if recorded is None or row_values is None or row_values.anytime:
        recomputed = None
    else:
        recomputed = row_values.remeasure_metric(metric, rule.count, rule.kind)
    if recomputed is None and rule.count is None and rule.kind is None:
        return recorded
    return recomputed


def _select_measurement(
    finding: Finding, rule: Rule, values_by_cell: Mapping[CellKey, ValuesBySecret] | None
) -> tuple[Measurement | str, bool]:
    """Return the number that a rule limits.

    Args:
        finding: the finding.
        rule: the rule.
        values_by_cell: results by secret; None to trust the finding's numbers.

    Returns:
        The number, or the reason why it is missing.
        Whether the number was recomputed from each secret's results.
    """
    count = None if rule.is_paired_difference else rule.count
    if rule.kind is not None:
        recorded = finding.by_kind.get(rule.kind)
        known = f" (kinds of personal data: {', '.join(finding.by_kind) or 'none'})"
    else:
        recorded = finding.measurement(rule.metric)
        known = suggest_rule_metrics(rule.metric, [m.name for m in finding.measurements])
    if recorded is None:
        name = rule.metric_with_part if rule.kind else rule.metric
        return f"this attack has no {name}{known}", False
    if not find_metric(rule.metric).bounded:
        return f"{rule.metric} has no interval, so a limit can be neither held nor broken", False
    row_values = None
    if not rule.is_paired_difference:  # it is computed from both runs' values
        row_values = (values_by_cell or {}).get(finding.cell_key)
    recomputed = None
    if row_values is not None:
        recomputed = row_values.remeasure_metric(rule.metric, count, rule.kind)
    if count is not None:
        if not finding.by_repeats or (recomputed is None and finding.main is not recorded):
            return f"this attack has no {rule.metric} by repeat count", False
        if str(count) not in finding.by_repeats:
            counts = ", ".join(finding.by_repeats)
            return f"this attack has no {rule.metric_with_part} (repeat counts: {counts})", False
        if finding.main is recorded:
            recorded = finding.by_repeats[str(count)]
        else:
            recorded = None
    decisive = _join_recorded_interval(recomputed, recorded)
    if (
        decisive is not None
        and recorded is not None
        and row_values is not None
        and finding.scores_tried
        and rule.metric == name_auc("")
        and outcomes.has_stored_auc(row_values, count, recorded.value)
    ):
        # The note names this score; another one may be the strongest without its widened interval.
        decisive = replace(decisive, value=recorded.value)
    if decisive is None or math.isnan(decisive.value) or decisive.n == 0:
        return f"{rule.metric_with_part} is not a number: nothing was measured", False
    # Counts of queries and records, such as claim_violations, are not means over secrets.
    is_count = decisive.unit == "count"
    is_derived = recomputed is not None or values_by_cell is None or is_count
    return replace(decisive, name=rule.metric), is_derived


def _join_recorded_interval(
    recomputed: Measurement | None, recorded: Measurement | None
) -> Measurement | None:
    """Return the recomputed number, with an interval that also contains the recorded interval.

    The recorded interval may rightly be wider than the interval recomputed from the secrets. This
    is never so for a share, whose recomputed interval is returned unchanged.
    """
    if recomputed is None or recorded is None or recomputed.unit == "share":
        return recomputed or recorded
    return replace(
        recorded,
        value=recomputed.value,
        low=min(recomputed.low, recorded.low),
        high=max(recomputed.high, recorded.high),
    )


def _select_epsilon_audit(finding: Finding, metric: str) -> Audited | str:
    for audit in finding.audits:
        if BOUNDS.get(audit.estimator) == metric:
            try:
                return repeat_epsilon_audit(audit, LEVEL)
            except AuditError as error:
                return str(error)
    return f"this attack has no counts for its {metric}"


def _build_limit_evidence(
    rule: Rule, measured: Measurement, values_by_secret: ValuesBySecret | None, derived: bool
) -> _Number:
    """Return the limited number with its bounds.

    The bounds of a TPR are recomputed at each significance level, because a lower level needs more
    non-members to set the TPR's threshold.

    Args:
        rule: the rule.
        measured: the limited number.
        values_by_secret: results by secret; None if there are none.
        derived: whether the number was recomputed from each secret's results.
    """
    evidence: BoundedNumber | None = None
    if values_by_secret is not None and values_by_secret.anytime:
        # The results decided when the attack stopped: an interval for a fixed sample size would be
        # too narrow (formulas D2).
        evidence = values_by_secret.build_anytime_evidence(rule.metric, rule.count, rule.kind)
    evidence = (
        evidence
        or outcomes.bound_roc_metric(rule.metric, values_by_secret)
        or compute_rule_bounds(measured)
    )
    remark = ""
    if evidence.value != measured.value:
        remark = f" (the other way {evidence.value:.4g})"
    if rule.metric == name_auc("") and measured.note:
        remark = f" ({measured.note}){remark}"
    return _Number(evidence, f"{rule.metric_with_part} {measured.value:.4g}{remark}", derived)


def _compute_paired_difference(
    cell: CellKey,
    rule: Rule,
    values_by_cell: Mapping[CellKey, ValuesBySecret],
    baseline: RunOutcomes | None,
) -> _Number | str:
    other = "the baseline"
    base_cell = cell
    if rule.against_undefended:
        if cell.target == UNDEFENDED:
            return "it is the undefended model, with which forms and defenses are compared"
        other = "the undefended model"
        base_cell = cell._replace(target=UNDEFENDED)
        base_outcomes = values_by_cell
    else:
        assert baseline is not None  # `apply_gate_policy` checks it
        base_outcomes = baseline.outcomes
    row_values = values_by_cell.get(cell)
    base_values = base_outcomes.get(base_cell)
    if row_values is None or base_values is None:
        return f"{'this run' if row_values is None else other} has no results by secret to pair"
    if rule.against_undefended and set(row_values.ids) != set(base_values.ids):
        return f"this model and {other} were attacked with different secrets"
    difference = outcomes.compare_paired_metric(rule.metric, rule.count, row_values, base_values)
    if isinstance(difference, str):
        return difference
    number = _Number(
        difference,
        f"{rule.metric_with_part} minus {other}'s: {difference.value:+.4g}, paired by secret,",
    )
    of_records = outcomes.OF_RECORDS.get(rule.metric)
    if of_records is None or documents.RECORD not in row_values.columns:
        return number
    records = outcomes.compare_paired_metric(of_records, rule.count, row_values, base_values)
    if isinstance(records, str):  # as after a stop by --until, whose bounds are others
        return number
    return replace(number, evidence=bound_part_share(difference, records), parts=difference.n)


def _is_limit_exceeded(case: _Case, level: float) -> bool:
    match case.evidence:
        case _Number(evidence):
            return evidence.low(level) > case.rule.limit
        case Audited():
            return repeat_epsilon_audit(case.evidence, level).epsilon > case.rule.limit
        case str():
            return False
        case weigh_claim:
            return weigh_claim(level).verdict == claims.CONTRADICTED


def _judge_case(case: _Case, level: float, counts_with_a_rule: Collection[int]) -> Ruling:
    """Return the ruling on a case.

    Args:
        case: a rule on a cell, with the evidence.
        level: significance level of lower bounds, corrected for the number of decisions.
        counts_with_a_rule: the repeat counts whose secrets have a rule of their own.
    """
    limit, metric, words = case.rule.limit, case.rule.metric_with_part, str(case.rule)
    if isinstance(case.evidence, str):
        return Ruling(*case.cell, metric, limit, math.nan, math.nan, "failed", case.evidence, words)
    if isinstance(case.evidence, Audited):
        return _judge_epsilon_bound(
            case.cell, case.rule, repeat_epsilon_audit(case.evidence, level)
        )
    if not isinstance(case.evidence, _Number):
        return _judge_epsilon_claim(case.cell, case.rule, case.evidence(level))
    bounds = case.evidence.evidence
    # Holm's level is only for lower bounds: a false pass needs an error of every rule (Berger
    # 1982), a false alarm only one error
    low, high = bounds.low(level), bounds.high(LEVEL)
    if math.isnan(low) or math.isnan(high):
        explanation = (
            f"the result contradicts itself: {case.evidence.words} with bounds that are not numbers"
        )
        return Ruling(*case.cell, metric, limit, low, high, "failed", explanation, words)
    verdict: Verdict = "held" if high <= limit else "failed" if low > limit else "inconclusive"
    allowed = "allowed" if case.rule.is_paired_difference else "limit"
    reason = (
        f"{case.evidence.words} between {low:.4f} and {high:.4f} "
        f"({_describe_sample_size(case, case.evidence)}), {allowed} {limit:g}"
    )
    # A number that cannot be recomputed can break a rule but not satisfy it: edits make numbers
    # look better.
    unmeasured = verdict == "held" and not case.evidence.derived
    objection = ""
    if unmeasured:
        objection = "it is not stored by secret, so it cannot be recomputed"
    elif verdict == "held" and metric in _COUNTED_BY_COPIES and not case.rule.is_paired_difference:
        assert case.finding is not None  # only a rule on a claim has none
        objection = objections.find_strata_objection(case.finding, limit, counts_with_a_rule)
    missed = None
    if objection:
        verdict = "inconclusive"
        reason = f"{reason}; {objection}"
    elif verdict == "held":
        reason = f"{reason}; a true {high:.4g} or more is missed in at most 5% of cases"
        missed = high
    return Ruling(
        *(*case.cell, metric, limit, low, high, verdict, reason, words),
        *(bounds.value, bounds.n, unmeasured, missed),
    )


def _describe_sample_size(case: _Case, number: _Number) -> str:
    n = number.evidence.n
    if number.parts:
        return f"n = {n} records, in {number.parts} parts"
    if case.rule.metric in outcomes.OF_RECORDS.values():
        return f"n = {n} records"
    if case.finding and case.finding.measurement(documents.RECALL):
        return f"n = {n} parts, taken as independent"
    return f"n = {n}"


def _judge_epsilon_bound(cell: CellKey, rule: Rule, audit: Audited) -> Ruling:
    """Judge a limit on an audited lower bound of epsilon.

    If the bound is below the limit, the verdict is held only if the audit was strong enough to find
    a bound above the limit. Otherwise, the verdict is inconclusive.
    """
    limit = rule.limit
    reason = (
        f"{rule.metric_with_part} {audit.epsilon:.4f} (of {audit.best:.4f} provable by "
        f"{audit.canaries_or_games_label} at {1 - audit.level:.4g}), limit {limit:g}"
    )
    verdict: Verdict = "failed"
    missed = None
    if audit.epsilon <= limit:
        if weak := explain_powerless_audit(audit, limit):
            verdict = "inconclusive"
            reason += f": {weak}"
        else:
            verdict = "held"
            reason += f": {describe_detection_power(audit, limit, SURE)}"
            missed = find_detectable_epsilon(audit, limit, SURE)
    return Ruling(
        *(*cell, rule.metric_with_part, limit, audit.epsilon, math.inf, verdict, reason),
        *(str(rule), audit.epsilon, audit.canaries),
        missed=missed,
    )


def _judge_epsilon_claim(cell: CellKey, rule: Rule, evidence: claims.ClaimEvidence) -> Ruling:
    """Judge a target's claim by its audits: contradicted, consistent, or undecidable."""
    claimed = evidence.claimed
    assert claimed is not None  # `_build_claim_case` checks it
    audit_notes = []
    most = math.nan
    high = math.nan
    n = 0
    for bound in evidence.bounds:
        most = max(bound.audit.epsilon, most)  # NaN only before the first
        high = math.inf  # no audit bounds epsilon from above
        n += bound.audit.canaries
        note = (
            f"{bound.cell.attack} ({bound.cell.setting}) {bound.audit.epsilon:.4f} of "
            f"{bound.audit.best:.4f} provable"
        )
        if bound.promised != claimed:
            note += f", against {bound.promised:.4g}"
        if bound.powerless_reason and bound.audit.best > bound.promised:
            note += f", but {bound.powerless_reason}"
        ceiling = describe_audit_ceiling(bound.audit, evidence.target.claim)
        if ceiling:
            note += f", and {ceiling}"
        mu = describe_shape_mu(bound.audit)
        if mu:
            note += f", and {mu}"
        audit_notes.append(note)
    for other in evidence.unheld:
        audit_notes.append(f"{other.cell.attack} ({other.cell.setting}) is {other.reason}")
    missing = () if evidence.bounds else evidence.unmeasured
    summary = "; ".join((*evidence.refuted, *audit_notes, *missing)) or "no audit was run"
    verdict: Verdict = "inconclusive"  # too weak to tell, or not audited
    missed = None
    if evidence.verdict == claims.CONTRADICTED:
        verdict = "failed"
    elif evidence.verdict == claims.CONSISTENT:
        verdict = "held"
        if strongest := evidence.most_sensitive_bound:
            missed = find_detectable_epsilon(strongest.audit, strongest.promised, SURE)
            summary += f"; {describe_detection_power(strongest.audit, strongest.promised, SURE)}"
    reason = f"claimed epsilon {claimed:.4g}: {evidence.verdict or 'not audited'} ({summary})"
    return Ruling(
        *(*cell, rule.metric_with_part, claimed, most, high, verdict, reason, str(rule), most, n),
        unmeasured=evidence.verdict is None,
        missed=missed,
    )


def compute_rule_bounds(measurement: Measurement) -> BoundedNumber:
    """Return one-sided bounds: exact for counts, otherwise from the recorded two-sided 95%
    interval.
    """
    if (
        find_metric(measurement.name).exact and measurement.unit != "probability"
    ):  # a mean of parts is not a count
        return bound_binomial_share(measurement.hits, measurement.n)
    recorded = bound_recorded_interval(measurement)
    # an AUC below one half separates members equally well, in the other direction
    if measurement.unit == AUC:
        return bound_auc_either_way(recorded)
    return recorded
