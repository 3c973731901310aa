"""The three readers' page: what each must find on it, and that figures draw what the run says."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from auditor.conclusions.outcomes import ValuesBySecret
from auditor.conclusions.secret_details import SecretDetails
from auditor.core.nouns import CellKey
from auditor.core.result import AuditResult, Measurement
from auditor.gate.compare import Comparand, Comparison, ComparisonRow
from auditor.records.attacked_secrets import SecretAttributes
from auditor.reports import html, table_of_contents
from auditor.reports.blocks import Bullets, Document, Figure, Forest, ForestSpan, Paragraph, Table
from auditor.reports.figures import tabulate_targets
from auditor.reports.plots import render_plot_svg
from auditor.statistics.exposure import bound_null_exposure_tail
from tests.reports.test_print import lab_of_readme


def blocks(doc: Document, section: str) -> list[Any]:
    return [block for s in doc.sections if s.id == section for block in s.blocks]


def figure(doc: Document, section: str) -> Figure:
    found: Figure = next(f for block in blocks(doc, section) for f in getattr(block, "figures", ()))
    return found


def change(name: str, value: float, low: float, high: float) -> ComparisonRow:
    before, now = (Measurement(name, v, 0.0, 1.0, 300) for v in (0.4, 0.4 + value))
    delta = Measurement(f"{name}_difference", value, low, high, 300)
    return ComparisonRow(
        CellKey("pmixed", "white-box", "ethicist"), name, (Comparand(before), Comparand(now, delta))
    )


def test_every_reader_has_a_part(
    result: AuditResult, secret_by_secret: Callable[..., SecretDetails]
) -> None:
    doc = table_of_contents.build_page_document(result, secret_by_secret(result, 30, length=4))
    parts = {part: [section.id for section in sections] for part, sections in doc.parts}
    assert list(parts) == [
        table_of_contents.DECIDE,
        table_of_contents.MEND,
        table_of_contents.CHECK,
    ]
    assert parts[table_of_contents.DECIDE] == ["advice", "glance", "limits"]
    assert parts[table_of_contents.MEND] == ["where", "secrets"]
    wanted = [
        "results",
        "ranking",
        "calibration",
        "tradeoff",
        "claims",
        "adversary",
        "attacked",
        "targets",
    ]
    # The table of attacks is for those who check the method.
    assert parts[table_of_contents.CHECK] == [*wanted, "reproduce", "attacks"]


def test_what_is_not_folded_is_short(result: AuditResult) -> None:
    """The open page of README's run has 560 words; all other sections are folded."""
    page = html.render_html_report(lab_of_readme(result))
    unfolded = re.sub(r"(?s)<(details|style|script|title)\b.*?</\1>|<[^>]+>", " ", page)
    assert 300 < len(unfolded.split()) < 700
    folded = re.findall(r'<section id="([a-z-]+)"[^>]*>\s*<details class="fold">', page)
    assert {"where", "results", "claims", "reproduce"} <= set(folded)
    assert not {"advice", "glance", "limits"} & set(folded)


def test_a_result_alone_is_a_whole_page_still(result: AuditResult) -> None:
    ids = [section.id for section in table_of_contents.build_page_document(result).sections]
    assert {"glance", "where", "results", "tradeoff", "claims"} <= set(ids)
    assert not {"since", "secrets", "calibration", "exposure"} & set(ids)


def test_the_glance_shows_every_signal_of_each_target_and_access(result: AuditResult) -> None:
    forest = next(
        block
        for block in blocks(table_of_contents.build_page_document(result), "glance")
        if isinstance(block, Forest)
    )
    first, pmixed, _ = forest.table.groups
    assert (
        first.title == "Undefended · PPL 11.2"
        and pmixed.title == "PMixED (sound) · PPL 21.3 · ε 8 (shard)"
    )
    assert first.rows[1] == ("Verbatim, white-box", "166/320 (52% [46–57])", "0/160", "leak shown")
    assert (
        pmixed.rows[1][3]
        == "not significant, difference 1.2 points [−1.5 to 4.0]; 3.1% would be significant"
    )
    (untested,) = (
        block
        for block in blocks(table_of_contents.build_page_document(result), "glance")
        if isinstance(block, Bullets)
    )
    everywhere, defended = untested.items
    assert everywhere.startswith("Not tested: near-verbatim")
    assert (
        "membership" in everywhere
        and "personal data (none was recognised in the attacked suffixes" in everywhere
    )
    assert "greedy decoding (undefended model only)" in defended
    span = forest.spans[1]
    assert span is not None and (span.value, span.floor) == (166 / 320, 0.0)
    assert len(forest.spans) == sum(len(group.rows) for group in forest.table.groups)


def test_differences_that_are_all_0_have_a_scale() -> None:
    table, still = Table("t", "", (), ()), ForestSpan(0.0, 0.0, 0.0)
    for spans in ((), (None,), (still, still)):
        assert (
            Forest.of_differences(table, spans).low == -1
            and Forest.of_differences(table, spans).high == 1
        )


