"""Ways of writing personal data, each in a text: which are recognised, and which need a mark. A
page is made of it."""

# ruff: noqa: E501  (a table: a row a line)

from __future__ import annotations

import random
from dataclasses import dataclass

from auditor.benchmarks.data.identity_numbers import find_card_number_places, find_id_number_places

REGIONS = ("US", "DE", "JP", "KR", "CN")


@dataclass(frozen=True)
class WrittenExample:
    """What a text says between `before` and `after`. source: of the format; kind: None if it is not
    recognised."""

    country: str
    what: str
    source: str
    kind: str | None
    example: str
    before: str = "see "
    after: str = ", thanks"

    @property
    def text(self) -> str:
        return self.before + self.example + self.after


def _examples(
    country: str, what: str, source: str, kind: str | None, *written: str
) -> list[WrittenExample]:
    """Return a row for each way of writing; one may name what is around it as
    `before|example|after`."""
    rows = []
    for text in written:
        before, example, after = text.split("|") if "|" in text else ("see ", text, ", thanks")
        rows.append(WrittenExample(country, what, source, kind, example, before, after))
    return rows


N_RANDOM = 1000  # numbers of each length


def false_alarm_shares() -> list[tuple[str, str, str]]:
    """Return by digits the share of N_RANDOM random numbers that are taken for a national number,
    and for a card.

    To a whole percent, as some checks refuse a birth in the future: the exact count changes from
    year to year.
    """
    shares = []
    for n_digits in (9, 10, 11, 12, 13, 15, 16, 19):
        drawn = random.Random(n_digits)
        text = ", ".join("".join(drawn.choices("0123456789", k=n_digits)) for _ in range(N_RANDOM))
        counts = (
            len(set(places(text))) for places in (find_id_number_places, find_card_number_places)
        )
        percent = (
            round(100 * count / N_RANDOM) if 100 * count >= N_RANDOM else 0 for count in counts
        )
        shares.append((f"{n_digits}", *(f"{share}%" if share else "below 1%" for share in percent)))
    return shares


