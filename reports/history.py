"""Show many runs on one page: leakage over time, gate decisions and links to reports.

The page shows aggregates only, as reports do. Names are cleaned, then escaped.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from urllib.parse import quote

from auditor.conclusions.signals import assess_signals
from auditor.core.counts import format_count
from auditor.core.nouns import UNDEFENDED, CellKey
from auditor.core.result import AuditResult, Finding, Measurement
from auditor.gate.compare import Comparison
from auditor.gate.decision_log import KeptDecision
from auditor.gate.history import By, ComparableRuns, History, HistoryEntry
from auditor.gate.rulings import EXIT_CODES
from auditor.reports import changes, coverage, decision, files, html, phrases, signals, verdict
from auditor.reports.blocks import (
    Block,
    Bullets,
    Document,
    Facts,
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

_ALONG: dict[By, str] = {
    "date": "Runs by date",
    "commit": "Runs by commit",
    "checkpoint": "Runs by checkpoint",
}
_READING = (
    "Runs are evenly spaced in their order; brackets and bars hold two-sided 95% intervals over "
    "the choice of secrets. They do not cover training again with another seed.",
    "A change is between a run and the one before it in its line, paired secret by secret, each "
    "row with its own 95% interval: of twenty rows in which nothing changed, one is expected to "
    "show a change.",
    "A gate's ruling is about one run and its rules. A gate that is not listed was not asked, or "
    "its folder could not be written to.",
    "Runs stand in one line where all of them attacked the same secrets of a model of the same "
    "family with the same attacks at the same settings; the checkpoint, the seed and the defenses "
    "may differ.",
    "Where nothing is shown, the upper end of an interval says how much may still be there.",
)


@dataclass(frozen=True)
class _ShownRun:
    """A run on the page. result: cleaned; label: its place in the order; link: to its report."""

    entry: HistoryEntry
    change: Comparison | None
    result: AuditResult
    label: str
    link: str

    @property
    def name(self) -> str:
        return make_printable_line(self.entry.folder.name) or self.result.name

    @property
    def date(self) -> str:
        # In UTC (`result_file.creation_time`).
        return f"{self.entry.at:%Y-%m-%d %H:%M}"

    def change_since_run_before_phrase(self, row: CellKey, metric: str) -> str:
        """Return the change of a row's metric since the previous run, or why it is unknown."""
        for line in self.change.lines if self.change else ():
            # Comparisons hold raw names, `result` has cleaned names.
            if (CellKey(*map(make_printable_line, line.row)), make_printable_line(line.metric)) == (
                row,
                metric,
            ):
                before, now = line.cells[0], line.cells[-1]
                if now.delta:
                    return phrases.format_measurement_value(now.delta)
                reason = now.why or (before.why if before.measured is None else "")
                return make_printable_line(reason) or phrases.NOTHING
        return phrases.NOTHING


def render_history_page(history: History, folder: Path) -> str:
    """Render a self-contained page. folder: where the page will be, as base of its links."""
    lines = [_list_shown_runs(history.by, line, folder) for line in history.lines]
    return html.render_html_document(_build_timeline_document(lines, history))


def _list_shown_runs(by: By, line: ComparableRuns, folder: Path) -> list[_ShownRun]:
    runs = []
    for entry, change, label in zip(
        line.entries, line.changes, _run_tick_labels(by, line.entries), strict=True
    ):
        report = entry.folder / files.HTML
        # Resolve both: after a symbolic link `..` would lead elsewhere.
        link = (
            Path(os.path.relpath(report.resolve(), folder.resolve())).as_posix()
            if report.is_file()
            else ""
        )
        cleaned = phrases.make_result_printable(entry.run.result)
        # `quote` escapes `:` too, so that no path can begin with `javascript:`.
        runs.append(_ShownRun(entry, change, cleaned, make_printable_line(label), quote(link)))
    return runs


