"""Walks a grid: every point an ordinary run folder inside one parent, then one table over the
points.

A finished point is not run again, a half-finished one is continued; models and labs are shared from
point to point.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from auditor.conclusions import frontier
from auditor.conclusions.contrasts import WeightedMetric, contrast_over_seeds
from auditor.conclusions.replicates import Replicates, Runs, read_replicates
from auditor.core import disk, locks
from auditor.core.errors import AuditError
from auditor.core.jsonable import from_json, read_json_object
from auditor.core.plan import IN_FILE, Plan
from auditor.core.plan_parts import LOCAL
from auditor.core.result import Frontier, Measurement
from auditor.engines.choose import make_engine
from auditor.engines.engine import WorkerStart
from auditor.records import result_file
from auditor.records.folder import RunFolder
from auditor.reports import files, phrases, tables
from auditor.runs import plan_weights
from auditor.runs.lab_site import make_site
from auditor.runs.plan import make_plan
from auditor.runs.plan_grid import GridPoint, grid_point_name
from auditor.runs.reporter import Reporter, SilentReporter
from auditor.runs.run import check_plan_and_select_plugins, run_audit
from auditor.runs.sweep_cache import SweepCache
from auditor.statistics.metrics import COLUMNS, RECALL, find_metric
from auditor.studies.ledger import Place, study_seed_ranges_label

SWEEP = "sweep.json"
DIFFERENCE = "recall_difference"


def run_sweep_points(
    points: Sequence[GridPoint],
    folder: Path,
    reporter: Reporter,
    command: str,
    *,
    refuse: bool = True,
) -> dict[str, str]:
    """Runs what is not finished; returns why points failed, by their name.

    refuse: whether a point that cannot run at all is refused before any other starts; else it
    counts as failed. Raises AuditError where the folder holds runs of other plans, where points do
    not agree on an engine, and where another process walks it.
    """
    plans, failures = _plans_and_failures_of_sweep_points(points, command, refuse)
    engines = {plan.compute.engine_options for plan in plans.values()} or {LOCAL}
    if len(engines) > 1:
        raise AuditError(f"expected one engine for all points of a grid, got {len(engines)}")
    # each point by one process
    plans = {name: plan.with_fields(**vars(LOCAL)) for name, plan in plans.items()}
    for point in points:
        if point.name in plans:
            _check_point_folder_holds_same_plan(folder / point.run_folder_name, plans[point.name])
    with locks.locked_folder(folder, SWEEP), closing(make_engine(engines.pop())) as engine:
        # Before the first run: an interrupted sweep is gone on with by this file alone.
        _write_sweep_file(folder, points, failures, command)
        waiting = []
        for number, point in enumerate(points, 1):
            path, called = (
                folder / point.run_folder_name,
                f"{number} of {len(points)}: {point.name}",
            )
            # result.json is written last of all: a folder without it is gone on with
            if point.name in plans and not (path / result_file.RESULT).is_file():
                waiting.append(_PendingPoint(called, point.name, plans[point.name], path))
        # for this process; and what is sent to each worker, as a reporter cannot be
        engine.set_work_context(_PointRunner(reporter), _WorkerPointRunner())
        # by name: workers finish in any order
        for done, (name, failure) in enumerate(
            engine.stream_long_results(_SweepPointsOnEngine(), waiting), 1
        ):
            if failure:
                failures[name] = failure  # written at once: an interrupted sweep still says why
                _write_sweep_file(folder, points, failures, command)
            if engine.workers:  # who shows no progress of its own
                reporter.progress(f"points run by {engine.description}", done, len(waiting))
    return failures


@dataclass(frozen=True)
class _PendingPoint:
    """A point that is to be run. called: the name of its stage."""

    called: str
    name: str
    plan: Plan
    path: Path


class _PointRunner:
    """Where points are run: models and labs are shared from one to the next."""

    def __init__(self, reporter: Reporter) -> None:
        self.reporter, self.shared = reporter, SweepCache()


@dataclass(frozen=True)
class _WorkerPointRunner:
    """Makes a `_PointRunner` on a worker, which writes the folders of its points itself: each
    folder has one writer."""

    there: WorkerStart = field(default_factory=WorkerStart)

    def __call__(self) -> _PointRunner:
        self.there.enter_folder()
        return _PointRunner(SilentReporter())


@dataclass(frozen=True)
class _SweepPointsOnEngine:
    """An engine's work: runs points, and gives of each its name and why it could not be run, ""
    where it was."""

    portion: ClassVar[int] = 1  # points that a worker is handed at a time

    def process_items(
        self, place: _PointRunner, items: Sequence[_PendingPoint]
    ) -> Iterator[tuple[str, str]]:
        for point in items:
            with place.reporter.stage(point.called):
                failure = _run_sweep_point_for_failure(
                    point.plan, point.path, _QuietReporter(place.reporter), place.shared
                )
            yield point.name, failure


def _plans_and_failures_of_sweep_points(
    points: Sequence[GridPoint], command: str, refuse: bool
) -> tuple[dict[str, Plan], dict[str, str]]:
    plans, failures = {}, {}
    for point in points:
        try:
            made = make_plan(point.plan, {"command": command})
            check_plan_and_select_plugins(made)
            plans[point.name] = made
        except AuditError as why:
            if refuse:
                raise AuditError(f"{point.name}: {why}") from why
            failures[point.name] = str(why)
    return plans, failures


def _check_point_folder_holds_same_plan(path: Path, wanted: Plan) -> None:
    """Raises AuditError where the folder holds the run of another plan, or one on other weights."""
    if not (path / "plan.json").is_file():
        return
    # both as JSON, where a tuple of the plan is a list: else no field of several values would be
    # the same
    held = RunFolder(path).plan()
    mine = wanted.to_json()
    for name in IN_FILE:
        if held.get(name) != mine[name]:
            raise AuditError(
                f"expected a new folder for -o, but {str(path)!r} was run with {name} = "
                f"{held.get(name)!r}, not {mine[name]!r}"
            )
    RunFolder(path).refuse_changed_weights(plan_weights.weight_digests_of_plan_files(wanted))


def _run_sweep_point_for_failure(
    wanted: Plan, path: Path, reporter: Reporter, shared: SweepCache
) -> str:
    """Runs one point to its end; returns why it could not be, or nothing."""
    # a run begins by writing it: where it is, that run is gone on with
    held = (path / "plan.json").is_file()
    folder = RunFolder.reopen(path) if held else RunFolder.create(path, path.name, wanted.to_json())
    try:
        # any error but AuditError ends the sweep: its finished points stay, and the same command
        # goes on
        files.write_run_reports(
            path, run_audit(wanted, make_site(wanted, reporter, shared), folder)
        )
    except AuditError as why:
        folder.discard_if_empty()
        return str(why)
    finally:
        folder.close()
    return ""


class _QuietReporter:
    """A reporter without the stages within a point, which would bury the one line a point; its
    progress stays."""

    def __init__(self, reporter: Reporter) -> None:
        self.progress, self.note, self.announce = (
            reporter.progress,
            reporter.note,
            reporter.announce,
        )

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        yield

    def show_greedy_recall(self, recall: Mapping[str, Measurement]) -> None: ...


# --- the folder
# -----------------------------------------------------------------------------------------------


def _write_sweep_file(
    folder: Path, points: Sequence[GridPoint], failures: Mapping[str, str], command: str
) -> None:
    # the fields of `_RecordedPoint`, which reads them back
    rows = [
        {**vars(point), "folder": point.run_folder_name, "failure": failures.get(point.name, "")}
        for point in points
    ]
    disk.replace_atomically(
        folder / SWEEP, json.dumps({"command": command, "points": rows}, indent=1) + "\n"
    )


@dataclass(frozen=True)
class _RecordedPoint:
    """A point as `sweep.json` holds it; failure: why it could not be run, or nothing."""

    variant: str
    at: dict[str, Any]
    seed: int
    plan: dict[str, Any]
    folder: str
    failure: str

    @property
    def grid_point(self) -> GridPoint:
        return GridPoint(self.variant, self.at, self.seed, self.plan)


def read_sweep_points(folder: Path) -> list[GridPoint]:
    """The points of a sweep that was started. Raises AuditError where there is none."""
    return [kept.grid_point for kept in _read_recorded_sweep_points(folder)]


def read_command_that_started_sweep(folder: Path) -> str:
    """The command that started the sweep: its points keep it, whoever goes on with them."""
    command: str = from_json(
        str, _read_sweep_file(folder).get("command"), f"{folder / SWEEP}: command"
    )
    return command


def _read_sweep_file(folder: Path) -> dict[str, Any]:
    return read_json_object(folder / SWEEP, "the points of a sweep")


def _read_recorded_sweep_points(folder: Path) -> tuple[_RecordedPoint, ...]:
    path = folder / SWEEP
    raw = _read_sweep_file(folder)
    kept: tuple[_RecordedPoint, ...] = from_json(
        tuple[_RecordedPoint, ...], raw.get("points"), f"{path}: points"
    )
    for one in kept:
        # The plan is JSON of any kind here; `attack` is the one field of it that is read before a
        # plan is made of it.
        from_json(
            tuple[str, ...], one.plan.get("attack"), f"{path}: attack of {one.grid_point.name}"
        )
    return kept


def planned_sweep_places(points: Sequence[GridPoint]) -> list[Place]:
    """The places of a grid before anything has run."""
    first: dict[str, GridPoint] = {}
    for point in points:
        first.setdefault(point.name_without_seed, point)
    return [Place(point.variant, point.at, tuple(point.plan["attack"])) for point in first.values()]


def read_sweep_places(folder: Path) -> list[Place]:
    """What a sweep folder holds, its seeds taken together, in the order of the plan."""
    return [
        _build_sweep_place_from_runs(held, folder)
        for held in _recorded_sweep_points_by_place(folder)
    ]


def sweep_leakage_frontiers(folder: Path) -> tuple[Frontier, ...]:
    """What leaks least at the same usefulness among all points of the sweep; none where they attack
    other targets."""
    runs = (
        (held[0], _finished_sweep_runs_by_seed(held, folder))
        for held in _recorded_sweep_points_by_place(folder)
    )
    models = [
        frontier.frontier_models_of_runs(found, first.variant, first.at)
        for first, found in runs
        if found
    ]
    return frontier.build_leakage_frontiers_of_models(
        frontier.merge_frontier_models_of_grid_points(models)
    )


def _recorded_sweep_points_by_place(folder: Path) -> Iterable[list[_RecordedPoint]]:
    grouped: dict[str, list[_RecordedPoint]] = {}
    for kept in _read_recorded_sweep_points(folder):
        grouped.setdefault(kept.grid_point.name_without_seed, []).append(kept)
    return grouped.values()


def _finished_sweep_runs_by_seed(held: Sequence[_RecordedPoint], folder: Path) -> Runs:
    return {
        kept.seed: (result_file.read_result(folder / kept.folder), folder / kept.folder)
        for kept in held
        if (folder / kept.folder / result_file.RESULT).is_file()
    }


def _build_sweep_place_from_runs(held: Sequence[_RecordedPoint], folder: Path) -> Place:
    finished = _finished_sweep_runs_by_seed(held, folder)
    failure = next(
        (kept.failure for kept in held if kept.failure), "" if finished else "not run yet"
    )
    results = [result for result, _ in finished.values()]
    about = ""
    if results:
        model, data = results[0].plan.get("model"), results[0].benchmark.name
        about = f"{Path(model).name} on {data}" if model else data
    first, cells = held[0], tuple(read_replicates(finished))
    return Place(first.variant, first.at, tuple(first.plan["attack"]), cells, failure, about)


# --- the table
# -----------------------------------------------------------------------------------------------


def sweep_table(title: str, held: Sequence[Place]) -> tables.RowTable:
    """A row a place and attack: means over seeds with intervals, and the paired difference from the
    first row.

    Other numbers have a column where they are not the same in every row, or are all that a row has.
    """
    columns = _sweep_table_metric_headings(held)
    rows = list(_sweep_table_rows(held, columns))
    several = len({(row.cell.target, row.cell.setting) for row in rows if row.cell}) > 1
    keys = list(dict.fromkeys(key for place in held for key in place.at))
    # in the order of `machine_readable_cells`
    bounds = [f"{name}{end}" for name in (*columns, DIFFERENCE) for end in ("", "_low", "_high")]
    # as `numbers` of a row: columns, then the difference
    heads = (
        *columns.values(),
        "Δ recall to first",
    )
    # what is read; files hold all
    filled = [i for i in range(len(heads)) if any(row.numbers[i] for row in rows)]
    return tables.RowTable(
        title,
        ("point", *(["row"] if several else []), "attack", *(heads[i] for i in filled), "seeds"),
        tuple(row.terminal_cells(several, filled) for row in rows),
        "Means over seeds; 95% intervals resample secrets, of perplexities held-out texts; "
        "differences are paired over secrets and seeds.",
        ("variant", *keys, "target", "setting", "attack", "seeds", "n", *bounds, "failure"),
        tuple(row.machine_readable_cells(keys) for row in rows),
    )


def _sweep_table_metric_headings(held: Sequence[Place]) -> dict[str, str]:
    """Metric -> heading: of attacks, of each probe its main number, and what only matters where it
    differs."""
    cells = [cell for place in held for cell in place.cells if cell.measured]
    always = {metric.name: metric.short for metric in COLUMNS if not metric.varies}
    varying = {metric.name: metric.short for metric in COLUMNS if metric.varies}
    seen = {
        name: {m[name].value for c in cells for m in c.measured.values() if name in m}
        for name in varying
    }
    # A probe has no outcomes; the first number that it measures is its main one.
    mains = [
        next(iter(next(iter(cell.measured.values()))))
        for cell in cells
        if not cell.member_outcomes_by_seed
    ]
    probed = {name: phrases.metric_label(name) for name in mains if name not in varying}
    return always | probed | {name: head for name, head in varying.items() if len(seen[name]) > 1}


@dataclass(frozen=True)
class _SweepTableRow:
    place: Place
    cell: Replicates | None
    numbers: tuple[Measurement | None, ...]  # of the columns, and DIFFERENCE
    failure: str

    @property
    def seeds_label(self) -> str:
        return study_seed_ranges_label(sorted(self.cell.measured)) if self.cell else ""

    def terminal_cells(self, several: bool, filled: Sequence[int]) -> tuple[str, ...]:
        attack = self.cell.attack if self.cell else ", ".join(self.place.attacks)
        row = f"{self.cell.target}, {self.cell.setting}" if self.cell else ""
        last = " · ".join(filter(None, [self.seeds_label, self.failure]))
        name = grid_point_name(self.place.variant, self.place.at) or "plan"
        numbers = (
            phrases.value_with_interval(m) if m else "" for m in (self.numbers[i] for i in filled)
        )
        return (name, *([row] if several else []), attack, *numbers, last)

    def machine_readable_cells(self, keys: Sequence[str]) -> tuple[object, ...]:
        cell, place = self.cell, self.place
        where = (
            (cell.target, cell.setting, cell.attack) if cell else ("", "", ", ".join(place.attacks))
        )
        n = next((m.n for m in self.numbers if m), None)
        bounds = [
            getattr(m, end) if m else None for m in self.numbers for end in ("value", "low", "high")
        ]
        at = [place.at.get(key) for key in keys]
        return (place.variant, *at, *where, self.seeds_label, n, *bounds, self.failure)


def _sweep_table_rows(
    held: Sequence[Place], columns: Mapping[str, str]
) -> Iterator[_SweepTableRow]:
    nothing = (None,) * (len(columns) + 1)
    first: dict[
        str, Replicates
    ] = {}  # by setting: differences are taken at matched access and decoding only
    for place in held:
        if not place.cells:
            yield _SweepTableRow(place, None, nothing, f"failed: {place.failure}")
        for cell in place.cells:
            if not cell.measured:
                yield _SweepTableRow(place, cell, nothing, f"not applicable: {cell.not_applicable}")
                continue
            numbers = [
                contrast_over_seeds(name, [WeightedMetric(1.0, name, cell)])
                if _has_sweep_cell_metric(cell, name)
                else None
                for name in columns
            ]
            # a probe has no recall to compare
            base = first.setdefault(cell.setting, cell) if cell.member_outcomes_by_seed else cell
            paired = base is not cell and set(base.member_outcomes_by_seed) & set(
                cell.member_outcomes_by_seed
            )
            parts = [WeightedMetric(1.0, RECALL, cell), WeightedMetric(-1.0, RECALL, base)]
            difference = contrast_over_seeds(DIFFERENCE, parts) if paired else None
            yield _SweepTableRow(place, cell, (*numbers, difference), place.failure)


def _has_sweep_cell_metric(cell: Replicates, name: str) -> bool:
    # Numbers of members are worked out of outcomes, others were recorded by name.
    return (
        bool(cell.member_outcomes_by_seed)
        if find_metric(name).is_of_member_guesses
        else all(name in m for m in cell.measured.values())
    )


def write_sweep_table_files(folder: Path, held: tables.RowTable) -> None:
    disk.replace_atomically(folder / "sweep.csv", tables.row_table_to_csv(held))
    disk.replace_atomically(folder / "sweep.md", tables.row_table_to_markdown(held))
