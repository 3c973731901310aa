"""`audit export`: export finished runs as data for other programs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from auditor.core import disk
from auditor.core.errors import AuditError

_FORMS = (".csv", ".parquet")


def export(
    folders: list[Path],
    *,
    csv: Path | None = None,
    parquet: Path | None = None,
    latex: Path | None = None,
    secrets: Path | None = None,
) -> None:
    """Write finished runs as CSV, Parquet or LaTeX: numbers with intervals, claims, secrets by id;
    no private text.

    The record itself is `result.json`; `audit list --schema` names its JSON Schema.

    Args:
        folders (RUN): Run folders, one below the other in each table.
        csv (FILE): Measurements as CSV, one per row.
        parquet (FILE): Measurements as Parquet.
        latex (FILE): Tables of results and claims, for \\input; needs booktabs.
        secrets (FILE.csv|.parquet): One row per secret and attack: ids and numbers, no text.

    Examples:
        audit export runs/* --csv measurements.csv
        audit export runs/latest --secrets secrets.parquet
    """
    if not any((csv, parquet, latex, secrets)):
        raise AuditError(
            "expected at least one of --csv, --parquet, --latex and --secrets, got none"
        )
    if secrets is not None and secrets.suffix not in _FORMS:
        raise AuditError(
            f"expected --secrets FILE with one of {', '.join(_FORMS)}, got {str(secrets)!r}"
        )
    from auditor.records import result_file
    from auditor.reports import export as exports

    results = [result_file.read_result(folder) for folder in folders]
    sheet = exports.build_measurement_sheet(results)
    forms: tuple[tuple[Path | None, Any], ...] = (
        (csv, exports.to_csv),
        (parquet, exports.to_parquet),
    )
    contents: dict[Path, str | bytes] = {path: render(sheet) for path, render in forms if path}
    if latex:
        contents[latex] = exports.to_latex(results)
    if secrets:
        render = exports.to_csv if secrets.suffix == ".csv" else exports.to_parquet
        contents[secrets] = render(
            exports.build_secret_sheet([exports.read_exported_run(folder) for folder in folders])
        )
    # everything is rendered before this: a run that cannot be exported leaves no partial set of
    # files
    for path, content in contents.items():
        disk.replace_atomically(path, content)
        typer.echo(path)
