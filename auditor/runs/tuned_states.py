"""Save and load the tuned states of attacks in a run folder."""

from __future__ import annotations

import io
from typing import Any

import torch

from auditor.core import disk
from auditor.core.errors import AuditError
from auditor.records.folder import RunFolder

State = dict[str, Any]


def save_attack_state(folder: RunFolder, cell: str, state: dict[str, Any]) -> None:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    disk.replace_atomically(folder.attack_state_path(cell), buffer.getvalue())


def load_attack_state(folder: RunFolder, cell: str) -> dict[str, Any] | None:
    """Load an attack's state that `save_attack_state` wrote; None if there is none.

    cell: name of the state, made of attack and view. Raise AuditError for an unreadable file.
    """
    path = folder.attack_state_path(cell)
    if not path.exists():
        return None
    try:
        # weights_only: a pickle in somebody else's folder could run code.
        state: dict[str, Any] = torch.load(path, weights_only=True)
    except Exception as error:  # torch raises a dozen types, all about the file
        raise AuditError(
            f"{path}: expected what an attack tuned, got a file that cannot be read"
        ) from error
    if not isinstance(state, dict):
        raise AuditError(f"{path}: expected what an attack tuned, got {type(state).__name__}")
    return state
