"""Fresh values of the format of a piece of personal data: valid, distinct, of the same issuer, and
each as likely as the true one."""

from __future__ import annotations

import re
from itertools import islice

import numpy as np
import pytest
from scipy.stats import chisquare

from auditor.benchmarks.data import pii
from auditor.benchmarks.data.alternatives import (
    UnknownFormat,
    find_value_format,
    parse_described_formats,
)
from auditor.benchmarks.data.identity_numbers import get_birth_date
from auditor.core.errors import AuditError
from auditor.core.secret_randomness import make_keyed_generator
from tests.benchmarks.pii_formats import EXAMPLES, REGIONS, WrittenExample

RECOGNISERS = pii.PiiRecognisers(REGIONS)


def alternatives(kind: str, value: str, count: int = 20, seed: int = 0) -> list[str]:
    format = find_value_format(kind, value, {}, REGIONS)
    return format.list_alternatives(value, count, 400, make_keyed_generator("test", seed))


def whole_values() -> list[WrittenExample]:
    """The examples that are values by themselves and have a format; of slow checks a few."""
    spans = [
        (example, span, example.text[span.start : span.end])
        for example in EXAMPLES
        if example.kind
        for span in pii.find_pii_spans(example.text, (), RECOGNISERS)
    ]
    return [e for e, span, text in spans if text == e.example and text.isascii()]


@pytest.mark.parametrize("example", whole_values(), ids=lambda example: example.example)
def test_alternatives_are_recognised_as_the_value_is(example: WrittenExample) -> None:
    assert example.kind is not None
    try:
        drawn = alternatives(example.kind, example.example, 3)
    except UnknownFormat:
        assert example.kind in ("email", "birth-date") or example.country in ("IT", "MX")
        return
    assert drawn and example.example not in drawn
    for text in islice(drawn, 3):
        spans = pii.find_pii_spans(example.before + text + example.after, (), RECOGNISERS)
        start = len(example.before)
        assert pii.Span(example.kind, start, start + len(text)) in spans, text
        shapes = [
            [c if not c.isalnum() else "9" for c in written] for written in (text, example.example)
        ]
        assert shapes[0] == shapes[1] or example.kind in ("email", "birth-date")


@pytest.mark.parametrize(
    ("kind", "value", "beginning"),
    [
        ("card", "4111 1111 1111 1111", "4111 1111 "),
        ("iban", "ES91 2100 0418 4502 0005 1332", "ES"),
        ("phone", "+49 30 1234567", "+49 30 1"),
        ("id-number", "880320-1436", "880320-1"),
        ("id-number", "536-90-4399", "536-"),
        ("order", "ORD-2031-88812", "ORD-"),
        ("birth-date", "1980-02-03", "1980-"),
    ],
)
def test_what_tells_the_issuer_or_the_year_is_kept(kind: str, value: str, beginning: str) -> None:
    drawn = alternatives(kind, value, 200)
    assert len(set(drawn)) == len(drawn) >= 200 - 1 or kind == "id-number"
    assert all(text.startswith(beginning) for text in drawn)
    if kind == "iban":  # bank and branch, after check digits that differ
        assert all(text[5:14] == "2100 0418" for text in drawn)
        assert len({text[2:4] for text in drawn}) > 20


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("birth-date", "3/2/1980"),
        ("birth-date", "13.2.1980"),
        ("birth-date", "03.02.1980"),
        ("birth-date", "1980-02-03"),
        ("birth-date", "3 March 1980"),
        ("birth-date", "May 13, 1980"),
        ("birth-date", "13 Mar 1980"),
    ],
)
def test_every_alternative_would_have_the_same_alternatives(kind: str, value: str) -> None:
    """Else the true value is no draw from the format, and its rank is not uniform."""
    values = {value, *alternatives(kind, value)}
    assert len(values) > 20
    for other in sorted(values)[::17]:
        assert {other, *alternatives(kind, other)} == values


