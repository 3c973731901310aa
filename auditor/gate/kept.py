"""What gates decided of a run, kept in its folder: which rules, against what, with what verdict, about which result."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from auditor.core import disk
from auditor.core.errors import AuditError
from auditor.core.jsonable import from_json, to_json
from auditor.gate.rulings import Decision
from auditor.records.saved import RESULT

DECISIONS = "decisions.jsonl"


@dataclass(frozen=True)
class Kept:
    """A decision, and the SHA-256 of the `result.json` that it is about: a folder may have been run again since."""

    decided: str  # UTC, ISO 8601
    result: str
    decision: Decision


def keep(folder: Path, decision: Decision) -> None:
    """Adds a decision to the folder. Raises AuditError where it cannot be written."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    disk.append(folder / DECISIONS, json.dumps(to_json(Kept(now, _digest(folder), decision)), allow_nan=False) + "\n")


def kept(folder: Path) -> tuple[Kept, ...]:
    """The decisions on the result that the folder holds now: of one that was made several times, the last.

    Raises AuditError for a file that holds something else.
    """
    path, now = folder / DECISIONS, _digest(folder)
    if not path.exists():
        return ()
    found: dict[object, Kept] = {}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        read = [from_json(Kept, json.loads(line), str(path)) for line in lines]
    except OSError as error:
        raise AuditError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise AuditError(f"{path}: expected a decision of a gate on every line: the file is damaged") from error
    for one in read:
        if one.result == now:
            asked = (one.decision.baseline, one.decision.inconclusive, _asked(one.decision))
            found.pop(asked, None)  # the last one stands where it was made
            found[asked] = one
    return tuple(found.values())


def _asked(decision: Decision) -> frozenset[tuple[str, str]]:
    return frozenset((ruling.row, ruling.rule) for ruling in decision.rulings)


def _digest(folder: Path) -> str:
    try:
        return hashlib.sha256((folder / RESULT).read_bytes()).hexdigest()
    except OSError as error:
        raise AuditError(f"{folder / RESULT}: cannot be read: {error.strerror}") from error
