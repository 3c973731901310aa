"""`audit reproduce`: the plans of a paper, and its claims beside what was measured."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from auditor.commands import console, options
from auditor.core.errors import AuditError

if TYPE_CHECKING:
    from auditor.studies.papers import Paper


# The fields of the paper's plans that are one's own to choose.
_OWN = options.PlanFlags(
    "model data known nonmembers public reference limit batch_size device dtype plugin trust_remote_code"
)


def reproduce(
    paper: Annotated[
        str | None, typer.Argument(metavar="PAPER", help="A paper of --list, or a folder of plans.")
    ] = None,
    show: Annotated[bool, typer.Option("--list", help="List the papers and their plans.")] = False,
    plan: Annotated[
        options.Many,
        typer.Option(help="Run this plan of the paper only; repeatable. [default: all]"),
    ] = None,
    scale: Annotated[str, typer.Option(help="Sizes of the paper's plans: lab, or the paper's own.")] = "lab",
    seeds: options.Seeds = None,
    *,
    flags: Annotated[options.Values, _OWN],
    out: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--out",
            metavar="DIR",
            help="Folder; an interrupted one is continued. [default: runs/reproduce-PAPER-SCALE]",
            rich_help_panel="output",
        ),
    ] = None,
) -> None:
    """Run the plans of a paper and compare its claims with what is measured.

    The paper `claims` tests published privacy claims, each with the query that is hardest on it.

    Examples:
        audit reproduce --list
        audit reproduce ethicist --limit 50
    """
    from auditor.runs import grid
    from auditor.studies import papers

    if show or paper is None:
        for name in papers.papers():
            typer.echo(_listing(papers.load(name)))
        return
    values = options.plan_values(flags) | ({} if seeds is None else {"seeds": grid.parse_seeds(seeds)})
    chosen = papers.load(paper)
    plans = plan or list(chosen.plans)
    allowed = options.Allowed.by(values)
    for name in plans:
        raw = chosen.at(name, scale)  # refused before torch is imported
        lone = papers.UTILITY in raw or papers.PUBLISHED in raw
        for asked in [raw] if lone else [point.plan for point in grid.expand(raw)]:
            allowed.check(asked, f"{paper}/{name}")
    _reproduce(chosen, plans, scale, values, out or Path("runs") / f"reproduce-{chosen.name}-{scale}")


def _reproduce(paper: Paper, plans: list[str], scale: str, values: dict[str, Any], out: Path) -> None:
    console.quiet()
    from auditor.studies import reproduce as reproducing

    def walk(reporter: console.Terminal) -> Any:
        return reproducing.reproduce(paper, plans, scale, values, out, reporter, console.command())

    shown, entries, failures = console.resumably(out, walk)
    for table in shown:
        console.show(table)
    if entries:
        styles = {"holds": "green", "refuted": "red"}
        console.show(reproducing.brief(paper, entries), [styles.get(entry.verdict, "") for entry in entries])
        typer.echo(f"ledger: {out}/ledger.md, .csv, .tex, .json")
    if (page := out / reproducing.PAGE).is_file():
        typer.echo(f"page: {page}")
    for picture in sorted(out.glob("*/frontier.svg")):
        typer.echo(f"picture: {picture}, .png; its numbers: {picture.with_suffix('.csv').name}, .md, .tex, .json")
    if failures:
        name, why = next(iter(failures.items()))
        points = "1 point" if len(failures) == 1 else f"{len(failures)} points"
        raise AuditError(
            f"{points} failed, which {'the ledger calls not run' if entries else 'have no numbers'}; {name}: {why}"
        )


def _listing(paper: Paper) -> str:
    wide = max(map(len, paper.plans), default=0)
    lines = [f"{name:{wide}}  {plan.get('title', '')}" for name, plan in paper.plans.items()]
    return "\n  ".join([f"{paper.name}: {paper.title}; scales: {', '.join(paper.scales)}", *lines])
