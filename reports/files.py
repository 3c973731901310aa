"""A run folder on disk: result.json and the reports rendered from it. Knows paths; not what is in the reports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from auditor import disk
from auditor.errors import AuditError
from auditor.types import SCHEMA_VERSION, AuditResult, from_json, to_json

if TYPE_CHECKING:
    from auditor.compare import Comparison

RESULT = "result.json"
MARKDOWN, HTML = "report.md", "report.html"


def read(folder: Path) -> AuditResult:
    """The result a run folder holds. Raises AuditError, one sentence, when there is none that this version can read."""
    path = folder / RESULT
    raw = _load(folder, path)
    if not isinstance(raw, dict):
        raise AuditError(f"{path}: expected an object, got {type(raw).__name__}")
    found = raw.get("schema_version", "none")
    if type(found) is not int or found != SCHEMA_VERSION:
        newer = type(found) is int and found > SCHEMA_VERSION
        then = "a newer audit made it, update this one" if newer else "re-run the audit"
        raise AuditError(f"{path}: expected schema_version {SCHEMA_VERSION}, got {found!r}; {then}")
    result: AuditResult = from_json(AuditResult, raw, str(path))
    return result


def write(folder: Path, result: AuditResult, reveal: bool = False) -> None:
    """report.html, report.md and result.json. All are rendered before one is written, and each is replaced whole.

    The result comes last: a folder that holds one is finished.
    reveal: whether the reports show the private text that lies in the folder.
    """
    text = json.dumps(to_json(result), indent=1, allow_nan=False) + "\n"
    for name, report in _rendered(folder, result, None, reveal).items():
        disk.replace(folder / name, report)
    disk.replace(folder / RESULT, text, sync=True)


def render_all(folder: Path, since: Comparison | None = None, reveal: bool = False) -> tuple[Path, ...]:
    """Renders the reports of a run folder anew from the folder alone; returns their paths, the HTML first.

    since: another run and this one, to tell what changed. reveal: also show the private text that lies in the folder.
    """
    rendered = _rendered(folder, read(folder), since, reveal)
    for name, report in rendered.items():
        disk.replace(folder / name, report)
    return tuple(folder / name for name in rendered)


def render_missing(folder: Path) -> None:
    """Renders a finished run whose reports are not all there: older versions wrote them behind the result."""
    if not all((folder / name).is_file() for name in (HTML, MARKDOWN)):
        render_all(folder)


def _rendered(folder: Path, result: AuditResult, since: Comparison | None, reveal: bool) -> dict[str, str]:
    from auditor import details
    from auditor.reports import html, markdown, texts  # jinja2 and matplotlib: only for who renders

    known = details.renamed(details.read(folder), texts.names(folder))
    shown = texts.by_alias(folder) if reveal else None
    return {HTML: html.render(result, known, since, shown), MARKDOWN: markdown.render(result, since, shown)}


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
