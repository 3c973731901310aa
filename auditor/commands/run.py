"""`audit run`: one audit, or a grid of them."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from auditor.commands import console, options
from auditor.commands import gate as gates
from auditor.commands.options import Many
from auditor.commands.report import changes, say_revealed
from auditor.core.counts import counted
from auditor.core.errors import AuditError
from auditor.core.plan import Plan

if TYPE_CHECKING:
    from auditor.gate.policy import Policy
    from auditor.records.folder import RunFolder
    from auditor.records.outcomes import Run
    from auditor.runs.grid import Point


@dataclass(frozen=True, kw_only=True)
class PlanFlags:
    """The fields of a plan that have a flag: what is not given is left to the plan file, or to the default."""

    attack: Annotated[
        Many, typer.Option("--attack", "-a", help="Attack or probe to run; repeat for several. See `audit list`.")
    ] = None
    defense: options.Defense = None
    subject: options.SubjectFlags
    known_fraction: Annotated[
        float | None, typer.Option(help="Share of the data that the attacker knows, without --known. [default: 0.2]")
    ] = None
    known_limit: Annotated[
        int | None, typer.Option(help="At most so many records of the auxiliary data. [default: all]")
    ] = None
    group_column: Annotated[
        str | None,
        typer.Option(
            metavar="COLUMN", help="Column of --data to show results by, as department; its values are in the report."
        ),
    ] = None
    before: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL", help="What --model was before it was to forget --forget, to hold the two together."
        ),
    ] = None
    forget: Annotated[str | None, typer.Option(help="Records of --data that --model was to forget (same formats).")] = (
        None
    )
    retrained: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL", help="Trained as --before was, without --forget: what forgetting is held against."
        ),
    ] = None
    relearn: Annotated[
        int | None,
        typer.Option(
            metavar="STEPS", help="Train a copy of what was to forget so many steps on known pairs, and look again."
        ),
    ] = None
    relearn_rate: Annotated[
        float | None, typer.Option(help="Learning rate of --relearn. [default: 5e-5; in the lab 1e-4]")
    ] = None
    phone_region: options.PhoneRegion = None
    canaries: Annotated[
        str | None,
        typer.Option(metavar="MANIFEST", help="Canaries that were inserted into the training data: `audit canaries`."),
    ] = None
    attack_options: Annotated[
        Many, typer.Option("-A", metavar="[ATTACK.]OPTION=VALUE", help="Option of an attack.")
    ] = None
    defense_options: options.DefenseOptions = None
    setting: Annotated[
        str | None,
        typer.Option(help="claim: inside a privacy claim; worst: everything the auditor has; both. [default: both]"),
    ] = None
    prefix_length: Annotated[
        int | None, typer.Option(help="Tokens shown to the attacker. [default: 50 of text, whole arrays]")
    ] = None
    suffix_length: Annotated[
        int | None, typer.Option(help="Tokens to extract. [default: 50 of text, whole arrays]")
    ] = None
    knows: Annotated[
        str | None,
        typer.Option(
            metavar="system|user|partial:F",
            help="What an attacker knows of a conversation, of an assistant turn: all before it; that and the share F "
            "of the turn; or the system turn alone. [default: user]",
        ),
    ] = None
    windows: Annotated[
        int | None,
        typer.Option(
            metavar="STRIDE", help="Attack whole texts: a prefix and suffix every STRIDE tokens. [default: the start]"
        ),
    ] = None
    template: options.Template = None
    date: options.Date = None
    lead: Annotated[
        str | None,
        typer.Option(
            metavar="auto|none|bos|eos|TEXT",
            help="Prefix token of every text, as BOS; auto: the tokenizer's own, unless the auxiliary data are more "
            "likely behind another. [default: auto]",
        ),
    ] = None
    limit: options.Limit = None
    ensemble_limit: Annotated[
        int | None,
        typer.Option(
            help="At most so many members behind an ensemble, which asks all its parts. [default: all; in the lab 60]"
        ),
    ] = None
    controls: Annotated[
        bool | None,
        typer.Option(
            "--controls/--no-controls",
            help="Show each defense beside its controls; without them nothing says what an effect is due to. "
            "[default: --controls]",
        ),
    ] = None
    samples: Annotated[int | None, typer.Option(help="Samples a prefix, for every attack.")] = None
    seed: options.Seed = None
    batch_size: options.BatchSize = None
    api: options.ApiFlags
    loading: options.HubLoadingFlags
    device_map: Annotated[
        str | None,
        typer.Option(
            metavar="auto|balanced|sequential|JSON",
            help="Spread models over GPUs, memory and disk, as transformers does. [default: all on --device]",
        ),
    ] = None
    quantise: Annotated[
        str | None,
        typer.Option(metavar="8bit|4bit", help="Load --model in fewer bits, by bitsandbytes. [default: as in --dtype]"),
    ] = None
    model_args: options.ModelArgs = None
    engine: options.EngineFlags
    plugin: options.Plugin = None
    submission: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="LM-Extraction submission to write: one attack, undefended, in the worst setting (claim if only that "
            "is run), its first guess of each attacked row, surest first. It holds private text as token ids.",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class GridFlags:
    """A plan file, and what makes a grid of it."""

    config: Annotated[Path | None, typer.Option(help="Plan in TOML; flags win over it.")] = None
    sweep: Annotated[
        Many,
        typer.Option(
            metavar="KEY=V1,V2|KEY=START:STOP:STEP",
            help="Run every value of a plan field or ATTACK.OPTION; wins over it; repeatable.",
        ),
    ] = None
    seeds: options.Seeds = None
    checkpoints: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Run every checkpoint-STEP in a trainer's output folder in place of --model."),
    ] = None


@dataclass(frozen=True, kw_only=True)
class SingleFlags:
    """What only a single run can be asked for: its policy, its baseline, its private text and its estimate."""

    gate: Annotated[
        Path | None,
        typer.Option(
            metavar="POLICY",
            help="Hold the run to this policy when it is done: exit code of the gate, gate.md and gate.xml.",
        ),
    ] = None
    baseline: Annotated[
        Path | None,
        typer.Option(metavar="RUN", help="Run folder that the report shows changes against, and --gate compares with."),
    ] = None
    reveal: options.Reveal = False
    estimate: Annotated[
        bool,
        typer.Option(
            "--estimate",
            help="Ask the models for half a minute, and say what the run would take: rows, tokens, memory, time. Runs "
            "and writes nothing.",
        ),
    ] = False


_ONE_ONLY = {
    "gate": "--gate holds a single run to a policy, got a grid of them; gate its runs one by one",
    "reveal": "--reveal shows the text of a single run, got a grid of them; audit report RUN --reveal",
    "baseline": "--baseline is what a single run is held against, got a grid of them",
    "estimate": "--estimate is of a single run, got a grid of them; estimate one of its runs",
    "submission": "--submission holds the guesses of a single run, got a grid of them",
}


def run(
    plan: PlanFlags,
    grid: GridFlags,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="Run folder. [default: runs/<UTC time>-<name>]")
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(
            help="Continue an interrupted run from its folder; takes only --reveal and the options of the gate."
        ),
    ] = None,
    *,
    single: SingleFlags,
) -> None:
    """Attack a model, with and without defenses, and report what it leaks. Without --model: the built-in lab."""
    from auditor.records.folder import forget_latest

    flags = options.given(plan)
    allowed = options.Allowed.by(flags)
    if resume is not None and (set(flags) - set(vars(allowed)) or options.given(grid) or out is not None):
        raise AuditError(
            "--resume takes the plan from the run folder: give no other option with it, but --plugin and "
            "--trust-remote-code where the plan asks for them"
        )
    _check_estimate(single, resume, out, plan.submission)
    if out is None and resume is None and not single.estimate:
        forget_latest()
    base = gates.run_at(single.baseline)  # refused now rather than after hours
    policy = None if single.gate is None else _policy(single.gate, base)
    console.quiet()
    asked = _asked(plan, grid) if resume is None else _reopened(resume, allowed)
    if isinstance(asked, list):
        for point in asked:  # a sweep may name more than the plan that it is of
            allowed.check(point.plan, point.name)
        _check_grid(asked, options.given(single))
        _run_grid(asked, out, resume, grid.config)
        return
    if single.estimate and isinstance(asked, Plan):
        _estimate(asked)
        return
    folder = _run_one(asked, out, policy, single)
    if policy is not None:
        outputs = gates.Outputs(junit=folder / "gate.xml", markdown=folder / "gate.md")
        raise typer.Exit(gates.hold(folder, policy, base, outputs))


def _check_estimate(single: SingleFlags, resume: Path | None, out: Path | None, submission: str | None) -> None:
    """Refuses what an estimate, which runs and writes nothing, would ignore. Raises AuditError."""
    beside = {"--resume": resume, "--out": out, "--submission": submission}
    beside |= {f"--{name}": value for name, value in options.given(single).items() if name != "estimate"}
    for name, value in beside.items():
        if single.estimate and value is not None:
            raise AuditError(f"--estimate runs and writes nothing: give no {name} with it")


def _estimate(plan: Plan) -> None:
    from auditor.runs import estimate

    with console.terminal() as reporter:
        found = estimate.estimate(plan, reporter)
    console.show(estimate.table(found))


def _policy(path: Path, baseline: Run | None) -> Policy:
    from auditor.gate.decide import check_policy

    policy = gates.Limits(policy=path).read()
    check_policy(policy, baseline)
    return policy


def _asked(flags: PlanFlags, grid_flags: GridFlags) -> Plan | list[Point]:
    """The plan that the flags and the plan file ask for, or the points of the grid."""
    from auditor.runs import grid, plan

    base = plan.read_toml(grid_flags.config, grid.GRID) if grid_flags.config else {}
    if grid_flags.seeds is not None or flags.seed is not None:
        base.pop("seeds", None)
    if grid_flags.checkpoints is not None:
        base["sweep"] = {**base.get("sweep", {}), "model": _checkpoints(grid_flags.checkpoints, flags)}
    if grid_flags.sweep:
        base["sweep"] = {**base.get("sweep", {}), **grid.parse_sweep(grid_flags.sweep)}
    if grid_flags.seeds is not None:
        base["seeds"] = grid.parse_seeds(grid_flags.seeds)
    values = options.plan_values(flags, base)
    if grid.is_grid(base):
        return grid.expand(plan.merge(base, values))
    return plan.make(base, {**values, "command": console.command()})


def _checkpoints(folder: Path, flags: PlanFlags) -> list[str]:
    from auditor.studies import checkpoints

    if options.given(flags).get("model") is not None:
        raise AuditError("--checkpoints names the models of a run, got it with --model")
    return checkpoints.found(folder)


def _reopened(folder: Path, allowed: options.Allowed) -> RunFolder | list[Point]:
    """A run that was started, or the points of a grid that was. Raises AuditError for code that is not allowed."""
    from auditor.core.jsonable import from_json
    from auditor.records.folder import RunFolder
    from auditor.studies import sweep

    if (folder / sweep.SWEEP).is_file():
        return sweep.reopen(folder)
    reopened = RunFolder.reopen(folder)
    try:
        allowed.check_whole(from_json(Plan, reopened.plan(), "plan"), str(folder / "plan.json"))
    except AuditError:
        reopened.close()
        raise
    return reopened


def _check_grid(points: list[Point], single: Mapping[str, Any]) -> None:
    for name, why in _ONE_ONLY.items():
        if name in single or any(name in point.plan for point in points):
            raise AuditError(why)


def _run_grid(points: list[Point], out: Path | None, resume: Path | None, config: Path | None) -> None:
    from auditor.core import disk
    from auditor.records.folder import new_folder
    from auditor.reports import frontier
    from auditor.studies import checkpoints, sweep

    folder = resume or out or new_folder(f"sweep-{config.stem if config else 'flags'}")
    command = (sweep.begun_by(resume) if resume else None) or console.command()
    failures = console.resumably(folder, lambda reporter: sweep.walk(points, folder, reporter, command))
    held = sweep.places(folder)
    table = sweep.table(f"{counted(len(points), 'run')} in {folder}", held)
    sweep.write_table(folder, table)
    if curve := checkpoints.curve(held):
        disk.replace(folder / "checkpoints.svg", curve)
    console.show(table)
    compared = sweep.frontiers(folder)
    for found in compared:
        typer.echo(frontier.sentence(found))
    if paths := frontier.write(folder, compared):
        typer.echo(f"written: {', '.join(map(str, paths))}")
    if failures:
        name, why = next(iter(failures.items()))
        raise AuditError(f"{len(failures)} of {len(points)} points failed; {name}: {why}")


def _run_one(asked: Plan | RunFolder, out: Path | None, policy: Policy | None, single: SingleFlags) -> Path:
    """Runs a plan, or goes on with the folder of one. Returns the folder of the run, with its reports in it."""
    from auditor.core.jsonable import from_json, to_json
    from auditor.gate.decide import check_metrics, check_rows
    from auditor.records.folder import RunFolder
    from auditor.reports import files
    from auditor.runs.run import check

    plan: Plan = asked if isinstance(asked, Plan) else from_json(Plan, asked.plan(), "plan")
    selection = check(plan)
    if policy is not None:
        check_rows(policy, selection.cells())
        if selection.ours:
            check_metrics(policy.rules)
    folder = RunFolder.create(out, plan.title, to_json(plan)) if isinstance(asked, Plan) else asked
    _audit(plan, folder, single.reveal)
    if single.baseline is not None:
        files.render_all(folder.path, changes(single.baseline, folder.path), single.reveal)
    return folder.path


def _audit(plan: Plan, folder: RunFolder, reveal: bool) -> None:
    from auditor.reports import files
    from auditor.reports.terminal import summary
    from auditor.runs.run import run as audit
    from auditor.runs.submission import submit

    with console.terminal() as reporter:
        try:
            result = audit(plan, folder, reporter)
            files.write(folder.path, result, reveal)
        except KeyboardInterrupt:
            again = " ".join(("audit run --resume", shlex.quote(str(folder.path)), *options.Allowed.of(plan).flags()))
            console.say(f"interrupted; finished secrets are kept. Continue with: {again}", 130)
            raise
        except (AuditError, OSError):
            folder.discard_if_empty()
            raise
    Console().print(summary(result, folder.path))
    if reveal:
        say_revealed(folder.path)
    if plan.submission is not None:
        cell, guesses = submit(plan, folder)
        what = f"{guesses:,} guesses of {cell}; token ids of private text, readable by you only"
        typer.echo(f"submission: {plan.submission} ({what})")
