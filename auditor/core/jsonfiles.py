"""Reads JSON files; any fault is one sentence, which never quotes the content, as that may be private."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from auditor.core.errors import AuditError


def read_json(path: Path, what: str) -> Any:
    """The value in a file of JSON. Raises AuditError; `what`: what the file is, for its sentence."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise AuditError(f"cannot read {what} {str(path)!r}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise AuditError(f"cannot read {what} {str(path)!r}: it is not JSON ({type(error).__name__})") from None


def read_json_object(path: Path, what: str) -> dict[str, Any]:
    """As `read_json`, of an object."""
    value = read_json(path, what)
    if not isinstance(value, dict):
        raise AuditError(f"cannot read {what} {str(path)!r}: expected an object, got {type(value).__name__}")
    return value
