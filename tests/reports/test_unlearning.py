"""What remains of the forgotten records, in one sentence and a table: what is shown, what is not,
and what nobody measured."""

from __future__ import annotations

from dataclasses import replace

import pytest

from auditor.core.result import AuditResult, GroupRecall, Measurement, Unlearning
from auditor.reports import markdown
from auditor.reports.blocks import Table
from auditor.reports.table_of_contents import build_page_document
from auditor.reports.unlearning import describe_forgetting

MODELS = {"before": "undefended", "after": "pmixed"}
NEVER = {"retrained": "retrained", "retrained_relearned": "retrained-relearned"}


def p(value: float, reach: float = 0.02, name: str = "p", unit: str = "probability") -> Measurement:
    return Measurement(name, value, value - reach, value + reach, 50, unit)


def row(
    group: str, before: float, after: float, again: float, never: float | None = None
) -> GroupRecall:
    values = {"before": p(before), "after": p(after), "relearned": p(again)}
    changes = {"unlearned": p(after - before), "relearned": p(again - after)}
    if again > after:
        changes["share_back"] = p((again - after) / (before - after), 0.1, unit="share")
    if never is not None:
        values |= {"retrained": p(never), "retrained_relearned": p(never)}
        changes |= {"left": p(after - never), "came_back": p(again - after)}
    return GroupRecall("extraction-probability", "extraction_probability", group, values, changes)


def left(*numbers: GroupRecall, ratio: float = 1.1) -> Unlearning:
    never = NEVER if any("retrained" in one.values for one in numbers) else {}
    perplexity = {
        name: p(value, 0.1, unit="perplexity")
        for name, value in {"before": 10.0, "after": 10 * ratio}.items()
    }
    perplexity["ratio"] = p(ratio, 0.05, unit="times")
    models = {**MODELS, "relearned": "pmixed-relearned", **never}
    return Unlearning(
        "pmixed", models, "white-box", 50, 40, numbers, perplexity, steps=20, rate=1e-4, texts=30
    )


def test_what_is_hidden_comes_back_and_is_said_to(result: AuditResult) -> None:
    said = describe_forgetting(
        result,
        left(
            row("forgotten", 0.30, 0.02, 0.16, never=0.0), row("retained", 0.3, 0.3, 0.3, never=0.3)
        ),
    )
    assert said == (
        "PMixED (sound), 50 records forgotten of 90: extraction probability, mean 30% → 2.0% "
        "[0.0–4.0], retrained 0.0%. Queried as it is, the model is not shown to hold more of them "
        "than the retrained model: extraction probability, mean at most 4.0 points more. 20 steps "
        "of relearning on 30 other records bring them back, so they were hidden and not gone: "
        "extraction probability, mean 2.0% → 16%, 50% [40–60] of what was forgotten, "
        "retrained 0.0%. Held-out perplexity 10.0 → 11.0 (+10%)."
    )


def test_what_is_still_there_is_said_to_be(result: AuditResult) -> None:
    said = describe_forgetting(
        result, left(row("forgotten", 0.30, 0.1, 0.08, never=0.01), ratio=1.8)
    )
    assert (
        "Still there, more than in the retrained model, by extraction probability, mean. " in said
    )
    assert (
        "20 steps of relearning on 30 other records are not shown to bring them back: extraction"
        in said
    )
    assert said.endswith("(+80%); a model that says little leaks little.")


@pytest.mark.parametrize(
    ("after", "words"),
    [
        (0.2, "Above non-members by extraction probability, mean."),
        (0.01, "Not shown to be above non-members"),
    ],
)
def test_without_a_model_that_never_saw_them_the_floor_judges(
    result: AuditResult, after: float, words: str
) -> None:
    said = describe_forgetting(
        result, left(row("forgotten", 0.3, after, 0.3), row("nonmembers", 0.0, 0.0, 0.0))
    )
    assert (
        words in said
        and "Without --retrained, records that come back cannot be distinguished from what such "
        "steps teach any model."
        in said
    )


def test_what_was_not_measured_is_not_said(result: AuditResult) -> None:
    assert (
        describe_forgetting(result, left())
        == "PMixED (sound): nothing was measured about the records that it should have forgotten."
    )
    bare = replace(left(row("forgotten", 0.3, 0.1, 0.1)), steps=0, perplexity={})
    assert "relearning" not in describe_forgetting(result, bare)
    assert describe_forgetting(result, bare).endswith(
        "What it cost in perplexity was not measured."
    )


def test_the_table_has_every_group_and_model_and_every_report_the_sentence(
    result: AuditResult,
) -> None:
    numbers = [
        row(group, 0.3, 0.02, 0.16, never=0.01) for group in ("forgotten", "retained", "nonmembers")
    ]
    told = replace(result, unlearning=(left(*numbers),))
    (section,) = (s for s in build_page_document(told).sections if s.id == "unlearning")
    (table,) = (block for block in section.blocks if isinstance(block, Table))
    assert table.head[1:6] == (
        "Before",
        "After",
        "Relearned",
        "Retrained",
        "Retrained, relearned",
    )
    group, cost = table.groups
    assert [line[0] for line in group.rows] == [
        "forgotten (50)",
        "retained (50)",
        "non-members (50)",
    ]
    assert group.rows[0][1:4] == ("30% [28–32]", "2.0% [0.0–4.0]", "16% [14–18]")
    assert group.rows[0][6:] == ("−28% [−30 to −26]", "14% [12–16]", "14% [12–16]")
    assert cost.rows[0][1:3] == ("10.0", "11.0") and cost.rows[0][-1] == "× 1.10 [1.05–1.15]"
    assert "50 records forgotten of 90" in markdown.render_markdown_report(told)
    assert "unlearning" not in {s.id for s in build_page_document(result).sections}
