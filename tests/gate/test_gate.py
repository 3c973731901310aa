"""A limit is decided on interval bounds; what was not measured never passes."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom

from auditor.conclusions.outcomes import RunOutcomes, ValuesBySecret
from auditor.conclusions.signals import assess_leak_signals
from auditor.core.errors import AuditError
from auditor.core.result import (
    AuditResult,
    BenchmarkRecord,
    Doubt,
    Finding,
    Measurement,
    TargetRecord,
)
from auditor.gate.decide import apply_gate_policy, compute_rule_bounds
from auditor.gate.decide import judge_gate_rules as rule_on
from auditor.gate.objections import downgrade_doubtful_ruling
from auditor.gate.policy import Policy, Rule, parse_gate_limits
from auditor.gate.rulings import EXIT_CODES, Decision, Ruling, Verdict
from auditor.statistics.bounds import LEVEL
from auditor.statistics.compare import measure_mean_difference


def count(hits: int, n: int, name: str = "recall") -> Measurement:
    """A share as `metrics.share` records it; the two-sided interval is not what a gate may use."""
    return Measurement(name, hits / n if n else math.nan, math.nan, math.nan, n)


def row(
    target: str,
    *measured: Measurement,
    setting: str = "text-only",
    attack: str = "a",
    why: str = "",
) -> Finding:
    return Finding(
        target, setting, attack, {}, ("draw",), "ancestral", None, "", measured, not_applicable=why
    )


def result(*rows: Finding, defense: tuple[str, ...] = ()) -> AuditResult:
    plan: dict[str, Any] = {"defense": list(defense)}
    benchmark = BenchmarkRecord("lab", "", 0, 0, 0)
    return AuditResult("r", "2026", "0", "audit run", plan, benchmark, (), rows, {}, {}, 0)


def judge(found: AuditResult, limits: dict[str, float], **narrowed: str) -> list[Ruling]:
    return rule_on(found, [Rule(metric, limit) for metric, limit in limits.items()], **narrowed)


def overall_verdict(rulings: list[Ruling]) -> Verdict:
    return Decision("", "", tuple(rulings)).verdict


def decided(hits: int, n: int, limit: float) -> str:
    return overall_verdict(judge(result(row("undefended", count(hits, n))), {"recall": limit}))


@pytest.mark.parametrize(
    ("hits", "n", "limit", "expected"),
    [
        (0, 59, 0.05, "held"),  # 0.95^59 < 0.05 <= 0.95^58
        (0, 58, 0.05, "inconclusive"),
        (0, 299, 0.01, "held"),
        (0, 298, 0.01, "inconclusive"),
        (1, 59, 0.05, "inconclusive"),
        (5, 100, 0.05, "inconclusive"),  # the point estimate meets the limit: nobody can tell
        (30, 100, 0.05, "failed"),
        (59, 59, 0.99, "inconclusive"),
        (100, 100, 0.97, "failed"),  # 0.97^100 < 0.05
        (100, 100, 1.0, "held"),
        (1, 1, 0.04, "failed"),
        (0, 1, 0.04, "inconclusive"),
    ],
)
def test_three_outcomes(hits: int, n: int, limit: float, expected: str) -> None:
    assert decided(hits, n, limit) == expected


def test_exit_codes() -> None:
    assert EXIT_CODES == {"held": 0, "failed": 1, "inconclusive": 4}


@given(
    st.integers(1, 400).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))), st.floats(0, 1)
)
def test_held_and_failed_are_exact_one_sided_tests(hits_n: tuple[int, int], limit: float) -> None:
    """Held: a true share above the limit would give so few hits at most 1 time in 20. Failed:
    likewise from above."""
    hits, n = hits_n
    outcome = decided(hits, n, limit)
    so_few, so_many = binom.cdf(hits, n, limit), binom.sf(hits - 1, n, limit)
    if outcome == "held":
        assert so_few <= 0.05 + 1e-9 or limit == 1
    elif outcome == "failed":
        assert so_many <= 0.05 + 1e-9
    else:
        assert so_few >= 0.05 - 1e-9 and so_many >= 0.05 - 1e-9


@given(
    st.sampled_from(["recall", "any_of_k", "recall_nonmembers", "excess_recall"]),
    st.integers(0, 50),
    st.floats(0, 1),
)
def test_held_means_that_the_upper_bound_is_within_the_limit(
    name: str, hits: int, limit: float
) -> None:
    measured = Measurement(name, hits / 50, hits / 80, min(1.0, hits / 30), 50)
    (ruling,) = judge(result(row("undefended", measured)), {name: limit})
    low, high = (
        compute_rule_bounds(measured).low(LEVEL),
        compute_rule_bounds(measured).high(LEVEL),
    )
    assert low <= measured.value <= high and (ruling.low, ruling.high) == (low, high)
    assert (ruling.verdict == "held") == (high <= limit)
    assert (ruling.verdict == "failed") == (low > limit)


def test_a_bootstrapped_metric_is_decided_on_its_two_sided_interval() -> None:
    def outcome(limit: float) -> str:
        measured = Measurement("recall_at_100_errors", 0.1, 0.05, 0.2, 100)
        return overall_verdict(
            judge(result(row("undefended", measured)), {"recall_at_100_errors": limit})
        )

    assert [outcome(limit) for limit in (0.2, 0.1, 0.04)] == ["held", "inconclusive", "failed"]


def test_two_equal_answers_do_not_prove_that_nothing_got_worse() -> None:
    """A bootstrap of equal pairs has no width, and the gate took it at its word: 2 secrets held any
    limit."""
    measured = measure_mean_difference("recall_difference", "share", np.zeros(2), np.zeros(2))
    assert measured.low < 0 < measured.high
    assert (
        overall_verdict(judge(result(row("undefended", measured)), {"recall_difference": 0.01}))
        != "held"
    )


@pytest.mark.parametrize(
    "measured",
    [
        (),
        (count(0, 100, "any_of_k"),),
        (count(0, 0),),
        (Measurement("recall", math.nan, 0, 0, 100),),
        (Measurement("recall", 0.0, 0.0, 0.0, 0),),
    ],
    ids=["nothing measured", "another metric", "no secret", "NaN", "n of zero"],
)
def test_what_was_not_measured_fails(measured: tuple[Measurement, ...]) -> None:
    rulings = judge(result(row("undefended", *measured)), {"recall": 1.0})
    assert [r.verdict for r in rulings] == ["failed"] and rulings[0].reason


@pytest.mark.parametrize("name", ["recall_at_100_errors", "excess_recall"])
@pytest.mark.parametrize(("low", "high"), [(math.nan, math.nan), (0.0, math.nan)])
def test_an_interval_that_is_no_number_never_passes(name: str, low: float, high: float) -> None:
    measured = Measurement(name, 0.0, low, high, 100)
    assert overall_verdict(judge(result(row("undefended", measured)), {name: 1.0})) != "held"


def test_an_empty_run_and_rows_that_are_not_applicable_fail() -> None:
    for found in (result(), result(row("undefended", why="needs log-probabilities"))):
        assert overall_verdict(judge(found, {"recall": 1.0})) == "failed"
    assert overall_verdict([]) == "failed"


def test_a_row_that_is_not_applicable_does_not_spoil_those_that_are() -> None:
    both = result(
        row("undefended", why="needs log-probabilities", attack="b"),
        row("undefended", count(0, 59)),
    )
    assert overall_verdict(judge(both, {"recall": 0.05})) == "held"


def targets(found: AuditResult, **narrowed: str) -> set[tuple[str, str, str]]:
    return {(r.target, r.setting, r.attack) for r in judge(found, {"recall": 0.5}, **narrowed)}


def test_which_rows_are_judged() -> None:
    rows = [
        row(target, count(1, 100), setting=setting, attack=attack)
        for target in ("undefended", "pmixed", "ensemble-unmixed")
        for setting in ("text-only", "white-box")
        for attack in ("a", "b")
    ]
    defended = result(*rows, defense=("pmixed",))
    assert targets(defended) == {("pmixed", s, a) for s in ("text-only", "white-box") for a in "ab"}
    assert targets(result(*rows[:4])) == {
        ("undefended", s, a) for s in ("text-only", "white-box") for a in "ab"
    }
    assert targets(defended, target="ensemble-unmixed", setting="white-box", attack="b") == {
        ("ensemble-unmixed", "white-box", "b")
    }
    assert targets(defended, setting="text-only") == {("pmixed", "text-only", a) for a in "ab"}
    with pytest.raises(AuditError, match="unknown target 'pmixd'; did you mean 'pmixed'"):
        judge(defended, {"recall": 0.5}, target="pmixd")


def test_a_defended_target_without_any_measured_row_fails() -> None:
    """Its budget paid for nothing, say: the other defense's rows must not answer for it."""
    found = result(
        row("uniform-mixing", count(0, 100)),
        row("pmixed", why="0 secrets covered"),
        defense=("uniform-mixing", "pmixed"),
    )
    assert overall_verdict(judge(found, {"recall": 0.05})) == "failed"


