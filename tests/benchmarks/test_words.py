"""Words of any script, and where a text is a word of another."""

from __future__ import annotations

import pytest

from auditor.benchmarks.data import words


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Don't pay 3,000.50 (naïve)!", ["Don't", "pay", "3,000.50", "(", "naïve", ")", "!"]),
        ("नमस्ते दुनिया, क्षत्रिय", ["नमस्ते", "दुनिया", ",", "क्षत्रिय"]),
        ("தமிழ் மொழி", ["தமிழ்", "மொழி"]),
        ("السلام عليكم", ["السلام", "عليكم"]),
        ("我来到ABC公司。", ["我", "来", "到", "ABC", "公", "司", "。"]),
        ("東京でメール", ["東", "京", "で", "メール"]),
        ("กรุงเทพ", ["ก", "รุ", "ง", "เ", "ท", "พ"]),
        ("ພາສາ", ["ພ", "າ", "ສ", "າ"]),
        ("ខ្ញុំ", ["ខ្", "ញុំ"]),
        ("메일은 왔다", ["메일은", "왔다"]),
    ],
)
def test_words_are_those_of_unicode(text: str, expected: list[str]) -> None:
    assert words.split_into_words(text) == expected
    assert [match[0] for match in words.RUN.finditer("a(b) 東京 กรุ")] == [
        "a(b)",
        "東",
        "京",
        "ก",
        "รุ",
    ]


def test_words_are_joined_as_their_script_writes_them() -> None:
    assert words.join_words(["in", "東", "京", "at", "3", ".", "กา"]) == "in東京at 3 .กา"


@pytest.mark.parametrize(
    ("before", "behind", "inside"),
    [("m", "a", True), ("m", "1", True), ("2", "3", True), ("é", "a", True), ("д", "а", True), ("म", "ा", True),  # noqa: E501
     ("m", "으", False), ("1", "元", False), ("王", "来", False), ("민", "은", False), ("ก", "า", False),  # noqa: E501
     ("و", "a", False), ("m", ".", False), ("m", "", False), ("", "m", False)],
)  # fmt: skip
def test_a_word_goes_on_in_its_own_script_only(before: str, behind: str, inside: bool) -> None:
    assert words.is_inside_word(before, behind) == inside


def test_a_text_is_where_it_is_a_word_or_else_wherever_it_is() -> None:
    assert words.find_places("Ann", "Annette, Ann") == [(9, 12)]
    assert words.find_places("Ann", "Anns, MaryAnn") == [(0, 3), (10, 13)]
    assert words.find_places("12", "3123 12") == [(5, 7)]
    assert words.find_places("12", "3") == []


def test_what_is_mostly_without_spaces() -> None:
    assert words.is_mostly_unspaced(["患者王小明来了 OK"]) and not words.is_mostly_unspaced(
        ["a b c 王小", "d e"]
    )
