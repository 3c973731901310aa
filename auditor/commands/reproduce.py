"""`audit reproduce`: run a paper's plans, and compare its claims with the measurements."""

from __future__ import annotations

from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from auditor.commands import console, options
from auditor.core.counts import format_count
from auditor.core.errors import AuditError
from auditor.core.plan_parts import SMALL

if TYPE_CHECKING:
    from auditor.studies.papers import Paper


LAB = "lab"  # scale of the small lab; for another lab, the scale has the lab's name

# The plan fields that the user may choose.
_OWN = options.PlanFlags(
    "lab model data known nonmembers public reference limit batch_size device dtype plugin "
    "trust_remote_code"
)


def reproduce(
    paper: str | None = None,
    *,
    show: bool = False,
    plan: options.Many = None,
    scale: str = "lab",
    seeds: Annotated[str | None, "compute"] = None,
    beside: Path | None = None,
    flags: Annotated[options.Values, _OWN],
    out: Path | None = None,
) -> None:
    """Run the plans of a paper and compare its claims with what is measured.

    The paper `claims` tests published privacy claims, each with the query that challenges it most.

    Args:
        paper: A paper of --list, or a folder of plans.
        show (--list): List the papers and their plans.
        plan: Run this plan of the paper only; repeatable. [default: all]
        scale: Sizes of the paper's plans: lab, or the paper's own.
        beside (DIR): Folder of another reproduction of the paper, shown as a second column.
            [default with --lab: that of the small lab]
        out (-o, --out DIR): Folder; an interrupted one is continued. [default:
            runs/reproduce-PAPER-SCALE or -LAB]

    Examples:
        audit reproduce --list
        audit reproduce ethicist --limit 50
        audit reproduce frontier --lab smollm2
    """
    from auditor.runs.plan import expand_plan_grid, parse_seed_ranges
    from auditor.studies import papers

    if show or paper is None:
        for name in papers.find_bundled_paper_folders():
            typer.echo(_format_paper_plans(papers.load_paper(name)))
        return
    values = options.collect_plan_values(flags) | (
        {} if seeds is None else {"seeds": parse_seed_ranges(seeds)}
    )
    chosen = papers.load_paper(paper)
    lab = values.pop("lab", None)
    scale = _choose_scale(scale, lab)
    plans = plan or chosen.plans_at_scale(scale)
    allowed = options.list_allowed_risks(values)
    for name in plans:
        raw = chosen.raw_plan_at_scale(name, scale)  # refused before torch is imported
        # Neither kind of plan is a grid of runs, so search its table directly.
        lone = papers.UTILITY in raw or papers.PUBLISHED in raw
        requested = [raw]
        if not lone:
            requested = list(map(attrgetter("plan"), expand_plan_grid(raw)))
        for requested_plan in requested:
            options.refuse_unnamed_risks(requested_plan, allowed, f"{paper}/{name}")
    small = Path("runs") / f"reproduce-{chosen.name}-{LAB}"
    if beside is None and scale == lab and (small / "ledger.json").is_file():
        beside = small
    _print_ledger(
        chosen,
        plans,
        scale,
        values,
        out or small.with_name(f"reproduce-{chosen.name}-{scale}"),
        beside,
    )


def _choose_scale(scale: str, lab: str | None) -> str:
    """Return the scale. With a lab other than the small lab, the lab's name is the scale.

    Raise AuditError if both a scale and a lab are given.
    """
    if lab is None or lab == SMALL:
        return scale
    if scale != LAB:
        raise AuditError(f"--lab {lab} goes with --scale {LAB}, got --scale {scale}")
    return lab


def _print_ledger(
    paper: Paper,
    plans: list[str],
    scale: str,
    values: dict[str, Any],
    out: Path,
    other_folder: Path | None,
) -> None:
    console.silence_libraries()
    from auditor.studies import reproduce as reproducing

    with console.open_progress_terminal(interrupted=console.resume_grid_hint(out)) as reporter:
        result_tables, entries, failures = reproducing.reproduce_paper_plans(
            paper, plans, scale, values, out, reporter, console.get_command_line(), other_folder
        )
    for table in result_tables:
        console.print_table(table)
    if entries:
        styles = {"holds": "green", "refuted": "red"}
        other = None
        if other_folder:
            other = reproducing.read_other_ledger(other_folder, paper)
        console.print_table(
            reproducing.build_terminal_ledger(paper, entries, scale, other),
            [styles.get(entry.verdict, "") for entry in entries],
        )
        typer.echo(f"ledger: {out}/ledger.md, .csv, .tex, .json")
    if (page := out / reproducing.PAGE).is_file():
        typer.echo(f"page: {page}")
    for picture in sorted(out.glob("*/frontier.svg")):
        typer.echo(
            f"picture: {picture}, .png; its numbers: {picture.with_suffix('.csv').name}, .md, "
            ".tex, .json"
        )
    if failures:
        name, reason = next(iter(failures.items()))
        raise AuditError(
            f"{format_count(len(failures), 'point')} failed, which "
            f"{'the ledger calls not run' if entries else 'have no numbers'}; {name}: {reason}"
        )


def _format_paper_plans(paper: Paper) -> str:
    wide = max(map(len, paper.plans), default=0)
    lines = [f"{paper.name}: {paper.title}; scales: {', '.join(paper.scales)}"]
    for name, plan in paper.plans.items():
        lines.append(f"{name:{wide}}  {plan.get('title', '')}")
    return "\n  ".join(lines)
