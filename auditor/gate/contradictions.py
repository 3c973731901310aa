"""Check that a result agrees with itself and with the results of each secret.

A gate reads a few numbers from a file that anyone may have edited or truncated. Therefore every
value that is recorded twice must be the same in both places.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import get_args

import numpy as np

from auditor.conclusions.outcomes import ValuesBySecret
from auditor.core.arrays import Ints
from auditor.core.counts import format_count
from auditor.core.errors import AuditError
from auditor.core.jsonable import to_json
from auditor.core.nouns import UNDEFENDED, CellKey, Claim, SettingName
from auditor.core.plan import FIELDS
from auditor.core.plan_parts import name_deployed_form
from auditor.core.result import AuditResult, Finding, Measurement
from auditor.gate.rulings import WHOLE_RUN
from auditor.records.attacked_secrets import (
    NOT_KEPT,
    PLAN,
    SECRETS,
    AnsweredSecrets,
    Answers,
    AttributeTable,
)
from auditor.records.journal import GUESSES, OBSERVATIONS
from auditor.records.table import TABLE as _WHERE
from auditor.statistics.audited import METRICS, repeat_epsilon_audit
from auditor.statistics.metrics import SHARES, find_metric
from auditor.statistics.recomputed import compute_mean, recompute_metric

_ROUNDING = 1e-9  # relative and absolute: the order of sums may differ
_NONE = np.empty(0, np.int64)
_SOLVED = 1e-6  # tolerance of a bound computed by bisection


def find_result_contradictions(
    result: AuditResult,
    outcomes: Mapping[CellKey, ValuesBySecret],
    listed: AnsweredSecrets = NOT_KEPT,
) -> Iterator[tuple[CellKey, str]]:
    """Yield (cell, reason) for each contradiction within the result, or with the run folder.

    A cell names target, setting, and attack or probe.

    Args:
        result: result of the run.
        outcomes: results by secret, keyed by cell.
        listed: the plan and the ids of the attacked secrets and answers, read from the folder's
            other files.
    """
    yield from _check_planned_rows(result)
    yield from _check_planned_secrets(result, outcomes, listed)
    claims = {target.name: target.claim for target in result.targets}
    rows = Counter(finding.cell_key for finding in result.findings)
    for row in outcomes:
        if row not in rows:
            yield row, f"{_WHERE} contains this configuration, but the result does not"
    for row, count in rows.items():
        if count > 1:
            yield row, f"the result lists it {count} times"
    for finding in result.findings:
        for name, count in Counter(m.name for m in finding.measurements).items():
            if count > 1:
                yield finding.cell_key, f"the result lists {name} {count} times"
        for name, measured in _list_checked_measurements(finding):
            if reason := explain_measurement_contradiction(measured):
                yield finding.cell_key, f"{name} is {reason}"
        contradictions = [
            *_check_epsilon_bounds(finding),
            *_check_claim_games(finding, claims.get(finding.target)),
        ]
        if (row_values := outcomes.get(finding.cell_key)) is not None:
            contradictions += _check_outcomes(finding, row_values)
        elif any(m.n for _, m in _list_checked_measurements(finding)):
            contradictions.append(
                f"it has numbers, but {_WHERE} lacks the values that they summarise"
            )
        for reason in contradictions:
            yield finding.cell_key, reason


def _check_planned_rows(result: AuditResult) -> Iterator[tuple[CellKey, str]]:
    """Yield (cell, reason) for each planned cell that is missing from the result.

    A cell names target, setting, and attack or probe. Each attack of the plan must have a result in
    every setting. Control models need a result only in the setting with the widest access.
    """
    plan = result.plan
    reported_rows = {finding.cell_key for finding in result.findings}
    planned_targets = dict.fromkeys(
        (UNDEFENDED, *plan.get("defense", ()), *map(name_deployed_form, plan.get("forms", ())))
    )
    settings = []
    for name in get_args(SettingName):
        if plan.get("setting", "both") in (name, "both"):
            settings.append(name)
    for name in dict.fromkeys((*planned_targets, *(target.name for target in result.targets))):
        for setting in settings if name in planned_targets else settings[-1:]:  # the widest is last
            for attack in dict.fromkeys(plan.get("attack", ())):
                if (row := CellKey(name, setting, attack)) not in reported_rows:
                    yield row, "the plan requests it, but the result does not have it"


def _check_planned_secrets(
    result: AuditResult, outcomes: Mapping[CellKey, ValuesBySecret], listed: AnsweredSecrets
) -> Iterator[tuple[CellKey, str]]:
    """Yield (cell, reason) for each contradiction with the run folder's plan, secrets or answers.

    A cell names target, setting, and attack or probe.

    Args:
        result: result of the run.
        outcomes: results by secret, keyed by cell.
        listed: the plan and the ids of the attacked secrets and answers, read from the folder.
    """
    if listed.plan is not None:
        # another version may have started the run
        blank = {}
        for name, field in FIELDS.items():
            blank[name] = to_json(field.default)
        # a field known to only one version must have its default value
        first_plan = {**blank, **listed.plan}
        last_plan = {**blank, **result.plan}
        for name in sorted(first_plan.keys() | last_plan.keys()):
            if first_plan.get(name) != last_plan.get(name):
                yield WHOLE_RUN, f"its plan has another {name} than {PLAN}"
    if listed.secrets is not None:
        is_member = listed.secrets.columns["member"].astype(bool)
        is_attacked = ~listed.secrets.columns["canary"].astype(bool)
        for noun, reported, listed_secrets in (
            ("members", result.benchmark.members, is_member & is_attacked),
            ("non-members", result.benchmark.nonmembers, ~is_member & is_attacked),
        ):
            n_attacked = int(listed_secrets.sum())
            if n_attacked != reported:
                yield (
                    WHOLE_RUN,
                    f"it is about {reported} {noun}, but {SECRETS} contains {n_attacked}",
                )
        for row, row_values in outcomes.items():
            if reason := _describe_secret_mismatch(row_values, listed.secrets):
                yield row, reason
    if listed.guesses is not None and listed.observations is not None:
        yield from _check_answered_secrets(
            result, outcomes, listed, listed.guesses, listed.observations
        )


def _describe_secret_mismatch(values_by_secret: ValuesBySecret, secrets: AttributeTable) -> str:
    """Describe how the secrets of an attack or probe differ from the run's secrets.

    Return "" if they agree. A probe may have its own secrets.
    """
    places = secrets.numbers.find_all(values_by_secret.ids)
    is_known = places >= 0
    if not values_by_secret.is_judged and not is_known.any():
        return ""
    if not is_known.all():
        n_unknown = int((~is_known).sum())
        return f"{_WHERE} contains {format_count(n_unknown, 'secret')} that {SECRETS} does not"
    repeats = np.array(values_by_secret.repeats, object)
    is_wrong = secrets.columns["member"][places] != values_by_secret.member
    is_wrong |= secrets.columns["repeats"][places] != repeats
    if n_wrong := int(is_wrong.sum()):
        secrets_text = format_count(n_wrong, "secret")
        return f"{secrets_text} {_WHERE} disagrees with {SECRETS} on membership or copies"
    return ""


def _check_answered_secrets(
    result: AuditResult,
    outcomes: Mapping[CellKey, ValuesBySecret],
    listed: AnsweredSecrets,
    guesses: Answers,
    observations: Answers,
) -> Iterator[tuple[CellKey, str]]:
    for row, row_values in outcomes.items():
        # generations are stored with the guesses
        guessed = row_values.is_judged or row not in observations
        journal, answers = (GUESSES, guesses) if guessed else (OBSERVATIONS, observations)
        numbers = listed.numbers.add_all(row_values.ids)
        n_secrets = len(listed.numbers)
        is_own, is_answered = (
            np.bincount(side, minlength=n_secrets) > 0
            for side in (numbers, answers.get(row, _NONE))
        )
        n_added = int((is_own & ~is_answered).sum())
        n_dropped = int((is_answered & ~is_own).sum())
        if n_added:
            yield (
                row,
                f"{_WHERE} contains {format_count(n_added, 'secret')} without an answer in "
                f"{journal}",
            )
        if n_dropped:
            yield (
                row,
                f"{journal} contains answers about {format_count(n_dropped, 'secret')} that "
                f"{_WHERE} "
                "leaves out",
            )
    reported = {finding.cell_key: finding for finding in result.findings}
    for row in dict.fromkeys((*guesses, *observations)):
        if row not in reported:
            yield (
                row,
                "the run folder has answers for it, but the result does not have it",
            )
        elif reported[row].not_applicable and _hold_member(listed.secrets, guesses.get(row, _NONE)):
            yield row, f"it was not applicable, but {GUESSES} has answers about members"


def _hold_member(secrets: AttributeTable | None, numbers: Ints) -> bool:
    """Return whether any of these numbers is a member's."""
    if secrets is None:
        return False
    return bool(secrets.columns["member"][numbers[numbers < len(secrets)]].any())


