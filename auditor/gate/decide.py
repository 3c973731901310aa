"""Decides rules on a finished run, alone or against a baseline: held, failed or inconclusive. Works
from the records.

A rule is held where the upper bound is within its limit, failed where the lower bound is beyond it.
A gate passes only if all rules do, so an upper bound of 95% each keeps a false pass to 5% (an
intersection-union test); it fails if any rule does, so lower bounds are corrected for the number of
decisions (Holm), which keeps a false alarm to 5% too.

A lower bound of epsilon has no upper one: no audit shows that epsilon is small. It is held where it
is within a limit that it could have been beyond (`statistics.audited.explain_powerless_audit`), and
inconclusive where it could not have been.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from auditor.conclusions import claims, outcomes
from auditor.conclusions.outcomes import RowValuesBySecret, RunOutcomes
from auditor.conclusions.signals import assess_signals
from auditor.core.errors import AuditError, unknown_name_error
from auditor.core.nouns import UNDEFENDED, CellKey
from auditor.core.result import Audited, AuditResult, Finding, Measurement
from auditor.gate import attest, objections, required_coverage
from auditor.gate.comparability import check_comparable
from auditor.gate.contradictions import find_result_contradictions
from auditor.gate.policy import Policy, Rule, check_share_limit
from auditor.gate.rule_scope import (
    check_rule_scope_names_exist,
    list_judged_targets,
    pair_rows_with_rules,
    select_findings,
    select_strongest_group,
    suggest_metrics,
)
from auditor.gate.rulings import Decision, Ruling, Verdict, make_ruling
from auditor.statistics.audit_power import SURE, describe_detection_power, find_detectable_epsilon
from auditor.statistics.audited import METRICS as BOUNDS
from auditor.statistics.audited import explain_powerless_audit, repeat_audit
from auditor.statistics.bounds import (
    LEVEL,
    AucEitherDirection,
    BinomialCount,
    BoundedNumber,
    RecordedInterval,
)
from auditor.statistics.holm import adjust_test_level
from auditor.statistics.metrics import (
    METRICS,
    RECALL,
    SHARES,
    auc_name,
    find_metric,
    is_builtin_metric,
)
from auditor.statistics.roc import AUC


def read_run(folder: Path) -> RunOutcomes:
    """A run folder. Raises AuditError where it holds no finished run."""
    from auditor.records import attacked_secrets, manifest, result_file

    result, kept = result_file.read_result(folder), outcomes.read_row_values_by_secret(folder)
    for row in (
        finding.cell_key
        for finding in result.findings
        if finding.stopped and finding.cell_key in kept
    ):
        # stopped when it looked right: only anytime-valid bounds hold
        kept[row] = replace(kept[row], anytime=True)
    listed, edits = (
        attacked_secrets.read_answered_secret_ids(folder),
        manifest.folder_edits_since_run_end(folder),
    )
    return RunOutcomes(str(folder), result, kept, listed, edits)


def apply_policy(
    run: RunOutcomes,
    policy: Policy,
    baseline: RunOutcomes | None = None,
    *,
    target: str | None = None,
    setting: str | None = None,
    attack: str | None = None,
    attested: Ruling | None = None,
) -> Decision:
    """All rules on one run. Raises AuditError for a baseline that is missing or cannot be compared,
    and for a metric that nobody has.

    A run that contradicts itself fails, whatever the rules; so does an attack that was asked for
    and applied to no row of a judged target, unless the policy says that it need not. attested:
    what `gate.attest` says of its attestation.
    """
    check_policy(policy, baseline)
    check_rule_metrics(
        policy.rules, {m.name for finding in run.result.findings for m in finding.measurements}
    )
    narrowed = {"target": target, "setting": setting, "attack": attack}
    for name, given in narrowed.items():
        if given == "":
            raise AuditError(f"expected the name of a {name} to judge, got an empty one")
    if baseline is not None:
        check_comparable(run, baseline, "baseline")
    contradicted = _judge_contradictions(run, "this run")
    rulings = [*_judge_edits(run, "this run", True), *contradicted]
    if baseline is not None:
        rulings += _judge_edits(baseline, "the baseline", False)
        rulings += _judge_contradictions(baseline, "the baseline")
    rulings += judge_rules(run.result, policy.rules, run.outcomes, baseline, **narrowed)
    if not contradicted:  # else its numbers may be such as no secrets make
        seen = assess_signals(run.result)
        rulings = [
            objections.downgrade_doubtful_ruling(run.result, seen, ruling) for ruling in rulings
        ]
    # "" is the whole run
    judged = dict.fromkeys(ruling.target for ruling in rulings if ruling.target)
    rulings += required_coverage.judge_required_attacks(run, policy.require, judged)
    if attested is not None or policy.require.attestation:
        missing = "attestation: the policy requires one: give --attestation FILE --key PUBLIC_KEY"
        rulings.append(attested or make_ruling(missing, attest.SIGNED))
    if not policy.allow_not_applicable:
        rulings += _judge_unapplied_attacks(run.result, judged, attack)
    told = tuple(objections.add_audited_share(run.result, ruling) for ruling in rulings)
    return Decision(run.name, baseline.name if baseline else "", told, policy.inconclusive)


def _judge_contradictions(run: RunOutcomes, what: str) -> list[Ruling]:
    found = find_result_contradictions(run.result, run.outcomes, run.listed)
    rule = f"{what} agrees with itself"
    return [
        make_ruling(f"the result contradicts itself: {why}", rule, row=row) for row, why in found
    ]


def _judge_edits(run: RunOutcomes, what: str, whole: bool) -> list[Ruling]:
    said = run.edits.edit_sentences(whole) if run.edits else ()
    rule = f"{what} is as it was when it ended"
    return [make_ruling(f"{run.name}: {why} since the run ended", rule) for why in said]


def _judge_unapplied_attacks(
    result: AuditResult, targets: Collection[str], attack: str | None
) -> list[Ruling]:
    """Of the judged targets, the attacks and probes that say nothing of it though they were to."""
    rulings = []
    for target in targets:
        for asked in dict.fromkeys(result.plan.get("attack", ())):
            rows = [f for f in result.findings if (f.target, f.attack) == (target, asked)]
            if rows and attack in (None, asked) and all(row.not_applicable for row in rows):
                why = (
                    f"asked for and never applied ({rows[-1].not_applicable}); "
                    "--allow-not-applicable lets it pass"
                )
                row = CellKey(target, "", asked)
                rulings.append(make_ruling(why, "every attack applies", row=row))
    return rulings


def check_policy(policy: Policy, baseline: RunOutcomes | None) -> None:
    """Raises AuditError for a policy without rules, or with one that needs a baseline where there
    is none."""
    if not policy.rules:
        raise AuditError(
            "expected at least one rule: --max metric=limit, --policy FILE or --baseline RUN, got "
            "none"
        )
    for rule in policy.rules:
        if rule.against_baseline and baseline is None:
            raise AuditError(f"the rule '{rule}' needs a baseline: give --baseline RUN")


def check_rule_metrics(rules: Sequence[Rule], measured: Collection[str] = ()) -> None:
    """Raises AuditError for a rule on what neither the table of metrics nor a row has: a name
    mistyped is no leak."""
    for rule in rules:
        if not is_builtin_metric(rule.metric) and rule.metric not in measured:
            raise unknown_name_error(
                "metric", rule.metric, {metric.name for metric in METRICS}.union(measured)
            )


def check_ruled_rows_exist(policy: Policy, rows: Collection[CellKey]) -> None:
    """Raises AuditError for a rule about a row that a run with these rows will not have."""
    for rule in policy.rules:
        scope = (rule.target, rule.setting, rule.attack)
        check_rule_scope_names_exist(scope, rows)
        if not any(
            all(wanted in (None, held) for wanted, held in zip(scope, row, strict=True))
            for row in rows
        ):
            asked = CellKey(*(part or "" for part in scope)).title
            raise AuditError(
                f"the rule '{rule}' is for {asked}, a configuration this run does not have"
            )


def judge_rules(
    result: AuditResult,
    rules: Sequence[Rule],
    own: Mapping[CellKey, RowValuesBySecret] | None = None,
    baseline: RunOutcomes | None = None,
    *,
    target: str | None = None,
    setting: str | None = None,
    attack: str | None = None,
) -> list[Ruling]:
    """A ruling for each rule and row: those of the defended targets (of the undefended one where
    there is no other).

    A rule is for the attacks and probes that measure its metric somewhere; where none does, it
    fails on every row. Companion rows such as the unmixed ensemble are judged only by name. An
    empty run, a missing metric or a NaN fails.
    own: what each row found out about each secret. Every number is recomputed from it; one that
    cannot be recomputed holds no limit. None: the result is believed. baseline: the run it is held
    against.
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
            rows = select_findings(result, {**scope, "target": name})
            if rule.of_claim:
                cases.append(
                    _build_claim_case(result, name, rule, scope["setting"], scope["attack"])
                )
                continue
            each = pair_rows_with_rules(rule, rows, result)
            cases += [_build_case(row, of_it, own, baseline) for row, of_it in each]
            counts = frozenset(
                one.count for one in rules if one.metric == RECALL and one.count is not None
            )
            cases = [replace(case, counts_with_a_rule=counts) for case in cases]
            if not each:  # another target's rows do not answer for this one
                row = CellKey(name, scope["setting"] or "", scope["attack"] or "")
                why = "no row was measured" if name else "this run has no forms: --forms names them"
                cases.append(_Case(row, rule, why))
    # a case without evidence fails at every level: it cannot err, and takes no share of Holm's
    tests = [
        partial(_is_rule_limit_exceeded_at_level, case)
        for case in cases
        if not isinstance(case.seen, str)
    ]
    level = adjust_test_level(tests, LEVEL)
    return [_judge_case(case, level) for case in cases]