def test_what_changed_since_another_run(result: AuditResult) -> None:
    """What leaks more comes first, and each row's interval is drawn on one scale around no
    change."""
    missing = ComparisonRow(
        CellKey("pmixed", "text-only", "ethicist"),
        "recall",
        (Comparand(None, reason="not in this run"), Comparand(None)),
    )
    lines = (
        change("a", 0.0, -0.02, 0.02),
        missing,
        change("b", -0.06, -0.1, -0.02),
        change("c", 0.05, 0.01, 0.09),
    )
    doc = table_of_contents.build_page_document(
        result, since=Comparison(("main", "now"), "lab", lines)
    )
    forest = next(block for block in blocks(doc, "since") if isinstance(block, Forest))
    assert [row[-1] for row in forest.table.groups[0].rows] == [
        *("leaks more", "leaks less", "no change shown", "not compared")
    ]
    assert (forest.low, forest.high) == (-0.1, 0.1) and forest.spans[3] is None
    assert [span and (span.low, span.high) for span in forest.spans[:3]] == [
        (0.01, 0.09),
        (-0.1, -0.02),
        (-0.02, 0.02),
    ]
    (told, _) = (block.text for block in blocks(doc, "since") if isinstance(block, Paragraph))
    assert told.startswith("1 of 4 configurations leak more, 1 less")
    assert dict(doc.facts)["Compared with"] == "main"


def test_calibration_holds_scores_to_what_came_true(
    result: AuditResult, secret_by_secret: Callable[..., SecretDetails]
) -> None:
    details = secret_by_secret(result, 100, length=4)
    doc = table_of_contents.build_page_document(result, details)
    outcome = details.values_by_cell["undefended", "white-box", "ethicist"]
    own = outcome.select_secrets(outcome.member)
    drawn = next(
        s
        for s in figure(doc, "calibration").series
        if s.kind == "white-box" and "ethicist" in s.label
    )
    top = own.score >= 0.9
    assert drawn.points[-1].x == pytest.approx(own.score[top].mean())
    assert drawn.points[-1].y == pytest.approx(own.hit[top].mean())
    assert all(p.low <= p.y <= p.high for p in drawn.points)
    rows = [
        row
        for block in blocks(doc, "calibration")
        if isinstance(block, Table)
        for row in block.groups[0].rows
    ]
    brier = float(np.mean((own.score - own.hit) ** 2))
    assert float(
        next(r for r in rows if r[0] == "Undefended · ethicist · white-box")[2]
    ) == pytest.approx(brier, abs=0.001)


def rename_probability(row: ValuesBySecret) -> ValuesBySecret:
    """The same scores, no probabilities."""
    columns = dict(row.columns)
    return replace(row, columns={"score": columns.pop("probability"), **columns})


def test_a_score_that_is_no_probability_is_not_calibrated(
    result: AuditResult, secret_by_secret: Callable[..., SecretDetails]
) -> None:
    details = secret_by_secret(result, 30, length=4)
    scores = {row: rename_probability(seen) for row, seen in details.values_by_cell.items()}
    assert not blocks(
        table_of_contents.build_page_document(result, replace(details, values_by_cell=scores)),
        "calibration",
    )


def test_the_probe_foretells_what_sampling_finds(
    result: AuditResult, secret_by_secret: Callable[..., SecretDetails]
) -> None:
    details = secret_by_secret(result, 50, length=4)
    attack, probe = (
        ("undefended", "white-box", "perplexity"),
        ("undefended", "white-box", "extraction-probability"),
    )
    p = np.linspace(0, 1, 50)
    rows = {attack: rename_probability(details.values_by_cell[attack])}
    ids, member = (
        tuple(s.id for s in details.secrets),
        np.array([s.member for s in details.secrets]),
    )
    rows[probe] = ValuesBySecret(ids, member, (None,) * 50, {"extraction_probability": p})
    sampled = next(f for f in result.findings if f.cell_key == attack)
    # the same samples, ranked otherwise: foretold once
    shared = replace(sampled, attack="zlib", samples=10)
    found = (replace(sampled, samples=10), shared, replace(sampled, attack=probe[2]))
    doc = table_of_contents.build_page_document(
        replace(result, findings=found), replace(details, values_by_cell=rows)
    )
    drawn = figure(doc, "calibration").series
    foretold = 1 - (1 - p[member]) ** 10  # ten samples
    assert [s.label for s in drawn] == ["Undefended · extraction probability"]
    assert drawn[0].points[-1].x == pytest.approx(foretold[foretold >= 0.9].mean())


