"""Find national, bank and card numbers in text: patterns select candidates, check digits decide.

`python-stdnum` provides most checks. This module adds checks for valid numbers that stdnum 2.2
rejects: Chinese numbers of people older than their district's code, Korean numbers since October
2020, and Swedish coordination numbers.
"""

from __future__ import annotations

import datetime
import importlib
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import cache, partial

# A number ends with its signs, even if a letter of another script follows.
_START = r"(?<![0-9A-Za-z])(?<![0-9][-.])"
_END = r"(?![0-9A-Za-z])(?![-.][0-9])"
_DAY = r"(?:0[1-9]|[12][0-9]|3[01])"
_MONTH = r"(?:0[1-9]|1[0-2])"
_SEX_DIGIT_1900 = "1256"  # of a Korean number
_KOREAN_WITHOUT_CHECK = datetime.date(2020, 10, 5)


def _is_stdnum_valid(module: str, number: str, **options: bool) -> bool:
    check: Callable[..., bool] = importlib.import_module(f"stdnum.{module}").is_valid
    return check(re.sub("[ .]", "", number), **options)


def get_birth_date(module: str, number: str) -> datetime.date | None:
    """Return the date of birth in a number of this module of stdnum; None if it has none."""
    date: datetime.date | None = importlib.import_module(f"stdnum.{module}").get_birth_date(number)
    return date


def _is_chinese(number: str) -> bool:
    """Return whether a number has the check digit and a date as in Chinese identity numbers.

    Unlike stdnum, this check does not require that the district's code existed in the year of
    birth, because many people were born before their district got its code.
    """
    from stdnum.cn import ric

    digits = number.replace(" ", "").upper()
    return digits[-1] == ric.calc_check_digit(digits) and _is_date(
        digits[6:10], digits[10:12], digits[12:14]
    )


def _is_korean(number: str) -> bool:
    """Return whether a text is a Korean resident number.

    A number with a valid check digit always is. Some numbers have no check digit: those of people
    born since October 2020, whose last digits are random, and possibly those of foreigners (sex
    digit 5 to 8), because their date of issue is unknown. Such a number counts if it has a hyphen
    and its date is valid.
    """
    from stdnum.kr import rrn

    if rrn.is_valid(number, allow_future=False):
        return True
    digits = number.replace("-", "")
    century = "19" if digits[6] in _SEX_DIGIT_1900 else "20"
    if digits == number or not _is_date(century + digits[:2], digits[2:4], digits[4:6]):
        return False
    born = datetime.date(int(century + digits[:2]), int(digits[2:4]), int(digits[4:6]))
    return born <= datetime.date.today() and (born >= _KOREAN_WITHOUT_CHECK or digits[6] in "5678")


def _is_swedish(number: str) -> bool:
    """Return whether a Swedish personal or coordination number is valid.

    In a coordination number, 60 is added to the day.
    """
    from stdnum import luhn
    from stdnum.se import personnummer

    if personnummer.is_valid(number.replace(" ", "")):
        return True
    digits = re.sub("[-+ ]", "", number)
    year = digits[-10:-8]
    month = digits[-8:-6]
    day = int(digits[-6:-4]) - 60
    centuries = (digits[:2],) if len(digits) == 12 else ("19", "20")
    return luhn.is_valid(digits[-10:]) and any(
        _is_date(century + year, month, str(day)) for century in centuries
    )


def _is_date(year: str, month: str, day: str) -> bool:
    with suppress(ValueError):
        return (
            1800
            <= datetime.date(int(year), int(month), int(day)).year
            <= datetime.date.today().year
        )
    return False


_OWN_CHECKS: dict[str, Callable[[str], bool]] = {
    # Including the temporary numbers 900 to 999.
    "is_finnish": partial(_is_stdnum_valid, "fi.hetu", allow_temporary=True),
    "is_swedish": _is_swedish,
    "is_korean": _is_korean,
    "is_chinese": _is_chinese,
}


def _get_check(name: str) -> Callable[[str], bool]:
    """Return the check function of this name, from this module or from stdnum."""
    return _OWN_CHECKS.get(name) or partial(_is_stdnum_valid, name)


