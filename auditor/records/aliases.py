"""Name secrets in reports by aliases: short keyed digests of their content.

The key of the digests is called the salt. With the same salt, a record has the same alias in every
run. Someone without the salt cannot use an alias to confirm a guess of the record. During a run,
secrets have other ids, which the benchmark gives them. Random draws and pairing use these ids, so
that no number depends on the salt.
"""

from __future__ import annotations

import hmac
import json
import os
import re
import secrets as randomness
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from filelock import FileLock

from auditor.core import disk
from auditor.core.disk import find_cache_folder
from auditor.core.errors import AuditError
from auditor.core.nouns import Secret, Tokens
from auditor.core.result import Finding
from auditor.core.secret_table import STRINGS, SecretTable, build_secret_table

SALT = "AUDIT_SALT"
CANARIES = "canary_texts"  # field of `secrets.json`: the digest of all canaries' texts
_SHORTEST = 16  # characters of a salt: a shorter salt could be guessed from its fingerprint


def load_alias_salt() -> bytes:
    """Return $AUDIT_SALT if it is set, otherwise the user's salt.

    The user's salt is created once, in a file of the cache folder that only its owner can read.
    Raise AuditError if the salt is too short or cannot be stored.
    """
    env_salt = os.environ.get(SALT)
    if env_salt is not None:
        return _check_salt_length(env_salt.encode(), SALT)
    path = find_cache_folder() / "salt"
    try:
        with FileLock(f"{path}.lock"):  # two simultaneous first runs would make two salts
            if not path.exists():
                disk.replace_atomically(path, randomness.token_hex(32))
            return _check_salt_length(path.read_bytes(), f"a salt in {str(path)!r}")
    except OSError as error:
        raise AuditError(
            f"cannot keep a salt in {str(path)!r}: {error.strerror}; set {SALT}"
        ) from error


def _check_salt_length(salt: bytes, where: str) -> bytes:
    """Return the salt; raise AuditError if it is short enough to guess.

    Someone who guesses the salt can test guesses of records.

    Args:
        salt: the salt.
        where: the source of the salt, for the message.
    """
    # Strip only for the length: a line end in a salt file is a part of the key.
    if len(salt.strip()) < _SHORTEST:
        raise AuditError(
            f"expected {where} of at least {_SHORTEST} characters, got {len(salt.strip())}"
        )
    return salt


def salt_fingerprint(salt: bytes) -> str:
    """Return an id of the salt; aliases of two runs are comparable if this id is the same."""
    return _digest_alias(salt, "fingerprint")[:8]


def alias_secrets(secrets: Iterable[Secret], salt: bytes) -> SecretTable:
    """Give the secrets aliases: `s` and 12 hex digits, followed by a number if a record repeats.

    A secret's person also gets an alias, `u` and 12 hex digits, so that later code sees no names.

    Args:
        secrets: the secrets, of which only prefix, suffix and person decide the aliases.
        salt: key of the digests, from `load_alias_salt`.
    """
    table = build_secret_table(secrets)
    aliases = list[str]()
    users = list[str | None]()
    n_by_alias = Counter[str]()
    for secret in table:
        # A list of two: the start of the suffix is a part of the secret's identity.
        alias = f"s{_digest_alias(salt, json.dumps([secret.prefix, secret.suffix]))[:12]}"
        # 12 hex digits, 48 bits: among a million records two collide by chance in about 2 of 1,000
        # runs.
        n_by_alias[alias] += 1
        if n_by_alias[alias] > 1:
            alias = f"{alias}-{n_by_alias[alias]}"
        aliases.append(alias)
        if secret.user is None:
            users.append(None)
        else:
            users.append(f"u{_digest_alias(salt, json.dumps(['user', secret.user]))[:12]}")
    columns = {"alias": np.array(aliases, STRINGS)}
    if "user" in table.columns:
        columns["user"] = np.array(users, STRINGS)
    return replace(table, columns={**table.columns, **columns})


def alias_training_record(tokens: Tokens, salt: bytes) -> str:
    """Return the alias of an entire training record: `r` and 12 hex digits."""
    return f"r{_digest_alias(salt, json.dumps(tokens))[:12]}"


def digest_canary_texts(text_by_id: Mapping[str, str], salt: bytes) -> str:
    """Return a digest by which two lists of canaries can be compared, but no text guessed."""
    return _digest_alias(salt, json.dumps({"canaries": dict(sorted(text_by_id.items()))}))


def _digest_alias(salt: bytes, text: str) -> str:
    # Two lists, a list of strings, a list of numbers, an object, or a word: the input shows its
    # kind, so no digest serves two kinds.
    return hmac.new(salt, text.encode(), "sha256").hexdigest()


def refuse_secret_ids(finding: Finding, secrets: Sequence[Secret]) -> None:
    """Raise AuditError if a sentence of the finding contains a secret's id.

    An id reveals the secret's row in the user's data, so reports use aliases. A plug-in may write
    such a sentence.
    """
    notes = [measurement.note for measurement in finding.measurements]
    sentences = " ".join((finding.not_applicable, *finding.notes, *finding.violations, *notes))
    if any(
        id in sentences and re.search(rf"(?<![\w-]){re.escape(id)}(?![\w-])", sentences)
        for id in build_secret_table(secrets).ids
    ):
        raise AuditError(
            f"expected {finding.attack} to name secrets in its sentences by `secret.alias`, got "
            "the id of one"
        )
