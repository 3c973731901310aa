"""`audit history`: many finished runs of one model line on one page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from auditor.core import disk


def history(
    folders: Annotated[list[Path], typer.Argument(help="Run folders: runs/*. Those without a result are left out.")],
    by: Annotated[str, typer.Option(help="In the order of their date, commit or checkpoint.")] = "date",
    out: Annotated[Path, typer.Option("-o", "--out", metavar="FILE", help="The page.")] = Path("history.html"),
) -> None:
    """One page over many runs: leakage with intervals over time, what gates decided, links to each report.

    Runs that cannot be held against each other (other secrets, other attacks, another model family) stand apart, with
    the reason. Commits stand in the order in which they were first audited; a checkpoint is a model or revision whose
    name ends in its step (checkpoint-500, step1000, epoch-3).
    """
    from auditor.gate.history import history as ordered
    from auditor.reports import history as reports

    before = out.resolve()
    found = ordered([folder for folder in folders if folder.resolve() != before], by)  # runs/* may name the page
    disk.replace(out, reports.page(found, out.parent))
    for name, why in found.left_out:
        typer.echo(f"left out: {name}: {why}")
    typer.echo(out)