@dataclass(frozen=True)
class _Number:
    """What a rule is decided on: the number with its bounds, and how to say it.

    derived: whether it was worked out of what is kept of each secret.
    """

    evidence: BoundedNumber
    words: str
    derived: bool = True


@dataclass(frozen=True)
class _Claimed:
    """A target's claim; `at(level)`: the audits that speak for or against it at this level."""

    at: Callable[[float], claims.ClaimEvidence]


@dataclass(frozen=True)
class _Case:
    """A rule on a row, and the evidence or why there is none. Audited: a lower bound of epsilon
    against a number."""

    row: CellKey
    rule: Rule
    seen: _Number | Audited | _Claimed | str
    finding: Finding | None = None  # of an absolute limit
    # numbers of copies whose records a rule of their own is for
    counts_with_a_rule: frozenset[int] = frozenset()


def _build_claim_case(
    result: AuditResult, name: str, rule: Rule, setting: str | None, attack: str | None
) -> _Case:
    """The rule on all audits of a target together: the error level is divided among them."""
    row = CellKey(name, setting or "", attack or "")
    target = next((target for target in result.targets if target.name == name), None)
    if target is None or not any(finding.target == name for finding in result.findings):
        return _Case(row, rule, "no row was measured")
    # a function of the level, which Holm finds only when all cases are known
    stands = partial(
        claims.weigh_claim_against_audits, result, target, setting=setting, attack=attack
    )
    if stands().claimed is None:
        said = target.nominal_epsilon
        nominal = "" if said is None else f" (its nominal epsilon {said:.4g} is none)"
        return _Case(row, rule, f"it claims no epsilon{nominal}: there is nothing to hold it to")
    return _Case(row, rule, _Claimed(stands))


