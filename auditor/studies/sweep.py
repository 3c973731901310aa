"""Run all points of a grid, each in a subfolder, and make a table of their results.

A finished point is not run again; an unfinished point is continued. Points share models and labs.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from auditor.conclusions import frontier
from auditor.conclusions.contrasts import WeightedMetric, measure_seed_contrast
from auditor.conclusions.replicates import Replicates, Runs, read_replicates
from auditor.core import disk, locks
from auditor.core.errors import AuditError
from auditor.core.jsonable import from_json, read_json_object, write_json
from auditor.core.plan import FIELDS, IN_FILE, Plan
from auditor.core.plan_parts import LOCAL
from auditor.core.result import Frontier, Measurement
from auditor.engines.ray_engine import make_engine
from auditor.records import result_file
from auditor.records.folder import RunFolder, refuse_other_versions
from auditor.reports import files, phrases, tables
from auditor.runs import machine, plan_weights
from auditor.runs.plan import GridPoint, make_plan, name_grid_point
from auditor.runs.reporter import Reporter
from auditor.runs.run import plan_audit, run_audit
from auditor.runs.site import Site
from auditor.runs.sweep_cache import SweepCache
from auditor.statistics import documents
from auditor.statistics.metrics import COLUMNS, RECALL, find_metric
from auditor.studies.ledger import (
    StudyPoint,
    format_study_seed_ranges,
    list_swept_options,
    measure_seed_mean,
)

SWEEP = "sweep.json"
DIFFERENCE = "recall_difference"
_NOTE = (
    "Means over seeds; 95% intervals over secrets (for perplexities, held-out texts); "
    "differences are paired over secrets and seeds."
)
_PARTS = (
    " Secrets are parts of records, taken as independent: the intervals are too narrow. Each run "
    "counts its records."
)


def run_sweep_points(
    points: Sequence[GridPoint],
    folder: Path,
    reporter: Reporter,
    command: str,
    *,
    refuse: bool = True,
) -> dict[str, str]:
    """Run the unfinished points. Return the reasons of failures, keyed by point name.

    refuse: what happens if a point cannot run. If True, raise AuditError before any point starts.
    If False, run the other points and return the reason as this point's failure. Also raise
    AuditError if the folder holds runs of different plans, if the points name different engines, or
    if another process uses the folder.
    """
    plans, failures = _load_sweep_points(points, command, refuse)
    engines = {plan.compute for plan in plans.values()} or {LOCAL}
    if len(engines) > 1:
        raise AuditError(f"expected one engine for all points of a grid, got {len(engines)}")
    # Each point runs in one process.
    plans = {name: plan.with_fields(**vars(LOCAL)) for name, plan in plans.items()}
    for point in points:
        if point.name in plans:
            _check_point_folder_holds_same_plan(folder / point.run_folder_name, plans[point.name])
    with locks.lock_folder(folder, SWEEP), closing(make_engine(engines.pop())) as engine:
        # Before the first run: an interrupted sweep is continued from this file only.
        _write_sweep_file(folder, points, failures, command)
        waiting = []
        for number, point in enumerate(points, 1):
            path = folder / point.run_folder_name
            stage_name = f"{number} of {len(points)}: {point.name}"
            # result.json is written last: a folder without it is continued
            if point.name in plans and not (path / result_file.RESULT).is_file():
                waiting.append(_PendingPoint(stage_name, point.name, plans[point.name], path))
        # For this process, then for each worker, which makes its own: a reporter cannot be sent.
        engine.set_work_context(_PointRunner(reporter), _PointRunner)
        # Keyed by name, because workers finish in any order.
        for n_done, (name, failure) in enumerate(
            engine.stream_long_results(_SweepPointsOnEngine(), waiting), 1
        ):
            if failure:
                # Written immediately: an interrupted sweep still has the reason.
                failures[name] = failure
                _write_sweep_file(folder, points, failures, command)
            if engine.workers:  # workers show no progress themselves
                reporter.progress(f"points run by {engine.description}", n_done, len(waiting))
    return failures


@dataclass(frozen=True)
class _PendingPoint:
    """A point that is not finished.

    Args:
        called: name of the point's progress stage.
        name: name of the point.
        plan: plan of the run.
        path: run folder.
    """

    called: str
    name: str
    plan: Plan
    path: Path


class _PointRunner:
    """Runner of a sweep's points, which share models and labs."""

    def __init__(self, reporter: Reporter | None = None) -> None:
        self.reporter = reporter or Reporter()
        self.shared = SweepCache()


