"""A run folder on disk: result.json and the reports rendered from it. Knows paths; not what is in the reports."""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from auditor.errors import AuditError
from auditor.types import SCHEMA_VERSION, AuditResult, from_json, to_json

if TYPE_CHECKING:
    from auditor.compare import Comparison

RESULT, MARKDOWN, HTML = "result.json", "report.md", "report.html"


def read(folder: Path) -> AuditResult:
    """The result a run folder holds. Raises AuditError, one sentence, when there is none that this version can read."""
    path = folder / RESULT
    raw = _load(folder, path)
    if not isinstance(raw, dict):
        raise AuditError(f"{path}: expected an object, got {type(raw).__name__}")
    if raw.get("schema_version") != SCHEMA_VERSION:
        found = raw.get("schema_version", "none")
        raise AuditError(f"{path}: expected schema_version {SCHEMA_VERSION}, got {found!r}; re-run the audit")
    result: AuditResult = from_json(AuditResult, raw, str(path))
    return result


def write(folder: Path, result: AuditResult) -> None:
    """result.json, report.md and report.html. All are rendered before one is written, and each is replaced whole."""
    text = json.dumps(to_json(result), indent=1, allow_nan=False) + "\n"
    rendered = _rendered(result, folder)
    replace(folder / RESULT, text)
    for name, report in rendered.items():
        replace(folder / name, report)


def render_all(
    folder: Path, since: Comparison | None = None, texts: Mapping[str, Sequence[str]] | None = None
) -> tuple[Path, ...]:
    """Renders the reports of a run folder anew from the folder alone; returns their paths, the HTML first.

    since: another run and this one, to tell what changed. texts: by secret, the text of each token of its suffix, for
    a page that may show it.
    """
    rendered = _rendered(read(folder), folder, since, texts)
    for name, report in rendered.items():
        replace(folder / name, report)
    return tuple(folder / name for name in rendered)


def _rendered(
    result: AuditResult,
    folder: Path,
    since: Comparison | None = None,
    texts: Mapping[str, Sequence[str]] | None = None,
) -> dict[str, str]:
    from auditor import details
    from auditor.reports import html, markdown  # jinja2 and matplotlib: only for who renders

    known = dataclasses.replace(details.read(folder), texts=texts or {})
    return {HTML: html.render(result, known, since), MARKDOWN: markdown.render(result)}


def _load(folder: Path, path: Path) -> Any:
    if not folder.is_dir():
        raise AuditError(f"{folder}: no such run folder")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise AuditError(f"{folder}: no {RESULT} in this folder; is it a run folder, and did the run finish?") from None
    except OSError as error:
        raise AuditError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise AuditError(f"{path}: not valid JSON ({error})") from error


def append(path: Path, text: str) -> None:
    """Adds to a file that others write too, as a job summary is."""
    try:
        with open(path, "a", encoding="utf-8", newline="\n") as file:
            file.write(text)
    except OSError as error:
        raise AuditError(f"{path}: cannot be written: {error.strerror}") from error


def replace(path: Path, text: str) -> None:
    """Writes the file whole or not at all, readable by its owner only (mkstemp's 0600): it tells what leaks."""
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with open(handle, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
        os.replace(temporary, path)
    except OSError as error:
        raise AuditError(f"{path}: cannot be written: {error.strerror}") from error
    finally:
        if temporary is not None and os.path.exists(temporary):
            os.unlink(temporary)
