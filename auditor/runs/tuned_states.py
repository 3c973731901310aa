"""What attacks tuned in a run, as its folder keeps it."""

from __future__ import annotations

import io
from typing import Any

import torch

from auditor.core import disk
from auditor.core.errors import AuditError
from auditor.records.folder import RunFolder

State = dict[str, Any]


def save_attack_state(folder: RunFolder, cell: str, state: dict[str, Any]) -> None:
    made = io.BytesIO()
    torch.save(state, made)
    disk.replace_atomically(folder.attack_state_path(cell), made.getvalue())


def load_attack_state(folder: RunFolder, cell: str) -> dict[str, Any] | None:
    """What `save_attack_state` kept; None where nothing was. Raises AuditError for a file that
    cannot be read."""
    path = folder.attack_state_path(cell)
    if not path.exists():
        return None
    try:
        # weights_only: a folder may be somebody else's, and a pickle of theirs would run their
        # code.
        state: dict[str, Any] = torch.load(path, weights_only=True)
    except Exception as error:  # torch raises a dozen kinds, all of them about the file
        raise AuditError(
            f"{path}: expected what an attack tuned, got a file that cannot be read"
        ) from error
    if not isinstance(state, dict):
        raise AuditError(f"{path}: expected what an attack tuned, got {type(state).__name__}")
    return state
