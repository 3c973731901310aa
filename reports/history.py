"""Show many runs on one page: leakage over time, changes, gate decisions and links to reports.

The page shows aggregates only, as reports do. Names are cleaned, then escaped.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from urllib.parse import quote

from auditor.conclusions.outcomes import select_main_number
from auditor.core.counts import format_count
from auditor.core.nouns import UNDEFENDED, CellKey
from auditor.core.result import AuditResult
from auditor.gate.history import By, History, HistoryEntry
from auditor.reports import changes, coverage, files, html, phrases, verdict
from auditor.reports.blocks import (
    Block,
    Bullets,
    Document,
    Figure,
    Figures,
    Group,
    Paragraph,
    PlotPoint,
    Section,
    Series,
    Table,
)
from auditor.reports.escaping import make_printable_line
from auditor.statistics.metrics import SHARES, name_nonmember_metric

_READING = (
    "Runs are evenly spaced in their order; brackets and bars hold two-sided 95% intervals over "
    "the choice of secrets. They do not cover training again with another seed.",
    "A change is between a run and the one before it in its series, paired secret by secret, each "
    "attack with a 95% interval: of twenty attacks in which nothing changed, one is expected to "
    "show a change.",
    "A gate's decision is about one run and its rules. A gate that is not listed was not run, or "
    "its folder could not be written to.",
    "Runs are in one series if all of them attacked the same secrets of a model of the same "
    "family with the same attacks at the same settings; the checkpoint, the seed and the defenses "
    "may differ.",
    "If nothing is shown, the upper end of an interval says how much may still be there.",
)


@dataclass(frozen=True)
class _ShownRun:
    """A run on the page.

    result: the cleaned result.
    label: the run's date, commit or checkpoint.
    """

    entry: HistoryEntry
    result: AuditResult
    label: str

    @property
    def name(self) -> str:
        return make_printable_line(self.entry.folder.name) or self.result.name

    @property
    def gate_decisions(self) -> str:
        """Return the gates' decisions in order: `failed: recall <= 0.05 (baseline main); …`."""
        decisions = []
        for gate in self.entry.gates:
            decision = gate.decision
            rules = dict.fromkeys(ruling.rule or ruling.reason for ruling in decision.rulings)
            described = ", ".join(rules) or "nothing was judged"
            if decision.baseline:
                described += f" (baseline {_get_last_part(decision.baseline)})"
            decisions.append(f"{decision.verdict}: {described}")
        return make_printable_line("; ".join(decisions))

    def describe_change(self, cell: CellKey, metric: str) -> str:
        """Return the change of a metric since the previous run, or why the change is unknown.

        cell: model, access and attack.
        """
        for line in self.entry.change.lines if self.entry.change else ():
            # Comparisons hold raw names, `result` has cleaned names.
            names = tuple(map(make_printable_line, (*line.cell, line.metric)))
            if names == (*cell, metric):
                return changes.format_change_cells(line)[-1] or phrases.NOTHING
        return phrases.NOTHING


def render_history_page(history: History, folder: Path) -> str:
    """Render a self-contained page. folder: the folder of the page, to which links are relative."""
    sections = []
    lines = []
    for i, line in enumerate(history.lines):
        runs = []
        for entry in line.entries:
            printable = phrases.make_result_printable(entry.run.result)
            label = make_printable_line(_shorten_label(history.by, entry))
            runs.append(_ShownRun(entry, printable, label))
        lines.append(runs)
        sections.append(_build_line_section(history.by, line.reason, runs, i, folder))
    items = []
    for name, reason in history.left_out:
        items.append(make_printable_line(f"{name}: {reason}"))
    if items:
        sections.append(Section("left-out", "Left out", (Bullets(items),)))
    sections.append(Section("reading", "How to read this", (Bullets(_READING),)))
    return html.render_html_document(_build_history_document(history.by, lines, tuple(sections)))


def _build_line_section(
    by: By, reason: str, runs: Sequence[_ShownRun], line: int, folder: Path
) -> Section:
    """Build the section of one line of comparable runs.

    reason: why these runs cannot be compared with those of line 0.
    """
    title = "Leakage"
    blocks: list[Block] = []
    if line:
        more = f" and {len(runs) - 1} more" if len(runs) > 1 else ""
        title = f"Not comparable: {runs[-1].name}{more}"
        blocks.append(Paragraph(f"{make_printable_line(reason)}."))
    if not line or len(runs) > 1:
        blocks += _build_leakage_figures(by, runs, line)
    blocks.append(_build_runs_table(runs, line, folder))
    return Section(f"line-{line}", title, tuple(blocks))


