"""A gate works every number out of the record of each secret: one that stands in `result.json`
alone holds nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from auditor.cli import run_command_line
from auditor.conclusions.outcomes import ValuesBySecret, read_run_outcomes
from auditor.core.jsonable import to_json
from auditor.core.result import Measurement, StoppedEarly
from auditor.gate.decide import judge_gate_rules
from auditor.gate.policy import Rule
from auditor.records.table import TABLE
from auditor.statistics.intervals import compute_mean_probability
from auditor.statistics.judging import Outcome
from tests.conftest import check_command
from tests.gate.finished_runs import ROW, edit, finished, outcome
from tests.rows import read_rows

Said = pytest.CaptureFixture[str]
LEAKY = outcome(out=120)
# 100 of 200 were extracted
EMAILS = [float(i < 100) if i < 200 else float("nan") for i in range(len(LEAKY.ids))]


def first(result: Any) -> Any:
    return result["findings"][0]


def forged(name: str, n: int) -> dict[str, Any]:
    return {
        "name": name,
        "value": 0.0,
        "low": 0.0,
        "high": 0.001,
        "n": n,
        "unit": "share",
        "note": "",
    }


def no_row_and_any_number(run: Path) -> None:
    edit(run, TABLE, lambda rows: rows.clear())
    edit(
        run,
        "result.json",
        lambda result: first(result).update(measurements=[forged("recall", 9999)], by_kind={}),
    )


def a_row_fewer(run: Path) -> None:
    """Of the attack that extracted something; another one, which extracted nothing, stays."""
    for name in (TABLE, "result.json"):
        edit(
            run,
            name,
            lambda value: (
                value.pop(str(ROW), None) if "findings" not in value else value["findings"].clear()
            ),
        )
    fine = finished(run.parent / "fine", outcome())
    edit(run, "result.json", lambda result: result["plan"].update(attack=["perplexity", "zlib"]))
    kept = read_rows(fine)[str(ROW)]
    row = {**first(json.loads((fine / "result.json").read_text())), "attack": "zlib"}
    edit(run, TABLE, lambda rows: rows.update({"undefended/white-box/zlib": kept}))
    edit(run, "result.json", lambda result: result["findings"].append(row))


def an_invented_kind(run: Path) -> None:
    edit(
        run,
        "result.json",
        lambda result: first(result)["by_kind"].update(phone=forged("recall", 5000)),
    )


def another_number_of_a_kind(run: Path) -> None:
    edit(
        run,
        "result.json",
        lambda result: first(result)["by_kind"].update(email=forged("recall", 200)),
    )


def a_row_that_nobody_reports(run: Path) -> None:
    edit(run, TABLE, lambda rows: rows.update({"undefended/white-box/zlib": rows[str(ROW)]}))


def rewritten(run: Path, found: Outcome) -> None:
    """Of other secrets, the result and the outcomes both: they agree with each other."""
    other = finished(run.parent / "other", found)
    for name in ("result.json", TABLE):
        (run / name).write_bytes((other / name).read_bytes())


def twenty_times_the_secrets(run: Path) -> None:
    """Each once more under other names, so that 0 of 32 becomes 0 of 640."""
    few = outcome(32)
    finished(run, few)
    rewritten(run, outcome(640))


def without_the_extracted(run: Path) -> None:
    rewritten(run, LEAKY.select_secrets(~LEAKY.hit))


def extracted_members_as_strangers(run: Path) -> None:
    """Whoever was extracted was in the data by chance, says the edit."""
    rewritten(run, replace(LEAKY, member=LEAKY.member & ~LEAKY.hit))


def extracted_once_as_often(run: Path) -> None:
    often = tuple(16 if hit else count for hit, count in zip(LEAKY.hit, LEAKY.repeats, strict=True))
    rewritten(run, replace(LEAKY, repeats=often))


def other_counts(run: Path) -> None:
    edit(run, "result.json", lambda result: result["benchmark"].update(members=4000))


def a_plan_of_less(run: Path) -> None:
    """The run was of two attacks; the result speaks of one."""
    edit(run, "plan.json", lambda plan: plan.update(attack=["perplexity", "zlib"]))


def not_applicable_after_all(run: Path) -> None:
    edit(run, TABLE, lambda rows: rows.clear())
    nothing = {"measurements": [], "by_repeats": {}, "by_kind": {}, "not_applicable": "the budget"}
    edit(run, "result.json", lambda result: first(result).update(nothing))


def answers_that_nobody_gave(run: Path) -> None:
    (run / "guesses.jsonl").unlink()


EDITS: dict[Callable[[Path], None], str] = {
    no_row_and_any_number: "secrets.parquet lacks the values that they summarise",
    a_row_fewer: "the plan requests it, but the result does not have it",
    an_invented_kind: "recall(kind=phone) is of 5000 secrets, secrets.parquet contains 0",
    another_number_of_a_kind: "recall(kind=email) is 0, secrets.parquet makes it 0.5",
    a_row_that_nobody_reports: "secrets.parquet contains this configuration, but the result does "
    "not",
    twenty_times_the_secrets: "secrets.parquet contains 608 secrets without an answer in guesses.jsonl",  # noqa: E501
    without_the_extracted: "guesses.jsonl contains answers about 120 secrets that secrets.parquet "
    "leaves out",
    extracted_members_as_strangers: "120 secrets secrets.parquet disagrees with secrets.json",
    extracted_once_as_often: "60 secrets secrets.parquet disagrees with secrets.json",
    other_counts: "it is about 4000 members, but secrets.json contains 400",
    a_plan_of_less: "its plan has another attack than plan.json",
    not_applicable_after_all: "it was not applicable, but guesses.jsonl has answers about members",
    answers_that_nobody_gave: "secrets.parquet contains 460 secrets without an answer in guesses.jsonl",  # noqa: E501
}


@pytest.mark.parametrize("change", EDITS, ids=lambda change: change.__name__)
def test_an_edited_record_does_not_hold(
    change: Callable[[Path], None], tmp_path: Path, capsys: Said
) -> None:
    run = finished(tmp_path / "run", LEAKY, kinds={"email": EMAILS})
    check_command("gate", run, "--max", "recall=0.9", "--max", "recall(kind=email)=0.9")
    change(run)
    capsys.readouterr()
    assert run_command_line(
        ["gate", str(run), "--max", "recall=0.9", "--inconclusive", "pass"]
    ) in (1, 2)
    said = capsys.readouterr()
    assert EDITS[change] in said.out + said.err


def test_the_bounds_are_those_of_the_secrets(tmp_path: Path) -> None:
    """Whatever bounds stand beside the right value."""
    run = read_run_outcomes(finished(tmp_path / "run", LEAKY))
    (finding,) = run.result.findings
    told = replace(finding.measurement("recall_at_100_errors"), low=0.0, high=0.01)  # type: ignore[type-var]
    edited = replace(
        run.result, findings=(replace(finding, measurements=(finding.measurements[0], told)),)
    )
    (ruling,) = judge_gate_rules(edited, [Rule("recall_at_100_errors", 0.02)], run.outcomes)
    assert ruling.verdict == "failed" and ruling.low > 0.02


def test_near_verbatim_recall_by_count_is_judged_on_its_own_numbers(tmp_path: Path) -> None:
    """Not on recall's, the only ones that the result has by count."""
    # of the members with 16 copies every guess is near
    near = np.where(np.arange(len(LEAKY.ids)) % 2 == 1, 1, 9)
    columns = {**outcome().columns, "distance": near}
    run = read_run_outcomes(finished(tmp_path / "run", replace(outcome(), columns=columns)))
    rules = [Rule("near_verbatim_recall", 0.1, count=count) for count in (16, 1)]
    assert [r.verdict for r in judge_gate_rules(run.result, rules, run.outcomes)] == [
        "failed",
        "held",
    ]
    assert [r.n for r in judge_gate_rules(run.result, rules, run.outcomes)] == [200, 200]
    rules = [Rule("recall", 0.1, count=count) for count in (16, 1)]
    assert [r.verdict for r in judge_gate_rules(run.result, rules, run.outcomes)] == [
        "held",
        "held",
    ]
    assert [
        r.verdict
        for r in judge_gate_rules(
            run.result, [Rule("near_verbatim_recall", 0.1, count=4)], run.outcomes
        )
    ] == ["failed"]


