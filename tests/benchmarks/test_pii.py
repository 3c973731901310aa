"""Personal data in text: what a checksum, a plan of numbers or the data themselves vouch for, and
nothing else."""

from __future__ import annotations

import random

import pytest
from stdnum import luhn

from auditor.benchmarks.data import pii
from auditor.benchmarks.data.pii import PiiRecognisers, find_pii_spans
from auditor.benchmarks.lab.lab_recipe import LabRecipe
from auditor.benchmarks.lab.lab_texts import PRIVATE, make_private_lab_texts
from auditor.core.errors import AuditError
from auditor.core.nouns import Mark
from tests.benchmarks.pii_formats import EXAMPLES, REGIONS, WrittenExample


def found(text: str, *regions: str, marks: tuple[Mark, ...] = ()) -> list[tuple[str, str]]:
    return [
        (span.kind, text[span.start : span.end])
        for span in find_pii_spans(text, marks, PiiRecognisers(regions))
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("mail jane.doe+x@mail.example.com.", [("email", "jane.doe+x@mail.example.com")]),
        ("IBAN DE89 3704 0044 0532 0130 00 BIC COBADEFF", [("iban", "DE89 3704 0044 0532 0130 00")]),  # noqa: E501
        ("GB33BUKB20201555555555,", [("iban", "GB33BUKB20201555555555")]),
        ("card 4111-1111-1111-1111", [("card", "4111-1111-1111-1111")]),
        ("or 3782 822463 10005", [("card", "3782 822463 10005")]),
        ("ring +49 30 1234567 today", [("phone", "+49 30 1234567")]),
        ("born 1980-02-03; DOB: 3/2/1980", [("birth-date", "1980-02-03"), ("birth-date", "3/2/1980")]),  # noqa: E501
        ("geboren am 3.2.1980", [("birth-date", "3.2.1980")]),
        ("born on February 3, 1980", [("birth-date", "February 3, 1980")]),
        ("SSN 536-90-4399", [("id-number", "536-90-4399")]),
        ("DNI 54362315K, AHV 756.9217.0769.85", [("id-number", "54362315K"), ("id-number", "756.9217.0769.85")]),  # noqa: E501
        ("CF RSSMRA85T10A562S", [("id-number", "RSSMRA85T10A562S")]),
    ],
)  # fmt: skip
def test_what_is_valid_is_found_whole(text: str, expected: list[tuple[str, str]]) -> None:
    assert found(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "IBAN DE88 3704 0044 0532 0130 00",  # a wrong check digit each
        "card 4111-1111-1111-1112",
        "DNI 54362315A",
        "CF RSSMRA85T10A562T",
        "SSN 666-90-4399",  # no such area
        "born 1980-02-30",  # no such day
        "on 1980-02-03, paid 1234567890, order 12345678901",  # nobody says that these are anybody's
        "a@b, @example.com, 12@34",
        "212-555-0143",  # of which country?
    ],
)
def test_what_no_check_vouches_for_is_not(text: str) -> None:
    assert found(text) == []


@pytest.mark.parametrize("one", EXAMPLES, ids=lambda one: one.text)
def test_each_way_of_writing_is_recognised_as_the_page_says(one: WrittenExample) -> None:
    assert found(one.text, *REGIONS) == ([] if one.kind is None else [(one.kind, one.example)])


def test_of_what_is_around_an_email_nothing_is_part_of_it() -> None:
    for sign in '="|/?&:;,<>()[]{}*~`#!$^ \n':
        assert found(f"mail{sign}jo@mail.example{sign}") == [("email", "jo@mail.example")], sign
    assert found("a..jo@mail.example") == [("email", "jo@mail.example")]
    assert found("x" * 65 + "@mail.example") == []


@pytest.mark.parametrize(
    ("start", "length", "n_cards"),
    [("35", 15, 0), ("4", 16, 300), ("37", 15, 300), ("62", 19, 300)],
)
def test_a_card_has_the_first_digits_and_the_length_of_an_issuer(
    start: str, length: int, n_cards: int
) -> None:
    drawn = random.Random(length)
    digits = (
        start + "".join(drawn.choices("0123456789", k=length - 1 - len(start))) for _ in range(300)
    )
    texts = [f"IMEI {body}{luhn.calc_check_digit(body)}" for body in digits]
    assert sum(("card", text[5:]) in found(text) for text in texts) == n_cards


def test_a_mark_that_is_only_part_of_a_word_counts_where_it_is() -> None:
    """As before a Korean particle, in a German genitive, after an Arabic conjunction, among Chinese
    characters."""
    for text, name in (
        ("김민준은 왔다", "김민준"),
        ("Annas Brief", "Anna"),
        ("زيد وأحمد", "أحمد"),
        ("患者王小明来了", "王小明"),
    ):
        spans = find_pii_spans(text, (("name", name),))
        assert [text[span.start : span.end] for span in spans] == [name]
    assert len(find_pii_spans("Annas Brief an Anna", (("name", "Anna"),))) == 1


def test_regions_say_whose_numbers_have_no_country_code() -> None:
    text = "Call 212-555-0143 or 030 1234567."
    assert found(text, "US") == [("phone", "212-555-0143")]
    assert ("phone", "030 1234567") in found(text, "DE", "US") and (
        "phone",
        "212-555-0143",
    ) in found(text, "DE", "US")
    with pytest.raises(
        AuditError,
        match=r"--phone-region as the two-letter code of a country, such as DE or US, got 'us'",
    ):
        PiiRecognisers(["DE", "us"])


def test_what_the_data_mark_comes_first_and_is_no_part_of_a_longer_word() -> None:
    marks = (("name", "Ann"), ("name", "Ann Lee"), ("customer", "jane@example.com"))
    text = "Annette and Ann Lee (jane@example.com), Ann; joe@example.com"
    expected = [
        ("name", "Ann Lee"),
        ("customer", "jane@example.com"),
        ("name", "Ann"),
        ("email", "joe@example.com"),
    ]
    assert found(text, marks=marks) == expected
    assert [span.kind for span in find_pii_spans(text, marks)] == [
        "name",
        "customer",
        "name",
    ]


def test_on_records_whose_data_are_known_nothing_else_is_found() -> None:
    """The lab marks what it makes. Its telephone and card numbers are drawn digit by digit: most
    are no valid ones."""
    texts, recognisers = make_private_lab_texts(LabRecipe(), PRIVATE), PiiRecognisers(["US"])
    marked: dict[str, int] = {}
    seen: dict[str, int] = {}
    for text in [*texts.private[1], *texts.nonmembers]:
        true = {
            (span.kind, span.start, span.end) for span in find_pii_spans(text, texts.marks[text])
        }
        alone = {
            (span.kind, span.start, span.end) for span in find_pii_spans(text, (), recognisers)
        }
        assert alone <= true
        for kinds, counts in ((true, marked), (alone, seen)):
            for kind, *_ in kinds:
                counts[kind] = counts.get(kind, 0) + 1
    assert all(seen[kind] == marked[kind] for kind in ("email", "birth-date"))
    assert (
        0.02 < seen["card"] / marked["card"] < 0.2 and 0.2 < seen["phone"] / marked["phone"] < 0.5
    )


def test_without_the_extra_it_is_refused_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pii, "find_spec", lambda name: None)
    with pytest.raises(
        AuditError, match=r"to find personal data by: pip install 'audit-lm\[pii\]'"
    ):
        PiiRecognisers()
