"""Find dates of birth in text and in fields: calendar dates next to a word that means birth.

The module covers English, German, French, Spanish, Italian, Portuguese, Dutch, Swedish, Danish,
Norwegian, Finnish, Polish, Chinese, Japanese and Korean, and years 1900 to 2099 of the common era.
"""

from __future__ import annotations

import datetime
import re
import unicodedata
from collections.abc import Iterator
from functools import cache

# CLDR's names of the months in the languages above, wide and abbreviated, stand-alone and in a
# date: Babel 2.19, Locale(language).months["format" and "stand-alone"]["wide" and "abbreviated"].
# No name belongs to two months.
_MONTH_NAMES = (
    "ene enero gen gennaio jan jän jänner janeiro januar januari january janv janvier sty styczeń "
    "stycznia tammi tammikuu tammikuuta",
    "feb febbraio febrero februar februari february fev fevereiro févr février helmi helmikuu "
    "helmikuuta lut lutego luty",
    "maalis maaliskuu maaliskuuta maart mar marca march mars marts marzec marzo março mrt mär märz",
    "abr abril apr april aprile avr avril huhti huhtikuu huhtikuuta kwi kwiecień kwietnia",
    "mag maggio mai maio maj maja may mayo mei touko toukokuu toukokuuta",
    "cze czerwca czerwiec giu giugno juin jun june junho juni junio kesä kesäkuu kesäkuuta",
    "heinä heinäkuu heinäkuuta juil juillet jul julho juli julio july lip lipca lipiec lug luglio",
    "ago agosto août aug august augusti augustus elo elokuu elokuuta sie sierpień sierpnia",
    "sep sept september septembre septiembre set setembro settembre syys syyskuu syyskuuta wrz "
    "wrzesień września",
    "loka lokakuu lokakuuta oct october octobre octubre okt oktober ott ottobre out outubro paź "
    "październik października",
    "lis listopad listopada marras marraskuu marraskuuta nov november novembre novembro noviembre",
    "dec december des desember dez dezember dezembro dic dicembre diciembre déc décembre gru "
    "grudnia grudzień joulu joulukuu joulukuuta",
)


def _list_written_forms(name: str) -> set[str]:
    """Return spellings of a name in composed and decomposed Unicode, with and without accents."""
    decomposed = unicodedata.normalize("NFD", name)
    return {
        name,
        decomposed,
        "".join(sign for sign in decomposed if not unicodedata.combining(sign)),
    }


_MONTHS: dict[str, int] = {}
for _month, _names in enumerate(_MONTH_NAMES, 1):
    for _name in _names.split():
        _MONTHS |= dict.fromkeys(_list_written_forms(_name), _month)