def test_one_broken_limit_breaks_the_gate() -> None:
    found = result(row("undefended", count(0, 100), count(50, 100, "any_of_k")))
    rulings = judge(found, {"recall": 0.05, "any_of_k": 0.05})
    assert [r.verdict for r in rulings] == ["held", "failed"] and overall_verdict(
        rulings
    ) == "failed"
    assert overall_verdict(judge(found, {"recall": 0.05, "any_of_k": 0.5})) == "inconclusive"
    assert overall_verdict([ruling("held"), ruling("inconclusive"), ruling("failed")]) == "failed"


def ruling(outcome: Any) -> Ruling:
    return Ruling("t", "text-only", "a", "recall", 0.1, 0, 1, outcome, "")


def test_limits() -> None:
    assert parse_gate_limits(["recall=0.05", "any_of_k=1e-1"]) == (
        Rule("recall", 0.05),
        Rule("any_of_k", 0.1),
    )
    assert parse_gate_limits(["recall(count=16)=0.5"]) == (Rule("recall", 0.5, count=16),)
    assert parse_gate_limits(["recall(kind=door code)=0.5"]) == (
        Rule("recall", 0.5, kind="door code"),
    )


def test_a_limit_may_be_on_one_kind_of_personal_data() -> None:
    """Of the secrets that hold some: what all of them give away is another number; a kind that
    nobody found fails."""
    email, name = count(1, 200), Measurement("recall", 0.25, 0.2, 0.31, 200, "probability")
    found = result(
        replace(row("undefended", count(0, 400)), by_kind={"email": email, "name": name})
    )

    def outcome(kind: str, limit: float) -> Ruling:
        (found_one,) = rule_on(found, [Rule("recall", limit, kind=kind)])
        return found_one

    # Clopper-Pearson: 1 - 0.95-quantile of Beta(2, 199) is 0.0235
    assert outcome("email", 0.024).verdict == "held"
    assert outcome("email", 0.02).verdict == "inconclusive"
    # means: as recorded
    assert (outcome("name", 0.19).verdict, outcome("name", 0.32).verdict) == (
        "failed",
        "held",
    )
    assert outcome("name", 0.3).verdict == "inconclusive"
    missing = outcome("phone", 1.0)
    assert (
        missing.verdict == "failed"
        and "no recall(kind=phone) (kinds of personal data: email, name)" in missing.reason
    )