def _check_epsilon_bounds(finding: Finding) -> Iterator[str]:
    """Yield a sentence for each bound of epsilon that was recorded incorrectly.

    The bound is recomputed from the recorded number of right guesses. It must also equal the bound
    among the finding's measurements.
    """
    for audit in finding.audits:
        name = METRICS.get(audit.estimator, audit.estimator)
        try:
            repeated = repeat_epsilon_audit(audit, audit.level)
        except AuditError as error:
            yield f"{name}: {error}"
            continue
        bounds = (
            ("", audit.epsilon, repeated.epsilon),
            ("best provable ", audit.best, repeated.best),
        )
        for kind, recorded, recomputed in (
            *bounds,
            ("right guesses ", audit.right, repeated.right),
        ):
            if not math.isclose(recorded, recomputed, rel_tol=_SOLVED, abs_tol=_SOLVED):
                yield (
                    f"{name} is {kind}{recorded:.6g}, and {audit.right} of {audit.guesses} guesses "
                    f"right make {recomputed:.6g}"
                )
        measured = finding.measurement(name)
        if measured is None or measured.value != audit.epsilon:
            if measured is None:
                state = "is not"
            else:
                state = f"is {measured.value:.6g}"
            yield (f"{name} is {audit.epsilon:.6g} in its guesses, but {state} in the measurements")