@dataclass(frozen=True)
class _SweepPointsOnEngine:
    """Work for the engine: run points, and yield (name, reason of failure or "") for each."""

    portion: ClassVar[int] = 1  # points that a worker receives at a time

    def process_items(
        self, place: _PointRunner, items: Sequence[_PendingPoint]
    ) -> Iterator[tuple[str, str]]:
        for point in items:
            with place.reporter.stage(point.called):
                failure = _run_sweep_point(
                    point.plan, point.path, _QuietReporter(place.reporter), place.shared
                )
            yield point.name, failure


def _load_sweep_points(
    points: Sequence[GridPoint], command: str, refuse: bool
) -> tuple[dict[str, Plan], dict[str, str]]:
    plans = {}
    failures = {}
    for point in points:
        try:
            plan = make_plan(point.plan, {"command": command})
            plan_audit(Site(plan))
            plans[point.name] = plan
        except AuditError as why:
            if refuse:
                raise AuditError(f"{point.name}: {why}") from why
            failures[point.name] = str(why)
    return plans, failures


def _check_point_folder_holds_same_plan(path: Path, plan: Plan) -> None:
    """Raise AuditError if the folder's run has another plan, other weights or other programs."""
    if not (path / "plan.json").is_file():
        return
    # Both as JSON, which turns tuples of the plan into lists: otherwise fields of several values
    # would differ.
    recorded = RunFolder(path).plan()
    expected = plan.to_json()
    for name in IN_FILE:
        if recorded.get(name) != expected[name]:
            raise AuditError(
                f"expected a new folder for -o, but {str(path)!r} was run with {name} = "
                f"{recorded.get(name)!r}, not {expected[name]!r}"
            )
    digests = plan_weights.digest_plan_files(plan) | plan_weights.digest_plugin_files(plan)
    RunFolder(path).refuse_changed_weights(digests)
    refuse_other_versions(path, machine.describe_versions())


def _run_sweep_point(plan: Plan, path: Path, reporter: Reporter, shared: SweepCache) -> str:
    """Run or continue a point until it is finished. Return the reason of failure, or "" on
    success."""
    # A run writes plan.json first: if it exists, the run is continued.
    if (path / "plan.json").is_file():
        folder = RunFolder.reopen(path)
    else:
        folder = RunFolder.create(path, path.name, plan.to_json())
    try:
        # Any error except AuditError ends the sweep: its finished points stay, and the same command
        # continues.
        planned = plan_audit(Site(plan, reporter, shared))
        files.write_run_reports(path, run_audit(planned, folder))
    except AuditError as why:
        folder.discard_if_empty()
        return str(why)
    finally:
        folder.close()
    return ""


class _QuietReporter(Reporter):
    """Reporter that hides the stages inside a point, because they would overwrite the point's
    progress line.

    Progress is still reported.
    """

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter

    def progress(self, description: str, n_done: int, total: int) -> None:
        self._reporter.progress(description, n_done, total)

    def note(self, text: str) -> None:
        self._reporter.note(text)

    def announce(self, text: str) -> None:
        self._reporter.announce(text)


# --- the folder ---


