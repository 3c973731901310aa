"""`audit report`: render the reports of a finished run, without the model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from auditor.commands import console
from auditor.core import disk
from auditor.core.errors import AuditError

if TYPE_CHECKING:
    from auditor.gate.compare import Comparison


def report(
    folder: Path,
    *,
    baseline: Path | None = None,
    markdown: Path | None = None,
    reveal: bool = False,
    form: str | None = None,
) -> None:
    """Render the reports of a run again, without the model.

    Args:
        folder (RUN): Run folder.
        baseline (RUN): Run folder to show the changes against, paired by secret.
        form (--format edpb): Instead: measured answers to the questions of EDPB Opinion 28/2024 and
            of an impact assessment, edpb.md and edpb.html. Aggregates and hashes only.

    Examples:
        audit report runs/latest --baseline runs/main
        audit report runs/latest --format edpb
    """
    from auditor.reports import files

    if form is not None:
        if baseline is not None or markdown is not None or reveal:
            raise AuditError(
                "--format edpb is a page of its own: it takes no --baseline, --markdown or --reveal"
            )
        _write_edpb_documents(folder, form)
        return
    paths = files.rewrite_run_reports(
        folder,
        None if baseline is None else compare_baseline_run(baseline, folder),
        reveal,
    )
    if markdown is not None:
        disk.replace_atomically(markdown, (folder / files.MARKDOWN).read_bytes())
        paths = (*paths, markdown)
    for path in paths:
        typer.echo(path)
    if reveal:
        print_private_text_warning(folder)


def _write_edpb_documents(folder: Path, form: str) -> None:
    from auditor.reports import edpb, files

    if form != "edpb":
        raise AuditError(f"expected --format edpb, got {form!r}")
    document = edpb.read_edpb_document(folder)
    for path in files.write_document(folder, "edpb", document):
        typer.echo(path)


def print_private_text_warning(folder: Path) -> None:
    console.print_stderr_line(
        f"the reports show private text (--reveal); audit report {folder} removes it again", 0
    )


def compare_baseline_run(baseline: Path, folder: Path) -> Comparison:
    from auditor.conclusions.outcomes import read_run_outcomes
    from auditor.gate.compare import compare_finished_runs

    return compare_finished_runs([read_run_outcomes(baseline), read_run_outcomes(folder)])