def _build_case(
    finding: Finding,
    rule: Rule,
    own: Mapping[CellKey, RowValuesBySecret] | None,
    baseline: RunOutcomes | None,
) -> _Case:
    rule = select_strongest_group(finding, rule)
    measured, derived = _select_measurement(finding, rule, own)
    if isinstance(measured, str):
        return _Case(finding.cell_key, rule, measured)
    if rule.metric in BOUNDS.values() and not rule.is_paired_difference:
        return _Case(finding.cell_key, rule, _select_epsilon_audit(finding, rule.metric))
    if measured.unit in SHARES:
        check_share_limit(rule)
    if rule.is_paired_difference:
        return _Case(
            finding.cell_key, rule, _paired_difference(finding.cell_key, rule, own or {}, baseline)
        )
    kept = (own or {}).get(finding.cell_key)
    return _Case(
        finding.cell_key, rule, _build_limit_evidence(rule, measured, kept, derived), finding
    )


def _select_measurement(
    finding: Finding, rule: Rule, own: Mapping[CellKey, RowValuesBySecret] | None
) -> tuple[Measurement | str, bool]:
    """The rule's number in this row, or why it has none; and whether it is worked out of each
    secret."""
    count = None if rule.is_paired_difference else rule.count
    if rule.kind is not None:
        recorded = finding.by_kind.get(rule.kind)
        known = f" (kinds of personal data: {', '.join(finding.by_kind) or 'none'})"
    else:
        recorded = finding.measurement(rule.metric)
        known = suggest_metrics(rule.metric, [m.name for m in finding.measurements])
    if recorded is None:
        return (
            f"this row has no {rule.metric_with_part if rule.kind else rule.metric}{known}",
            False,
        )
    if not find_metric(rule.metric).bounded:
        return f"{rule.metric} has no interval, by which a limit could be held or broken", False
    kept = None if own is None else own.get(finding.cell_key)
    again = None if kept is None else kept.remeasure_metric(rule.metric, count, rule.kind)
    if count is not None:
        if not finding.by_repeats or (again is None and finding.main is not recorded):
            return f"this row has no {rule.metric} by repeat count", False
        if str(count) not in finding.by_repeats:
            return (
                f"this row has no {rule.metric_with_part} (repeat counts: "
                f"{', '.join(finding.by_repeats)})",
                False,
            )
        recorded = None if finding.main is not recorded else finding.by_repeats[str(count)]
    found = again or recorded
    if again is not None and recorded is not None and again.unit not in SHARES:
        # of what is no share the recorded interval may be wider, by more than the secrets show; it
        # never narrows
        found = replace(
            recorded,
            value=again.value,
            low=min(again.low, recorded.low),
            high=max(again.high, recorded.high),
        )
    if found is None or math.isnan(found.value) or found.n == 0:
        return f"{rule.metric_with_part} is not a number: nothing was measured", False
    # of queries and records, as claim_violations: no mean over secrets
    believed = found.unit == "count"
    return replace(found, name=rule.metric), again is not None or own is None or believed