def test_what_no_secret_has_a_part_of_is_never_held(tmp_path: Path) -> None:
    """A plug-in's number that keeps nothing of each secret: broken it fails, but nobody can show
    that it holds."""
    run = read_run_outcomes(finished(tmp_path / "run"))
    (finding,) = run.result.findings
    theirs = Measurement("theirs", 0.2, 0.1, 0.3, 400)
    told = replace(
        run.result, findings=(replace(finding, measurements=(*finding.measurements, theirs)),)
    )
    held, failed = judge_gate_rules(told, [Rule("theirs", 0.4), Rule("theirs", 0.05)], run.outcomes)
    assert (held.verdict, held.unmeasured, failed.verdict) == ("inconclusive", True, "failed")
    assert "it cannot be recomputed" in held.reason


def test_a_probe_is_worked_out_again_with_its_interval() -> None:
    """As `extraction_probability` and what is left of it above the non-members are measured."""
    p = np.random.default_rng(0).random(60) ** 4
    member = np.arange(60) < 40
    kept = ValuesBySecret(
        tuple(map(str, range(60))), member, (None,) * 60, {"extraction_probability": p}
    )
    own = compute_mean_probability("extraction_probability", p[member])
    assert kept.remeasure_metric("extraction_probability") == own
    assert kept.remeasure_metric("extraction_probability_nonmembers") == compute_mean_probability(
        "extraction_probability_nonmembers", p[~member]
    )
    excess = kept.remeasure_metric("excess_extraction_probability")
    assert (
        excess is not None
        and excess.n == 60
        and excess.value == pytest.approx(p[member].mean() - p[~member].mean())
    )
    assert kept.remeasure_metric("window_bound_8") is None


def test_a_row_that_was_looked_at_as_it_ran_has_bounds_for_every_look(tmp_path: Path) -> None:
    """Stopped when it looked right, it is judged by bounds that hold whenever it stops; no other
    row is."""
    folder = finished(tmp_path / "run")
    assert not any(row.anytime for row in read_run_outcomes(folder).outcomes.values())
    stopped = to_json(StoppedEarly(60, 400, "recall <= 0.05: held"))
    edit(folder, "result.json", lambda result: result["findings"][0].update(stopped=stopped))
    assert all(row.anytime for row in read_run_outcomes(folder).outcomes.values())
