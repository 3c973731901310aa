"""Read and write an ensemble's files: its unit of protection, and each member's records."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from auditor.core.errors import AuditError
from auditor.core.jsonable import read_json_object, write_json

SHARD = "shard.json"
ENSEMBLE = "ensemble.json"
_UNITS = ("record", "user")

WHOLE = "whole"  # sub-folder of an ensemble: one adapter on all records, by the members' recipe


def find_control_adapter(folder: Path) -> Path | None:
    """Return the control adapter in the members' folder, or None if there is none.

    The control adapter is trained like a member, but on the records of all members.
    """
    control = folder / WHOLE
    if (control / "adapter_config.json").is_file():
        return control
    return None


def write_ensemble_metadata(
    folder: Path, *, method: str, promise: str, unit: str, members: int
) -> None:
    """Write a file that describes an ensemble.

    Args:
        folder: folder of the members.
        method: training method of the members.
        promise: privacy promise of the training, in words.
        unit: `record` or `user`; all data of one unit are in the same shard.
        members: number of members.
    """
    record = {
        "method": method,
        "unit": unit,
        "unit_of_protection": "shard",
        "members": members,
        "promise": promise,
    }
    write_json(folder / ENSEMBLE, record)


def read_ensemble_metadata(folder: Path) -> tuple[str, int | None]:
    """Return (unit, number of members) from the ensemble's file, or ("", None) if there is no file.

    Raise AuditError if the file has a different format.
    """
    path = folder / ENSEMBLE
    if not path.is_file():
        return "", None
    record = read_json_object(path, "the unit and members of an ensemble in")
    unit = record.get("unit")
    members = record.get("members")
    if unit not in _UNITS or type(members) is not int:
        raise AuditError(
            f"expected {str(path)!r} to name a unit in {_UNITS} and a number of members, got "
            f"{record}"
        )
    return unit, members


def record_digests(texts: Iterable[str]) -> list[str]:
    """Return the sorted SHA-256 (hex) of each distinct text, to find records that shards share."""
    return sorted({hashlib.sha256(text.encode()).hexdigest() for text in texts})


def write_shard_record_list(member: Path, texts: Iterable[str]) -> None:
    """Write the digests of a member's training texts to a file that only its owner can read.

    `member` is the folder of an ensemble's member. The file there is `shard.json`.
    """
    write_json(member / SHARD, {"records": record_digests(texts)}, indent=None)


def read_shard_record_list(member: Path) -> list[str] | None:
    """Return the digests written by `write_shard_record_list`, or None if there is no file.

    Raise AuditError if the file has a different format.
    """
    path = member / SHARD
    if not path.is_file():
        return None
    names = read_json_object(path, '{"records": [...]} in').get("records")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise AuditError(
            f'expected {{"records": [...]}} in {str(path)!r}, with the records\' names as text'
        )
    return names
