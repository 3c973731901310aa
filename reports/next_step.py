"""The next command that a run suggests. Knows what was shown, and where the run lies."""

from __future__ import annotations

import shlex
from pathlib import Path

from auditor.conclusions.signals import LeakAssessment
from auditor.core.counts import counted
from auditor.reports import escaping, signals


def next_command_to_suggest(seen: LeakAssessment, folder: Path) -> str:
    """Advice where something leaks or stands in doubt; else a gate, so that it stays as it is."""
    # Cleaned before it is quoted: what is copied from here into a shell has no control characters.
    where, gated = shlex.quote(escaping.to_printable_line(str(folder))), seen.signal_for_gate()
    if gated is None or signals.all_doubts(seen) or any(map(seen.shown_signals, seen.targets)):
        return f"audit advise {where}"
    return signals.gate_command_to_suggest(seen, [gated], where)


def command_that_asks_the_rest(unasked: int, folder: Path) -> str:
    """Return the command that goes on with a check that ran out of time, and what it asks."""
    rest = f"asks the {counted(unasked, 'record')} that {'is' if unasked == 1 else 'are'} left"
    return (
        f"audit check --resume {shlex.quote(escaping.to_printable_line(str(folder)))} --minutes "
        f"30    {rest}"
    )
