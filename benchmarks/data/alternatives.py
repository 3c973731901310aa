"""Draw alternatives to a piece of personal data: other values of the same format.

An alternative keeps the parts that identify an issuer, date or holder, such as a card's first eight
digits, a country and bank, an area code, or a year and sex, and zeros that fill up a number. All
other parts are drawn uniformly, with matching check digits, in the notation of the true value.
"""

from __future__ import annotations

import datetime
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import product

import numpy as np

from auditor.benchmarks.data import pii
from auditor.benchmarks.data.birth_dates import find_birth_date_places
from auditor.benchmarks.data.identity_numbers import (
    CHECK_DIGITS,
    MOST_ORDER_DIGITS,
    REDRAWN_CHARACTERS,
    REGION_PLACE,
    REPLACED_PLACES,
    WITH_CENTURY,
    find_card_number_places,
    find_iban_places,
    find_id_number_places,
    get_birth_date,
    list_id_number_checks,
)
from auditor.core.canary_space import CanarySpace
from auditor.core.errors import AuditError

# Formats of marked values that fit no described format.
HASH = "hash"
CODE = "code"
_DIGITS = "0123456789"
_HEX = "0123456789abcdef"
_HASH_LENGTHS = (32, 40, 56, 64, 96, 128)  # hexadecimal digits of MD5, SHA-1 and SHA-2
_TRIES = 2_000  # draws for each alternative: two check digits pass one time in a hundred


@dataclass(frozen=True)
class ValueFormat:
    """Describe the format of a piece of personal data, and generate values of this format.

    kind: the kind of personal data, such as `iban`.
    choices: the options for each part that may vary, in the order of the text.
    finish: builds a text from one option per part; returns None if the value is invalid. Different
        options give different texts.
    has_one_length: whether all texts have the same number of characters.
    is_quick: whether `finish` is fast enough to list thousands of values.
    is_uneven: whether some values are more frequent than others: names, and short numbers, which
        people choose (PINs) or the text tells (postcodes).
    """

    kind: str
    choices: tuple[Sequence[str], ...]
    finish: Callable[[Sequence[str]], str | None]
    has_one_length: bool = True
    is_quick: bool = True
    is_uneven: bool = False

    @property
    def n_choices(self) -> int:
        """The number of combinations of options, including those that are invalid values."""
        return math.prod(map(len, self.choices))

    def list_alternatives(
        self, value: str, count: int, enumerate_below: int, noise: np.random.Generator
    ) -> list[str]:
        """Return distinct values other than `value`.

        If there are few combinations of options, return all values. Few means at most
        `enumerate_below`; for a format that is not quick, at most `count` + 1. Otherwise return at
        most `count` random values.
        """
        if self.n_choices <= (enumerate_below if self.is_quick else count + 1):
            texts = map(self.finish, product(*self.choices))
            return [text for text in texts if text is not None and text != value]
        alternatives = dict[str, None]()
        for _ in range(_TRIES * count):
            parts = []
            for options in self.choices:
                parts.append(options[int(noise.integers(len(options)))])
            text = self.finish(parts)
            if text is not None and text != value:
                alternatives[text] = None
            if len(alternatives) == count:
                return list(alternatives)
        return list(alternatives)  # a format with fewer values: nearly all of them


class UnknownFormat(Exception):
    """Report that the format of a value is not defined."""


def find_value_format(
    kind: str, value: str, described: Mapping[str, CanarySpace], regions: Sequence[str] = ()
) -> ValueFormat:
    """Return the format of a value of personal data, in the value's notation.

    kind: the value's kind, such as `iban`. described: formats of the kinds that the data mark.
    regions: countries to assume for telephone numbers without a country code. Raise UnknownFormat
    if the format is unknown. Raise AuditError if the value does not match its described format.
    """
    if kind in described:
        return _detect_format(kind, value, described[kind])
    plain = pii.normalise_ascii(value)
    if plain != value:
        raise UnknownFormat(f"{kind} in signs of another script")
    by_kind: Mapping[str, Callable[[str], ValueFormat | None]] = {
        pii.CARD: _detect_card_format,
        pii.IBAN: _detect_iban_format,
        pii.ID: _detect_id_format,
        pii.PHONE: partial(_detect_phone_format, regions=regions),
        pii.EMAIL: _detect_email_format,
        pii.BIRTH: _detect_birth_date_format,
    }
    if find_format := by_kind.get(kind):
        value_format = find_format(value)
    else:
        value_format = _detect_marked_format(kind, value)
    if value_format is None:
        raise UnknownFormat(f"{kind} of a form that nobody has described")
    return value_format


