"""The `audit` command. Parses, calls one function, sets an exit code; imports nothing heavy before it is needed."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from auditor import __version__
from auditor.commands import canaries as canary_commands
from auditor.commands import console
from auditor.commands import train as train_command
from auditor.commands import utility as utility_command
from auditor.commands.console import Many
from auditor.commands.export import export
from auditor.core import disk
from auditor.core.errors import AuditError, of_a_place
from auditor.core.threads import settle

if TYPE_CHECKING:
    from auditor.core.plan import Plan
    from auditor.gate.compare import Comparison
    from auditor.gate.policy import Policy
    from auditor.gate.rulings import Decision
    from auditor.records.outcomes import Run
    from auditor.studies.papers import Paper

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Measures what a language model leaks of its training data, and what a defense changes about it.",
    epilog="Exit codes: 0 done or gate held, 1 gate failed, 2 wrong usage or bad input, 3 unexpected failure, "
    "4 gate inconclusive, 130 interrupted.",
)


@app.command()
def run(
    attack: Annotated[
        Many, typer.Option("--attack", "-a", help="Attack or probe to run; repeat for several. See `audit list`.")
    ] = None,
    defense: Annotated[
        Many, typer.Option("--defense", "-d", help="Defense to put in front of the model; repeatable.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Hugging Face causal LM or PEFT adapter: hub id or folder. Without it: the lab.")
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="Training records: JSONL/CSV/Parquet, a Hugging Face data set, or a folder of LM-Extraction arrays."
        ),
    ] = None,
    known: Annotated[str | None, typer.Option(help="Records the attacker already knows (same formats).")] = None,
    known_fraction: Annotated[
        float | None, typer.Option(help="Share of the data that the attacker knows, without --known. [default: 0.2]")
    ] = None,
    known_limit: Annotated[
        int | None, typer.Option(help="At most so many known pairs for the attacker to tune on. [default: all]")
    ] = None,
    nonmembers: Annotated[
        str | None,
        typer.Option(help="Matched records the model was not trained on: the floor, and held-out perplexity."),
    ] = None,
    group_column: Annotated[
        str | None,
        typer.Option(
            metavar="COLUMN", help="Column of --data to show results by, as department; its values are in the report."
        ),
    ] = None,
    canaries: Annotated[
        str | None,
        typer.Option(metavar="MANIFEST", help="Canaries that were inserted into the training data: `audit canaries`."),
    ] = None,
    public: Annotated[
        str | None,
        typer.Option(help="Public model: base of a PMixED ensemble, and what claim-setting prompts are tuned on."),
    ] = None,
    reference: Annotated[
        str | None, typer.Option(help="Reference model for comparing scores. [default: --public]")
    ] = None,
    attack_option: Annotated[
        Many, typer.Option("-A", metavar="[ATTACK.]OPTION=VALUE", help="Option of an attack.")
    ] = None,
    defense_option: Annotated[
        Many, typer.Option("-D", metavar="[DEFENSE.]OPTION=VALUE", help="Option of a defense.")
    ] = None,
    setting: Annotated[
        str | None,
        typer.Option(help="claim: inside a privacy claim; worst: everything the auditor has; both. [default: both]"),
    ] = None,
    prefix_length: Annotated[
        int | None, typer.Option(help="Tokens shown to the attacker. [default: 50 of text, whole arrays]")
    ] = None,
    suffix_length: Annotated[
        int | None, typer.Option(help="Tokens to extract. [default: 50 of text, whole arrays]")
    ] = None,
    lead: Annotated[
        str | None,
        typer.Option(
            metavar="auto|none|bos|eos|TEXT",
            help="What stands before every text; auto: the tokenizer's own, unless the known pairs are likelier behind "
            "another. [default: auto]",
        ),
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Attack at most so many members, and so many non-members.")] = None,
    ensemble_limit: Annotated[
        int | None,
        typer.Option(
            help="At most so many members behind an ensemble, which asks all its parts. [default: all; in the lab 60]"
        ),
    ] = None,
    samples: Annotated[int | None, typer.Option(help="Samples a prefix, for every attack.")] = None,
    seed: Annotated[int | None, typer.Option(help="All randomness follows from it. [default: 0]")] = None,
    batch_size: Annotated[
        str | None,
        typer.Option(metavar="N|auto", help="Prefixes at once; results do not depend on it. [default: auto]"),
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, mps. [default: cpu]")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, float16 or bfloat16. [default: float32]")] = None,
    revision: Annotated[str | None, typer.Option(help="Revision of --model on the hub.")] = None,
    model_arg: Annotated[
        Many,
        typer.Option(
            "--model-arg",
            metavar="K=V",
            help="Passed to from_pretrained of --model: load_in_8bit=true, device_map=auto.",
        ),
    ] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Let model repositories run their own code.")
    ] = False,
    plugin: Annotated[Many, typer.Option(help="Python file with attacks or defenses of your own; repeatable.")] = None,
    config: Annotated[Path | None, typer.Option(help="Plan in TOML; flags win over it.")] = None,
    submission: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="LM-Extraction submission to write: one attack, undefended, in the worst setting (claim if only that "
            "is run), its first guess of each attacked row, surest first. It holds private text as token ids.",
        ),
    ] = None,
    sweep: Annotated[
        Many,
        typer.Option(
            metavar="KEY=V1,V2|KEY=START:STOP:STEP",
            help="Run every value of a plan field or ATTACK.OPTION; wins over it; repeatable.",
        ),
    ] = None,
    seeds: Annotated[str | None, typer.Option(metavar="0-4|0,2", help="Run at each of these seeds.")] = None,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="Run folder. [default: runs/<UTC time>-<name>]")
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(
            help="Continue an interrupted run from its folder; takes only --reveal and the options of the gate."
        ),
    ] = None,
    gate: Annotated[
        Path | None,
        typer.Option(
            metavar="POLICY",
            help="Hold the run to this policy when it is done: exit code of the gate, gate.md and gate.xml.",
        ),
    ] = None,
    baseline: Annotated[
        Path | None,
        typer.Option(metavar="RUN", help="Run folder that the report shows changes against, and --gate compares with."),
    ] = None,
    reveal: Annotated[bool, typer.Option("--reveal", help="Show the private text in the reports.")] = False,
) -> None:
    """Attack a model, with and without defenses, and report what it leaks. Without --model: the built-in lab."""
    given = {
        "attack": attack,
        "defense": defense,
        "model": model,
        "data": data,
        "known": known,
        "known_fraction": known_fraction,
        "known_limit": known_limit,
        "nonmembers": nonmembers,
        "group_column": group_column,
        "canaries": canaries,
        "public": public,
        "reference": reference,
        "setting": setting,
        "prefix_length": prefix_length,
        "suffix_length": suffix_length,
        "lead": lead,
        "limit": limit,
        "ensemble_limit": ensemble_limit,
        "samples": samples,
        "seed": seed,
        "batch_size": _batch_size(batch_size),
        "device": device,
        "dtype": dtype,
        "revision": revision,
        "trust_remote_code": trust_remote_code or None,
        "plugin": plugin,
        "submission": submission,
    }
    options = {"attack_options": attack_option, "defense_options": defense_option, "model_args": model_arg}
    more = (*given.values(), *options.values(), config, out, sweep, seeds)
    if resume is not None and any(value is not None for value in more):
        raise AuditError("--resume takes the plan from the run folder: give no other option with it")
    base = _run_at(baseline)  # refused now rather than after hours
    if gate is not None:
        from auditor.gate import decide as gates

        policy = _policy(gate)
        gates.check_policy(policy, base)
    console.quiet()
    from auditor.core.jsonable import to_json
    from auditor.records.folder import RunFolder
    from auditor.reports import files
    from auditor.runs.run import check, rows

    if points := _points(given, options, config, sweep, seeds, resume):
        if gate is not None:
            raise AuditError("--gate holds a single run to a policy, got a grid of them; gate its runs one by one")
        if reveal:
            raise AuditError("--reveal shows the text of a single run, got a grid of them; audit report RUN --reveal")
        if baseline is not None:
            raise AuditError("--baseline is what a single run is held against, got a grid of them")
        if any("submission" in point.plan for point in points):
            raise AuditError("--submission holds the guesses of a single run, got a grid of them")
        _sweep(points, resume or out, config)
        return
    if resume is not None:
        folder = RunFolder.reopen(resume)
        plan = _stored_plan(folder.plan())
    else:
        plan = _plan(given, options, config)
    check(plan)
    if gate is not None:
        gates.check_rows(policy, rows(plan))
    if resume is None:
        folder = RunFolder.create(out, _name(plan), to_json(plan))
    _audit(plan, folder, reveal)
    if baseline is not None:
        files.render_all(folder.path, _changes(baseline, folder.path), reveal)
    if gate is not None:
        decision = gates.decide(gates.read_run(folder.path), policy, base)
        _tell(decision, folder.path / "gate.xml", folder.path / "gate.md")
        raise typer.Exit(decision.exit_code)


def _audit(plan: Plan, folder: Any, reveal: bool) -> None:
    from auditor.reports import files
    from auditor.reports.terminal import summary
    from auditor.runs.run import run as walk
    from auditor.runs.submission import submit

    with console.terminal() as reporter:
        try:
            result = walk(plan, folder, reporter)
        except KeyboardInterrupt:
            console.say(f"interrupted; finished secrets are kept. Continue with: audit run --resume {folder.path}", 130)
            raise
        except (AuditError, OSError):
            folder.discard_if_empty()
            raise
    files.write(folder.path, result, reveal)
    Console().print(summary(result, folder.path))
    if reveal:
        _revealed(folder.path)
    if plan.submission is not None:
        cell, guesses = submit(plan, folder)
        what = f"{guesses:,} guesses of {cell}; token ids of private text, readable by you only"
        typer.echo(f"submission: {plan.submission} ({what})")


def _points(
    given: Mapping[str, Any],
    options: Mapping[str, Many],
    config: Path | None,
    sweep: Many,
    seeds: str | None,
    resume: Path | None,
) -> list[Any]:
    """The points of a grid, where one is asked for; none for a single run."""
    from auditor.runs import grid, plan
    from auditor.studies import sweep as sweeps

    if resume is not None:
        return sweeps.reopen(resume) if (resume / sweeps.SWEEP).is_file() else []
    base = plan.read_toml(config, grid.GRID) if config else {}
    if seeds is not None or given["seed"] is not None:
        base.pop("seeds", None)
    if sweep:
        base["sweep"] = {**base.get("sweep", {}), **grid.parse_sweep(sweep)}
    if seeds is not None:
        base["seeds"] = grid.parse_seeds(seeds)
    if not grid.is_grid(base):
        return []
    raw = plan.merge(base, _flags(given, options, base))
    return grid.expand({name: value for name, value in raw.items() if name != "command"})


def _sweep(points: list[Any], out: Path | None, config: Path | None) -> None:
    from auditor.records.folder import new_folder
    from auditor.studies import sweep as sweeps

    folder = out or new_folder(f"sweep-{config.stem if config else 'flags'}")
    failures = console.resumably(folder, lambda reporter: sweeps.walk(points, folder, reporter, console.command()))
    table = sweeps.table(f"{len(points)} runs in {folder}", sweeps.places(folder))
    sweeps.write_table(folder, table)
    console.show(table)
    if failures:
        name, why = next(iter(failures.items()))
        raise AuditError(f"{len(failures)} of {len(points)} points failed; {name}: {why}")


app.command("utility")(utility_command.utility)


@app.command()
def reproduce(
    paper: Annotated[str | None, typer.Argument(help="Paper, or a folder of plans. See --list.")] = None,
    show: Annotated[bool, typer.Option("--list", help="List the papers and their plans.")] = False,
    plan: Annotated[Many, typer.Option(help="Run this plan only; repeatable. [default: all]")] = None,
    scale: Annotated[str, typer.Option(help="Sizes: lab, or the paper's own.")] = "lab",
    seeds: Annotated[str | None, typer.Option(metavar="0-4|0,2", help="Seeds instead of the plan's.")] = None,
    model: Annotated[str | None, typer.Option(help="Target of your own instead of the lab (with --data).")] = None,
    data: Annotated[str | None, typer.Option(help="Its training records, as for `audit run`.")] = None,
    known: Annotated[str | None, typer.Option(help="Records the attacker already knows.")] = None,
    nonmembers: Annotated[str | None, typer.Option(help="Matched records it was not trained on.")] = None,
    public: Annotated[str | None, typer.Option(help="Public model, for defenses that need one.")] = None,
    reference: Annotated[str | None, typer.Option(help="Reference model for comparing scores.")] = None,
    limit: Annotated[int | None, typer.Option(help="Attack at most so many members.")] = None,
    batch_size: Annotated[str | None, typer.Option(metavar="N|auto", help="Prefixes at once.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, mps.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, float16 or bfloat16.")] = None,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="Folder; goes on in it. [default: runs/reproduce-PAPER-SCALE]")
    ] = None,
) -> None:
    """Run the plans of a paper and hold its claims beside what was measured: a ledger."""
    from auditor.studies import papers

    if show or paper is None:
        for name in papers.papers():
            typer.echo(_listing(papers.load(name)))
        return
    chosen = papers.load(paper)
    names = ("model", "data", "known", "nonmembers", "public", "reference", "limit", "device", "dtype")
    values = (model, data, known, nonmembers, public, reference, limit, device, dtype)
    flags = {**dict(zip(names, values, strict=True)), "batch_size": _batch_size(batch_size), "seeds": _seeds(seeds)}
    for name in plan or list(chosen.plans):
        chosen.at(name, scale)  # refused before torch is imported
    folder = out or Path("runs") / f"reproduce-{chosen.name}-{scale}"
    _reproduce(chosen, plan or list(chosen.plans), scale, flags, folder)


def _reproduce(paper: Paper, plans: list[str], scale: str, flags: Mapping[str, Any], out: Path) -> None:
    console.quiet()
    from auditor.studies import reproduce as reproducing

    def walk(reporter: console.Terminal) -> Any:
        return reproducing.reproduce(paper, plans, scale, flags, out, reporter, console.command())

    shown, entries, failures = console.resumably(out, walk)
    for table in shown:
        console.show(table)
    styles = {"holds": "green", "refuted": "red"}
    console.show(reproducing.brief(paper, entries), [styles.get(entry.verdict, "") for entry in entries])
    typer.echo(f"ledger: {out}/ledger.md, .csv, .tex, .json")
    if failures:
        name, why = next(iter(failures.items()))
        points = "1 point" if len(failures) == 1 else f"{len(failures)} points"
        raise AuditError(f"{points} failed, which the ledger calls not run; {name}: {why}")


def _listing(paper: Paper) -> str:
    lines = [f"{name:14}{plan.get('title', '')}" for name, plan in paper.plans.items()]
    return "\n  ".join([f"{paper.name}: {paper.title}; scales: {', '.join(paper.scales)}", *lines])


def _seeds(text: str | None) -> list[int] | None:
    from auditor.runs.grid import parse_seeds

    return None if text is None else parse_seeds(text)


app.command("train")(train_command.train)


@app.command("list")
def list_plugins(
    plugin: Annotated[Many, typer.Option(help="Python file with attacks or defenses of your own; repeatable.")] = None,
    schema: Annotated[bool, typer.Option("--schema", help="Say where the JSON Schema of result.json lies.")] = False,
) -> None:
    """Show attacks, probes, defenses and benchmarks with their options."""
    if schema:
        from auditor.reports.schema import PATH

        typer.echo(PATH)
        return
    console.quiet()
    from auditor.commands.listing import tables
    from auditor.plugins import registry

    for path in plugin or []:
        registry.load_file(Path(path))
    out = Console()
    for table in tables():
        out.print(table)


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(help="Run folder.")],
    baseline: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Run folder to show the changes against, paired by secret.")
    ] = None,
    markdown: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the Markdown here too, for a pull request.")
    ] = None,
    reveal: Annotated[
        bool, typer.Option("--reveal", help="Show the private text: prefixes, suffixes and guesses, by secret.")
    ] = False,
) -> None:
    """Render the reports of a run again, without the model."""
    from auditor.reports import files

    written = files.render_all(folder, None if baseline is None else _changes(baseline, folder), reveal)
    if markdown is not None:
        disk.replace(markdown, (folder / files.MARKDOWN).read_bytes())
        written = (*written, markdown)
    for path in written:
        typer.echo(path)
    if reveal:
        _revealed(folder)


def _revealed(folder: Path) -> None:
    console.say(f"the reports show private text (--reveal); audit report {folder} takes it out again", 0)


def _changes(baseline: Path, folder: Path) -> Comparison:
    from auditor.gate.compare import compare
    from auditor.gate.decide import read_run

    return compare([read_run(baseline), read_run(folder)])


@app.command()
def score(
    submission: Annotated[Path, typer.Argument(help="CSV: Example ID,Suffix Guess; surest first, any number of each.")],
    answers: Annotated[Path, typer.Option(help="The right suffixes: an .npy array (examples, tokens).")],
    answered_only: Annotated[
        bool,
        typer.Option("--answered-only", help="Shares of the examples with a guess. [default: of all, as organisers]"),
    ] = False,
    curve: Annotated[
        Path | None, typer.Option(metavar="FILE.csv", help="Write recall at every number of wrong guesses.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.svg|.png", help="Draw that curve.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Score an LM-Extraction submission as the challenge's organisers do, with intervals.

    An example counts once, by its first right guess; every wrong guess is an error, a repeated one too. Recall at 100
    errors counts right guesses with fewer than 100 wrong ones before them. Ids are rows of the answers from 0; every
    row and token of the answers counts. Guesses of another length and ids out of range are refused.
    """
    from auditor.benchmarks import score as scores
    from auditor.core.jsonable import to_json
    from auditor.reports import plots, terminal

    marked = scores.mark(submission, answers)
    scored, points = scores.score(marked, answered_only), scores.curve(marked, answered_only)
    if plot is not None:
        plots.save_curve(plot, [(wrong, recall) for wrong, _, recall in points], "Recall by wrong guesses allowed")
    if curve is not None:
        scores.write_curve(curve, points)
    if as_json:
        typer.echo(json.dumps(to_json(scored), indent=1))
    else:
        typer.echo(scored.headline)
        Console().print(terminal.shares(scored.measurements))


