"""`audit history`: show many finished runs of one model line on one page."""

from __future__ import annotations

from pathlib import Path

import typer

from auditor.core import disk


def history(folders: list[Path], *, by: str = "date", out: Path = Path("history.html")) -> None:
    """Write one page over many runs: leakage with intervals over time, gate decisions, links to
    each report.

    Runs that cannot be compared (different secrets, attacks or model family) are listed separately,
    with the reason. Commits are ordered by their first audit; a checkpoint is a model or revision
    whose name ends in its step (checkpoint-500, step1000, epoch-3).

    Args:
        folders (RUN): Run folders, as runs/*; those without a result are left out.
        by (date|commit|checkpoint): Order of the runs.
        out (-o, --out FILE): Page to write.

    Examples:
        audit history runs/*
        audit history runs/* --by commit -o leakage.html
    """
    from auditor.gate.history import build_run_history as ordered
    from auditor.reports import history as reports

    before = out.resolve()
    # `runs/*` may include the page itself.
    run_history = ordered([folder for folder in folders if folder.resolve() != before], by)
    disk.replace_atomically(out, reports.render_history_page(run_history, out.parent))
    for name, reason in run_history.left_out:
        typer.echo(f"left out: {name}: {reason}")
    typer.echo(out)
