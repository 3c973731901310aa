"""Membership in the reports: its table, curves of what the run folder keeps, and the objection that
comes first."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from auditor.conclusions import secret_details as detailed
from auditor.conclusions.outcomes import ValuesBySecret
from auditor.conclusions.secret_details import SecretDetails
from auditor.core.nouns import CellKey
from auditor.core.result import AuditResult, Finding, Measurement
from auditor.core.secret_randomness import make_keyed_generator
from auditor.reports import html, markdown
from auditor.reports.blocks import Figure, Table
from auditor.reports.plots import render_plot_svg
from auditor.reports.table_of_contents import build_page_document
from auditor.reports.terminal import build_report_screen
from auditor.reports.verdict import write_verdict_headline
from auditor.statistics import roc
from auditor.statistics.metrics import ADJUSTED_AUC, name_auc, name_score_column, name_tpr_metric
from tests.reports.conftest import finding
from tests.rows import write_rows

OBJECTION = (
    "Members and non-members differ in kind: without any model, their tokens and lengths "
    "distinguish them"
)


def auc(name: str, value: float, reach: float = 0.05) -> Measurement:
    return Measurement(
        name_auc(name),
        value,
        value - reach,
        value + reach,
        400,
        "AUC",
        "EZ-MIA" if not name else "",
    )


def row(blind: float = 0.51, reference: float = 0.48) -> Finding:
    found = [
        auc("", 0.8),
        Measurement(name_tpr_metric("", 0.01), 0.25, 0.1, 0.4, 300, "share", "75/300 above 2"),
    ]
    controls = [auc("blind", blind), auc("reference_alone", reference)]
    by_repeats = {"1": auc("", 0.6), "64": auc("", 0.99, 0.01)}
    probed = replace(
        finding("undefended", "white-box", "ethicist"), attack="membership", curve=(), drawn=0
    )
    return replace(
        probed, measurements=(*found, *controls, auc("loss", 0.7)), by_repeats=by_repeats
    )


def with_row(result: AuditResult, *found: Finding) -> AuditResult:
    return replace(result, findings=(*result.findings, *found))


def said_on_the_terminal(result: AuditResult) -> str:
    console = Console(width=100, file=io.StringIO(), no_color=True)
    console.print(*build_report_screen(result, Path("runs/own")), sep="\n")
    return " ".join(str(console.file.getvalue()).split())  # type: ignore[attr-defined]


def test_an_objection_of_the_blind_baseline_is_the_first_thing_said_everywhere(
    result: AuditResult,
) -> None:
    told = with_row(result, row(blind=0.8))
    opening = f"{OBJECTION} (AUC 0.800 [0.750–0.850]), so no membership number here is reliable"
    for text in (write_verdict_headline(told), said_on_the_terminal(told)):
        assert text.startswith(opening)
    assert (
        markdown.render_markdown_report(told)
        .split("\n\n")[1]
        .startswith("**Members and non-members differ in kind")
    )
    shown = html.render_html_report(told)
    assert shown.index(OBJECTION) < shown.index("verbatim")


def test_a_blind_baseline_that_may_be_chance_says_nothing(result: AuditResult) -> None:
    quiet = with_row(result, row())
    assert "differ in kind" not in write_verdict_headline(quiet)
    assert write_verdict_headline(result).partition(". ")[0] in write_verdict_headline(quiet)
    assert "differ in kind" not in write_verdict_headline(with_row(result, row(blind=0.2)))


def test_a_reference_that_tells_them_apart_alone_is_told_of(result: AuditResult) -> None:
    told = write_verdict_headline(with_row(result, row(reference=0.7)))
    assert told.startswith(
        "The reference alone distinguishes members from non-members (AUC 0.700 [0.650–0.750]): it "
    )
    assert write_verdict_headline(with_row(result, row(blind=0.8, reference=0.7))).startswith(
        OBJECTION
    )


def test_the_table_has_every_score_and_says_what_too_few_non_members_cannot_show(
    result: AuditResult,
) -> None:
    document = build_page_document(with_row(result, row()))
    (section,) = (s for s in document.sections if s.id == "membership")
    table, repeats = (block for block in section.blocks if isinstance(block, Table))
    rows = {cells[0]: cells[1:] for cells in table.groups[0].rows}
    assert list(rows) == ["main: EZ-MIA", "blind baseline", "the reference alone", "loss"]
    assert rows["main: EZ-MIA"] == (
        "0.800 [0.750–0.850]",
        "25% [10–40]",
        "75/300 above 2",
    )
    # Before: with an adjusted AUC, whose row has no TPR, each row had the reason in a cell.
    adjusted = replace(auc("", 0.7), name=ADJUSTED_AUC, note="loss")
    with_adjusted = replace(row(), measurements=(*row().measurements, adjusted))
    document = build_page_document(with_row(result, with_adjusted))
    (section,) = (s for s in document.sections if s.id == "membership")
    second = next(block for block in section.blocks if isinstance(block, Table))
    assert second.groups[0].rows[0][0] == "adjusted: loss"
    for shown in (table, second):
        assert shown.caption.endswith("(TPR at 0.1% FPR: needs 999 non-members)")
    assert repeats.groups[0].rows[1] == ("64", "0.990", "[0.980–1.00]")
    assert repeats.caption.endswith("(n: 400; Score: EZ-MIA)")
    assert "main: EZ-MIA" in markdown.render_markdown_report(with_row(result, row()))
    assert not any(s.id in ("membership", "roc") for s in build_page_document(result).sections)


def test_the_strongest_score_heads_the_table_and_says_of_how_many(result: AuditResult) -> None:
    best = replace(auc("", 0.8), note="loss, best of 11 scores")
    found = row()
    tried = replace(found, measurements=(best, *found.measurements[1:]), scores_tried=11)
    (section,) = (
        s for s in build_page_document(with_row(result, tried)).sections if s.id == "membership"
    )
    table = next(block for block in section.blocks if isinstance(block, Table))
    assert table.groups[0].rows[0][0] == "strongest: loss, best of 11 scores"
    said = markdown.render_markdown_report(with_row(result, tried)).replace("\\", "")
    assert "membership AUC 0.990 [0.980–1.00] (EZ-MIA), of records trained on 64 times" in said


def scores() -> dict[str, np.ndarray]:
    noise = make_keyed_generator("scores")
    return {
        name: np.concatenate([noise.normal(shift, 1, 30), noise.normal(0, 1, 20)])
        for name, shift in NAMED.items()
    }


NAMED = {
    name_score_column(""): 2.0,
    name_score_column("blind"): 0.0,
    name_score_column("stacked"): 1.0,
}


def kept() -> SecretDetails:
    seen = ValuesBySecret(tuple(map(str, range(50))), np.arange(50) < 30, (None,) * 50, scores())
    return SecretDetails(values_by_cell={CellKey("undefended", "white-box", "membership"): seen})


def figure(result: AuditResult, details: SecretDetails) -> Figure:
    (section,) = (
        s for s in build_page_document(with_row(result, row()), details).sections if s.id == "roc"
    )
    return next(f for block in section.blocks for f in getattr(block, "figures", ()))


def test_the_curve_is_drawn_from_the_kept_scores_beside_the_blind_one_and_chance(
    result: AuditResult,
) -> None:
    drawn = figure(result, kept())
    assert [series.kind for series in drawn.series] == ["EZ-MIA", "blind baseline", "stacked"]
    main = scores()[name_score_column("")]
    expected = roc.compute_roc_curve(main[:30], main[30:])
    assert [(p.x, p.y) for p in drawn.series[0].points] == expected
    picture = render_plot_svg(drawn)
    assert "chance" in picture and "blind baseline" in picture and "Members found" in picture
    assert "10%" in picture and "100%" in picture


def test_a_row_without_kept_scores_has_no_curve(result: AuditResult) -> None:
    assert not any(
        s.id == "roc"
        for s in build_page_document(with_row(result, row()), SecretDetails()).sections
    )


def test_what_a_probe_keeps_is_read_back_from_the_folder(tmp_path: Path) -> None:
    key = CellKey("undefended", "white-box", "membership")
    row = {
        "ids": ["a", "b"],
        "member": [True, False],
        "repeats": [1, None],
        "x": [1, np.nan],
        "a": [3, -np.inf],
    }
    write_rows(tmp_path, {str(key): row})
    seen = detailed.read_secret_details(tmp_path).values_by_cell[key]
    assert ([*seen.ids], seen.member.tolist(), seen.repeats) == (
        ["a", "b"],
        [True, False],
        (1, None),
    )
    found = {name: values.tolist() for name, values in seen.values.items()}
    # in the order of the probe: the main number is first
    assert str(found) == "{'x': [1.0, nan], 'a': [3.0, -inf]}"


@pytest.mark.parametrize("name", ["", "blind", "loss", "reference_alone"])
def test_the_names_are_those_of_the_table(name: str) -> None:
    from auditor.statistics.metrics import find_metric

    assert find_metric(name_auc(name)).unit == "AUC" and find_metric(
        name_auc(name)
    ).scores == name_score_column(name)
    assert (
        find_metric(name_tpr_metric(name, 0.001)).rate == 0.001
        and "0.1%" in find_metric(name_tpr_metric(name, 0.001)).title
    )


def test_members_that_score_lower_than_others_are_told_apart_too(result: AuditResult) -> None:
    found = row()
    reversed_ = replace(found, measurements=(auc("", 0.1), *found.measurements[1:]))
    said = "members score lower than non-members; reversed, the AUC is 0.9"
    assert said in html.render_html_report(
        with_row(result, reversed_)
    ) and said not in html.render_html_report(with_row(result, found))
