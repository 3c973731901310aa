"""`manifest.json`: the SHA-256 of every record that a run leaves, and whether a folder is still as
the run left it.

It tells of a file that was damaged, lost, or edited by itself. Whoever edits a file can write the
manifest anew:
against that stands a signature (`audit attest`). Knows files; not what is in them.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from dataclasses import dataclass
from pathlib import Path

from auditor.core import disk
from auditor.core.jsonable import from_json, read_json_object
from auditor.records.file_digests import file_sha256_hex
from auditor.records.journal import GUESSES, OBSERVATIONS
from auditor.records.result_file import RESULT
from auditor.records.table import TABLE

MANIFEST, ATTESTATION = "manifest.json", "attestation.json"
# The journals hold private text, and a digest of a text confirms a guess of it: theirs stand in a
# file of their own, beside a random number, so that the digest of that file confirms nothing.
PRIVATE, _RANDOM = "journals.json", "random"
_JOURNALS = (GUESSES, OBSERVATIONS)
_LATER = (MANIFEST, ATTESTATION, "frontier.json")  # added to a finished run, or rendered anew


@dataclass(frozen=True)
class FolderEdits:
    """How a folder is not as the run left it: names of files, those that were added among the
    changed."""

    changed: tuple[str, ...] = ()
    gone: tuple[str, ...] = ()

    def edit_sentences(self, whole: bool = True) -> list[str]:
        """A sentence for each. whole: no file of the run may be missing; a baseline in CI keeps two
        of them."""
        gone = [f"{name} is gone" for name in self.gone] if whole else []
        return [*(f"{name} has changed" for name in self.changed), *gone]


NO_EDITS = FolderEdits()


def manifest_digests_of_gate_files(folder: Path) -> dict[str, str]:
    """SHA-256 by name of the records that a gate reads: ids and numbers. Raises AuditError."""
    found = sorted(
        path for path in (*folder.glob("*.json"), folder / TABLE) if path.name not in _LATER
    )
    return {path.name: file_sha256_hex(path) for path in found if path.is_file()}


def _journal_digests(folder: Path) -> dict[str, str]:
    return {name: file_sha256_hex(folder / name) for name in _JOURNALS if (folder / name).is_file()}


def write_manifest(folder: Path, result: bytes) -> None:
    """For a run that ends. result: what `result.json` will hold, which is written behind it."""
    private = {_RANDOM: secrets.token_hex(32), **_journal_digests(folder)}
    # First, since the manifest holds the digest of this file as well.
    disk.replace_atomically(folder / PRIVATE, json.dumps(private, indent=1))
    found = {**manifest_digests_of_gate_files(folder), RESULT: hashlib.sha256(result).hexdigest()}
    disk.replace_atomically(folder / MANIFEST, json.dumps({"files": found}, indent=1), sync=True)


def folder_edits_since_run_end(folder: Path) -> FolderEdits | None:
    """How the folder is not as the run left it; None where nothing says how that was. Raises
    AuditError."""
    path = folder / MANIFEST
    if not path.exists():
        return None
    held: dict[str, str] = from_json(
        dict[str, str], read_json_object(path, "a manifest").get("files"), str(path)
    )
    now = manifest_digests_of_gate_files(folder)
    # A baseline in CI is kept without the journals: then nothing is said of them.
    if (folder / PRIVATE).exists():
        private = read_json_object(folder / PRIVATE, "digests of journals")
        journals = from_json(dict[str, str], private, str(folder / PRIVATE))
        held |= {name: digest for name, digest in journals.items() if name != _RANDOM}
        now |= _journal_digests(folder)
    changed = tuple(name for name in sorted(now) if now[name] != held.get(name))
    return FolderEdits(changed, tuple(sorted(held.keys() - now.keys())))
