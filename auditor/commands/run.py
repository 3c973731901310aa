"""`audit run`: run one audit, or a grid of audits."""

from __future__ import annotations

import copy
import dataclasses
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from auditor.commands import console, options
from auditor.commands import gate as gates
from auditor.commands.options import Many
from auditor.commands.report import compare_baseline_run, print_private_text_warning
from auditor.commands.show import print_result_screen
from auditor.core.counts import format_count
from auditor.core.errors import AuditError
from auditor.core.plan import Plan

if TYPE_CHECKING:
    from auditor.conclusions.outcomes import RunOutcomes
    from auditor.core.result import AuditResult
    from auditor.gate.policy import Policy
    from auditor.records.folder import RunFolder
    from auditor.records.remarks import CommandRemarks
    from auditor.runs.asking import TimeLimit
    from auditor.runs.plan import GridPoint
    from auditor.runs.sweep_cache import SweepCache

    HeldTo = tuple[Policy | None, RunOutcomes | None]


@dataclass(frozen=True, kw_only=True)
class GridFlags:
    """Flags for a plan file, and for a grid of plans.

    config (PLAN.toml): Plan file; flags given here override it.
    sweep (KEY=V1,V2|KEY=START:STOP:STEP): One run per value of a plan field or ATTACK.OPTION;
        repeatable.
    checkpoints (DIR): One run per checkpoint-STEP in a trainer's output folder.
    """

    panel: ClassVar[str] = "advanced"

    config: Path | None = None
    sweep: Many = None
    seeds: Annotated[str | None, "compute"] = None
    checkpoints: Path | None = None


@dataclass(frozen=True, kw_only=True)
class SingleFlags:
    """Flags for a single run: policy, baseline, private text and estimate.

    gate (POLICY): Judge the run as `audit gate` does: exit code, gate.md, gate.xml.
    baseline (RUN): Earlier run that report and --gate compare with.
    estimate: Only estimate how long the run would take: half a minute after the models are loaded
        (a lab is trained first).
    """

    panel: ClassVar[str] = "output"

    gate: Path | None = None
    baseline: Path | None = None
    reveal: bool = False
    estimate: bool = False


_MANY = 10_000  # records whose memory is worth a second
_ONE_ONLY = {
    "gate": "--gate judges a single run, got a grid of runs; gate them one by one",
    "reveal": "--reveal shows the text of a single run, got a grid of runs; audit report RUN "
    "--reveal",
    "baseline": "--baseline compares with a single run, got a grid of runs",
    "estimate": "--estimate takes a single run, got a grid of runs; estimate one of them",
    "until": "--until stops the configurations of a single run, got a grid of runs",
    "submission": "--submission writes the guesses of a single run, got a grid of runs",
}


def run(
    *,
    out: Annotated[Path | None, "output"] = None,
    single: SingleFlags,
    plan: Annotated[options.Values, options.PlanFlags(forms=True)],
    grid: GridFlags,
    resume: Annotated[Path | None, "output"] = None,
    verbose: Annotated[bool, "output"] = False,
) -> None:
    """Attack a model, with and without defenses, and report what it leaks. Without --model: the
    built-in lab.

    Args:
        out (-o, --out DIR): Run folder; runs/latest does not link to it. [default: runs/<UTC
            time>-<name>]
        resume (RUN): Continue an interrupted run; add only --reveal, --gate or --baseline.
        verbose (-v, --verbose): Show stages, choices and every configuration on screen.

    Examples:
        audit run --attack ethicist --defense pmixed
        audit run --model ./my-model --data private.jsonl --nonmembers fresh.jsonl --estimate
    """
    from auditor.records.folder import remove_latest_link

    allowed = options.list_allowed_risks(plan)
    other_fields = set(plan) - {name for name, _ in allowed}
    if resume is not None and (other_fields or options.list_given_flags(grid) or out is not None):
        raise AuditError(
            "--resume takes the plan from the run folder: give no other option with it, except "
            "those "
            "that must be named again if the plan needs them, such as --plugin and --base-url"
        )
    _refuse_flags_beside_estimate_flag(single, resume, out, plan.get("submission"))
    # Do this now: if this run is refused below, runs/latest must not show an older run.
    if out is None and resume is None and not single.estimate:
        remove_latest_link()
    base = gates.read_flagged_run(single.baseline)  # refused now rather than after hours
    policy = None
    if single.gate is not None:
        from auditor.gate.decide import check_gate_policy

        policy = gates.GateLimitFlags(policy=single.gate).build_policy()
        check_gate_policy(policy, base)
    # This imports a part of transformers, which takes a second: refuse what needs no import before.
    console.silence_libraries()
    requested: Plan | RunFolder | list[GridPoint]
    if resume is None:
        requested = _build_requested_plans(plan, grid)
    else:
        from auditor.studies import sweep

        if (resume / sweep.SWEEP).is_file():
            requested = list(sweep.read_started_sweep(resume).points)
        else:
            requested = reopen_run(resume, allowed)
    if isinstance(requested, list):
        names = set(options.list_given_flags(single))
        for point in requested:  # a sweep may name more risks than its plan
            options.refuse_unnamed_risks(point.plan, allowed, point.name)
            names |= point.plan.keys()
        # `until` and `submission` are fields of a plan; the others are flags outside the plan.
        for name, reason in _ONE_ONLY.items():
            if name in names:
                raise AuditError(reason)
        _print_grid_run(requested, out, resume, grid.config, verbose)
        return
    if single.estimate and isinstance(requested, Plan):
        _print_cost_estimate(requested)
        return
    folder = _run_restricted_plan(requested, out, (policy, base), single, verbose)
    if policy is not None:
        outputs = gates.GateOutputFlags(junit=folder / "gate.xml", markdown=folder / "gate.md")
        code = gates.print_run_judgement(folder, policy, base, outputs)
        if code != 0:
            raise typer.Exit(code)
    _check_each_attack_ran(folder)


