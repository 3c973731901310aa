"""Audit a retrieval system: ask questions, judge each kind of leak, and give one verdict."""

from __future__ import annotations

from dataclasses import dataclass

from auditor.rag.asking import Progress, ask_rag_questions
from auditor.rag.documents import RagDocuments
from auditor.rag.layers import (
    Crawl,
    MembershipVerdict,
    RagJudge,
    RagVerdict,
    find_worst_rag_verdict,
    list_layer_verdicts,
)
from auditor.rag.system import RagSystem
from auditor.rag.vectors import VectorVerdict, judge_rag_vectors


@dataclass(frozen=True)
class RagAudit:
    """Results of the audit of a retrieval system.

    Attributes:
        control: name of the control.
        n_in: number of documents in the store.
        n_out: number of documents left out of the store.
        channels: channels in which replies show text: answers, retrieved texts or both.
        direct: numbers of documents shown by the attack's own question about them. The first number
            is for questions asked after the control's question, the second for those asked before
            it.
        layers: verdicts on shown text and personal data.
        vectors: verdicts on personal data in stored vectors.
    """

    system: str
    control: str
    n_in: int
    n_out: int
    n_identities: int
    n_questions: int
    seed: int
    channels: tuple[str, ...]
    direct: tuple[int, int]
    layers: tuple[RagVerdict, ...]
    membership: MembershipVerdict
    vectors: tuple[VectorVerdict, ...]
    crawl: Crawl | None

    @property
    def verdict(self) -> str:
        verdicts = [layer.verdict for layer in self.layers]
        verdicts.append(self.membership.verdict)
        verdicts += [vector.verdict for vector in self.vectors]
        return find_worst_rag_verdict(verdicts)


def audit_rag(
    corpus: RagDocuments,
    system: RagSystem,
    control: RagSystem | None,
    template: str,
    n_crawl: int,
    seed: int,
    progress: Progress,
) -> RagAudit:
    """Ask the system for every document, and judge its replies.

    For `control`, `template` and `n_crawl`, see `ask_rag_questions`. Raise AuditError if the
    system fails.
    """
    exchanges = ask_rag_questions(corpus, system, control, template, n_crawl, seed, progress)
    judge = RagJudge(corpus, exchanges, seed)
    layers = list_layer_verdicts(judge)
    of_crawl, crawl = judge.judge_crawl()
    if of_crawl is not None:
        layers.append(of_crawl)
    control_name = "none"
    if control is not None:
        control_name = control.label
    elif corpus.identities:
        control_name = "the owner of each document"
    n_in = int(corpus.member.sum())
    n_questions = len(exchanges.attack) + len(exchanges.control) + len(exchanges.crawl)
    return RagAudit(
        system.label,
        control_name,
        n_in,
        len(corpus.documents) - n_in,
        len(corpus.identities),
        n_questions,
        seed,
        tuple(judge.list_channels()),
        judge.count_direct(),
        tuple(layers),
        judge.judge_membership(),
        tuple(judge_rag_vectors(corpus, system, seed, progress)),
        crawl,
    )
