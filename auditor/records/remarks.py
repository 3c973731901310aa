"""Store the lines that a command adds to its first screen, for use in reports."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from auditor.core import disk
from auditor.core.jsonable import from_json, read_json_object, to_json

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
    disk.replace_atomically(folder / REMARKS, json.dumps(to_json(remarks)))


def read_command_remarks(folder: Path) -> CommandRemarks:
    """Read the remarks in the run folder; return empty remarks if there are none."""
    path = folder / REMARKS
    if not path.is_file():
        return CommandRemarks()
    remarks: CommandRemarks = from_json(
        CommandRemarks, read_json_object(path, "the remarks of a run"), str(path)
    )
    return remarks
