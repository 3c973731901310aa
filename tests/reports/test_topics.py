"""Every section is one entry, and no entry can be missed: a module's topics stand in a part, and a part on the page."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path

import pytest

from auditor.core.result import AuditResult
from auditor.records.details import Details
from auditor.reports import contents, markdown
from auditor.reports.blocks import Paragraph
from auditor.reports.topics import Topic

ALL = [topic for _, topics in contents.PARTS for topic in topics]


def test_every_topic_of_a_module_stands_in_a_part() -> None:
    """A list of topics that no part takes would be sections that nobody ever sees."""
    files = Path(contents.__file__).parent.glob("*.py")
    modules = [importlib.import_module(f"auditor.reports.{file.stem}") for file in files]
    held = [topic for module in modules for topic in getattr(module, "TOPICS", ())]
    assert held and {topic.id for topic in held} == {topic.id for topic in ALL} and len(held) == len(ALL)


def test_ids_and_turns_are_given_once() -> None:
    ids = [topic.id for topic in ALL]
    assert len(set(ids)) == len(ids) and "verdict" not in ids  # the page's own
    turns = sorted(topic.turn for topic in ALL if topic.turn)
    assert turns == list(range(1, len(turns) + 1))


def test_a_new_section_is_one_entry(monkeypatch: pytest.MonkeyPatch, result: AuditResult) -> None:
    def said(id: str, turn: int) -> Topic:
        return Topic(id, f"About {id}", lambda m: [Paragraph(f"{m.result.seed} told of {id}")], turn)

    (name, first), *others = contents.PARTS
    added = ((name, (*first, said("weather", 0), said("harvest", 14))), *others)
    monkeypatch.setattr(contents, "PARTS", added)
    page = dict(contents.page(result).parts)[name]
    assert [section.id for section in page][-2:] == ["weather", "harvest"]
    text = markdown.render(result)
    assert f"{result.seed} told of harvest" in text and "weather" not in text


def test_whatever_has_something_to_say_is_shown(result: AuditResult, secret_by_secret: Callable[..., Details]) -> None:
    details = secret_by_secret(result, 30, length=4)
    shown = {section.id for section in contents.page(result, details).sections}
    # no other run, no text, no canary, no membership probe, no bracket asked for, no comparison of several defenses,
    # no generations held against what was trained on, nothing to be forgotten, no personal data
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
        "unlearning",
    }
    assert {topic.id for topic in ALL} - shown == nothing
    brief = {section.id for section in contents.document(result).sections}
    nothing = {"personal", "private", "membership", "frontier", "untargeted", "unlearning"}
    assert brief == {topic.id for topic in ALL if topic.turn} - nothing