def test_exposure_is_drawn_beside_its_null(with_probe: AuditResult) -> None:
    told = tuple(SecretAttributes(f"c{i}", f"a{i}", i < 8, 1, 6) for i in range(10))
    bits = {f"c{i}": float(i) for i in range(9)} | {"c9": math.nan}
    row = ("undefended", "white-box", "extraction-probability")
    doc = table_of_contents.build_page_document(
        with_probe, SecretDetails(told, exposure={row: bits})
    )
    drawn = figure(doc, "exposure")
    # members only
    assert [(p.x, p.y) for p in drawn.series[0].points] == [(float(i), 1 - i / 8) for i in range(8)]
    assert drawn.table.groups[0].rows[3] == ("3", "62%", "12%", "56%")  # 1/8 and sqrt(ln(20) / 16)
    assert "Above it: Undefended, white-box." in drawn.description
    assert drawn.null is not None and drawn.null.points[-1].high == bound_null_exposure_tail(7, 8)
    picture = render_plot_svg(drawn)
    assert (
        "nothing memorised: 2^-x" in picture
        and "Exposure (bits)" in picture
        and "var(--series-1)" in picture
    )


def test_exposures_that_nothing_was_learned_from_stay_within_their_band(
    with_probe: AuditResult,
) -> None:
    told, row = (
        tuple(SecretAttributes(f"c{i}", f"a{i}", True, 1, 6) for i in range(64)),
        ("undefended", "white-box", "extraction-probability"),
    )
    # each rank once: the null, met everywhere
    by_rank = {f"c{i}": 6 - math.log2(i + 1) for i in range(64)}
    # and crossed a little: by the tail of most models that learned nothing
    by_rank["c1"] = by_rank["c0"]
    drawn = figure(
        table_of_contents.build_page_document(
            with_probe, SecretDetails(told, exposure={row: by_rank})
        ),
        "exposure",
    )
    assert any(p.y > 2**-p.x for p in drawn.series[0].points)
    assert (
        "Above it: none." in drawn.description and "shows nothing either way" in drawn.description
    )


def test_claims_stand_beside_what_was_spent(result: AuditResult) -> None:
    table = next(
        block
        for block in blocks(table_of_contents.build_page_document(result), "claims")
        if isinstance(block, Table)
    )
    rows = {row[0]: row for row in table.groups[0].rows}
    assert rows["add/remove (as configured)"][1:5] == ("8", "8", "1e-5", "shard")
    assert "Tokens drawn: 115,200 of 115,200 covered" in table.caption
    claim = result.targets[1].claim
    assert claim is not None
    over = replace(result.targets[1], claim=replace(claim, spent_queries=200_000))
    table = next(
        b
        for b in blocks(
            table_of_contents.build_page_document(replace(result, targets=(over,))), "claims"
        )
        if isinstance(b, Table)
    )
    assert "Tokens drawn: 200,000 of 115,200 covered, overdrawn" in table.caption


def test_the_tradeoff_needs_two_targets(result: AuditResult) -> None:
    drawn = figure(table_of_contents.build_page_document(result), "tradeoff")
    assert {s.label for s in drawn.series} >= {
        "PMixED (sound) · ε 8 (shard)",
        "Undefended · no claim",
    }
    point = next(
        s for s in drawn.series if s.label.startswith("Undefended") and s.kind == "white-box"
    ).points[0]
    assert (point.x, point.y) == (11.2, 166 / 320)
    assert not blocks(
        table_of_contents.build_page_document(replace(result, targets=result.targets[:1])),
        "tradeoff",
    )


def test_the_budget_is_part_of_the_threat_model(result: AuditResult) -> None:
    table = next(
        block
        for block in blocks(table_of_contents.build_page_document(result), "adversary")
        if isinstance(block, Table)
    )
    assert table.caption.endswith("(Samples: 10)")
    runs = {
        block.id: block
        for block in blocks(table_of_contents.build_page_document(result), "reproduce")
        if isinstance(block, Table)
    }["rows-table"]
    assert runs.groups[0].rows[0][runs.head.index("Tokens drawn")] == "76,800"


def test_models_of_one_title_each_have_a_column(result: AuditResult) -> None:
    """Before: the second model's numbers replaced the first's, in silence."""
    columns = [("Mixing", {"1": "a"}), ("Mixing", {"1": "b", "2": "c"})]
    head, (group,) = tabulate_targets("Copies", columns)
    assert head == ("Copies", "Mixing", "Mixing")
    assert group.rows == [("1", "a", "b"), ("2", "–", "c")]


def test_a_note_within_a_note_of_a_model_is_kept(result: AuditResult) -> None:
    """Before: it was dropped, as a part of the other's text."""
    first = replace(result.targets[0], notes=("sampled at temperature 1.5",))
    finding = replace(result.findings[0], notes=("sampled at temperature 1",), options={})
    changed = replace(result, targets=(first, *result.targets[1:]), findings=(finding,))
    assert "sampled at temperature 1</li>" in html.render_html_report(changed).replace("\n", "")
