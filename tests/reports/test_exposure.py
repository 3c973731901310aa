"""Exposure in the reports: the figure by insertions with costs and claims beside each target, and
one sentence."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from auditor.core.result import AuditResult, Finding, Measurement
from auditor.reports import html, markdown, phrases
from auditor.reports.blocks import Figure
from auditor.reports.plots import render_plot_svg
from auditor.reports.table_of_contents import build_markdown_document
from auditor.reports.verdict import write_verdict_headline
from tests.reports.conftest import finding, share


def bits(value: float, n: int) -> Measurement:
    return Measurement("exposure", value, max(0.0, value - 4), min(19.9, value + 4), n, "bits")


def exposed(target: str, values: dict[str, float]) -> Finding:
    main = bits(sum(values.values()) / len(values), 6 * len(values))
    measured = (main, share("exposed_share", 3, main.n))
    by_count = {count: bits(value, 6) for count, value in values.items()}
    row = replace(
        finding(target, "white-box", "ethicist"), attack="exposure", decoding="ancestral", curve=()
    )
    return replace(row, measurements=measured, by_repeats=by_count)


@pytest.fixture
def with_exposure(result: AuditResult) -> AuditResult:
    rows = (
        exposed("undefended", {"1": 4.5, "4": 18.9, "16": 19.9}),
        exposed("pmixed", {"1": 1.4, "4": 1.9, "16": 3.2}),
        exposed("uniform-mixing", {"1": 4.3, "4": 18.9, "16": 19.9}),
    )
    benchmark = replace(result.benchmark, canaries={"0": 2, "1": 6, "4": 6, "16": 6})
    return replace(result, benchmark=benchmark, findings=(*result.findings, *rows))


def figures(result: AuditResult) -> dict[str, Figure]:
    return {
        f.id: f
        for s in build_markdown_document(result).sections
        for b in s.blocks
        for f in getattr(b, "figures", ())
    }


def test_the_figure_compares_targets_with_what_they_cost_and_claim(
    with_exposure: AuditResult,
) -> None:
    drawn = figures(with_exposure)["exposure-white-box"]
    names = ("undefended", "pmixed", "uniform-mixing")
    titles = [phrases.title_target_costs(with_exposure, name) for name in names]
    assert [series.label for series in drawn.series] == titles
    groups = {group.title.split(" · ")[0]: group for group in drawn.table.groups}
    assert tuple(groups["Undefended"].rows) == (
        ("1", "4.50", "[0.500–8.50]", "6"),
        ("4", "18.9", "[14.9–19.9]", "6"),
        ("16", "19.9", "[15.9–19.9]", "6"),
    )
    assert re.search(r"PMixED \(sound\) · PPL [\d.]+ · ε 8", groups["PMixED (sound)"].title)
    picture = render_plot_svg(drawn)
    assert groups["PMixED (sound)"].title in picture and "never inserted, on average" in picture
    assert "Exposure, bits" in picture and "100%" not in picture
    assert "exposure-claim" not in figures(with_exposure)


def test_recall_keeps_its_own_figure(with_exposure: AuditResult, result: AuditResult) -> None:
    # By what they say: from Python 3.13 on a NaN in one is unequal to itself.
    assert repr(figures(with_exposure)["repeats-white-box"]) == repr(
        figures(result)["repeats-white-box"]
    )
    alone = replace(with_exposure, findings=with_exposure.findings[-3:])
    assert set(figures(alone)) == {"exposure-white-box"}


def test_a_claim_that_is_not_proved_is_not_called_one(with_exposure: AuditResult) -> None:
    target = with_exposure.target("pmixed")
    assert target.claim is not None
    doubtful = replace(target, claim=replace(target.claim, status="sound, it says", sound=False))
    changed = replace(
        with_exposure, targets=tuple(doubtful if t is target else t for t in with_exposure.targets)
    )
    assert "claimed ε 8" in phrases.title_target_costs(changed, "pmixed")


def test_reports_say_it_in_words(with_exposure: AuditResult) -> None:
    text = write_verdict_headline(with_exposure)
    assert "also greedy decoding, exposure of canaries" in text
    assert (
        "PMixED (sound): MODERATE. No extraction of text is shown; another signal is above its "
        "baseline (3/18 (17%) canaries more exposed than chance allows" in text
    )
    for rendered in (
        html.render_html_report(with_exposure),
        markdown.render_markdown_report(with_exposure),
    ):
        assert "2 never (controls), 6 inserted once, 6 inserted 4 times" in rendered.replace(
            "\\", ""
        )
        assert "says nothing about one record" in rendered
