"""Markdown for a pull request: what must be seen is seen at once, what changed is said, and it
always fits."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from auditor.core.nouns import CellKey
from auditor.core.result import AuditResult, Measurement, TargetRecord
from auditor.gate.compare import Comparand, Comparison, ComparisonRow
from auditor.gate.rulings import Decision, Ruling
from auditor.reports import decision, files, markdown

GITHUB = 65_536  # characters of a comment


def seen(text: str) -> str:
    """What stands open on the page."""
    return re.sub(r"<details>.*?</details>", "", text, flags=re.DOTALL)


def folded(text: str) -> list[str]:
    return re.findall(r"<details><summary>(.*?)</summary>", text)


def share(value: float, width: float = 0.1, name: str = "recall") -> Measurement:
    return Measurement(name, value, value - width, value + width, 100)


def compared(*deltas: float | None, name: str = "main", runs: int = 2) -> Comparison:
    """A line a delta (its interval is ±0.1); None: nothing to pair."""
    lines = []
    for i, delta in enumerate(deltas):
        now = (
            Comparand(share(0.4), share(delta))
            if delta is not None
            else Comparand(share(0.4), reason="nothing to pair")
        )
        lines.append(
            ComparisonRow(
                CellKey("undefended", "white-box", f"a{i}"), "recall", (Comparand(share(0.2)), now)
            )
        )
    return Comparison((name, "here"), "lab: 100 members", tuple(lines))


def test_verdict_results_and_claims_are_seen_and_the_rest_is_folded(result: AuditResult) -> None:
    text = markdown.render_markdown_report(result)
    assert "PMixED (sound): **INCONCLUSIVE**" in seen(text) and "166/320 (52% [46–57])" in seen(
        text
    )
    assert [line[4:] for line in text.splitlines() if line.startswith("### ")][:3] == [
        *("What to do now", "Signal by signal", "Results")
    ]
    assert "- PMixED (sound): claimed ε 8 (add/remove, shard" in seen(text)
    assert len(seen(text)) < 10_000 and len(text) < markdown.MOST
    assert {"What a good result does not mean", "How to reproduce"} <= set(folded(text))
    assert "Since" not in text


def test_a_broken_claim_need_not_be_unfolded(result: AuditResult) -> None:
    broken = replace(
        result.findings[4],
        notes=("holds with margin 1%",),
        violations=("3 tokens were not charged",),
    )
    text = seen(
        markdown.render_markdown_report(replace(result, findings=(*result.findings[:4], broken)))
    )
    assert (
        "- PMixED (sound), ethicist: VIOLATED: 3 tokens were not charged" in text
        and "holds with" not in text
    )


def test_what_changed_is_said_worst_first(result: AuditResult) -> None:
    text = seen(markdown.render_markdown_report(result, compared(0.0, -0.3, 0.25, None)))
    assert "### Since main\n" in text
    assert "1 of 4 configurations leak more, 1 less, 1 shows no change, 1 not compared." in text
    rows = [line for line in text.splitlines() if line.startswith("| undefended, white-box")]
    assert [row.split(" | ")[0][-2:] for row in rows] == ["a2", "a1", "a0", "a3"]
    assert (
        rows[0].endswith("| 25 points [15–35] | leaks more |")
        and "| 20% [10–30] | 40% [30–50] |" in rows[0]
    )
    assert "nothing to pair | not compared" in rows[-1]


def test_touching_zero_is_no_change(result: AuditResult) -> None:
    assert (
        "0 of 1 configuration leaks more, 0 less, 1 shows no change"
        in markdown.render_markdown_report(result, compared(0.1))
    )


@pytest.mark.parametrize(
    ("name", "rows"), [("n", 60), ("&" * 1000, 20), ("|`" * 100_000, 1), ("x\n\n# <b>" * 3000, 1)]
)
def test_it_always_fits(result: AuditResult, name: str, rows: int) -> None:
    claim = next(t.claim for t in result.targets if t.claim)
    many = tuple(replace(f, attack=f"{name}{i}") for i in range(rows) for f in result.findings[:2])
    targets = tuple(TargetRecord(f"t{i}", name, name, claim=claim) for i in range(min(rows, 30)))
    big = replace(
        result, name=name, command=name, findings=many, targets=targets, plan={"model": name}
    )
    text = markdown.render_markdown_report(big, compared(*[0.2] * rows, name=name))
    assert len(text) <= markdown.MOST < GITHUB / 2
    assert text.count("<details>") == text.count("</details>")
    if rows > 1:
        assert "more rows." in seen(text)
    if len(name) > 100:
        assert "Too long for here, in report.html:" in text


def test_the_folder_holds_what_changed(tmp_path: Path, result: AuditResult) -> None:
    files.write_run_reports(tmp_path, result)
    files.rewrite_run_reports(tmp_path, compared(0.3))
    assert "leaks more" in (tmp_path / "report.md").read_text(encoding="utf-8")
    files.rewrite_run_reports(tmp_path)
    assert "leaks more" not in (tmp_path / "report.md").read_text(encoding="utf-8")


def test_a_decision_fits_beside_a_report() -> None:
    held = Ruling(
        "target",
        "white-box",
        "a",
        "recall",
        0.1,
        0.0,
        0.2,
        "held",
        "because",
        "recall <= 0.1",
        0.1,
        50,
    )
    failed = replace(held, target="bad", verdict="failed")
    silent = replace(held, target="&" * 10_000, verdict="failed", n=0, reason="|" * 10_000)
    made = Decision("&" * 10_000, "|" * 10_000, (*[held] * 400, failed, *[silent] * 60), "report")
    text = decision.render_decision_markdown(made)
    assert len(text) + markdown.MOST < GITHUB
    assert "| bad, white-box, attack a |" in text and "61 failed" in text and "more rows." in text
