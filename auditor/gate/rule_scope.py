"""Find the findings of a run that a rule applies to."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Sequence
from dataclasses import replace

from auditor.conclusions.disagreements import has_unlike_nonmembers
from auditor.core.errors import AuditError, refuse_unknown_names
from auditor.core.nouns import UNDEFENDED, CellKey
from auditor.core.plan_parts import name_deployed_form
from auditor.core.result import AuditResult, Finding
from auditor.gate.policy import NO_WORSE, Rule
from auditor.statistics.metrics import ADJUSTED_AUC, RECALL, SHARES, name_auc
from auditor.statistics.roc import AUC


def check_rule_scope_names_exist(scope: Sequence[str | None], rows: Collection[CellKey]) -> None:
    for i, (kind, name) in enumerate(zip(("target", "setting", "attack"), scope, strict=True)):
        if name is not None:
            refuse_unknown_names(kind, [name], [row[i] for row in rows])


def list_judged_targets(result: AuditResult, rule: Rule) -> list[str]:
    """Return the names of the targets that a rule covers if the rule itself names no target.

    These are all defenses and deployed forms, plus the undefended model if no defense was audited.
    A deployed form is another copy of the model, such as a quantised copy.
    """
    defenses = result.plan.get("defense", ())
    forms = [*map(name_deployed_form, result.plan.get("forms", ()))]
    if rule.of_forms:
        return forms or [""]
    # a rule against the undefended model covers only the forms, not that model itself
    if not defenses and not (forms and rule.against_undefended):
        full = [UNDEFENDED]
    else:
        full = []
    return [*dict.fromkeys((*full, *defenses, *forms))]


def choose_baseline_rules(
    result: AuditResult, base: AuditResult, scope: Sequence[str | None] = (None, None, None)
) -> tuple[Rule, ...]:
    """Return the rules for a baseline if the user gives none: recall may be 0.02 worse.

    If neither run has recall, the rules are about the main share or AUC of each attack that both
    runs measured. Raise AuditError if there is none.

    Args:
        result: result of the run.
        base: result of the baseline.
        scope: names of the judged target, setting and attack; None for any.
    """
    check_rule_scope_names_exist(scope, [finding.cell_key for finding in result.findings])
    sides = [side.select_findings(*scope) for side in (result, base)]
    for finding in (*sides[0], *sides[1]):
        if finding.measurement(RECALL):
            return (NO_WORSE,)
    names, base_names = map(_list_main_metrics, sides)
    rules = [replace(NO_WORSE, metric=name) for name in names if name in base_names]
    if not rules:
        raise AuditError(
            "expected --max-increase METRIC=MARGIN with this baseline: the two runs have neither "
            "recall nor another main share or AUC in common"
        )
    return tuple(rules)


def _list_main_metrics(findings: Sequence[Finding]) -> list[str]:
    """Return the distinct names of the findings' main numbers that are shares or AUCs."""
    names = []
    for finding in findings:
        if finding.main is not None and finding.main.unit in (*SHARES, AUC):
            names.append(finding.main.name)
    return [*dict.fromkeys(names)]


def pair_rule_rows(
    rule: Rule, rows: list[Finding], result: AuditResult
) -> list[tuple[Finding, Rule]]:
    """Return each finding that a rule applies to, paired with the rule.

    These are the findings of attacks that measure the metric, or all findings if no attack measures
    it. A rule on deployed forms names no metric, so each finding gets a copy of the rule with its
    main metric.

    Args:
        rule: the rule.
        rows: findings of the judged target, setting and attack.
        result: result of the run, which says which attacks measure the metric.
    """
    if not rule.of_forms:
        measuring = set()
        for finding in result.findings:
            if finding.measurement(rule.metric):
                measuring.add(finding.attack)
        pairs = [(row, rule) for row in rows]
        return [pair for pair in pairs if pair[0].attack in measuring] or pairs
    pairs = []
    for row in rows:
        for name in _list_main_metrics([row]):
            pairs.append((row, replace(rule, metric=name)))
    return pairs


def select_strongest_group(finding: Finding, rule: Rule) -> Rule:
    """Narrow a limit on the membership AUC to the members that are easiest to identify.

    Members are grouped by number of copies. If the lower bound of some group's AUC is above chance
    and above the lower bound for all members, the limit becomes a limit on the group with the
    highest bound. If members and non-members differ in kind, the limit becomes a limit on the
    adjusted AUC. All other rules are returned unchanged.
    """
    overall = finding.measurement(rule.metric)
    if (
        rule.metric != name_auc("")
        or rule.is_paired_difference
        or rule.count is not None
        or overall is None
    ):
        return rule
    if has_unlike_nonmembers(finding) and finding.measurement(ADJUSTED_AUC) is not None:
        return replace(rule, metric=ADJUSTED_AUC)
    group_aucs = {}
    for count, m in finding.by_repeats.items():
        if count.isdecimal():
            group_aucs[count] = max(m.low, 1 - m.high)
    best = max(group_aucs, key=group_aucs.__getitem__, default="")
    if (
        not finding.scores_tried
        or not best
        or group_aucs[best] <= max(0.5, overall.low, 1 - overall.high)
    ):
        return rule
    return replace(rule, count=int(best))


def suggest_rule_metrics(metric: str, known: Sequence[str]) -> str:
    """Return text that suggests metrics for an unknown name.

    The text lists the main metric and similar names, and counts the other names.

    Args:
        metric: the unknown name.
        known: names of metrics, the main metric first.
    """
    suggestions = dict.fromkeys((*known[:1], *difflib.get_close_matches(metric, known, n=2)))
    others = ""
    if len(known) > len(suggestions):
        others = f" and {len(known) - len(suggestions)} others"
    return f"; it has {', '.join(suggestions) or 'none'}{others}"