def _write_sweep_file(
    folder: Path, points: Sequence[GridPoint], failures: Mapping[str, str], command: str
) -> None:
    rows = []
    for point in points:
        recorded = {"folder": point.run_folder_name, "failure": failures.get(point.name, "")}
        rows.append(_RecordedPoint(**vars(point) | recorded))
    write_json(folder / SWEEP, StartedSweep(command, tuple(rows)))


@dataclass(frozen=True)
class _RecordedPoint(GridPoint):
    """A point as recorded in `sweep.json`.

    Args:
        folder: name of the run folder.
        failure: reason of failure, or "".
    """

    folder: str
    failure: str


@dataclass(frozen=True)
class StartedSweep:
    """The content of `sweep.json`.

    Args:
        command: the command that started the sweep; if a point is run later, its result also names
            this command.
        points: the points, in the plan's order.
    """

    command: str
    points: tuple[_RecordedPoint, ...]


def read_started_sweep(folder: Path) -> StartedSweep:
    """Return the record of a started sweep. Raise AuditError if the folder has no sweep."""
    path = folder / SWEEP
    sweep = from_json(StartedSweep, read_json_object(path, "the points of a sweep"), str(path))
    for point in sweep.points:
        # The plan is arbitrary JSON here; only its field `attack` is read before the plan is built.
        from_json(tuple[str, ...], point.plan.get("attack"), f"{path}: attack of {point.name}")
    return sweep


def list_other_runs(folder: Path, points: Sequence[GridPoint]) -> list[str]:
    """Return the names of the folder's finished runs that are no points of the grid."""
    others = set()
    for path in folder.glob(f"*/{result_file.RESULT}"):
        others.add(path.parent.name)
    for point in points:
        others.discard(point.run_folder_name)
    return sorted(others)


def plan_study_points(points: Sequence[GridPoint]) -> list[StudyPoint]:
    """Return the points of a grid before any run; runs that differ only in the seed form one
    point."""
    first: dict[str, GridPoint] = {}
    for point in points:
        first.setdefault(point.name_without_seed, point)
    return [
        StudyPoint(point.variant, point.at, tuple(point.plan["attack"])) for point in first.values()
    ]


def read_study_points(folder: Path) -> list[StudyPoint]:
    """Return a sweep folder's points in the plan's order, with the results of all seeds."""
    return [_build_study_point(points, folder) for points in _group_recorded_points(folder)]


def build_sweep_frontiers(folder: Path) -> tuple[Frontier, ...]:
    """Return leakage frontiers over all points of the sweep; () if the points' targets differ."""
    models = []
    for first, *others in _group_recorded_points(folder):
        if runs := _list_finished_runs([first, *others], folder):
            models.append(frontier.list_frontier_models(runs, first.variant, first.at))
    return frontier.build_frontiers(frontier.merge_frontier_models(models))


def _group_recorded_points(folder: Path) -> Iterable[list[_RecordedPoint]]:
    grouped: dict[str, list[_RecordedPoint]] = {}
    for recorded in read_started_sweep(folder).points:
        grouped.setdefault(recorded.name_without_seed, []).append(recorded)
    return grouped.values()


def _list_finished_runs(points: Sequence[_RecordedPoint], folder: Path) -> Runs:
    runs = {}
    for recorded in points:
        path = folder / recorded.folder
        if (path / result_file.RESULT).is_file():
            runs[recorded.seed] = result_file.read_result(path), path
    return runs


def _build_study_point(points: Sequence[_RecordedPoint], folder: Path) -> StudyPoint:
    finished = _list_finished_runs(points, folder)
    failure = next(filter(None, map(operator.attrgetter("failure"), points)), "")
    if not failure and not finished:
        failure = "not run yet"
    about = ""
    for result, _ in [*finished.values()][:1]:
        about = result.benchmark.name
        if model := result.plan.get("model"):
            about = f"{Path(model).name} on {about}"
    first = points[0]
    cells = tuple(read_replicates(finished))
    return StudyPoint(first.variant, first.at, tuple(first.plan["attack"]), cells, failure, about)