def parse_described_formats(text: str) -> dict[str, CanarySpace]:
    """Parse `order=ORD-{digits:8};pin={digits:4}`, for example, into a dict from kind to format.

    Raise AuditError if the text is invalid.
    """
    formats = dict[str, CanarySpace]()
    for part in filter(None, text.split(";")):
        kind, equals, format = part.partition("=")
        if not (kind.strip() and equals and format):
            raise AuditError(
                f"expected formats as KIND=FORMAT;KIND=FORMAT, such as order=ORD-{{digits:8}}, got "
                f"{part!r}"
            )
        formats[kind.strip()] = CanarySpace(format)
    return formats


# --- formats made of the characters of the value ---


def _replace_free_characters(
    kind: str, value: str, free: Sequence[int], is_valid: Callable[[str], bool]
) -> ValueFormat:
    """Return a format that varies the characters of `value` at the positions `free`.

    A replacement has the same class as the character, such as digits. `is_valid` selects the valid
    texts. Few digits are uneven.
    """

    def finish(parts: Sequence[str]) -> str | None:
        text = _put_characters(value, free, parts)
        return text if is_valid(text) else None

    is_uneven = kind in (CODE, pii.EMAIL) and len(free) < _LEAST_RANDOM_DIGITS
    return ValueFormat(kind, _classify_characters(value, free), finish, is_uneven=is_uneven)


def _classify_character(character: str) -> str:
    if character.isdigit():
        return _DIGITS
    letters = "abcdefghijklmnopqrstuvwxyz"
    return letters if character.islower() else letters.upper()


def _put_characters(value: str, places: Sequence[int], parts: Sequence[str]) -> str:
    characters = list(value)
    for place, part in zip(places, parts, strict=True):
        characters[place] = part
    return "".join(characters)


def _get_characters(value: str, places: Sequence[int]) -> str:
    return "".join([value[place] for place in places])


def _classify_characters(value: str, places: Sequence[int]) -> tuple[str, ...]:
    return tuple(_classify_character(value[place]) for place in places)


def _list_places(value: str, is_wanted: Callable[[str], bool]) -> list[int]:
    return [place for place, character in enumerate(value) if is_wanted(character)]


def _detect_format(kind: str, value: str, space: CanarySpace) -> ValueFormat:
    if value not in space:
        raise AuditError(
            f"expected each {kind} that the data mark in the format {space.format!r}, got another "
            "text"
        )
    blocks = space.choice_blocks
    one_length = all(len(set(map(len, block))) == 1 for block in blocks)
    return ValueFormat(kind, blocks, lambda parts: space.common_prefix + "".join(parts), one_length)


_YEAR = re.compile("(?<![0-9])(?:19|20)[0-9]{2}(?![0-9])")
_LEAST_CODE_DIGITS = 3
_LEAST_RANDOM_DIGITS = 6  # fewer are often chosen, such as 1234, or known, such as a postcode


def _list_digits_except_years(text: str) -> list[int]:
    """Return the places of the digits in a text, except those of years, which a model expects."""
    years = set[int]()
    for match in _YEAR.finditer(text):
        years.update(range(*match.span()))
    return [place for place in _list_places(text, str.isdigit) if place not in years]


_PADDING = re.compile("(?<![0-9])0+|0{3,}")


def _list_free_digits(value: str, places: Sequence[int]) -> list[int]:
    """Return the places of digits, without zeros that fill up a number: first ones, 3 in a row."""
    number = _get_characters(value, places)
    padding = set[int]()
    for match in _PADDING.finditer(number):
        padding.update(range(*match.span()))
    return [p for i, p in enumerate(places) if i not in padding and number[i].isdigit()]


