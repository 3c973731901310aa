"""Store the candidates of one attack for later attacks that need the same candidates.

The candidates are stored on disk because they may not all fit into memory.
"""

from __future__ import annotations

import io
import pickle
import weakref
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from auditor.core.disk import UnnamedFile
from auditor.generation.sample import SuffixCandidates


class CandidatesOnDisk:
    """Candidates by secret id, in an unnamed file that is closed together with this object."""

    def __init__(self) -> None:
        self._extents: dict[str, tuple[int, int]] = {}  # offset and length in bytes
        self._file = UnnamedFile()
        weakref.finalize(self, self._file.close)

    def __contains__(self, secret: str) -> bool:
        return secret in self._extents

    def __setitem__(self, secret: str, candidates: SuffixCandidates) -> None:
        """Store a secret's candidates. Raise AuditError if the disk is full."""
        buffer = io.BytesIO()
        _Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(candidates)
        self._extents[secret] = self._file.add(buffer.getvalue())

    def __getitem__(self, secret: str) -> SuffixCandidates:
        # Safe to unpickle: only this object writes the file.
        candidates: SuffixCandidates = pickle.loads(self._file.read(*self._extents[secret]))
        return candidates


class _Pickler(pickle.Pickler):
    """Pickler that stores tensors as arrays; torch would write an archive for each tensor."""

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return NotImplemented
        return _restore_tensor, (value.cpu().numpy(), value.device)


def _restore_tensor(values: NDArray[Any], device: torch.device) -> Tensor:
    return torch.from_numpy(values).to(device)
