"""Suggest the next command from the signals of a run and its folder."""

from __future__ import annotations

import shlex
from pathlib import Path

from auditor.conclusions.signals import LeakAssessment
from auditor.core.counts import counted
from auditor.reports import escaping, signals


def next_command_to_suggest(assessment: LeakAssessment, folder: Path) -> str:
    """Return advice after a leak or doubt; else a gate that keeps the result."""
    # Clean before quoting: text copied into a shell has no control characters.
    quoted_folder, gated = (
        shlex.quote(escaping.to_printable_line(str(folder))),
        assessment.signal_for_gate(),
    )
    if (
        gated is None
        or signals.all_doubts(assessment)
        or any(map(assessment.shown_signals, assessment.targets))
    ):
        return f"audit advise {quoted_folder}"
    return signals.gate_command_to_suggest(assessment, [gated], quoted_folder)


def command_that_asks_the_rest(unasked: int, folder: Path) -> str:
    """Return the command that resumes a check after a timeout, and the number of records left."""
    rest = f"asks the {counted(unasked, 'record')} that {'is' if unasked == 1 else 'are'} left"
    return (
        f"audit check --resume {shlex.quote(escaping.to_printable_line(str(folder)))} --minutes "
        f"30    {rest}"
    )
