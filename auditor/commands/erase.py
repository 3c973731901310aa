"""`audit erase`: check whether deleted records are gone from stores, released text and a model."""

from __future__ import annotations

from pathlib import Path

import typer

from auditor.commands import console
from auditor.core import disk
from auditor.core.errors import AuditError

_EXIT_CODES = {"still there": 1, "cannot tell": 4}


def erase(
    stores: list[str] | None = None,
    *,
    deleted: Path,
    control: Path,
    model: str | None = None,
    nonmembers: str | None = None,
    released: list[Path] | None = None,
    user_column: str | None = None,
    out: Path | None = None,
    gate: bool = False,
    junit: Path | None = None,
    as_json: bool = False,
) -> None:
    """Say whether deleted records are gone from stores (library, history, bytes), released text and
    a model.

    Examines a copy of each store, in layers: library, history, bytes. Kept records are the control:
    a layer that does not show them cannot tell whether deleted records are gone. Kinds of stores:
    chroma, duckdb, faiss, files, lancedb, langgraph, mem0, parquet, postgresql, qdrant, sqlite,
    usearch.

    Args:
        stores (STORE...): Folder, file or postgresql:// address; KIND:PATH if it is not recognised.
        deleted (FILE): The deleted records: text, embedding, id; .jsonl, .csv or .parquet.
        control (--kept FILE): Records that are still in the store, if possible all of them: the
            control.
        model: Also ask this model: Hugging Face id or folder.
        nonmembers (FILE): Records that --model never saw: the membership baseline.
        released (FILE): Also search released text; repeatable.
        user_column: Column of --deleted that names each record's person.
        out (-o, --out DIR): Folder for erasure.html, .md and .json.
        gate: Exit 1 if a deleted record is still there, 4 if a layer cannot tell.
        junit (FILE): Write JUnit XML: a case for each layer.

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
    from auditor.erasure.examine import examine_erased_stores
    from auditor.erasure.records import read_erasure_records
    from auditor.erasure.store import find_store_kind

    for store in stores or ():
        find_store_kind(store)
    with (
        console.open_progress_terminal(verbose=False) as reporter,
        reporter.transient_progress_bar("reading the records"),
    ):
        records = read_erasure_records(deleted, control, user_column)
        erasure = examine_erased_stores(
            stores or (),
            records,
            reporter.note,
            released=released or (),
            model=model,
            nonmembers=nonmembers,
        )
    console.print_verdict(page, erasure, "erasure", out, as_json)
    if junit is not None:
        from auditor.reports.decision import render_decision_junit_xml

        disk.replace_atomically(junit, render_decision_junit_xml(page.make_decision(erasure)))
    if gate:
        raise typer.Exit(_EXIT_CODES.get(erasure.verdict, 0))
