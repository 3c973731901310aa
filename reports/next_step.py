"""Suggest the next command from the signals of a run and its folder."""

from __future__ import annotations

import shlex
from pathlib import Path

from auditor.conclusions.signals import LeakAssessment
from auditor.core.counts import format_count
from auditor.reports import escaping, signals


def suggest_next_command(assessment: LeakAssessment, folder: Path) -> str:
    """Return the next command for the user.

    After a leak or an unreliable result, suggest `audit advise`. Otherwise suggest a gate that
    checks later models.
    """
    # Clean before quoting: text copied into a shell has no control characters.
    quoted_folder = shlex.quote(escaping.make_printable_line(str(folder)))
    gated = assessment.find_gate_signal()
    if (
        gated is None
        or signals.list_doubts(assessment)
        or any(map(assessment.list_shown_signals, assessment.targets))
    ):
        return f"audit advise {quoted_folder}"
    return signals.suggest_gate_command(assessment, [gated], quoted_folder)


def format_resume_line(unasked: int, folder: Path) -> str:
    """Return the command that resumes the check, and how many records it will query."""
    rest = f"asks the {format_count(unasked, 'record')} that {'is' if unasked == 1 else 'are'} left"
    return (
        f"audit check --resume {shlex.quote(escaping.make_printable_line(str(folder)))} --minutes "
        f"30    {rest}"
    )
