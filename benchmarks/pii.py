"""Personal data in text, by kind: what checksums and numbering plans recognise, and what the data mark themselves.

Names and addresses follow no rule and are found only where the data mark them. Nothing is downloaded, and no model
guesses. Of what is recognised `phonenumbers` and `python-stdnum` decide; the patterns here only say where to look.
Presidio's recognisers were tried: spaCy comes with them (290 MB, loaded for the first e-mail address), and that of
e-mail addresses asks the network for the list of domains. Knows text; no tokens, rows or models.
"""

from __future__ import annotations

import datetime
import importlib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

from auditor.core.errors import AuditError
from auditor.core.nouns import Mark

EMAIL, PHONE, IBAN, CARD, BIRTH, ID = KINDS = ("email", "phone", "iban", "card", "birth-date", "id-number")
_EXTRA = ("phonenumbers", "stdnum")
INSTALL = "pip install 'audit-lm[pii]'"


@dataclass(frozen=True)
class Span:
    """The characters start:end of a text are of this kind."""

    kind: str
    start: int
    end: int


def has_pii_packages() -> bool:
    return all(find_spec(name) for name in _EXTRA)


class PiiRecognisers:
    """What finds personal data that nobody has marked. Raises AuditError without the extra, or for no such region."""

    def __init__(self, regions: Sequence[str] = ()) -> None:
        """regions: where phone numbers without a country code are from, as DE; without any none of these is found."""
        if not has_pii_packages():
            raise AuditError(f"expected {' and '.join(_EXTRA)} installed, to find personal data by: {INSTALL}")
        import phonenumbers

        unknown = [region for region in regions if region not in phonenumbers.SUPPORTED_REGIONS]
        if unknown:
            raise AuditError(f"expected --phone-region as two capitals of a country, as DE or US, got {unknown[0]!r}")
        self._regions: tuple[str | None, ...] = tuple(regions) or (None,)
        self._ids = tuple((re.compile(pattern), importlib.import_module(f"stdnum.{name}")) for name, pattern in _IDS)

    def recognised_spans(self, text: str) -> Iterator[Span]:
        """What has the surest check comes first; spans may overlap."""
        yield from _email_spans(text)
        if not any(character.isdigit() for character in text):
            return
        yield from _iban_spans(text)
        yield from _card_number_spans(text)
        yield from self._id_number_spans(text)
        yield from _birth_date_spans(text)
        yield from self._phone_number_spans(text)

    def _id_number_spans(self, text: str) -> Iterator[Span]:
        for pattern, number in self._ids:
            yield from (Span(ID, *m.span()) for m in pattern.finditer(text) if number.is_valid(m[0]))

    def _phone_number_spans(self, text: str) -> Iterator[Span]:
        """Numbers that a numbering plan has, as they are written in running text."""
        if not _PHONE.search(text):
            return
        import phonenumbers

        for region in self._regions:
            for match in phonenumbers.PhoneNumberMatcher(text, region):
                yield Span(PHONE, match.start, match.end)


def find_pii_spans_in_text(
    text: str, marks: Iterable[Mark] = (), recognisers: PiiRecognisers | None = None
) -> list[Span]:
    """In the order of the text. Of two that overlap one stays: a mark, of marks the longer, then the surest check."""
    longest_first = sorted(marks, key=lambda mark: -len(mark[1]))
    marked = [Span(kind, *place) for kind, said in longest_first for place in whole_word_places_in_text(said, text)]
    taken: list[Span] = []
    for span in (*marked, *(recognisers.recognised_spans(text) if recognisers else ())):
        if all(span.end <= other.start or other.end <= span.start for other in taken):
            taken.append(span)
    return sorted(taken, key=lambda span: span.start)


def whole_word_places_in_text(said: str, text: str) -> Iterator[tuple[int, int]]:
    """Where a text stands in another, and is no part of a longer word or number there."""
    start = text.find(said)
    while start >= 0:
        end = start + len(said)
        # At 0 that is text[-1:0], which is empty.
        before, behind = text[start - 1 : start], text[end : end + 1]
        if not (before.isalnum() and said[0].isalnum()) and not (behind.isalnum() and said[-1].isalnum()):
            yield start, end
        start = text.find(said, start + 1)


# --- where to look, and what decides --------------------------------------------------------------------------------

_ATOM, _LABEL = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+", r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_EMAIL = re.compile(rf"{_ATOM}(?:\.{_ATOM})*@(?:{_LABEL}\.)+[A-Za-z]{{2,63}}(?![A-Za-z0-9-])")
_IBAN = re.compile(r"\b[A-Z]{2}[0-9]{2}(?: ?[A-Z0-9]{1,4}){3,8}\b")
_CARD = re.compile(r"(?<![0-9-])[2-6][0-9]{3}([ -]?)(?:[0-9]{4}\1[0-9]{4}\1[0-9]{4}|[0-9]{6}\1[0-9]{5})(?![0-9-])")
_PHONE = re.compile(r"(?:[0-9][^0-9A-Za-z]{0,3}){6}[0-9]")

