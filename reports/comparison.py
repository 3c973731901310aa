"""Render a `Comparison` of runs next to each other: terminal, Markdown, HTML and CSV.

Names have no control characters, and each renderer escapes names.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from auditor.core.counts import format_count
from auditor.gate.compare import Comparison, ComparisonRow
from auditor.reports import phrases
from auditor.reports.blocks import Document, Paragraph, Section, Table, make_table
from auditor.reports.escaping import make_printable_line, render_csv
from auditor.reports.tables import RowTable, render_rich_table

if TYPE_CHECKING:
    from rich.table import Table as RichTable
    from rich.text import Text

_BEST = "leaks least"
NOTE = (
    "Brackets hold two-sided 95% intervals; differences are to the first run, paired secret by "
    f"secret. A run is marked “{_BEST}” only if it leaks significantly less than every other run, "
    "corrected for runs and configurations."
)


def build_terminal_blocks(comparison: Comparison) -> Iterator[RichTable | Text]:
    """Yield a table for each configuration, so that any number of runs fits a narrow terminal."""
    from rich.text import Text

    for line in comparison.lines:
        rows = []
        for i, name in enumerate(comparison.runs):
            rows.append((name, *_format_run_table_cells(line, i)))
        title = f"{line.cell.title}: {phrases.format_metric(line.metric)}"
        yield render_rich_table(RowTable(title, ("Run", "Measured", "Difference", ""), rows))
    yield Text(f"\n{NOTE}", style="dim")


def render_comparison_csv(comparison: Comparison) -> str:
    """Return CSV with a line per configuration, metric and run; shares are fractions."""
    head = (
        *("target", "setting", "attack", "metric", "run", "value", "low", "high", "n"),
        *("difference", "difference_low", "difference_high", "best", "note"),
    )
    rows = []
    for line in comparison.lines:
        for i, (name, cell) in enumerate(zip(comparison.runs, line.comparands, strict=True)):
            m = cell.measured
            d = cell.delta
            numbers = (m.value, m.low, m.high, m.n) if m else (None,) * 4
            deltas = (d.value, d.low, d.high) if d else (None,) * 3
            about = (*line.cell, line.metric, name)
            rows.append((*about, *numbers, *deltas, int(line.best_run == i), cell.reason))
    return render_csv(head, rows)


def build_paired_table(comparison: Comparison) -> Table:
    """Return a table with a row per configuration and metric, and a column per run."""
    body = []
    for line in comparison.lines:
        metric = phrases.format_metric(make_printable_line(line.metric))
        row = [make_printable_line(line.cell.title), metric]
        for i in range(len(line.comparands)):
            row.append("; ".join(filter(None, _format_run_table_cells(line, i, "difference "))))
        body.append(tuple(row))
    head = ("Row", "Metric", *map(make_printable_line, comparison.runs))
    return make_table("comparison", "Each run by target, setting and attack", head, body)


def build_comparison_document(comparison: Comparison) -> Document:
    marks = sum(line.best_run is not None for line in comparison.lines)
    total = format_count(len(comparison.lines), "configuration has", "configurations have")
    rows = (
        build_paired_table(comparison) if comparison.lines else Paragraph("Nothing was measured.")
    )
    return Document(
        title=" · ".join(map(make_printable_line, comparison.runs)),
        facts=(
            ("Secrets", make_printable_line(comparison.secrets)),
            ("Runs", str(len(comparison.runs))),
        ),
        headline=f"{marks} of {total} a run that leaks significantly less than all others.",
        verdict=NOTE,
        sections=(Section("rows", "Rows", (rows,)),),
        kind="Privacy audits side by side",
        lead="Summary",
        source="Rendered only from the runs' records",
    )


def _format_run_table_cells(
    line: ComparisonRow, i: int, description: str = ""
) -> tuple[str, str, str]:
    """Return three cells of run `i`: its number, its difference from the first run, and a mark.

    If no difference exists, the second cell says why. Only the best run has a mark.
    """
    cell = line.comparands[i]
    if cell.delta:
        first = line.comparands[0].measured
        difference = phrases.format_compared_difference(cell.delta, first, cell.measured)
        delta = f"{description}{difference}"
    else:
        delta = make_printable_line(cell.reason)
    return (
        phrases.format_measurement_value(cell.measured),
        delta,
        _BEST if line.best_run == i else "",
    )