@app.command()
def gate(
    folder: Annotated[Path | None, typer.Argument(help="Run folder.", show_default=False)] = None,
    maximum: Annotated[
        Many,
        typer.Option(
            "--max", metavar="METRIC=LIMIT", help="Upper limit: recall=0.05, 'recall(count=16)=0.5'; repeatable."
        ),
    ] = None,
    increase: Annotated[
        Many,
        typer.Option("--max-increase", metavar="METRIC=MARGIN", help="How much worse than --baseline; repeatable."),
    ] = None,
    policy: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Rules in TOML, as leakage.toml; --max adds to them.")
    ] = None,
    baseline: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN", help="Run folder to compare with, paired by secret. [without a rule: recall=0.02 worse]"
        ),
    ] = None,
    inconclusive: Annotated[
        str | None, typer.Option(help="What cannot be told: report (exit 4), pass or fail. [default: report]")
    ] = None,
    target: Annotated[
        str | None, typer.Option(help="Judge this target. [default: the defended ones, else the undefended]")
    ] = None,
    setting: Annotated[str | None, typer.Option(help="Judge this setting only: claim or worst.")] = None,
    attack: Annotated[str | None, typer.Option(help="Judge this attack only.")] = None,
    allow_not_applicable: Annotated[
        bool, typer.Option("--allow-not-applicable", help="Let an attack pass that was asked for and never applied.")
    ] = False,
    junit: Annotated[Path | None, typer.Option(metavar="FILE", help="Write JUnit XML.")] = None,
    markdown: Annotated[Path | None, typer.Option(metavar="FILE", help="Write Markdown, for a pull request.")] = None,
    summary: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Append that Markdown. [default: $GITHUB_STEP_SUMMARY, if set]")
    ] = None,
    plan: Annotated[
        Many,
        typer.Option(
            metavar="METRIC=A:B",
            help="Without a run: how many secrets tell a share of A from one of B (A:B:C, if C of the answers change).",
        ),
    ] = None,
    power: Annotated[
        float | None, typer.Option(help="Of --plan: how often a change of that size is to be found. [default: 0.8]")
    ] = None,
    rules: Annotated[
        int | None, typer.Option(help="Of --plan: rules times rows that will be decided together. [default: 1]")
    ] = None,
) -> None:
    """Hold a finished run to limits and a baseline: exit 0 held, 1 failed, 4 inconclusive.

    Held: the one-sided 95% upper bound is within the limit. Failed: the lower bound, corrected for the number of
    decisions, is beyond it. A policy file holds `rules = ["recall <= 0.05", "recall not worse than baseline by 0.02"]`
    and [[rule]] tables with rule (or metric, count, max or max_increase), target, setting, attack.
    """
    if plan is not None:
        given = (folder, maximum, increase, policy, baseline, inconclusive, target, setting, attack, junit, markdown)
        if allow_not_applicable or any(value is not None for value in (*given, summary)):
            raise AuditError("--plan needs no run: give only --power and --rules with it")
        _tell_needs(plan, 0.8 if power is None else power, 1 if rules is None else rules)
        return
    if power is not None or rules is not None:
        raise AuditError("--power and --rules go with --plan")
    if folder is None:
        raise AuditError("expected a run folder, got none")
    from auditor.gate import decide as gates

    wanted = _policy(policy, maximum or [], increase or [], baseline, inconclusive, allow_not_applicable)
    scope = {"target": target, "setting": setting, "attack": attack}
    decision = gates.decide(gates.read_run(folder), wanted, _run_at(baseline), **scope)
    _tell(decision, junit, markdown, summary)
    raise typer.Exit(decision.exit_code)