@pytest.mark.parametrize(
    "item", ["recall", "recall=", "=0.1", "recall=5%", "recall=nan", "recall=0.1=0.2", ""]
)
def test_bad_limits_are_refused(item: str) -> None:
    with pytest.raises(AuditError, match="expected --max metric=number, got"):
        parse_gate_limits([item])


def test_a_limit_given_twice_is_not_decided_on_the_laxer_one() -> None:
    with pytest.raises(AuditError, match="recall"):
        parse_gate_limits(["recall=0.05", "recall=0.9"])


def test_a_limit_is_for_the_rows_that_measure_its_metric() -> None:
    """A probe has no recall, an attack no exact probability; but nobody's silence passes for
    somebody's number."""
    p = Measurement("extraction_probability", 0.2, 0.1, 0.3, 50, "probability")
    both = result(row("undefended", count(0, 400)), row("undefended", p, attack="probe"))
    assert overall_verdict(judge(both, {"recall": 0.05})) == "held"
    assert overall_verdict(judge(both, {"extraction_probability": 0.3})) == "held"
    assert overall_verdict(judge(both, {"extraction_probability": 0.25})) == "inconclusive"
    assert overall_verdict(judge(both, {"extraction_probability": 0.05})) == "failed"
    assert overall_verdict(judge(both, {"recall": 0.05}, attack="probe")) == "failed"
    assert overall_verdict(judge(both, {"exposure": 9})) == "failed"
    one = result(*both.findings, row("d", why="no"), row("d", p, attack="probe"), defense=("d",))
    # measured on another target only
    assert overall_verdict(judge(one, {"recall": 0.05})) == "failed"
    assert overall_verdict(judge(one, {"extraction_probability": 0.3})) == "held"


