"""Write and check `manifest.json`, the SHA-256 of every file of a finished run.

The manifest reveals damaged or lost files, and files edited without updating the manifest. Someone
who edits files can also rewrite the manifest; to detect this, sign the run (`audit attest`).
"""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass
from pathlib import Path

from auditor.core.jsonable import from_json, read_json_object, read_record, write_json
from auditor.records.file_digests import digest_file
from auditor.records.journal import GUESSES, OBSERVATIONS
from auditor.records.result_file import RESULT
from auditor.records.table import TABLE

MANIFEST = "manifest.json"
ATTESTATION = "attestation.json"
# The journals hold private text, and a digest of a text confirms a guess of it: their digests are
# in a separate file, with a random number, so that the digest of that file confirms nothing.
PRIVATE = "journals.json"
_RANDOM = "random"
_JOURNALS = (GUESSES, OBSERVATIONS)
_LATER = (MANIFEST, ATTESTATION, "frontier.json")  # added to a finished run, or rendered again


@dataclass(frozen=True)
class FolderEdits:
    """Hold the changes to a run folder since its run ended.

    Args:
        changed: names of files that changed or were added.
        gone: names of missing files.
    """

    changed: tuple[str, ...] = ()
    gone: tuple[str, ...] = ()

    def describe_edits(self, is_whole: bool = True) -> list[str]:
        """Return a sentence for each change.

        Args:
            is_whole: whether the folder should have all files of a run. If not, missing files are
                not reported. In CI, for example, the folder of a baseline has only two files.
        """
        if is_whole:
            gone = [f"{name} is gone" for name in self.gone]
        else:
            gone = []
        return [*(f"{name} has changed" for name in self.changed), *gone]


NO_EDITS = FolderEdits()


def read_gate_digests(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of the files that a gate reads, keyed by file name.

    Raise AuditError if a file is unreadable.
    """
    paths = sorted(
        path for path in (*folder.glob("*.json"), folder / TABLE) if path.name not in _LATER
    )
    return {path.name: digest_file(path) for path in paths if path.is_file()}


def _digest_journals(folder: Path) -> dict[str, str]:
    return {name: digest_file(folder / name) for name in _JOURNALS if (folder / name).is_file()}


def write_manifest(folder: Path, result: bytes) -> None:
    """Write the manifest of a finished run.

    Args:
        result: content of `result.json`, which is written after the manifest.
    """
    private = {_RANDOM: secrets.token_hex(32), **_digest_journals(folder)}
    # Write it first: the manifest holds the digest of this file too.
    write_json(folder / PRIVATE, private)
    digests = {**read_gate_digests(folder), RESULT: hashlib.sha256(result).hexdigest()}
    write_json(folder / MANIFEST, {"files": digests}, sync=True)


def find_folder_edits(folder: Path) -> FolderEdits | None:
    """Return the changes to the folder since the run ended; None if it has no manifest.

    The manifest holds the SHA-256 of every file of the run. Raise AuditError if the manifest is
    damaged.
    """
    path = folder / MANIFEST
    if not path.exists():
        return None
    expected = from_json(
        dict[str, str], read_json_object(path, "a manifest").get("files"), str(path)
    )
    now = read_gate_digests(folder)
    # A baseline in CI has no journals: then skip them.
    if journals := read_record(folder / PRIVATE, dict[str, str], "digests of journals"):
        expected |= {name: digest for name, digest in journals.items() if name != _RANDOM}
        now |= _digest_journals(folder)
    changed = tuple(name for name in sorted(now) if now[name] != expected.get(name))
    return FolderEdits(changed, tuple(sorted(expected.keys() - now.keys())))