# --- the table ---


def build_sweep_table(
    title: str,
    points: Sequence[StudyPoint],
    headings: Mapping[str, str] | None = None,
    note: str = "",
) -> tables.RowTable:
    """Return a table of means over seeds, with a row for each point, target, setting and attack.

    Numbers have intervals. The last number is the paired difference of recall from the first row.

    headings: column headings, keyed by metric. By default, the columns are the metrics of attacks,
    the main metrics of probes, and all other metrics that differ between rows. note: remark below
    the table.
    """
    columns = headings or _sweep_table_metric_headings(points)
    rows = list(_build_sweep_table_rows(points, columns))
    several = len({(row.cell.target, row.cell.setting) for row in rows if row.cell.target}) > 1
    keys = list_swept_options(points)
    # In the order of `machine_readable_cells`.
    bounds = []
    for name in (*columns, DIFFERENCE):
        for end in ("", "_low", "_high"):
            bounds.append(f"{name}{end}")
    # As `numbers` of a row: columns, then the difference.
    heads = (*columns.values(), "Δ recall to first row")
    # Columns shown to readers; files contain all.
    filled = [i for i in range(len(heads)) if any(row.numbers[i] for row in rows)]
    terminal_rows = []
    for row, name in _name_distinct_rows(rows):
        terminal_rows.append(row.terminal_cells(name, several, filled))
    machine_rows = []
    for row in rows:
        machine_rows.append(row.machine_readable_cells(keys))
    return tables.RowTable(
        title,
        ("point", *["row"] * several, "attack", *(heads[i] for i in filled), "seeds"),
        terminal_rows,
        note or _NOTE + _PARTS * _are_parts(points),
        ("variant", *keys, "target", "setting", "attack", "seeds", "n", *bounds, "failure"),
        machine_rows,
    )


def _are_parts(points: Sequence[StudyPoint]) -> bool:
    """Return whether an attacked record of any point has several secrets."""
    for point in points:
        for cell in point.cells:
            for measured in cell.measured.values():
                if documents.RECALL in measured:
                    return True
    return False


def _sweep_table_metric_headings(points: Sequence[StudyPoint]) -> dict[str, str]:
    """Return headings, keyed by metric, for attack metrics, main numbers of probes and varying
    numbers.
    """
    headings: dict[str, str] = {}
    varying: dict[str, str] = {}
    for metric in COLUMNS:
        names = varying if metric.varies else headings
        names[metric.name] = metric.short
    values_by_name: dict[str, set[float]] = {}
    for point in points:
        for cell in point.cells:
            for measured in cell.measured.values():
                for name, m in measured.items():
                    values_by_name.setdefault(name, set()).add(m.value)
            if cell.measured and not cell.member_outcomes_by_seed:
                # A probe has no outcomes; its first measurement is its main number.
                main = next(iter(next(iter(cell.measured.values()))))
                if main not in varying:
                    headings[main] = phrases.format_metric(main)
    for name, head in varying.items():
        if len(values_by_name.get(name, ())) > 1:
            headings[name] = head
    return headings


