"""What gates decided of a run, kept in its folder: which rules, against what, with what verdict,
about which result.

Each line holds the SHA-256 of the one before it, and a file beside them that of the last: an edited
or removed line is noticed. Whoever writes all of it anew is not: against that stands a signature
(`audit attest`).
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from auditor.core import disk, locks
from auditor.core.errors import AuditError
from auditor.core.jsonable import from_json, to_json
from auditor.gate.rulings import Decision, Ruling, make_ruling
from auditor.records.file_digests import file_sha256_hex
from auditor.records.result_file import RESULT

DECISIONS, LAST = "decisions.jsonl", "decisions.sha256"
_FIRST = "0" * 64  # before the first line
_PATIENCE = 30.0  # seconds that another gate may take to write its line


@dataclass(frozen=True)
class KeptDecision:
    """A decision, and the SHA-256 of the `result.json` that it is about: a folder may have been run
    again since."""

    decided: str  # UTC, ISO 8601
    result: str
    decision: Decision
    before: str  # SHA-256 of the line before this one


def save_decision(folder: Path, decision: Decision) -> None:
    """Adds a decision to the folder. Raises AuditError where it cannot be written or earlier ones
    were edited."""
    lock = locks.acquire_folder_lock(folder, _PATIENCE)
    try:
        if why := describe_decision_edits(folder):
            raise AuditError(why)
        now, lines = datetime.now(UTC).isoformat(timespec="seconds"), _read_decision_lines(folder)
        before = hashlib.sha256(lines[-1]).hexdigest() if lines else _FIRST
        kept = KeptDecision(now, file_sha256_hex(folder / RESULT), decision, before)
        line = json.dumps(to_json(kept), allow_nan=False) + "\n"
        last = hashlib.sha256(line.encode()).hexdigest()
        # killed here, either is the last
        disk.replace_atomically(folder / LAST, f"{before} {last}", sync=True)
        disk.append_durably(folder / DECISIONS, line)
        disk.replace_atomically(folder / LAST, last)
    finally:
        lock.release()


def describe_decision_edits(folder: Path) -> str:
    """What happened to the decisions that gates left in the folder, in a sentence; "" where nothing
    did."""
    ends, lines = _read_last_decision_digests(folder), _read_decision_lines(folder)
    ends |= _read_last_decision_digests(folder)  # another gate may just have written
    path, before = folder / DECISIONS, _FIRST
    mend = "restore it, or audit again"
    for number, line in enumerate(lines, 1):
        try:
            stated_digest = json.loads(line)["before"]
        except (ValueError, KeyError, TypeError, RecursionError):
            stated_digest = None
        if stated_digest != before:
            return f"{path}: a decision at or before line {number} was edited or taken away: {mend}"
        before = hashlib.sha256(line).hexdigest()
    return "" if before in ends else f"{path}: the last decision was edited or taken away: {mend}"


def judge_decision_edits(folder: Path) -> Ruling | None:
    """That the decisions were edited, which fails a gate; None where they were not."""
    why = describe_decision_edits(folder)
    return make_ruling(why, "earlier decisions are as gates left them") if why else None


def _read_last_decision_digests(folder: Path) -> set[str]:
    """What may be the digest of the last line: two while one is written."""
    return {*_read_decision_file(folder / LAST).decode(errors="replace").split()} or {_FIRST}


def _read_decision_lines(folder: Path) -> list[bytes]:
    # a line is hashed with its end
    return _read_decision_file(folder / DECISIONS).splitlines(keepends=True)


def _read_decision_file(path: Path) -> bytes:
    """Empty where there is no such file. Raises AuditError where it cannot be read."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise AuditError(f"{path}: cannot be read: {error.strerror}") from error


def load_gate_decisions(folder: Path) -> tuple[KeptDecision, ...]:
    """The decisions on the result that the folder holds now: of one that was made several times,
    the last.

    Raises AuditError for a file that holds something else, or was edited.
    """
    path, now = folder / DECISIONS, file_sha256_hex(folder / RESULT)
    latest: dict[object, KeptDecision] = {}
    try:
        decisions = [
            from_json(KeptDecision, json.loads(line), str(path))
            for line in _read_decision_lines(folder)
        ]
    except (ValueError, RecursionError) as error:
        raise AuditError(
            f"{path}: expected a decision of a gate on every line: the file is damaged"
        ) from error
    if why := describe_decision_edits(folder):
        raise AuditError(why)
    for entry in decisions:
        if entry.result == now:
            ruled = frozenset((ruling.cell_title, ruling.rule) for ruling in entry.decision.rulings)
            question = (entry.decision.baseline, entry.decision.inconclusive, ruled)
            latest.pop(question, None)  # the last one stands where it was made
            latest[question] = entry
    return tuple(latest.values())