@pytest.mark.parametrize(
    "value",
    [
        "FR76 3000 6000 0112 3456 7890 189",
        "MC5811222000010123456789030",
        "TN5910006035183598478831",
        "PT50000201231234567890154",
        "SI56263300012039086",
        "BA391290079401028494",
        "RS35260005601001611379",
        "ME25505000012345678951",
        "MK07250120000058984",
        "XK051212012345678906",
        "ST23000100010051845310146",
    ],
)
def test_an_iban_keeps_check_digits_that_all_of_its_country_have(value: str) -> None:
    """Else every value ranks first among alternatives that no bank ever issues."""
    drawn = alternatives("iban", value, 50)
    assert len(drawn) == 50
    for other in drawn:
        assert other[:4] == value[:4]
        assert find_value_format("iban", other, {}).choices == (
            find_value_format("iban", value, {}).choices
        )


def test_a_french_iban_with_letters_has_its_own_check_digits() -> None:
    assert len({text[:4] for text in alternatives("iban", "FR1420041010050500013M02606")}) > 5


@pytest.mark.parametrize(
    ("module", "value", "date"),
    [
        ("no.fodselsnummer", "15108695088", "1986-10-15"),
        ("no.fodselsnummer", "15050572657", "2005-05-15"),
        ("be.ssn", "05073003326", "2005-07-30"),
        ("be.ssn", "05073003394", "1905-07-30"),
        ("lv.pvn", "161175-19997", "1975-11-16"),
        ("lv.pvn", "160505-21004", "2005-05-16"),
    ],
)
def test_a_national_number_keeps_the_century_of_birth(module: str, value: str, date: str) -> None:
    drawn = alternatives("id-number", value, 200)
    assert len(drawn) >= 30
    for text in (value, *drawn):
        assert str(get_birth_date(module, text)) == date


@pytest.mark.parametrize(
    ("kind", "value", "year"),
    [
        ("order", "INV-2024-00123", "2024"),
        ("order", "INV-7391-00123", ""),
        ("pin", "1985", ""),
        ("email", "anna.1985.731@mail.com", "1985"),
        ("email", "anna7391@mail.com", ""),
    ],
)
def test_a_year_is_kept_as_any_model_expects_one(kind: str, value: str, year: str) -> None:
    drawn = alternatives(kind, value, 300)
    assert len(drawn) >= 300 and all(year in text for text in drawn)
    assert all(len(value) == len(text) and "-00" * ("-00" in value) in text for text in drawn)
    for text in drawn[::30]:
        assert find_value_format(kind, text, {}).choices == (
            find_value_format(kind, value, {}).choices
        )


def test_short_codes_are_enumerated() -> None:
    format = find_value_format("pin", "4821", {})
    every = format.list_alternatives("4821", 999, 10_000, np.random.default_rng(0))
    assert sorted([*every, "4821"]) == [str(i) for i in range(1000, 10_000) if i % 1000]
    assert format.is_uneven  # people choose 1234


def test_each_value_is_as_likely_as_any_other() -> None:
    """Of 1,000 sets of alternatives to a card, how often each of the account's digits is drawn."""
    drawn = [t for seed in range(60) for t in alternatives("card", "4111 1111 1111 1111", 20, seed)]
    for place in (10, 12, 17, 18):
        counts = np.bincount([int(text[place]) for text in drawn], minlength=10)
        assert chisquare(counts).pvalue > 1e-3