def _list_code_digits(code: str) -> list[int]:
    """Return the places of the digits that may vary, with a year only if too few others would.

    Of many digits, the first one does not vary, as it may tell the issuer or the age.
    """
    free = _list_free_digits(code, range(len(code)))
    without_years = sorted({*free} & {*_list_digits_except_years(code)})
    if len(without_years) >= _LEAST_CODE_DIGITS:
        free = without_years
    return free[len(free) > _LEAST_RANDOM_DIGITS :]


_CODE = re.compile(r"[A-Za-z]{0,8}[-_/#:. ]?[0-9][0-9 ./_-]{2,}[0-9](?:-?[A-Za-z])?")


def _detect_marked_format(kind: str, value: str) -> ValueFormat | None:
    """Return the format of a value of a kind that only the data know, by the value itself."""
    if any(find_birth_date_places(f"{kind}: {value}")):
        return _detect_birth_date_format(value)
    for find_format in (_detect_card_format, _detect_iban_format):
        if value_format := find_format(value):
            return value_format
    if (0, len(value)) in find_id_number_places(value):
        return _detect_id_format(value)
    return _detect_code_format(value)


# Texts like codes whose digits may not be any: IP addresses, coordinates.
_NO_CODE = re.compile(r"[0-9]{1,3}(?:\.[0-9]{1,3}){3}|[0-9]{1,3}\.[0-9]{4,}")
_UUID_LENGTH = 32
_UUID_PLACES = (12, 16)  # a UUID's version and variant


def _detect_code_format(value: str) -> ValueFormat | None:
    """Return the format of a hash, or of a code whose digits can be replaced by any others.

    At least 3 digits of a code vary; if 3 others do, a year is kept. Return None for any other
    value.
    """
    if len(value) in _HASH_LENGTHS and re.fullmatch("[0-9a-f]+|[0-9A-F]+", value):
        if value == value.lower():
            digits = [_HEX] * len(value)
        else:
            digits = [_HEX.upper()] * len(value)
        if len(value) == _UUID_LENGTH:
            for place in _UUID_PLACES:
                digits[place] = value[place]
        return ValueFormat(HASH, tuple(digits), "".join)
    free = _list_code_digits(value)
    if not _is_code(value) or len(free) < _LEAST_CODE_DIGITS:
        return None
    return _replace_free_characters(
        CODE, value, free, lambda text: _list_code_digits(text) == free and _is_code(text)
    )


def _is_code(text: str) -> bool:
    """Return whether a text has the form of a code, and not the form of another value."""
    if not _CODE.fullmatch(text) or _NO_CODE.fullmatch(text):
        return False
    checked = (find_card_number_places, find_iban_places, find_id_number_places)
    has_check = any((0, len(text)) in find_places(text) for find_places in checked)
    return not has_check and not any(find_birth_date_places(f"born {text}"))


# --- numbers with check digits ---


_ISSUER_DIGITS = 8  # of a card (ISO/IEC 7812:2017; six before)


def _detect_card_format(value: str) -> ValueFormat | None:
    from stdnum import luhn

    if list(find_card_number_places(value)) != [(0, len(value))]:
        return None
    *places, last = _list_places(value, str.isalnum)

    def finish(parts: Sequence[str]) -> str:
        text = _put_characters(value, places[_ISSUER_DIGITS:], parts)
        digits = _get_characters(text, places)
        return _put_characters(text, [last], [luhn.calc_check_digit(digits)])

    free = places[_ISSUER_DIGITS:]
    return ValueFormat(pii.CARD, (_DIGITS,) * len(free), finish)


# Characters of an account number that name the bank, and its branch, by country (ISO 13616's
# registry), and the type of the account: they are kept. Other countries keep eight.
_BANK_CHARACTERS = {
    "SA": 2,
    **dict.fromkeys(("BE", "SE", "FI", "LU", "AE"), 3),
    **dict.fromkeys(("EE", "NL", "DK", "NO", "CZ", "SK", "RO", "LV"), 4),
    **dict.fromkeys(("CH", "LI", "AT", "SI", "LT", "TR"), 5),
    "IL": 6,
    **dict.fromkeys(("HU", "GR", "HR"), 7),
    **dict.fromkeys(("DE", "ES", "PL", "PT"), 8),
    **dict.fromkeys(("FR", "GB", "IE", "BG"), 10),
    "IT": 11,
}
_MOST_BANK_CHARACTERS = 8
_WITH_OTHER_PARTS = ("BR", "IS")  # the owner's place or national number


