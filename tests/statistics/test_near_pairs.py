"""Pairs of near texts: those of comparing all with all, whichever way they are found."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rapidfuzz.distance import Levenshtein

from auditor.core.secret_randomness import make_keyed_generator
from auditor.statistics import near_pairs

Texts = list[tuple[int, ...]]
TEXTS = st.lists(
    st.lists(st.integers(0, 2), min_size=1, max_size=12).map(tuple), min_size=1, max_size=9
)


def found(texts: Texts, others: Texts, limits: list[int]) -> list[tuple[int, int]]:
    pairs = near_pairs.index_pairs_within_edit_limits(texts, others, limits)
    return sorted((i, j) for at, of in pairs for i, j in zip(at.tolist(), of.tolist(), strict=True))


def all_with_all(texts: Texts, others: Texts, limits: list[int]) -> list[tuple[int, int]]:
    return [
        (i, j)
        for i, (text, limit) in enumerate(zip(texts, limits, strict=True))
        for j, other in enumerate(others)
        if Levenshtein.distance(text, other) <= limit
    ]


@pytest.mark.parametrize(
    "share", [0.001, 2, 10**9], ids=["by pieces", "by pieces where few", "all with all"]
)
@given(texts=TEXTS, others=TEXTS, limit=st.integers(0, 5))
def test_pairs_are_those_of_all_with_all(
    share: float, texts: Texts, others: Texts, limit: int
) -> None:
    limits = [(limit + i) % 6 for i in range(len(texts))]
    with pytest.MonkeyPatch.context() as changed:
        changed.setattr(near_pairs, "_WORTH", 0)
        changed.setattr(near_pairs, "_SHARE", share)
        assert found(texts, others, limits) == all_with_all(texts, others, limits)


def test_of_many_texts_few_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """3,000 texts are 9 million pairs: their near copies are found among some thousand that are
    compared."""
    noise = make_keyed_generator("near pairs")
    texts = [tuple(row) for row in noise.integers(500, size=(2000, 20)).tolist()]
    texts += [(*text[:7], 999, *text[9:], 998) for text in texts[:1000]]
    compared = []
    exact = Levenshtein.distance

    def counted(*pair: object, **more: object) -> int:
        compared.append(pair)
        return exact(*pair, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(near_pairs.Levenshtein, "distance", counted)
    every = [(i, i) for i in range(3000)] + [
        pair for i in range(1000) for pair in ((i, 2000 + i), (2000 + i, i))
    ]
    assert found(texts, texts, [4] * 3000) == sorted(every)
    assert len(every) <= len(compared) < 100_000
