"""The page of results is the print of its data, whose commands exist."""

from __future__ import annotations

import datetime
import re
import shlex

from tests.docs import results
from tests.docs.test_pages import check_unrun

ROWS = results.read_rows()
_NUMBER = re.compile(r"[-+−]?\d*\.?\d+(?:e-?\d+)?")


def test_the_page_is_the_print_of_its_data() -> None:
    shown = results.PAGE.read_text(encoding="utf-8")
    assert shown == results.print_page(ROWS), "python -m tests.docs.results writes it anew"


def test_questions_are_in_their_order() -> None:
    asked = list(dict.fromkeys(row["question"] for row in ROWS))
    assert asked == list(results.QUESTIONS)


def test_every_command_would_be_read() -> None:
    """Options exist; modules that are named are there, and know the options they are given."""
    for command in {row["command"] for row in ROWS if results.is_command(row["command"])}:
        check_unrun(shlex.split(command), command)
    others = {row["version"] for row in ROWS if row["command"].partition(" ")[0].endswith(".py")}
    assert others == {results.OLD_SCRIPTS}  # of a script that is gone, its commit


def test_every_result_lies_in_its_interval() -> None:
    for row in ROWS:
        assert row["value"] and row["page"] and datetime.date.fromisoformat(row["date"])
        if not row["interval"]:
            continue
        low, high = read_numbers(re.sub(r"(?<=\d)–", " ", row["interval"]))
        values = [value for value in read_numbers(row["value"]) if low <= value <= high]
        assert values, row


def read_numbers(text: str) -> list[float]:
    plain = text.replace(",", "").replace("−", "-")
    return [float(number) for number in _NUMBER.findall(plain)]


def test_evidence_stays_short() -> None:
    """Words of the results and of three stories."""
    words = {
        page.stem: len(page.read_text(encoding="utf-8").split())
        for page in results.FOLDER.glob("*.md")
    }
    assert set(words) == {"results", "claims", "real-lab", "frontier"}
    assert max(count for page, count in words.items() if page != "results") <= 1_000
    assert sum(words.values()) <= 8_000
