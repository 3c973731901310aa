"""All attacks side by side: paired with the first that has the same number, on the records of
both."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from auditor.conclusions.outcomes import ValuesBySecret
from auditor.conclusions.secret_details import SecretDetails
from auditor.core.nouns import CellKey
from auditor.core.result import AuditResult, Finding, Measurement
from auditor.records.attacked_secrets import SecretAttributes
from auditor.reports import screen
from auditor.reports.attack_table import compare_attacks
from auditor.statistics.compare import paired_difference
from tests.reports.conftest import finding


def row(attack: str, *measured: Measurement) -> Finding:
    return replace(
        finding("undefended", "white-box", "ethicist"),
        attack=attack,
        measurements=measured,
        curve=(),
    )


def kept(values: dict[str, np.ndarray], n_members: int) -> ValuesBySecret:
    n = len(next(iter(values.values())))
    return ValuesBySecret(tuple(map(str, range(n))), np.arange(n) < n_members, (None,) * n, values)


def test_recall_is_paired_by_record_with_the_first_attack(result: AuditResult) -> None:
    base, new = np.arange(20) < 8, np.arange(20) >= 15
    asked = {
        name: Measurement("recall", hits.mean(), 0.1, 0.9, 20)
        for name, hits in (("a", base), ("b", new))
    }
    findings = tuple(row(name, m) for name, m in asked.items())
    run = replace(result, findings=findings, plan={**result.plan, "attack": ["b", "a"]})
    rows = {
        CellKey("undefended", "white-box", name): kept({"recall": hits.astype(float)}, 20)
        for name, hits in (("a", base), ("b", new))
    }
    first, second = compare_attacks(
        run, SecretDetails(values_by_cell=rows), "undefended", "white-box"
    )
    assert (first.finding.attack, first.difference) == ("b", None)
    assert second.difference is not None and second.base == "b"
    by_id = sorted(range(20), key=str)  # a bootstrap draws places
    expected = paired_difference(base[by_id].astype(float), new[by_id].astype(float))
    assert second.difference.value == pytest.approx(0.15) == pytest.approx(expected.value)
    assert (second.difference.low, second.difference.high) == (expected.low, expected.high)
    assert second.difference_text.startswith("15 points [") and second.difference_text.endswith(
        "from b"
    )


def test_records_in_parts_are_paired_by_record(
    result: AuditResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = "an-attack-with-a-long-name"
    hits = {"a": [1, 0, 0, 0, 0, 0], other: [1, 1, 1, 0, 1, 0]}  # 2 parts of each of 3 records
    records = Measurement("document_recall", 0.5, 0.1, 0.9, 3)
    parts = {name: Measurement("recall", sum(hit) / 6, 0.1, 0.9, 6) for name, hit in hits.items()}
    run = replace(result, findings=tuple(row(name, m, records) for name, m in parts.items()))
    run = replace(run, plan={**result.plan, "attack": ["a", other]})
    rows = {
        CellKey("undefended", "white-box", name): kept(
            {"recall": np.array(hit, float), "record": np.arange(6.0) // 2}, 6
        )
        for name, hit in hits.items()
    }
    secrets = tuple(
        SecretAttributes(f"{i}", f"s{i}", True, document=f"d{i // 2}") for i in range(6)
    )
    details = SecretDetails(secrets, rows)
    _, second = compare_attacks(run, details, "undefended", "white-box")
    assert second.difference is not None and second.difference.value == pytest.approx(2 / 3)
    assert second.number_text.endswith("recited, at least in part (parts: 4/6)")
    # No interval is cut off on the screen.
    monkeypatch.setattr(screen.detailed, "read_secret_details", lambda folder: details)
    for width in (100, 90):
        lines = screen.build_first_screen(run, Path("none"), width).plain.splitlines()
        assert max(map(len, lines)) <= width
        shown = " ".join(" ".join(lines).split())
        assert f"{second.number_text}; {second.difference_text.removesuffix(' from a')}" in shown


def test_aucs_are_paired_in_the_direction_in_which_each_tells_members(result: AuditResult) -> None:
    rng = np.random.default_rng(0)
    score = rng.normal(size=60) + (np.arange(60) < 30)
    auc = Measurement("membership_auc", 0.75, 0.6, 0.9, 60, "AUC", "loss, best of 3 scores")
    findings = (row("membership", auc), row("mine", replace(auc, value=0.25, low=0.1, high=0.4)))
    rows = {
        CellKey("undefended", "white-box", name): kept({"membership_score": sign * score}, 30)
        for name, sign in (("membership", 1), ("mine", -1))
    }
    run = replace(result, findings=findings, plan={**result.plan, "attack": ["membership", "mine"]})
    first, second = compare_attacks(
        run, SecretDetails(values_by_cell=rows), "undefended", "white-box"
    )
    assert first.number_text == "AUC 0.750 [0.600–0.900] (loss, best of 3 scores)"
    groups = {"8": replace(auc, value=0.99, low=0.8, high=1.0), "1": replace(auc, value=0.7)}
    first = replace(first, finding=replace(first.finding, by_repeats=groups))
    assert first.number_text.endswith("(loss, best of 3 scores; 0.990 [0.800–1.00] at 8 copies)")
    # the number by Min-K% was read as one by the loss
    by_another = {**groups, "8": replace(groups["8"], note="Min-K%, best of 3 scores")}
    named = replace(first, finding=replace(first.finding, by_repeats=by_another))
    assert named.number_text.endswith("; 0.990 [0.800–1.00] at 8 copies by Min-K%)")
    groups = {count: replace(m, note="membership") for count, m in groups.items()}
    first = replace(first, finding=replace(first.finding, by_repeats=groups))
    alone = replace(first, main=replace(auc, note="membership"))
    assert alone.number_text == "AUC 0.750 [0.600–0.900] (0.990 [0.800–1.00] at 8 copies)"
    assert second.difference is not None and second.difference.value == pytest.approx(0)