@dataclass(frozen=True)
class _SweepTableRow:
    point: StudyPoint
    cell: Replicates  # without target and setting if the point has no results
    numbers: tuple[Measurement | None, ...]  # of the columns, and DIFFERENCE
    failure: str

    @property
    def seeds_label(self) -> str:
        return format_study_seed_ranges(sorted(self.cell.measured))

    @property
    def own_point(self) -> str:
        """The point's name, with `any` for options of defenses and attacks that the row does not
        use.
        """
        used = {"", self.cell.target, self.cell.attack, *FIELDS}
        at = dict(self.point.at)
        for key in self.point.at:
            if self.cell.target and key.rpartition(".")[0] not in used:  # "": the point failed
                at[key] = "any"
        return name_grid_point(self.point.variant, at)

    def terminal_cells(self, name: str, several: bool, filled: Sequence[int]) -> tuple[str, ...]:
        """Return the cells of this row for readers.

        name: name of the point. several: whether the table has a column for target and setting.
        filled: indices of the numbers to show; a column without numbers is left out.
        """
        cells = [name or "plan"]
        if several:
            cells.append(", ".join(filter(None, (self.cell.target, self.cell.setting))))
        cells.append(self.cell.attack)
        for i in filled:
            m = self.numbers[i]
            cells.append(phrases.format_measurement_value(m) if m else "")
        return (*cells, " · ".join(filter(None, [self.seeds_label, self.failure])))

    def machine_readable_cells(self, keys: Sequence[str]) -> tuple[object, ...]:
        first = next(filter(None, self.numbers), None)
        n = first and first.n
        bounds: list[float | None] = []
        for m in self.numbers:
            bounds += (m.value, m.low, m.high) if m else (None, None, None)
        at = map(self.point.at.get, keys)
        cell = (self.cell.target, self.cell.setting, self.cell.attack)
        return (self.point.variant, *at, *cell, self.seeds_label, n, *bounds, self.failure)


def _name_distinct_rows(rows: Sequence[_SweepTableRow]) -> Iterator[tuple[_SweepTableRow, str]]:
    """Yield rows and the names of their points: equal rows, such as the undefended model's at each
    point of a defense, once.
    """
    groups: dict[tuple[str, ...], list[_SweepTableRow]] = {}
    for row in rows:
        key = (row.own_point, row.cell.target, row.cell.setting, row.cell.attack)
        groups.setdefault(key, []).append(row)
    for (own_point, *_), group in groups.items():
        # The difference from the first row is the last number; the first row has none.
        results = set()
        for row in group:
            results.add((row.numbers[:-1], row.failure))
        if len(group) > 1 and len(results) == 1:
            yield group[0], own_point
        else:
            for row in group:
                yield row, name_grid_point(row.point.variant, row.point.at)


def _build_sweep_table_rows(
    points: Sequence[StudyPoint], columns: Mapping[str, str]
) -> Iterator[_SweepTableRow]:
    nothing = (None,) * (len(columns) + 1)
    # By setting: differences compare only equal access and decoding.
    first: dict[str, Replicates] = {}
    for point in points:
        if not point.cells:
            cell = Replicates("", "", ", ".join(point.attacks))
            yield _SweepTableRow(point, cell, nothing, f"failed: {point.failure}")
        for cell in point.cells:
            if not cell.measured:
                yield _SweepTableRow(point, cell, nothing, f"not applicable: {cell.not_applicable}")
                continue
            numbers: list[Measurement | None] = []
            for name in columns:
                has_metric = _has_sweep_cell_metric(cell, name)
                numbers.append(measure_seed_mean(name, cell) if has_metric else None)
            # A probe has no recall to compare.
            base = cell
            if cell.member_outcomes_by_seed:
                base = first.setdefault(cell.setting, cell)
            difference = None
            seeds = base.member_outcomes_by_seed.keys() & cell.member_outcomes_by_seed.keys()
            if seeds and base is not cell:
                parts = [WeightedMetric(1.0, RECALL, cell), WeightedMetric(-1.0, RECALL, base)]
                difference = measure_seed_contrast(DIFFERENCE, parts)
            yield _SweepTableRow(point, cell, (*numbers, difference), point.failure)


def _has_sweep_cell_metric(cell: Replicates, name: str) -> bool:
    # Numbers about members are computed from outcomes; other numbers are recorded, keyed by name.
    if find_metric(name).is_of_member_guesses:
        return bool(cell.member_outcomes_by_seed)
    return all(name in m for m in cell.measured.values())


def write_sweep_table_files(folder: Path, table: tables.RowTable) -> None:
    disk.replace_atomically(folder / "sweep.csv", tables.render_csv_table(table))
    disk.replace_atomically(folder / "sweep.md", tables.render_markdown_table(table))
