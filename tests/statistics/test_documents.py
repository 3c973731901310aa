"""Records in parts: the longest block that came out, and shares of records rather than of their
parts."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from auditor.core.nouns import Guess, Guesses, Secret
from auditor.statistics.documents import (
    DocumentPart,
    measure_longest_block,
    measure_longest_extracted_blocks,
)
from auditor.statistics.extraction import measure_extraction
from auditor.statistics.judging import judge_guesses


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 6), st.booleans()), max_size=8))
def test_blocks_are_those_of_marked_tokens(spans: list[tuple[int, int, bool]]) -> None:
    """Twin: every token that came out is marked; blocks that only touch are one."""
    marked = {token for at, length, out in spans if out for token in range(at, at + length)}
    run = longest = 0
    for token in range(40):
        run = run + 1 if token in marked else 0
        longest = max(longest, run)
    found = measure_longest_extracted_blocks(
        DocumentPart("d", at, length, out) for at, length, out in spans
    )
    assert found == ({"d": longest} if spans else {})


def secret(id: str, document: str | None, at: int = 0, member: bool = True) -> Secret:
    return Secret(id, (1,), (1, 2, 3), member=member, document=document, at=at)


def test_documents_are_counted_rather_than_parts() -> None:
    secrets = [secret("a1", "a", 0), secret("a2", "a", 3), secret("b1", "b"), secret("b2", "b", 9)]
    others = [secret("n1", "n", member=False), secret("n2", "n", 3, member=False)]
    both = [*secrets, *others]
    hit = {"a1": True, "a2": True, "b1": False, "b2": False, "n1": False, "n2": True}
    answers = {s.id: replace(s, suffix=(1, 2, 3, 4, 5)) for s in both}
    guesses = []
    for s in both:
        first = (1, 2, 3, 4, 5) if hit[s.id] else (1, 2, 3, 4, 9) if s.id == "b2" else (9,) * 5
        guesses.append(Guesses(s.id, (Guess(first, 0.0),), 1, 1))
    measured = {m.name: m for m in measure_extraction(judge_guesses(guesses, answers))}
    for name, value, n in (
        ("document_recall", 0.5, 2),
        ("document_recall_nonmembers", 1.0, 1),
        ("document_near_verbatim_recall", 1.0, 2),
        ("document_near_verbatim_recall_nonmembers", 1.0, 1),
    ):
        assert (measured[name].value, measured[name].n) == (value, n)
    (longest,) = measure_longest_block(both, hit)
    assert (longest.name, longest.value, longest.n) == ("longest_block", 6.0, 2)
    alone = replace(secret("x", None), suffix=(1, 2))
    outcome = judge_guesses([Guesses("x", (Guess((1, 2), 0.0),), 1, 1)], {"x": alone})
    assert "document_recall" not in {m.name for m in measure_extraction(outcome)}
    assert measure_longest_block([alone], {"x": True}) == ()
    # a budget that covered one document
    assert measure_longest_block(both, {"b1": False})[0].value == 0