def _select_epsilon_audit(finding: Finding, metric: str) -> Audited | str:
    for audit in finding.audits:
        if BOUNDS.get(audit.estimator) == metric:
            try:
                return repeat_audit(audit, LEVEL)
            except AuditError as why:
                return str(why)
    return f"this row has no counts behind its {metric}"


def _build_limit_evidence(
    rule: Rule, measured: Measurement, kept: RowValuesBySecret | None, derived: bool
) -> _Number:
    """The number with its bounds; of a TPR anew at each level: at a lower one its threshold takes
    more non-members."""
    seen: BoundedNumber | None = None
    if kept is not None and kept.anytime:
        # it stopped when it looked right: an interval of a size fixed beforehand would be too
        # narrow (formulas D2)
        seen = kept.anytime_valid_evidence(rule.metric, rule.count, rule.kind)
    seen = seen or outcomes.tpr_bounds_of_row(rule.metric, kept) or compute_rule_bounds(measured)
    other = "" if seen.value == measured.value else f" (the other way {seen.value:.4g})"
    if rule.metric == auc_name("") and measured.note:
        other = f" ({measured.note}){other}"
    return _Number(seen, f"{rule.metric_with_part} {measured.value:.4g}{other}", derived)


def _paired_difference(
    row: CellKey, rule: Rule, own: Mapping[CellKey, RowValuesBySecret], baseline: RunOutcomes | None
) -> _Number | str:
    if rule.against_undefended:
        if row.target == UNDEFENDED:
            return "it is the undefended model's own row: a form or a defense is held against it"
        mine, theirs, other = (
            own.get(row),
            own.get(row._replace(target=UNDEFENDED)),
            "the undefended model",
        )
        if mine is not None and theirs is not None and set(mine.ids) != set(theirs.ids):
            return f"this row and that of {other} are of other secrets"
    else:
        assert baseline is not None  # `apply_policy` has seen to it
        mine, theirs, other = own.get(row), baseline.outcomes.get(row), "the baseline"
    if mine is None or theirs is None:
        return f"{'this run' if mine is None else other} has no outcomes of this row to pair"
    found = outcomes.paired_row_difference_or_reason(rule.metric, rule.count, mine, theirs)
    if isinstance(found, str):
        return found
    return _Number(
        found, f"{rule.metric_with_part} minus {other}'s: {found.value:+.4g}, paired by secret,"
    )


