"""Read which secrets a run attacked, from its plan, secrets and journals of answers.

These files are next to `secrets.parquet`. Only the ids of the answers are read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from auditor.core.arrays import Bools, Ints
from auditor.core.errors import AuditError
from auditor.core.jsonable import read_json_object
from auditor.core.nouns import CellKey
from auditor.core.secret_table import STRINGS, ColumnTable
from auditor.records.journal import GUESSES, OBSERVATIONS, SecretNumbers

PLAN = "plan.json"
SECRETS = "secrets.json"
# The line of an answer whose names have no escaped character. JSON, 20 times as slow, parses other
# lines. A run has millions of lines; its digests detect changes behind the names.
_ANSWER = re.compile(
    rb'\{"cell": "([^"\\\x80-\xff]+)", "secret": "([^"\\\x80-\xff]+)", .*\}\n', re.DOTALL
)
_LINES = 2**22  # bytes of lines in memory at once
Answers = Mapping[CellKey, Ints]
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
class AttributeTable(ColumnTable[SecretAttributes]):
    """Attributes of secrets as columns, (secrets,) each, keyed by field of `SecretAttributes`."""

    columns: Mapping[str, NDArray[Any]]

    def __len__(self) -> int:
        return len(self.columns["id"])

    def select_rows(self, place: slice | Ints | Bools) -> AttributeTable:
        return AttributeTable({name: part[place] for name, part in self.columns.items()})

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
class AnsweredSecrets:
    """Hold the attacked secrets of a run folder; a field is None if its file is missing.

    An answer is an attack's guesses about a secret, or a probe's observation of it.

    Args:
        plan: plan of the run.
        secrets: the secrets' publishable attributes.
        guesses: number of the secret of each guess, keyed by target, setting and attack.
        observations: number of the secret of each observation, keyed by target, setting and probe.
        numbers: the number of each secret.
    """

    plan: Mapping[str, Any] | None = None
    secrets: AttributeTable | None = None
    guesses: Answers | None = None
    observations: Answers | None = None
    numbers: SecretNumbers = field(default_factory=SecretNumbers)

    def with_missing_parts_empty(self) -> AnsweredSecrets:
        """Return a copy that has {} instead of None, so that a missing file reads like an empty
        one.
        """
        return replace(
            self,
            plan=self.plan or {},
            secrets=self.secrets or NO_ATTRIBUTES,
            guesses=self.guesses or {},
            observations=self.observations or {},
        )


NOT_KEPT = AnsweredSecrets()


def read_answered_secrets(folder: Path) -> AnsweredSecrets:
    """Read for which secrets the folder has answers.

    Raise AuditError for an invalid file.
    """
    if (folder / PLAN).exists():
        plan = read_json_object(folder / PLAN, "the plan of a run")
    else:
        plan = None
    secrets = read_secret_attributes(folder)
    numbers = SecretNumbers() if secrets is None else secrets.numbers
    guesses, observations = (
        _list_journal_secrets(folder / name, numbers) for name in (GUESSES, OBSERVATIONS)
    )
    if guesses is not None or observations is not None:  # a run of one kind has a single journal
        guesses = guesses or {}
        observations = observations or {}
    return AnsweredSecrets(plan, secrets, guesses, observations, numbers)


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


def _list_journal_secrets(path: Path, numbers: SecretNumbers) -> dict[CellKey, Ints] | None:
    """Return the numbers of the secrets in a journal, keyed by cell; None if the file is missing.

    `numbers` also receives secrets outside the table.
    """
    if not path.exists():
        return None
    batches: dict[CellKey, list[Ints]] = {}
    try:
        with open(path, "rb") as file:
            while lines := file.readlines(_LINES):
                for cell, secrets in _list_line_secrets(lines).items():
                    batch = numbers.add_all(secrets)
                    batches.setdefault(CellKey.parse_cell_key(cell), []).append(batch)
        return {cell: np.concatenate(parts) for cell, parts in batches.items()}
    except OSError as error:
        raise AuditError(f"{path}: cannot be read: {error.strerror}") from error
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
        raise AuditError(
            f"{path}: expected an answer about a secret on every line: the file is damaged"
        ) from None


def _list_line_secrets(lines: Sequence[bytes]) -> dict[str, list[str]]:
    """Return the ids of the secrets of these lines of a journal, keyed by the name of a cell."""
    ids_by_cell: dict[str, list[str]] = {}
    for line in lines:
        if match := _ANSWER.fullmatch(line):
            cell, secret = map(bytes.decode, match.groups())
        else:
            record = json.loads(line)
            cell = record["cell"]
            secret = record["secret"]
        ids_by_cell.setdefault(cell, []).append(secret)
    return ids_by_cell
