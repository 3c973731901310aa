"""Where a worker begins, wherever it is: what all places of workers have in common."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from platform import node

from auditor import __version__
from auditor.core.errors import AuditError


@dataclass(frozen=True)
class There:
    """Where a worker begins: with this version, and in the folder that the run's relative paths begin at."""

    folder: str = field(default_factory=os.getcwd)
    version: str = __version__

    def enter(self) -> None:
        """Raises AuditError where a worker has another version, or no such folder."""
        if self.version != __version__:
            raise AuditError(f"expected audit {self.version} on every worker, got {__version__} on {node()}")
        try:
            os.chdir(self.folder)
        except OSError as error:
            raise AuditError(f"expected the folder {self.folder!r} on every worker, got none on {node()}") from error
