"""Find personal data in text, by checksums, numbering plans and marks in the data.

Names and addresses follow no rule, so they are found only if they are marked. Nothing is
downloaded, and no model guesses. Patterns select candidates by characters, not by words, because in
Chinese, Japanese, Korean or Thai a letter may follow directly. Then `phonenumbers` and
`python-stdnum` check each candidate. Presidio 2.2 was measured on the same examples
(docs/reference/personal-data.md).
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec

import regex

from auditor.benchmarks.data.birth_dates import find_birth_date_places
from auditor.benchmarks.data.identity_numbers import (
    find_card_number_places,
    find_iban_places,
    find_id_number_places,
)
from auditor.benchmarks.data.words import find_places
from auditor.core.errors import AuditError
from auditor.core.nouns import Mark

EMAIL, PHONE, IBAN, CARD, BIRTH, ID = KINDS = (
    "email",
    "phone",
    "iban",
    "card",
    "birth-date",
    "id-number",
)
_EXTRA = ("phonenumbers", "stdnum")
INSTALL = "pip install 'audit-lm[pii]'"


@dataclass(frozen=True)
class Span:
    """Describe a span of personal data: its kind, and its characters start:end in a text."""

    kind: str
    start: int
    end: int


def has_pii_packages() -> bool:
    return all(map(find_spec, _EXTRA))


class PiiRecognisers:
    """Find personal data in text without marks.

    Raise AuditError if the optional packages are missing or a region is unknown.
    """

    def __init__(self, regions: Sequence[str] = ()) -> None:
        """Set the regions (such as DE) to assume for phone numbers without a country code.

        If there is no region, only numbers with a country code are found.
        """
        if not has_pii_packages():
            raise AuditError(
                f"expected {' and '.join(_EXTRA)} installed, to find personal data by: {INSTALL}"
            )
        import phonenumbers

        unknown = []
        for region in regions:
            if region not in phonenumbers.SUPPORTED_REGIONS:
                unknown.append(region)
        if unknown:
            raise AuditError(
                "expected --phone-region as the two-letter code of a country, such as DE or US, "
                f"got {unknown[0]!r}"
            )
        self._regions: tuple[str | None, ...] = tuple(regions) or (None,)

    def recognised_spans(self, text: str) -> Iterator[Span]:
        """Yield spans of personal data, which may overlap: the most reliable kinds first."""
        plain = normalise_ascii(text)
        for start, end in find_email_places(plain):
            yield Span(EMAIL, start, end)
        if not any(map(str.isdigit, plain)):
            return
        for kind, find_number_places in _NUMBERS.items():
            for start, end in find_number_places(plain):
                yield Span(kind, start, end)
        yield from self._phone_number_spans(plain)

    def _phone_number_spans(self, text: str) -> Iterator[Span]:
        """Yield spans of phone numbers of a numbering plan, in any notation common in text."""
        if not _PHONE.search(text):
            return
        import phonenumbers

        for region in self._regions:
            for match in phonenumbers.PhoneNumberMatcher(text, region):
                yield Span(PHONE, match.start, match.end)


def find_pii_spans(
    text: str, marks: Iterable[Mark] = (), recognisers: PiiRecognisers | None = None
) -> list[Span]:
    """Return the spans of personal data in a text, in order, without overlaps.

    If spans overlap, marks are preferred to checked numbers, longer marks to shorter ones, and more
    certain checks to less certain ones. A mark that never occurs as a whole word is found inside
    words, for example before a particle or a genitive ending.
    """
    candidates = []
    for kind, mark in sorted(marks, key=lambda mark: -len(mark[1])):
        for start, end in find_places(mark, text):
            candidates.append(Span(kind, start, end))
    if recognisers:
        candidates += recognisers.recognised_spans(text)
    spans: list[Span] = []
    for span in candidates:
        if all(span.end <= other.start or other.end <= span.start for other in spans):
            spans.append(span)
    return sorted(spans, key=lambda span: span.start)


def normalise_ascii(text: str) -> str:
    """Replace digits, hyphens, spaces and full-width characters by ASCII, keeping the length."""
    if text.isascii():
        return text
    return text.translate(_build_ascii_signs())


def find_email_places(text: str) -> Iterator[tuple[int, int]]:
    """Yield (start, end) of each e-mail address, without surrounding punctuation."""
    at = text.find("@")
    while at >= 0:
        begin = max(0, at - _LONGEST_LOCAL - 1)
        domain = _ASCII_DOMAIN.match(text, at + 1)
        local = _LOCAL.search(text, begin, at)
        if domain is None and (domain := _DOMAIN.match(text, at + 1)):
            local = local or _UNSPACED_LOCAL.search(text, begin, at)
        if local and domain and at - local.start() <= _LONGEST_LOCAL:
            yield _find_address_begin(text, local.start(), domain.end()), domain.end()
        at = text.find("@", at + 1)


def _find_address_begin(text: str, begin: int, end: int) -> int:
    """Return the start of an e-mail address.

    An escaped line end or a Markdown underscore before the address is skipped.
    """
    is_escape = text[begin - 1 : begin] == "\\" and text[begin] in "nrt"
    is_emphasis = text[begin] == "_" == text[end : end + 1]
    return begin + (is_escape or is_emphasis)


# --- patterns and their checks ---

_NUMBERS = {
    IBAN: find_iban_places,
    CARD: find_card_number_places,
    ID: find_id_number_places,
    BIRTH: find_birth_date_places,
}
_PHONE = regex.compile(r"(?:[0-9][^0-9A-Za-z]{0,3}){6}[0-9]")
_HYPHENS = "\u2010\u2011\u2012\u2013\u2014\u2212"
_SPACES = "\u00a0\u2007\u202f\u3000"


@cache  # looks at 130,000 characters
def _build_ascii_signs() -> dict[int, str]:
    """Return the ASCII sign of each digit, hyphen, space and full-width character, by its code."""
    signs = {code: unicodedata.normalize("NFKC", chr(code)) for code in range(0xFF01, 0xFF5F)}
    signs |= dict.fromkeys(map(ord, _HYPHENS), "-")
    signs |= dict.fromkeys(map(ord, _SPACES), " ")
    for code in range(0x80, 0x20000):
        digit = unicodedata.decimal(chr(code), None)
        if digit is not None:
            signs[code] = str(digit)
    return signs


# Letters of an address: Latin ones, or those of another script. In a script without spaces, and in
# Korean, which attaches particles, letters next to an address belong to the surrounding text unless
# the domain has them as well.
_LONGEST_LOCAL = 64  # characters before the @ (RFC 5321: octets)
_UNSPACED = r"\p{Han}\p{Hiragana}\p{Katakana}\p{Hangul}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}ー"
_LATIN = r"\p{Latin}\p{Mn}"
_OTHERS = rf"[\p{{L}}\p{{M}}]--[\p{{Latin}}{_UNSPACED}]"
_ALONE = _UNSPACED


def _local_part(letters: str) -> str:
    """Return a pattern for the part of an e-mail address before the @.

    letters: pattern for the allowed letters. The part does not start or end with punctuation.
    """
    atom = rf"(?:[[{letters}]0-9_+%-]|'(?=[{letters}]))+"
    return rf"[[{letters}]0-9_](?:{atom})?(?:\.{atom})*\Z"


def _labels(letters: str) -> str:
    return rf"[[{letters}]0-9](?:[[{letters}]0-9-]{{0,61}}[[{letters}]0-9])?"


_LOCAL = regex.compile(f"{_local_part(_LATIN)}|{_local_part(_OTHERS)}", regex.V1)
_UNSPACED_LOCAL = regex.compile(_local_part(_ALONE), regex.V1)
_DOMAIN_END = r"(?![\p{Latin}0-9]|-[A-Za-z0-9])"
# A capital after small letters begins a word attached to the address, as in `jo@mail.exampleTel`.
_TOP_AND_END = rf"(?:[a-z]{{2,63}}(?=[A-Z])|[A-Za-z]{{2,63}}{_DOMAIN_END})"
_ASCII_DOMAIN = regex.compile(rf"(?:{_labels('A-Za-z')}\.)+{_TOP_AND_END}", regex.V1)
# Without spaces only the country's name marks the end of such a domain.
_COUNTRIES = "中国|中國|香港|台湾|台灣|澳门|澳門|新加坡|한국|ไทย|ລາວ"
_TOP = rf"[{_LATIN}]{{2,63}}|[{_OTHERS}]{{2,63}}|{_COUNTRIES}|[{_ALONE}]{{2,63}}"
_DOMAIN = regex.compile(
    rf"(?:(?:{_labels(_LATIN)}|{_labels(_OTHERS)}|{_labels(_ALONE)})\.)+(?:{_TOP}){_DOMAIN_END}",
    regex.V1,
)
