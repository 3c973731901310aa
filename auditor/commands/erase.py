"""`audit erase`: check whether a deletion from a store removed text and vectors."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from auditor.commands import console, options

_EXIT_CODES = {"still there": 1, "cannot tell": 4}


def erase(
    stores: Annotated[
        list[str],
        typer.Argument(
            metavar="STORE...", help="Folder or file of a store; KIND:PATH if it is not recognised."
        ),
    ],
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
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", metavar="DIR", help="Folder for erasure.html, .md and .json."),
    ] = None,
    gate: Annotated[
        bool, typer.Option("--gate", help="Exit 1 if any is still there, 4 if a layer cannot tell.")
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Say whether deleted records are gone from a store: from its library, history and bytes.

    Examines a copy. Kept records are the control: a layer that does not show them cannot tell.
    Kinds of stores: chroma, duckdb, faiss, files, lancedb, langgraph, qdrant, sqlite, usearch.

    Examples:
        audit erase --deleted gone.jsonl --kept kept.jsonl ./chroma
        audit erase --deleted gone.jsonl --kept kept.jsonl sqlite:notes.db -o erasure --gate
    """
    console.silence_libraries()
    from auditor.erasure import page
    from auditor.erasure.examine import examine_stores
    from auditor.erasure.records import read_erasure_records
    from auditor.erasure.store import find_store_kind

    for store in stores:
        find_store_kind(store)
    with (
        console.open_progress_terminal(verbose=False) as reporter,
        reporter.transient_progress_bar("reading the records"),
    ):
        records = read_erasure_records(deleted, control)
        erasure = examine_stores(stores, records, reporter.note)
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
    if gate:
        raise typer.Exit(_EXIT_CODES.get(erasure.verdict, 0))