EXAMPLES = (
    *_examples(
        "any", "e-mail", "RFC 5322, RFC 6531", "email",
        "jane.doe+x@mail.example.com", "email=|jo@mail.example|&id=7", "https://mail.example/?to=|jo@mail.example|",
        "'|jo@mail.example|'", "메일은 |u123@example.com|으로", "邮箱|123456@qq.com|已登记", "\\\\n|jo@mail.example|\\\\n", "_|jo@mail.example|_", "see |ユーザー@例え.jp|, thanks", "ติดต่อ|jo@mail.example|ได้",
        "müller@bücher.example", "иван@пример.рф", "用户@例子.中国", "o'brien@mail.example", "|jo@mail.example|Tel", "|JO@MAIL.EXAMPLE|,", "|jo@mail.example|Phone: 7",
    ),
    *_examples("any", "e-mail, quoted local part", "RFC 5322", None, '"jane doe"@mail.example', "jo@[192.0.2.1]"),
    *_examples("any", "telephone, with its country code", "ITU E.164", "phone", "+49 30 1234567", "电话|+8613812345678|转接"),
    *_examples("US", "telephone, with --phone-region", "NANP", "phone", "(212) 555-0143", "212-555-0143"),
    *_examples("JP", "telephone, with --phone-region", "Japan's numbering plan", "phone", "電話|０３－３２１２－２３２３|です"),
    *_examples("KR", "telephone, with --phone-region", "Korea's numbering plan", "phone", "전화 |010-1234-5678|로"),
    *_examples(
        "any", "IBAN", "ISO 13616", "iban",
        "DE89 3704 0044 0532 0130 00", "DE89370400440532013000", "de89370400440532013000",
        "DE89-3704-0044-0532-0130-00", "DE89.3704.0044.0532.0130.00", "账户|DE89370400440532013000|。",
    ),
    *_examples(
        "any", "card", "ISO/IEC 7812", "card",
        "4111 1111 1111 1111", "4111-1111-1111-1111", "4111.1111.1111.1111", "4111111111111111", "3782 822463 10005",
        "3056 930902 5904", "30569309025904", "6304939304310009610", "カード|４１１１－１１１１－１１１１－１１１１|です",
    ),
    *_examples("any", "IMEI of a phone", "3GPP TS 23.003", None, "352099001761481", "35-209900-176148-1"),
    *_examples(
        "any", "date of birth, in numbers", "ISO 8601, CLDR", "birth-date",
        "born |1980-02-03|", "DOB: |3/2/1980|", "dob=|03/02/80|&", '"birthDate": "|1980-02-03|"', "dob |19800203|",
        "DOB (dd/mm/yyyy): |03/02/1980|",
    ),
    *_examples("en", "date of birth", "CLDR", "birth-date", "born on |February 3rd, 1980|", "born the |3rd of March 1980|"),
    *_examples("de", "date of birth", "CLDR", "birth-date", "geboren am |3. März 1980|", "Geburtsdatum: |3. 3. 1980|", "Geb.-Datum: |03.03.1980|", "geboren wurde sie am |3. Jänner 1980|"),
    *_examples("fr", "date of birth", "CLDR", "birth-date", "née le |1er août 1980|", "née à Paris le |3 févr. 1980|", "née le |8 aout 1980|", "ne\u0301e le |12 de\u0301cembre 1980|"),
    *_examples("es", "date of birth", "CLDR", "birth-date", "nació el |3 de marzo de 1980|", "nacida el |3/3/1980|", "F. nacimiento: |03/03/1980|", "nacido el día |1.º de mayo de 1980|", "nació un |3 de marzo de 1980|"),
    *_examples("it", "date of birth", "CLDR", "birth-date", "nata a Roma il |3 luglio 1980|", "data di nascita: |3/7/1980|", "nato l'|8 marzo 1980|", "nata il |1° marzo 1980|"),
    *_examples("pt", "date of birth", "CLDR", "birth-date", "nascido em |3 de março de 1980|", "nascido no dia |3 de março de 1980|", "Nascimento: |03/03/1980|"),
    *_examples("nl", "date of birth", "CLDR", "birth-date", "geboren op |3 mrt. 1980|", "geboortedatum: |3-3-1980|", "geb.datum: |03-03-1980|"),
    *_examples("sv", "date of birth", "CLDR", "birth-date", "född den |3 maj 1980|"),
    *_examples("da, nb", "date of birth", "CLDR", "birth-date", "født |3. oktober 1980|"),
    *_examples("fi", "date of birth", "CLDR", "birth-date", "syntynyt |3. maaliskuuta 1980|", "syntyi |3. toukokuuta 1980|", "syntymäpäivä |3.3.1980|"),
    *_examples("pl", "date of birth", "CLDR", "birth-date", "urodzona |3 marca 1980|"),
    *_examples("zh", "date of birth", "CLDR", "birth-date", "出生于|1980年2月3日|。", "他|1980年2月3日|出生", "出生於|1980年3月3號|"),
    *_examples("ja", "date of birth", "CLDR", "birth-date", "生年月日：|1980年2月3日|", "|1980年2月3日|生まれ"),
    *_examples("ko", "date of birth", "CLDR", "birth-date", "생년월일 |1980년 2월 3일|", "|1980년 2월 3일|생", "|1980년 3월 3일|에 태어났다"),
    *_examples(
        "any", "date of birth, without its year, of an era, or of another kind of date", "", None,
        "born on |3 March|", "f. |3. mars 1980|", "s. |3. maaliskuuta 1980|", "昭和55年2月3日|1980年2月3日|開業", "on |1980-02-03|, paid",
    ),
    *_examples("US", "SSN", "Social Security Administration", "id-number", "536-90-4399"),
    *_examples("US", "SSN without hyphens, ITIN: no check digit", "Social Security Administration", None, "536904399", "912-90-3456"),
    *_examples("ES", "DNI", "Ministerio del Interior", "id-number", "54362315K", "54362315-K", "54.362.315-K", "dni |54362315k|,"),
    *_examples("ES", "NIE", "Ministerio del Interior", "id-number", "X5253868R", "X-5253868-R"),
    *_examples("IT", "codice fiscale", "Agenzia delle Entrate", "id-number", "RSSMRA85T10A562S", "RSS MRA 85T10 A562S", "rssmra85t10a562s"),
    *_examples("FR", "NIR", "INSEE", "id-number", "2 95 10 99 126 111 93", "295109912611193"),
    *_examples("CH", "AHV", "Zentrale Ausgleichsstelle", "id-number", "756.9217.0769.85", "756 9217 0769 85", "7569217076985"),
    *_examples("BR", "CPF", "Receita Federal", "id-number", "390.533.447-05", "390533447-05", "CPF: |39053344705|,"),
    *_examples("BR", "CPF in digits, not next to its name", "Receita Federal", None, "39053344705"),
    *_examples("BE", "national number", "Rijksregister", "id-number", "85.07.30-033.28", "85073003328", "85 07 30 033 28"),
    *_examples("BE", "BIS number", "Rijksregister", "id-number", "98.47.28-997.65", "01490700185"),
    *_examples("FI", "henkilötunnus", "DVV", "id-number", "131052-308T", "131052-308t", "番号|131052-308T|号"),
    *_examples("FI", "henkilötunnus for a time (900 to 999)", "DVV", "id-number", "020190-900B"),
    *_examples("SE", "personnummer", "Skatteverket", "id-number", "880320-0016", "19880320-0016", "198803200016", "personnummer |8803200016|,"),
    *_examples("SE", "samordningsnummer", "Skatteverket", "id-number", "701063-2391", "197010632391"),
    *_examples("NO", "fødselsnummer, D-number", "Skatteetaten", "id-number", "151086 95088", "15108695088"),
    *_examples("PL", "PESEL", "Ministerstwo Cyfryzacji", "id-number", "44051401359"),
    *_examples("EE, LT", "isikukood, asmens kodas", "Estonian and Lithuanian registers", "id-number", "46106260603"),
    *_examples("RO", "CNP", "DEPABD", "id-number", "5711106075961"),
    *_examples("LV", "personas kods, of before July 2017", "PMLP", "id-number", "280611-25558"),
    *_examples("CZ, SK", "rodné číslo of ten digits with its slash", "Act 133/2000", "id-number", "205923/2021"),
    *_examples("TH", "citizen number with hyphens", "DOPA", "id-number", "6-8219-14265-69-8"),
    *_examples("CL", "RUT with dots", "SII", "id-number", "27.557.402-3"),
    *_examples("MX", "CURP", "RENAPO", "id-number", "RAYJ691008HCLSFP07"),
    *_examples("TR", "T.C. kimlik no.", "Nüfus ve Vatandaşlık İşleri", "id-number", "17291716060", "TC kimlik no |17291716060|'dir"),
    *_examples("GR", "ΑΜΚΑ", "ΗΔΙΚΑ", "id-number", "01013099997", "ΑΜΚΑ: |010130-99997|,"),
    *_examples("GR", "ΑΦΜ next to its name: a tenth of all numbers pass its check", "ΑΑΔΕ", "id-number", "ΑΦΜ: |094259216|,", "Α.Φ.Μ. |094259216|,", "AFM |094259216|,"),
    *_examples("HR", "OIB next to its name: a tenth of all numbers pass its check", "Porezna uprava", "id-number", "OIB: |33392005961|,", "OIB br. |33392005961|,"),
    *_examples("IL", "teudat zehut next to its name: a tenth of all numbers pass its check", "Population and Immigration Authority", "id-number", "ת.ז. |123456782|,", "תעודת זהות: |12345678-2|,", 'ת״ז |123456782|'),
    *_examples("UA", "РНОКПП, ІПН next to its name: a tenth of all numbers pass its check", "State Tax Service", "id-number", "РНОКПП: |1759013776|,", "ІПН |1759013776|."),
    *_examples("HR, IL, UA", "the same, not next to their names", "", None, "33392005961", "123456782", "1759013776"),
    *_examples("HU", "adóazonosító, TAJ: python-stdnum 2.2 has companies' numbers only", "", None, "8071592153", "123 456 788"),
    *_examples("TW, CA", "national number, SIN: one check digit and no date", "", None, "J123194871", "281 203 778"),
    *_examples("KR", "resident number with a check digit", "Ministry of the Interior and Safety", "id-number", "900101-1234568"),
    *_examples("KR", "resident number since October 2020, without one", "Ministry of the Interior and Safety", "id-number", "주민번호 |210105-3123456|입니다"),
    *_examples("KR", "resident number without one, of people born before", "Ministry of the Interior and Safety", None, "900101-1234567"),
    *_examples("CN", "resident identity number", "GB 11643-1999", "id-number", "11010519491231002X", "11010519491231002x", "身份证号|11010519491231002X|，"),
    *_examples("CN", "the same, older than its district's code", "GB/T 2260", "id-number", "号码为|422801195303070026|电话"),
    *_examples("CN", "resident identity number of 15 digits: no check digit", "GB 11643-1989", None, "110105491231002"),
    *_examples("GB", "National Insurance number: no check digit", "HMRC", None, "QQ 12 34 56 C"),
    *_examples("NL, PT, IN, JP", "BSN, NIF, Aadhaar, My Number: one check digit and no date", "", None, "111222333", "2341 2341 2346"),
)  # fmt: skip
