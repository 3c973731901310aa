"""How many secrets a decision needs, as `audit gate --plan` says it."""

from __future__ import annotations

from pathlib import Path

import pytest

from auditor.cli import run_command_line
from auditor.gate import power
from auditor.gate.policy import Rule
from tests.conftest import refuses


def test_the_decisions_of_all_items_are_counted_in_any_order(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policy = tmp_path / "policy.toml"
    policy.write_text('rules = ["recall <= 0.05", "recall_at_100 <= 0.1", "any_of_k <= 0.2"]\n')
    lines = []
    for items in (["recall=0.05:0.1", str(policy)], [str(policy), "recall=0.05:0.1"]):
        assert run_command_line(["gate", *(word for item in items for word in ("--plan", item))]) == 0
        lines.append(sorted(capsys.readouterr().out.splitlines()))
    assert lines[0] == lines[1] and any("the 3 rules of a gate together" in line for line in lines[0])


def test_no_size_is_told_that_half_of_the_runs_do_not_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where most runs are not decided within the largest size, the stand-in for one of them is no number of secrets."""
    monkeypatch.setattr(power, "_MOST", 2000)
    with refuses("2,000"):
        power._secrets_needed_to_fail("recall", 0.05, 0.06, 0.05, 0.05)
    assert power._secrets_needed_to_fail("recall", 0.05, 0.07, 0.05, 0.05).half == 1204


@pytest.mark.parametrize(("limit", "questions"), [(0.0, 0), (0.05, 3), (0.6, 2)])
def test_a_limit_of_nothing_asks_for_no_size(limit: float, questions: int) -> None:
    """Twice a limit above a half is no share: only its holding is asked for."""
    assert len(power.secrets_needed_for_policy((Rule("recall", limit),), 0.8, 1)) == questions