def _check_each_attack_ran(folder: Path) -> None:
    """Raise AuditError if a requested attack ran on none of the targets.

    Call this after results are shown.
    """
    from auditor.records.result_file import read_result
    from auditor.reports import coverage

    if idle := coverage.explain_missing_attacks(read_result(folder)):
        reasons = "; ".join(
            f"--attack {name} ran on no target: {reason}" for name, reason in idle.items()
        )
        raise AuditError(f"{reasons}. All else was measured: {folder}")


def _refuse_flags_beside_estimate_flag(
    single: SingleFlags, resume: Path | None, out: Path | None, submission: str | None
) -> None:
    """Raise AuditError for flags that conflict with --estimate.

    With --estimate, nothing is attacked and nothing is written.
    """
    ignored = {"resume": resume, "out": out, "submission": submission}
    ignored |= options.list_given_flags(single)
    for name, value in ignored.items():
        if single.estimate and value is not None and name != "estimate":
            raise AuditError(f"--estimate runs and writes nothing: give no --{name} with it")


def _print_cost_estimate(plan: Plan) -> None:
    from auditor.runs import estimate

    with console.open_progress_terminal() as reporter:
        cost_estimate = estimate.estimate_run_cost(
            plan, reporter, starting=console.seconds_since_start()
        )
    console.print_table(estimate.build_run_cost_table(cost_estimate))


def _build_requested_plans(flags: options.Values, grid_flags: GridFlags) -> Plan | list[GridPoint]:
    """Build the plan from the flags and the plan file.

    Return the points of a grid if there are several runs.
    """
    from auditor.runs import plan

    base = {}
    if grid_flags.config:
        base = plan.read_plan_file(grid_flags.config, plan.GRID)
    file = copy.deepcopy(base)
    if grid_flags.seeds is not None or "seed" in flags:
        # The flags win: a grid over the seeds of the file would override --seed.
        base.pop("seeds", None)
    if grid_flags.checkpoints is not None:
        if "model" in flags:
            raise AuditError("--checkpoints replaces --model, got both")
        from auditor.studies import checkpoints

        base.setdefault("sweep", {})["model"] = checkpoints.find_checkpoints(grid_flags.checkpoints)
    if grid_flags.sweep:
        base.setdefault("sweep", {}).update(plan.parse_sweep_flags(grid_flags.sweep))
    if grid_flags.seeds is not None:
        base["seeds"] = plan.parse_seed_ranges(grid_flags.seeds)
    values = options.collect_plan_values(flags, base)
    if any(name in base for name in plan.GRID):
        points = plan.expand_plan_grid(plan.merge_plan_values(base, values))
        plan.refuse_flags_without_effect(file, values)
        return points
    return plan.make_plan(base, {**values, "command": console.get_command_line()})


def reopen_run(path: Path, allowed: options.Risks) -> RunFolder:
    """Reopen the run folder.

    Raise AuditError if the folder would run code that the command line does not allow.
    """
    from auditor.records.folder import RunFolder

    folder = RunFolder.reopen(path)
    try:
        where = str(path / "plan.json")
        options.check_plan_has_risks(Plan.from_json(folder.plan(), where), allowed, where)
    except AuditError:
        folder.close()  # it holds the lock of the folder
        raise
    return folder


