"""Any folder or file: the bytes of what is in it."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from auditor.erasure.store import Store


class FileStore(Store):
    """Files that no other kind of store knows."""

    name: ClassVar[str] = "files"

    @classmethod
    def recognises(cls, path: Path) -> bool:
        return True
