"""Read documents, and toss a coin for each to decide whether it is put into the store."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from auditor.benchmarks.data.columns import read_data_table
from auditor.benchmarks.data.words import RUN, split_into_words
from auditor.core import disk
from auditor.core.arrays import Bools
from auditor.core.errors import AuditError
from auditor.core.nouns import Mark
from auditor.core.secret_randomness import make_keyed_generator
from auditor.statistics import roc

IDENTITY = "identity"
PASSAGE = 10  # words in a row that count as shown
_HEAD = 24  # words of a document that a question quotes, at most
_FLAG = "--documents"


@dataclass(frozen=True)
class RagDocument:
    """A distinct text in two parts: questions quote the head, and an answer may show the tail.

    `owners` are the identities with access to the document; it is empty if the file has no
    identities. `marks` are personal data.
    """

    name: str
    head: str
    tail: str
    owners: tuple[str, ...]
    marks: tuple[Mark, ...]

    @property
    def text(self) -> str:
        return self.head + self.tail


@dataclass(frozen=True)
class RagDocuments:
    """Distinct documents; a fair coin decides for each whether it is put into the store.

    `member` (documents,) is True for a document in the store. `rows` holds, for each document, its
    rows in the file; all copies of a text share one coin.
    """

    documents: tuple[RagDocument, ...]
    member: Bools
    rows: tuple[tuple[dict[str, Any], ...], ...] = field(repr=False)

    @property
    def identities(self) -> tuple[str, ...]:
        return tuple(sorted({owner for entry in self.documents for owner in entry.owners}))

    def list_rows(self, member: bool) -> list[dict[str, Any]]:
        """Return the rows to put into the store or, if `member` is False, the rows to leave out."""
        return [
            row
            for rows, is_member in zip(self.rows, self.member.tolist(), strict=True)
            for row in rows
            if is_member == member
        ]


def read_rag_documents(name: str, seed: int) -> RagDocuments:
    """Read the documents, and toss a coin for each to decide if it is put into the store.

    Raise AuditError if the file is invalid.
    """
    table = read_data_table(_FLAG, name, "id", IDENTITY)
    texts = table.list_texts()
    marks = table.list_personal_data_marks()
    names = list(map(str, range(table.rows)))
    if "id" in table.columns:
        names = list(map(str, table.column("id")))
    has_identities = IDENTITY in table.columns
    identities = table.list_users(IDENTITY if has_identities else None, True)
    rows_by_text: dict[str, list[int]] = {}
    for row, text in enumerate(texts):
        rows_by_text.setdefault(text, []).append(row)
    documents = []
    for text, rows in rows_by_text.items():
        owners = {owner for row in rows if (owner := identities[row]) is not None}
        head, tail = _cut_document(table.label, text, rows[0])
        first = rows[0]
        documents.append(RagDocument(names[first], head, tail, tuple(sorted(owners)), marks[first]))
    coins = make_keyed_generator("rag coins", seed).random(len(documents)) < 0.5
    corpus = RagDocuments(
        tuple(documents),
        coins,
        tuple(
            tuple(_make_row(names[row], texts[row], identities[row]) for row in rows)
            for rows in rows_by_text.values()
        ),
    )
    n_in = int(coins.sum())
    if min(n_in, len(coins) - n_in) < roc.LEAST:
        raise AuditError(
            f"{table.label}: expected at least {roc.LEAST} documents in and {roc.LEAST} out of "
            f"the store, got {n_in} and {len(coins) - n_in}: give more documents"
        )
    n_identities = len(corpus.identities)
    if n_identities and all(len(entry.owners) == n_identities for entry in documents):
        raise AuditError(
            f"{table.label}: expected documents that some identity in column {IDENTITY!r} must not "
            f"see, got {n_identities} identities that may see them all"
        )
    return corpus


def _make_row(name: str, text: str, identity: str | None) -> dict[str, Any]:
    row = {"id": name, "text": text}
    if identity is None:
        return row
    return {**row, IDENTITY: identity}


def _cut_document(where: str, text: str, row: int) -> tuple[str, str]:
    """Return the first half of a text (at most 24 words) and the rest of the text.

    Raise AuditError if the rest is too short.
    """
    ends = [match.end() for match in RUN.finditer(text)]
    if len(ends) > 1:
        cut = ends[min(_HEAD, len(ends) // 2) - 1]
    else:
        cut = 0
    if len(split_into_words(text[cut:])) < PASSAGE:
        raise AuditError(
            f"{where}: expected at least {2 * PASSAGE} words in each document, got {len(ends)} in "
            f"row {row} (counted from 0)"
        )
    return text[:cut], text[cut:]


def write_drawn_documents(folder: Path, corpus: RagDocuments) -> tuple[Path, Path]:
    """Write two files, in.jsonl and out.jsonl, and return their paths.

    in.jsonl holds the documents drawn into the store, and out.jsonl the others.
    """
    paths = folder / "in.jsonl", folder / "out.jsonl"
    for path, member in zip(paths, (True, False), strict=True):
        disk.replace_atomically(path, _format_rows(corpus.list_rows(member)))
    return paths


def check_drawn_documents(folder: Path, corpus: RagDocuments) -> None:
    """Raise AuditError if in.jsonl is missing or does not contain the drawn documents."""
    path = folder / "in.jsonl"
    if not path.is_file():
        raise AuditError(
            f"expected {str(path)!r}, the documents to index: draw them with `audit rag "
            f"{_FLAG} FILE -o {folder}`, or define `index(documents)` next to `ask`"
        )
    if path.read_text(encoding="utf-8") != _format_rows(corpus.list_rows(True)):
        raise AuditError(
            f"expected the documents of {str(path)!r} to be those that {_FLAG} and --seed draw, "
            "got others"
        )


def _format_rows(rows: Sequence[dict[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def choose_document_strangers(corpus: RagDocuments, seed: int) -> list[str | None]:
    """Return, for each document, an identity that must not see it, or None if there is none.

    The identities form a ring in random order, and each one asks for its neighbour's documents. If
    there are three or more, no two identities ask for each other's documents.
    """
    names = corpus.identities
    order = make_keyed_generator("rag ring", seed).permutation(len(names))
    ring = [names[i] for i in order.tolist()]
    strangers: list[str | None] = []
    for entry in corpus.documents:
        if entry.owners:
            start = ring.index(entry.owners[0]) + 1
        else:
            start = 0
        others = []
        for name in ring[start:] + ring[:start]:
            if name not in entry.owners:
                others.append(name)
        strangers.append(others[0] if others else None)
    return strangers