def _detect_iban_format(value: str) -> ValueFormat | None:
    from stdnum import iban

    country = value[:2].upper()
    if country in _WITH_OTHER_PARTS or not iban.is_valid(re.sub("[ .-]", "", value).upper()):
        return None
    places = _list_places(value, str.isalnum)
    n_bank = _BANK_CHARACTERS.get(country, _MOST_BANK_CHARACTERS)
    own_check = _find_own_check(country, _get_characters(value, places)[4:])

    account = [p for p in places[4 + n_bank :] if p not in places[own_check]]
    free = _list_free_digits(value, account)

    def finish(parts: Sequence[str]) -> str | None:
        text = _put_characters(value, free, parts)
        number = _get_characters(text, places).upper()
        if own_check != _NO_CHECK:
            digits = _own_check_digits(country, number[4:])
            text = _put_characters(text, places[own_check], digits)
            number = _get_characters(text, places).upper()
        check = iban.calc_check_digits(number)
        valid = iban.is_valid(number[:2] + check + number[4:])
        if valid and _list_free_digits(text, account) == free:
            return _put_characters(text, places[2:4], check)
        return None

    return ValueFormat(pii.IBAN, _classify_characters(value, free), finish)


# The place of a country's check digits in an IBAN, as python-stdnum checks them.
_OWN_CHECK_OF_COUNTRY = {"ES": slice(12, 14), "BE": slice(14, 16)}
_NO_CHECK = slice(0)
# Remainder modulo 97 of every account number of a country. An IBAN uses the same modulus, so all of
# a country have the same check digits: a model expects FR76 without having seen the record.
_REMAINDERS = {
    **dict.fromkeys(("BI", "CG", "CM", "DJ", "FR", "GA", "MC", "MR", "TN"), 0),
    **dict.fromkeys(("BA", "ME", "MK", "PT", "RS", "SI", "ST", "TL", "XK"), 1),
}


def _find_own_check(country: str, account: str) -> slice:
    """Return the place of the national check digits in an IBAN, `_NO_CHECK` if they are unknown."""
    # A French account number may have letters, which count otherwise in an IBAN.
    if account.isdigit() and int(account) % 97 == _REMAINDERS.get(country):
        return slice(len(account) + 2, len(account) + 4)
    return _OWN_CHECK_OF_COUNTRY.get(country, _NO_CHECK)


def _own_check_digits(country: str, account: str) -> str:
    """Return the national check digits of an account number.

    These differ from the check digits of the IBAN.
    """
    if country in _REMAINDERS:
        return f"{97 + _REMAINDERS[country] - int(account[:-2]) * 100 % 97:02}"
    if country == "BE":
        return f"{int(account[:10]) % 97 or 97:02}"
    from stdnum.es import ccc

    digits: str = ccc.calc_check_digits(account)
    return digits