# Words about a person, never a part of a longer word.
_BORN = (
    r"born|d\.\s?o\.\s?b\.?|geboren(?: wurden?(?: (?:er|sie|ich|wir))?)?|geb\.|née?|né\(e\)|né·e"
    r"|nacid[oa]|nacid[oa]\(a\)|naci[óo]|nat[oa]|nascid[oa]|nasceu|född"
    r"|født|synty(?:nyt|i)|urodzon[yaeą]|urodził(?:a)? się|ur\."
)
# Words for a field, also as a part of a name such as patientBirthDate or patient_dob.
_FIELD = (
    r"dob|birth(?:[ _-]?(?:day|date))?|date[ _-]?of[ _-]?birth|geb(?:urts|\.?[ -]?)datum"
    r"|geburtstag|(?:date|lieu et date) de naissance"
    r"|fecha[ _](?:de[ _])?nacimiento|f\. ?nac(?:\.|imiento)|nascimento(?= ?:)"
    r"|data[ _]di[ _]nascita|data[ _]de[ _]nascimento|geboortedatum"
    r"|födelse(?:datum|dag)|fødsels(?:dato|dag)|syntymä(?:aika|päivä)|data[ _]urodzenia"
    r"|出生(?:日期|年月日|于|於)?|生日|生于|生於|生年月日|誕生日|생년월일|생일|출생(?:일)?"
)
_DAY = r"(?:0?[1-9]|[12][0-9]|3[01])"
_YEAR = r"(?:19|20)[0-9]{2}"
_NUMBER = r"[0-9]{1,2}"
_NAME = rf"(?:{'|'.join(sorted(_MONTHS, key=len, reverse=True))})(?![^\W\d_])\.?"
_ORDINAL = r"(?:st|nd|rd|th|er|\.?[º°ª]|\.|:na|:e)?"
# Year, month and day, numbered by notation; a and b are day and month in either order.
_DATE = (
    rf"(?P<date>(?P<y1>{_YEAR})(?P<s1>[-/.] ?)(?P<m1>{_NUMBER})[-/.] ?(?P<d1>{_DAY})"
    rf"|(?P<y2>{_YEAR})(?P<m2>[01][0-9])(?P<d2>[0-3][0-9])"
    rf"|(?P<a>{_NUMBER})(?P<s3>[-/. ]|\. )(?P<b>{_NUMBER})(?P=s3)(?P<y3>{_YEAR}|[0-9]{{2}})"
    rf"|(?P<d4>{_DAY}){_ORDINAL}(?: (?:of|de|di)|,)?[ -]?(?P<m4>{_NAME})(?:,? (?:de |del |do "
    rf")?|-)(?P<y4>{_YEAR})"
    rf"|(?P<m5>{_NAME}) (?P<d5>{_DAY}){_ORDINAL},? (?P<y5>{_YEAR})"
    rf"|(?P<y6>{_YEAR}) ?[年년] ?(?P<m6>{_NUMBER}) ?[月월] ?(?P<d6>{_DAY}) ?[日일号號]?)(?![0-9])"
)
# A part of each date, found fast.
_DIGITS = re.compile(rf"{_YEAR}|{_NUMBER}(?:[-/. ]|\. ){_NUMBER}(?:[-/. ]|\. )[0-9]{{2}}")
_PLACE = (
    r"(?:in|à|en|a|em|te|i|w) (?-i:[A-ZÀ-ÖØ-ÞŁŚŻ])[\w'’-]*(?:[ "
    r"-](?-i:[A-ZÀ-ÖØ-ÞŁŚŻ])[\w'’-]*){0,2},? "
)
_JOINED = (
    r"(?:(?:in|on|am|op|den|le|el|il|em|a|i|is|was|the|dnia|w dniu|un|d[ií]a|no "
    r"dia)(?!\w)[\W_]{0,3}"
    r"|[于於は은는이] ?|l['’])"
)
_FORMAT = r"(?: ?\([^()0-9]{1,20}\))?"  # DOB (dd/mm/yyyy)
_WORD = rf"(?:(?<![^\W\d_])(?:{_BORN})|(?:{_FIELD}))"
_WORD_AND_DATE = (
    rf"(?:{_WORD}|{unicodedata.normalize('NFD', _WORD)}){_FORMAT}[\W_]{{0,6}}"
    rf"(?:{_PLACE})?(?:{_JOINED}){{0,2}}{_DATE}"
)
_DATE_AND_WORD = rf"(?<![0-9]){_DATE} ?(?:生まれ|出生|生(?![产產成命活])|(?:에 ?)?(?:출생|태어)|생)"


@cache  # compiling takes longer than searching most data
def _compile_patterns() -> tuple[re.Pattern[str], ...]:
    return tuple(re.compile(p, re.IGNORECASE) for p in (_WORD_AND_DATE, _DATE_AND_WORD))


def find_birth_date_places(text: str) -> Iterator[tuple[int, int]]:
    """Yield (start, end), the characters of each date of birth; the text must have ASCII digits."""
    if not _DIGITS.search(text):
        return
    for pattern in _compile_patterns():
        for match in pattern.finditer(text):
            if _is_existing_date(match):
                yield match.span("date")


def _is_existing_date(match: re.Match[str]) -> bool:
    parts = {}
    for name, value in match.groupdict().items():
        if value is not None and name != "date":
            parts[name[0]] = value
    if "a" in parts:  # day or month first: both are possible
        return _is_calendar_date(parts["y"], parts["a"], parts["b"]) or _is_calendar_date(
            parts["y"], parts["b"], parts["a"]
        )
    return _is_calendar_date(parts["y"], parts["m"], parts["d"])


def _is_calendar_date(year: str, month: str, day: str) -> bool:
    # A year of two digits may belong to either century: 1900 had no 29 February.
    if len(year) == 4:
        full_year = int(year)
    else:
        full_year = 2000 + int(year)
    if month.isdigit():
        month_number = int(month)
    else:
        month_number = _MONTHS[month.rstrip(".").lower()]
    try:
        datetime.date(full_year, month_number, int(day))
    except ValueError:
        return False
    return True
