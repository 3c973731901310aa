"""Tabulate the changes since a baseline from a `Comparison` of two runs. Compare nothing here."""

from __future__ import annotations

from collections import Counter

from auditor.core.counts import counted
from auditor.gate.compare import Comparand, Comparison, ComparisonRow
from auditor.reports import phrases
from auditor.reports.blocks import Group, Table
from auditor.reports.escaping import to_printable_line

_MORE, _LESS, _SAME, _UNKNOWN = "leaks more", "leaks less", "no change shown", "not compared"
_ORDER = (_MORE, _LESS, _SAME, _UNKNOWN)  # most important first


def headline(comparison: Comparison) -> str:
    """Return `1 of 4 configurations leak more, 0 less, 3 show no change; ...`"""
    counts = Counter(_change_direction_label(line.cells[-1]) for line in comparison.lines)
    rows = counted(len(comparison.lines), "configuration leaks", "configurations leak")
    parts = [f"{counts[_MORE]} of {rows} more", f"{counts[_LESS]} less"]
    parts += [f"{counts[_SAME]} show no change"] if counts[_SAME] else []
    parts += [f"{counts[_UNKNOWN]} {_UNKNOWN}"] if counts[_UNKNOWN] else []
    return f"{', '.join(parts)}. Paired by secret; each has its own 95% interval."


def change_counts_phrase(comparison: Comparison) -> str:
    """Return `1 more, 0 less, 3 no change shown`: the counts of rows, for narrow places."""
    counts = Counter(_change_direction_label(line.cells[-1]) for line in comparison.lines)
    counts_by_label = {
        "more": counts[_MORE],
        "less": counts[_LESS],
        _SAME: counts[_SAME],
        _UNKNOWN: counts[_UNKNOWN],
    }
    return ", ".join(
        f"{n} {label}" for label, n in counts_by_label.items() if n or label in ("more", "less")
    )


def paired_change_table(comparison: Comparison) -> Table:
    """Return a row each (target, setting, attack): before, now, paired difference, direction."""
    head = ("Row", "Metric", "Before", "Now", "Difference", "")
    rows = tuple(map(_baseline_change_row, table_rows_leaking_more_first(comparison)))
    return Table("changes", "What changed", head, (Group("", rows),), frozenset({2, 3, 4}))


def table_rows_leaking_more_first(comparison: Comparison) -> list[ComparisonRow]:
    """Return the lines in table order: those that leak more first."""
    return sorted(
        comparison.lines, key=lambda line: _ORDER.index(_change_direction_label(line.cells[-1]))
    )


def _baseline_change_row(line: ComparisonRow) -> tuple[str, ...]:
    before, now = line.cells[0], line.cells[-1]
    difference = (
        phrases.value_with_interval(now.delta)
        if now.delta
        else to_printable_line(now.why or before.why)
    )
    name, metric = (
        to_printable_line(line.row.title),
        phrases.metric_label(to_printable_line(line.metric)),
    )
    numbers = (
        phrases.value_with_interval(before.measured),
        phrases.value_with_interval(now.measured),
    )
    return (name, metric, *numbers, difference, _change_direction_label(now))


def _change_direction_label(cell: Comparand) -> str:
    if cell.delta is None:
        return _UNKNOWN
    return _MORE if cell.delta.low > 0 else _LESS if cell.delta.high < 0 else _SAME
