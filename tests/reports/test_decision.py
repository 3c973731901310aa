"""Terminal, Markdown, JUnit and exit code say the same; names cannot break out of any of them."""

from __future__ import annotations

import csv
import io
import math
import xml.etree.ElementTree as ET
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from auditor.core.nouns import CellKey
from auditor.core.result import Measurement
from auditor.gate.compare import Comparand, Comparison, ComparisonRow
from auditor.gate.rulings import Decision, Ruling, Treatment, Verdict
from auditor.reports import comparison, decision, html, markdown

HOSTILE = "<script>|`*]](x)\x1b[31m\x00\u202e&\"'\ud800\ufffe=1+1\n# x"


def ruling(outcome: Verdict, name: str = "t") -> Ruling:
    return Ruling(
        name,
        "text-only",
        "a",
        "recall",
        0.1,
        0.0,
        0.2,
        outcome,
        f"because {name}",
        f"recall <= 0.1 {name}",
        0.1,
        50,
    )


VERDICTS = st.lists(st.sampled_from(["held", "failed", "inconclusive"]), max_size=4)


@given(VERDICTS, st.sampled_from(["report", "pass", "fail"]))
def test_all_outputs_come_from_one_decision(outcomes: list[Any], reading: Treatment) -> None:
    made = Decision("run", "base", tuple(ruling(o) for o in outcomes), reading)
    bad = (
        any(o == "failed" or (o == "inconclusive" and reading == "fail") for o in outcomes)
        or not outcomes
    )
    unsure = not bad and reading == "report" and "inconclusive" in outcomes
    assert made.exit_code == (1 if bad else 4 if unsure else 0)
    suite = ET.fromstring(decision.render_decision_junit_xml(made))
    counts = {kind: int(suite.get(kind, "")) for kind in ("tests", "failures", "errors", "skipped")}
    assert (counts["failures"] + counts["errors"] > 0) == (made.exit_code != 0)
    assert (counts["failures"] > 0) == (made.exit_code == 1)
    assert counts["tests"] == max(1, len(outcomes)) == len(suite.findall(".//testcase"))
    assert all(len(suite.findall(f".//{tag}")) == counts[f"{tag}s"] for tag in ("failure", "error"))
    said = list(decision.format_ruling_terminal_lines(made))
    assert said[0].startswith("no rule compares with base: ")  # it was given one
    assert said[-1].startswith(f"gate {made.verdict}: ") and len(said) == len(outcomes) + 2
    assert f"gate {made.verdict}: " in decision.render_decision_markdown(made)


@given(VERDICTS, st.sampled_from(["report", "pass", "fail"]))
def test_junit_reasons_are_both_attribute_and_text(outcomes: list[Any], reading: Treatment) -> None:
    """GitHub's readers show the attribute, GitLab's the text of the element."""
    made = Decision("run", "base", tuple(ruling(o) for o in outcomes), reading)
    suite = ET.fromstring(decision.render_decision_junit_xml(made))
    reasons = [reason for case in suite.iter("testcase") for reason in case]
    assert len(reasons) == max(1, len(outcomes))
    for reason in reasons:
        assert reason.text and reason.text in (reason.get("message"), "because t")


def test_a_ruling_without_a_number_says_why() -> None:
    nothing = Ruling(
        "t",
        "",
        "",
        "recall",
        0.1,
        math.nan,
        math.nan,
        "failed",
        "nothing was measured",
        "recall <= 0.1",
    )
    text = decision.render_decision_markdown(Decision("run", "", (nothing,)))
    assert (
        "| t | recall &lt;= 0.1 | – | – | – | – | failed |" in text
        and "nothing was measured" in text
    )


def test_hostile_names_stay_text() -> None:
    made = Decision(
        HOSTILE,
        HOSTILE,
        (ruling("failed", HOSTILE), ruling("inconclusive", HOSTILE), ruling("held", HOSTILE)),
    )
    # a parser takes it, and finds no element of theirs
    suite = ET.fromstring(decision.render_decision_junit_xml(made).encode())
    assert {e.tag for e in suite.iter()} == {
        "testsuites",
        "testsuite",
        "testcase",
        "failure",
        "error",
        "system-out",
    }
    text = decision.render_decision_markdown(made)
    assert (
        "<script>" not in text
        and "\x1b" not in text
        and "\u202e" not in text
        and "\n# x" not in text
    )
    widths = {
        line.count("|") - line.count("\\|") for line in text.splitlines() if line.startswith("|")
    }
    assert widths == {8}
    for line in decision.format_ruling_terminal_lines(made):
        assert line.isprintable()


def share(value: float) -> Measurement:
    return Measurement("recall", value, value - 0.1, value + 0.1, 100)


def compared(name: str) -> Comparison:
    delta = Measurement("recall_difference", -0.2, -0.3, -0.1, 100)
    cells = (Comparand(share(0.4)), Comparand(share(0.2), delta), Comparand(None, reason=name))
    return Comparison(
        (name, "b", "c"),
        "lab: 100 members",
        (ComparisonRow(CellKey(name, "text-only", "a"), "recall", cells, best_run=1),),
    )


def test_a_comparison_in_every_form() -> None:
    made = compared("first")
    document = comparison.build_comparison_document(made)
    for text in (
        markdown.render_markdown_document(document),
        html.render_html_document(document),
        shown(made),
    ):
        flat = " ".join(text.split())
        assert "leaks least" in flat and "−20 points" in flat
    rows = list(csv.DictReader(io.StringIO(comparison.render_comparison_csv(made))))
    assert [(row["run"], row["value"], row["difference"], row["best"]) for row in rows] == [
        ("first", "0.4", "", "0"),
        ("b", "0.2", "-0.2", "1"),
        ("c", "", "", "0"),
    ]


def shown(made: Comparison) -> str:
    console = Console(width=80, record=True, file=io.StringIO())
    for block in comparison.build_terminal_blocks(made):
        console.print(block)
    return console.export_text()


@pytest.mark.parametrize("name", [HOSTILE, "=HYPERLINK(1)", "@x", "-1", "[bold]x"])
def test_hostile_names_in_a_comparison(name: str) -> None:
    made = compared(name)
    document = comparison.build_comparison_document(made)
    page = html.render_html_document(document)
    assert "<script>" not in page and "\x1b" not in page and "default-src 'none'" in page
    assert "<script>" not in markdown.render_markdown_document(document)
    for row in csv.reader(io.StringIO(comparison.render_comparison_csv(made))):
        texts = [*row[:5], row[-1]]
        assert not any(cell.startswith(("=", "+", "-", "@")) for cell in texts)
    assert "\x1b" not in shown(made)
    if name == "[bold]x":
        assert "[bold]x" in shown(made)
