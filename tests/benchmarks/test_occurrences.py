"""How often texts occur in others: one pass gives what looking for each of them apart gives."""

from __future__ import annotations

import random
import weakref
from collections.abc import Iterable
from typing import Any

import pytest

from auditor.benchmarks.data import words
from auditor.benchmarks.data.words import count_text_occurrences


def naive(wanted: str, texts: list[str]) -> int:
    return sum(1 for text in texts for at in range(len(text)) if text.startswith(wanted, at))


@pytest.mark.parametrize("seed", range(3))
def test_one_pass_counts_what_a_search_for_each_text_counts(seed: int) -> None:
    drawn = random.Random(seed)
    texts = ["".join(drawn.choices("ab é𝔸", k=drawn.randint(0, 300))) for _ in range(40)]
    texts += [texts[0] + texts[1], texts[2] * 2]
    wanted = {
        text[at : at + size]
        for text in texts
        for at in (0, 7, 90)
        for size in (1, 5, 19, 20, 21, 120)
    } - {""}
    found = count_text_occurrences(dict.fromkeys(wanted, False), texts)
    assert found == {text: naive(text, texts) for text in wanted}
    assert len(set(found.values())) > 10


def test_a_text_that_is_to_end_there_is_not_found_in_a_longer_number_or_word() -> None:
    texts = ["code 12", "code 123", "code 12, code 12", "code 12 3", "decode 12"]
    assert count_text_occurrences({"code 12": True}, texts) == {"code 12": 5}
    assert count_text_occurrences({"code 12": False}, texts) == {"code 12": 6}
    assert count_text_occurrences({"code ": True}, [*texts, "code  "]) == {"code ": 1}


def test_one_automaton_is_in_memory_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Automaton:
        def __init__(self, built: Any) -> None:
            self.find_matches_as_indexes = built.find_matches_as_indexes

    build = words._build_end_automaton
    alive = weakref.WeakSet[Automaton]()

    def build_next(strings: Iterable[str]) -> tuple[Automaton, list[tuple[int, ...]]]:
        assert not alive
        built, lengths = build(strings)
        automaton = Automaton(built)
        alive.add(automaton)
        return automaton, lengths

    monkeypatch.setattr(words, "_build_end_automaton", build_next)
    monkeypatch.setattr(words, "_STRINGS_AT_ONCE", 2)
    counts = count_text_occurrences(dict.fromkeys("abcde", False), ["aab", "cde"])
    assert counts == {"a": 2, "b": 1, "c": 1, "d": 1, "e": 1}


def test_nothing_to_look_for_is_no_fault_and_an_empty_text_is_one() -> None:
    assert count_text_occurrences({}, ["a"]) == {}
    with pytest.raises(ValueError, match="an empty one"):
        count_text_occurrences({"": False}, ["a"])


def test_a_letter_of_another_script_ends_a_text_and_a_mark_does_not() -> None:
    texts = [
        "메일은 u1@example.com으로",
        "邮箱u1@example.com已登记",
        "u1@example.company",
        "u1@example.com2",
    ]
    assert count_text_occurrences({"u1@example.com": True}, texts) == {"u1@example.com": 2}
    assert count_text_occurrences({"राम": True}, ["राम है", "रामा है"]) == {"राम": 1}
    assert count_text_occurrences({"金额12": True}, ["金额12元", "金额123元"]) == {"金额12": 1}
