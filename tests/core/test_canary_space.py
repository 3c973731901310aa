"""Formats as sets of texts, against enumeration."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from auditor.core.canary_space import CanarySpace, State
from auditor.core.errors import AuditError

FRUIT = (("fruit", ("fig", "figment", "plum")),)
SPACES = [
    CanarySpace("My ID is {digits:2}"),
    CanarySpace("{fruit:2} {{x}} {upper}!", FRUIT),
    CanarySpace("{hex}{letters}", ()),
]


def test_the_papers_space() -> None:
    space = CanarySpace("My ID is {digits:6}")
    assert space.size == 10**6 and space.bits == pytest.approx(19.931569)
    assert space.common_prefix == "My ID is " and "My ID is 955320" in space
    for text in ("My ID is 95532", "My ID is 9553200", "My ID is 95532x", "my ID is 955320", ""):
        assert text not in space


@pytest.mark.parametrize("space", SPACES, ids=lambda space: space.format)
def test_texts_are_all_different_in_the_space_and_none_begins_another(space: CanarySpace) -> None:
    texts = sorted(space.texts())
    assert len(set(texts)) == len(texts) == space.size
    assert all(text in space for text in texts)
    assert not any(other.startswith(text) for text, other in pairwise(texts))


def test_words_are_parted_by_spaces_and_braces_can_be_written() -> None:
    assert next(SPACES[1].texts()) == "fig fig {x} A!"
    assert SPACES[1].size == 3 * 3 * 26


@pytest.mark.parametrize("space", SPACES, ids=lambda space: space.format)
def test_steps_spell_the_texts_and_nothing_else(space: CanarySpace) -> None:
    found: list[str] = []
    waiting: list[tuple[str, State]] = [("", (0, ""))]
    while waiting:
        text, state = waiting.pop()
        assert space.state_after_text(text) == state
        if space.is_complete_text_state(state):
            found.append(text)
        waiting += [(text + character, then) for character, then in space.list_transitions(state)]
    assert sorted(found) == sorted(space.texts())
    assert space.state_after_text("nothing like it") is None


def test_every_text_is_drawn_as_often_as_any_other() -> None:
    noise, space = np.random.default_rng(0), CanarySpace("{fruit} {digits}", FRUIT)
    drawn = [space.draw(noise) for _ in range(30_000)]
    counts = np.array([drawn.count(text) for text in space.texts()])
    assert counts.sum() == 30_000 and (abs(counts - 1000) < 5 * np.sqrt(1000)).all()


@settings(max_examples=30)
@given(st.text(max_size=12))
def test_any_text_is_a_format_or_is_refused_in_one_sentence(format: str) -> None:
    try:
        space = CanarySpace(format)
    except AuditError as refused:
        assert "\n" not in str(refused)
    else:
        assert space.size >= 2


@pytest.mark.parametrize(
    ("format", "lists", "why"),
    [
        ("My ID is", (), "a slot that several texts fit"),
        ("My ID is {digits:0}", (), "whole number of at least 1 in the slot {digits:0}"),
        ("My ID is {digits:x}", (), "whole number of at least 1"),
        ("My ID is {digit:6}", (), "did you mean 'digits'"),
        ("My ID is {digits", (), "expected a format such as"),
        ("I like {fruit}", FRUIT, "no text of the format .* begins another"),
        ("I like {one}", (("one", ("fig",)),), "which 1 fits"),
        ("I like {none}", (("none", ()),), "which 0 fits"),
        ("I like {two}", (("two", ("", "fig")),), "expected words in the list 'two'"),
    ],
)
def test_what_is_no_space_is_refused(
    format: str, lists: tuple[tuple[str, tuple[str, ...]], ...], why: str
) -> None:
    with pytest.raises(AuditError, match=why):
        CanarySpace(format, lists)
