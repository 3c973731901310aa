"""`audit report`: the reports of a finished run, without the model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from auditor.commands import console, options
from auditor.core import disk

if TYPE_CHECKING:
    from auditor.gate.compare import Comparison


def report(
    folder: Annotated[Path, typer.Argument(help="Run folder.")],
    baseline: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Run folder to show the changes against, paired by secret.")
    ] = None,
    markdown: options.Markdown = None,
    reveal: options.Reveal = False,
) -> None:
    """Render the reports of a run again, without the model."""
    from auditor.reports import files

    written = files.render_all(folder, None if baseline is None else changes(baseline, folder), reveal)
    if markdown is not None:
        disk.replace(markdown, (folder / files.MARKDOWN).read_bytes())
        written = (*written, markdown)
    for path in written:
        typer.echo(path)
    if reveal:
        say_revealed(folder)


def say_revealed(folder: Path) -> None:
    console.say(f"the reports show private text (--reveal); audit report {folder} takes it out again", 0)


def changes(baseline: Path, folder: Path) -> Comparison:
    from auditor.gate.compare import compare
    from auditor.gate.decide import read_run

    return compare([read_run(baseline), read_run(folder)])