def _detect_id_format(value: str) -> ValueFormat | None:
    name, is_valid = next(list_id_number_checks(value), ("", lambda number: False))
    if name not in REDRAWN_CHARACTERS:
        return None
    n_free, sex = REDRAWN_CHARACTERS[name]
    places = _list_places(value, str.isalnum)
    n_check = CHECK_DIGITS.get(name, 1)
    order, check = places[-n_free:-n_check], places[-n_check:]
    is_order = len(order) <= MOST_ORDER_DIGITS
    n_zeros = _count_first_zeros(value, order)
    birth_date = get_birth_date(name, value) if name in WITH_CENTURY else None

    def is_of_format(text: str) -> bool:
        if is_order and _count_first_zeros(text, order) != n_zeros:
            return False
        same_sex = not sex or _is_odd(text[places[-sex]]) == _is_odd(value[places[-sex]])
        if not same_sex or next(list_id_number_checks(text), ("",))[0] != name:
            return False
        return name not in WITH_CENTURY or get_birth_date(name, text) == birth_date

    if name in REPLACED_PLACES:
        free = [places[i] for i in REPLACED_PLACES[name]]
        return _replace_free_characters(pii.ID, value, free, is_of_format)
    body = [
        p for p in order[max(1, n_zeros) * is_order :] if p != places[REGION_PLACE.get(name, 0)]
    ]
    # A Chinese check digit may be X, a Chilean check digit K; a letter is any of its class.
    endings = [*_list_check_endings(value, check, name)]

    def finish(parts: Sequence[str]) -> str | None:
        text = _put_characters(value, body, parts)
        for ending in endings:
            number = _put_characters(text, check, ending)
            if is_valid(number.upper()) and is_of_format(number):
                return number
        return None

    choices = _classify_characters(value, body)
    return ValueFormat(pii.ID, choices, finish, is_quick=False)


def _count_first_zeros(text: str, places: Sequence[int]) -> int:
    digits = _get_characters(text, places)
    return len(digits) - len(digits.lstrip("0"))


def _is_odd(character: str) -> bool:
    return character in "13579"


def _list_check_endings(value: str, places: Sequence[int], name: str) -> Iterator[Sequence[str]]:
    letters = {"is_chinese": "Xx", "cl.rut": "Kk", "is_finnish": "ABCDEFHJKLMNPRSTUVWXY"}
    letter_choices = letters.get(name, "")
    if value == value.lower():
        letter_choices = letter_choices.lower()
    classes: Sequence[str] = _classify_characters(value, places)
    if letter_choices:
        classes = [_DIGITS + "".join(dict.fromkeys(letter_choices))]
    yield from product(*classes)


_LINE_DIGITS = 6  # of a telephone number


def _detect_phone_format(value: str, regions: Sequence[str]) -> ValueFormat | None:
    import phonenumbers

    for region in regions or (None,):
        matches = list(phonenumbers.PhoneNumberMatcher(value, region))
        if len(matches) == 1 and (matches[0].start, matches[0].end) == (0, len(value)):
            break
    else:
        return None
    number = matches[0].number
    if number.extension:
        return None
    digits = _list_places(value, str.isdigit)
    n_national = len(str(number.national_number))
    n_free = min(_LINE_DIGITS, n_national - 2)
    type_of_value = phonenumbers.number_type(number)

    def is_of_format(text: str) -> bool:
        ending = "".join(text[place] for place in digits[-n_free:])
        national = int(str(number.national_number)[:-n_free] + ending)
        phone_number = phonenumbers.PhoneNumber(
            country_code=number.country_code,
            national_number=national,
            italian_leading_zero=number.italian_leading_zero,
            number_of_leading_zeros=number.number_of_leading_zeros,
        )
        return phonenumbers.number_type(phone_number) == type_of_value

    return _replace_free_characters(pii.PHONE, value, digits[-n_free:], is_of_format)


# --- addresses and dates ---


_LEAST_ADDRESS_DIGITS = 3


def _detect_email_format(value: str) -> ValueFormat | None:
    """Return the format of an e-mail address, or None.

    If there are enough digits before the @, without years, they vary; otherwise the names vary.
    """
    local = value.partition("@")[0]
    digits = _list_digits_except_years(local)
    if len(digits) >= _LEAST_ADDRESS_DIGITS:
        return _replace_free_characters(
            pii.EMAIL, value, digits, lambda text: _list_digits_except_years(text) == digits
        )
    parts = re.split(r"([^a-z]+)", local)
    choices: dict[int, Sequence[str]] = {}  # by the place of the name among the parts
    for i, part in enumerate(parts):
        if len(part) > 1 and part.isalpha():
            choices[i] = next((names for names in _load_names() if part in names), ())
    if not choices or not all(choices.values()) or local != local.lower():
        return None
    domain = value[len(local) :]

    def finish(names: Sequence[str]) -> str:
        text = list(parts)
        for i, name in zip(choices, names, strict=True):
            text[i] = name
        return "".join(text) + domain

    return ValueFormat(
        pii.EMAIL, tuple(choices.values()), finish, has_one_length=False, is_uneven=True
    )


