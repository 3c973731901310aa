"""The report on paper: two pages for whoever decides, then the annex; no page nearly empty, nothing
cut off."""

from __future__ import annotations

import base64
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pypdfium2
import pytest
from numpy.typing import NDArray

from auditor.conclusions.secret_details import SecretDetails
from auditor.core.result import AuditResult
from auditor.reports import html
from tests.reports.conftest import detailed_run

Printed = tuple[str, NDArray[np.uint8]]
PAPER = {"Letter": (8.5, 11.0), "A4": (8.27, 11.69)}  # inches
MOST = 8  # pages of the lab's run by README's command
# dots, 72 an inch, that a page keeps white on the left and on the right
MARGIN = round(13 / 25.4 * 72) - 3


def lab_of_readme(result: AuditResult) -> AuditResult:
    """Its configurations: one attack on the undefended model and PMixED at both accesses, and a
    control at one."""
    kept = {
        ("undefended", "text-only"),
        ("undefended", "white-box"),
        ("pmixed", "text-only"),
        ("pmixed", "white-box"),
    }
    kept.add(("ensemble-unmixed", "white-box"))
    findings = tuple(
        f for f in result.findings if f.attack == "ethicist" and (f.target, f.setting) in kept
    )
    return replace(result, findings=findings, targets=result.targets[:3])


def on_paper(browser: Any, page: Path, paper: str) -> list[Printed]:
    """Each page's text, and its picture in grey."""
    browser.open(page, 1440)
    width, height = PAPER[paper]
    asked = {"paperWidth": width, "paperHeight": height, "printBackground": False}
    pdf = base64.b64decode(
        browser.call("Page.printToPDF", transferMode="ReturnAsBase64", **asked)["data"]
    )
    document = pypdfium2.PdfDocument(pdf)
    return [
        (_text(one), one.render(scale=1.0, grayscale=True).to_numpy().squeeze()) for one in document
    ]


def _text(page: pypdfium2.PdfPage) -> str:
    return " ".join(page.get_textpage().get_text_bounded().split())


@pytest.fixture(params=PAPER, scope="module")
def printed(
    request: pytest.FixtureRequest,
    browser: Any,
    lab: AuditResult,
    tmp_path_factory: pytest.TempPathFactory,
) -> list[Printed]:
    page, shown = tmp_path_factory.mktemp("printed") / "report.html", lab_of_readme(lab)
    page.write_text(
        html.render_html_report(shown, detailed_run(shown, 480, length=24)), encoding="utf-8"
    )
    return on_paper(browser, page, request.param)


def test_at_most_two_pages_for_the_decision_then_the_annex(printed: list[Printed]) -> None:
    texts = [text for text, _ in printed]
    assert len(texts) <= MOST
    assert (
        texts[0].startswith("Privacy audit of")
        and "HIGH" in texts[0]
        and "What to do now" in texts[0]
    )
    (annex,) = (i for i, text in enumerate(texts) if "Where it leaks" in text)
    assert 1 <= annex <= 2 and texts[annex].startswith("For fixing the model")
    decision = " ".join(texts[:annex])
    assert "Signal by signal" in decision and "What a good result does not mean" in decision
    assert "a secret's id opens it" not in " ".join(texts)  # a list to search is none on paper


def test_the_annex_begins_on_a_page_of_its_own(
    browser: Any, tmp_path: Path, result: AuditResult
) -> None:
    """Also where the part for the decision ends in the middle of one."""
    page, one = tmp_path / "report.html", lab_of_readme(result)
    page.write_text(
        html.render_html_report(replace(one, findings=one.findings[:1], targets=one.targets[:1])),
        encoding="utf-8",
    )
    texts = [text for text, _ in on_paper(browser, page, "A4")]
    (annex,) = (i for i, text in enumerate(texts) if "For fixing the model" in text)
    assert texts[annex].startswith("For fixing the model")
    # The end of what a good result does not mean; how a reader of PDF spaces letters depends on
    # where they lie.
    assert texts[annex - 1].replace(" ", "").endswith("notwhatyourmodelleaks.")


def test_no_page_is_nearly_empty_and_nothing_runs_over_its_edge(printed: list[Printed]) -> None:
    for number, (_, picture) in enumerate(printed, 1):
        ink = np.flatnonzero((picture < 160).any(axis=1))
        assert ink[-1] > 0.3 * picture.shape[0], f"page {number} is nearly empty"
        columns = np.flatnonzero((picture < 160).any(axis=0))
        assert columns[0] >= MARGIN and columns[-1] < picture.shape[1] - MARGIN, (
            f"page {number}: cut off"
        )


def test_a_table_is_no_wider_than_its_sheet(
    browser: Any, detailed: tuple[Path, SecretDetails]
) -> None:
    """Of the run with the most columns and rows; 184 mm are what margins leave of A4, the narrower
    sheet."""
    browser.open(detailed[0], round(184 / 25.4 * 96))
    browser.call("Emulation.setEmulatedMedia", media="print")
    try:
        over = """[...document.querySelectorAll('table, figure, pre, p, li, dl')].filter(node => node.offsetParent
          && node.getBoundingClientRect().right > innerWidth + 1).map(node => node.id || node.tagName)"""  # noqa: E501
        assert browser.evaluate(over) == []
        access = (
            "[...document.querySelectorAll('#signals-table tbody td:nth-child(3)')].map(one => "
            "one.getClientRects()"
        )
        wrapped = (
            f"{access} && getComputedStyle(one).whiteSpace).filter(said => said !== "
            "'nowrap').length"
        )
        assert browser.evaluate(wrapped) == 0  # a line each, or two pages do not hold them
        assert browser.evaluate("document.scrollingElement.scrollWidth <= innerWidth")
    finally:
        browser.call("Emulation.setEmulatedMedia", media="")


def test_on_paper_nothing_but_sections_tables_and_parts_is_ruled(
    browser: Any, detailed: tuple[Path, SecretDetails]
) -> None:
    """A rule that a merge had spliced drew a thick line over every paragraph and every list of a
    printed page."""
    browser.open(detailed[0], 800)
    browser.call("Emulation.setEmulatedMedia", media="print")
    try:
        ruled = """[...document.querySelectorAll('p:not(.part), ul, li, dd, h2, h3')]
          .filter(node => node.offsetParent && parseFloat(getComputedStyle(node).borderTopWidth)).length"""  # noqa: E501
        assert browser.evaluate(ruled) == 0
        assert browser.evaluate("document.querySelectorAll('p:not(.part)').length") > 5
    finally:
        browser.call("Emulation.setEmulatedMedia", media="")
