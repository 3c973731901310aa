"""Who a run folder says was attacked, beside `secrets.parquet`: the journals of answers, the
secrets, the plan.

Ids only: of an answer nothing else is read. Knows files; no rules.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from auditor.core.errors import AuditError
from auditor.core.jsonable import read_json_object
from auditor.core.nouns import CellKey
from auditor.records.journal import GUESSES, OBSERVATIONS

PLAN, SECRETS = "plan.json", "secrets.json"
Answers = Mapping[CellKey, frozenset[str]]


@dataclass(frozen=True)
class SecretFacts:
    """What may be told of one secret. alias: what reports call it.

    canary: whether the run did not attack it, but a probe measures its exposure.
    """

    id: str
    alias: str
    member: bool
    repeats: int | None = None
    length: int | None = None  # of its suffix, in tokens
    group: str | None = None
    canary: bool = False
    # that it is a part of, called by the alias of the document's first part
    document: str | None = None
    at: int = 0  # where in the document its suffix begins, in tokens
    user: str | None = None  # the alias of the person that it is of
    user_trained: bool = False


@dataclass(frozen=True)
class AnsweredSecretIds:
    """guesses, observations: ids with an answer, by row. None: the folder lacks that file, as a
    baseline in CI does."""

    plan: Mapping[str, Any] | None = None
    secrets: Mapping[str, SecretFacts] | None = None
    guesses: Answers | None = None
    observations: Answers | None = None

    def with_missing_parts_empty(self) -> AnsweredSecretIds:
        """The same with empty in place of None, for a folder that should lack nothing."""
        return AnsweredSecretIds(
            self.plan or {}, self.secrets or {}, self.guesses or {}, self.observations or {}
        )


NOT_KEPT = AnsweredSecretIds()


def read_answered_secret_ids(folder: Path) -> AnsweredSecretIds:
    """What the folder holds. Raises AuditError for a file that holds something else."""
    plan = (
        read_json_object(folder / PLAN, "the plan of a run") if (folder / PLAN).exists() else None
    )
    guesses, observations = (
        _secret_ids_by_cell_in_journal(folder / name) for name in (GUESSES, OBSERVATIONS)
    )
    if guesses is not None or observations is not None:  # a run of one kind has one journal
        guesses, observations = guesses or {}, observations or {}
    return AnsweredSecretIds(plan, read_secret_facts(folder), guesses, observations)


def read_secret_facts(folder: Path) -> dict[str, SecretFacts] | None:
    """By id; None where the folder does not say. Raises AuditError as
    `read_answered_secret_ids`."""
    path = folder / SECRETS
    if not path.exists():
        return None
    columns = read_json_object(path, "the secrets of a run")
    # Two pairs of columns, each of which a file has whole or not at all; every other column is
    # needed.
    some = {name: pair for pair in (("document", "at"), ("user", "user_trained")) for name in pair}
    names = [
        field.name for field in fields(SecretFacts) if some.get(field.name, ("id",))[0] in columns
    ]
    try:
        rows = zip(*(columns[name] for name in names), strict=True)
        found = {row[0]: SecretFacts(**dict(zip(names, row, strict=True))) for row in rows}
        twice = len(found) < len(columns["id"])
    except (KeyError, TypeError, ValueError):
        raise AuditError(
            f"{path}: expected a column each of {', '.join(names)}: the file is damaged"
        ) from None
    if twice:
        raise AuditError(f"{path}: expected each secret once: the file is damaged")
    return found


def _secret_ids_by_cell_in_journal(path: Path) -> dict[CellKey, frozenset[str]] | None:
    if not path.exists():
        return None
    found: dict[CellKey, set[str]] = {}
    try:
        with open(path, "rb") as file:
            for line in file:
                record = json.loads(line)
                found.setdefault(CellKey.parse_cell_key(record["cell"]), set()).add(
                    record["secret"]
                )
    except OSError as error:
        raise AuditError(f"{path}: cannot be read: {error.strerror}") from error
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
        raise AuditError(
            f"{path}: expected an answer about a secret on every line: the file is damaged"
        ) from None
    return {row: frozenset(ids) for row, ids in found.items()}
