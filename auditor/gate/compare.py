"""Compare finished runs with the first run, paired by secret. This module renders nothing.

For each target, setting and attack, a run is the best only if it leaks significantly less than
every other run. The test corrects for the number of runs (Bonferroni) and of comparisons (Holm).
The probability of naming any wrong best run is then at most 5%.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from auditor.conclusions import outcomes
from auditor.conclusions.outcomes import RunOutcomes
from auditor.core.counts import format_count
from auditor.core.errors import AuditError, refuse_unknown_names
from auditor.core.nouns import CellKey
from auditor.core.result import Finding, Measurement
from auditor.gate.comparability import check_comparable
from auditor.statistics.bounds import LEVEL, BoundedNumber
from auditor.statistics.holm import adjust_test_level


@dataclass(frozen=True)
class Comparand:
    """One run's value of a metric, and its difference from the first run's value.

    Args:
        measured: the value; None if the run has no value.
        delta: the difference, with a two-sided 95% interval.
        reason: why the value or the difference is missing; otherwise "".
    """

    measured: Measurement | None
    delta: Measurement | None = None
    reason: str = ""


@dataclass(frozen=True)
class ComparisonRow:
    """One metric of one cell (target, setting, attack or probe), for all compared runs.

    Args:
        cell: target, setting, and attack or probe.
        metric: name of the metric.
        comparands: each run's value, in the order of the runs.
        best_run: index of the run that leaks significantly less than all others; None if no run
            does.
    """

    cell: CellKey
    metric: str
    comparands: tuple[Comparand, ...]
    best_run: int | None = None


@dataclass(frozen=True)
class Comparison:
    runs: tuple[str, ...]
    secrets: str  # the attacked secrets, in words
    lines: tuple[ComparisonRow, ...]


def compare_finished_runs(runs: Sequence[RunOutcomes], metrics: Sequence[str] = ()) -> Comparison:
    """Compare runs for each target, setting, and attack or probe, in the order of the first run.

    Args:
        runs: the runs; each is compared with the first.
        metrics: the metrics to compare; if empty, the main metric of each attack and probe.

    Raises:
        AuditError: for fewer than two runs, for a run that is not comparable with the first, and
            for a metric that no run has.
    """
    if len(runs) < 2:
        raise AuditError(f"expected at least two runs to compare, got {len(runs)}")
    for other in runs[1:]:
        check_comparable(other, runs[0], "match")
    known = set()
    names = dict[str, None]()
    folders = []
    findings: dict[CellKey, list[Finding | None]] = {}
    for i, run in enumerate(runs):
        names[run.result.name] = None
        folders.append(run.name)
        for finding in run.result.findings:
            findings.setdefault(finding.cell_key, [None] * len(runs))[i] = finding
            for m in finding.measurements:
                known.add(m.name)
    refuse_unknown_names("metric", metrics, known)
    lines = list[ComparisonRow]()
    for cell, cell_findings in findings.items():
        lines += _compare_cell(runs, cell, cell_findings, metrics)
    record = runs[0].result.benchmark
    secrets = (
        f"{record.name}: {format_count(record.members, 'member')}, "
        f"{format_count(record.nonmembers, 'non-member')}"
    )
    # the runs' names if they differ, else the folders' names
    return Comparison(
        tuple(names if len(names) == len(runs) else folders),
        secrets,
        tuple(_mark_least_leaking_runs(runs, lines)),
    )


def _compare_cell(
    runs: Sequence[RunOutcomes],
    cell: CellKey,
    findings: Sequence[Finding | None],
    metrics: Sequence[str],
) -> Iterator[ComparisonRow]:
    """Yield a comparison for each metric that at least one run measured in this cell.

    Args:
        runs: the compared runs.
        cell: target, setting, and attack or probe.
        findings: the finding of this cell in each run; None if the run has none.
        metrics: the metrics to compare; if empty, the main metric of each finding.
    """
    main_metrics = dict[str, None]()
    for finding in findings:
        if finding and finding.main:
            main_metrics[outcomes.select_main_number(finding.main, finding).name] = None
    for metric in metrics or main_metrics:
        comparands = []
        for i, finding in enumerate(findings):
            comparands.append(_compare_runs(runs, i, cell, metric, finding))
        if any(comparand.measured for comparand in comparands):
            yield ComparisonRow(cell, metric, tuple(comparands))


def _mark_least_leaking_runs(
    runs: Sequence[RunOutcomes], lines: Sequence[ComparisonRow]
) -> Iterator[ComparisonRow]:
    """Yield the comparisons, with `best_run` set if a run leaks significantly less than all others.

    The significance level is adjusted for the number of comparisons (Holm 1979), and then divided
    among the runs.

    Args:
        runs: the compared runs.
        lines: a comparison of all runs for each cell and metric.
    """
    lowest = list(map(_find_least_leaking_run, lines))
    tests = []
    for line, candidate in zip(lines, lowest, strict=True):
        rivals = _compare_rivals(runs, line, candidate)
        tests.append(partial(_is_leaking_less_than_all_rivals, rivals))
    level = adjust_test_level(tests, LEVEL)
    for line, candidate, is_least in zip(lines, lowest, tests, strict=True):
        yield replace(line, best_run=candidate if is_least(level) else None)


def _compare_runs(
    runs: Sequence[RunOutcomes], i: int, cell: CellKey, metric: str, finding: Finding | None
) -> Comparand:
    if finding is None:
        return Comparand(None, reason="not in this run")
    measured = finding.measurement(metric)
    if measured is None:
        return Comparand(None, reason=finding.not_applicable or f"has no {metric}")
    if i == 0:
        return Comparand(measured)
    pair = (runs[i].outcomes.get(cell), runs[0].outcomes.get(cell))
    change = outcomes.measure_paired_change(metric, measured.unit, *pair)
    if isinstance(change, str):
        return Comparand(measured, reason=change)
    return Comparand(measured, change)


def _find_least_leaking_run(line: ComparisonRow) -> int:
    values = []
    for comparand in line.comparands:
        values.append(comparand.measured.value if comparand.measured else math.inf)
    # whether min() returns a NaN depends on its position
    return min(range(len(values)), key=lambda i: math.inf if math.isnan(values[i]) else values[i])


def _compare_rivals(
    runs: Sequence[RunOutcomes], line: ComparisonRow, candidate: int
) -> list[BoundedNumber]:
    """Return, with bounds, the leakage of each other run minus that of the candidate.

    Return [] if any run cannot be compared with it.

    Args:
        runs: the compared runs.
        line: the comparison of all runs for one cell and metric.
        candidate: index of the candidate run.
    """
    outcome = runs[candidate].outcomes.get(line.cell)
    excesses = []
    for i, run in enumerate(runs):
        if i == candidate:
            continue
        other = run.outcomes.get(line.cell)
        if outcome is None or other is None or line.comparands[i].measured is None:
            return []  # without a measurement there is no best run
        # rival minus candidate: above 0 if the rival leaks more
        difference = outcomes.compare_paired_metric(line.metric, None, other, outcome)
        if isinstance(difference, str):
            return []
        excesses.append(difference)
    return excesses


def _is_leaking_less_than_all_rivals(rivals: Sequence[BoundedNumber], level: float) -> bool:
    """Test if a candidate leaks significantly less than every rival.

    Args:
        rivals: leakage of each rival minus the candidate's.
        level: error probability, divided among the runs that could leak least.
    """
    return bool(rivals) and all(other.low(level / (len(rivals) + 1)) > 0 for other in rivals)
