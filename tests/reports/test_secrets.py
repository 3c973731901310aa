"""The secrets of a run on the page: compact whatever their number, inert whatever they are called,
redacted."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from auditor.conclusions.secret_details import SecretDetails
from auditor.core.result import AuditResult
from auditor.records.private_texts import SecretText
from auditor.reports import html, secrets

Secrets = Callable[..., SecretDetails]


def embedded(page: str) -> dict[str, Any]:
    """The data as the browser finds it: up to the first end of a script element."""
    found = re.search(
        r'<script type="application/json" id="secrets-data">(.*?)</script', page, re.DOTALL
    )
    assert found
    values: dict[str, Any] = json.loads(found[1])
    return values


def listed(result: AuditResult, details: SecretDetails) -> Mapping[str, Any]:
    block = secrets.build_secret_list(result, details, texts=None)
    assert block is not None
    return block.data


def read_back(log_prob: float) -> float:
    """The probability that the page's script makes of a token's character."""
    place = secrets.CODES.index(secrets.encode_page_log_probs([log_prob]))
    return float((1 - place / (len(secrets.CODES) - 1)) ** secrets._POWER)


@given(st.floats(-60, 0))
def test_a_character_is_near_its_probability(log_prob: float) -> None:
    p = math.exp(log_prob)
    assert abs(read_back(log_prob) - p) <= 0.036  # half the widest step


def test_characters_are_finest_at_the_ends() -> None:
    assert read_back(0.0) == 1.0
    assert read_back(-math.inf) == 0.0
    assert read_back(math.log(1e-6)) == pytest.approx(1e-6, rel=0.5)
    assert not set(secrets.CODES) & set('<>&"\\') and len(set(secrets.CODES)) == len(secrets.CODES)


def test_ten_thousand_secrets_stay_under_three_megabytes(ten_thousand: Path) -> None:
    page = ten_thousand.read_text(encoding="utf-8")
    assert len(page.encode()) < 3_000_000
    data = embedded(page)
    assert len(data["ids"]) == 10_000
    # 16 rows and 4 targets: not all fit
    assert "secrets.parquet has them" in page and "secrets.parquet has all" in page


def test_long_names_and_suffixes_do_not_burst_the_budget(
    result: AuditResult, secret_by_secret: Secrets
) -> None:
    details = secret_by_secret(
        result, 2000, length=400, name="{:06d}" + "x" * 10_000, group="g{}" + "y" * 80
    )
    assert len(html._encode_script_json(listed(result, details)).encode()) <= secrets.BUDGET


def test_what_fits_is_all_there(result: AuditResult, secret_by_secret: Secrets) -> None:
    details = secret_by_secret(result, 40, length=8)
    data = listed(result, details)
    rows = data["rows"]
    assert len(rows) == len(result.findings)
    row = details.values_by_cell["undefended", "white-box", "ethicist"]
    assert row.is_judged
    shown = rows[data["first"]]
    assert (shown["target"], shown["setting"], shown["attack"]) == (
        "Undefended",
        "white-box",
        "ethicist",
    )
    expected = [
        "3" if h else "1" if near else "0"
        for h, near in zip(row.hit, row.is_near_verbatim, strict=True)
    ]
    assert shown["outcome"] == "".join(expected)
    assert shown["lead"] == row.columns["lead"].astype(int).tolist()
    tokens = data["tokens"]
    assert [len(codes) for codes in tokens[0]["codes"]] == [
        8 if s.member else 0 for s in details.secrets
    ]
    assert not data.get("texts")


def test_the_likeliest_secrets_keep_their_tokens(
    result: AuditResult, monkeypatch: pytest.MonkeyPatch, secret_by_secret: Secrets
) -> None:
    details = secret_by_secret(result, 200)
    without = len(json.dumps(listed(result, replace(details, tokens={}))))
    monkeypatch.setattr(secrets, "BUDGET", without + 5000)
    tokens = listed(result, details)["tokens"]
    distribution = details.tokens["undefended"]
    kept = {s.id for s, codes in zip(details.secrets, tokens[0]["codes"], strict=True) if codes}
    assert 0 < len(kept) < len(distribution)
    assert min(sum(distribution[id]) for id in kept) >= max(
        sum(distribution[id]) for id in distribution if id not in kept
    )


def test_a_long_list_shows_the_worst_secrets(
    result: AuditResult, monkeypatch: pytest.MonkeyPatch, secret_by_secret: Secrets
) -> None:
    details = secret_by_secret(result, 400, length=3)
    monkeypatch.setattr(secrets, "LISTED", 90)
    block = secrets.build_secret_list(result, details, texts=None)
    assert block is not None
    assert block.notes[0].startswith("This list shows the 90 of 400 secrets that")
    worst = block.data["rows"][block.data["first"]]
    row = next(
        row for cell, row in details.values_by_cell.items() if cell.attack == worst["attack"]
    )
    assert row.is_judged
    hits = row.hit & row.member
    assert 0 < hits.sum() < 90
    assert block.data["members"] == "1" * 90
    assert worst["outcome"].count("3") == hits.sum()
    assert len(worst["score"]) == len(block.data["ids"]) == 90


def test_hostile_ids_groups_and_texts_are_inert(
    result: AuditResult, secret_by_secret: Secrets, hostile_text: str
) -> None:
    details = secret_by_secret(
        result, 10, length=3, name=hostile_text + "{}", group=hostile_text + "{}"
    )
    texts = {
        s.id: SecretText(s.alias, hostile_text, (hostile_text, "", "b")) for s in details.secrets
    }
    page = html.render_html_report(
        replace(result, plan={"group_column": hostile_text}), details, texts=texts
    )
    assert page.count("<script") == page.count("</script>") == 2  # the data and ours
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2028]", page)
    data = embedded(page)
    assert "<script>alert(1)</script>" in data["ids"][0]
    assert "alert" not in page[page.rindex("<script>") :]  # ours holds nothing of theirs


def test_text_is_shown_only_where_it_is_handed_in_and_the_page_says_so(
    result: AuditResult, secret_by_secret: Secrets
) -> None:
    details = secret_by_secret(result, 10, length=3)
    hidden = html.render_html_report(result, details)
    said = SecretText("a2", "at the", ("Hea", "ring", " Ann"))
    shown = html.render_html_report(result, details, texts={"id-2": said})
    assert "contains no text of the attacked data" in hidden and "shows private text" not in hidden
    assert "This report shows private text" in shown and "contains no text" not in shown
    assert embedded(shown)["texts"][2] == ["Hea", "ring", " Ann"]


def test_secrets_go_by_their_aliases(result: AuditResult, secret_by_secret: Secrets) -> None:
    details = secret_by_secret(result, 10, length=3)
    page = html.render_html_report(result, details)
    assert embedded(page)["ids"] == [s.alias for s in details.secrets]
    assert not any(s.id in page for s in details.secrets)


def test_a_run_that_kept_nothing_has_no_list_and_no_script(result: AuditResult) -> None:
    page = html.render_html_report(result)
    assert "secrets-data" not in page and "<script" not in page and "script-src" not in page