def _policy(
    path: Path | None,
    maximum: list[str] | None = None,
    increase: list[str] | None = None,
    baseline: Path | None = None,
    inconclusive: str | None = None,
    allow_not_applicable: bool = False,
) -> Policy:
    """The rules of the file and of the flags together. Against a baseline there is one by default."""
    from auditor.gate import policy as policies

    read = policies.read_policy(path) if path is not None else policies.Policy()
    flags = policies.parse_limits(maximum or []) + policies.parse_limits(increase or [], "--max-increase", True)
    wanted = policies.distinct([*read.rules, *flags])
    if not wanted and baseline is not None:
        wanted = (policies.NO_WORSE,)
    how = read.inconclusive if inconclusive is None else policies.reading(inconclusive, "--inconclusive")
    return policies.Policy(wanted, how, allow_not_applicable or read.allow_not_applicable)


def _run_at(folder: Path | None) -> Run | None:
    from auditor.gate import decide as gates

    return None if folder is None else gates.read_run(folder)


def _tell(
    decision: Decision, junit: Path | None = None, markdown: Path | None = None, summary: Path | None = None
) -> None:
    from auditor.reports import decision as reports
    from auditor.reports import files

    for line in reports.lines(decision):
        typer.echo(line)
    if junit is not None:
        disk.replace(junit, reports.junit(decision))
    if markdown is not None:
        disk.replace(markdown, reports.markdown(decision))
    step = summary or (Path(named) if (named := os.environ.get("GITHUB_STEP_SUMMARY")) else None)
    if step is not None:
        files.append(step, reports.markdown(decision))