def _run_tick_labels(by: By, entries: Sequence[HistoryEntry]) -> list[str]:
    """Return the shortest labels for a plot: dates if all differ, times if all dates are equal."""
    if by != "date":
        return [
            _format_abbreviated_commit(entry.label) if by == "commit" else entry.label
            for entry in entries
        ]
    days = {entry.at.date() for entry in entries}
    form = "%Y-%m-%d" if len(days) == len(entries) else "%H:%M" if len(days) == 1 else "%m-%d %H:%M"
    return [f"{entry.at:{form}}" for entry in entries]


def _format_abbreviated_commit(commit: str) -> str:
    """Return the commit's first nine digits, with `-dirty` if there were uncommitted changes."""
    return commit[:9] + ("-dirty" if commit.endswith("-dirty") else "")


def _build_timeline_document(lines: Sequence[Sequence[_ShownRun]], history: History) -> Document:
    # The page is about the first line; the other lines are not comparable with it.
    first, last = lines[0], lines[0][-1]
    sections = [
        Section("course", "Leakage", tuple(_build_run_leakage_blocks(history.by, first, 0))),
        Section("runs", "Runs", (_build_runs_table(first, "runs-table"),)),
        *_build_gate_rulings_section(lines),
    ]
    for i, (line, runs) in enumerate(zip(history.lines[1:], lines[1:], strict=True), 1):
        course = _build_run_leakage_blocks(history.by, runs, i) if len(runs) > 1 else ()
        blocks = (
            Paragraph(f"{make_printable_line(line.why)}."),
            *course,
            _build_runs_table(runs, f"apart-{i}-runs"),
        )
        more = f" and {len(runs) - 1} more" if len(runs) > 1 else ""
        sections.append(Section(f"apart-{i}", f"Apart: {runs[-1].name}{more}", blocks))
    if history.left_out:
        items = tuple(make_printable_line(f"{name}: {reason}") for name, reason in history.left_out)
        sections.append(Section("left-out", "Left out", (Bullets(items),)))
    sections.append(Section("reading", "How to read this", (Bullets(_READING),)))
    answers = (
        ("The last run", f"{last.name}, {last.date}"),
        (
            "Since the run before",
            changes.write_headline(last.change) if last.change else "It is the first of its line.",
        ),
        ("What gates decided of it", _format_gate_decisions(last)),
    )
    model = last.result.plan.get("model")
    return Document(
        title="The built-in lab" if model is None else _format_last_path_part(str(model)),
        facts=_build_timeline_header_facts(lines, history),
        headline=verdict.write_headline(last.result),
        verdict=" ".join(text for _, text in answers),
        sections=tuple(sections),
        kind="History of the privacy audits of a language model",
        lead="Now",
        source="Rendered from the run folders alone",
        answers=answers,
    )


def _build_timeline_header_facts(lines: Sequence[Sequence[_ShownRun]], history: History) -> Facts:
    first, n_apart = lines[0], sum(map(len, lines[1:]))
    record, dates = first[-1].result.benchmark, sorted(run.entry.at for run in first)
    runs = f"{len(first)} in one line{f', {n_apart} apart' if n_apart else ''}"
    runs += f", {len(history.left_out)} left out" if history.left_out else ""
    return (
        ("Runs", runs),
        ("Made", " to ".join(dict.fromkeys(f"{date:%Y-%m-%d}" for date in (dates[0], dates[-1])))),
        (
            "Secrets",
            f"{record.name}: {format_count(record.members, 'member')}, "
            f"{format_count(record.nonmembers, 'non-member')}",
        ),
        *(
            (("Records of the last run", records),)
            if (records := coverage.format_coverage(first[-1].result))
            else ()
        ),
        ("In the order of", f"their {history.by}"),
    )


def _format_last_path_part(path: str) -> str:
    return PurePosixPath(path.replace("\\", "/")).name or path


# --- leakage over the runs
# -----------------------------------------------------------------------------------------------