# Pattern and check of numbers with a distinctive notation, two check digits, or a date and one
# check digit: of nine digits in a row with a single check digit every tenth would pass. Weaker
# numbers count only next to their name.
_CHECKS: tuple[tuple[str, str], ...] = (
    (r"[0-9]{3}-[0-9]{2}-[0-9]{4}", "us.ssn"),
    (r"(?:[0-9]{8}|[0-9]{2}\.[0-9]{3}\.[0-9]{3})-?[A-Z]", "es.dni"),
    (r"[XYZ]-?(?:[0-9]{7}|[0-9]\.[0-9]{3}\.[0-9]{3})-?[A-Z]", "es.nie"),
    (
        r"[A-Z]{3} ?[A-Z]{3} ?[0-9LMNPQRSTUV]{2}[A-Z][0-9LMNPQRSTUV]{2} "
        r"?[A-Z][0-9LMNPQRSTUV]{3}[A-Z]",
        "it.codicefiscale",
    ),
    (
        r"[1278] ?[0-9]{2} ?(?:0[1-9]|1[0-2]|20|3[0-9]|4[0-2]|[5-9][0-9]) ?[0-9][0-9AB] ?[0-9]{3} "
        r"?[0-9]{3} ?[0-9]{2}",
        "fr.nir",
    ),
    (
        r"756(?P<gap>[. ]?)[0-9]{4}(?P=gap)[0-9]{4}(?P=gap)[0-9]{2}",
        "ch.ssn",
    ),
    (
        r"[0-9]{3}\.[0-9]{3}\.[0-9]{3}-[0-9]{2}|[0-9]{9}-[0-9]{2}",
        "br.cpf",
    ),
    (
        rf"[0-9]{{2}}(?P<gap>[. ]?)(?:[024][1-9]|[135][0-2]|[24]0)(?P=gap){_DAY}[- ]?[0-9]{{3}}[-. "
        rf"]?[0-9]{{2}}",
        "be.ssn",
    ),
    (r"[0-9]{6}[-+A-FU-Y][0-9]{3}[0-9A-Y]", "is_finnish"),
    (r"(?:19|20)[0-9]{10}|(?:[0-9]{2})?[0-9]{6}[-+][0-9]{4}", "is_swedish"),
    (rf"[0-9]{{2}}{_MONTH}{_DAY}-?[1-8][0-9]{{6}}", "is_korean"),
    (r"[0-9]{6} ?[0-9]{5}", "no.fodselsnummer"),
    (r"[0-9]{11}", "pl.pesel"),
    (r"[1-9][0-9]{10}", "tr.tckimlik"),
    (rf"{_DAY}{_MONTH}[0-9]{{2}}-[0-2][0-9]{{4}}", "lv.pvn"),
    (rf"{_DAY}{_MONTH}[0-9]{{2}}[ -]?[0-9]{{5}}", "gr.amka"),
    (rf"[1-6][0-9]{{2}}{_MONTH}{_DAY}[0-9]{{4}}", "ee.ik"),
    (rf"[1-8][0-9]{{2}}{_MONTH}{_DAY}[0-9]{{6}}", "ro.cnp"),
    (r"[0-9]{6}/[0-9]{4}", "cz.rc"),
    (r"[0-9]-[0-9]{4}-[0-9]{5}-[0-9]{2}-[0-9]", "th.pin"),
    (r"[0-9]{1,2}\.[0-9]{3}\.[0-9]{3}-[0-9K]", "cl.rut"),
    (
        rf"[A-Z]{{4}}[0-9]{{2}}{_MONTH}{_DAY}[HM][A-Z]{{5}}[0-9A-Z][0-9]",
        "mx.curp",
    ),
    (
        r"(?:1[1-5]|2[1-3]|3[1-7]|4[1-6]|5[0-4]|6[1-5]|71|8[1-3])[0-9]{4}"
        r"(?P<gap> ?)(?:18|19|20)[0-9]{6}(?P=gap)[0-9]{3}[0-9X]",
        "is_chinese",
    ),
)
_NAME_END = r"[\W_]{0,4}(?:(?:n[.ºo°]{0,2}|br\.?|№) ?)?"  # signs, and "number" in short
_NAMED_CHECKS: tuple[tuple[str, str], ...] = (
    (rf"\boib{_NAME_END}(?P<number>[0-9]{{11}})", "hr.oib"),
    (
        rf"(?<!\w)(?:α\.?φ\.?μ\.?|afm){_NAME_END}(?P<number>[0-9]{{9}})",
        "gr.vat",
    ),
    (
        rf"(?<!\w)(?:ת[.\"״]{{0,2}}ז\.?|תעודת[ -]זהות|מספר[ -]זהות|teudat[ -]zehut){_NAME_END}"
        r"(?P<number>[0-9]{8}-?[0-9])",
        "il.idnr",
    ),
    (
        rf"(?<!\w)(?:рнокпп|іпн){_NAME_END}(?P<number>[0-9]{{10}})",
        "ua.rntrc",
    ),
    (
        r"\bcpf[\W_]{0,4}(?:n[.ºo°]{0,2} ?)?(?P<number>[0-9]{11})",
        "br.cpf",
    ),
    (
        r"\b(?:personnummer|pers\.?nr|samordningsnummer)[\W_]{0,4}(?P<number>[0-9]{6}[ -]?[0-9]{4})",  # noqa: E501
        "is_swedish",
    ),
)
_NUMBERS = (
    *((f"{_START}(?P<number>{pattern}){_END}", name) for pattern, name in _CHECKS),
    *((pattern + _END, name) for pattern, name in _NAMED_CHECKS),
)


