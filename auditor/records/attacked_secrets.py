"""Read which secrets a run attacked, from its plan, secrets and journals of answers.

These files are next to `secrets.parquet`. Only the ids of the answers are read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from auditor.core.errors import AuditError
from auditor.core.jsonable import read_json_object
from auditor.core.nouns import CellKey
from auditor.core.secret_table import STRINGS
from auditor.records.journal import GUESSES, OBSERVATIONS, SecretNumbers

PLAN = "plan.json"
SECRETS = "secrets.json"
# The line of an answer whose names have no escaped character. JSON, 20 times as slow, parses other
# lines. A run has millions of lines; its digests detect changes behind the names.
_ANSWER = re.compile(
    rb'\{"cell": "([^"\\\x80-\xff]+)", "secret": "([^"\\\x80-\xff]+)", .*\}\n', re.DOTALL
)
Answers = Mapping[CellKey, frozenset[str]]
_AT_ONCE = 4096  # secrets that are objects at once
_TEXTS = ("id", "alias", "group", "document", "user")  # attributes


class SecretAttributes(NamedTuple):
    """Attributes of a secret that may be published.

    Args:
        id: id of the secret.
        alias: the secret's name in reports.
        member: whether the record was trained on.
        repeats: number of copies in the training data; None if unknown.
        length: number of tokens of the suffix.
        group: value of the column by which the user groups results.
        canary: True if only the exposure probe queries the secret.
        document: name of the document that contains the secret: the alias of the first secret in
            this document. None if the data has no documents.
        at: position in the document at which the suffix starts, in tokens.
        user: alias of the secret's person.
        user_trained: whether a record of that person was trained on.
    """

    id: str
    alias: str
    member: bool
    repeats: int | None = None
    length: int | None = None
    group: str | None = None
    canary: bool = False
    document: str | None = None
    at: int = 0
    user: str | None = None
    user_trained: bool = False


@dataclass(frozen=True, eq=False)
class AttributeTable(Sequence[SecretAttributes]):
    """Attributes of secrets as columns, (secrets,) each, keyed by field of `SecretAttributes`.

    A `SecretAttributes` is made only when it is asked for.
    """

    columns: Mapping[str, NDArray[Any]]

    def __len__(self) -> int:
        return len(self.columns["id"])

    @overload
    def __getitem__(self, place: int) -> SecretAttributes: ...

    @overload
    def __getitem__(self, place: slice) -> AttributeTable: ...

    def __getitem__(self, place: int | slice) -> SecretAttributes | AttributeTable:
        if isinstance(place, slice):
            return AttributeTable({name: part[place] for name, part in self.columns.items()})
        place = range(len(self))[place]
        return next(iter(self[place : place + 1]))

    def __iter__(self) -> Iterator[SecretAttributes]:
        for begin in range(0, len(self), _AT_ONCE):
            part = slice(begin, begin + _AT_ONCE)
            columns = [self.columns[name][part].tolist() for name in SecretAttributes._fields]
            yield from map(SecretAttributes._make, zip(*columns, strict=True))

    @cached_property
    def numbers(self) -> SecretNumbers:
        return SecretNumbers(self.columns["id"])


NO_ATTRIBUTES = AttributeTable(dict.fromkeys(SecretAttributes._fields, np.empty(0, STRINGS)))


@dataclass(frozen=True)
class AnsweredSecretIds:
    """Hold the ids of attacked secrets in a run folder; a field is None if its file is missing.

    An answer is an attack's guesses about a secret, or a probe's observation of it.

    Args:
        plan: plan of the run.
        secrets: the secrets' publishable attributes.
        guesses: ids of the secrets with guesses, keyed by target, setting and attack.
        observations: ids of the secrets with observations, keyed by target, setting and probe.
    """

    plan: Mapping[str, Any] | None = None
    secrets: AttributeTable | None = None
    guesses: Answers | None = None
    observations: Answers | None = None

    def with_missing_parts_empty(self) -> AnsweredSecretIds:
        """Return a copy that has {} instead of None, so that a missing file reads like an empty
        one.
        """
        return AnsweredSecretIds(
            self.plan or {},
            self.secrets or NO_ATTRIBUTES,
            self.guesses or {},
            self.observations or {},
        )


NOT_KEPT = AnsweredSecretIds()


def read_answered_secret_ids(folder: Path) -> AnsweredSecretIds:
    """Read the ids of the secrets for which the folder has answers.

    Raise AuditError for an invalid file.
    """
    if (folder / PLAN).exists():
        plan = read_json_object(folder / PLAN, "the plan of a run")
    else:
        plan = None
    secrets = read_secret_attributes(folder)
    ids = dict[str, str]()
    guesses, observations = (
        _list_journal_secrets(folder / name, ids) for name in (GUESSES, OBSERVATIONS)
    )
    if guesses is not None or observations is not None:  # a run of one kind has a single journal
        guesses = guesses or {}
        observations = observations or {}
    return AnsweredSecretIds(plan, secrets, guesses, observations)


def read_secret_attributes(folder: Path) -> AttributeTable | None:
    """Return the secrets' publishable attributes; None if their file is missing.

    Raise AuditError if the file is invalid.
    """
    path = folder / SECRETS
    if not path.exists():
        return None
    columns = read_json_object(path, "the secrets of a run")
    try:
        n_secrets = len(columns["id"])
        has_repeats = len(set(columns["id"])) < n_secrets
        # A file has both columns of a pair or neither; every other column is required.
        for pair in (("document", "at"), ("user", "user_trained")):
            if columns.keys().isdisjoint(pair):
                for name in pair:
                    columns[name] = [SecretAttributes._field_defaults[name]] * n_secrets
        encoded = {}
        for name in SecretAttributes._fields:
            encoded[name] = _encode_column(name, columns.pop(name))
        if {len(column) for column in encoded.values()} != {n_secrets}:
            raise ValueError("columns of several lengths")
    except (KeyError, TypeError, ValueError):
        raise AuditError(
            f"{path}: expected one column for each of {', '.join(SecretAttributes._fields)}: the "
            "file is damaged"
        ) from None
    if has_repeats:
        raise AuditError(f"{path}: expected each secret once: the file is damaged")
    return AttributeTable(encoded)


def _encode_column(name: str, values: list[Any]) -> NDArray[Any]:
    """Return an attribute of all secrets, (secrets,); equal values take the memory of one."""
    if values and values.count(values[0]) == len(values):
        return np.broadcast_to(np.array(values[0], object), len(values))
    if name in _TEXTS:
        return np.array(values, STRINGS)
    return np.array(values)


def _list_journal_secrets(path: Path, ids: dict[str, str]) -> dict[CellKey, frozenset[str]] | None:
    """Return the ids of the secrets in a journal, keyed by cell; None if the file is missing.

    All cells share the objects of `ids`, to which this function adds.
    """
    if not path.exists():
        return None
    ids_by_cell: dict[str, set[str]] = {}
    try:
        with open(path, "rb") as file:
            for line in file:
                if match := _ANSWER.fullmatch(line):
                    cell, secret = map(bytes.decode, match.groups())
                else:
                    record = json.loads(line)
                    cell = record["cell"]
                    secret = record["secret"]
                ids_by_cell.setdefault(cell, set()).add(ids.setdefault(secret, secret))
        return {
            CellKey.parse_cell_key(cell): frozenset(ids_by_cell.pop(cell))
            for cell in [*ids_by_cell]
        }
    except OSError as error:
        raise AuditError(f"{path}: cannot be read: {error.strerror}") from error
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
        raise AuditError(
            f"{path}: expected an answer about a secret on every line: the file is damaged"
        ) from None
