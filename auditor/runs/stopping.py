"""`--until`: secrets are asked in random order, and a configuration stops at the look that says
enough of it.

Looks are at fixed counts of secrets and the order is the seed's, so nothing depends on batches,
workers or resuming.
Knows what is kept of each secret; neither models nor how secrets are asked.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from auditor.conclusions.outcomes import (
    RowValuesBySecret,
    RunOutcomes,
    paired_row_difference_or_reason,
)
from auditor.core.errors import AuditError
from auditor.core.nouns import UNDEFENDED, CellKey, Query, Secret
from auditor.core.plan_parts import DECIDED, AttackPlan
from auditor.core.result import Finding, Measurement, StoppedEarly
from auditor.core.secret_randomness import keyed_random_generator
from auditor.gate.policy import NOTHING, Policy, Required, Rule
from auditor.plugins.attack import Attack, CorpusAttack
from auditor.plugins.probe import Probe
from auditor.runs.selection import PluginSelection
from auditor.statistics.anytime import yield_look_sizes
from auditor.statistics.audited import METRICS as BOUNDS
from auditor.statistics.bounds import LEVEL
from auditor.statistics.metrics import (
    METRICS,
    find_metric,
    name_excess_metric,
    name_nonmember_metric,
)

Item = TypeVar("Item", Query, Secret)
Ask = Callable[[Sequence[Item]], None]
# what was found of these, which all were asked
Seen = Callable[[Sequence[Item]], RowValuesBySecret]


@dataclass(frozen=True)
class StoppingRule:
    """When a row has been asked enough.

    rules: to be decided, as held at the gate's level, as failed at `level`, which all decisions
    share; base: the same row of the baseline. require: how many must be asked whatever the rules
    say.
    """

    width: tuple[str, float] | None = None
    rules: tuple[Rule, ...] = ()
    level: float = LEVEL
    base: RowValuesBySecret | None = None
    require: Required = NOTHING

    def reason_to_stop(self, row: RowValuesBySecret) -> str:
        """Why no more secrets need be asked; "" where more must."""
        members = int(row.member.sum())
        if members < self.require.secrets or len(row.ids) - members < self.require.nonmembers:
            return ""
        if self.width is not None:
            metric, width = self.width
            # Intervals by betting, which hold at every look (Waudby-Smith and Ramdas, arXiv
            # 2010.09686).
            seen = replace(row, anytime=True).remeasure_metric(metric)
            narrow = (
                seen is not None and max(seen.value - seen.low, seen.high - seen.value) <= width
            )
            return f"until {metric} ± {100 * width:g}%" if narrow else ""
        verdicts = [self._verdict_phrase_of_gate_rule(rule, row) for rule in self.rules]
        return (
            "; ".join(f"until '{r}' {v}" for r, v in zip(self.rules, verdicts, strict=True))
            if all(verdicts)
            else ""
        )

    def _verdict_phrase_of_gate_rule(self, rule: Rule, row: RowValuesBySecret) -> str:
        """`failed` or `was held`, as the gate will decide it; "" while that is open."""
        seen = row.anytime_valid_evidence(rule.metric, rule.count, rule.kind)
        if rule.against_undefended:
            return ""  # the other row stops elsewhere
        if rule.against_baseline:
            paired = (
                ""
                if self.base is None
                else paired_row_difference_or_reason(rule.metric, rule.count, row, self.base)
            )
            if isinstance(paired, str):
                return ""
            # As in the gate: a false alarm takes one rule that errs, so its level is divided; a
            # false pass takes all of them (Berger 1982), each at the full level.
            failed, held = paired.low(self.level) > rule.limit, paired.high(LEVEL) <= rule.limit
        elif seen is None:
            return ""
        else:
            failed, held = seen.low(self.level) > rule.limit, seen.high(LEVEL) <= rule.limit
        return "failed" if failed else "was held" if held else ""

    def ask_in_random_order(
        self, items: Sequence[Item], seed: int, ask: Ask[Item], seen: Seen[Item]
    ) -> tuple[StoppedEarly, set[str]]:
        """Asks as many as it takes, in random order; returns how many and which."""
        # Each item draws its own place: the order of two does not depend on which others are asked.
        turn = sorted(
            items,
            key=lambda item: keyed_random_generator(seed, "order of asking", item.id).random(),
        )
        before, why = 0, ""
        for at in yield_look_sizes(len(turn)):
            ask(turn[before:at])
            before = at
            if why := self.reason_to_stop(replace(seen(turn[:at]), anytime=True)):
                break
        return StoppedEarly(before, len(turn), why or "all that there are"), {
            item.id for item in turn[:before]
        }


def stopped_finding_with_betting_bounds(
    finding: Finding, row: RowValuesBySecret, stopped: StoppedEarly
) -> Finding:
    """The finding with bounds that hold at every look in place of intervals of a fixed size;
    without what has none."""

    def again(
        m: Measurement, count: int | None = None, kind: str | None = None
    ) -> Measurement | None:
        return row.remeasure_metric(m.name, count, kind)

    def each(kinds: Mapping[str, Measurement]) -> dict[str, Measurement]:
        return {kind: found for kind, m in kinds.items() if (found := again(m, kind=kind))}

    note = (
        f"{stopped.early_stop_sentence}: intervals hold at every look (betting), and what has "
        "none is left out"
    )
    return replace(
        finding,
        measurements=tuple(found for m in finding.measurements if (found := again(m))),
        by_repeats={n: found for n, m in finding.by_repeats.items() if (found := again(m, int(n)))},
        by_kind=each(finding.by_kind),
        by_kind_nonmembers=each(finding.by_kind_nonmembers),
        notes=(*finding.notes, note),
        stopped=stopped,
    )


def digest_of_stopping_rules(stops: Mapping[CellKey, StoppingRule]) -> str:
    """Equal where rows stop by the same; "": none does."""
    told = hashlib.sha256()
    for row, stop in stops.items():
        # `repr` of a float is exact.
        told.update(repr((row, stop.width, stop.rules, stop.level, stop.require)).encode())
        for name, values in () if stop.base is None else stop.base.values.items():
            told.update(repr((name, stop.base and stop.base.ids, values.tolist())).encode())
    return told.hexdigest() if stops else ""


# --- which rows stop, and when
# -----------------------------------------------------------------------------------------------


def stopping_rules_by_row(
    asked: AttackPlan, selection: PluginSelection, policy: Policy | None, base: RunOutcomes | None
) -> dict[CellKey, StoppingRule]:
    """The rule of each row that `--until` may stop. Raises AuditError for an --until that no row
    could keep."""
    if asked.until is None:
        return {}
    if (width := asked.until_metric_and_half_width) is not None:
        for method in selection.methods:
            if not _can_stop_by_metric(method, width[0]):
                own = ", ".join(_per_secret_mean_metric_names(method)) or "no share of secrets"
                raise AuditError(
                    f"expected --until on a number of {method.name}, got {width[0]}: it measures "
                    f"{own}"
                )
        return dict.fromkeys(selection.cell_keys_in_order(), StoppingRule(width))
    if policy is None:
        raise AuditError(f"--until {DECIDED} goes by the rules of --gate POLICY, got none")
    scoped = [
        (rule, row)
        for rule in policy.rules
        for row in selection.cell_keys_in_order()
        if _is_row_held_to_rule(rule, row, selection)
    ]
    scoped = [(rule, row) for rule, row in scoped if _can_decide_rule_on_row(rule, row, selection)]
    # Shared by all decisions, those of rules without a row that stops among them: the gate makes
    # these too.
    level, found = LEVEL / max(1, len(scoped)), dict[CellKey, StoppingRule]()
    scoped = [(rule, row) for rule, row in scoped if not _is_rule_without_stopping_row(rule)]
    for row in dict.fromkeys(row for _, row in scoped):
        rules = tuple(rule for rule, other in scoped if other == row)
        if all(
            _can_stop_by_metric(selection.methods_by_name[row.attack], rule.metric)
            for rule in rules
        ):
            held = None if base is None else base.outcomes.get(row)
            found[row] = StoppingRule(None, rules, level, held, policy.require)
    if not found:
        given = ", ".join(f"'{rule}'" for rule in policy.rules)
        raise AuditError(
            f"expected --until {DECIDED} with a rule on a share of secrets, as recall <= 0.05, got "
            f"{given}"
        )
    return found


def _is_row_held_to_rule(rule: Rule, row: CellKey, selection: PluginSelection) -> bool:
    """Whether the gate holds the row to the rule: companions only by name."""
    defended = [shown.name for shown in selection.rows if not shown.companion] or [UNDEFENDED]
    targets = [rule.target] if rule.target else defended
    return (
        row.target in targets
        and rule.setting in (None, row.setting)
        and rule.attack in (None, row.attack)
    )


def _per_secret_mean_metric_names(method: Attack | Probe) -> tuple[str, ...]:
    """What the method measures that is a mean over secrets, of numbers that each secret alone
    decides."""
    if isinstance(method, Probe):
        return method.means
    return (
        ()
        if isinstance(method, CorpusAttack)
        else tuple(m.name for m in METRICS if m.per_secret and m.values)
    )


def _can_stop_by_metric(method: Attack | Probe, metric: str) -> bool:
    """Whether its rows can be stopped by this number."""
    own = _per_secret_mean_metric_names(method)
    return metric in own or any(
        metric in (name_nonmember_metric(one), name_excess_metric(one)) for one in own
    )


def _is_rule_without_stopping_row(rule: Rule) -> bool:
    """Whether the rule is on a number by which no row can stop: a bound of epsilon, a rate of
    membership."""
    return rule.of_claim or rule.metric in BOUNDS.values() or bool(find_metric(rule.metric).scores)


def _can_decide_rule_on_row(rule: Rule, row: CellKey, selection: PluginSelection) -> bool:
    """Whether the gate may decide the rule on this row: it does not where another attack has the
    number."""
    own, every = selection.methods_by_name[row.attack], selection.methods
    return _can_stop_by_metric(own, rule.metric) or not any(
        _can_stop_by_metric(one, rule.metric) for one in every
    )