@cache
def _compile_number_checks() -> list[tuple[re.Pattern[str], Callable[[str], bool]]]:
    """Return the pattern and the check of each kind of number."""
    return [(re.compile(pattern, re.I), _get_check(name)) for pattern, name in _NUMBERS]


def find_id_number_places(text: str) -> Iterator[tuple[int, int]]:
    """Yield (start, end) of each national number; the text must have ASCII digits."""
    for pattern, is_valid in _compile_number_checks():
        for match in pattern.finditer(text):
            if is_valid(match["number"].upper()):
                yield match.span("number")


@cache
def _compile_notations() -> list[tuple[re.Pattern[str], str]]:
    """Return the pattern of each kind of number without its name, and the name of its check."""
    notations = []
    for pattern, name in (*_CHECKS, *_NAMED_CHECKS):
        number = re.sub(r"^.*\(\?P<number>(.*)\)$", r"\1", pattern)
        notations.append((re.compile(number, re.I), name))
    return notations


def list_id_number_checks(number: str) -> Iterator[tuple[str, Callable[[str], bool]]]:
    """Yield (name, check function) for each kind of national number that `number` may be.

    The most certain kind comes first. The number must have ASCII digits.
    """
    for pattern, name in _compile_notations():
        if pattern.fullmatch(number) and (check := _get_check(name))(number.upper()):
            yield name, check


# By the name of its check: the number of redrawn characters at the end of a national number, and
# the position, counted from the end, whose parity gives the sex (0: none). A date with its century,
# a district or an order of issue comes before them. If a number of births follows a date, its first
# digit, or its first zeros, are kept, too: the numbers are given in order, and small days do not
# reach 999. An Italian and a Mexican number derive from the name.
REDRAWN_CHARACTERS: Mapping[str, tuple[int, int]] = {
    "us.ssn": (7, 0),
    "es.dni": (7, 0),
    "es.nie": (7, 0),
    "fr.nir": (5, 0),
    "ch.ssn": (10, 0),
    "br.cpf": (11, 0),
    "be.ssn": (5, 3),
    "is_finnish": (4, 2),
    "is_swedish": (4, 2),
    "is_korean": (7, 0),
    "no.fodselsnummer": (5, 3),
    "pl.pesel": (5, 2),
    "tr.tckimlik": (9, 0),
    "gr.amka": (5, 2),
    "ee.ik": (4, 0),
    "ro.cnp": (4, 0),
    "lv.pvn": (4, 0),
    "cz.rc": (4, 0),
    "th.pin": (8, 0),
    "cl.rut": (7, 0),
    "is_chinese": (4, 2),
    "hr.oib": (11, 0),
    "gr.vat": (8, 0),
    "il.idnr": (7, 0),
    "ua.rntrc": (5, 2),
}
# Numbers whose redrawn characters tell the century of the date, too.
WITH_CENTURY = ("be.ssn", "no.fodselsnummer")
MOST_ORDER_DIGITS = 4
# Numbers that may have no check digit: the places to draw. A Korean number tells the province, and
# counts births in a quarter.
REPLACED_PLACES = {"us.ssn": range(-6, 0), "is_korean": (-4, -3, -1)}
REGION_PLACE = {"br.cpf": -3}  # place of a digit in the number that tells the region of issue
CHECK_DIGITS = {"br.cpf": 2, "fr.nir": 2, "no.fodselsnummer": 2, "be.ssn": 2, "tr.tckimlik": 2}


