"""The first line of a report says what was audited: model, adapter and base, data, day, and version
of audit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from auditor.core.result import AuditResult
from auditor.reports import html, markdown, phrases, subject_line
from auditor.reports.screen import build_first_screen

OWN: dict[str, Any] = {"model": "/home/anna/out/chat", "data": "./private/mails.jsonl"}


def own(result: AuditResult, plan: dict[str, Any], **others: Any) -> AuditResult:
    return replace(result, plan=plan, benchmark=replace(result.benchmark, name="mails"), **others)


@pytest.mark.parametrize(
    ("plan", "others", "what"),
    [
        (OWN, {}, "out/chat with records of private/mails.jsonl"),
        (
            OWN,
            {"base": "org/base-7b"},
            "out/chat (adapter on org/base-7b) with records of private/mails.jsonl",
        ),
        (
            {**OWN, "base": r"C:\models\base"},
            {"weights": {"model/adapter_config.json": "0"}},
            "out/chat (adapter on models/base) with records of private/mails.jsonl",
        ),
        (
            {**OWN, "revision": "v2"},
            {"weights": {"model/adapter_config.json": "0"}},
            "out/chat (revision v2; an adapter) with records of private/mails.jsonl",
        ),
        (
            {"model": "openai:gpt-x", "canaries": "planted.json"},
            {},
            "openai:gpt-x with records of planted.json",
        ),
        (
            {
                "model": "Mine",
                "data": "DataFrame",
                "objects": {"model": "notebook.Mine", "data": "pandas.DataFrame"},
            },
            {},
            "a model given in Python (notebook.Mine) with records given in Python",
        ),
        ({}, {}, "a model that this record does not name with records of mails"),
    ],
)
def test_what_was_audited(
    result: AuditResult, plan: dict[str, Any], others: dict[str, Any], what: str
) -> None:
    assert (
        subject_line.audit_subject_line(own(result, plan, **others))
        == f"Privacy audit of {what}; 21 November 2025, audit 0.1.0"
    )


def test_of_the_lab(result: AuditResult) -> None:
    line = (
        "Privacy audit of the built-in lab model with synthetic records; 21 November 2025, audit "
        "0.1.0"
    )
    assert subject_line.audit_subject_line(replace(result, plan={})) == line


def test_an_only_model_is_titled_by_its_name() -> None:
    assert phrases.title_only_model("/home/anna/out/chat", "files") == "out/chat"
    assert phrases.title_only_model(None, "lab") == "Built-in lab model"
    assert phrases.title_only_model(None, "own") == "Undefended"


def shown(result: AuditResult, folder: Path) -> list[str]:
    screen = build_first_screen(result, folder).plain
    return [screen, markdown.render_markdown_report(result), html.render_html_report(result)]


def test_it_is_the_first_line_of_both_reports_and_the_folder_is_not(result: AuditResult) -> None:
    named = own(replace(result, name="20251121-folder"), OWN, base="org/base-7b")
    line = subject_line.audit_subject_line(named)
    assert markdown.render_markdown_report(named).startswith(f"## {line}\n")
    page = html.render_html_report(named)
    assert f"<title>{line}</title>" in page and page.index(f"<h1>{line}</h1>") < page.index(
        "20251121-folder"
    )


def test_a_long_name_is_no_long_heading(result: AuditResult) -> None:
    assert (
        len(
            subject_line.audit_subject_line(
                own(result, {"model": "m" * 1000, "data": "d" * 1000}, base="b" * 1000)
            )
        )
        < 400
    )


def test_how_conversations_were_written_stands_beside_it(result: AuditResult) -> None:
    assert "Text form" not in markdown.render_markdown_report(result)
    chat = replace(
        result,
        benchmark=replace(result.benchmark, text_form="model, 2025-11-20 (SHA-256 0123456789ab)"),
    )
    assert "Text form: --template model, 2025-11-20 ·" in markdown.render_markdown_report(chat)
