"""Whether a result agrees with itself and with what each row found out about each secret. Knows
records; no rules.

A gate decides on a few numbers of a file that anybody could have edited or half written; what is
recorded twice must be the same twice.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import get_args

import numpy as np

from auditor.conclusions.outcomes import RowValuesBySecret
from auditor.core.counts import counted
from auditor.core.errors import AuditError
from auditor.core.jsonable import to_json
from auditor.core.nouns import UNDEFENDED, CellKey, Claim, SettingName
from auditor.core.plan import FIELDS
from auditor.core.plan_parts import deployed_form_name
from auditor.core.result import AuditResult, Finding, Measurement
from auditor.gate.rulings import WHOLE_RUN
from auditor.records.attacked_secrets import (
    NOT_KEPT,
    PLAN,
    SECRETS,
    AnsweredSecretIds,
    Answers,
    SecretFacts,
)
from auditor.records.journal import GUESSES, OBSERVATIONS
from auditor.records.table import TABLE as _WHERE
from auditor.statistics.audited import METRICS, repeat_audit
from auditor.statistics.metrics import SHARES, find_metric
from auditor.statistics.recomputed import compute_mean, recompute_metric

_ROUNDING = 1e-9  # relative and absolute: sums in another order
_SOLVED = 1e-6  # of a bound that was found by bisection


def find_result_contradictions(
    result: AuditResult,
    outcomes: Mapping[CellKey, RowValuesBySecret],
    listed: AnsweredSecretIds = NOT_KEPT,
) -> Iterator[tuple[CellKey, str]]:
    """(row, why) of everything in the result that cannot be true; nothing where all of it can."""
    yield from _check_planned_rows(result)
    yield from _check_planned_secrets(result, outcomes, listed)
    claims = {target.name: target.claim for target in result.targets}
    for row in outcomes.keys() - {finding.cell_key for finding in result.findings}:
        yield row, f"{_WHERE} holds the row, and the result does not"
    for row, count in Counter(finding.cell_key for finding in result.findings).items():
        if count > 1:
            yield row, f"the row stands there {count} times"
    for finding in result.findings:
        for name, count in Counter(m.name for m in finding.measurements).items():
            if count > 1:
                yield finding.cell_key, f"{name} stands there {count} times"
        for name, measured in _list_checked_measurements(finding):
            if why := explain_impossible_measurement(measured):
                yield finding.cell_key, f"{name} is {why}"
        found = [
            *_check_epsilon_bounds(finding),
            *_check_claim_games(finding, claims.get(finding.target)),
        ]
        if (kept := outcomes.get(finding.cell_key)) is not None:
            found += _check_outcomes(finding, kept)
        elif any(m.n for _, m in _list_checked_measurements(finding)):
            found.append(f"it has numbers, and {_WHERE} does not hold what they are of")
        yield from ((finding.cell_key, why) for why in found)


def _check_planned_rows(result: AuditResult) -> Iterator[tuple[CellKey, str]]:
    """Rows that the plan asks for and the result does not have. A control has those of the widest
    access."""
    plan, there = result.plan, {finding.cell_key for finding in result.findings}
    asked = dict.fromkeys(
        (UNDEFENDED, *plan.get("defense", ()), *map(deployed_form_name, plan.get("forms", ())))
    )
    settings = [
        name for name in get_args(SettingName) if plan.get("setting", "both") in (name, "both")
    ]
    for name in dict.fromkeys((*asked, *(target.name for target in result.targets))):
        for setting in settings if name in asked else settings[-1:]:  # the widest is last
            for attack in dict.fromkeys(plan.get("attack", ())):
                if (row := CellKey(name, setting, attack)) not in there:
                    yield row, "the plan asks for the row, and the result does not have it"


def _check_planned_secrets(
    result: AuditResult, outcomes: Mapping[CellKey, RowValuesBySecret], listed: AnsweredSecretIds
) -> Iterator[tuple[CellKey, str]]:
    """Where the plan, the secrets or the answers in the run folder are not those of the result and
    its outcomes."""
    if listed.plan is not None:
        # another version may have begun the run
        blank = {name: to_json(one.default) for name, one in FIELDS.items()}
        # a field that only one of the two versions has must stand at its default in the other
        begun, ended = {**blank, **listed.plan}, {**blank, **result.plan}
        for name in sorted(begun.keys() | ended.keys()):
            if begun.get(name) != ended.get(name):
                yield WHOLE_RUN, f"its plan has another {name} than {PLAN}"
    if listed.secrets is not None:
        attacked = Counter(fact.member for fact in listed.secrets.values() if not fact.canary)
        told = {True: result.benchmark.members, False: result.benchmark.nonmembers}
        for member, what in ((True, "members"), (False, "non-members")):
            if attacked[member] != told[member]:
                yield (
                    WHOLE_RUN,
                    f"it is about {told[member]} {what}, {SECRETS} holds {attacked[member]}",
                )
        for row, kept in outcomes.items():
            if why := _describe_secret_mismatch(kept, listed.secrets):
                yield row, why
    if listed.guesses is not None and listed.observations is not None:
        members = {id for id, fact in (listed.secrets or {}).items() if fact.member}
        yield from _check_answered_secrets(
            result, outcomes, members, listed.guesses, listed.observations
        )


def _describe_secret_mismatch(kept: RowValuesBySecret, secrets: Mapping[str, SecretFacts]) -> str:
    """How the secrets of a row are not those of the run. A probe may look at others: generations,
    games of its own."""
    if kept.outcome is None and secrets.keys().isdisjoint(kept.ids):
        return ""
    if strangers := sum(id not in secrets for id in kept.ids):
        return f"{_WHERE} holds {counted(strangers, 'secret')} that {SECRETS} does not"
    facts = (secrets[id] for id in kept.ids)
    others = sum(
        (fact.member, fact.repeats) != (bool(member), repeats)
        for fact, member, repeats in zip(facts, kept.member, kept.repeats, strict=True)
    )
    return (
        f"{counted(others, 'secret')} {_WHERE} disagrees with {SECRETS} on membership or copies"
        if others
        else ""
    )


def _check_answered_secrets(
    result: AuditResult,
    outcomes: Mapping[CellKey, RowValuesBySecret],
    members: Collection[str],
    guesses: Answers,
    observations: Answers,
) -> Iterator[tuple[CellKey, str]]:
    for row, kept in outcomes.items():
        # generations are drawn as guesses are
        guessed = kept.outcome is not None or row not in observations
        where, answered = (GUESSES, guesses) if guessed else (OBSERVATIONS, observations)
        ids, told = set(kept.ids), answered.get(row, frozenset())
        added, dropped = ids - told, told - ids
        if added:
            yield (
                row,
                f"{_WHERE} holds {counted(len(added), 'secret')} without an answer in {where}",
            )
        if dropped:
            yield (
                row,
                f"{where} holds answers about {counted(len(dropped), 'secret')} that {_WHERE} "
                "leaves out",
            )
    reported = {finding.cell_key: finding for finding in result.findings}
    for row in dict.fromkeys((*guesses, *observations)):
        if row not in reported:
            yield row, "the run folder holds answers for the row, and the result does not have it"
        elif reported[row].not_applicable and any(id in members for id in guesses.get(row, ())):
            yield row, f"it was not applicable, and {GUESSES} holds answers about members"


def _check_epsilon_bounds(finding: Finding) -> Iterator[str]:
    """Bounds of epsilon that are not those of their guesses, or not the ones that stand among the
    measurements."""
    for audit in finding.audits:
        name = METRICS.get(audit.estimator, audit.estimator)
        try:
            again = repeat_audit(audit, audit.level)
        except AuditError as why:
            yield f"{name}: {why}"
            continue
        shown = ("", audit.epsilon, again.epsilon), ("best provable ", audit.best, again.best)
        for what, told, found in (*shown, ("right guesses ", audit.right, again.right)):
            if not math.isclose(told, found, rel_tol=_SOLVED, abs_tol=_SOLVED):
                yield (
                    f"{name} is {what}{told:.6g}, and {audit.right} of {audit.guesses} guesses "
                    f"right make {found:.6g}"
                )
        measured = finding.measurement(name)
        if measured is None or measured.value != audit.epsilon:
            other = "is not" if measured is None else f"is {measured.value:.6g}"
            yield (
                f"{name} is {audit.epsilon:.6g} where its guesses stand, and {other} among the "
                "measurements"
            )


def _check_claim_games(finding: Finding, claim: Claim | None) -> Iterator[str]:
    """Games whose claim, exact epsilon or tokens differ from the target's claim, the measurements
    or the options."""
    for audit in finding.audits:
        if audit.table is None:
            continue
        covered = None if claim is None else claim.queries
        if audit.covered != covered:
            claimed = (
                f"its games are said to be of a claim of {_format_claimed_tokens(audit.covered)}"
            )
            yield f"{claimed}, and it is of {_format_claimed_tokens(covered)}"
        exact = finding.measurement("epsilon_exact")
        if audit.exact is not None and (
            exact is None or not _is_recorded_value_equal_but_for_rounding(audit.exact, exact.value)
        ):
            other = "no epsilon_exact" if exact is None else f"epsilon_exact {exact.value:.6g}"
            yield (
                f"its games give away {audit.exact:.6g} exactly where they stand, and {other} "
                "among the measurements"
            )
        asked = finding.options.get("tokens")
        if isinstance(asked, int) and audit.tokens is not None and audit.tokens > asked:
            said = _format_claimed_tokens(audit.tokens)
            yield f"its games are said to be of {said}, and {asked:,} were asked for"


def _format_claimed_tokens(count: int | None) -> str:
    return "any number of tokens" if count is None else f"{count:,} tokens"


def _list_checked_measurements(finding: Finding) -> Iterator[tuple[str, Measurement]]:
    for m in finding.measurements:
        yield m.name, m
    for count, m in finding.by_repeats.items():
        yield f"{m.name}(count={count})", m
    for by_kind in (finding.by_kind, finding.by_kind_nonmembers):
        for kind, m in by_kind.items():
            yield f"{m.name}(kind={kind})", m


def explain_impossible_measurement(m: Measurement) -> str:
    """Why no measurement can have these numbers; "" where one can."""
    said = f"{m.value:.4g} between {m.low:.4g} and {m.high:.4g} (n = {m.n})"
    if m.n < 0:
        return f"{said}, of fewer than no secrets"
    if math.isnan(m.value):  # nothing was measured, which passes nowhere
        return ""
    if m.n == 0:
        return f"{said}, a number of nothing"
    if not find_metric(m.name).bounded:
        return ""
    if not (
        _is_recorded_value_at_most(m.low, m.value) and _is_recorded_value_at_most(m.value, m.high)
    ):
        return f"{said}, outside its own bounds"
    least = -1.0 if find_metric(m.name).signed else 0.0
    if m.unit in SHARES and not (
        _is_recorded_value_at_most(least, m.low) and _is_recorded_value_at_most(m.high, 1.0)
    ):
        return f"{said}, no share"
    return ""


def _check_outcomes(finding: Finding, kept: RowValuesBySecret) -> Iterator[str]:
    """Numbers of the row that its secrets' outcomes contradict; those not worked out of secrets are
    left alone."""
    if len(set(kept.ids)) < len(kept.ids):
        yield f"{_WHERE} holds a secret twice"
    members, others = (
        kept.metric_values_in_id_order(True, None),
        kept.metric_values_in_id_order(False, None),
    )
    for m in finding.measurements:
        if (found := recompute_metric(find_metric(m.name), members, others)) is not None:
            yield from _check_measurement(m.name, m, *found)
    if finding.main is not None and finding.main.name in kept.values:
        for count, m in finding.by_repeats.items():
            chosen = (
                kept.metric_values_in_id_order(True, int(count))[finding.main.name]
                if count.isdigit()
                else np.empty(0)
            )
            yield from _check_measurement(
                f"{m.name}(count={count})", m, compute_mean(chosen), len(chosen)
            )
    for by_kind in (finding.by_kind, finding.by_kind_nonmembers):
        for kind, m in by_kind.items():
            again = kept.remeasure_metric(m.name, kind=kind)
            value, n = (again.value, again.n) if again else (math.nan, 0)
            yield from _check_measurement(f"{m.name}(kind={kind})", m, value, n)


def _check_measurement(name: str, m: Measurement, value: float, n: int) -> Iterator[str]:
    if m.n != n:
        yield f"{name} is of {m.n} secrets, {_WHERE} holds {n}"
    elif n and not _is_recorded_value_equal_but_for_rounding(m.value, value):
        yield f"{name} is {m.value:.6g}, {_WHERE} makes it {value:.6g}"


def _is_recorded_value_equal_but_for_rounding(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=_ROUNDING, abs_tol=_ROUNDING)


def _is_recorded_value_at_most(one: float, other: float) -> bool:
    return one <= other or _is_recorded_value_equal_but_for_rounding(one, other)