_IBAN_START = re.compile(r"(?<![0-9A-Za-z])[A-Za-z]{2}[0-9]{2}(?=[ .-]?[0-9A-Za-z])")
_IBAN_REST = re.compile(r"[0-9A-Za-z]+")
_IBAN_CHARACTERS = range(15, 35)


def find_iban_places(text: str) -> Iterator[tuple[int, int]]:
    """Yield (start, end) of each IBAN, with or without a space, hyphen or dot between groups."""
    from stdnum import iban

    for match in _IBAN_START.finditer(text):
        group = _IBAN_REST.match(text, match.start())
        number = ""
        # The text after it may look like more of it: the country's length and the checksum decide
        # its end.
        while group and len(number) + len(group[0]) < _IBAN_CHARACTERS.stop:
            number += group[0]
            end = group.end()
            if len(number) in _IBAN_CHARACTERS and iban.is_valid(number.upper()):
                yield match.start(), end
                break
            if text[end : end + 1] in ("-", " ", "."):
                group = _IBAN_REST.match(text, end + 1)
            else:
                group = None


# First digits of the cards that are issued, and how many digits they have: an IMEI has Luhn's check
# digit too.
_CARDS = (
    (r"4", (16, 19)),  # Visa; those with 13 digits are no longer valid
    (r"5[1-5]|222[1-9]|22[3-9]|2[3-6]|27[01]|2720", (16,)),  # Mastercard
    (r"3[47]", (15,)),  # American Express
    (r"30[0-5]|3095|36|3[89]", (14, 16, 17, 18, 19)),  # Diners Club
    (r"35(?:2[89]|[3-8])", (16, 17, 18, 19)),  # JCB
    (r"6011|64[4-9]|65|62|60|8[12]", (16, 17, 18, 19)),  # Discover, UnionPay, RuPay
    (r"220[0-4]", (16, 17, 18, 19)),  # Mir
    (r"50|5[6-8]|6[0379]", (16, 17, 18, 19)),  # Maestro
)
_ISSUED = tuple((re.compile(start), lengths) for start, lengths in _CARDS)
_GROUPS = (
    r"[0-9]{4}([ .-])[0-9]{4}\1[0-9]{4}\1[0-9]{4}(?:\1[0-9]{1,3})?|[0-9]{4}([ "
    r".-])[0-9]{6}\2[0-9]{4,5}"
    r"|[0-9]{6}([ .-])[0-9]{13}|[0-9]{14,19}"
)
_CARD = re.compile(f"{_START}(?:{_GROUPS}){_END}")


def find_card_number_places(text: str) -> Iterator[tuple[int, int]]:
    """Yield (start, end) of each card number.

    A card number has a length and leading digits that an issuer uses, and a valid Luhn check digit.
    """
    from stdnum import luhn

    for match in _CARD.finditer(text):
        digits = re.sub("[^0-9]", "", match[0])
        is_issued = False
        for start, lengths in _ISSUED:
            is_issued |= bool(start.match(digits)) and len(digits) in lengths
        if is_issued and luhn.is_valid(digits):
            yield match.span()
