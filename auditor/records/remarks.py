"""Store the lines that a command adds to its first screen, for use in reports."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from auditor.core.jsonable import read_record, write_json

REMARKS = "remarks.json"


@dataclass(frozen=True)
class CommandRemarks:
    """Hold sentences and next commands that a command adds to the reports.

    Args:
        limits: sentences about questions that the run cannot answer.
        deeper: the command to run next if nothing was found.
        your_own: the command to run next after a demonstration.
    """

    limits: tuple[str, ...] = ()
    deeper: str = ""
    your_own: str = ""


def write_command_remarks(folder: Path, remarks: CommandRemarks) -> None:
    """Write the remarks to the run folder."""
    write_json(folder / REMARKS, remarks)


def read_command_remarks(folder: Path) -> CommandRemarks:
    """Read the remarks in the run folder; return empty remarks if there are none."""
    remarks = read_record(folder / REMARKS, CommandRemarks, "the remarks of a run")
    return remarks or CommandRemarks()
