"""An ensemble on disk: its unit of protection, and which records each member was trained on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from auditor.core import disk
from auditor.core.errors import AuditError

SHARD, ENSEMBLE = "shard.json", "ensemble.json"
_UNITS = ("record", "user")

WHOLE = "whole"  # an ensemble's sub-folder: one adapter on all the records, by the members' recipe


def ensemble_control_adapter_folder(folder: Path) -> Path | None:
    """The control beside the members: one adapter trained by their recipe on all their records.
    None: there is none."""
    found = folder / WHOLE
    return found if (found / "adapter_config.json").is_file() else None


def write_ensemble_metadata(
    folder: Path, *, method: str, promise: str, unit: str, members: int
) -> None:
    """Says in an ensemble's folder how it was made, what lies whole in one shard, how many members
    there will be."""
    record = {
        "method": method,
        "unit": unit,
        "unit_of_protection": "shard",
        "members": members,
        "promise": promise,
    }
    disk.replace_atomically(folder / ENSEMBLE, json.dumps(record, indent=1) + "\n")


def read_ensemble_metadata(folder: Path) -> tuple[str, int | None]:
    """The unit and number of members that were written; "" and None where none were. AuditError for
    another form."""
    path = folder / ENSEMBLE
    if not path.is_file():
        return "", None
    try:
        record = json.loads(path.read_text())
        unit, members = record["unit"], record["members"]
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise AuditError(
            f"expected the unit and members of an ensemble in {str(path)!r}, got {error!r}"
        ) from error
    if unit not in _UNITS or type(members) is not int:
        raise AuditError(
            f"expected {str(path)!r} to name a unit in {_UNITS} and a number of members, got "
            f"{record}"
        )
    return unit, members


def record_digests(texts: Iterable[str]) -> list[str]:
    """Records by the SHA-256 of their text, each once: enough to see that shards are disjoint."""
    return sorted({hashlib.sha256(text.encode()).hexdigest() for text in texts})


def write_shard_record_list(member: Path, texts: Iterable[str]) -> None:
    """Says in a member's folder which records it was trained on, by name; readable by its owner
    only."""
    disk.replace_atomically(member / SHARD, json.dumps({"records": record_digests(texts)}))


def read_shard_record_list(member: Path) -> list[str] | None:
    """The names that `write_shard_record_list` wrote, None where it wrote none. AuditError for
    another form."""
    path = member / SHARD
    if not path.is_file():
        return None
    try:
        names = json.loads(path.read_text())["records"]
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise AuditError(
            f'expected {{"records": [...]}} in {str(path)!r}, got {error!r}'
        ) from error
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise AuditError(
            f'expected {{"records": [...]}} in {str(path)!r}, with the records\' names as text'
        )
    return names
