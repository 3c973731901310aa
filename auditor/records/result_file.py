"""Read the `result.json` of a run folder."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from auditor import __version__
from auditor.core.errors import AuditError
from auditor.core.jsonable import from_json
from auditor.core.result import SCHEMA_VERSION, AuditResult
from auditor.records.attacked_secrets import PLAN
from auditor.statistics import metrics

RESULT = "result.json"


def read_result(folder: Path) -> AuditResult:
    """Read a run folder's result; raise AuditError if this version cannot read it."""
    path = folder / RESULT
    raw = _load_result_json(folder, path)
    if not isinstance(raw, dict):
        raise AuditError(f"{path}: expected an object, got {type(raw).__name__}")
    version = raw.get("schema_version", "none")
    # not isinstance, because True is an int
    if type(version) is not int or version != SCHEMA_VERSION:
        newer = type(version) is int and version > SCHEMA_VERSION
        tool_version = raw.get("tool_version")
        made_by = ""
        if isinstance(tool_version, str):
            made_by = f"audit {tool_version} made it, this one is {__version__}; "
        if newer:
            advice = "a newer audit made it, update this one"
        else:
            advice = f"{made_by}re-run the audit"
        raise AuditError(
            f"{path}: expected schema_version {SCHEMA_VERSION}, got {version!r}; {advice}"
        )
    result = from_json(AuditResult, raw, str(path))
    metrics.register_plugin_titles(result.metrics)
    return result


def _load_result_json(folder: Path, path: Path) -> Any:
    if folder.is_file():
        raise AuditError(f"{folder}: expected a run folder, got a file")
    if not folder.is_dir():
        remark = ""
        if folder.name == "latest":
            remark = "; the last audit run was refused, or none was made here"
        raise AuditError(f"{folder}: no such run folder{remark}")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        reason = (
            explain_missing_result(folder) or f"no {RESULT} in this folder: it is no run folder"
        )
        raise AuditError(f"{folder}: {reason}") from None
    except OSError as error:
        raise AuditError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise AuditError(f"{path}: not valid JSON ({error})") from error


def explain_missing_result(folder: Path) -> str:
    """Explain why a folder has no result: the run is not finished, or the folder holds several
    runs.

    Return "" for any other folder, also for a folder with a result.
    """
    if (folder / RESULT).exists():
        return ""
    if (folder / PLAN).is_file():
        return f"not finished; audit run --resume {folder} continues it"
    for inner in ("*", "*/*"):
        if any(folder.glob(f"{inner}/{RESULT}")):
            return f"a folder of runs, not a run; {folder}/{inner} names them"
    return ""


def read_creation_time(result: AuditResult, where: str) -> datetime:
    """Return the UTC time of the run.

    Raise AuditError if the recorded date is invalid.

    Args:
        result: result of the run.
        where: the run's name for messages.
    """
    try:
        at = datetime.fromisoformat(result.created)
    except ValueError:
        raise AuditError(
            f"{where}: expected the date of the run in {RESULT}, got {result.created!r}"
        ) from None
    # `astimezone` would read a date without a zone as local time.
    if at.tzinfo:
        return at.astimezone(UTC)
    return at.replace(tzinfo=UTC)