def _tell_needs(changes: list[str], power: float, rules: int) -> None:
    from auditor.gate import power as powers

    for item in changes:
        for need in powers.needs(powers.parse_change(item), power, rules):
            typer.echo(f"{need.secrets:9,} secrets  {need.question}")
    typer.echo(f"power {power:g}, {rules} {'decision' if rules == 1 else 'decisions'} at 5% together")


@app.command()
def compare(
    folders: Annotated[list[Path], typer.Argument(help="Run folders; differences are to the first.")],
    metric: Annotated[Many, typer.Option(help="Metric to show; repeatable. [default: each row's main one]")] = None,
    markdown: Annotated[Path | None, typer.Option(metavar="FILE", help="Write Markdown.")] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write one HTML page that loads nothing.")] = None,
    csv: Annotated[Path | None, typer.Option(metavar="FILE", help="Write CSV, a line a row, metric and run.")] = None,
) -> None:
    """Show runs side by side: the same secrets paired, differences with intervals, a best where it is significant."""
    from auditor.gate import compare as comparing
    from auditor.gate.decide import read_run
    from auditor.reports import comparison as reports

    found = comparing.compare([read_run(folder) for folder in folders], metric or [])
    out = Console()
    for block in reports.terminal(found):
        out.print(block)
    for path, render in ((markdown, reports.markdown), (html, reports.page), (csv, reports.sheet)):
        if path is not None:
            disk.replace(path, render(found))