@cache
def _load_names() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return first names, and last names that are not first names."""
    from faker.providers.person.en_US import Provider

    lists = (Provider.first_names, Provider.last_names)
    first, last = ({*map(str.lower, filter(str.isalpha, names))} for names in lists)
    return tuple(sorted(first)), tuple(sorted(last - first))


_MONTHS = [
    *("January", "February", "March", "April", "May", "June"),
    *("July", "August", "September", "October", "November", "December"),
]
_YEAR_FIRST = re.compile(
    r"(?P<year>[0-9]{4})(?P<sign>[-/.]?)(?P<a>[0-9]{1,2})(?P=sign)(?P<b>[0-9]{1,2})"
)
_YEAR_LAST = re.compile(
    r"(?P<a>[0-9]{1,2})(?P<sign>[-/.])(?P<b>[0-9]{1,2})(?P=sign)(?P<year>[0-9]{4})"
)
_DAY_FIRST = re.compile(r"(?P<day>[0-9]{1,2}) (?P<month>[A-Za-z]{3,9}) (?P<year>[0-9]{4})")
_MONTH_FIRST = re.compile(r"(?P<month>[A-Za-z]{3,9}) (?P<day>[0-9]{1,2}), (?P<year>[0-9]{4})")


def _detect_birth_date_format(value: str) -> ValueFormat | None:
    """Return the format of a date; its values are all days of that year in the date's notation."""
    date_class = _classify_date(value)
    if date_class is None or not any(find_birth_date_places(f"born {value}")):
        return None
    year = int(str(date_class[0]))
    start = datetime.date(year, 1, 1)
    n_days = (datetime.date(year + 1, 1, 1) - start).days
    notations = dict[str, None]()
    for day in range(n_days):
        notations |= dict.fromkeys(_list_date_spellings(start + datetime.timedelta(day), value))
    # Dates of another class have other alternatives, so they are not alternatives here.
    texts = tuple(text for text in notations if _classify_date(text) == date_class)
    if value not in texts:
        return None
    one_length = len(set(map(len, texts))) == 1
    return ValueFormat(pii.BIRTH, (texts,), lambda parts: parts[0], one_length)


def _list_date_spellings(day: datetime.date, value: str) -> Iterator[str]:
    """Yield spellings of a date, with day, month and year in any order.

    Each spelling consists of digits with the separator of `value`, or contains the month's name.
    """
    sign = next((character for character in value if character in "-/."), "")
    for pad in ("02", ""):
        number = f"{day.day:{pad}}"
        month = f"{day.month:{pad}}"
        yield sign.join((str(day.year), month, number))
        yield sign.join((number, month, str(day.year)))
        yield sign.join((month, number, str(day.year)))
        for name in (_MONTHS[day.month - 1], _MONTHS[day.month - 1][:3]):
            yield f"{number} {name} {day.year}"
            yield f"{name} {number}, {day.year}"


def _classify_date(text: str) -> tuple[object, ...] | None:
    """Return a tuple that is equal for dates of one year in one notation; None for no date.

    The tuple holds the year, the notation, the separator, the number of digits, and the order of
    day and month. "03/04/2020" leaves that order open; "13/04/2020" does not, and so gives a
    different tuple.
    """
    for pattern in (_YEAR_FIRST, _YEAR_LAST):
        if match := pattern.fullmatch(text):
            has_two_digits = len(match["a"]) == len(match["b"]) == 2
            if not (match["sign"] or has_two_digits):
                return None
            order = pattern is _YEAR_FIRST or (int(match["a"]) > 12, int(match["b"]) > 12)
            return match["year"], pattern, match["sign"], has_two_digits, order
    for pattern in (_DAY_FIRST, _MONTH_FIRST):
        if match := pattern.fullmatch(text):
            day = match["day"]
            # May is the same in full and abbreviated.
            is_full = match["month"] in _MONTHS
            is_short = match["month"] in {month[:3] for month in _MONTHS}
            return match["year"], pattern, is_full, is_short, day.startswith("0"), len(day)
    return None