def _build_run_leakage_blocks(by: By, runs: Sequence[_ShownRun], line: int) -> Iterator[Block]:
    """Yield a figure per main number and setting, white-box first, with a line per row."""
    kinds: dict[tuple[str, str], dict[CellKey, list[_MainNumber]]] = {}
    for i, run in enumerate(runs):
        for finding in phrases.sort_findings(run.result):
            # A run without the number has no point, and the others keep their places.
            main = finding.main
            if main is not None and not any(
                math.isnan(v) for v in (main.value, main.low, main.high)
            ):
                rows = kinds.setdefault((finding.setting, main.name), {})
                rows.setdefault(finding.cell_key, []).append(_MainNumber(i, run, finding, main))
    worst_first = sorted(kinds, key=lambda kind: kind[0] != "white-box")
    figures = tuple(
        _draw_run_leakage_figure(
            by, runs, setting, metric, kinds[setting, metric], f"course-{line}-{n}"
        )
        for n, (setting, metric) in enumerate(worst_first)
    )
    yield Figures(figures) if figures else Paragraph("Nothing was measured.")


@dataclass(frozen=True)
class _MainNumber:
    """A row's main number in one run. place: the run's position."""

    place: int
    run: _ShownRun
    finding: Finding
    main: Measurement

    @property
    def history_table_cells(self) -> tuple[str, ...]:
        floor = self.finding.measurement(name_nonmember_metric(self.main.name))
        since = self.run.change_since_run_before_phrase(self.finding.cell_key, self.main.name)
        number = (
            *phrases.format_measurement_cells(self.main),
            phrases.format_measurement_value(floor),
        )
        return (f"{self.run.label} · {self.run.name}", *number, since)


def _draw_run_leakage_figure(
    by: By,
    runs: Sequence[_ShownRun],
    setting: str,
    metric: str,
    rows: Mapping[CellKey, Sequence[_MainNumber]],
    id: str,
) -> Figure:
    label, unit = phrases.format_metric(metric), next(iter(rows.values()))[0].main.unit
    title = f"{label}, {setting}"
    text = f"{_ALONG[by]}, evenly spaced, with 95% intervals."
    series, groups = [], []
    for row, numbers in rows.items():
        target = phrases.title_target(numbers[-1].run.result, row.target)
        points = tuple(PlotPoint(s.place, s.main.value, s.main.low, s.main.high) for s in numbers)
        series.append(Series(target, points, row.attack))
        groups.append(
            Group(f"{target} · {row.attack}", tuple(s.history_table_cells for s in numbers))
        )
    head = ("Run", label, "95% interval", "n", "Non-members", "Since the run before")
    shares = unit in SHARES
    axes = (_ALONG[by], label if shares or not unit else f"{label}, {unit}")
    ticks = tuple(run.label for run in runs)
    plot, lines = "course_of_shares" if shares else "course", tuple(series)
    return Figure(
        id,
        plot,
        title,
        text,
        head,
        tuple(groups),
        (),
        lines,
        frozenset({0}),
        axes=axes,
        ticks=ticks,
    )


# --- runs and gates
# -----------------------------------------------------------------------------------------------


def _build_runs_table(runs: Sequence[_ShownRun], id: str) -> Table:
    """Return a row per run, the last first, with a column per planned target."""
    newest_first = tuple(reversed(runs))
    targets = {t.name: t.title for run in runs for t in run.result.targets if not t.companion}
    head = (
        "Run",
        "Date",
        "Records",
        *targets.values(),
        "Perplexity",
        "Since the run before",
        "Gates",
        "Model",
    )
    rows = tuple(
        (
            run.name,
            run.date,
            coverage.format_audited_share(run.result) or phrases.NOTHING,
            *(_format_strongest_leak(run.result, target) for target in targets),
            phrases.format_target_perplexity(run.result, UNDEFENDED),
            changes.format_change_counts(run.change) if run.change else phrases.NOTHING,
            ", ".join(gate.decision.verdict for gate in run.entry.gates) or phrases.NOTHING,
            _format_model_identity(run.result),
        )
        for run in newest_first
    )
    caption = (
        "Each run, the last first, and what leaks from each target; its name leads to its report"
    )
    numeric = frozenset(range(2, 4 + len(targets)))
    return Table(
        id,
        caption,
        head,
        (Group("", rows),),
        numeric,
        links=tuple(run.link for run in newest_first),
    )


