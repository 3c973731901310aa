"""Tabulate the changes between a baseline run and a later run, from their `Comparison`."""

from __future__ import annotations

from collections import Counter

from auditor.core.counts import format_count
from auditor.gate.compare import Comparison, ComparisonRow
from auditor.reports import phrases
from auditor.reports.blocks import Table, make_table
from auditor.reports.escaping import make_printable_line

_MORE = "leaks more"
_LESS = "leaks less"
_SAME = "no change shown"
_UNKNOWN = "not compared"
_ORDER = (_MORE, _LESS, _SAME, _UNKNOWN)  # most important first


def write_comparison_headline(comparison: Comparison) -> str:
    """Return a summary of changes: `1 of 4 configurations leak more, 0 less, 3 show no change;
    ...`
    """
    counts = Counter(map(_format_change_direction, comparison.lines))
    rows = format_count(len(comparison.lines), "configuration leaks", "configurations leak")
    parts = [f"{counts[_MORE]} of {rows} more", f"{counts[_LESS]} less"]
    if counts[_SAME]:
        parts.append(format_count(counts[_SAME], "shows no change", "show no change"))
    if counts[_UNKNOWN]:
        parts.append(f"{counts[_UNKNOWN]} {_UNKNOWN}")
    return f"{', '.join(parts)}. Paired by secret; each has its own 95% interval."


def format_change_counts(comparison: Comparison) -> str:
    """Return the counts of changes as `1 more, 0 less, 3 no change shown`, for narrow columns."""
    counts = Counter(map(_format_change_direction, comparison.lines))
    parts = [f"{counts[_MORE]} more", f"{counts[_LESS]} less"]
    for label in (_SAME, _UNKNOWN):
        if counts[label]:
            parts.append(f"{counts[label]} {label}")
    return ", ".join(parts)


def build_paired_change_table(comparison: Comparison) -> Table:
    """Return a table with a row per audited model, access and attack.

    Columns: metric, before, now, paired difference, direction.
    """
    head = ("Row", "Metric", "Before", "Now", "Difference", "")
    rows = tuple(map(_build_baseline_change_row, sort_rows_leaking_more_first(comparison)))
    return make_table("changes", "What changed", head, rows, {2, 3, 4})


def sort_rows_leaking_more_first(comparison: Comparison) -> list[ComparisonRow]:
    """Return the rows in table order, which begins with rows whose leakage increased."""
    return sorted(
        comparison.lines,
        key=lambda line: _ORDER.index(_format_change_direction(line)),
    )


def _build_baseline_change_row(line: ComparisonRow) -> tuple[str, ...]:
    name = make_printable_line(line.cell.title)
    metric = phrases.format_metric(make_printable_line(line.metric))
    return (name, metric, *format_change_cells(line), _format_change_direction(line))


def format_change_cells(line: ComparisonRow) -> tuple[str, ...]:
    """Return the numbers of the first and of the last run, and the difference or why it is unknown.

    The texts are cleaned.
    """
    before = line.comparands[0]
    now = line.comparands[-1]
    if now.delta:
        difference = phrases.format_compared_difference(now.delta, before.measured, now.measured)
    else:
        difference = make_printable_line(now.reason or before.reason)
    numbers = map(phrases.format_measurement_value, (before.measured, now.measured))
    return (*numbers, difference)


def _format_change_direction(line: ComparisonRow) -> str:
    delta = line.comparands[-1].delta
    if delta is None:
        return _UNKNOWN
    if delta.low > 0:
        return _MORE
    if delta.high < 0:
        return _LESS
    return _SAME
