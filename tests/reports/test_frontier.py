"""The sentence on points made by hand, its picture, and its files read back."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from auditor.core.jsonable import from_json, to_json
from auditor.core.result import AuditResult, Frontier, FrontierPoint, Measurement
from auditor.reports import frontier, html, markdown
from auditor.reports.plot_frontier import CORNERS, MEASURED, PROVED


def point(
    label: str, ratio: float, leak: float, least: bool | None = None, epsilon: float | None = None
) -> FrontierPoint:
    within = "shown" if ratio <= 1.08 else "not shown" if ratio < 1.12 else "beyond"
    return FrontierPoint(
        label,
        label.partition(",")[0],
        Measurement("perplexity_ratio", ratio, ratio * 0.98, ratio * 1.02, 90, "times"),
        Measurement(
            "extraction_probability", leak, max(0.0, leak - 0.02), leak + 0.02, 300, "probability"
        ),
        within,  # type: ignore[arg-type]
        least,
        epsilon=epsilon,
        unit="shard" if epsilon else "",
    )


def picture(*points: FrontierPoint, metric: str = "extraction_probability") -> Frontier:
    return Frontier(metric, "extraction-probability", "white-box", 0.1, 0.05, points, seeds=(0,))


def told(*points: FrontierPoint) -> str:
    return frontier.describe_frontier(picture(*points))


def test_a_clear_winner() -> None:
    said = told(
        point("Undefended", 1, 0.3, False),
        point("Goldfish, k 3", 1.02, 0.01, True),
        point("Public model", 4.9, 0.0),
    )
    assert (
        "at perplexity within 10% of undefended, Goldfish, k 3 (1.0% [0.0–3.0]) leaks least, "
        "less than undefended (30% " in said
    )
    assert "Public" not in said


def test_a_tie_names_whoever_cannot_be_told_apart_by_defense_and_setting() -> None:
    said = told(
        point("Undefended", 1, 0.3, False),
        point("Goldfish, k 3", 1.02, 0.01, True),
        point("Goldfish, k 4", 1.01, 0.02, True),
        point("Dedup", 1.0, 0.03, True),
        point("Full", 1.0, 0.2, False),
        point("Mixing, weight 0.9", 1.1, 0.0),
    )
    assert "defenses are shown to leak less than undefended (30% [" in said
    assert (
        "lowest: Goldfish, k 3 (1.0% [0.0–3.0]), not significantly below Goldfish (k 4) and "
        "Dedup; shown to leak more than the lowest: Full." in said
    )
    assert said.endswith("Neither shown to be within 10% nor beyond: Mixing (weight 0.9).")


def test_where_undefended_is_among_the_least_no_defense_is_said_to_help() -> None:
    said = told(
        point("Undefended", 1, 0.3, True),
        point("Dedup", 1, 0.28, True),
        point("Mixing", 1.05, 0.29, True),
    )
    assert "no defense is shown to leak less than undefended (30% [" in said
    assert "; lowest: Dedup (28% [" in said and "leaks least" not in said
    itself = told(point("Undefended", 1, 0.2, True), point("Dedup", 1, 0.28, True))
    assert itself.endswith("no defense is shown to leak less than undefended (20% [18–22]).")


def test_nobody_within() -> None:
    said = told(
        point("Undefended", 1, 0.3, True), point("DP-SGD", 2, 0.0), point("Mixing", 1.1, 0.0)
    )
    assert "only the undefended model is shown to be at perplexity within 10%." in said
    assert "Neither shown to be within 10% nor beyond: Mixing." in said and "least" not in said


FOUND = picture(
    point("Undefended", 1, 0.3, False),
    replace(point("A_{b} & $c$, weight 0.9", 1.02, 0.01, True), corner=True),
    point("A_{b} & $c$, weight 0.5", 1.3, 0.005, epsilon=8.0),
    replace(point("Public | model <i>", 4.9, 0.0), corner=True),
    replace(point("Never", math.inf, 0.0)),
)
BITS = replace(
    FOUND,
    metric="exposure",
    attack="exposure",
    missing={"Never": "the reference is the target itself"},
)


def test_a_record_survives_json(result: AuditResult) -> None:
    held = replace(result, frontiers=(FOUND, BITS))
    assert from_json(AuditResult, to_json(held)).frontiers == (FOUND, BITS)


def test_series_say_what_is_proved_and_what_only_measures_well() -> None:
    [figure, _] = frontier.draw_frontier_figures([FOUND, BITS])
    kinds = [(s.label, s.kind, len(s.points)) for s in figure.series]
    assert kinds == [
        ("Undefended", MEASURED, 1),
        ("A_{b} & $c$", MEASURED, 1),
        ("A_{b} & $c$", PROVED, 1),
        ("Public | model <i>", MEASURED, 1),
        ("Never", "", 0),  # an infinite perplexity is in the table alone
        (CORNERS, CORNERS, 2),
    ]
    assert len(figure.table.groups[0].rows) == 5 and "∞" in figure.table.groups[0].rows[-1][1]


def test_reports_show_it(result: AuditResult) -> None:
    held = replace(result, frontiers=(FOUND, BITS))
    page, text = html.render_html_report(held), markdown.render_markdown_report(held)
    assert (
        "What leaks least at the same usefulness" in page
        and "What leaks least at the same usefulness" in text
    )
    plots = [p for p in re.findall(r"<svg.*?</svg>", page, re.DOTALL) if "frontier-e" in p[:200]]
    assert len(plots) == 2
    for plot in plots:
        # for who cannot see it
        assert "(1.0% [0.0–3.0]) leaks least" in plot.partition("<desc")[2].partition("</desc>")[0]
        assert not re.search(r"#[0-9a-f]{6}\b", plot) and len(plot.encode()) < 60_000
        assert all(
            name in plot
            for name in (PROVED, MEASURED, CORNERS, "perplexity within 10% of undefended")
        )
    assert "leaks least" in text and "the reference is the target itself" in text
    assert (
        "<i>"
        not in page.replace("</i>", "").split("What leaks least", 1)[1].split("<section", 1)[0]
    )
    assert "What leaks least" not in html.render_html_report(result)


def test_files_parse_back(tmp_path: Path) -> None:
    paths = frontier.write_frontier_files(tmp_path, (FOUND, BITS))
    assert {path.suffix for path in paths} == {".svg", ".png", ".md", ".csv", ".tex", ".json"}
    with open(tmp_path / "frontier.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 10 and rows[1]["model"] == "A_{b} & $c$, weight 0.9"
    for row, own in zip(rows, FOUND.points, strict=False):
        assert (float(row["ratio"]), float(row["leakage"])) == (own.ratio.value, own.leak.value)
        assert row["least"] == ("" if own.least is None else str(int(own.least)))
        assert row["epsilon"] == ("" if own.epsilon is None else "8.0")
    assert from_json(tuple[Frontier, ...], json.loads((tmp_path / "frontier.json").read_text()))
    svg = (tmp_path / "frontier.svg").read_text(encoding="utf-8")
    assert (
        '<svg role="img" aria-labelledby="alt"' in svg
        and "(1.0% [0.0–3.0]) leaks least" in svg
        and "#0102" not in svg
    )
    assert (tmp_path / "frontier.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "frontier.md").read_text().count("\n# ") == 2


def test_latex_has_a_cell_for_every_column(tmp_path: Path) -> None:
    frontier.write_frontier_files(tmp_path, (FOUND,))
    lines = [
        line
        for line in (tmp_path / "frontier.tex").read_text().splitlines()
        if line.endswith(r"\\")
    ]
    cells = [re.split(r"(?<!\\)&", line) for line in lines]
    assert {len(row) for row in cells} == {len(frontier.HEAD)} and len(cells) == 6
    assert r"A\_\{b\} \& \$c\$, weight 0.9" in cells[2][0]


def test_nothing_is_written_of_nothing(tmp_path: Path) -> None:
    assert frontier.write_frontier_files(tmp_path, ()) == [] and not list(tmp_path.iterdir())


@pytest.mark.parametrize("metric", ["exposure", "extraction_probability"])
def test_a_picture_is_the_same_bytes_again(tmp_path: Path, metric: str) -> None:
    made = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        frontier.write_frontier_files(tmp_path / name, (replace(FOUND, metric=metric),))
        made.append((tmp_path / name / "frontier.svg").read_bytes())
    assert made[0] == made[1]


def test_csv_is_inert() -> None:
    evil = replace(FOUND, points=(replace(FOUND.points[0], label="=cmd()"),))
    assert "\n=cmd" not in frontier.render_frontier_csv(
        [evil]
    ) and ",=cmd" not in frontier.render_frontier_csv([evil])
    assert list(csv.reader(io.StringIO(frontier.render_frontier_csv([evil]))))
