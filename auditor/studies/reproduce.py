"""Run the plans of a paper and write the ledger of its claims (`audit reproduce`)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from auditor.core import disk
from auditor.core.errors import AuditError
from auditor.core.jsonable import from_json, read_json_object, write_json
from auditor.reports import frontier, phrases, tables
from auditor.reports.blocks import PlotPoint, Series
from auditor.reports.training_curve import Panel, draw_training_curve
from auditor.runs.plan import GridPoint, expand_plan_grid, merge_raw_plans
from auditor.runs.reporter import Reporter
from auditor.studies import ledger, masked_utility, published_promises, sweep
from auditor.studies.ledger import LedgerRow, StudyPoint
from auditor.studies.papers import PUBLISHED, UTILITY, Paper
from auditor.studies.published_promises import PublishedPromise

Results = tuple[list[tables.RowTable], dict[str, str]]  # tables, and failures by point
PAGE = "claims.md"
_SECTION = "claim.md"


def make_paper_study(
    paper: Paper, plan: str, scale: str, flags: Mapping[str, Any]
) -> RunStudy | UtilityStudy | ClaimStudy:
    """Return the study that carries out a paper's plan.

    flags: values that replace the plan's fields; variants and sweeps in turn replace flags. Raise
    AuditError if the scale needs data and none were given, or accepts no data but some were given.
    """
    raw = merge_raw_plans(paper.raw_plan_at_scale(plan, scale), flags)
    title = str(paper.plans[plan].get("title", plan))
    if PUBLISHED in raw:
        if flags:
            names = ", ".join(sorted(f"--{name.replace('_', '-')}" for name in flags))
            raise AuditError(
                f"expected no {names} for {paper.name}/{plan}, whose distributions are given in "
                "its plan"
            )
        return ClaimStudy(PublishedPromise.from_published_table(title, raw[PUBLISHED]))
    if raw.get("model") and not raw.get("data"):
        raise AuditError(
            f"the scale {scale!r} of {paper.name} attacks {raw['model']}: give --data (and --known)"
        )
    if raw.get("model"):
        raw.pop("lab_recipe", None)  # the models that the scale would have trained
    if UTILITY in raw:
        return UtilityStudy(title, masked_utility.UtilityPlan.from_raw_values(raw))
    return RunStudy(title, expand_plan_grid(raw))


def reproduce_paper_plans(
    paper: Paper,
    plans: Sequence[str],
    scale: str,
    flags: Mapping[str, Any],
    out: Path,
    reporter: Reporter,
    command: str,
    other_folder: Path | None,
) -> tuple[list[tables.RowTable], list[LedgerRow], dict[str, str]]:
    """Run these plans, or continue earlier runs.

    Every plan and claim is checked before the first run. A point that cannot run becomes a row that
    states the reason.

    Args:
        paper: the paper to reproduce.
        plans: names of the paper's plans to run; each is a grid of audits.
        scale: size of the reproduction, such as a small model.
        flags: values of the command's flags, keyed by field of a plan.
        out: folder for the runs.
        reporter: shows progress.
        command: the command line, for messages.
        other_folder: folder of another reproduction of this paper, whose ledger (measured against
            published values) becomes a second column; None for none.

    Returns:
        The plans' tables, the ledger of all plans in `out`, and reasons of failures, keyed by plan
        and point.
    """
    kinds = {plan: make_paper_study(paper, plan, scale, flags) for plan in plans}
    other = None
    if other_folder is not None:
        other = read_other_ledger(other_folder, paper)
    claims = {}
    for plan in paper.plans_at_scale(scale):
        claims[plan] = list_claim_statements(paper, plan, scale)
    # Refuse a claim about a point absent from the plan before hours of runs.
    for plan, study in kinds.items():
        for statement in claims[plan]:
            ledger.check_claim_points_are_planned(statement, study.planned_points())
    run_tables = list[tables.RowTable]()
    failures = dict[str, str]()
    for plan, study in kinds.items():
        plan_tables, failed = study.run_study_into_folder(out / plan, reporter, command)
        run_tables += plan_tables
        for point, reason in failed.items():
            failures[f"{plan}/{point}"] = reason
    entries = []
    for plan in claims:
        # From the folder, not from memory: plans that ran earlier count as well.
        points = _read_plan_points(out / plan)
        if points is None and plan in kinds:
            points = kinds[plan].planned_points()  # the plan failed; the points hold the reason
        if points is not None:
            for statement in claims[plan]:
                entries.append(ledger.build_ledger_row(plan, statement, points))
    if any(claims.values()):
        write_ledger_files(out, paper, scale, entries, other)
    _write_sections_page(out, paper)
    return run_tables, entries, failures


def _write_sections_page(out: Path, paper: Paper) -> None:
    """Join the sections written by plans with a `[published]` table into one page, if any."""
    texts = []
    for plan in paper.plans:
        section = out / plan / _SECTION
        if section.is_file():
            texts.append(section.read_text(encoding="utf-8"))
    if texts:
        page = "\n".join([published_promises.INTRO, *texts]).rstrip()
        disk.replace_atomically(out / PAGE, f"{page}\n")


class RunStudy:
    """Study of a plan of attacks, which is a grid of runs."""

    def __init__(self, title: str, grid: list[GridPoint]) -> None:
        self.title = title
        self.grid = grid

    def planned_points(self) -> list[StudyPoint]:
        return sweep.plan_study_points(self.grid)

    def run_study_into_folder(self, folder: Path, reporter: Reporter, command: str) -> Results:
        """Run the grid. Return its tables, then the reasons of failures, keyed by point.

        An interrupted run still writes the tables of its finished points.
        """
        try:
            failures = sweep.run_sweep_points(self.grid, folder, reporter, command, refuse=False)
        except KeyboardInterrupt:
            self._write_sweep_tables(folder)
            raise
        return self._write_sweep_tables(folder), failures

    def _write_sweep_tables(self, folder: Path) -> list[tables.RowTable]:
        table = sweep.build_sweep_table(self.title, sweep.read_study_points(folder))
        compared = sweep.build_sweep_frontiers(folder)
        sweep.write_sweep_table_files(folder, table)
        frontier.write_frontier_files(folder, compared)
        return [table, *map(frontier.build_frontier_row_table, compared)]


class ClaimStudy:
    """Study of a published promise at the distributions in a plan.

    The check takes seconds, so earlier results are never reused.
    """

    def __init__(self, claim: PublishedPromise) -> None:
        self.claim = claim

    def planned_points(self) -> list[StudyPoint]:
        return []

    def run_study_into_folder(self, folder: Path, reporter: Reporter, command: str) -> Results:
        checks = self.claim.check_all_queries()
        table = published_promises.build_published_promise_table(self.claim, checks)
        folder.mkdir(parents=True, exist_ok=True)
        disk.replace_atomically(
            folder / _SECTION,
            published_promises.build_published_promise_section(self.claim, checks),
        )
        disk.replace_atomically(folder / "claim.csv", tables.render_csv_table(table))
        return [table], {}


class UtilityStudy:
    """Study of a plan with a `[utility]` table: all points of a masked model, measured together."""

    def __init__(self, title: str, plan: masked_utility.UtilityPlan) -> None:
        self.title = title
        self.plan = plan
        self.failure = ""
        plan.list_defenses()  # refuse bad options before any plan runs

    def planned_points(self) -> list[StudyPoint]:
        points = []
        for point in sweep.plan_study_points(self.plan.grid):
            points.append(replace(point, attacks=(masked_utility.NAME,), failure=self.failure))
        return points

    def run_study_into_folder(self, folder: Path, reporter: Reporter, command: str) -> Results:
        """Measure the plan, or read an earlier measurement. Return tables, then reasons of
        failures.

        Reasons are keyed by point. A failure becomes a table row with the reason.
        """
        headings = masked_utility.HEADINGS
        if (folder / masked_utility.RESULT).is_file():
            result = masked_utility.read_utility_result(folder, self.plan)
        else:
            try:
                result = masked_utility.measure_utility_points(self.plan, reporter, command)
            except AuditError as why:
                # The planned points have the reason: claims about them are not run.
                self.failure = str(why)
                table = sweep.build_sweep_table(self.title, self.planned_points(), headings)
                return [table], {"all": self.failure}
            masked_utility.write_utility_result(folder, result)
        points = result.list_points()
        table = sweep.build_sweep_table(self.title, points, headings, "\n".join(result.notes))
        sweep.write_sweep_table_files(folder, table)
        disk.replace_atomically(folder / "utility.svg", _draw_perplexities(points))
        return [table], {}


def _draw_perplexities(study_points: Sequence[StudyPoint]) -> str:
    """Return an SVG of perplexity against two epsilons.

    One is for the text with the most predicted tokens, the other for the mean number of tokens.
    """
    measured = [next(iter(study_point.cells[0].measured.values())) for study_point in study_points]
    curves = []
    for name in ("epsilon", "epsilon_mean"):
        points = []
        for numbers in measured:
            if name in numbers and math.isfinite(numbers[name].value):
                m = numbers["perplexity"]
                points.append(PlotPoint(numbers[name].value, m.value, m.low, m.high))
        points.sort(key=lambda point: point[0])
        curves.append(Series(masked_utility.HEADINGS[name], points))
    undefended = f"undefended: {phrases.format_value(measured[0]['perplexity'])}"
    panel = Panel(f"Perplexity, masked ({undefended})", tuple(curves), "ε (nats)")
    return draw_training_curve([panel])


def _read_plan_points(folder: Path) -> list[StudyPoint] | None:
    """Return the grid points of a plan's folder with their results; None if the plan was not
    run.
    """
    if (folder / sweep.SWEEP).is_file():
        return sweep.read_study_points(folder)
    if (folder / masked_utility.RESULT).is_file():
        return masked_utility.read_utility_result(folder).list_points()[1:]
    return None


def list_claim_statements(paper: Paper, plan: str, scale: str) -> list[ledger.PaperClaimStatement]:
    """Return the claims of the plan, except claims about variants that this scale omits."""
    raw = paper.plans[plan]
    omitted = _list_variant_names(raw) - _list_variant_names(paper.raw_plan_at_scale(plan, scale))
    statements = ledger.parse_paper_claim_statements(
        raw.get("claim", []), scale, f"{paper.name}/{plan}"
    )
    claims = []
    for statement in statements:
        if omitted.isdisjoint(term.variant for _, term in statement.signed_terms):
            claims.append(statement)
    return claims


def _list_variant_names(raw: Mapping[str, Any]) -> set[str]:
    return {variant["name"] for variant in raw.get("variant", [])}


# --- the ledger on disk ---


@dataclass(frozen=True)
class OtherLedger:
    """Ledger of the same paper at another scale.

    Args:
        scale: the other scale.
        rows: rows of the ledger, keyed by plan and claim id.
    """

    scale: str
    rows: Mapping[tuple[str, str], LedgerRow]

    def find_same_claim(self, entry: LedgerRow) -> LedgerRow:
        """Return the row of the same claim in the other ledger."""
        return self.rows.get((entry.plan, entry.id)) or replace(
            entry, setting="", verdict=ledger.NOT_RUN, ours=None, note="not in that ledger"
        )

    def disagreements_paragraph(self, entries: Sequence[LedgerRow], scale: str) -> str:
        """Return a paragraph that compares the decisions of both ledgers.

        The paragraph lists the claims that the ledgers decide differently. It counts the claims
        decided the same way, and the claims that only one ledger decides.
        """
        decided = (ledger.HOLDS, ledger.REFUTED)
        disagreements = []
        n_once = n_alike = 0
        for e in entries:
            row = self.find_same_claim(e)
            n_decided = (e.verdict in decided) + (row.verdict in decided)
            if n_decided == 1:
                n_once += 1
            elif n_decided and e.verdict == row.verdict:
                n_alike += 1
            elif n_decided:
                disagreements.append(
                    f"{e.id} ({e.text}: {row.verdict} on {self.scale}, {e.verdict} on {scale})"
                )
        first = "About no claim do they disagree."
        if disagreements:
            first = f"They disagree about {'; '.join(disagreements)}."
        return (
            f"{first} {n_alike} of {len(entries)} claims are decided alike on both, {n_once} only "
            "on one."
        )


def read_other_ledger(folder: Path, paper: Paper) -> OtherLedger:
    """Read another ledger of this paper. Raise AuditError for the ledger of another paper."""
    path = folder / "ledger.json"
    raw = read_json_object(path, "the claims of a reproduction")
    if raw.get("paper") != paper.name:
        raise AuditError(
            f"expected a ledger of {paper.name} beside it, got one of {raw.get('paper')} in {path}"
        )
    rows = from_json(tuple[LedgerRow, ...], raw.get("claims"), f"{path}: claims")
    return OtherLedger(str(raw.get("scale")), {(row.plan, row.id): row for row in rows})


def build_ledger_table(
    paper: Paper, entries: Sequence[LedgerRow], scale: str, other: OtherLedger | None
) -> tables.RowTable:
    """Return the ledger as a table. In files, interval bounds have separate columns.

    other: the ledger of a different scale, shown as a second column.
    """
    head = (
        "plan",
        "claim",
        "paper",
        "expected",
        "setting",
        *_list_ledger_verdict_column_heads(scale, other),
    )
    numbers = ("ours", "low", "high", "n", "unit", "verdict")
    # In the order of `machine`.
    names = ["plan", "id", "claim", "paper", "setting", "expect", *numbers, "note"]
    if other is not None:
        names += [f"{other.scale}_{name}" for name in numbers]
    rows = []
    machine = []
    for e in entries:
        rows.append(
            (e.plan, e.text, e.paper, e.expect, e.setting, *_build_measured_cells(e, other))
        )
        texts = (e.plan, e.id, e.text, e.paper, e.setting, e.expect)
        cells = [*texts, *_build_interval_cells(e), e.note]
        if other is not None:
            cells += _build_interval_cells(other.find_same_claim(e))
        machine.append(tuple(cells))
    return tables.RowTable(
        f"Claims: {paper.title}", head, tuple(rows), ledger.RULE, tuple(names), tuple(machine)
    )


def _list_ledger_verdict_column_heads(scale: str, other: OtherLedger | None) -> tuple[str, ...]:
    if other is None:
        return ("ours", "verdict")
    return (
        *(f"ours, {other.scale}", f"verdict, {other.scale}"),
        *(f"ours, {scale}", f"verdict, {scale}"),
    )


def _build_measured_cells(entry: LedgerRow, other: OtherLedger | None) -> tuple[str, ...]:
    cells = []
    for row in (other and other.find_same_claim(entry), entry):
        if row:
            value = f"– ({row.note})"
            if row.ours:
                value = phrases.format_measurement_value(row.ours)
            cells += [value, row.verdict]
    return tuple(cells)


def build_terminal_ledger(
    paper: Paper, entries: Sequence[LedgerRow], scale: str, other: OtherLedger | None
) -> tables.RowTable:
    """Return the ledger for a terminal. Each plan's settings appear once, below the table."""
    settings: dict[str, dict[str, None]] = {}
    rows = []
    for e in entries:
        rows.append((f"{e.plan}: {e.text}", e.paper, *_build_measured_cells(e, other)))
        if e.setting:
            settings.setdefault(e.plan, {})[e.setting] = None
    footer = []
    if other:
        footer.append(other.disagreements_paragraph(entries, scale))
    for plan, plan_settings in settings.items():
        footer.append(f"{plan}: {' | '.join(plan_settings)}")
    return tables.RowTable(
        f"Claims: {paper.title}",
        ("claim", "paper", *_list_ledger_verdict_column_heads(scale, other)),
        tuple(rows),
        "\n".join([*footer, ledger.RULE]),
    )


