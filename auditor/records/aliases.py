"""What secrets are called where people read: a short keyed digest of the content. Knows no text,
file format or report.

Inside a run secrets keep the ids of their benchmark, which randomness and pairing hang on: no
number depends on the salt. Under one salt a record has one alias in every run; without the salt an
alias confirms no guess of the record.
"""

from __future__ import annotations

import hmac
import json
import os
import re
import secrets as randomness
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from filelock import FileLock

from auditor.core import disk
from auditor.core.disk import cache_folder
from auditor.core.errors import AuditError
from auditor.core.nouns import Secret, Tokens
from auditor.core.result import Finding

SALT = "AUDIT_SALT"
_SHORTEST = 16  # characters of a salt: a shorter one could be guessed from its fingerprint
# An id with other characters than these, as a dot or a slash, is no word and is not found.
_WORD = re.compile(r"[\w-]+")


def load_alias_salt() -> bytes:
    """$AUDIT_SALT, else the user's own: made once, in the cache folder, readable by its owner only.

    Raises AuditError for one that is too short, and where none can be kept.
    """
    given = os.environ.get(SALT)
    if given is not None:
        return _check_salt_length(given.encode(), SALT)
    path = cache_folder() / "salt"
    try:
        with FileLock(f"{path}.lock"):  # two first runs at once would make two salts
            if not path.exists():
                disk.replace_atomically(path, randomness.token_hex(32))
            return _check_salt_length(path.read_bytes(), f"a salt in {str(path)!r}")
    except OSError as error:
        raise AuditError(
            f"cannot keep a salt in {str(path)!r}: {error.strerror}; set {SALT}"
        ) from error


def _check_salt_length(salt: bytes, where: str) -> bytes:
    """Raises AuditError for a salt that could be guessed, and every alias with it."""
    # For the length alone: a line end in a salt file is a part of the key.
    if len(salt.strip()) < _SHORTEST:
        raise AuditError(
            f"expected {where} of at least {_SHORTEST} characters, got {len(salt.strip())}"
        )
    return salt


def salt_fingerprint(salt: bytes) -> str:
    """Tells salts apart: aliases of two runs can be compared where it is the same."""
    return _salted_alias_digest(salt, "fingerprint")[:8]


def secrets_with_aliases(secrets: Sequence[Secret], salt: bytes) -> tuple[Secret, ...]:
    """The secrets with their aliases: `s` and 12 hex digits, numbered where a benchmark holds one
    record twice.

    The person that a secret is of gets one too, `u` and 12 hex digits: no later code knows a name.
    """
    found, seen = list[Secret](), Counter[str]()
    for secret in secrets:
        # A list of two: where the suffix begins is a part of what the secret is.
        alias = f"s{_salted_alias_digest(salt, json.dumps([secret.prefix, secret.suffix]))[:12]}"
        # 12 hex digits, 48 bits: among a million records two share them by chance in about 2 of
        # 1,000 runs.
        seen[alias] += 1
        user = (
            None
            if secret.user is None
            else f"u{_salted_alias_digest(salt, json.dumps(['user', secret.user]))[:12]}"
        )
        found.append(
            replace(
                secret, alias=alias if seen[alias] == 1 else f"{alias}-{seen[alias]}", user=user
            )
        )
    return tuple(found)


def alias_of_training_record(tokens: Tokens, salt: bytes) -> str:
    """What a whole training record is called, of which a secret may be a part: `r` and 12 hex
    digits."""
    return f"r{_salted_alias_digest(salt, json.dumps(tokens))[:12]}"


def _salted_alias_digest(salt: bytes, text: str) -> str:
    # Two lists, a list of strings, one of numbers, or a word: what is digested tells its kind, so
    # no digest serves two.
    return hmac.new(salt, text.encode(), "sha256").hexdigest()


def refuse_secret_ids_in_sentences(finding: Finding, secrets: Sequence[Secret]) -> None:
    """Raises AuditError where a sentence of the finding, as one of a plug-in may, names a secret by
    its id.

    An id says which row of the user's data it was: reports name secrets by their aliases.
    """
    notes = [measurement.note for measurement in finding.measurements]
    said, ids = (
        " ".join((finding.not_applicable, *finding.notes, *finding.violations, *notes)),
        {s.id for s in secrets},
    )
    # A word is looked up; an id that is none, as `mails/17.txt`, is looked for.
    others = (id for id in ids if id in said and not _WORD.fullmatch(id))
    if not ids.isdisjoint(_WORD.findall(said)) or any(
        re.search(rf"(?<![\w-]){re.escape(id)}(?![\w-])", said) for id in others
    ):
        raise AuditError(
            f"expected {finding.attack} to name secrets in its sentences by `secret.alias`, got "
            "the id of one"
        )
