"""`audit compare`: compare finished runs side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from auditor.commands import options
from auditor.core import disk


def compare(
    folders: Annotated[
        list[Path],
        typer.Argument(metavar="RUN", help="Run folders; differences are to the first."),
    ],
    metric: Annotated[
        options.Many,
        typer.Option(help="Metric to show; repeatable. [default: the main one of each attack]"),
    ] = None,
    markdown: options.Markdown = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write one HTML page that needs no network.")
    ] = None,
    csv: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write CSV: one line per configuration, metric and run."),
    ] = None,
) -> None:
    """Show runs side by side: the same secrets paired, differences with intervals, the best if it
    is significant.

    Examples:
        audit compare runs/a runs/b
        audit compare runs/* --html compare.html
    """
    from rich.console import Console

    from auditor.gate import compare as comparing
    from auditor.gate.decide import read_run
    from auditor.reports import comparison as reports
    from auditor.reports.html import render_html_document
    from auditor.reports.markdown import render_markdown_document

    comparison = comparing.compare_finished_runs(
        [read_run(folder) for folder in folders], metric or []
    )
    out = Console()
    for block in reports.build_terminal_blocks(comparison):
        out.print(block)
    document = reports.build_comparison_document(comparison)
    if markdown is not None:
        disk.replace_atomically(markdown, render_markdown_document(document))
    if html is not None:
        disk.replace_atomically(html, render_html_document(document))
    if csv is not None:
        disk.replace_atomically(csv, reports.render_comparison_csv(comparison))
