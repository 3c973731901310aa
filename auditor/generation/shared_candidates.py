"""Store the candidates of one attack for later attacks that need the same candidates.

The candidates are stored on disk because they may not all fit into memory.
"""

from __future__ import annotations

import io
import weakref

import torch

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
        torch.save(candidates, buffer)
        self._extents[secret] = self._file.add(buffer.getvalue())

    def __getitem__(self, secret: str) -> SuffixCandidates:
        # Safe to unpickle: only this object writes the file.
        buffer = io.BytesIO(self._file.read(*self._extents[secret]))
        candidates: SuffixCandidates = torch.load(buffer, weights_only=False)
        return candidates