def test_what_a_row_lacks_is_said_beside_its_main_metric_and_the_nearest() -> None:
    """In one short sentence, however many it has."""
    many = [
        replace(count(0, 50), name=name)
        for name in ("auc", *(f"of_class_{i}" for i in range(37)), "recall_at_9")
    ]
    (ruling,) = judge(result(row("undefended", *many)), {"recall_at_7": 0.1})
    assert ruling.reason == "this attack has no recall_at_7; it has auc, recall_at_9 and 37 others"
    (ruling,) = judge(result(row("undefended", many[0])), {"recall": 0.1})
    assert ruling.reason == "this attack has no recall; it has auc"


def test_an_auc_below_a_half_gives_members_away_as_one_above_does() -> None:
    """A defense that forbids what it was trained on makes members the least likely: an AUC of 0.1
    passes no limit."""

    def outcome(value: float, low: float, high: float, limit: float) -> Ruling:
        auc = Measurement("membership_auc", value, low, high, 400, "AUC")
        (found,) = judge(result(row("undefended", auc)), {"membership_auc": limit})
        return found

    assert (
        outcome(0.1, 0.06, 0.14, 0.6).verdict == outcome(0.9, 0.86, 0.94, 0.6).verdict == "failed"
    )
    assert (
        "membership_auc 0.1 (the other way 0.9) between 0.8600 and 0.9400"
        in outcome(0.1, 0.06, 0.14, 0.6).reason
    )
    assert outcome(0.49, 0.43, 0.55, 0.6).verdict == "held"
    assert (
        outcome(0.45, 0.38, 0.52, 0.6).verdict
        == outcome(0.55, 0.48, 0.62, 0.6).verdict
        == "inconclusive"
    )


def test_a_membership_limit_is_held_against_the_group_of_copies_that_is_told_better_than_all_members() -> (  # noqa: E501
    None
):
    def auc(value: float, reach: float) -> Measurement:
        low, high = value - reach, min(1.0, value + reach)
        return Measurement(
            "membership_auc", value, low, high, 100, "AUC", "loss, best of 11 scores"
        )

    def ruling(often: Measurement, limit: float = 0.75, tried: int = 11) -> Ruling:
        found = replace(
            row("undefended", auc(0.6, 0.05)), by_repeats={"8": often}, scores_tried=tried
        )
        (decided,) = rule_on(result(found), [Rule("membership_auc", limit)])
        return decided

    failed = ruling(auc(0.97, 0.05))
    assert (
        failed.verdict == "failed"
        and "membership_auc(count=8) 0.97 (loss, best of 11 scores)" in failed.reason
    )
    assert ruling(auc(0.8, 0.1)).verdict == "inconclusive"  # the group may be above the limit
    # too few to tell the group at all: all members decide
    assert ruling(auc(0.6, 0.3)).verdict == "held"


def test_an_older_run_holds_no_limit_that_one_of_its_scores_may_exceed() -> None:
    """It recorded the main score alone, beside scores by secret of which another tells members."""
    rng = np.random.default_rng(0)
    member = np.arange(200) < 100
    values = {
        "membership_score": rng.normal(size=200),
        "membership_score_loss": rng.normal(size=200) + 1.5 * member,
    }
    values["membership_score_ez_mia"] = values["membership_score"]
    ids, cell = tuple(map(str, range(200))), row("undefended").cell_key
    main = Measurement("membership_auc", 0.5, 0.42, 0.58, 200, "AUC", "EZ-MIA")
    kept = {cell: ValuesBySecret(ids, member, (None,) * 200, values)}
    (ruling,) = rule_on(result(row("undefended", main)), [Rule("membership_auc", 0.75)], kept)
    assert ruling.verdict == "inconclusive" and ruling.value == pytest.approx(0.85, abs=0.05)