def _build_history_document(
    by: By, lines: Sequence[Sequence[_ShownRun]], sections: tuple[Section, ...]
) -> Document:
    last = lines[0][-1]  # the page is about the first line: no other line can be compared with it
    since = "It is the first of its series."
    if last.entry.change:
        since = changes.write_comparison_headline(last.entry.change)
    answers = (
        ("Latest run", f"{last.name}, {last.entry.time:%Y-%m-%d %H:%M}"),
        ("Since the previous run", since),
        ("Gate decisions on it", last.gate_decisions or "no gate was run"),
    )
    record = last.result.benchmark
    model = last.result.plan.get("model")
    members = format_count(record.members, "member")
    nonmembers = format_count(record.nonmembers, "non-member")
    counts = [f"{len(lines[0])} in one series"]
    if lines[1:]:
        counts.append(f"{sum(map(len, lines[1:]))} not comparable with them")
    return Document(
        title="The built-in lab" if model is None else _get_last_part(str(model)),
        facts=(
            ("Runs", ", ".join(counts)),
            ("Secrets", f"{record.name}: {members}, {nonmembers}"),
            ("Ordered by", by),
        ),
        headline=verdict.write_verdict_headline(last.result),
        verdict=" ".join(dict(answers).values()),
        sections=sections,
        kind="History of the privacy audits of a language model",
        lead="Now",
        source="Rendered only from the run folders",
        answers=answers,
    )


def _get_last_part(path: str) -> str:
    return PurePosixPath(path.replace("\\", "/")).name or path


def _shorten_label(by: By, entry: HistoryEntry) -> str:
    """Return a plot label for a run: its UTC time, nine digits of the commit, or checkpoint."""
    if by == "date":
        return f"{entry.time:%m-%d %H:%M}"
    if by == "commit":
        return entry.label[:9] + ("-dirty" if entry.label.endswith("-dirty") else "")
    return entry.label


def _build_leakage_figures(by: By, runs: Sequence[_ShownRun], line: int) -> Iterator[Block]:
    """Yield a figure for each main number and access, with a line per attack and model."""
    kinds: dict[tuple[str, str], dict[CellKey, list[tuple[PlotPoint, tuple[str, ...]]]]] = {}
    titles = {}
    units = {}
    for i, run in enumerate(runs):
        for finding in phrases.sort_findings(run.result):
            # A run without this number leaves a gap on the time axis.
            if finding.main is None:
                continue
            m = select_main_number(finding.main, finding)
            if any(map(math.isnan, (m.value, m.low, m.high))):
                continue
            kind = (finding.setting, m.name)
            key = finding.cell_key
            titles[key] = phrases.title_target(run.result, key.target)
            units[kind] = m.unit
            floor = finding.measurement(name_nonmember_metric(m.name))
            cells = (
                f"{run.label} · {run.name}",
                *phrases.format_measurement_cells(m),
                phrases.format_measurement_value(floor),
                run.describe_change(key, m.name),
            )
            number = (PlotPoint(i, m.value, m.low, m.high), cells)
            kinds.setdefault(kind, {}).setdefault(key, []).append(number)
    worst_first = sorted(kinds, key=lambda kind: kind[0] != "white-box")
    figures = []
    for n, kind in enumerate(worst_first):
        series = []
        groups = []
        for key, numbers in kinds[kind].items():
            points, rows = zip(*numbers, strict=True)
            series.append(Series(titles[key], points, key.attack))
            groups.append(Group(f"{titles[key]} · {key.attack}", rows))
        id = f"course-{line}-{n}"
        figures.append(_draw_leakage(by, runs, *kind, units[kind], series, groups, id))
    yield Figures(figures) if figures else Paragraph("Nothing was measured.")


def _draw_leakage(
    by: By,
    runs: Sequence[_ShownRun],
    setting: str,
    metric: str,
    unit: str,
    series: Sequence[Series],
    groups: Sequence[Group],
    id: str,
) -> Figure:
    label = phrases.format_metric(metric)
    shares = unit in SHARES
    order = f"Runs by {by}"
    return Figure(
        id,
        "course_of_shares" if shares else "course",
        f"{label}, {setting}",
        f"{order}, evenly spaced, with 95% intervals.",
        ("Run", label, "95% interval", "n", "Non-members", "Since the previous run"),
        groups,
        series,
        {0},
        axes=(order, label if shares or not unit or unit in label else f"{label}, {unit}"),
        ticks=[run.label for run in runs],
    )


def _build_runs_table(runs: Sequence[_ShownRun], line: int, folder: Path) -> Table:
    """Return a table with a row per run, the latest first, with a link to the run's report."""
    head = ("Run", "Date", "Records", "Perplexity", "Since the previous run", "Gates")
    rows, links = [], []
    for run in reversed(runs):
        since = phrases.NOTHING
        if run.entry.change:
            since = changes.format_change_counts(run.entry.change)
        rows.append(
            (
                run.name,
                f"{run.entry.time:%Y-%m-%d %H:%M}",
                coverage.format_audited_share(run.result) or phrases.NOTHING,
                phrases.format_target_perplexity(run.result, UNDEFENDED),
                since,
                run.gate_decisions or phrases.NOTHING,
            )
        )
        report = run.entry.folder / files.HTML
        # Resolve both: after a symbolic link `..` would lead elsewhere.
        link = Path(os.path.relpath(report.resolve(), folder.resolve())).as_posix()
        # `quote` escapes `:` too, so that no path can begin with `javascript:`.
        links.append(quote(link) if report.is_file() else "")
    caption = "Runs, latest first; each name links to its report"
    groups = (Group("", rows),)
    return Table(f"runs-{line}", caption, head, groups, {2, 3}, links=tuple(links))