def _check_claim_games(finding: Finding, claim: Claim | None) -> Iterator[str]:
    """Yield a sentence for each contradiction about the guessing games of an epsilon audit.

    In such a game, the auditor guesses which of two neighbouring models drew some tokens. The games
    are recorded with a claim, an exact epsilon and a number of tokens. These must agree with the
    target's claim, the measurements and the options.

    Args:
        finding: finding of the probe.
        claim: the target's privacy claim; None if it claims nothing.
    """
    for audit in finding.audits:
        if audit.table is None:
            continue
        covered = None if claim is None else claim.queries
        if audit.covered != covered:
            claimed = (
                f"its games are recorded for a claim of {_format_claimed_tokens(audit.covered)}"
            )
            yield f"{claimed}, but the claim is of {_format_claimed_tokens(covered)}"
        exact = finding.measurement("epsilon_exact")
        if audit.exact is not None and (
            exact is None or not _is_nearly_equal(audit.exact, exact.value)
        ):
            if exact is None:
                recorded = "no epsilon_exact"
            else:
                recorded = f"epsilon_exact {exact.value:.6g}"
            yield (
                f"its games give exactly {audit.exact:.6g}, but the measurements have {recorded}"
            )
        n_tokens = finding.options.get("tokens")
        if isinstance(n_tokens, int) and audit.tokens is not None and audit.tokens > n_tokens:
            tokens_label = _format_claimed_tokens(audit.tokens)
            yield f"its games are labelled {tokens_label}, but {n_tokens:,} were requested"


def _format_claimed_tokens(count: int | None) -> str:
    if count is None:
        return "any number of tokens"
    return f"{count:,} tokens"


def _list_checked_measurements(finding: Finding) -> Iterator[tuple[str, Measurement]]:
    for m in finding.measurements:
        yield m.name, m
    for count, m in finding.by_repeats.items():
        yield f"{m.name}(count={count})", m
    for by_kind in (finding.by_kind, finding.by_kind_nonmembers):
        for kind, m in by_kind.items():
            yield f"{m.name}(kind={kind})", m


def explain_measurement_contradiction(m: Measurement) -> str:
    """Return why no measurement can have these numbers; "" if they are possible."""
    numbers = f"{m.value:.4g} between {m.low:.4g} and {m.high:.4g} (n = {m.n})"
    if m.n < 0:
        return f"{numbers}, a negative number of secrets"
    if math.isnan(m.value):  # nothing was measured; no gate passes such a measurement
        return ""
    if m.n == 0:
        return f"{numbers}, a number of nothing"
    if not find_metric(m.name).bounded:
        return ""
    if not (_is_nearly_less(m.low, m.value) and _is_nearly_less(m.value, m.high)):
        return f"{numbers}, outside its own bounds"
    least = -1.0 if find_metric(m.name).signed else 0.0
    if m.unit in SHARES and not (_is_nearly_less(least, m.low) and _is_nearly_less(m.high, 1.0)):
        return f"{numbers}, no share"
    return ""


def _check_outcomes(finding: Finding, values_by_secret: ValuesBySecret) -> Iterator[str]:
    """Yield a sentence for each number of the finding that contradicts the results of its secrets.

    Numbers that are not computed from secrets are skipped.
    """
    if values_by_secret.has_repeated_secret:
        yield f"{_WHERE} contains a secret twice"
    members = values_by_secret.order_metric_values(True, None)
    nonmembers = values_by_secret.order_metric_values(False, None)
    for m in finding.measurements:
        if (recomputed := recompute_metric(find_metric(m.name), members, nonmembers)) is not None:
            yield from _check_measurement(m.name, m, *recomputed)
    if finding.main is not None and finding.main.name in values_by_secret.values:
        for count, m in finding.by_repeats.items():
            if count.isdigit():
                chosen = values_by_secret.order_metric_values(True, int(count))[finding.main.name]
            else:
                chosen = np.empty(0)
            yield from _check_measurement(
                f"{m.name}(count={count})", m, compute_mean(chosen), len(chosen)
            )
    for by_kind in (finding.by_kind, finding.by_kind_nonmembers):
        for kind, m in by_kind.items():
            remeasured = values_by_secret.remeasure_metric(m.name, kind=kind)
            value, n = (remeasured.value, remeasured.n) if remeasured else (math.nan, 0)
            yield from _check_measurement(f"{m.name}(kind={kind})", m, value, n)


def _check_measurement(name: str, m: Measurement, value: float, n: int) -> Iterator[str]:
    if m.n != n:
        yield f"{name} is of {m.n} secrets, {_WHERE} contains {n}"
    elif n and not _is_nearly_equal(m.value, value):
        yield f"{name} is {m.value:.6g}, {_WHERE} makes it {value:.6g}"


def _is_nearly_equal(value: float, other: float) -> bool:
    return math.isclose(value, other, rel_tol=_ROUNDING, abs_tol=_ROUNDING)


def _is_nearly_less(value: float, other: float) -> bool:
    return value <= other or _is_nearly_equal(value, other)
