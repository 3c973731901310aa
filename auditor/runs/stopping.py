"""Implement `--until`: query secrets in random order, and stop once the result is conclusive.

The result is tested at fixed numbers of secrets, called looks. The order depends only on the seed,
so batches, workers and resuming do not change the result.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from auditor.conclusions.outcomes import (
    RunOutcomes,
    ValuesBySecret,
    compare_paired_metric,
)
from auditor.core.errors import AuditError
from auditor.core.nouns import UNDEFENDED, CellKey, Query, Secret
from auditor.core.plan_parts import DECIDED, AttackPlan
from auditor.core.result import Finding, StoppedEarly
from auditor.core.secret_randomness import make_keyed_generator
from auditor.core.secret_table import SecretTable
from auditor.gate.policy import NOTHING, Policy, Required, Rule
from auditor.plugins.attack import Attack, CorpusAttack
from auditor.plugins.probe import Probe
from auditor.runs.selection import PluginSelection
from auditor.statistics.anytime import yield_look_sizes
from auditor.statistics.audited import METRICS as BOUNDS
from auditor.statistics.bounds import LEVEL, BoundedNumber
from auditor.statistics.metrics import (
    METRICS,
    RECALL,
    find_metric,
    name_excess_metric,
    name_nonmember_metric,
)

Item = TypeVar("Item", Query, Secret)
Ask = Callable[[Sequence[Item]], None]
# values of secrets already queried
Seen = Callable[[Sequence[Item]], ValuesBySecret]


@dataclass(frozen=True)
class StoppingRule:
    """Rule that decides when an attack or probe may stop querying a target.

    Args:
        width: (metric, half-width). The queries stop once the metric's interval is this narrow.
            None if gate rules decide.
        rules: gate rules that must be decided before queries stop.
        level: error probability of a decision that a rule failed. A decision that a rule passed has
            the gate's own error probability.
        base: results per secret of the baseline run; None if there is none.
        require: minimum numbers of secrets to query before any stop.
    """

    width: tuple[str, float] | None = None
    rules: tuple[Rule, ...] = ()
    level: float = LEVEL
    base: ValuesBySecret | None = None
    require: Required = NOTHING

    def explain_stop(self, row: ValuesBySecret) -> str:
        """Return why the queries can stop; "" if more secrets are needed.

        Args:
            row: results of the secrets queried so far.
        """
        members = int(row.member.sum())
        if members < self.require.secrets or len(row.ids) - members < self.require.nonmembers:
            return ""
        if self.width is not None:
            metric, width = self.width
            # Intervals by betting, which are valid at every look (Waudby-Smith and Ramdas, arXiv
            # 2010.09686).
            m = replace(row, anytime=True).remeasure_metric(metric)
            if m is not None and max(m.value - m.low, m.high - m.value) <= width:
                return f"until {metric} ± {100 * width:g}%"
            return ""
        verdicts = [self._format_rule_verdict(rule, row) for rule in self.rules]
        if all(verdicts):
            return "; ".join(f"until '{r}' {v}" for r, v in zip(self.rules, verdicts, strict=True))
        return ""

    def _format_rule_verdict(self, rule: Rule, row: ValuesBySecret) -> str:
        """Return the gate's verdict on the rule, `failed` or `was held`; "" if undecided so far.

        Args:
            row: results of the secrets queried so far.
        """
        if rule.against_undefended:
            return ""  # the undefended target stops at a different look
        evidence: BoundedNumber | str | None
        if not rule.against_baseline:
            evidence = row.build_anytime_evidence(rule.metric, rule.count, rule.kind)
        elif self.base is None:
            return ""
        else:
            evidence = compare_paired_metric(rule.metric, rule.count, row, self.base)
        if evidence is None or isinstance(evidence, str):
            return ""
        # As in the gate: one wrong rule is a false alarm, so the level is divided for failures. A
        # false pass needs errors in all rules (Berger 1982), so each has the full level.
        if evidence.low(self.level) > rule.limit:
            return "failed"
        if evidence.high(LEVEL) <= rule.limit:
            return "was held"
        return ""

    def ask_randomly(
        self, items: Sequence[Item], seed: int, ask: Ask[Item], build_results: Seen[Item]
    ) -> tuple[StoppedEarly, set[str]]:
        """Query items in random order until the queries can stop.

        Args:
            items: all items that may be queried.
            seed: seed of the order.
            ask: function that queries some items.
            build_results: function from queried items to their results.

        Returns:
            How many items were queried, and why the queries stopped.
            The ids of the queried items.
        """
        # Each item draws its rank: the order of two items does not depend on the rest.
        order = sorted(
            items,
            key=lambda item: make_keyed_generator(seed, "order of asking", item.id).random(),
        )
        n_before = 0
        reason = ""
        for n_asked in yield_look_sizes(len(order)):
            ask(order[n_before:n_asked])
            n_before = n_asked
            if reason := self.explain_stop(replace(build_results(order[:n_asked]), anytime=True)):
                break
        return StoppedEarly(n_before, len(order), reason or "all that there are"), {
            item.id for item in order[:n_before]
        }


def refuse_dependent_secrets(secrets: SecretTable) -> None:
    """Raise AuditError if secrets share a record or a person: betting needs independent secrets."""
    for column, group in (("document", "records"), ("user", "people")):
        origins = [origin for origin in secrets.list_values(column) if origin is not None]
        if len(set(origins)) < len(origins):
            raise AuditError(
                "expected independent secrets with --until, whose intervals are too narrow for "
                f"others, got {len(origins):,} of {len(set(origins)):,} {group}"
            )


def bound_stopped_finding(finding: Finding, row: ValuesBySecret, stopped: StoppedEarly) -> Finding:
    """Replace the finding's intervals, because the queries stopped early.

    The old intervals are valid only for a fixed sample size. The new intervals are valid even if
    the results are tested repeatedly during the queries. Measurements without such an interval are
    dropped.

    Args:
        finding: the finding.
        row: results of the queried secrets.
        stopped: how many secrets were queried, and why the queries stopped.
    """

    measurements = []
    for m in finding.measurements:
        measurements.append(row.remeasure_metric(m.name))
    by_repeats = {}
    for count, m in finding.by_repeats.items():
        if bounded := row.remeasure_metric(m.name, int(count)):
            by_repeats[count] = bounded
    note = (
        f"{stopped.early_stop_sentence}: intervals hold at every look (betting); numbers without "
        "one are left out"
    )
    return replace(
        finding,
        measurements=tuple(filter(None, measurements)),
        by_repeats=by_repeats,
        by_kind=row.remeasure_kinds(RECALL, finding.by_kind),
        by_kind_nonmembers=row.remeasure_kinds(
            name_nonmember_metric(RECALL), finding.by_kind_nonmembers
        ),
        notes=(*finding.notes, note),
        stopped=stopped,
    )


def digest_run_stopping_rules(stops: Mapping[CellKey, StoppingRule]) -> str:
    """Return a hash of the rules by which `--until` ends queries early; "" without rules."""
    digest = hashlib.sha256()
    for row, stop in stops.items():
        # `repr` of a float is exact.
        digest.update(repr((row, stop.width, stop.rules, stop.level, stop.require)).encode())
        if stop.base is not None:
            ids = tuple(stop.base.ids)
            for name, values in stop.base.values.items():
                digest.update(repr((name, ids, values.tolist())).encode())
    return digest.hexdigest() if stops else ""


# --- rules of each attack ---


def build_run_stopping_rules(
    plan: AttackPlan, selection: PluginSelection, policy: Policy | None, base: RunOutcomes | None
) -> dict[CellKey, StoppingRule]:
    """Return the stopping rule of each cell (target, setting, attack or probe) that may stop early.

    Raise AuditError if no cell could satisfy --until.

    Args:
        plan: the plan's fields about attacks, with `--until`.
        selection: plug-ins of the run.
        policy: gate policy of `--until decided`; None without it.
        base: baseline run of the policy; None if there is none.
    """
    if plan.until is None:
        return {}
    if (width := plan.until_metric_and_half_width) is not None:
        for method in selection.methods:
            if not _is_stopping_metric(method, width[0]):
                names = ", ".join(_list_mean_metrics(method)) or "no share of secrets"
                raise AuditError(
                    f"expected --until on a number of {method.name}, got {width[0]}: it measures "
                    f"{names}"
                )
        return dict.fromkeys(selection.list_cell_keys(), StoppingRule(width))
    if policy is None:
        raise AuditError(f"--until {DECIDED} stops by the rules of a gate: give --gate POLICY")
    # All decisions share the level, even those on rules that stop no queries, because the gate
    # decides these too.
    n_decisions = 0
    scoped: dict[CellKey, list[Rule]] = {}
    for rule in policy.rules:
        for cell in selection.list_cell_keys():
            if _does_rule_apply(rule, cell, selection) and _may_decide_rule(rule, cell, selection):
                n_decisions += 1
                # Rules on an epsilon bound or a membership rate stop no queries.
                is_bound = rule.of_claim or rule.metric in BOUNDS.values()
                if not is_bound and not find_metric(rule.metric).scores:
                    scoped.setdefault(cell, []).append(rule)
    rules_by_cell = dict[CellKey, StoppingRule]()
    for cell, rules in scoped.items():
        method = selection.methods_by_name[cell.attack]
        if all(_is_stopping_metric(method, rule.metric) for rule in rules):
            base_row = base.outcomes.get(cell) if base else None
            level = LEVEL / n_decisions
            rules_by_cell[cell] = StoppingRule(None, tuple(rules), level, base_row, policy.require)
    if not rules_by_cell:
        rule_names = ", ".join(f"'{rule}'" for rule in policy.rules)
        raise AuditError(
            f"expected --until {DECIDED} with a rule on a share of secrets, such as recall <= "
            f"0.05, got {rule_names}"
        )
    return rules_by_cell


def _does_rule_apply(rule: Rule, cell: CellKey, selection: PluginSelection) -> bool:
    """Test if the gate applies the rule to this cell (target, setting, attack or probe).

    The gate applies a rule to a control only if the rule names the control.
    """
    defended = [item.name for item in selection.rows if not item.companion] or [UNDEFENDED]
    targets = [rule.target] if rule.target else defended
    return (
        cell.target in targets
        and rule.setting in (None, cell.setting)
        and rule.attack in (None, cell.attack)
    )


def _list_mean_metrics(method: Attack | Probe) -> tuple[str, ...]:
    """Return those metrics of an attack or probe that are means over secrets."""
    if isinstance(method, Probe):
        return method.means
    if isinstance(method, CorpusAttack):
        return ()
    return tuple(m.name for m in METRICS if m.per_secret and m.values)


def _is_stopping_metric(method: Attack | Probe, metric: str) -> bool:
    """Test if this metric can decide when the queries of this attack or probe stop."""
    for name in _list_mean_metrics(method):
        if metric in (name, name_nonmember_metric(name), name_excess_metric(name)):
            return True
    return False


def _may_decide_rule(rule: Rule, cell: CellKey, selection: PluginSelection) -> bool:
    """Test if the results of this cell (target, setting, attack or probe) can break or keep a rule.

    They can if the cell's attack measures the rule's metric, or if no attack of the run does.
    """
    names = {m.name for m in selection.methods if _is_stopping_metric(m, rule.metric)}
    return not names or cell.attack in names
