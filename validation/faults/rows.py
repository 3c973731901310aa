"""Define a row of the fault table, and format the table."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from validation import harness


@dataclass(frozen=True)
class Recovery:
    """One fault, what the command said, what was done then, and whether the result was
    undisturbed.

    different: sentences on differences. kills: number of killed processes. expected: exit codes of
    the disturbed command and of the command that continued.
    """

    fault: str
    during: str
    command: str
    moment: str
    said: str
    code: int
    then: str
    then_said: str
    then_code: int
    different: tuple[str, ...] = ()
    kills: int = 0
    expected: tuple[int, int] = (-9, 0)

    @property
    def held(self) -> bool:
        return not self.different and (self.code, self.then_code) == self.expected

    @property
    def group(self) -> tuple[str, ...]:
        """Return the key of the rows that are shown as one."""
        return (
            self.fault,
            self.during,
            self.command,
            str(self.code),
            _plain(self.said) if self.code > 0 else "",
        )


def markdown(rows: Sequence[Recovery]) -> str:
    """Return a Markdown table with a line for each group of rows.

    A line has the moments, what the command said, what came after, and how many rows ended equal.
    """
    groups: dict[tuple[str, ...], list[Recovery]] = {}
    for row in rows:
        groups.setdefault(row.group, []).append(row)
    columns = (
        "fault",
        "during",
        "moments",
        "what the command said (exit code)",
        "what came after",
        "equal",
    )
    return harness.markdown(columns, map(_cells, groups.values()))


def _cells(own: Sequence[Recovery]) -> tuple[str, ...]:
    first, held = own[0], sum(row.held for row in own)
    said = {-9: "nothing: it was killed", 0: "nothing: it goes on (0)"}.get(first.code)
    return (
        first.fault,
        ", ".join(filter(None, (first.during, first.command))),
        _moments(own),
        said or f"{_plain(first.said)} ({first.code})",
        ", or ".join(dict.fromkeys(f"{row.then} ({row.then_code})" for row in own)),
        f"{'yes' if held == len(own) else 'NO'}, {held} of {len(own)}",
    )


def _moments(own: Sequence[Recovery]) -> str:
    shares = [int(found[1]) for row in own if (found := re.match(r"(\d+)% of it done", row.moment))]
    if len(shares) == len(own) > 1:
        again = sum(row.kills > 1 for row in own)
        return (
            f"{len(own)}: {min(shares)}–{max(shares)}% of it done"
            + f"; {again} killed twice" * bool(again)
        )
    return "; ".join(dict.fromkeys(row.moment for row in own))


def _plain(said: str) -> str:
    """Return the message without what changes each time, such as the process id."""
    return re.sub(r"process \d+", "process PID", re.sub(r"^error: ", "", said))


def totals(rows: Sequence[Recovery]) -> str:
    kills, held = sum(row.kills for row in rows), sum(row.held for row in rows)
    return (
        f"{len(rows)} faults, {kills} kills among them: {held} of {len(rows)} ended as undisturbed"
    )
