"""Collect the numbers of a result's figures, which `plots` draws."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, starmap

import numpy as np

from auditor.conclusions.signals import SETTINGS
from auditor.core.nouns import UNDEFENDED
from auditor.core.result import AuditResult, Finding
from auditor.reports import phrases
from auditor.reports.blocks import Figure, Group, PlotPoint, Series
from auditor.reports.topics import title_attack_row
from auditor.reports.verdict import find_strongest_attack_row
from auditor.statistics.metrics import SHARES

_RESEARCH = ("errors", "any_of_n")  # plots of the evidence section
_FIRST = (0,)  # the column of labels


def draw_all_figures(result: AuditResult, research: bool | None = None) -> list[Figure]:
    """Return the figures of a result: first those of text-only access, then of white-box access.

    research: True for only the figures of the evidence section, False for only the others, None for
    all figures.
    """
    figures: list[Figure] = []
    for setting in SETTINGS:
        findings = []
        for f in phrases.sort_findings(result):
            if f.setting == setting and not f.not_applicable:
                findings.append(f)
        figures += _draw_repeat_recall_figures(result, setting, findings)
        if selected := [f for f in findings if f.curve]:
            figures.append(_draw_wrong_guess_figure(result, setting, selected))
        if selected := list(filter(phrases.select_any_sample_recall, findings)):
            figures.append(_draw_sample_count_figure(result, setting, selected))
        if selected := list(filter(phrases.select_insertion_exposure, findings)):
            figures.append(_draw_exposure_figure(result, setting, selected))
    described = set()
    selection = []
    for figure in figures:
        if figure.description in described:  # the second access needs no explanation
            figure = replace(figure, description="")
        described.add(figure.description)
        if research in (None, figure.plot in _RESEARCH):
            selection.append(figure)
    return selection


def _draw_repeat_recall_figures(
    result: AuditResult, setting: str, findings: Sequence[Finding]
) -> Iterator[Figure]:
    """Plot recall by repeat count for the best attack on the undefended model.

    Other attacks are left out, because their lines would overlap.
    """
    best = find_strongest_attack_row(result, UNDEFENDED, setting)
    measured = [f for f in findings if f.by_repeats and f.main and f.main.unit in SHARES]
    if not measured:
        return
    selected = [f for f in measured if f.attack == (best or measured[0]).attack]
    if not selected:
        return
    first = next(iter(selected[0].by_repeats.values()))
    attacked = first.unit == "share"
    metric = subject = phrases.format_metric(first.name)
    if attacked:
        metric = "Recall"
        subject = f"Share of secrets that {selected[0].attack} completed"
    counted = "by the copies of each in --data (training may have used others)"
    some_completed = attacked and any(phrases.has_hits(f.by_repeats) for f in selected)
    names = _list_repeat_names(selected)
    columns = []
    notes = []
    series = []
    for f in selected:
        series.append(_build_repeats_series(f, phrases.title_target(result, f.target), names))
        title = phrases.title_row(result, f)
        if some_completed and not phrases.has_hits(f.by_repeats):
            notes.append(phrases.describe_no_hits(title, f.by_repeats.values()))
            continue
        column = {}
        for count, m in phrases.sort_repeats(f.by_repeats):
            column[count] = phrases.format_counted_share(m)
        columns.append((title, column))
    head, groups = tabulate_targets("Copies", columns)
    yield Figure(
        f"repeats-{setting}",
        "repeats",
        f"{metric} by copies, {setting}",
        f"{subject}, {counted}.",
        head,
        groups,
        series,
        text=_FIRST,
        note=" ".join(notes),
        axes=("Copies in the training data", "Recall" if attacked else "Mean"),
        ticks=names,
    )


def _list_repeat_names(findings: Sequence[Finding]) -> list[str]:
    # Evenly spaced by rank, as counts may be 1 and 1,000, and some are names.
    return sorted(set[str]().union(*(f.by_repeats for f in findings)), key=phrases.key_repeats)


def _build_repeats_series(finding: Finding, label: str, names: Sequence[str]) -> Series:
    points = []
    for name, m in phrases.sort_repeats(finding.by_repeats):
        points.append(PlotPoint(names.index(name), m.value, m.low, m.high))
    return Series(label, points, finding.attack, finding.target)


def tabulate_targets(
    first: str, columns: Sequence[tuple[str, Mapping[str, str]]]
) -> tuple[tuple[str, ...], tuple[Group, ...]]:
    """Return the header and the row groups of a table with a column per model.

    first: header of the first column; columns: each model's title, and its cells by row label.
    Several models may have one title.
    """
    titles, cells = zip(*columns, strict=True)
    labels = dict.fromkeys(chain.from_iterable(cells))
    rows = []
    for label in sorted(labels, key=lambda label: phrases.key_repeats(label.replace(",", ""))):
        row = [label]
        for column in cells:
            row.append(column.get(label, phrases.NOTHING))
        rows.append(tuple(row))
    return (first, *titles), (Group("", rows),)


def _draw_wrong_guess_figure(
    result: AuditResult, setting: str, findings: Sequence[Finding]
) -> Figure:
    description = (
        "Share of secrets completed before this number of wrong guesses, the most confident "
        "guesses first."
    )
    groups = []
    missed = []
    series = []
    for f in findings:
        label = phrases.title_target(result, f.target)
        series.append(Series(label, list(starmap(PlotPoint, f.curve)), f.attack, f.target))
        title = title_attack_row(result, f)
        group = Group(title, _build_wrong_guess_rows(f.curve))
        if f.curve[-1][1]:  # recall rises along the curve
            groups.append(group)
        else:
            missed.append(group)
    return Figure(
        f"errors-{setting}",
        "errors",
        f"Recall by wrong guesses allowed, {setting}",
        description,
        ("Wrong guesses allowed", "Recall"),
        groups or missed,
        series,
        note=f"None completed: {'; '.join(g.title for g in missed)}." if groups and missed else "",
    )


def _draw_sample_count_figure(
    result: AuditResult, setting: str, findings: Sequence[Finding]
) -> Figure:
    title = f"Expected recall of any of n samples, {setting}"
    description = (
        "Exact, without sampling: the mean probability that one of n samples is the secret, word "
        "for word."
    )
    groups = []
    series = []
    for f in findings:
        floor = phrases.select_any_sample_recall(f, "_nonmembers")
        cell = phrases.format_measurement_value
        rows = []
        points = []
        for n, m in phrases.select_any_sample_recall(f).items():
            rows.append((f"{n:,}", cell(m), cell(floor.get(n))))
            points.append(PlotPoint(n, m.value))
        groups.append(Group(phrases.title_row(result, f), rows))
        baseline = [PlotPoint(n, m.value) for n, m in floor.items()]
        label = phrases.title_target(result, f.target)
        series.append(Series(label, points, f.attack, f.target, baseline))
    head = ("Samples", "Members", "Non-members")
    return Figure(f"any-of-{setting}", "any_of_n", title, description, head, groups, series)


def _draw_exposure_figure(result: AuditResult, setting: str, findings: Sequence[Finding]) -> Figure:
    """Plot exposure by number of insertions, as Figure 1 of the ADP paper, with a line per model.

    Each line's label has the model's cost.
    """
    description = (
        "How far up the model ranks a canary among every text it could have been, by how often it "
        "was inserted, with 95% intervals; dotted: the average of a canary that was never "
        "inserted."
    )
    names = _list_repeat_names(findings)
    series = []
    groups = []
    for f in findings:
        label = phrases.title_target_costs(result, f.target)
        series.append(_build_repeats_series(f, label, names))
        rows = []
        for count, m in phrases.select_insertion_exposure(f):
            rows.append((count, *phrases.format_measurement_cells(m)))
        groups.append(Group(label, rows))
    return Figure(
        f"exposure-{setting}",
        "insertions",
        f"Exposure by insertions, {setting}",
        description,
        ("Insertions", "Exposure, bits", "95% interval", "n"),
        groups,
        series,
        text=_FIRST,
        axes=("Insertions into the training data", "Exposure, bits"),
        ticks=names,
    )


def _build_wrong_guess_rows(
    curve: Sequence[tuple[int, float]],
) -> list[tuple[str, ...]]:
    """Return table rows for the first points with at least 0, 1, 2, 5, 10, … wrong guesses.

    Points with equal recall share a row, and the last point is added. curve: pairs of (wrong
    guesses, recall).
    """
    counts = np.append(0, np.outer(10 ** np.arange(7), (1, 2, 5)))
    errors, recalls = zip(*curve, strict=True)
    # the first point with at least each count, or the last point if no point has so many
    indices = np.searchsorted(errors, counts).clip(max=len(curve) - 1)
    rows: dict[str, tuple[str, str]] = {}
    for i in indices.tolist():
        recall = f"{phrases.format_percent(recalls[i])}%"
        rows.setdefault(recall, (f"{errors[i]:,}", recall))
    return list(rows.values())
