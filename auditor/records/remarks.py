"""Store the lines that an audit's command adds to its first screen, so that reports can show them
too."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from auditor.core import disk
from auditor.core.jsonable import from_json, read_json_object, to_json

REMARKS = "remarks.json"


@dataclass(frozen=True)
class CommandRemarks:
    """Sentences and next commands that the command adds to the reports.

    limits: sentences on what the run cannot show; deeper: the next command if nothing was found;
    your_own: the next command after a demonstration.
    """

    limits: tuple[str, ...] = ()
    deeper: str = ""
    your_own: str = ""


def write_command_remarks(folder: Path, remarks: CommandRemarks) -> None:
    """Write the remarks to the run folder."""
    disk.replace_atomically(folder / REMARKS, json.dumps(to_json(remarks)))


def read_command_remarks(folder: Path) -> CommandRemarks:
    """Return the remarks of the run folder; empty if it has none."""
    path = folder / REMARKS
    if not path.is_file():
        return CommandRemarks()
    remarks: CommandRemarks = from_json(
        CommandRemarks, read_json_object(path, "the remarks of a run"), str(path)
    )
    return remarks