def _is_rule_limit_exceeded_at_level(case: _Case, level: float) -> bool:
    match case.seen:
        case _Number(evidence):
            return evidence.low(level) > case.rule.limit
        case Audited():
            return repeat_audit(case.seen, level).epsilon > case.rule.limit
        case _Claimed(at):
            return at(level).verdict == claims.CONTRADICTED
    return False


def _judge_case(case: _Case, level: float) -> Ruling:
    limit, metric, words = case.rule.limit, case.rule.metric_with_part, str(case.rule)
    if isinstance(case.seen, str):
        return Ruling(*case.row, metric, limit, math.nan, math.nan, "failed", case.seen, words)
    if isinstance(case.seen, Audited):
        return _judge_epsilon_bound(case.row, case.rule, repeat_audit(case.seen, level))
    if isinstance(case.seen, _Claimed):
        return _judge_epsilon_claim(case.row, case.rule, case.seen.at(level))
    seen = case.seen.evidence
    # Holm's level is for lower bounds alone: a false pass needs every rule to err (Berger 1982), a
    # false alarm only one
    low, high = seen.low(level), seen.high(LEVEL)
    if math.isnan(low) or math.isnan(high):
        why = f"the result contradicts itself: {case.seen.words} with bounds that are no numbers"
        return Ruling(*case.row, metric, limit, low, high, "failed", why, words)
    verdict: Verdict = "held" if high <= limit else "failed" if low > limit else "inconclusive"
    allowed = "allowed" if case.rule.is_paired_difference else "limit"
    reason = (
        f"{case.seen.words} between {low:.4f} and {high:.4f} (n = {seen.n}), {allowed} {limit:g}"
    )
    # a number that nobody can recompute may fail a gate, but hold none: whoever edits one makes it
    # look better
    unmeasured = verdict == "held" and not case.seen.derived
    if unmeasured:
        verdict, reason = (
            "inconclusive",
            f"{reason}; it is not kept secret by secret, so it cannot be recomputed",
        )
    by_strata = _find_strata_objection(case) if verdict == "held" else ""
    if by_strata:
        verdict, reason = "inconclusive", f"{reason}; {by_strata}"
    missed = high if verdict == "held" else None
    if verdict == "held":
        reason = f"{reason}; a true {high:.4g} or more is missed at most once in twenty"
    return Ruling(
        *case.row,
        metric,
        limit,
        low,
        high,
        verdict,
        reason,
        words,
        seen.value,
        seen.n,
        unmeasured,
        missed,
    )


