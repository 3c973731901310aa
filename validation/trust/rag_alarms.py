"""Measure how often `audit rag` says that a sealed store reveals membership; the truth is known.

    python -m validation.trust.rag_alarms [--stores 334] [--seed 0] [--out FOLDER]  (ten minutes)

Each user's documents are searched only for that user. In a third of the stores the documents are
unrelated. In the others, each of two or three users has a twin of each document that differs in
two words. This is the hardest case, because what a user retrieves depends on coins of that user's
documents, while others ask about their twins.
"""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from auditor.rag.asking import TEMPLATE, ask_rag_questions
from auditor.rag.documents import read_rag_documents
from auditor.rag.layers import LEAKS, RagJudge
from auditor.rag.system import RagSystem
from validation.harness import Page, run, share

N_DOCUMENTS = 48
TOP = 3
Row = dict[str, Any]


def make_documents(seed: int, n_users: int, twins: bool) -> list[Row]:
    """Return documents of 24 to 40 random words; twins belong to the users in turn."""
    draw = random.Random(seed)
    words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=6)) for _ in range(400)]
    rows: list[Row] = []
    for i in range(N_DOCUMENTS):
        text = draw.choices(words, k=draw.randint(24, 40))
        if twins and i % n_users:
            text = [*rows[-1]["text"].split()[:22], *text[22:]]
        rows.append({"id": i, "text": " ".join(text), "identity": f"user{i % n_users}"})
    return rows


class SealedStore:
    """A store that searches the documents of the user who asks."""

    def index(self, rows: Sequence[Row]) -> None:
        self.texts: dict[str, list[str]] = {}
        for row in rows:
            self.texts.setdefault(row["identity"], []).append(row["text"])

    def ask(self, question: str, identity: str) -> tuple[str, list[str]]:
        words = set(question.split())
        texts = sorted(
            self.texts.get(identity, []), key=lambda text: -len(words & set(text.split()))
        )
        return " ".join(texts[:TOP]), texts[:TOP]


def audit_store(seed: int, n_users: int, twins: bool) -> tuple[bool, bool]:
    """Return whether the audit says that membership leaks, and whether the AUC's interval excludes
    1/2.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "documents.jsonl"
        path.write_text(
            "".join(json.dumps(row) + "\n" for row in make_documents(seed, n_users, twins))
        )
        corpus = read_rag_documents(str(path), seed)
    store = SealedStore()
    system = RagSystem("store", store.ask, store.index)
    exchanges = ask_rag_questions(corpus, system, None, TEMPLATE, 0, seed, lambda *_: None)
    verdict = RagJudge(corpus, exchanges, seed).judge_membership()
    excludes = bool(verdict.measurements) and verdict.measurements[0].low > 0.5
    return verdict.verdict == LEAKS, excludes


def main(stores: int = 334, seed: int = 0, out: Path | None = None) -> None:
    page = Page(out / "rag-alarms.md" if out else None)
    page.head("sealed stores", "membership told", "AUC's interval above 1/2", "stores")
    for name, n_users, twins in (
        ("three users, unrelated documents", 3, False),
        ("three users with twins", 3, True),
        ("two users with twins", 2, True),
    ):
        verdicts = [audit_store(seed + number, n_users, twins) for number in range(stores)]
        alarms = sum(alarm for alarm, _ in verdicts)
        excluded = sum(excludes for _, excludes in verdicts)
        page.row(name, share(alarms, stores), share(excluded, stores), stores)


if __name__ == "__main__":
    raise SystemExit(run(main))
