"""Records in parts: the longest block that came out, and shares of records rather than of their
parts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from auditor.core.nouns import Secret
from auditor.statistics.documents import (
    DocumentPart,
    measure_document_recall,
    measure_longest_extracted_blocks,
)


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
    hit = {"a1": True, "a2": True, "b1": False, "b2": False, "n1": False, "n2": True}
    near = {**hit, "b2": True}
    recall, floor, longest, close, close_floor = measure_document_recall(
        [*secrets, *others], hit, near
    )
    assert (recall.name, recall.value, recall.n) == ("document_recall", 0.5, 2)
    assert (floor.name, floor.value, floor.n) == ("document_recall_nonmembers", 1.0, 1)
    assert (longest.name, longest.value, longest.n) == ("longest_block", 6.0, 2)
    assert (close.name, close.value, close.n) == ("document_near_verbatim_recall", 1.0, 2)
    assert (close_floor.name, close_floor.value) == (
        "document_near_verbatim_recall_nonmembers",
        1.0,
    )
    assert measure_document_recall([secret("x", None)], {"x": True}, {"x": True}) == ()
    none = {"b1": False}
    # a budget that covered one document
    assert len(measure_document_recall(secrets, none, none)) == 3
