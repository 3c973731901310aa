"""Store gate decisions in the run folder: rules, baseline, verdict, and the judged result.

Each line holds the SHA-256 of the previous line, and a separate file holds the SHA-256 of the last
line. This detects edited or removed lines, but not a rewrite of all files. Sign the run to detect
that (`audit attest`).
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from auditor.core import disk, locks
from auditor.core.errors import AuditError, refuse_unreadable_path
from auditor.core.jsonable import encode_json, from_json
from auditor.gate.rulings import Decision, Ruling, make_gate_ruling
from auditor.records.file_digests import digest_file
from auditor.records.result_file import RESULT

DECISIONS = "decisions.jsonl"
LAST = "decisions.sha256"
_FIRST = "0" * 64  # before the first line
_PATIENCE = 30.0  # seconds to wait for another gate to write its line


@dataclass(frozen=True)
class KeptDecision:
    """A stored decision.

    Args:
        decided: time of the decision (UTC, ISO 8601).
        result: SHA-256 of the judged `result.json`. The folder may hold a later result.
        decision: the decision.
        before: SHA-256 of the previous line.
    """

    decided: str
    result: str
    decision: Decision
    before: str


def save_decision(folder: Path, decision: Decision) -> None:
    """Append a decision to the decisions in the folder.

    Raise AuditError if writing fails or if earlier decisions were edited.
    """
    lock = locks.acquire_folder_lock(folder, _PATIENCE)
    try:
        if edits := describe_decision_edits(folder):
            raise AuditError(edits)
        now = datetime.now(UTC).isoformat(timespec="seconds")
        lines = _read_decision_lines(folder)
        if lines:
            before = hashlib.sha256(lines[-1]).hexdigest()
        else:
            before = _FIRST
        entry = KeptDecision(now, digest_file(folder / RESULT), decision, before)
        line = encode_json(entry, indent=None)
        last = hashlib.sha256(line.encode()).hexdigest()
        # if killed at this point, either digest is valid
        disk.replace_atomically(folder / LAST, f"{before} {last}", sync=True)
        disk.append_durably(folder / DECISIONS, line)
        disk.replace_atomically(folder / LAST, last)
    finally:
        lock.release()


def describe_decision_edits(folder: Path) -> str:
    """Return a sentence about edits of the stored decisions; "" if they were not edited."""
    ends = _read_last_decision_digests(folder)
    lines = _read_decision_lines(folder)
    ends |= _read_last_decision_digests(folder)  # another gate may just have written
    path = folder / DECISIONS
    before = _FIRST
    mend = "restore it, or audit again"
    for number, line in enumerate(lines, 1):
        try:
            stated_digest = json.loads(line)["before"]
        except (ValueError, KeyError, TypeError, RecursionError):
            stated_digest = None
        if stated_digest != before:
            return f"{path}: a decision at or before line {number} was edited or taken away: {mend}"
        before = hashlib.sha256(line).hexdigest()
    if before in ends:
        return ""
    return f"{path}: the last decision was edited or taken away: {mend}"


def judge_decision_edits(folder: Path) -> Ruling | None:
    """Return a failed ruling if stored decisions were edited; otherwise None."""
    edits = describe_decision_edits(folder)
    if edits:
        return make_gate_ruling(edits, "earlier decisions are as gates left them")
    return None


def _read_last_decision_digests(folder: Path) -> set[str]:
    """Return the digests that the last stored decision may have.

    Normally this is one digest. If a write was interrupted, there are two: of the decision before
    the write, and of the decision that was being written.
    """
    return {*_read_decision_file(folder / LAST).decode(errors="replace").split()} or {_FIRST}


def _read_decision_lines(folder: Path) -> list[bytes]:
    # the line ends are hashed too
    return _read_decision_file(folder / DECISIONS).splitlines(keepends=True)


def _read_decision_file(path: Path) -> bytes:
    """Return the content of the file; b"" if the file is missing.

    Raise AuditError if the file cannot be read.
    """
    with refuse_unreadable_path(path):
        try:
            return path.read_bytes()
        except FileNotFoundError:
            return b""


def load_gate_decisions(folder: Path) -> tuple[KeptDecision, ...]:
    """Return the decisions on the folder's current result, oldest first.

    If the same rules were judged repeatedly, only the last decision is returned. Raise AuditError
    for an invalid or edited file.
    """
    path = folder / DECISIONS
    now = digest_file(folder / RESULT)
    latest: dict[object, KeptDecision] = {}
    try:
        decisions = []
        for line in _read_decision_lines(folder):
            decisions.append(from_json(KeptDecision, json.loads(line), str(path)))
    except (ValueError, RecursionError) as error:
        raise AuditError(
            f"{path}: expected a decision of a gate on every line: the file is damaged"
        ) from error
    if edits := describe_decision_edits(folder):
        raise AuditError(edits)
    for entry in decisions:
        if entry.result == now:
            ruled = frozenset((ruling.cell_title, ruling.rule) for ruling in entry.decision.rulings)
            question = (entry.decision.baseline, entry.decision.inconclusive, ruled)
            latest.pop(question, None)  # the last decision keeps its own position
            latest[question] = entry
    return tuple(latest.values())
