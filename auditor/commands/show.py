"""`audit show`: show the first screen of a finished run again, without the model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from auditor.core.result import AuditResult


def show(folder: Path = Path("runs/latest"), *, verbose: bool = False) -> None:
    """Print the first screen of a finished run again, from the run folder.

    Args:
        folder (RUN): Run folder.
        verbose (-v, --verbose): Print every table of the run instead of one screen.

    Examples:
        audit show
        audit show runs/first --verbose
    """
    from auditor.records.result_file import read_result

    if folder.is_symlink():  # for runs/latest, the name that the run gave itself
        folder = folder.parent / folder.readlink()
    print_result_screen(read_result(folder), folder, verbose)


def print_result_screen(result: AuditResult, folder: Path, verbose: bool = False) -> None:
    """Print the first screen of a run; with `verbose`, print every table."""
    from rich.console import Console

    from auditor.conclusions.secret_details import read_secret_details
    from auditor.reports.screen import WIDTH, build_first_screen
    from auditor.reports.terminal import build_report_screen

    out = Console()
    if verbose:
        for block in build_report_screen(result, folder, read_secret_details(folder)):
            out.print(block)
    else:
        width = WIDTH
        if out.is_terminal:
            width = out.width
        out.print(build_first_screen(result, folder, width), soft_wrap=True)
