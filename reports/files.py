"""A run folder on disk: result.json and the reports rendered from it. Knows paths; not what is in the reports."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from auditor.compare import Comparison
from auditor.errors import AuditError
from auditor.types import SCHEMA_VERSION, AuditResult, from_json, to_json

RESULT, MARKDOWN, HTML = "result.json", "report.md", "report.html"


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
    """result.json, report.md and report.html. All are rendered before one is written, and each is replaced whole.

    reveal: whether the reports show the private text that lies in the folder.
    """
    text = json.dumps(to_json(result), indent=1, allow_nan=False) + "\n"
    rendered = _rendered(folder, result, None, reveal)
    replace(folder / RESULT, text)
    for name, report in rendered.items():
        replace(folder / name, report)


def render_all(folder: Path, since: Comparison | None = None, reveal: bool = False) -> tuple[Path, ...]:
    """Renders the reports of a run folder anew; returns their paths, the HTML first.

    They say what `result.json` says. since: another run and this one, to tell what changed. reveal: also the private
    text that lies beside it.
    """
    rendered = _rendered(folder, read(folder), since, reveal)
    for name, report in rendered.items():
        replace(folder / name, report)
    return tuple(folder / name for name in rendered)


def _rendered(folder: Path, result: AuditResult, since: Comparison | None, reveal: bool) -> dict[str, str]:
    from auditor.reports import html, markdown, texts  # jinja2 and matplotlib: only for who renders

    shown = texts.by_alias(folder) if reveal else None
    return {HTML: html.render(result, shown), MARKDOWN: markdown.render(result, since, shown)}


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


def replace(path: Path, content: str | bytes) -> None:
    """Writes the file whole or not at all, readable by its owner only (mkstemp's 0600): it tells what leaks."""
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with open(handle, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
        os.replace(temporary, path)
    except OSError as error:
        raise AuditError(f"{path}: cannot be written: {error.strerror}") from error
    finally:
        if temporary is not None and os.path.exists(temporary):
            os.unlink(temporary)
