"""`audit rag`: measure what a retrieval system gives away of its documents."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import typer

from auditor.commands import console
from auditor.core.errors import AuditError

_EXIT_CODES = {"leaks": 1, "cannot tell": 4}


def rag(
    system: str | None = None,
    *,
    documents: str,
    control: str | None = None,
    crawl: int = 100,
    template: str | None = None,
    out: Path | None = None,
    seed: int = 0,
    gate: bool = False,
    as_json: bool = False,
) -> None:
    """Measure what a retrieval system gives away: shown text, personal data, membership, a crawl.

    Each document goes into the store with probability 1/2. `index(documents)` in the same file
    fills the store. Without this function, first run the command without SYSTEM, and index in.jsonl
    yourself.

    Args:
        documents (FILE): Documents, with text, and optionally id, pii and identity (who may see
            it).
        system: FILE.py:NAME with ask(question, identity), or http://HOST:PORT/v1#MODEL. Without
            SYSTEM, only draw in.jsonl and out.jsonl.
        control (SYSTEM): Positive control: a system that does show the documents, such as SYSTEM
            without its protection. [default: SYSTEM, asked with each document's identity]
        crawl: Questions of a crawl whose attacker knows no document.
        template (TEXT): Question to ask; {words} is replaced by a document's first words.
        out (-o, --out DIR): Folder for in.jsonl, out.jsonl, rag.html and .json.
        gate: Exit 1 if the system leaks, 4 if a layer cannot tell.

    Examples:
        audit rag --documents notes.jsonl -o rag
        audit rag my_rag.py:ask --documents notes.jsonl -o rag --gate
    """
    console.silence_libraries()
    from auditor.rag import page
    from auditor.rag.asking import TEMPLATE, WORDS
    from auditor.rag.audit import audit_rag
    from auditor.rag.documents import (
        check_drawn_documents,
        read_rag_documents,
        write_drawn_documents,
    )
    from auditor.rag.system import open_rag_system

    question = template or TEMPLATE
    if WORDS not in question:
        raise AuditError(f"expected {WORDS} in --template, got none")
    if crawl < 0:
        raise AuditError(f"expected --crawl of at least 0, got {crawl}")
    if system is None and (out is None or gate):
        raise AuditError("expected SYSTEM to audit, or only -o DIR to draw documents, got none")
    corpus = read_rag_documents(documents, seed)
    if system is None:
        assert out is not None
        for path in write_drawn_documents(out, corpus):
            typer.echo(f"wrote   {path}")
        return
    with contextlib.redirect_stdout(sys.stderr):  # the system's output is not part of the report
        audited = open_rag_system(system)
        control_system = None
        if control is not None:
            control_system = open_rag_system(control)
        if out is not None and audited.index is not None:
            write_drawn_documents(out, corpus)
        elif audited.index is None:
            check_drawn_documents(out or Path("."), corpus)
        with (
            console.open_progress_terminal(verbose=False) as reporter,
            reporter.transient_progress_bar("putting in the documents"),
        ):
            audit = audit_rag(
                corpus, audited, control_system, question, crawl, seed, reporter.progress
            )
    console.print_verdict(page, audit, "rag", out, as_json)
    if gate:
        raise typer.Exit(_EXIT_CODES.get(audit.verdict, 0))
