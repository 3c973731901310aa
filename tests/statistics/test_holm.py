"""Holm's correction against the textbook, and its two forms against each other."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from auditor.statistics import holm


def rejected_at(p: list[float], level: float) -> set[int]:
    each = holm.adjust_test_level([lambda at, own=own: own <= at for own in p], level)  # type: ignore[misc]
    return {i for i, own in enumerate(p) if own <= each}


@pytest.mark.parametrize(
    "p", [[0.001, 0.2, 0.013, 0.026, 0.9], [0.06], [0.01, 0.02, 0.03], [0.04, 0.04], []]
)
def test_tests_are_decided_smallest_first(p: list[float]) -> None:
    """Each at 5% over those that are left, until one is kept."""
    rejected = set()
    for rank, i in enumerate(sorted(range(len(p)), key=lambda i: p[i])):
        if p[i] > 0.05 / (len(p) - rank):
            break
        rejected.add(i)
    assert rejected_at(p, 0.05) == rejected


def test_adjusted_p_values_by_hand() -> None:
    assert holm.adjust_p_values([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm.adjust_p_values([0.9, 0.8]) == [1.0, 1.0] and holm.adjust_p_values([]) == []


@given(
    st.lists(st.integers(1, 63).map(lambda k: k / 64), max_size=8),
    st.integers(1, 7).map(lambda k: k / 8 - 1 / 999),
)
def test_both_forms_reject_the_same(p: list[float], level: float) -> None:
    """The levels lie between the values that the products can take, so that rounding decides
    nothing."""
    assert {i for i, q in enumerate(holm.adjust_p_values(p)) if q <= level} == rejected_at(p, level)
