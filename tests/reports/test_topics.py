"""Every section is one entry of the module that makes it, and no entry can be missed."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from auditor.conclusions.secret_details import SecretDetails
from auditor.core.result import AuditResult
from auditor.reports import markdown, overview, table_of_contents
from auditor.reports.blocks import Paragraph
from auditor.reports.topics import DECIDE, Topic

ALL = table_of_contents.list_topics()


def test_ids_and_turns_are_given_once() -> None:
    ids = [topic.id for topic in ALL]
    assert len(set(ids)) == len(ids) and "verdict" not in ids  # the page's own
    turns = sorted(topic.turn for topic in ALL if topic.turn)
    assert turns == list(range(1, len(turns) + 1))
    for part in table_of_contents.PARTS:
        places = [topic.place for topic in ALL if topic.part == part]
        assert places and places == list(range(1, len(places) + 1))


def test_a_new_section_is_one_entry(monkeypatch: pytest.MonkeyPatch, result: AuditResult) -> None:
    def said(id: str, place: int, turn: int) -> Topic:
        return Topic(
            id,
            f"About {id}",
            lambda m: [Paragraph(f"{m.result.seed} told of {id}")],
            DECIDE,
            place,
            turn,
        )

    monkeypatch.setattr(
        overview, "TOPICS", (*overview.TOPICS, said("weather", 98, 0), said("harvest", 99, 14))
    )
    table_of_contents.list_topics.cache_clear()
    try:
        page = dict(table_of_contents.build_page_document(result).parts)[DECIDE]
        assert [section.id for section in page][-2:] == ["weather", "harvest"]
        text = markdown.render_markdown_report(result)
        assert f"{result.seed} told of harvest" in text and "weather" not in text
    finally:
        monkeypatch.undo()
        table_of_contents.list_topics.cache_clear()


def test_whatever_has_something_to_say_is_shown(
    result: AuditResult, secret_by_secret: Callable[..., SecretDetails]
) -> None:
    details = secret_by_secret(result, 30, length=4)
    shown = {
        section.id for section in table_of_contents.build_page_document(result, details).sections
    }
    # no other run, no text, no canary, no membership probe, no bracket asked for, no comparison of
    # several defenses, no generations held against what was trained on, nothing to be forgotten, no
    # personal data, no forms
    nothing = {
        "since",
        "personal",
        "private",
        "exposure",
        "bracket",
        "membership",
        "roc",
        "frontier",
        "untargeted",
        "people",
        "unlearning",
        "forms",
    }
    assert {topic.id for topic in ALL} - shown == nothing
    brief = {section.id for section in table_of_contents.build_markdown_document(result).sections}
    nothing = {
        "personal",
        "private",
        "membership",
        "frontier",
        "untargeted",
        "unlearning",
        "people",
        "forms",
    }
    assert brief == {topic.id for topic in ALL if topic.turn} - nothing
