"""The report is short: a bounded number of words and of column heads, and no idle column."""

from __future__ import annotations

import html as escapes
import re
from pathlib import Path
from typing import Any

import pytest

from auditor.core.result import AuditResult
from auditor.reports import html, markdown, phrases
from auditor.reports.blocks import Figures, Group, Table
from auditor.reports.table_of_contents import build_page_document
from tests.reports.conftest import detailed_run
from tests.reports.test_print import lab_of_readme

MOST_WORDS = 2_500
MOST_HEADS = 40


@pytest.fixture(scope="module")
def page(lab: AuditResult) -> str:
    shown = lab_of_readme(lab)
    return html.render_html_report(shown, detailed_run(shown, 480, length=24))


def test_a_run_by_readmes_command_is_read_in_ten_minutes(page: str) -> None:
    text = re.sub(r"<(script|style|title|desc|metadata)\b.*?</\1>", " ", page, flags=re.DOTALL)
    words = escapes.unescape(re.sub(r"<[^>]+>", " ", text)).split()
    assert 1_000 < len(words) <= MOST_WORDS
    heads = re.findall(r'<th scope="col"[^>]*>(.*?)</th>', text, re.DOTALL)
    assert 20 < len(set(heads)) <= MOST_HEADS


def test_columns_of_equal_cells_are_said_once_in_the_caption() -> None:
    rows = (("a", "ethicist", "1", "–"), ("b", "ethicist", "2", "–"))
    table = Table(
        "t", "Title", ("Target", "Attack", "n", "Note"), (Group("", rows),), frozenset({2})
    )
    folded = table.fold_constant_columns()
    assert folded.head == ("Target", "n") and folded.numeric == {1}
    assert folded.groups[0].rows == (("a", "1"), ("b", "2"))
    assert folded.caption == "Title (Attack: ethicist)"
    assert table.fold_constant_columns({"Attack"}).caption == "Title"
    # One row has nothing to compare with, and a cell that spans others hides their columns.
    for kept in (rows[:1], (*rows, ("c", "not applicable"))):
        short = Table("t", "Title", table.head, (Group("", kept),))
        assert short.fold_constant_columns() == short


def test_no_table_of_the_report_has_a_column_of_equal_cells(lab: AuditResult) -> None:
    document = build_page_document(lab, detailed_run(lab, 30, length=4))
    tables = [b for s in document.sections for b in s.blocks if isinstance(b, Table)]
    assert len(tables) > 5
    assert all(table.fold_constant_columns() == table for table in tables)


def test_markdown_says_what_its_open_tables_measure(lab: AuditResult) -> None:
    text = markdown.render_markdown_report(lab)
    assert "\nVerbatim recall, unless a row names another measure" in text
    assert "\nThe effect of each change" in text


def test_each_report_cleans_the_result_once(
    lab: AuditResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    clean, cleaned = phrases.make_result_printable, []
    monkeypatch.setattr(
        phrases, "make_result_printable", lambda result: cleaned.append(result) or clean(result)
    )
    for render in (markdown.render_markdown_report, html.render_html_report):
        cleaned.clear()
        render(lab)
        assert cleaned == [lab]


def test_figures_of_both_accesses_are_described_once(lab: AuditResult) -> None:
    document = build_page_document(lab)
    figures = [
        figure
        for section in document.sections
        for block in section.blocks
        if isinstance(block, Figures)
        for figure in block.figures
    ]
    texts = [figure.description for figure in figures if figure.description]
    assert len(texts) == len(set(texts)) < len(figures)


@pytest.mark.parametrize("width", [500, 1200])
def test_no_line_breaks_inside_an_option(
    browser: Any, page: str, tmp_path: Path, width: int
) -> None:
    path = tmp_path / "report.html"
    path.write_text(page, encoding="utf-8")
    browser.open(path, width)
    # A line of the command is as high as one line, and an option is one box.
    lines = "document.querySelector('#advice pre').textContent.trim().split('\\n').length"
    height = """(() => {
      const code = document.querySelector('#advice pre'), style = getComputedStyle(code);
      const padding = parseFloat(style.paddingTop) + parseFloat(style.paddingBottom);
      return Math.round((code.clientHeight - padding) / parseFloat(style.lineHeight));
    })()"""
    assert browser.evaluate(height) == browser.evaluate(lines) > 2
    broken = (
        "[...document.querySelectorAll('.flag')].filter(f => f.getClientRects().length > 1).length"
    )
    assert browser.evaluate("document.querySelectorAll('#glance .flag').length") > 3
    assert browser.evaluate(broken) == 0
    # On a phone the picture of the signals needs no scrolling to the side.
    wide = "(s => s.scrollWidth > s.clientWidth)(document.querySelector('#glance .scroll'))"
    assert not browser.evaluate(wide)


@pytest.mark.parametrize("width", [390, 700, 1200, 1400])
def test_long_number_does_not_push_results_out_of_the_window(
    browser: Any, page: str, tmp_path: Path, width: int
) -> None:
    path = tmp_path / "report.html"
    path.write_text(page, encoding="utf-8")
    browser.open(path, width)
    note = (
        "membership AUC 0.975 [0.695–1.00] (Min-K%++, best of 11 scores), of records trained on 4"
    )
    browser.evaluate(f"document.querySelector('#signals-table td.number').textContent = '{note}'")
    assert browser.evaluate(
        "(s => s.scrollWidth <= s.clientWidth)(document.querySelector('#glance .scroll'))"
    )