def test_described_formats_are_drawn_from() -> None:
    described = parse_described_formats("order=AB-{digits:3}-{upper:1};pin={digits:4}")
    format = find_value_format("order", "AB-123-Q", described)
    assert format.n_choices == 26_000
    drawn = format.list_alternatives("AB-123-Q", 30, 100, np.random.default_rng(0))
    assert len(drawn) == 30 and all(text in described["order"] for text in drawn)
    with pytest.raises(AuditError, match="expected each order that the data mark in the format"):
        find_value_format("order", "AB-123-4", described)
    with pytest.raises(AuditError, match="expected formats as KIND=FORMAT"):
        parse_described_formats("order")


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("name", "Jane Doe"),
        ("address", "12 Oak Street"),
        ("card", "4111 1111 1111 1112"),
        ("id-number", "RSSMRA85T10A562S"),
        ("email", "info@mail.example"),
        ("email", "annasmith85@mail.example"),
        ("ip", "192.168.10.25"),
        ("visit", "2023-05-17"),
        ("place", "52.520008"),
        ("order", "0000-0012"),
        ("iban", "IS14 0159 2600 7654 5510 7303 39"),
        ("birth-date", "3 février 1980"),
    ],
)
def test_a_format_that_nobody_described_is_refused(kind: str, value: str) -> None:
    with pytest.raises(UnknownFormat, match=kind):
        find_value_format(kind, value, {}, REGIONS)


def test_a_format_with_few_values_gives_all_of_them() -> None:
    every = alternatives("id-number", "880320-1436", 999)
    assert len(every) == 49  # of 100 serial numbers those of the same sex, without its own


@pytest.mark.parametrize(
    ("kind", "value", "pattern"),
    [
        ("account", "0002177052", "000[1-9][0-9]+"),
        ("account", "AC-40000-123456", "AC-40000-[1-9][0-9]{5}"),
        ("iban", "NL91 ABNA 0417 1643 00", "NL[0-9]{2} ABNA 0[1-9][0-9 ]+"),
        ("iban", "CH93 0076 2011 6238 5295 7", "CH[0-9]{2} 0076 2[0-9 ]+"),
        ("iban", "EE38 2200 2210 2014 5685", "EE[0-9]{2} 2200 [0-9 ]+"),
        ("iban", "MT84MALT011000012345MTLCAST001S", "MT[0-9]{2}MALT0110000[0-9]{5}MTLCAST00[0-9]S"),
        ("id-number", "529.982.247-25", r"[0-9]{3}\.[0-9]{3}\.[0-9]{2}7-[0-9]{2}"),
        ("id-number", "93.05.18-223.61", r"93\.05\.18-2[0-9]{2}\.[0-9]{2}"),
        ("id-number", "920214-1089317", "920214-108[0-9]{2}1[0-9]"),
        ("CREDITCARDNUMBER", "4111111111111111", "41111111[0-9]{8}"),
        ("DATEOFBIRTH", "1980-02-13", "1980-[0-9]{2}-[0-9]{2}"),
        ("token", "b3f1c2d4e5f64a7b8c9d0e1f2a3b4c5d", "[0-9a-f]{12}4[0-9a-f]{3}8[0-9a-f]{15}"),
        ("email", "anna.smith85@mail.example", r"[a-z]+\.[a-z]+85@mail\.example"),
    ],
)
def test_what_any_model_expects_is_kept(kind: str, value: str, pattern: str) -> None:
    """Else values that were never trained on rank first: zeros, regions, orders, check digits."""
    drawn = alternatives(kind, value, 40)
    assert len(drawn) >= 19 and all(re.fullmatch(pattern, text) for text in drawn)
    assert re.fullmatch(pattern, value)


@pytest.mark.parametrize(
    ("kind", "value", "is_uneven"),
    [
        ("postcode", "80331", True),
        ("account", "8033172", False),
        ("email", "sk8r123@mail.example", True),
        ("email", "user483920@mail.example", False),
    ],
)
def test_short_numbers_are_not_equally_likely(kind: str, value: str, is_uneven: bool) -> None:
    assert find_value_format(kind, value, {}).is_uneven is is_uneven


@pytest.mark.parametrize("value", ["44.362.315-K", "4111111111111112", "20091331"])
def test_a_code_has_no_alternatives_with_check_digits_or_dates(value: str) -> None:
    """Else they have other alternatives, and the value is no draw from them."""
    for other in alternatives("order", value, 300):
        assert find_value_format("order", other, {}).choices == (
            find_value_format("order", value, {}).choices
        )
