"""`audit erase`: check whether deleted records are gone from stores, released text and a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from auditor.commands import console, options
from auditor.core import disk
from auditor.core.errors import AuditError

_EXIT_CODES = {"still there": 1, "cannot tell": 4}


def erase(
    *,
    stores: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="STORE...",
            help="Folder, file or postgresql:// address; KIND:PATH if it is not recognised.",
        ),
    ] = None,
    deleted: Annotated[
        Path,
        typer.Option(metavar="FILE.jsonl", help="The deleted records: text, embedding, id."),
    ],
    control: Annotated[
        Path,
        typer.Option(
            "--kept",
            metavar="FILE.jsonl",
            help="Records that are still in the store, all if possible: the control.",
        ),
    ],
    model: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Also ask this model: Hugging Face id or folder."),
    ] = None,
    nonmembers: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="Records that --model never saw: the membership baseline."
        ),
    ] = None,
    released: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="Also search released text; repeatable."),
    ] = None,
    user_column: Annotated[
        str | None,
        typer.Option(metavar="COLUMN", help="Column of --deleted with each record's person."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", metavar="DIR", help="Folder for erasure.html, .md and .json."),
    ] = None,
    gate: Annotated[
        bool,
        typer.Option(
            "--gate", help="Exit 1 if a deleted record is still there, 4 if a layer cannot tell."
        ),
    ] = False,
    junit: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write JUnit XML: a case for each layer.")
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Say whether deleted records are gone from stores (library, history, bytes), released text and
    a model.

    Examines a copy of each store. Kept records are the control: a layer that does not show them
    cannot tell whether deleted records are gone.
    Kinds of stores: chroma, duckdb, faiss, files, lancedb, langgraph, parquet, postgresql, qdrant,
    sqlite, usearch.

    Examples:
        audit erase --deleted gone.jsonl --kept kept.jsonl ./chroma
        audit erase --deleted gone.jsonl --kept kept.jsonl sqlite:notes.db -o erasure --gate
        audit erase --deleted gone.jsonl --kept kept.jsonl --model ./my-model --nonmembers new.jsonl
    """
    if not (stores or released or model):
        raise AuditError("expected a STORE, --released or --model, got none")
    if nonmembers is not None and model is None:
        raise AuditError("--nonmembers goes with --model")
    console.silence_libraries()
    from auditor.erasure import page
    from auditor.erasure.examine import examine_stores
    from auditor.erasure.records import read_erasure_records
    from auditor.erasure.store import find_store_kind

    for store in stores or ():
        find_store_kind(store)
    with (
        console.open_progress_terminal(verbose=False) as reporter,
        reporter.transient_progress_bar("reading the records"),
    ):
        records = read_erasure_records(deleted, control, user_column)
        erasure = examine_stores(
            stores or (),
            records,
            reporter.note,
            released=released or (),
            model=model,
            nonmembers=nonmembers,
        )
    if as_json:
        typer.echo(page.format_json(erasure), nl=False)
    else:
        for line in page.list_terminal_lines(erasure):
            typer.echo(line)
    if out is not None:
        document = page.make_document(erasure, console.get_command_line())
        console.write_report_folder(
            out, "erasure", document, page.format_json(erasure), to_stderr=as_json
        )
    if junit is not None:
        from auditor.reports.decision import render_decision_junit_xml

        disk.replace_atomically(junit, render_decision_junit_xml(page.make_decision(erasure)))
    if gate:
        raise typer.Exit(_EXIT_CODES.get(erasure.verdict, 0))
