"""`audit compare`: compare finished runs side by side."""

from __future__ import annotations

from pathlib import Path

from auditor.commands import options
from auditor.core import disk


def compare(
    folders: list[Path],
    *,
    metric: options.Many = None,
    markdown: Path | None = None,
    html: Path | None = None,
    csv: Path | None = None,
) -> None:
    """Show runs side by side: the same secrets paired, differences with intervals, the best if it
    is significant.

    Args:
        folders (RUN): Run folders; differences are to the first.
        metric: Metric to show; repeatable. [default: the main one of each attack]
        html (FILE): Write one HTML page that needs no network.
        csv (FILE): Write CSV: one line per configuration, metric and run.

    Examples:
        audit compare runs/a runs/b
        audit compare runs/* --html compare.html
    """
    from rich.console import Console

    from auditor.conclusions.outcomes import read_run_outcomes
    from auditor.gate import compare as comparing
    from auditor.reports import comparison as reports
    from auditor.reports.html import render_html_document
    from auditor.reports.markdown import render_markdown_document

    comparison = comparing.compare_finished_runs(
        [read_run_outcomes(folder) for folder in folders], metric or []
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
