"""How many secrets a decision needs, as `audit gate --plan` says it."""

from __future__ import annotations

from pathlib import Path

import pytest

from auditor.gate import power
from auditor.gate.policy import Rule
from tests.conftest import check_command, refuses


def test_the_decisions_of_all_items_are_counted_in_any_order(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policy = tmp_path / "policy.toml"
    policy.write_text('rules = ["recall <= 0.05", "recall_at_100 <= 0.1", "any_of_k <= 0.2"]\n')
    lines = []
    for items in (["recall=0.05:0.1", str(policy)], [str(policy), "recall=0.05:0.1"]):
        check_command("gate", *(word for item in items for word in ("--plan", item)))
        lines.append(sorted(capsys.readouterr().out.splitlines()))
    assert lines[0] == lines[1] and any(
        "the 3 rules of a gate together" in line for line in lines[0]
    )


def test_no_size_is_told_that_half_of_the_runs_do_not_reach(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where most runs are not decided within the largest size, the stand-in for one of them is no
    number of secrets."""
    monkeypatch.setattr(power, "_MOST", 2000)
    with refuses("2,000"):
        power._count_limit_secrets("fail", "recall", 0.05, 0.06, 0.05, 0.05)
    assert power._count_limit_secrets("fail", "recall", 0.05, 0.07, 0.05, 0.05).half == 1204


@pytest.mark.parametrize(
    ("rules", "complaint"),
    [
        (
            '"recall <= 0"',
            "'recall <= 0' (no number of secrets shows that there is nothing at all)",
        ),
        ('"membership_auc <= 0.75"', "'membership_auc <= 0.75' (not a share of secrets)"),
    ],
)
def test_a_policy_without_a_number_of_secrets_is_refused(
    rules: str, complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policy = tmp_path / "policy.toml"
    policy.write_text(f"rules = [{rules}]\n")
    check_command("gate", "--plan", policy, "--plan", "recall=0.05:0.1", code=2)
    assert complaint in capsys.readouterr().err


def test_every_rule_is_listed_or_named_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policy = tmp_path / "policy.toml"
    limits = ["recall <= 0.05", "any_of_k <= 0.6", "recall not worse than baseline by 0.02"]
    limits += [
        "near_verbatim_recall <= 0",
        "membership_auc <= 0.75",
        "epsilon_lower_bound <= claim",
    ]
    policy.write_text(f"rules = {limits}\n")
    check_command("gate", "--plan", policy)
    lines = capsys.readouterr().out.splitlines()
    left_out = [line.partition("rules: ")[2] for line in lines if line.startswith("not listed")]
    assert [line.partition(" (")[0] for line in left_out] == [
        "recall not worse than baseline by 0.02",
        "near_verbatim_recall <= 0",
        "membership_auc <= 0.75",
        "epsilon_lower_bound <= claim",
    ]
    cases = lines[lines.index(next(line for line in lines if line.endswith("case"))) + 1 :]
    assert f"each of these {len(cases)} cases, on 2 of 6 rules" in "\n".join(lines)


def test_only_a_share_of_secrets_is_planned() -> None:
    with refuses("a share of secrets, such as recall, got membership_auc"):
        power.parse_planned_share_change("membership_auc=0.6:0.8")


@pytest.mark.parametrize(("limit", "questions"), [(0.05, 3), (0.6, 2)])
def test_twice_a_limit_above_a_half_is_not_asked_for(limit: float, questions: int) -> None:
    assert len(power.count_policy_secrets((Rule("recall", limit),), 0.8, 1)) == questions
