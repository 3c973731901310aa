"""Answers for the file: a number of the run or none, and nothing that may not leave the house."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from auditor.conclusions.leak_kinds import widen_leak_measurement
from auditor.conclusions.leak_readings import KINDS, PERSONAL
from auditor.conclusions.outcomes import read_run_outcomes
from auditor.conclusions.signals import NOT_TESTED, assess_leak_signals
from auditor.core.jsonable import from_json, to_json
from auditor.core.nouns import UNDEFENDED
from auditor.core.plan import Plan
from auditor.core.result import AuditResult, Doubt, Finding, Measurement, RecordCounts
from auditor.gate import decision_log
from auditor.gate.decide import apply_gate_policy
from auditor.gate.policy import Policy, parse_gate_rule
from auditor.reports import edpb, html, markdown, personal, phrases
from auditor.reports.edpb import EdpbEvidence
from auditor.statistics.intervals import clopper_pearson
from tests.conftest import check_command
from tests.gate.finished_runs import ROW, finished, outcome

Said = pytest.CaptureFixture[str]
PLANTED = "quokkaberry"
OTHER = "other personal data"
# What a user, a data set or a library may have written into a record. Names of measurements and
# units are ours.
FREE = {
    "description",
    "command",
    "notes",
    "note",
    "not_applicable",
    "claim_reason",
    "decoding",
    "violations",
    "plan",
}
FREE |= {
    "environment",
    "timings",
    "options",
    "weights",
    "status",
    "theorem",
    "name of the run",
    "prefix_token",
}


def planted(value: Any, name: str = "") -> Any:
    """The record with a planted string in every sentence, and in every key that is a name of
    something of a user's."""
    if isinstance(value, dict):
        free = name in FREE
        return {
            f"{PLANTED}{key}" if free else key: planted(item, name if free else key)
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [planted(item, name) for item in value]
    return f"{PLANTED} {value}" if isinstance(value, str) and name in FREE else value


def rows(e: EdpbEvidence) -> dict[str, str]:
    """The answers by question."""
    found = re.findall(
        r"^\| [^|]* \| ([^|]*) \| ([^|]*) \| [^|]* \|$",
        markdown.render_markdown_document(edpb.build_edpb_document(e)).partition("| Signal |")[0]
        + "\n## "
        + markdown.render_markdown_document(edpb.build_edpb_document(e))
        .partition("| Signal |")[2]
        .partition("\n## ")[2],
        re.MULTILINE,
    )
    return {asked: answer.replace("\\", "") for asked, answer in found}


def test_each_question_is_answered_by_the_number_that_the_run_measured(
    with_probe: AuditResult,
) -> None:
    answers = rows(EdpbEvidence(with_probe, "0" * 64))
    assert len(answers) >= len(edpb.list_edpb_questions())
    (extracted,) = [answer for asked, answer in answers.items() if "extracted directly" in asked]
    assert "Extraction probability, mean 31% [27–35] of 320; records never trained on:" in extracted
    (queried,) = [answer for asked, answer in answers.items() if "obtained by queries" in asked]
    assert "Recall (first guess, verbatim) 166/320 = 52% [46–57]" in queried
    assert "the highest of 4 configurations" in queried
    assert "Ensemble, unmixed" not in " ".join(answers.values())  # a control is nobody's model
    (worst,) = [answer for asked, answer in answers.items() if "every person" in asked]
    assert "records with 16 copies: recall (first guess, verbatim) 64/64 = 100.0%" in worst
    assert (
        "claimed ε 8 (shard), add/remove" in answers["Theoretical resistance to re-identification"]
    )


def test_what_was_not_measured_is_not_evaluated_and_says_what_would(result: AuditResult) -> None:
    answers = rows(EdpbEvidence(replace(result, findings=()), "0" * 64))
    assert (
        answers["Membership inference"]
        == "Not evaluated: `audit run --attack membership` would answer it."
    )
    assert answers["Model inversion"] == "Not evaluated: no attack or probe of audit measures it."
    measured = {
        asked for asked, answer in answers.items() if not answer.startswith("Not evaluated")
    }
    tested = {"Regurgitation of training data", "Theoretical resistance to re-identification"}
    assert measured - {"Question", "---"} == {
        *tested,
        "How, when and on what was it tested, and where are the results?",
    }


def test_one_repeat_count_says_nothing_about_the_worst(result: AuditResult) -> None:
    one = tuple(
        replace(f, by_repeats={k: m for k, m in f.by_repeats.items() if k == "1"})
        for f in result.findings
    )
    (worst,) = [
        a
        for asked, a in rows(EdpbEvidence(replace(result, findings=one), "")).items()
        if "every person" in asked
    ]
    assert worst.startswith("Not evaluated: numbers of copies")


@pytest.mark.parametrize(
    "counts",
    [
        {"1": (3, 3), "4": (1, 40), "16": (40, 40)},
        {"1": (3, 3), "16": (40, 40), "32": (1, 2)},
        {"16": (40, 40), "32": (1, 1), "64": (0, 0)},
    ],
    ids=str,
)
def test_the_worst_repeat_count_is_the_one_whose_corrected_interval_begins_highest(
    result: AuditResult, counts: dict[str, tuple[int, int]]
) -> None:
    """1 of 1 would be the worst by its share; it says less than 40 of 40."""
    by_repeats = {
        n: Measurement("recall", hits / of if of else math.nan, *clopper_pearson(hits, of), of)
        for n, (hits, of) in counts.items()
    }
    row = replace(result.findings[0], by_repeats=by_repeats)
    answers = rows(EdpbEvidence(replace(result, findings=(row,)), ""))
    (worst,) = [answer for asked, answer in answers.items() if "every person" in asked]
    corrected = widen_leak_measurement(by_repeats["16"], 3)
    assert (
        "records with 16 copies: recall (first guess, verbatim) 40/40 = 100.0% "
        f"{phrases.format_interval(corrected)}." in worst
    )
    assert corrected.low < by_repeats["16"].low


def test_a_kind_that_the_data_mark_is_measured_in_the_answers_as_in_the_signals(
    result: AuditResult,
) -> None:
    marked = {"hospitalbed": Measurement("recall", 0.25, *clopper_pearson(10, 40), 40)}
    row = replace(result.findings[0], by_kind=marked)
    evidence = EdpbEvidence(replace(result, findings=(row,)), "")
    answer = rows(evidence)["Likelihood of the risk, by kind of personal data"]
    assert "other personal data 10/40 (25%" in answer and "hospitalbed" not in answer
    text = markdown.render_markdown_document(edpb.build_edpb_document(evidence)).replace("\\", "")
    assert (
        text.count("other personal data 10/40") == text.count("Other personal data, ") == 1
        and "hospitalbed" not in text.split("## Leaks shown")[1]
    )


@pytest.mark.parametrize("kind", [*personal.TITLES, "hospitalbed"])
@pytest.mark.parametrize("target", [UNDEFENDED, "pmixed"])
@pytest.mark.parametrize("hits", [0, 10])
def test_a_kind_of_personal_data_is_measured_in_all_tables_or_in_none(
    result: AuditResult, kind: str, target: str, hits: int
) -> None:
    share = Measurement("recall", hits / 40, *clopper_pearson(hits, 40), 40)
    bare = [replace(f, by_kind={}, by_kind_nonmembers={}) for f in result.findings]
    for findings, is_measured in ((bare, False), (_measured_on(bare, target, kind, share), True)):
        page = edpb.build_edpb_document(EdpbEvidence(replace(result, findings=tuple(findings)), ""))
        text = markdown.render_markdown_document(page).replace("\\", "")
        signals_part, scope, questions = re.split("## What is in scope|## EDPB Opinion", text)
        said = personal.format_personal_kind(kind if kind in personal.TITLES else OTHER)
        in_table = rf"\| {said[0].upper()}{said[1:]}, [^|]*\| {hits}/40"
        assert bool(re.search(in_table, signals_part)) == is_measured
        assert (f"{said} {hits}/40" in questions) == is_measured
        asked = "Likelihood of the risk, by kind of personal data"
        assert (f"| 35(7)(c) | {asked} |" in scope) == is_measured
        (answer,) = [line for line in questions.split("\n") if asked in line]
        assert ("Not evaluated" not in answer) == is_measured


def _measured_on(
    findings: list[Finding], target: str, kind: str, share: Measurement
) -> list[Finding]:
    first = next(i for i, finding in enumerate(findings) if finding.target == target)
    return [
        replace(finding, by_kind={kind: share}) if i == first else finding
        for i, finding in enumerate(findings)
    ]


@pytest.mark.parametrize(
    ("kind", "metric"), [(kind.name, metric) for kind in KINDS for metric, _ in kind.limits]
)
def test_a_kind_of_leakage_that_a_signal_measures_answers_a_question(
    result: AuditResult, kind: str, metric: str
) -> None:
    """Untargeted extraction and violated claims were signals, and in no answer."""
    measured = Measurement(metric, 0.5, 0.25, 0.75, 40)
    row = replace(result.findings[0], by_repeats={}, by_kind={}, strata=())
    row = replace(row, by_kind={"email": measured}) if kind == PERSONAL.name else row
    row = replace(row, measurements=(measured,))
    data = replace(result.benchmark, greedy_recall={})
    told = replace(result, findings=(row,), benchmark=data)
    tested = {s.kind.name for s in assess_leak_signals(told).signals if s.status != NOT_TESTED}
    assert kind in tested
    label = phrases.format_metric(metric)
    answers = rows(EdpbEvidence(told, ""))
    assert any(label in answer or "e-mail addresses" in answer for answer in answers.values())


def test_the_top_says_model_day_records_attacker_result_and_doubt(result: AuditResult) -> None:
    doubt = Doubt("answers", "Of 40 answers 3 did not come through.")
    data = replace(
        result.benchmark,
        name="own",
        doubts=(doubt,),
        records={"members": RecordCounts(330, 320, left_out={"too short": 10})},
    )
    tuned = replace(result, plan={"model": "/home/anna/out/tuned"}, base="org/base", benchmark=data)
    page = edpb.build_edpb_document(EdpbEvidence(tuned, ""))
    assert page.title.endswith("of out/tuned (adapter on org/base), tested 21 November 2025")
    assert (
        "320 of 330 records audited (10 too short)." in page.headline
        and "leakage is shown" in page.headline
    )
    assert page.verdict.startswith(
        "Attacker: somebody who has the model's files and the first words of a record"
    )
    n_measured, n_controller, n_untested = map(
        int, re.findall(r"(\d+) (?:have|are for|were not)", page.verdict)
    )
    assert (
        n_measured + n_controller + n_untested == len(edpb.list_edpb_questions())
        and n_controller == 4
    )
    text = markdown.render_markdown_document(page)
    assert doubt.sentence in text and "| ¶58 (f) | nothing |" in text


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
            greedy_recall={
                **spoilt.benchmark.greedy_recall,
                PLANTED: spoilt.benchmark.greedy_recall["1"],
            },
        ),
        findings=tuple(
            replace(f, by_repeats={**f.by_repeats, PLANTED: f.main}, by_kind={PLANTED: f.main})
            if f.main
            else f
            for f in spoilt.findings
        ),
        weights={f"/home/{PLANTED}/model.safetensors": "b" * 64},
    )
    assert PLANTED in json.dumps(to_json(told))
    document = edpb.build_edpb_document(EdpbEvidence(told, "0" * 64))
    for text in (markdown.render_markdown_document(document), html.render_html_document(document)):
        assert PLANTED not in text and "-c5" not in text and "a" * 64 in text


