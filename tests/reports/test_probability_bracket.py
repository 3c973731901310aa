"""The section about floors and ceilings: there where it was asked for, each number under what it is
a number of."""

from __future__ import annotations

from dataclasses import replace

from auditor.core.result import AuditResult, Finding, Measurement
from auditor.reports.blocks import Paragraph, Table
from auditor.reports.table_of_contents import build_page_document
from tests.reports.conftest import finding, share

MEANS = {
    "extraction_probability": (0.11, 0.0),
    "near_verbatim_probability": (0.14, 0.007),
    "rank_bound": (0.19, 0.001),
    "window_bound_8": (0.28, 0.01),
    "greedy_windows_8": (0.22, 0.02),
}
SHARES = {
    "extraction": (68, 0),
    "near_verbatim": (100, 15),
    "rank_bound": (83, 1),
    "window_bound_8": (181, 38),
}


def bracketed(**options: object) -> Finding:
    means = [
        Measurement(name + end, value, max(0.0, value - 0.05), value + 0.05, 300, "probability")
        for name, both in MEANS.items()
        for end, value in zip(("", "_nonmembers"), both, strict=True)
    ]
    shares = [
        share(f"{name}_1_in_1000{end}", hits, n)
        for name, both in SHARES.items()
        for end, hits, n in zip(("", "_nonmembers"), both, (300, 100), strict=True)
    ]
    row = replace(
        finding("undefended", "white-box", "ethicist"),
        attack="extraction-probability",
        curve=(),
        drawn=0,
    )
    return replace(
        row,
        options={**options, "near_distance": 5, "windows": "8", "one_in": 1000},
        measurements=(*means, *shares),
    )


def test_each_number_stands_under_what_it_is_a_number_of(result: AuditResult) -> None:
    shown = build_page_document(
        replace(result, findings=(*result.findings, bracketed(bracket=True)))
    )
    (section,) = (s for s in shown.sections if s.id == "bracket")
    said, table, note = section.blocks
    assert isinstance(said, Paragraph) and isinstance(table, Table) and isinstance(note, Paragraph)
    assert (
        "at most 19% [14–24] on average (non-members: 0.1% [0.0–5.1]); for all but 83/300 (28% "
        "[23–33])" in said.text
    )
    rows = {row[0]: row[1:] for row in table.groups[0].rows}
    assert rows["the suffix, whatever the decoding, at most"][2:] == (
        "83/300 (28% [23–33])",
        "1/100 (1.0% [0.0–5.4])",
    )
    assert rows["within 5 token edits of it, at least"][:2] == ("14% [9–19]", "0.7% [0.0–5.7]")
    assert rows["the suffix, exactly"][2] == "68/300 (23% [18–28])"
    assert (
        rows["its most likely window of 8 tokens, whatever the decoding, at most"][0]
        == "28% [23–33]"
    )
    assert rows["share of its windows of 8 tokens that greedy decoding gives"][2:] == ("–", "–")
    assert "nothing about samples near the suffix" in note.text


def test_a_row_that_was_not_asked_for_it_has_no_section(result: AuditResult) -> None:
    shown = build_page_document(
        replace(result, findings=(*result.findings, bracketed(bracket=False)))
    )
    assert "bracket" not in {section.id for section in shown.sections}
