"""A policy says what must have been looked at: what nobody looked for is under every limit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from auditor.conclusions.outcomes import RunOutcomes, ValuesBySecret
from auditor.core.errors import AuditError
from auditor.core.nouns import CellKey
from auditor.core.result import AuditResult, BenchmarkRecord, Finding, Measurement, RecordCounts
from auditor.gate.decide import apply_gate_policy
from auditor.gate.policy import Policy, Required, Rule, read_gate_policy

LIMIT = (Rule("recall", 0.5),)


def finished(*rows: tuple[str, str, str], members: int = 100, others: int = 50) -> RunOutcomes:
    """Nothing was extracted by any of these (target, setting, attack)."""
    measured = (Measurement("recall", 0.0, 0.0, 0.03, members),)
    found = tuple(Finding(*row, {}, ("draw",), "ancestral", None, "", measured) for row in rows)
    record = BenchmarkRecord("b", "", members, others, 0)
    plan = {"defense": [], "attack": [attack for *_, attack in rows], "setting": "white-box"}
    result = AuditResult("r", "2026", "0", "audit run", plan, record, (), found, {}, {}, 0)
    n = members + others
    ids, member = tuple(f"s{i}" for i in range(n)), np.arange(n) < members
    own = ValuesBySecret(ids, member, (None,) * n, {"recall": np.zeros(n)})
    return RunOutcomes("r", result, {CellKey(*row): own for row in rows})


def reasons(run: RunOutcomes, asked: Required) -> list[str]:
    found = apply_gate_policy(run, Policy(LIMIT, require=asked))
    return [ruling.reason for ruling in found.rulings if ruling.verdict == "failed" and ruling.rule]


ONE = ("undefended", "white-box", "perplexity")


@pytest.mark.parametrize("given", [100, 130])
def test_no_policy_is_silent_on_records_that_were_left_out(given: int) -> None:
    run = finished(ONE)
    counts = RecordCounts(given, 100, left_out={"too short": given - 100}, not_attacked={})
    benchmark = replace(run.result.benchmark, records={"members": counts})
    found = apply_gate_policy(
        replace(run, result=replace(run.result, benchmark=benchmark)), Policy(LIMIT)
    )
    assert [ruling.verdict for ruling in found.rulings] == ["held"]
    is_told = found.rulings[0].reason.endswith("; 100 of 130 records audited")
    assert is_told == (given == 130)


def test_a_ruling_counts_distinct_records_and_names_the_rows_given() -> None:
    run = finished(ONE)
    counts = RecordCounts(234, 25, copies=84, by_copies={"8": 12, "1": 123})
    benchmark = replace(run.result.benchmark, records={"members": counts})
    decision = apply_gate_policy(
        replace(run, result=replace(run.result, benchmark=benchmark)), Policy(LIMIT)
    )
    assert decision.rulings[0].reason.endswith("; 25 of 135 records audited (234 rows given)")


def test_what_is_required_and_was_done_holds_and_is_said() -> None:
    found = apply_gate_policy(
        finished(ONE), Policy(LIMIT, require=Required(("perplexity",), "white-box", 100, 50))
    )
    assert found.verdict == "held"
    said = "perplexity ran at white-box access on 100 secrets and 50 non-members"
    assert [r.cell_title for r in found.rulings if r.reason == said] == [
        "undefended, white-box, attack perplexity"
    ]
    anywhere = apply_gate_policy(finished(ONE), Policy(LIMIT, require=Required(secrets=100)))
    assert [r.cell_title for r in anywhere.rulings if "an attack ran on 100" in r.reason] == [
        "undefended"
    ]


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        (Required(("perplexity", "ethicist")), "required, but ethicist did not run"),
        (Required(access="text-only"), "required, but no attack ran at text-only access"),
        (
            Required(secrets=101),
            "an attack ran on 100 secrets and 50 non-members; required are 101 and 0",
        ),
        (
            Required(("perplexity",), nonmembers=51),
            "perplexity ran on 100 secrets and 50 non-members; required are",
        ),
    ],
)
def test_what_is_required_and_was_not_done_fails(asked: Required, why: str) -> None:
    run = finished(ONE)
    assert apply_gate_policy(run, Policy(LIMIT)).verdict == "held"
    (said,) = reasons(run, asked)
    assert said.startswith(why)


def test_a_row_that_never_applied_and_counts_that_only_the_result_tells_are_not_enough() -> None:
    run = finished(ONE)
    never = replace(
        run.result.findings[0],
        attack="ethicist",
        measurements=(),
        not_applicable="needs embeddings",
    )
    run = replace(run, result=replace(run.result, findings=(*run.result.findings, never)))
    assert reasons(run, Required(("ethicist",))) != []
    few = {key: replace(own, ids=("s0",) * len(own.ids)) for key, own in run.outcomes.items()}
    said = reasons(replace(run, outcomes=few), Required(secrets=2))
    assert any("on 1 secrets" in why for why in said)


def test_it_is_read_from_a_policy_and_what_says_nothing_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "leakage.toml"
    path.write_text(
        'rules = ["recall <= 0.5"]\n[require]\nattacks = ["perplexity"]\naccess = '
        '"white-box"\nsecrets = 300\n'
    )
    assert read_gate_policy(path).require == Required(("perplexity",), "white-box", 300)
    for line, why in (
        ("attacks = 'perplexity'", "require.attacks: expected a list"),
        ("access = 'worst'", "access: expected 'text-only' or 'white-box', got 'worst'"),
        ("secrets = 0", "secrets to be a whole number >= 1, got 0"),
        ("nonmembers = true", "nonmembers: expected int, got True"),
        ("secret = 3", "unknown field 'secret'; did you mean 'secrets'"),
    ):
        path.write_text(f'rules = ["recall <= 0.5"]\n[require]\n{line}\n')
        with pytest.raises(AuditError, match=why):
            read_gate_policy(path)
    path.write_text('rules = ["recall <= 0.5"]\nrequire = "all"\n')
    with pytest.raises(AuditError, match="require: expected an object, got 'all'"):
        read_gate_policy(path)
