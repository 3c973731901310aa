"""Rules are read as they are meant, or refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from auditor.core.errors import AuditError
from auditor.gate.policy import Policy, Rule, parse_gate_limits, parse_gate_rule, read_gate_policy
from auditor.statistics.metrics import METRICS


@pytest.mark.parametrize(
    ("sentence", "rule"),
    [
        ("recall <= 0.01", Rule("recall", 0.01)),
        ("  exposure(count=1)<=10 ", Rule("exposure", 10, count=1)),
        (
            "recall_at_100_errors not worse than baseline by 0.02",
            Rule("recall_at_100_errors", 0.02, True),
        ),
        ("recall not worse than baseline", Rule("recall", 0.0, True)),
        ("recall(count = 16) not worse than baseline by 1e-1", Rule("recall", 0.1, True, 16)),
        ("recall( kind = door code ) <= 0.02", Rule("recall", 0.02, kind="door code")),
        ("discoverable_100_0.9 <= 0.05", Rule("discoverable_100_0.9", 0.05)),
    ],
)
def test_sentences(sentence: str, rule: Rule) -> None:
    assert parse_gate_rule(sentence) == rule
    assert parse_gate_rule(str(rule)) == rule  # what the reports show can be written back


@pytest.mark.parametrize(
    "sentence",
    [
        *(
            "",
            "recall",
            "recall <=",
            "recall < 0.1",
            "recall >= 0.1",
            "recall <= 5%",
            "recall <= nan",
            "recall = 0.1",
        ),
        *(
            "recall(kind=) <= 1",
            "recall(kind=email) not worse than baseline",
            "exposure(kind=email) <= 3",
        ),
        *(
            "recall not worse than baseline by",
            "recall(repeats=3) <= 1",
            "recall <= 0.1 0.2",
            "recall(count=-1) <= 1",
        ),
    ],
)
def test_other_sentences_are_refused(sentence: str) -> None:
    with pytest.raises(AuditError, match="expected a"):
        parse_gate_rule(sentence)


@pytest.mark.parametrize("metric", [metric.name for metric in METRICS])
def test_metrics_on_which_every_rule_would_fail_are_refused_at_once(metric: str) -> None:
    refused = {"greedy", "perplexity", "perplexity_subset_average", "exposure_extrapolated"}
    if metric not in refused:
        assert parse_gate_rule(f"{metric} <= 0.5").metric == metric
        return
    for name in (metric, f"{metric}_nonmembers"):
        with pytest.raises(
            AuditError, match=f"such as extraction_probability, exposure, .* got {name}, which "
        ):
            parse_gate_limits([f"{name}=0.5"])


def policy(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "leakage.toml"
    path.write_text(text)
    return path


def test_a_policy_file(tmp_path: Path) -> None:
    text = """
    inconclusive = "fail"
    rules = ["recall <= 0.05"]
    [[rule]]
    rule = "recall not worse than baseline by 0.02"
    target = "pmixed"
    [[rule]]
    metric = "recall"
    count = 1
    max = 0.01
    setting = "text-only"
    attack = "ethicist"
    [[rule]]
    metric = "recall"
    kind = "email"
    max = 0.02
    [[rule]]
    metric = "any_of_k"
    max_increase = 0
    """
    assert read_gate_policy(policy(tmp_path, text)) == Policy(
        (
            Rule("recall", 0.05),
            Rule("recall", 0.02, True, target="pmixed"),
            Rule("recall", 0.01, count=1, setting="text-only", attack="ethicist"),
            Rule("recall", 0.02, kind="email"),
            Rule("any_of_k", 0.0, True),
        ),
        "fail",
    )


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "at least one rule"),
        ("rules = 3", "rules: expected a list, got 3"),
        ("rules = [3]", r"rules\[0\]: expected str, got 3"),
        ("rule = 'recall <= 1'", "rule: expected a list, got"),
        ("ruels = ['recall <= 1']", "unknown field 'ruels'; did you mean 'rules'"),
        (
            "[[rule]]\nmetric = 'recall'\nmaximum = 1",
            r"rule\[0\]: unknown field 'maximum'; did you mean 'max'",
        ),
        ("[[rule]]\nmax = 1", "expected a metric, got none"),
        ("[[rule]]\nmetric = 'recall'", "either max or max_increase, got neither"),
        ("[[rule]]\nmetric = 'recall'\nmax = 1\nmax_increase = 1", "got max and max_increase"),
        ("[[rule]]\nmetric = 'recall'\nmax = true", "expected max to be a number, got True"),
        ("[[rule]]\nmetric = 'recall'\nmax = nan", "expected max to be a number"),
        ("[[rule]]\nmetric = 'recall'\nmax = 1\ncount = '3'", "count: expected int, got '3'"),
        ("[[rule]]\nmetric = 'recall(count=1)'\nmax = 1\ncount = 3", "one count or kind"),
        (
            "[[rule]]\nmetric = 'recall'\nmax = 1\ncount = 3\nkind = 'email'",
            "one count or kind, got count and kind",
        ),
        (
            "[[rule]]\nmetric = 'recall'\nmax = 1\nkind = '('",
            "expected a kind of personal data such as email",
        ),
        (
            "[[rule]]\nmetric = 'recall'\nmax = 1\ncount = 1000000000000",
            "a count of at most 12 digits",
        ),
        ("[[rule]]\nmetric = 'recall'\nmax = 1\nkind = 3", "kind: expected str, got 3"),
        ("[[rule]]\nmetric = 'recall'\nmax = 1\ntarget = 3", "target: expected str, got 3"),
        ("[[rule]]\nrule = 'recall <= 1'\nmax = 1", "got rule and max"),
        (
            "inconclusive = 'ignore'\nrules = ['recall <= 1']",
            "inconclusive: expected 'report', 'pass' or 'fail', got 'ignore'",
        ),
        (
            "rules = ['recall <= 0.1', 'recall <= 0.9']",
            "expected one limit for recall, got 0.1 and 0.9",
        ),
        ("rules = [", "is not TOML"),
    ],
)
def test_other_policies_are_refused(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(AuditError, match=complaint):
        read_gate_policy(policy(tmp_path, text))


def test_a_policy_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(AuditError, match="cannot read the policy"):
        read_gate_policy(tmp_path / "none.toml")


def test_increases_come_as_flags_too() -> None:
    assert parse_gate_limits(["recall=0.02"], "--max-increase", True) == (
        Rule("recall", 0.02, True),
    )
    with pytest.raises(AuditError, match="expected --max-increase metric=number"):
        parse_gate_limits(["recall"], "--max-increase", True)


def test_a_limit_that_no_share_can_meet_is_refused() -> None:
    with pytest.raises(AuditError, match=r"at least 0 for recall, which is a share, got -0\.1"):
        parse_gate_limits(["recall=-0.1"], "--max", False)
    # A model may have to improve on its baseline, and an excess over non-members may be negative.
    assert parse_gate_limits(["recall=-0.02"], "--max-increase", True)[0].limit == -0.02
    assert parse_gate_limits(["excess_recall=-0.02"], "--max", False)[0].limit == -0.02