def test_the_command_writes_it_beside_the_reports(tmp_path: Path, capsys: Said) -> None:
    plan = Plan.from_fields(
        attack=(ROW.attack,), setting="white-box", model="out/tuned", data=PLANTED
    ).to_json()
    finished(tmp_path, outcome(out=200), name=PLANTED, plan=plan)
    decision_log.save_decision(
        tmp_path,
        apply_gate_policy(read_run_outcomes(tmp_path), Policy((parse_gate_rule("recall <= 0.1"),))),
    )
    check_command("report", tmp_path, "--format", "edpb")
    assert capsys.readouterr().out.splitlines() == [
        str(tmp_path / "edpb.md"),
        str(tmp_path / "edpb.html"),
    ]
    for path in (tmp_path / "edpb.md", tmp_path / "edpb.html"):
        text = path.read_text()
        assert (
            "not legal advice" in text
            and "assessment of out/tuned, tested" in text
            and PLANTED not in text
            and path.stat().st_mode & 0o777 == 0o600
        )
    assert "Gate failed, decided 2" in (tmp_path / "edpb.md").read_text().replace("\\", "")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--format", "gdpr"], "expected --format edpb, got 'gdpr'"),
        (["--format", "edpb", "--reveal"], "it takes no --baseline, --markdown or --reveal"),
        (
            ["--format", "edpb"],
            "the result contradicts itself (undefended, text-only, attack ethicist: the result "
            "lists it 2 times",
        ),
    ],
)
def test_what_cannot_be_evidence_is_refused(
    result: AuditResult, tmp_path: Path, capsys: Said, given: list[str], said: str
) -> None:
    twice = replace(result, findings=(*result.findings, result.findings[0]))
    (tmp_path / "result.json").write_text(json.dumps(to_json(twice)))
    check_command("report", tmp_path, *given, code=2)
    assert said in capsys.readouterr().err and [path.name for path in tmp_path.iterdir()] == [
        "result.json"
    ]


