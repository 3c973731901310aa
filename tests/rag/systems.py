"""Retrieval systems in memory whose leaks are known, and documents for them."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]
TOP = 3


def make_documents(n: int = 100, n_identities: int = 4, seed: int = 0) -> list[Row]:
    """Return documents of 40 random words, with an e-mail address near the end of each."""
    draw = random.Random(seed)
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["".join(draw.choices(letters, k=draw.randint(3, 9))) for _ in range(3_000)]
    rows = []
    for i in range(n):
        chosen = draw.choices(words, k=40)
        mail = f"{chosen[0]}.{i}@example.org"
        text = f"{' '.join(chosen[:30])} {mail} {' '.join(chosen[30:])}"
        row = {"id": f"d{i}", "text": text, "pii": {"email": [mail]}}
        if n_identities:
            row["identity"] = f"user{i % n_identities}"
        rows.append(row)
    return rows


def write_documents(path: Path, rows: Sequence[Row]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


class OpenStore:
    """Answer with the texts that share most words with the question, whoever asks."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.cache: dict[str, tuple[str, list[str]]] = {}

    def index(self, documents: Sequence[Row]) -> None:
        self.rows = list(documents)
        self.words = [set(row["text"].split()) for row in self.rows]

    def find(self, question: str, rows: Sequence[int]) -> list[int]:
        words = set(question.split())
        return sorted(rows, key=lambda i: -len(words & self.words[i]))[:TOP]

    def may_see(self, i: int, identity: str | None) -> bool:
        return self.rows[i].get("identity") == identity

    def choose(self, question: str, identity: str | None) -> list[int]:
        return self.find(question, range(len(self.rows)))

    def ask(self, question: str, identity: str | None) -> tuple[str, list[str]]:
        texts = [self.rows[i]["text"] for i in self.choose(question, identity)]
        return " ".join(texts) or "I do not know.", texts


class FilterAfter(OpenStore):
    """Take the nearest texts of all, then remove those of others: fewer come back."""

    def choose(self, question: str, identity: str | None) -> list[int]:
        nearest = self.find(question, range(len(self.rows)))
        return [i for i in nearest if self.may_see(i, identity)]


class PerUser(OpenStore):
    """Look only among the texts of the one who asks."""

    def choose(self, question: str, identity: str | None) -> list[int]:
        return self.find(question, [i for i in range(len(self.rows)) if self.may_see(i, identity)])


class SharedCache(PerUser):
    """As PerUser, but whoever asks the same again gets the first reply."""

    def ask(self, question: str, identity: str | None) -> tuple[str, list[str]]:
        if question not in self.cache:
            self.cache[question] = super().ask(question, identity)
        return self.cache[question]


class Silent(OpenStore):
    """Retrieve nothing, and say so."""

    def ask(self, question: str, identity: str | None) -> tuple[str, list[str]]:
        return "I do not know.", []


class AnswersOnly(PerUser):
    """As PerUser, but return the answer alone."""

    def ask(self, question: str, identity: str | None) -> Any:
        return super().ask(question, identity)[0]


open_store = OpenStore()
filter_after = FilterAfter()
per_user = PerUser()
shared_cache = SharedCache()
silent = Silent()
answers_only = AnswersOnly()