def _print_grid_run(
    points: list[GridPoint],
    out: Path | None,
    resume: Path | None,
    config: Path | None,
    verbose: bool,
) -> None:
    from auditor.records.folder import find_unused_path
    from auditor.reports import frontier
    from auditor.studies import checkpoints, sweep

    folder = resume or out or find_unused_path(f"sweep-{config.stem if config else 'flags'}")
    command = console.get_command_line()
    if resume:
        command = sweep.read_started_sweep(resume).command
    with console.open_progress_terminal(verbose, console.resume_grid_hint(folder)) as reporter:
        failures = sweep.run_sweep_points(points, folder, reporter, command)
    places = sweep.read_study_points(folder)
    table = sweep.build_sweep_table(f"{format_count(len(points), 'run')} in {folder}", places)
    if others := sweep.list_other_runs(folder, points):
        left_out = f"Left out, because this grid has no such points: {', '.join(others)}."
        table = dataclasses.replace(table, note=f"{table.note} {left_out}")
    sweep.write_sweep_table_files(folder, table)
    console.print_table(table)
    checkpoints.write_checkpoint_history(folder, places)
    compared = sweep.build_sweep_frontiers(folder)
    for leakage_frontier in compared:
        typer.echo(frontier.describe_frontier(leakage_frontier))
    if paths := frontier.write_frontier_files(folder, compared):
        typer.echo(f"written: {', '.join(map(str, paths))}")
    if failures:
        name, reason = next(iter(failures.items()))
        raise AuditError(f"{len(failures)} of {len(points)} points failed; {name}: {reason}")


def _run_restricted_plan(
    source: Plan | RunFolder, out: Path | None, held_to: HeldTo, single: SingleFlags, verbose: bool
) -> Path:
    """Run a plan, or continue the run in its folder. Write the reports, and return the run folder.

    held_to: policy and baseline of the gate that judges the run afterwards.
    """
    from auditor.gate.decide import check_rule_metrics, check_ruled_rows_exist
    from auditor.records.folder import RunFolder
    from auditor.reports import files
    from auditor.runs.run import plan_audit
    from auditor.runs.site import Site

    if isinstance(source, Plan):
        plan = source
    else:
        plan = Plan.from_json(source.plan())
    # All checks before `create`: a refused plan leaves no folder.
    selection = plan_audit(Site(plan), *held_to).selection
    policy = held_to[0]
    if policy is not None:
        check_ruled_rows_exist(policy, selection.list_cell_keys())
        # A plug-in may measure metrics that the table lacks: then only the finished run can check
        # them.
        if not selection.own_methods:
            check_rule_metrics(policy.rules)
    if isinstance(source, Plan):
        folder = RunFolder.create(out, plan.run_folder_title, plan.to_json())
    else:
        folder = source
    print_plan_audit(folder, single.reveal, verbose, held_to=held_to)
    if single.baseline is not None:
        files.rewrite_run_reports(
            folder.path,
            compare_baseline_run(single.baseline, folder.path),
            single.reveal,
        )
    return folder.path


def print_plan_audit(
    folder: RunFolder,
    reveal: bool = False,
    verbose: bool = False,
    shared: SweepCache | None = None,
    remarks: CommandRemarks | None = None,
    held_to: HeldTo = (None, None),
    limit: TimeLimit | None = None,
) -> None:
    """Run the plan of a folder, write reports, and print the result.

    Args:
        shared: models that are already loaded.
        remarks: text that `audit check` adds to the first screen, stored in the folder.
        held_to: policy and baseline of the gate that judges the run afterwards.
        limit: time limit of queries; if set, the records most at risk come first, and intermediate
            results are printed.
    """
    from auditor.models.memory import release_unused_memory
    from auditor.records.remarks import write_command_remarks
    from auditor.reports import coverage, files
    from auditor.runs import quick_check
    from auditor.runs.run import plan_audit, run_audit
    from auditor.runs.site import Site
    from auditor.runs.submission import write_submission

    plan = Plan.from_json(folder.plan())
    command = "run" if limit is None else "check"
    path = shlex.quote(str(folder.path))
    again = ["audit", command, "--resume", path, *options.format_risk_flags(plan)]
    if remarks is not None:
        write_command_remarks(folder.path, remarks)
    hint = f"finished secrets are kept. Continue with: {' '.join(again)}"

    def publish(meanwhile: AuditResult) -> None:
        files.write_run_reports(folder.path, meanwhile, reveal)
        console.print_stderr_line(coverage.format_progress_line(meanwhile), 0)

    with console.open_progress_terminal(verbose, hint) as reporter:
        try:
            site = Site(plan, reporter, shared)
            if limit is not None:
                quick_check.enable_hidden_state_caches(site)
            result = run_audit(
                plan_audit(site, *held_to),
                folder,
                limit=limit,
                publish=publish,
                is_check=limit is not None or remarks is not None,
            )
            del site  # models and data, which no report needs
            if result.benchmark.members > _MANY:
                release_unused_memory()
            files.write_run_reports(folder.path, result, reveal)
        except (AuditError, OSError):
            # Keep the folder at Ctrl-C: --resume continues it.
            folder.discard_if_empty()
            raise
    print_result_screen(result, folder.path, verbose)
    if reveal:
        print_private_text_warning(folder.path)
    if plan.output.submission is not None:
        cell, guesses = write_submission(Path(plan.output.submission), plan.attacks, folder)
        summary = f"{guesses:,} guesses of {cell}; token ids of private text, readable by you only"
        typer.echo(f"submission: {plan.output.submission} ({summary})")
