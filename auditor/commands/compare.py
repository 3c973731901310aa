"""`audit compare`: finished runs side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from auditor.commands import options
from auditor.core import disk


def compare(
    folders: Annotated[list[Path], typer.Argument(help="Run folders; differences are to the first.")],
    metric: Annotated[
        options.Many, typer.Option(help="Metric to show; repeatable. [default: each row's main one]")
    ] = None,
    markdown: options.Markdown = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write one HTML page that loads nothing.")] = None,
    csv: Annotated[Path | None, typer.Option(metavar="FILE", help="Write CSV, a line a row, metric and run.")] = None,
) -> None:
    """Show runs side by side: the same secrets paired, differences with intervals, a best where it is significant."""
    from rich.console import Console

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