def test_the_number_of_the_strongest_score_is_the_one_that_the_report_names() -> None:
    """Of a stacked score, the stored values say less than its interval: it alone was not chosen."""
    rng = np.random.default_rng(1)
    member = np.arange(200) < 100
    values = {
        "membership_score_loss": rng.normal(size=200) + 1.5 * member,
        "membership_score_stacked": rng.normal(size=200) + 2.5 * member,
    }
    values["membership_score"] = values["membership_score_loss"]
    loss = values["membership_score_loss"]
    auc = float(np.mean(loss[member][:, None] > loss[~member][None, :]))
    told = Measurement("membership_auc", auc, 0.7, 0.9, 200, "AUC", "loss, best of 2 scores")
    found = replace(row("undefended", told), scores_tried=2)
    kept = {
        found.cell_key: ValuesBySecret(tuple(map(str, range(200))), member, (None,) * 200, values)
    }
    (ruling,) = rule_on(result(found), [Rule("membership_auc", 0.6)], kept)
    assert ruling.verdict == "failed" and f"membership_auc {auc:.4g} (loss" in ruling.reason


def test_discoverable_shares_are_counts_and_get_exact_one_sided_bounds() -> None:
    rows = result(row("undefended", count(0, 59, "discoverable_100_0.9"), attack="probe"))
    assert overall_verdict(judge(rows, {"discoverable_100_0.9": 0.05})) == "held"


def test_a_metric_that_nobody_has_is_a_slip_of_the_pen_and_no_leak() -> None:
    run = RunOutcomes(
        "r", result(row("undefended", count(0, 200), count(0, 9, "of_a_plug_in"))), {}
    )
    for name, message in (
        ("recal", "'recal'; did you mean 'recall'"),
        ("of_a_plugin", "did you mean 'of_a_plug_in'"),
    ):
        with pytest.raises(
            AuditError, match=f"unknown metric {message}" if name == "recal" else message
        ):
            apply_gate_policy(run, Policy((Rule(name, 0.05),)))
    for name in (
        "of_a_plug_in",
        "exposure",
        "recall_at_7_errors",
        "recall_nonmembers",
    ):  # ours, or of the run
        assert apply_gate_policy(run, Policy((Rule(name, 0.05),))).rulings


@pytest.mark.parametrize(("p", "expected"), [(0.4, "inconclusive"), (0.01, "held")])
def test_no_limit_is_held_by_hits_that_are_too_few_for_the_probabilities(
    p: float, expected: str
) -> None:
    """None of 100 where each has a probability of 40%: a filter, a truncation or another
    distribution lies between."""
    probable = Measurement("extraction_probability", p, p / 2, min(1.0, 2 * p), 100, "probability")
    attacked = replace(row("undefended", count(0, 100)), drawn=500)
    found = result(attacked, row("undefended", probable, attack="extraction-probability"))
    (held,) = judge(found, {"recall": 0.05}, attack="a")
    assert held.verdict == "held"
    ruled = downgrade_doubtful_ruling(found, assess_leak_signals(found), held)
    assert ruled.verdict == expected and ("a filter" in ruled.reason) == (expected != "held")


@pytest.mark.parametrize(
    ("metric", "expected"), [("recall", "inconclusive"), ("perplexity", "held")]
)
def test_no_limit_on_leakage_is_held_in_doubt_of_the_text_form(metric: str, expected: str) -> None:
    """Exact probabilities, which nobody drew, are of the wrong text as well; what a defense costs
    is not."""
    found = result(row("undefended", count(0, 100)))
    found = replace(
        found,
        benchmark=replace(found.benchmark, doubts=(Doubt("text form", "Another may be right."),)),
    )
    (held,) = judge(found, {"recall": 0.05})
    ruled = downgrade_doubtful_ruling(
        found, assess_leak_signals(found), replace(held, metric=metric)
    )
    assert (held.verdict, ruled.verdict) == ("held", expected)
    assert ruled.unmeasured == ("Another may be right." in ruled.reason) == (expected != "held")


def test_no_limit_is_held_by_an_adapter_on_another_base() -> None:
    found = result(row("undefended", count(0, 100)))
    (held,) = judge(found, {"recall": 0.05})
    doubts = (Doubt("base", "It was trained on another."),)
    target = TargetRecord("undefended", "undefended", "none", doubts=doubts)
    found = replace(found, targets=(target,))
    ruled = downgrade_doubtful_ruling(found, assess_leak_signals(found), held)
    assert (held.verdict, ruled.verdict) == ("held", "inconclusive")
    assert "trained on another" in ruled.reason
