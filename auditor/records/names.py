"""What secrets are called where people read: a short keyed digest of the content. Knows no text, file format or report.

Inside a run secrets keep the ids of their benchmark, which randomness and pairing hang on: no number depends on the
salt. Under one salt a record has one alias in every run; without the salt an alias confirms no guess of the record.
"""

from __future__ import annotations

import dataclasses
import hmac
import json
import os
import re
import secrets as randomness
from collections.abc import Mapping, Sequence

from filelock import FileLock

from auditor.core import disk
from auditor.core.cache import cache_folder
from auditor.core.errors import AuditError
from auditor.core.nouns import Secret
from auditor.core.result import Finding

SALT = "AUDIT_SALT"
_SHORTEST = 16  # characters of a salt: a shorter one could be guessed from its fingerprint
_NAME = re.compile(r"[\w.-]+")


def salt() -> bytes:
    """$AUDIT_SALT, else the user's own: made once, in the cache folder, readable by its owner only.

    Raises AuditError for one that is too short, and where none can be kept.
    """
    given = os.environ.get(SALT)
    if given is not None:
        return _long_enough(given.encode(), SALT)
    path = cache_folder() / "salt"
    try:
        with FileLock(f"{path}.lock"):
            if not path.exists():
                disk.replace(path, randomness.token_hex(32))
            return _long_enough(path.read_bytes(), f"a salt in {str(path)!r}")
    except OSError as error:
        raise AuditError(f"cannot keep a salt in {str(path)!r}: {error.strerror}; set {SALT}") from error


def _long_enough(salt: bytes, where: str) -> bytes:
    """Raises AuditError for a salt that could be guessed, and every alias with it."""
    if len(salt.strip()) < _SHORTEST:
        raise AuditError(f"expected {where} of at least {_SHORTEST} characters, got {len(salt.strip())}")
    return salt


def fingerprint(salt: bytes) -> str:
    """Tells salts apart: aliases of two runs can be compared where it is the same."""
    return _digest(salt, "fingerprint")[:8]


def aliases(secrets: Sequence[Secret], salt: bytes) -> dict[str, str]:
    """By id, in the order of the secrets: `s` and 12 hex digits, numbered where a benchmark holds one record twice."""
    found: dict[str, str] = {}
    seen: dict[str, int] = {}
    for secret in secrets:
        name = f"s{_digest(salt, json.dumps([secret.prefix, secret.suffix]))[:12]}"
        seen[name] = seen.get(name, 0) + 1
        found[secret.id] = name if seen[name] == 1 else f"{name}-{seen[name]}"
    return found


def _digest(salt: bytes, text: str) -> str:
    return hmac.new(salt, text.encode(), "sha256").hexdigest()


def renamed(finding: Finding, names: Mapping[str, str]) -> Finding:
    """The finding with every secret that its sentences name under its alias."""

    def said(text: str) -> str:
        return _NAME.sub(lambda word: names.get(word[0], word[0]), text)

    return dataclasses.replace(
        finding,
        not_applicable=said(finding.not_applicable),
        notes=tuple(map(said, finding.notes)),
        violations=tuple(map(said, finding.violations)),
        measurements=tuple(dataclasses.replace(m, note=said(m.note)) for m in finding.measurements),
    )