def _format_strongest_leak(result: AuditResult, target: str) -> str:
    """Return the strongest signal per shown kind, or else the first tested kind and the verdict."""
    assessment = assess_signals(result)
    shown_signals, tested = (
        assessment.list_shown_signals(target),
        assessment.list_tested_signals(target),
    )
    if not tested:
        return phrases.NOTHING
    strongest = map(
        signals.pick_strongest_signal, signals.group_signals(shown_signals or tested[:1])
    )
    numbers = "; ".join(map(signals.describe_signal_number, strongest))
    if shown_signals:
        return numbers
    return (
        f"{numbers}, "
        f"{signals.format_no_leakage(assessment, target) if assessment.shows_no_leakage(target) else 'inconclusive'}"  # noqa: E501
    )


def _format_model_identity(result: AuditResult) -> str:
    """Return the model's identity: `checkpoint-500 · weights 3fa9c1d2 · commit 4f2a81c09`."""
    plan, commit = result.plan, result.environment.get("commit")
    lab = "lab" if plan.get("lab") in (None, "small") else str(plan["lab"])
    parts = [lab if plan.get("model") is None else _format_last_path_part(str(plan["model"]))]
    parts += [f"revision {plan['revision']}"] if plan.get("revision") else []
    # of all weight files together
    digest = hashlib.sha256(json.dumps(sorted(result.weights.items())).encode()).hexdigest()[:8]
    parts += [f"weights {digest}"] if result.weights else []
    return " · ".join(parts + ([f"commit {_format_abbreviated_commit(commit)}"] if commit else []))


def _format_gate_decisions(run: _ShownRun) -> str:
    """Return the gates' decisions in order: `failed: recall <= 0.05; held: …`."""
    decisions = []
    for gate in run.entry.gates:
        rules = ", ".join(
            dict.fromkeys(ruling.rule or ruling.reason for ruling in gate.decision.rulings)
        )
        decisions.append(
            f"{gate.decision.verdict}: {rules or 'nothing was judged'}{_format_gate_baseline(gate)}"
        )
    return make_printable_line("; ".join(decisions)) or "none was asked"


def _format_gate_baseline(recorded: KeptDecision) -> str:
    return (
        f" (baseline {_format_last_path_part(recorded.decision.baseline)})"
        if recorded.decision.baseline
        else ""
    )


def _build_gate_rulings_section(lines: Sequence[Sequence[_ShownRun]]) -> list[Section]:
    """Return the counts of verdicts, and all rulings, the last run and failures first."""
    groups = tuple(
        Group(
            make_printable_line(
                f"{run.name}: {gate.decision.headline}{_format_gate_baseline(gate)}, decided "
                f"{gate.decided}"
            ),
            decision.build_ruling_table_rows(gate.decision),
        )
        for runs in lines
        for run in reversed(runs)
        for gate in reversed(run.entry.gates)
    )
    if not groups:
        return []
    gate_verdicts = [
        gate.decision.verdict for runs in lines for run in runs for gate in run.entry.gates
    ]
    counts = ", ".join(
        f"{n} {outcome}" for outcome in EXIT_CODES if (n := gate_verdicts.count(outcome))
    )
    summary = Paragraph(f"Decisions of gates: {counts}.")
    caption = "What gates decided, rule by rule"
    table = Table("gates-table", caption, decision.HEAD, groups, decision.NUMERIC, folded=True)
    return [Section("gates", "Gates", (summary, table))]