# National numbers that one can tell by how they are written, or that have two check digits or a date and one: of nine
# digits in a row with a single check digit every tenth would do.
_IDS = (
    ("us.ssn", r"(?<![0-9-])[0-9]{3}-[0-9]{2}-[0-9]{4}(?![0-9-])"),
    ("es.dni", r"\b[0-9]{8}-?[A-Z]\b"),
    ("es.nie", r"\b[XYZ]-?[0-9]{7}-?[A-Z]\b"),
    ("it.codicefiscale", r"\b[A-Z]{6}[0-9LMNPQRSTUV]{2}[A-Z][0-9LMNPQRSTUV]{2}[A-Z][0-9LMNPQRSTUV]{3}[A-Z]\b"),
    ("fr.nir", r"\b[12] ?[0-9]{2} ?[01][0-9] ?[0-9][0-9AB] ?[0-9]{3} ?[0-9]{3} ?[0-9]{2}\b"),
    ("ch.ssn", r"\b756\.[0-9]{4}\.[0-9]{4}\.[0-9]{2}\b"),
    ("br.cpf", r"\b[0-9]{3}\.[0-9]{3}\.[0-9]{3}-[0-9]{2}\b"),
    ("be.nn", r"\b[0-9]{2}\.[0-9]{2}\.[0-9]{2}-[0-9]{3}\.[0-9]{2}\b"),
    ("fi.hetu", r"\b[0-9]{6}[-+A-FU-Y][0-9]{3}[0-9A-Y]\b"),
    ("se.personnummer", r"(?<![0-9-])(?:[0-9]{2})?[0-9]{6}[-+][0-9]{4}(?![0-9-])"),
    ("kr.rrn", r"(?<![0-9-])[0-9]{6}-[1-8][0-9]{6}(?![0-9-])"),
    ("no.fodselsnummer", r"(?<![0-9-])[0-9]{6} ?[0-9]{5}(?![0-9-])"),
    ("pl.pesel", r"(?<![0-9-])[0-9]{11}(?![0-9-])"),
    ("cn.ric", r"\b[1-8][0-9]{16}[0-9X]\b"),
)

_DAY, _YEAR = r"(?:0?[1-9]|[12][0-9]|3[01])", r"(?:19|20)[0-9]{2}"
_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_MONTH = rf"(?:{'|'.join(_MONTHS)})[a-z]*\.?"
# Year, month and day, numbered by the way of writing them; a and b are day and month in either order.
_BORN = re.compile(
    r"\b(?:born|birth(?:day|date|[ _-]date)?|date[ _]of[ _]birth|d\.?o\.?b\b\.?|geboren|geb\.|née? le|nacid[oa])"
    r"[^0-9A-Za-z]{0,6}(?:(?:in|on|am|el|il|is|was)\b[^0-9A-Za-z]{0,3})?"
    rf"(?P<date>(?P<y1>{_YEAR})[-/.](?P<m1>[0-9]{{1,2}})[-/.](?P<d1>{_DAY})"
    rf"|(?P<a>[0-9]{{1,2}})[-/. ](?P<b>[0-9]{{1,2}})[-/. ](?P<y2>{_YEAR})"
    rf"|(?P<d3>{_DAY})\.? (?P<m3>{_MONTH}),? (?P<y3>{_YEAR})"
    rf"|(?P<m4>{_MONTH}) (?P<d4>{_DAY}),? (?P<y4>{_YEAR}))(?![0-9])",
    re.IGNORECASE,
)


def _email_spans(text: str) -> Iterator[Span]:
    if "@" in text:
        yield from (Span(EMAIL, *m.span()) for m in _EMAIL.finditer(text))


def _iban_spans(text: str) -> Iterator[Span]:
    from stdnum import iban

    for match in _IBAN.finditer(text):
        said = match[0]  # what stands behind it may look like more of it: its length and checksum decide
        while said and not iban.is_valid(said):
            said = said.rpartition(" ")[0]
        if said:
            yield Span(IBAN, match.start(), match.start() + len(said))


def _card_number_spans(text: str) -> Iterator[Span]:
    from stdnum import luhn

    for match in _CARD.finditer(text):
        if luhn.is_valid(re.sub("[ -]", "", match[0])):
            yield Span(CARD, *match.span())


def _birth_date_spans(text: str) -> Iterator[Span]:
    """Dates that exist, behind a word that says what they are."""
    for match in _BORN.finditer(text):
        if _is_existing_birth_date(match):
            yield Span(BIRTH, *match.span("date"))


def _is_existing_birth_date(match: re.Match[str]) -> bool:
    said = {name: value for name, value in match.groupdict().items() if value is not None}
    if "a" in said:  # day or month first: either may be meant
        return _is_calendar_date(said["y2"], said["a"], said["b"]) or _is_calendar_date(
            said["y2"], said["b"], said["a"]
        )
    year, month, day = (next(v for name, v in said.items() if re.fullmatch(f"{part}[0-9]", name)) for part in "ymd")
    return _is_calendar_date(year, month, day)


def _is_calendar_date(year: str, month: str, day: str) -> bool:
    number = int(month) if month.isdigit() else _MONTHS.index(month[:3].lower()) + 1
    try:
        datetime.date(int(year), number, int(day))
    except ValueError:
        return False
    return True
