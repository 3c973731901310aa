"""Write result.json and the reports of a run folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from auditor.core import disk
from auditor.core.errors import AuditError
from auditor.core.jsonable import encode_json
from auditor.core.result import AuditResult
from auditor.gate.compare import Comparison
from auditor.records import manifest
from auditor.records.result_file import RESULT, read_result

if TYPE_CHECKING:
    from auditor.reports.blocks import Document

MARKDOWN = "report.md"
HTML = "report.html"


def write_run_reports(folder: Path, result: AuditResult, reveal: bool = False) -> None:
    """Atomically write report.html, report.md, manifest, result.json and any `frontier.*`.

    Both reports are rendered before any file is written. The result is written last, because it
    marks the folder as finished. reveal: whether the reports show the folder's private text.
    """
    rewrite_run_reports(folder, None, reveal, result)
    write_result(folder, result)


def write_result(folder: Path, result: AuditResult) -> None:
    """Write result.json and its manifest, the only files that `audit report` needs."""
    text = encode_json(result)
    # Write the manifest before the result, from the same bytes: every result then has its manifest.
    manifest.write_manifest(folder, text.encode())
    disk.replace_atomically(folder / RESULT, text, sync=True)


def rewrite_run_reports(
    folder: Path,
    since: Comparison | None = None,
    reveal: bool = False,
    result: AuditResult | None = None,
) -> tuple[Path, ...]:
    """Render the reports again from the run folder only; return their paths, HTML first.

    since: a comparison of an earlier run with this run. reveal: whether to show private text too.
    result: the result, if the folder does not have it yet.
    """
    from auditor.conclusions import secret_details
    from auditor.records import private_texts
    from auditor.reports import (
        frontier,
        html,
        markdown,
        phrases,
    )  # jinja2 and matplotlib: import only to render

    result = result or read_result(folder)
    known = secret_details.read_secret_details(folder)
    texts = None
    if reveal:
        texts = private_texts.read_secret_texts(folder)
    rendered = {
        HTML: html.render_html_report(result, known, since, texts, folder),
        MARKDOWN: markdown.render_markdown_report(result, since, texts, known, folder),
    }
    for name, report in rendered.items():
        disk.replace_atomically(folder / name, report)
    if result.frontiers:
        frontier.write_frontier_files(folder, phrases.make_result_printable(result).frontiers)
    return folder / HTML, folder / MARKDOWN


def write_document(folder: Path, name: str, document: Document) -> tuple[Path, Path]:
    """Write a document as NAME.md and NAME.html, and return their paths."""
    from auditor.reports import html, markdown  # as above

    paths = folder / f"{name}.md", folder / f"{name}.html"
    disk.replace_atomically(paths[0], markdown.render_markdown_document(document))
    disk.replace_atomically(paths[1], html.render_html_document(document))
    return paths


def append_job_summary(path: Path, text: str) -> None:
    """Append text to a file to which other processes also append, such as a job summary."""
    try:
        with open(path, "a", encoding="utf-8", newline="\n") as file:
            file.write(text)
    except OSError as error:
        raise AuditError(f"{path}: cannot be written: {error.strerror}") from error
