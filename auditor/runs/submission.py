"""Write a run's guesses on LM-Extraction arrays to a submission file, which `audit score` reads.

The file holds token ids of private text, so only its owner may read the file.
"""

from __future__ import annotations

import csv
import io
import json
import os
from pathlib import Path

from auditor.benchmarks.data.lm_extraction import (
    find_array_row,
    has_extraction_arrays,
)
from auditor.benchmarks.data.submission_score import GUESS, ID
from auditor.core import disk
from auditor.core.errors import AuditError
from auditor.core.nouns import UNDEFENDED, CellKey
from auditor.core.plan_parts import AttackPlan, DataPlan
from auditor.records.folder import RunFolder


def check_plan_allows_submission(
    submission: str | None, data: DataPlan, attacks: AttackPlan
) -> None:
    """Raise AuditError if the guesses of this plan's run cannot be written as a submission."""
    if submission is None:
        return
    if data.data is None or not has_extraction_arrays(Path(data.data)):
        if data.data is None:
            got = "the built-in lab"
        else:
            got = repr(data.data)
        raise AuditError(
            f"--submission goes with a --data folder of LM-Extraction arrays, got {got}"
        )
    if len(set(attacks.attack)) != 1:
        raise AuditError(
            "--submission contains the guesses of one attack, expected one, got "
            f"{', '.join(attacks.attack)}"
        )
    if data.suffix_length is not None:
        raise AuditError(
            "--submission contains whole suffixes: expected no --suffix-length, got "
            f"{data.suffix_length}"
        )
    path = Path(submission)
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        if path.is_dir():
            got = "a folder"
        else:
            got = "one in no folder of yours"
        raise AuditError(
            f"expected --submission to be a file that can be written, got {got}: {submission!r}"
        )


def write_submission(path: Path, attacks: AttackPlan, folder: RunFolder) -> tuple[CellKey, int]:
    """Write the submission of a finished run: guesses about the undefended target.

    The setting is white-box, or text-only if the run has only this setting. The file lists the
    first guess of each attacked member, sorted by descending score. Guesses with the same score are
    in the order of the data arrays. Only the file's owner may read the file.

    Return the submitted cell (target, setting, attack) and the number of guesses. Raise AuditError
    if the attack gave no guesses or the file cannot be written.
    """
    cell = CellKey(
        UNDEFENDED,
        "text-only" if attacks.setting == "text-only" else "white-box",
        attacks.attack[0],
    )
    answers = folder.guesses.finished_secrets(cell).values()
    members = [(g.ranked[0], row) for g in answers if (row := find_array_row(g.secret)) is not None]
    if not members:
        raise AuditError(
            f"no submission was written: expected guesses of {cell}, got none, see the report"
        )
    lines = io.StringIO()
    writer = csv.writer(lines, lineterminator="\n")
    writer.writerow((ID, GUESS))
    for guess, row in sorted(members, key=lambda member: (-member[0].score, member[1])):
        writer.writerow((row, json.dumps(guess.suffix, separators=(",", ":"))))
    disk.replace_atomically(path, lines.getvalue())
    return cell, len(members)
