"""A gate refuses a result that contradicts itself: what is on record twice must be the same
twice."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from auditor.conclusions.outcomes import RunOutcomes, ValuesBySecret
from auditor.core.errors import AuditError
from auditor.core.nouns import CellKey
from auditor.core.result import AuditResult, BenchmarkRecord, Finding, Measurement
from auditor.gate.contradictions import find_result_contradictions
from auditor.gate.decide import apply_gate_policy
from auditor.gate.policy import Policy, Rule, parse_gate_limits, parse_gate_rule
from auditor.records.attacked_secrets import AnsweredSecrets
from auditor.records.journal import SecretNumbers
from auditor.statistics import extraction, judging
from auditor.statistics.intervals import measure_share
from tests.rows import judge_columns

ROW = CellKey("undefended", "white-box", "a")
Change = Callable[[Finding], Finding]


def outcome(seed: int = 0, n: int = 60) -> judging.Outcome:
    """Members and non-members, repeat counts, scores with ties, and errors enough for
    Recall@100."""
    rng = np.random.default_rng(seed)
    member = rng.random(n) < 0.7
    hit = (rng.random(n) < 0.4) & member
    return judge_columns(
        ids=tuple(f"s{i}" for i in range(n)),
        hit=hit,
        any_hit=hit | (rng.random(n) < 0.1),
        score=np.round(rng.normal(size=n), 1),
        repeats=tuple(
            int(r) if m else None for r, m in zip(rng.choice([1, 4], n), member, strict=True)
        ),
        member=member,
        distance=np.where(hit, 0, rng.integers(1, 9, n)),
        tolerance=np.full(n, 2),
    )


def run(change: Change = lambda finding: finding, seed: int = 0, **more: Any) -> RunOutcomes:
    found = outcome(seed)
    measured, by_repeats = (
        extraction.measure_extraction(found),
        extraction.measure_hit_shares("recall", found.select_secrets(found.member)),
    )
    finding = Finding(*ROW, {}, ("distribution",), "top-p", None, "", tuple(measured), by_repeats)
    rows = (change(finding), *more.get("rows", ()))
    benchmark = BenchmarkRecord("lab", "", 0, 0, 0)
    plan = {
        "attack": more.get("attack", ["a"]),
        "defense": [],
        "setting": more.get("setting", "white-box"),
    }
    result = AuditResult("r", "2026", "0", "audit run", plan, benchmark, (), rows, {}, {}, 0)
    kept: dict[CellKey, ValuesBySecret] = {} if more.get("lost") else read_record(found)
    return RunOutcomes("r", result, kept)


def read_record(found: judging.Outcome) -> dict[CellKey, ValuesBySecret]:
    return {ROW: ValuesBySecret.from_judged_guesses(found)}


def with_measured(which: str, **new: Any) -> Change:
    def changed(finding: Finding) -> Finding:
        own = tuple(replace(m, **new) if m.name == which else m for m in finding.measurements)
        return replace(finding, measurements=own)

    return changed


def doubled(finding: Finding) -> Finding:
    return replace(
        finding, measurements=(*finding.measurements, Measurement("recall", 0.0, 0.0, 0.01, 60))
    )


def of_count(finding: Finding) -> Finding:
    return replace(
        finding,
        by_repeats={
            **finding.by_repeats,
            "4": replace(finding.by_repeats["4"], value=0.0, low=0.0),
        },
    )


@pytest.mark.parametrize("seed", range(8))
def test_what_a_run_writes_does_not_contradict_itself(seed: int) -> None:
    made = run(seed=seed)
    assert list(find_result_contradictions(made.result, made.outcomes)) == []


def test_unreported_rows_come_in_the_order_of_the_record() -> None:
    made = run()
    unreported = [CellKey("undefended", "white-box", f"attack {i}") for i in range(12)]
    outcomes = {**made.outcomes, **dict.fromkeys(unreported, made.outcomes[ROW])}
    found = find_result_contradictions(made.result, outcomes)
    assert [row for row, reason in found if "contains this configuration" in reason] == unreported


CHANGES: dict[str, tuple[Change, str]] = {
    "bounds the wrong way round": (
        with_measured("excess_recall", value=0.625, low=0.3657, high=0.01),
        "excess_recall is 0.625 between 0.3657 and 0.01 .* outside its own bounds",
    ),
    "bounds that are no numbers": (
        with_measured("excess_recall", low=math.nan, high=math.nan),
        "outside its own bounds",
    ),
    "more than all": (with_measured("any_of_k", value=1.2, high=1.3), "no share"),
    "less than none": (with_measured("recall_at_100_errors", low=-0.5), "no share"),
    "a number of nothing": (with_measured("recall", n=0), "a number of nothing"),
    "of fewer than none": (with_measured("recall", n=-3), "a negative number of secrets"),
    "of more secrets than there are": (
        with_measured("recall", n=5000),
        "recall is of 5000 secrets, secrets.parquet contains",
    ),
    "another recall": (
        with_measured("recall", value=0.0, low=0.0, high=0.06),
        "recall is 0, secrets.parquet makes it 0",
    ),
    "another recall at errors": (
        with_measured("recall_at_10pct_errors", value=0.9, high=1.0),
        "recall_at_10pct_errors is 0.9, secrets.parquet makes it",
    ),
    "another excess": (
        with_measured("excess_recall", value=0.0, low=-0.1, high=0.01),
        "excess_recall is 0, secrets",
    ),
    "another count": (of_count, r"recall\(count=4\) is 0, secrets.parquet makes it"),
    "a metric twice": (doubled, "the result lists recall 2 times"),
}


@pytest.mark.parametrize("reading", ["report", "pass"])
@pytest.mark.parametrize("name", CHANGES)
def test_a_result_that_contradicts_itself_fails(name: str, reading: Any) -> None:
    """Whatever the rule says, also where the inconclusive is let pass."""
    change, why = CHANGES[name]
    decision = apply_gate_policy(run(change), Policy((Rule("recall", 1.0),), reading))
    assert decision.exit_code == 1
    with pytest.raises(AssertionError, match=f"the result contradicts itself: .*{why}"):
        raise AssertionError("; ".join(r.reason for r in decision.rulings))
    assert apply_gate_policy(run(), Policy((Rule("recall", 1.0),), reading)).exit_code == 0


def test_a_number_without_an_interval_contradicts_nothing_and_is_held_to_no_limit() -> None:
    def fitted(finding: Finding) -> Finding:
        extra = Measurement("exposure_extrapolated", 3.0, math.nan, math.nan, 6, "bits")
        return replace(finding, measurements=(*finding.measurements, extra))

    made = run(fitted)
    assert apply_gate_policy(made, Policy((Rule("recall", 1.0),))).exit_code == 0
    (ruling,) = apply_gate_policy(made, Policy((Rule("exposure_extrapolated", 10.0),))).rulings
    assert (ruling.verdict, ruling.metric) == (
        "failed",
        "exposure_extrapolated",
    ) and "interval" in ruling.reason


def test_generations_have_their_answers_among_the_guesses() -> None:
    """They are drawn and not judged: of such a row neither an outcome nor an observation is
    kept."""
    drawn = Finding(
        *ROW,
        {},
        ("draw",),
        "",
        None,
        "",
        (measure_share("memorised", np.ones(3, dtype=bool)),),
    )
    kept = ValuesBySecret(
        ("0", "1", "2"), np.ones(3, dtype=bool), (None,) * 3, {"memorised": np.ones(3)}
    )
    result = replace(run().result, findings=(drawn,))
    for ids, fits in (("012", True), ("02", False), ("3012", False), ("013", False)):
        numbers = SecretNumbers()
        listed = AnsweredSecrets(
            guesses={ROW: numbers.add_all(ids)}, observations={}, numbers=numbers
        )
        assert (list(find_result_contradictions(result, {ROW: kept}, listed)) == []) == fits


def test_rows_stand_there_once_and_have_outcomes() -> None:
    (finding,) = run().result.findings
    twice, lost = run(rows=(finding,)), run(lost=True)
    policy = Policy((Rule("recall", 1.0),))
    assert "the result lists it 2 times" in apply_gate_policy(twice, policy).rulings[0].reason
    assert (
        "secrets.parquet lacks the values that they summarise"
        in apply_gate_policy(lost, policy).rulings[0].reason
    )
    assert (
        apply_gate_policy(twice, policy).exit_code == apply_gate_policy(lost, policy).exit_code == 1
    )


def test_an_attack_that_never_applied_is_named_and_fails_the_gate() -> None:
    never = [
        Finding("undefended", s, "b", {}, (), "", None, "", not_applicable="it is unwell")
        for s in ("text-only", "white-box")
    ]
    unasked = Finding(
        "undefended", "text-only", "a", {}, (), "", None, "", not_applicable="it is unwell"
    )
    here = run(rows=(*never, unasked), attack=["a", "b"], setting="both")
    policy = Policy((Rule("recall", 1.0),))
    failed = [r for r in apply_gate_policy(here, policy).rulings if r.verdict == "failed"]
    assert [r.attack for r in failed] == ["b"] and "never applied (it is unwell)" in failed[
        0
    ].reason
    assert apply_gate_policy(here, replace(policy, allow_not_applicable=True)).exit_code == 0
    assert apply_gate_policy(here, policy, attack="a").exit_code == 0  # nobody asks about b
    applied = replace(
        here.result.findings[0], attack="b", setting="text-only", measurements=(), by_repeats={}
    )
    once = run(rows=(never[1], applied, unasked), attack=["a", "b"], setting="both")
    assert apply_gate_policy(once, policy).exit_code == 0  # in one setting


@pytest.mark.parametrize("limit", ["5", "inf", "1e999", "-inf", "1.01"])
def test_limits_that_nothing_can_break_are_refused(limit: str) -> None:
    with pytest.raises(AuditError, match="expected a limit"):
        parse_gate_limits([f"recall={limit}"])
    with pytest.raises(AuditError, match="expected a limit"):
        parse_gate_rule(f"recall_at_100_errors <= {limit}")


def test_a_limit_in_percent_is_told_what_it_is() -> None:
    with pytest.raises(AuditError, match=r"recall, which is a share, got 5: 5% is 0\.05"):
        parse_gate_limits(["recall=5"])
    with pytest.raises(
        AuditError, match=r"a share, got 5: 5% is 0\.05"
    ):  # of a plug-in: its unit says what it is
        apply_gate_policy(
            run(with_measured("any_of_k", name="theirs")), Policy((Rule("theirs", 5.0),))
        )
    assert parse_gate_limits(["exposure=10"])[0].limit == 10


def test_an_empty_name_is_refused() -> None:
    for name in ("target", "setting", "attack"):
        with pytest.raises(AuditError, match=f"expected the name of a {name}"):
            apply_gate_policy(run(), Policy((Rule("recall", 1.0),)), **{name: ""})  # type: ignore[arg-type]
