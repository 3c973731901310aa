"""The candidates of one pass, for the next attack that asks for the same: on disk, since all of them outgrow memory."""

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
    """Candidates by secret, in a file without a name that is closed once nothing refers to this object."""

    def __init__(self) -> None:
        self._where: dict[str, tuple[int, int]] = {}  # begins, bytes
        self._file = UnnamedFile()
        weakref.finalize(self, self._file.close)

    def __contains__(self, secret: str) -> bool:
        return secret in self._where

    def __setitem__(self, secret: str, candidates: SuffixCandidates) -> None:
        """Raises AuditError where there is no room for it."""
        held = io.BytesIO()
        _Pickler(held, protocol=pickle.HIGHEST_PROTOCOL).dump(candidates)
        self._where[secret] = self._file.add(held.getvalue())

    def __getitem__(self, secret: str) -> SuffixCandidates:
        # Safe to unpickle: only this object writes the file.
        found: SuffixCandidates = pickle.loads(self._file.read(*self._where[secret]))
        return found


class _Pickler(pickle.Pickler):
    """Tensors as arrays: torch's own way writes an archive for each."""

    def reducer_override(self, value: Any) -> Any:
        return (
            (_candidate_tensor_from_array, (value.cpu().numpy(), value.device))
            if isinstance(value, Tensor)
            else NotImplemented
        )


def _candidate_tensor_from_array(values: NDArray[Any], device: torch.device) -> Tensor:
    return torch.from_numpy(values).to(device)