def test_the_officer_reads_the_number_that_decided(result: AuditResult) -> None:
    """The page said "membership is shown" and gave only the AUC of all records, which was not what
    showed it."""
    row = next(f for f in result.findings if f.target == "undefended" and f.setting == "white-box")

    def auc(value: float, low: float, high: float) -> Measurement:
        return Measurement("membership_auc", value, low, high, 69, "AUC", "loss, best of 10 scores")

    groups = {"1": auc(0.58, 0.40, 0.75), "8": auc(0.954, 0.768, 1.0)}
    found = replace(
        row,
        attack="membership",
        measurements=(auc(0.61, 0.48, 0.74),),
        by_repeats=groups,
        scores_tried=10,
        strata=(),
    )
    counts = {
        "members": RecordCounts(given=234, audited=33),
        "nonmembers": RecordCounts(given=150, audited=33),
    }
    benchmark = replace(result.benchmark, members=52, nonmembers=33, records=counts)
    answers = rows(EdpbEvidence(replace(result, findings=(found,), benchmark=benchmark), "0" * 64))
    told = answers["Membership inference"]
    assert "Membership AUC 0.610 [0.480–0.740] of 69" in told
    assert (
        "membership AUC 0.954 [0.768–1.00] (loss, best of 10 scores), of records trained on 8 times"
        in told
    )
    assert (
        "33 members (52 parts) and 33 non-members attacked"
        in answers["What was tested: scope, quantity and quality?"]
    )


