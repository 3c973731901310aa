"""`epsilon_lower_bound <= claim` by the command, on runs on disk: exit codes, and what is never let
pass."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from auditor.cli import run_command_line
from auditor.core.errors import AuditError
from auditor.core.jsonable import to_json
from auditor.core.nouns import Claim
from auditor.core.result import (
    Audited,
    AuditResult,
    BenchmarkRecord,
    Finding,
    Measurement,
    TargetRecord,
)
from auditor.gate.decide import judge_gate_rules
from auditor.gate.decision_log import load_gate_decisions
from auditor.gate.policy import Rule, parse_gate_limits, parse_gate_rule
from auditor.records.result_file import read_result
from auditor.reports.markdown import render_markdown_report
from auditor.statistics import games
from auditor.statistics.audit_by_shape import bound_shape_mu
from auditor.statistics.audit_power import (
    SURE,
    describe_detection_power,
    estimate_median_epsilon,
    find_detectable_epsilon,
)
from auditor.statistics.audited import (
    audit_epsilon_bounds,
    audit_measurements,
    repeat_epsilon_audit,
)
from auditor.statistics.intervals import measure_share
from tests.conftest import methods
from tests.gate.finished_runs import edit, whole
from tests.rows import write_rows

RULE = "epsilon_lower_bound <= claim"
Said = pytest.CaptureFixture[str]


def audits(m: int, right: float) -> tuple[Audited, ...]:
    rng = np.random.default_rng(m)
    coins = rng.random(m) < 0.5
    return audit_epsilon_bounds(
        (coins == (rng.random(m) < right)) + rng.random(m) / 10, coins, 1e-5
    )


LEAKS = audits(1000, 0.95)


def row(found: tuple[Audited, ...], **changed: Any) -> Finding:
    measured = tuple(audit_measurements(found)) if found else ()
    exact = [audit.exact for audit in found if audit.exact is not None]
    measured += tuple(Measurement("epsilon_exact", x, x, x, 1, "nats") for x in exact)
    made = Finding(
        "dp",
        "white-box",
        "epsilon-audit",
        {},
        ("distribution",),
        "",
        True,
        "",
        measured,
        audits=found,
    )
    return replace(made, **changed)


def attacked(hits: int = 0) -> Finding:
    recall = measure_share("recall", np.arange(100) < hits)
    return Finding("dp", "white-box", "ethicist", {}, ("distribution",), "", True, "", (recall,))


def finished(
    folder: Path, epsilon: float | None, *rows: Finding, nominal: float | None = None
) -> Path:
    """A run folder, as a run leaves it for a gate."""
    covered = next((audit.covered for row in rows for audit in row.audits), None)
    claim = (
        Claim({"add_remove": epsilon}, 1e-5, "add_remove", "record", covered, "t", "sound")
        if epsilon
        else None
    )
    dp = TargetRecord("dp", "DP", "", claim=claim, nominal_epsilon=nominal)
    plan = {"defense": ["dp"]}
    result = AuditResult(
        "r",
        "2026-01-01",
        "0",
        "",
        plan,
        BenchmarkRecord("b", "", 100, 0, 0),
        (dp,),
        rows,
        {},
        {},
        0,
        methods=methods(),
    )
    folder.mkdir(exist_ok=True)
    (folder / "result.json").write_text(json.dumps(to_json(result), allow_nan=False))
    write_rows(folder, {str(row.cell_key): per_secret(row) for row in rows if row.main})
    return whole(folder)


def per_secret(row: Finding) -> dict[str, Any]:
    """Of an attack whether each secret was extracted; an audit keeps its scores elsewhere."""
    n = 100
    hit = [float(i < round(row.measurements[0].value * n)) for i in range(n)]
    about = {"ids": [f"s{i}" for i in range(n)], "member": [True] * n, "repeats": [None] * n}
    return {**about, "asked": [1.0] * n} if row.audits else {**about, "recall": hit}


def gate(folder: Path, *given: str) -> int:
    return run_command_line(["gate", str(folder), *given])


@pytest.mark.parametrize(
    ("epsilon", "rows", "code", "said"),
    [
        (1.0, [row(LEAKS)], 1, "claimed epsilon 1: claim contradicted"),
        (4.0, [row(LEAKS)], 0, "claimed epsilon 4: consistent"),
        (8.0, [row(LEAKS)], 4, "claimed epsilon 8: audit too weak to tell"),
        (1.0, [attacked()], 4, "claimed epsilon 1: not audited (no audit was run)"),
        (1.0, [row((), not_applicable="no coins")], 4, "not audited (epsilon-audit: no coins)"),
        (
            1.0,
            [row(LEAKS, claim_applies=False, claim_reason="distribution")],
            4,
            "not audited (epsilon-audit (white-box) is outside",
        ),
        (
            9.0,
            [row((), attack="claim-check", violations=("a shard is twice",))],
            1,
            "contradicted (a shard is twice)",
        ),
        (1.0, [], 1, "nothing was measured"),
        (None, [row(LEAKS)], 1, "it claims no epsilon: there is nothing to compare it with"),
    ],
)
def test_what_a_claim_is_held_to(
    tmp_path: Path, capsys: Said, epsilon: float | None, rows: list[Finding], code: int, said: str
) -> None:
    folder = finished(tmp_path / "run", epsilon, *rows)
    assert gate(folder, "--max", "epsilon_lower_bound=claim") == code
    assert said in " ".join(capsys.readouterr().out.split())


def test_what_held_says_which_leak_it_would_have_missed(tmp_path: Path, capsys: Said) -> None:
    """The epsilon that is caught in 95% of such audits, and the share of which so little is seen in
    5% of samples."""
    folder = finished(tmp_path / "run", 4.0, row(LEAKS), attacked())
    for limit in ("claim", "4"):
        assert gate(folder, "--max", f"epsilon_lower_bound={limit}") == 0
        said = " ".join(capsys.readouterr().out.split())
        assert describe_detection_power(LEAKS[0], 4.0, SURE) in said and "95% probability" in said
        assert load_gate_decisions(folder)[-1].decision.rulings[
            0
        ].missed == find_detectable_epsilon(LEAKS[0], 4.0, SURE)
    assert gate(folder, "--max", "recall=0.05") == 0
    assert "a true 0.02951 or more is missed in at most 5% of cases" in " ".join(
        capsys.readouterr().out.split()
    )
    assert load_gate_decisions(folder)[-1].decision.rulings[0].missed == pytest.approx(
        1 - 0.05**0.01
    )
    assert gate(folder, "--max", "recall=0.02") == 4
    assert load_gate_decisions(folder)[-1].decision.rulings[0].missed is None


def test_a_ruling_on_a_claim_says_what_its_audit_could_show(tmp_path: Path, capsys: Said) -> None:
    folder = finished(tmp_path / "run", 4.0, row(LEAKS))
    mechanism = {"noise_multiplier": 2.127, "sampling_rate": 0.25, "steps": 48}
    edit(
        folder,
        "result.json",
        lambda result: result["targets"][0]["claim"].update(details=mechanism),
    )
    whole(folder)
    assert gate(folder, "--max", "epsilon_lower_bound=claim") == 0
    ceiling = estimate_median_epsilon(1000, 2.127, (0.25, 48), 1e-5, 0.05)
    said = " ".join(capsys.readouterr().out.split())
    assert f"of the claimed ε 4 this audit could show at most about {ceiling:.2f}" in said
    # an interval that supposes a shape is said to be of that shape
    low, high = bound_shape_mu(1000, LEAKS[0].rights, 0.05, copies=1)
    mu = f"of a Gaussian mechanism and these scores, μ is {low:.2f} to {high:.2f} (95%, two-sided)"
    assert mu in said and mu in render_markdown_report(read_result(folder))


def test_games_have_no_mu(tmp_path: Path, capsys: Said) -> None:
    weak = games.audit_games((18_750,) * 4, 1e-5, 0.05)
    folder = finished(tmp_path / "run", 8.0, row((weak,), attack="prediction-audit"))
    gate(folder, "--max", "epsilon_lower_bound=claim")
    assert "μ" not in capsys.readouterr().out


def test_games_of_one_token_do_not_hold_the_claim_of_a_thousand(
    tmp_path: Path, capsys: Said
) -> None:
    """Nor a number: right guesses would have proved 9, of tokens that give away 0.234 at most."""
    weak = replace(
        games.audit_games((18_750,) * 4, 1e-5, 0.05), tokens=1, covered=1024, exact=0.234
    )
    for audit, code in ((weak, 4), (replace(weak, tokens=1024), 0)):
        folder = finished(tmp_path / str(code), 8.0, row((audit,), attack="prediction-audit"))
        for limit in ("claim", "8"):
            assert gate(folder, "--max", f"epsilon_lower_bound={limit}") == code
            said = " ".join(capsys.readouterr().out.split())
            why = (
                "its games look at 1 of the 1,024 tokens covered, which give away no more than "
                "0.234 exactly"
            )
            assert (why in said) == (code == 4)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"covered": 1}, "recorded for a claim of 1 tokens, but the claim is of 1,024 tokens"),
        (
            {"covered": None},
            "recorded for a claim of any number of tokens, but the claim is of 1,024 tokens",
        ),
        (
            {"exact": 9.0},
            "give exactly 9, but the measurements have epsilon_exact 0.234",
        ),
        ({"tokens": 1024}, "labelled 1,024 tokens, but 1 were requested"),
    ],
)
def test_games_are_not_made_stronger_by_an_edit(
    tmp_path: Path, capsys: Said, change: dict[str, Any], said: str
) -> None:
    """What `powerless_reason` goes by stands elsewhere too."""
    weak = replace(
        games.audit_games((18_750,) * 4, 1e-5, 0.05), tokens=1, covered=1024, exact=0.234
    )
    folder = finished(
        tmp_path / "run", 8.0, row((weak,), attack="prediction-audit", options={"tokens": 1})
    )
    limit = ("--max", "epsilon_lower_bound=claim")
    assert gate(folder, *limit) == 4
    edit(folder, "result.json", lambda result: result["findings"][0]["audits"][0].update(change))
    whole(folder)  # the manifest anew
    capsys.readouterr()
    assert gate(folder, *limit) == 1 and said in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda measured: measured[0].update(value=0.1, low=0.1),
            "but is 0.1 in the measurements",
        ),
        (lambda measured: measured.pop(0), "but is not in the measurements"),
    ],
)
def test_a_bound_is_that_of_its_guesses(
    tmp_path: Path, capsys: Said, change: Any, said: str
) -> None:
    folder = finished(tmp_path / "run", 4.0, row(LEAKS))
    edit(folder, "result.json", lambda result: change(result["findings"][0]["measurements"]))
    whole(folder)
    assert gate(folder, "--max", "epsilon_lower_bound=claim") == 1
    assert said in " ".join(capsys.readouterr().out.split())


def test_in_toml_beside_numbers(tmp_path: Path, capsys: Said) -> None:
    policy = tmp_path / "leakage.toml"
    policy.write_text(f'rules = ["{RULE}", "recall <= 0.05"]\n')
    fine = finished(tmp_path / "fine", 4.0, row(LEAKS), attacked())
    assert gate(fine, "--policy", str(policy)) == 0
    out = finished(tmp_path / "out", 4.0, row(LEAKS), attacked(60))
    assert gate(out, "--policy", str(policy)) == 1
    policy.write_text('[[rule]]\nmetric = "epsilon_lower_bound"\nmax = "claim"\ntarget = "dp"\n')
    assert gate(fine, "--policy", str(policy)) == 0
    capsys.readouterr()


def test_an_inconclusive_audit_is_let_pass_when_asked_a_missing_one_never(
    tmp_path: Path, capsys: Said
) -> None:
    weak = finished(tmp_path / "weak", 8.0, row(LEAKS))
    missing = finished(tmp_path / "missing", 8.0, attacked())
    rule = ("--max", "epsilon_lower_bound=claim")
    assert gate(weak, *rule, "--inconclusive=pass") == 0
    assert gate(missing, *rule, "--inconclusive=pass") == 4
    assert (
        gate(weak, *rule, "--inconclusive=fail") == gate(missing, *rule, "--inconclusive=fail") == 1
    )
    capsys.readouterr()


def test_a_nominal_epsilon_is_no_claim(tmp_path: Path, capsys: Said) -> None:
    folder = finished(tmp_path / "run", None, row(LEAKS), nominal=6.35)
    assert gate(folder, "--max", "epsilon_lower_bound=claim") == 1
    assert "its nominal epsilon 6.35 is none" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("limit", "verdict"), [(1.0, "failed"), (4.0, "held"), (8.0, "inconclusive")]
)
def test_a_number_works_as_the_claim_does(
    tmp_path: Path, capsys: Said, limit: float, verdict: str
) -> None:
    folder = finished(tmp_path / "run", 1.0, row(LEAKS))
    assert (
        gate(folder, "--max", f"epsilon_lower_bound={limit}")
        == {"held": 0, "failed": 1, "inconclusive": 4}[verdict]
    )
    assert verdict in capsys.readouterr().out


def test_decisions_share_the_level() -> None:
    """Of two decisions each is made at 2.5%: a claim between the two bounds stands."""
    both = repeat_epsilon_audit(LEAKS[0], 0.025).epsilon, LEAKS[0].epsilon
    claim = Claim({"add_remove": sum(both) / 2}, 1e-5, "add_remove", "record", None, "t", "sound")
    dp, rows = TargetRecord("dp", "DP", "", claim=claim), (row(LEAKS), attacked())
    benchmark = BenchmarkRecord("b", "", 100, 0, 0)
    result = AuditResult(
        "r",
        "2026",
        "0",
        "",
        {"defense": ["dp"]},
        benchmark,
        (dp,),
        rows,
        {},
        {},
        0,
        methods=methods(),
    )
    alone = judge_gate_rules(result, [parse_gate_rule(RULE)])
    beside = judge_gate_rules(result, [parse_gate_rule(RULE), Rule("recall", 0.05)])
    assert [r.verdict for r in alone] == ["failed"] and [r.verdict for r in beside] == [
        "held",
        "held",
    ]
    assert (alone[0].low, alone[0].limit, alone[0].n) == (
        LEAKS[0].epsilon,
        claim.epsilon["add_remove"],
        1000,
    )


def test_an_edited_bound_fails(tmp_path: Path, capsys: Said) -> None:
    for changed in (
        replace(LEAKS[0], epsilon=0.5),
        replace(LEAKS[0], right=100),
        replace(LEAKS[0], rights=tuple(v // 2 for v in LEAKS[0].rights)),
        replace(LEAKS[0], best=9.0),
    ):
        found = (changed, *LEAKS[1:])
        assert (
            gate(finished(tmp_path / "run", 4.0, row(found)), "--max", "epsilon_lower_bound=claim")
            == 1
        )
        assert "contradicts itself" in " ".join(capsys.readouterr().out.split())
    other = row(
        LEAKS, audits=(replace(LEAKS[0], rights=(940, 490, *LEAKS[0].rights[2:])), *LEAKS[1:])
    )
    assert gate(finished(tmp_path / "run", 4.0, other), "--max", "epsilon_lower_bound=claim") == 1
    capsys.readouterr()


def test_sentences() -> None:
    rule = parse_gate_rule(RULE)
    assert (
        rule.of_claim
        and parse_gate_rule(str(rule))
        == rule
        == parse_gate_limits(["epsilon_lower_bound=claim"])[0]
    )
    with pytest.raises(
        AuditError, match="expected one limit for epsilon_lower_bound, got claim twice"
    ):
        parse_gate_limits(["epsilon_lower_bound=claim"] * 2)
    assert len(parse_gate_limits(["epsilon_lower_bound=claim", "epsilon_lower_bound=8"])) == 2


@pytest.mark.parametrize(
    "bad",
    [
        "recall <= claim",
        "epsilon_lower_bound_shape <= claim",
        "epsilon_lower_bound(count=1) <= claim",
    ],
)
def test_nothing_else_is_held_to_a_claim(bad: str) -> None:
    with pytest.raises(AuditError, match="only epsilon_lower_bound <= claim"):
        parse_gate_rule(bad)
    with pytest.raises(AuditError, match="only epsilon_lower_bound <= claim"):
        parse_gate_rule("epsilon_lower_bound not worse than baseline by claim")
