"""Compare finished runs with the first run, paired by secret. This module renders nothing.

A run is the best for a target, setting and attack only if it leaks significantly less than every
other run. The test corrects for the runs that could be best (Bonferroni) and for the comparisons
(Holm). At most 5% of comparisons then mark a run wrongly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from auditor.conclusions import outcomes
from auditor.conclusions.outcomes import RunOutcomes
from auditor.core.counts import format_count
from auditor.core.errors import AuditError, make_unknown_name_error
from auditor.core.nouns import CellKey
from auditor.core.result import Finding, Measurement
from auditor.gate.comparability import check_comparable
from auditor.statistics import bounds
from auditor.statistics.bounds import LEVEL, BoundedNumber
from auditor.statistics.holm import adjust_test_level


@dataclass(frozen=True)
class Comparand:
    """A run's number, and its difference from the first run's number.

    Args:
        measured: the number; None if the run lacks the number.
        delta: the difference, with a two-sided 95% interval.
        reason: reason for a missing number or difference; otherwise "".
    """

    measured: Measurement | None
    delta: Measurement | None = None
    reason: str = ""  # the reason for no number, or no difference


@dataclass(frozen=True)
class ComparisonRow:
    """A metric of a target, setting, and attack or probe, for all compared runs.

    Args:
        row: target, setting, and attack or probe.
        metric: name of the metric.
        cells: the number of each run.
        best_run: index of the run that leaks significantly less than all others; None if there is
        none.
    """

    row: CellKey
    metric: str
    cells: tuple[Comparand, ...]
    best_run: int | None = None


@dataclass(frozen=True)
class Comparison:
    runs: tuple[str, ...]
    secrets: str  # the attacked secrets, in words
    lines: tuple[ComparisonRow, ...]


def compare_finished_runs(runs: Sequence[RunOutcomes], metrics: Sequence[str] = ()) -> Comparison:
    """Compare runs for each target, setting, and attack or probe, in the order of the first run.

    metrics: the metrics to compare; if empty, the main metric of each attack and probe. Raise
    AuditError for fewer than two runs, for a run that is not comparable with the first, and for a
    metric that no run has.
    """
    if len(runs) < 2:
        raise AuditError(f"expected at least two runs to compare, got {len(runs)}")
    for other in runs[1:]:
        check_comparable(other, runs[0], "match")
    known = set()
    for run in runs:
        for finding in run.result.findings:
            for m in finding.measurements:
                known.add(m.name)
    for name in metrics:
        if name not in known:
            raise make_unknown_name_error("metric", name, known)
    findings: dict[CellKey, list[Finding | None]] = {}
    for i, run in enumerate(runs):
        for finding in run.result.findings:
            findings.setdefault(finding.cell_key, [None] * len(runs))[i] = finding
    lines = []
    for row, row_findings in findings.items():
        for metric in metrics or dict.fromkeys(f.main.name for f in row_findings if f and f.main):
            lines.append(
                ComparisonRow(
                    row,
                    metric,
                    tuple(
                        _compare_runs(runs, i, row, metric, finding)
                        for i, finding in enumerate(row_findings)
                    ),
                )
            )
    lines = [line for line in lines if any(cell.measured for cell in line.cells)]
    lowest = list(map(_find_least_leaking_run, lines))
    rivals = []
    for line, candidate in zip(lines, lowest, strict=True):
        rivals.append(_compare_rivals(runs, line, candidate))
    # Holm (1979) over the rows; within a row the level is divided among the runs
    level = adjust_test_level(
        [partial(_is_leaking_less_than_all_rivals, others) for others in rivals], LEVEL
    )
    marked = (
        replace(
            line, best_run=candidate if _is_leaking_less_than_all_rivals(others, level) else None
        )
        for line, candidate, others in zip(lines, lowest, rivals, strict=True)
    )
    record = runs[0].result.benchmark
    secrets = (
        f"{record.name}: {format_count(record.members, 'member')}, "
        f"{format_count(record.nonmembers, 'non-member')}"
    )
    # the runs' names if they differ, else the folders' names
    names = {run.result.name: None for run in runs}
    return Comparison(
        tuple(names if len(names) == len(runs) else (run.name for run in runs)),
        secrets,
        tuple(marked),
    )


def _compare_runs(
    runs: Sequence[RunOutcomes], i: int, row: CellKey, metric: str, finding: Finding | None
) -> Comparand:
    if finding is None:
        return Comparand(None, reason="not in this run")
    measured = finding.measurement(metric)
    if measured is None:
        return Comparand(None, reason=finding.not_applicable or f"has no {metric}")
    if i == 0:
        return Comparand(measured)
    first, outcome = (runs[j].outcomes.get(row) for j in (0, i))
    if first is None or outcome is None:
        return Comparand(measured, reason="nothing to pair")
    difference = outcomes.compare_paired_rows(metric, None, outcome, first)
    if isinstance(difference, str):
        return Comparand(measured, reason=difference)
    return Comparand(
        measured, bounds.make_measurement(f"{metric}_difference", difference, measured.unit)
    )


def _find_least_leaking_run(line: ComparisonRow) -> int:
    values = []
    for cell in line.cells:
        values.append(cell.measured.value if cell.measured else math.inf)
    # a NaN in min() would win or lose by its position
    return min(range(len(values)), key=lambda i: math.inf if math.isnan(values[i]) else values[i])


def _compare_rivals(
    runs: Sequence[RunOutcomes], line: ComparisonRow, candidate: int
) -> list[BoundedNumber]:
    """Return the leakage of each other run minus the candidate's, with bounds.

    candidate: index of a run. Return [] if any run cannot be compared with the candidate.
    """
    outcome = runs[candidate].outcomes.get(line.row)
    excesses: list[BoundedNumber] = []
    for i, run in enumerate(runs):
        if i == candidate:
            continue
        other = run.outcomes.get(line.row)
        if outcome is None or other is None or line.cells[i].measured is None:
            return []  # without a measurement there is no best run
        # other minus candidate: above 0 if the other run leaks more
        difference = outcomes.compare_paired_rows(line.metric, None, other, outcome)
        if isinstance(difference, str):
            return []
        excesses.append(difference)
    return excesses


def _is_leaking_less_than_all_rivals(rivals: Sequence[BoundedNumber], level: float) -> bool:
    """Test if a candidate leaks significantly less than every rival.

    rivals: leakage of each rival minus the candidate's. level: error probability, divided among the
    runs that could leak least.
    """
    return bool(rivals) and all(other.low(level / (len(rivals) + 1)) > 0 for other in rivals)