def test_the_worst_repeat_count_of_several_attacks_is_the_worst_of_all(
    result: AuditResult,
) -> None:
    first, second = (
        {n: Measurement("recall", hits / 40, *clopper_pearson(hits, 40), 40) for n, hits in of}
        for of in ((("1", 2), ("8", 9)), (("1", 0), ("8", 38)))
    )
    two = [f for f in result.findings if f.target == "undefended" and f.by_repeats][:2]
    found = (replace(two[0], by_repeats=first), replace(two[1], by_repeats=second))
    answers = rows(EdpbEvidence(replace(result, findings=found), ""))
    (worst,) = [answer for asked, answer in answers.items() if "every person" in asked]
    assert "records with 8 copies" in worst and "38/40" in worst


def test_of_membership_only_the_repeat_count_is_by_its_auc(result: AuditResult) -> None:
    """The page said that repeat counts in the data would answer, which the data had."""
    groups = {
        n: Measurement("membership_auc", value, value - 0.1, value + 0.05, 30, "AUC")
        for n, value in (("1", 0.6), ("8", 0.9), ("16", 0.7), ("some name", 0.95))
    }
    row = replace(result.findings[0], attack="membership", by_repeats=groups, strata=())
    answers = rows(EdpbEvidence(replace(result, findings=(row,)), ""))
    (worst,) = [answer for asked, answer in answers.items() if "every person" in asked]
    assert "records with 8 copies: membership AUC 0.900" in worst and "of 30" in worst


def test_of_repeat_counts_without_a_hit_the_one_that_leaves_most_open_is_told(
    result: AuditResult,
) -> None:
    """0/27 of single records was told as the worst, beside 0/12 of those in 8 copies."""
    groups = {
        n: Measurement("recall", 0.0, *clopper_pearson(0, size), size)
        for n, size in (("1", 27), ("8", 12))
    }
    row = replace(result.findings[0], by_repeats=groups)
    answers = rows(EdpbEvidence(replace(result, findings=(row,)), ""))
    assert "records with 8 copies: recall (first guess, verbatim) 0/12" in next(
        answer for asked, answer in answers.items() if "every person" in asked
    )
