"""Read the bytes of any file or folder."""

from __future__ import annotations

from pathlib import Path

from auditor.erasure.store import Store, list_store_kinds


class FileStore(Store):
    """Read files that no other kind of store recognises."""

    name = "files"

    @classmethod
    def recognises(cls, path: Path) -> bool:
        return True

    def describe(self) -> list[str]:
        """Return a hint for each store of a different kind in the folder.

        The hint says that the store's library was not used.
        """
        facts = ["its files only"]
        for path in sorted(self.path.glob("*")):  # yields nothing for a file
            kind = next(kind for kind in list_store_kinds().values() if kind.recognises(path))
            if kind is not FileStore:
                facts.append(f"give the path of {path.name}, too, to read it as {kind.name}")
        return facts