def _build_interval_cells(entry: LedgerRow) -> tuple[object, ...]:
    """Return six table cells: value, lower bound, upper bound, sample size, unit, verdict."""
    m = entry.ours
    return (*((None,) * 5 if m is None else (m.value, m.low, m.high, m.n, m.unit)), entry.verdict)


def write_ledger_files(
    out: Path,
    paper: Paper,
    scale: str,
    entries: Sequence[LedgerRow],
    other: OtherLedger | None,
) -> None:
    """Write ledger.md, .csv, .tex and .json. ledger.md starts with the claims that `other` decides
    differently.
    """
    grid = build_ledger_table(paper, entries, scale, other)
    first = ""
    if other:
        first = f"{other.disagreements_paragraph(entries, scale)}\n\n"
    disk.replace_atomically(out / "ledger.md", first + tables.render_markdown_table(grid))
    disk.replace_atomically(out / "ledger.csv", tables.render_csv_table(grid))
    disk.replace_atomically(out / "ledger.tex", tables.render_latex_table(grid))
    document: dict[str, Any] = {
        "paper": paper.name,
        "title": paper.title,
        "scale": scale,
        "rule": ledger.RULE,
        "claims": list(entries),
    }
    if other is not None:
        document["beside"] = {
            "scale": other.scale,
            "claims": list(map(other.find_same_claim, entries)),
        }
    write_json(out / "ledger.json", document)
