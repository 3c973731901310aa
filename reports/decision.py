"""Render a gate's `Decision` as terminal lines, Markdown and JUnit XML."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence

from auditor.gate.rulings import Decision, Ruling
from auditor.reports.escaping import escape_for_markdown, make_printable_line
from auditor.reports.phrases import NOTHING, shorten

# Most sentences below the table, and most characters of each; the JUnit file has the rest.
_MOST_SAID = 10
_LONGEST = 300
_WORST = ("failed", "inconclusive", "held")
# The head of a table of rulings, and the indices of its numeric columns.
HEAD = (
    "Row",
    "Rule",
    "Measured",
    "Bounds (one-sided 95%, lower: all rules)",
    "n",
    "Found in at least 95% of cases from",
    "Ruling",
)
NUMERIC = {2, 3, 4, 5}


def format_ruling_terminal_lines(decision: Decision) -> Iterator[str]:
    """Yield lines on a gate: its subject, each rule, and the verdict; names are cleaned."""
    if decision.about:
        yield make_printable_line(decision.about)
    if decision.baseline and not any("baseline" in ruling.rule for ruling in decision.rulings):
        yield make_printable_line(
            f"no rule compares with {decision.baseline}: add --max-increase METRIC=MARGIN"
        )
    for ruling in decision.rulings:
        yield f"{ruling.verdict:12}  {make_printable_line(f'{ruling.cell_title}: {ruling.reason}')}"
    yield make_printable_line(decision.headline)


def render_decision_markdown(decision: Decision) -> str:
    """Return Markdown for a pull request: the verdict, then the rulings, worst first.

    Rows are limited, so that the comment has room for a report; the verdict counts all rulings.
    """
    # Imported here, because the terminal's lines do not need these.
    from auditor.reports.blocks import make_table
    from auditor.reports.markdown import render_truncated_table

    title = _shorten_printable(decision.run) + (
        f" against {_shorten_printable(decision.baseline)}" if decision.baseline else ""
    )
    parts = [f"## Leakage {escape_for_markdown(decision.headline)}", escape_for_markdown(title)]
    parts += [escape_for_markdown(_shorten_printable(decision.about))]
    worst_first = sorted(decision.rulings, key=lambda ruling: _WORST.index(ruling.verdict))
    # The table has no column of reasons, so list the reasons of rulings without numbers.
    rows = []
    reasons = []
    for r in worst_first:
        rows.append(_build_ruling_table_cells(r))
        if not r.n:
            text = _shorten_printable(f"{r.cell_title}: {r.reason}")
            reasons.append(f"- {escape_for_markdown(text)}")
    if rows:
        parts += [render_truncated_table(make_table("gate", "", HEAD, rows, NUMERIC))]
    return "\n\n".join(filter(None, (*parts, *reasons[:_MOST_SAID]))) + "\n"


def _shorten_printable(text: str) -> str:
    return shorten(make_printable_line(text), _LONGEST)


def _build_ruling_table_cells(ruling: Ruling) -> tuple[str, ...]:
    """Return the row of a ruling, with the columns of HEAD."""
    measured = (f"{ruling.value:.4g}", f"{ruling.low:.4f} to {ruling.high:.4f}", f"{ruling.n:,}")
    missed = NOTHING if ruling.missed is None else f"{ruling.missed:.4g}"
    about = (make_printable_line(ruling.cell_title), make_printable_line(ruling.rule))
    return (*about, *(measured if ruling.n else (NOTHING,) * 3), missed, ruling.verdict)


def render_decision_junit_xml(decision: Decision) -> str:
    """Return JUnit XML with a test case per ruling.

    A test case fails or has an error only if the exit code is not 0. An inconclusive ruling is an
    error if it affects the exit code, otherwise a skipped test.
    """
    cases = []
    for ruling in decision.rulings:
        cases.append(_ruling_junit_test_case(decision, ruling))
    # JUnit readers count a suite without cases as passed.
    if not cases:
        cases = [ET.Element("testcase", {"classname": "run", "name": "gate", "time": "0"})]
        nothing = "nothing was judged"
        ET.SubElement(cases[0], "failure", {"type": "failed", "message": nothing}).text = nothing
    return render_junit_xml("audit gate", make_printable_line(decision.run), cases)


def render_junit_xml(program: str, suite: str, cases: Sequence[ET.Element]) -> str:
    """Return JUnit XML of one suite of test cases, with totals."""
    totals = {"tests": str(len(cases))}
    for kind, name in (("failure", "failures"), ("error", "errors"), ("skipped", "skipped")):
        totals[name] = str(sum(case.find(kind) is not None for case in cases))
    root = ET.Element("testsuites", {"name": program, **totals})
    ET.SubElement(root, "testsuite", {"name": suite, **totals}).extend(cases)
    ET.indent(root)
    # The declaration names utf-8 regardless: write the text in that encoding.
    return ET.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _ruling_junit_test_case(decision: Decision, ruling: Ruling) -> ET.Element:
    # XML 1.0 forbids control characters, and ElementTree would write them.
    row, rule, reason = map(make_printable_line, (ruling.cell_title, ruling.rule, ruling.reason))
    case = ET.Element("testcase", {"classname": row, "name": rule, "time": "0"})
    # the reason is both attribute and text: GitHub's readers show the first, GitLab's the second
    if element := {"failed": "failure", "inconclusive": "error"}.get(
        decision.resolve_verdict(ruling)
    ):
        ET.SubElement(case, element, {"type": ruling.verdict, "message": reason}).text = reason
    elif ruling.verdict == "inconclusive":
        passed = f"inconclusive, let pass: {reason}"
        ET.SubElement(case, "skipped", {"message": passed}).text = passed
    else:
        ET.SubElement(case, "system-out").text = reason
    return case