app.command()(export)
app.add_typer(canary_commands.app, name="canaries")


@app.callback(invoke_without_command=True)
def version(
    show: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Print the messages of unexpected errors; they may quote private text.")
    ] = False,
    threads: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Threads of the processor. [default: OMP_NUM_THREADS, else every processor it may use]"
        ),
    ] = None,
) -> None:
    settle(threads)
    console.debugging = debug
    if show:
        typer.echo(f"audit {__version__}")
        raise typer.Exit


def main() -> None:
    """The console script: exit codes instead of tracebacks for everything a user can do something about."""
    for ended in (signal.SIGTERM, signal.SIGHUP):  # as Ctrl-C: what is half written goes, what is finished stays
        signal.signal(ended, signal.default_int_handler)
    sys.exit(call(sys.argv[1:]))


_UsageError: type[Any] = typer.BadParameter.__mro__[1]  # typer brings its own click, and names its base nowhere else


def call(arguments: list[str]) -> int:
    """Runs the command and returns its exit code (design.md, "Exit codes")."""
    try:
        code = _exit_code(arguments or ["--help"])
        if sys.stdout is not None:
            sys.stdout.flush()  # what cannot be said is no success
        return code
    except AuditError as error:
        return console.say(f"error: {error}", 2)
    except _UsageError as error:
        return console.say(f"error: {error.format_message()}", 2)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        console.mute()
        return console.say("stopped: nobody reads the output any more", 3)
    except SystemExit as error:
        console.trace(error)
        return console.say(f"stopped from inside, by a plug-in or a library: SystemExit({error.code!r})", 3)
    except BaseException as error:
        if (refused := of_a_place(error, str(Path(__file__).parents[1]))) is not None:
            console.mute()
            if console.debugging:
                console.trace(error)
            return console.say(f"error: {refused}", 2)
        console.trace(error)
        return console.say("this is a bug of ours, not of your input; please report it with the lines above", 3)


