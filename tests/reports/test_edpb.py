"""Answers for the file: a number of the run or none, and nothing that may not leave the house."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from auditor.cli import run_command_line
from auditor.core.jsonable import from_json, to_json
from auditor.core.plan import Plan
from auditor.core.result import AuditResult
from auditor.gate import decision_log
from auditor.gate.decide import apply_policy, read_run
from auditor.gate.policy import Policy, parse_rule
from auditor.reports import edpb, html, markdown
from auditor.reports.edpb import EdpbEvidence
from tests.gate.world import ROW, finished, outcome

Said = pytest.CaptureFixture[str]
PLANTED = "quokkaberry"
# What a user, a data set or a library may have written into a record. Names of measurements and units are ours.
FREE = {"description", "command", "notes", "note", "not_applicable", "claim_reason", "decoding", "violations", "plan"}
FREE |= {"environment", "timings", "options", "weights", "status", "theorem", "name of the run", "prefix_token"}


def planted(value: Any, name: str = "") -> Any:
    """The record with a planted string in every sentence, and in every key that is a name of something of a user's."""
    if isinstance(value, dict):
        free = name in FREE
        return {f"{PLANTED}{key}" if free else key: planted(item, name if free else key) for key, item in value.items()}
    if isinstance(value, list):
        return [planted(item, name) for item in value]
    return f"{PLANTED} {value}" if isinstance(value, str) and name in FREE else value


def rows(e: EdpbEvidence) -> dict[str, str]:
    """The answers by question."""
    found = re.findall(
        r"^\| [^|]* \| ([^|]*) \| ([^|]*) \| [^|]* \|$",
        markdown.render_markdown_document(edpb.edpb_document(e)),
        re.MULTILINE,
    )
    return {asked: answer.replace("\\", "") for asked, answer in found}


def test_each_question_is_answered_by_the_number_that_the_run_measured(with_probe: AuditResult) -> None:
    answers = rows(EdpbEvidence(with_probe, "0" * 64))
    assert len(answers) >= len(edpb.QUESTIONS)
    (extracted,) = [answer for asked, answer in answers.items() if "extracted directly" in asked]
    assert "Extraction probability, mean 31% [27–35] of 320; of records never trained on" in extracted
    (queried,) = [answer for asked, answer in answers.items() if "obtained by queries" in asked]
    assert "Recall (first guess, verbatim) 166/320 = 52% [46–57]" in queried
    assert "the highest of 4 configurations" in queried
    assert "Ensemble, unmixed" not in " ".join(answers.values())  # a control is nobody's model
    (worst,) = [answer for asked, answer in answers.items() if "every person" in asked]
    assert "at repeat count 16, 64/64 = 100.0%" in worst
    assert "claimed ε 8 (shard), add/remove" in answers["Theoretical resistance to re-identification"]


def test_what_was_not_measured_is_not_evaluated_and_says_what_would(result: AuditResult) -> None:
    answers = rows(EdpbEvidence(replace(result, findings=()), "0" * 64))
    assert answers["Membership inference"] == "Not evaluated: `audit run --attack membership` would."
    assert answers["Model inversion"] == "Not evaluated: no attack or probe of audit measures it."
    measured = {asked for asked, answer in answers.items() if not answer.startswith("Not evaluated")}
    tested = {"Regurgitation of training data", "Theoretical resistance to re-identification"}
    assert measured - {"Question", "---"} == {
        *tested,
        "How, when and on what was it tested, and where are the results?",
    }


def test_one_repeat_count_says_nothing_about_the_worst(result: AuditResult) -> None:
    one = tuple(replace(f, by_repeats={k: m for k, m in f.by_repeats.items() if k == "1"}) for f in result.findings)
    (worst,) = [
        a for asked, a in rows(EdpbEvidence(replace(result, findings=one), "")).items() if "every person" in asked
    ]
    assert worst.startswith("Not evaluated: repeat counts")


def test_nothing_of_the_users_leaves_the_house(with_probe: AuditResult) -> None:
    spoilt: AuditResult = from_json(AuditResult, planted(to_json(with_probe)))
    told = replace(
        spoilt,
        name=PLANTED,
        prefix_token=PLANTED,
        benchmark=replace(
            spoilt.benchmark,
            name=PLANTED,
            digest="a" * 64 + "-c5",
            greedy_recall={**spoilt.benchmark.greedy_recall, PLANTED: spoilt.benchmark.greedy_recall["1"]},
        ),
        findings=tuple(
            replace(f, by_repeats={**f.by_repeats, PLANTED: f.main}, by_kind={PLANTED: f.main}) if f.main else f
            for f in spoilt.findings
        ),
        weights={f"/home/{PLANTED}/model.safetensors": "b" * 64},
    )
    assert PLANTED in json.dumps(to_json(told))
    document = edpb.edpb_document(EdpbEvidence(told, "0" * 64))
    for text in (markdown.render_markdown_document(document), html.render_html_document(document)):
        assert PLANTED not in text and "-c5" not in text and "a" * 64 in text


def test_the_command_writes_it_beside_the_reports(tmp_path: Path, capsys: Said) -> None:
    plan = Plan.from_fields(attack=(ROW.attack,), setting="white-box", model=PLANTED, data=PLANTED).to_json()
    finished(tmp_path, outcome(out=200), name=PLANTED, plan=plan)
    decision_log.save_decision(tmp_path, apply_policy(read_run(tmp_path), Policy((parse_rule("recall <= 0.1"),))))
    assert run_command_line(["report", str(tmp_path), "--format", "edpb"]) == 0
    assert capsys.readouterr().out.splitlines() == [str(tmp_path / "edpb.md"), str(tmp_path / "edpb.html")]
    for path in (tmp_path / "edpb.md", tmp_path / "edpb.html"):
        text = path.read_text()
        assert "not legal advice" in text and PLANTED not in text and path.stat().st_mode & 0o777 == 0o600
    assert "Gate failed, decided 2" in (tmp_path / "edpb.md").read_text().replace("\\", "")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--format", "gdpr"], "expected --format edpb, got 'gdpr'"),
        (["--format", "edpb", "--reveal"], "give no --baseline, --markdown or --reveal with it"),
        (
            ["--format", "edpb"],
            "the result contradicts itself (undefended, text-only, attack ethicist: the row stands there 2 times",
        ),
    ],
)
def test_what_cannot_be_evidence_is_refused(
    result: AuditResult, tmp_path: Path, capsys: Said, given: list[str], said: str
) -> None:
    twice = replace(result, findings=(*result.findings, result.findings[0]))
    (tmp_path / "result.json").write_text(json.dumps(to_json(twice)))
    assert run_command_line(["report", str(tmp_path), *given]) == 2
    assert said in capsys.readouterr().err and [path.name for path in tmp_path.iterdir()] == ["result.json"]
