"""What an attack tuned, kept in its run folder: a run that goes on does not tune again. Knows tensors and one file."""

from __future__ import annotations

import io
from typing import Any

import torch

from auditor.core import disk
from auditor.core.errors import AuditError
from auditor.records.folder import RunFolder


def save(folder: RunFolder, cell: str, state: dict[str, Any]) -> None:
    made = io.BytesIO()
    torch.save(state, made)
    disk.replace(folder.state_path(cell), made.getvalue())


def load(folder: RunFolder, cell: str) -> dict[str, Any] | None:
    """None where nothing was tuned. Raises AuditError for a file that cannot be read."""
    path = folder.state_path(cell)
    if not path.exists():
        return None
    try:
        state: dict[str, Any] = torch.load(path, weights_only=True)
    except Exception as error:  # torch raises a dozen kinds, all of them about the file
        raise AuditError(f"{path}: expected what an attack tuned, got a file that cannot be read") from error
    if not isinstance(state, dict):
        raise AuditError(f"{path}: expected what an attack tuned, got {type(state).__name__}")
    return state