def _exit_code(arguments: list[str]) -> int:
    """What the command itself says. Not `app()`, which reads an EOFError as an interrupt, a closed pipe as a 1."""
    try:
        with typer.main.get_command(app).make_context("audit", arguments) as context:
            context.command.invoke(context)
    except typer.Exit as leave:
        return leave.exit_code
    return 0


# --- plans from flags ---


def _plan(given: Mapping[str, Any], options: Mapping[str, Many], config: Path | None) -> Plan:
    from auditor.runs import grid
    from auditor.runs import plan as plans

    base = plans.read_toml(config, grid.GRID) if config else {}
    base = {name: value for name, value in base.items() if name not in grid.GRID}  # what flags left no grid of
    return plans.make(base, _flags(given, options, base))


def _flags(given: Mapping[str, Any], options: Mapping[str, Many], base: Mapping[str, Any]) -> dict[str, Any]:
    """The flags as plan values; the plug-in files they or the plan file name are loaded first."""
    from auditor.plugins import registry
    from auditor.runs import plan as plans

    for path in given["plugin"] or base.get("plugin", []):
        registry.load_file(Path(path))
    return {
        **given,
        "attack_options": plans.parse_options(
            "-A", options["attack_options"] or [], list(registry.attacks_and_probes())
        ),
        "defense_options": plans.parse_options("-D", options["defense_options"] or [], list(registry.defenses())),
        "model_args": plans.parse_options("--model-arg", options["model_args"] or [], []).get("", {}),
        "command": console.command(),
    }


def _stored_plan(values: dict[str, Any]) -> Plan:
    from auditor.core.jsonable import from_json
    from auditor.core.plan import Plan

    plan: Plan = from_json(Plan, values, "plan")
    return plan


def _batch_size(value: str | None) -> int | str | None:
    if value is None or value == "auto":
        return value
    if not re.fullmatch("[0-9]{1,9}", value) or int(value) < 1:
        raise AuditError(f"expected --batch-size to be a whole number >= 1 or auto, got {value!r}")
    return int(value)


def _name(plan: Plan) -> str:
    what = "lab" if plan.lab else Path(str(plan.model)).name
    return "-".join([what, *plan.attack, *plan.defense])[:80]


if __name__ == "__main__":
    main()