def _find_strata_objection(case: _Case) -> str:
    rule, finding = case.rule, case.finding
    if finding is None or rule.metric != RECALL or rule.count is not None or rule.kind is not None:
        return ""
    return objections.find_strata_objection(finding, rule.limit, case.counts_with_a_rule)


def _judge_epsilon_bound(row: CellKey, rule: Rule, audit: Audited) -> Ruling:
    """A lower bound of epsilon against a number: held only where the audit could have shown more
    than the number."""
    limit = rule.limit
    weak = explain_powerless_audit(audit, limit)
    verdict: Verdict = "failed" if audit.epsilon > limit else "inconclusive" if weak else "held"
    said = {"inconclusive": weak, "held": describe_detection_power(audit, limit, SURE)}.get(
        verdict, ""
    )
    reason = (
        f"{rule.metric_with_part} {audit.epsilon:.4f} (of {audit.best:.4f} provable by "
        f"{audit.canaries_or_games_label} at {1 - audit.level:.4g}), limit "
        f"{limit:g}" + (f": {said}" if said else "")
    )
    missed = find_detectable_epsilon(audit, limit, SURE) if verdict == "held" else None
    bound, high = audit.epsilon, math.inf
    return Ruling(
        *row,
        rule.metric_with_part,
        limit,
        bound,
        high,
        verdict,
        reason,
        str(rule),
        bound,
        audit.canaries,
        missed=missed,
    )


def _judge_epsilon_claim(row: CellKey, rule: Rule, stands: claims.ClaimEvidence) -> Ruling:
    """How the claim of a target stands: contradicted, consistent, or nobody can tell."""
    claimed, bounds = stands.claimed, stands.bounds
    assert claimed is not None  # `_build_claim_case` has seen to it
    seen = [
        f"{bound.row.attack} ({bound.row.setting}) {bound.audit.epsilon:.4f} of "
        f"{bound.audit.best:.4f} provable"
        + ("" if bound.promised == claimed else f", against {bound.promised:.4g}")
        + (
            f", but {bound.powerless_reason}"
            if bound.powerless_reason and bound.audit.best > bound.promised
            else ""
        )
        for bound in bounds
    ]
    seen += [f"{other.row.attack} ({other.row.setting}) is {other.why}" for other in stands.unheld]
    missing = () if bounds else stands.unmeasured
    said = "; ".join((*stands.refuted, *seen, *missing)) or "no audit was run"
    verdict: Verdict = "inconclusive"  # too weak to tell, or not audited
    if stands.verdict in (claims.CONTRADICTED, claims.CONSISTENT):
        verdict = "failed" if stands.verdict == claims.CONTRADICTED else "held"
    strongest, missed = stands.most_sensitive_bound if verdict == "held" else None, None
    if strongest is not None:
        missed = find_detectable_epsilon(strongest.audit, strongest.promised, SURE)
        said += f"; {describe_detection_power(strongest.audit, strongest.promised, SURE)}"
    reason = f"claimed epsilon {claimed:.4g}: {stands.verdict or 'not audited'} ({said})"
    most = max((bound.audit.epsilon for bound in bounds), default=math.nan)
    n = sum(bound.audit.canaries for bound in bounds)
    high = math.inf if bounds else math.nan  # no audit bounds epsilon from above
    return Ruling(
        *(*row, rule.metric_with_part, claimed, most, high, verdict, reason, str(rule), most, n),
        unmeasured=stands.verdict is None,
        missed=missed,
    )


def compute_rule_bounds(measurement: Measurement) -> BoundedNumber:
    """One-sided bounds: exact for counts; for others from the two-sided 95% interval that is on
    record."""
    if (
        find_metric(measurement.name).exact and measurement.unit != "probability"
    ):  # a mean of parts is no count
        return BinomialCount(round(measurement.value * measurement.n), measurement.n)
    seen = RecordedInterval(measurement.value, measurement.low, measurement.high, measurement.n)
    # an AUC below one half tells members from others as well, the other way round
    return AucEitherDirection(seen) if measurement.unit == AUC else seen
