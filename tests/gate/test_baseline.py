"""Held against a baseline: paired by secret, refused where it is another thing, and never wrong
more than stated."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from auditor.conclusions.outcomes import (
    RunOutcomes,
    ValuesBySecret,
    compare_paired_metric,
)
from auditor.core.errors import AuditError
from auditor.core.nouns import CellKey, Secret
from auditor.core.result import (
    NO_TIME,
    AuditResult,
    BenchmarkRecord,
    Finding,
    Measurement,
    RecordCounts,
)
from auditor.gate import comparability
from auditor.gate.comparability import check_comparable, digest_comparable_secrets
from auditor.gate.compare import compare_finished_runs
from auditor.gate.decide import apply_gate_policy, judge_gate_rules
from auditor.gate.policy import NO_WORSE, Policy, Rule, parse_gate_rule
from auditor.gate.power import (
    count_change_secrets,
    count_failing_secrets,
    count_pair_secrets,
    parse_planned_share_change,
)
from auditor.gate.rule_scope import choose_baseline_rules
from auditor.statistics import roc
from auditor.statistics.bounds import make_measurement
from auditor.statistics.extraction import measure_extraction, measure_hit_shares
from auditor.statistics.intervals import measure_share
from tests.rows import judge_columns
from validation.gates import simulation

ROW = CellKey("undefended", "white-box", "a")


def per_secret(hits: np.ndarray, **more: np.ndarray) -> ValuesBySecret:
    n = len(hits)
    repeats = tuple(1 if i % 2 else 16 for i in range(n))
    ids = tuple(f"s{i:05d}" for i in range(n))
    return ValuesBySecret(
        ids, np.ones(n, dtype=bool), repeats, {"recall": hits.astype(float), **more}
    )


def finding(hits: np.ndarray, **more: Any) -> Finding:
    given = {"options": {"samples": 4}, "access": ("draw",), "decoding": "ancestral", **more}
    return Finding(
        *ROW,
        claim_applies=None,
        claim_reason="",
        measurements=(measure_share("recall", hits),),
        **given,
    )


def run(hits: np.ndarray, name: str = "run", **changed: Any) -> RunOutcomes:
    record = BenchmarkRecord("files", "data.jsonl", len(hits), 0, 10, digest="d1-ff")
    fields = {
        "benchmark": record,
        "findings": (finding(hits),),
        "family": "gpt2 with 270 tokens",
        "seed": 0,
        **changed,
    }
    plan = fields.pop("plan", {"defense": []})
    found = AuditResult(
        name,
        "",
        "",
        "",
        plan,
        fields.pop("benchmark"),
        (),
        fields.pop("findings"),
        {},
        {},
        **fields,
    )
    return RunOutcomes(name, found, {ROW: per_secret(hits)})


def hits(n: int, *right: range) -> np.ndarray:
    found = np.zeros(n, dtype=bool)
    for which in right:
        found[which.start : which.stop] = True
    return found


def verdicts(new: RunOutcomes, base: RunOutcomes, *rules: str, **more: Any) -> list[str]:
    policy = Policy(tuple(parse_gate_rule(rule) for rule in rules), **more)
    return [ruling.verdict for ruling in apply_gate_policy(new, policy, base).rulings]


def test_three_outcomes() -> None:
    base = run(hits(200, range(20)), "base")
    rule = "recall not worse than baseline by 0.02"
    assert verdicts(base, base, rule) == ["held"]
    assert verdicts(run(hits(200, range(60))), base, rule) == ["failed"]
    assert verdicts(run(hits(200, range(26))), base, rule) == ["inconclusive"]
    assert verdicts(run(hits(200, range(60))), base, "recall not worse than baseline by 0.5") == [
        "held"
    ]


def test_a_paired_rule_bootstraps_no_interval_of_either_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(ValuesBySecret, "remeasure_metric")
    new, base = run(hits(300, range(30))), run(hits(300, range(40)))
    assert verdicts(new, base, "recall not worse than baseline by 0.02") == ["held"]


def test_pairing_sees_what_two_limits_cannot() -> None:
    """15 of 400 more, and nobody fewer: clear when paired, and within the intervals of either run
    alone."""
    base, new = run(hits(400, range(160)), "base"), run(hits(400, range(175)))
    assert verdicts(new, base, "recall not worse than baseline by 0") == ["failed"]
    swapped = run(hits(400, range(85), range(200, 290)))  # the same recall, of other secrets
    assert verdicts(swapped, base, "recall not worse than baseline by 0") == ["inconclusive"]


@pytest.mark.parametrize(
    ("n_hits", "n_records_hit", "limit", "low", "high"),
    [(0, 0, 0.05, 0.0, 0.1391), (60, 3, 0.1, 0.0422, 0.3437)],
)
def test_parts_of_one_record_are_no_independent_evidence(
    n_hits: int, n_records_hit: int, limit: float, low: float, high: float
) -> None:
    """400 windows of 20 records: the windows' interval decides, that of the records does not."""
    windows = hits(400, range(n_hits))
    by_record = measure_share("document_recall", hits(20, range(n_records_hit)))
    rule = (Rule("recall", limit),)
    alone = run(windows)
    (ruling,) = judge_gate_rules(alone.result, rule, alone.outcomes)
    assert ruling.verdict != "inconclusive" and "(n = 400)" in ruling.reason
    row = finding(windows)
    row = replace(row, measurements=(*row.measurements, by_record))
    parts = run(windows, findings=(row,))
    (ruling,) = judge_gate_rules(parts.result, rule, parts.outcomes)
    assert ruling.verdict == "inconclusive" and ruling.n == 20
    assert "(n = 20 records, in 400 parts)" in ruling.reason
    assert (ruling.low, ruling.high) == (
        pytest.approx(low, abs=1e-4),
        pytest.approx(high, abs=1e-4),
    )
    paired = apply_gate_policy(
        parts, Policy((parse_gate_rule("recall not worse than baseline by 0.1"),)), parts
    )
    assert "(n = 400 parts, taken as independent)" in paired.rulings[-1].reason


def test_a_change_in_parts_is_no_more_evidence_than_one_in_their_records() -> None:
    """Of two equal models, 19% were worse by 60 records of 5 parts, and 39% by parts of 20."""
    records = np.arange(400.0) // 20
    runs = []
    for n_records_hit in (5, 3):
        windows = (records < n_records_hit).astype(float)
        by_record = measure_share("document_recall", hits(20, range(n_records_hit)))
        row = finding(windows)
        row = replace(row, measurements=(*row.measurements, by_record))
        finished = run(windows, f"run{n_records_hit}", findings=(row,))
        runs.append(replace(finished, outcomes={ROW: per_secret(windows, record=records)}))
    for rule in ("recall not worse than baseline by 0.02", ""):  # also the rule without a policy
        policy = Policy((parse_gate_rule(rule),) if rule else ())
        (ruling,) = apply_gate_policy(runs[0], policy, runs[1]).rulings
        assert ruling.verdict == "inconclusive" and ruling.value == pytest.approx(0.1)
        assert "(n = 20 records, in 400 parts)" in ruling.reason
    assert verdicts(runs[0], runs[0], "recall not worse than baseline by 0.05") == ["inconclusive"]


def test_records_in_parts_are_compared_by_record() -> None:
    """A comparison showed the share of parts, 15% where the runs say 30%, as if independent; a
    rule on records always failed: "not stored for each secret"."""
    records = np.arange(400.0) // 20
    runs = []
    for n_records_hit in (6, 4):
        windows = np.zeros(400)
        windows[[20 * i for i in range(n_records_hit)]] = 1.0
        by_record = measure_share("document_recall", hits(20, range(n_records_hit)))
        row = finding(windows)
        row = replace(row, measurements=(*row.measurements, by_record))
        outcome = {ROW: per_secret(windows, record=records)}
        finished = run(windows, f"run{n_records_hit}", findings=(row,))
        runs.append(replace(finished, outcomes=outcome))
    (line,) = compare_finished_runs(runs).lines
    assert line.metric == "document_recall"
    delta = line.comparands[1].delta
    assert delta is not None and (delta.n, delta.value) == (20, pytest.approx(-0.1))
    rule = "document_recall not worse than baseline by 0.02"
    assert verdicts(runs[1], runs[0], rule) == ["inconclusive"]
    assert verdicts(runs[1], runs[0], rule.replace("0.02", "0.3")) == ["held"]


@pytest.mark.parametrize(
    ("rule", "n_parts", "value", "low", "high"),
    [
        ("document_recall", 0, 0.15, 0.0422, 0.3437),
        ("document_recall(count=16)", 0, 0.2, 0.0368, 0.5069),
        ("recall(count=16)", 200, 0.2, 0.0368, 0.5069),
        ("recall(kind=email)", 200, 0.2, 0.0368, 0.5069),
    ],
)
def test_rules_on_records_are_recomputed_from_their_parts(
    rule: str, n_parts: int, value: float, low: float, high: float
) -> None:
    """400 windows of 20 records; every second record has 16 copies, and two of those leak."""
    windows = hits(400, range(60))
    record = np.repeat(np.arange(20.0), 20)
    # (400,) copies by record: records 0, 2, ... have 16
    repeats = tuple(1 if code % 2 else 16 for code in record)
    nothing = np.zeros(400, dtype=int)
    judged = judge_columns(
        tuple(f"s{i:05d}" for i in range(400)),
        *(windows, windows, windows.astype(float), repeats, np.ones(400, dtype=bool)),
        *(nothing + 9 * ~windows, nothing, {"record": record}),
    )
    email = np.where(record % 2, np.nan, windows)
    values = ValuesBySecret.from_judged_guesses(judged, {"email": email})
    by_kind = values.remeasure_metric("recall", kind="email")
    assert by_kind is not None and by_kind.n == 200
    row = Finding(
        *ROW,
        claim_applies=None,
        claim_reason="",
        measurements=tuple(measure_extraction(judged)),
        by_repeats=measure_hit_shares("recall", judged),
        by_kind={"email": by_kind},
        options={"samples": 4},
        access=("draw",),
        decoding="ancestral",
    )
    of_records = run(windows, findings=(row,))
    (ruling,) = judge_gate_rules(
        of_records.result, (parse_gate_rule(f"{rule} <= 0.6"),), {ROW: values}
    )
    assert (ruling.verdict, ruling.value) == ("held", pytest.approx(value))
    n_records = 20 if rule == "document_recall" else 10
    said = f"n = {n_records} records" + (f", in {n_parts} parts" if n_parts else "")
    assert f"({said})" in ruling.reason and ruling.n == n_records
    assert (ruling.low, ruling.high) == (
        pytest.approx(low, abs=1e-4),
        pytest.approx(high, abs=1e-4),
    )


def test_the_order_of_the_secrets_does_not_matter() -> None:
    base, new = run(hits(200, range(20)), "base"), run(hits(200, range(60)))
    rows = new.outcomes[ROW]
    turned = ValuesBySecret(
        rows.ids[::-1], rows.member, rows.repeats[::-1], {"recall": rows.values["recall"][::-1]}
    )
    differences = []
    for values in (turned, rows):
        difference = compare_paired_metric("recall", None, values, base.outcomes[ROW])
        assert not isinstance(difference, str)
        differences.append(make_measurement("difference", difference))
    assert differences[0] == differences[1]
    assert compare_paired_metric("recall", 16, rows, base.outcomes[ROW]).n == 100  # type: ignore[union-attr]
    assert (
        compare_paired_metric("recall", 3, rows, base.outcomes[ROW])
        == "no secret occurred in the data 3 times"
    )


def test_members_of_one_repeat_count_are_distinguished_from_all_others() -> None:
    """Such a rule against a baseline was a bug of ours, and no sentence."""
    rng, member = np.random.default_rng(0), np.arange(200) < 150
    sides = [
        replace(
            per_secret(hits(200)),
            member=member,
            columns={"membership_score": rng.normal(size=200) + by * member},
        )
        for by in (0, 3)
    ]
    auc, rate = (
        compare_paired_metric(metric, 16, sides[1], sides[0])
        for metric in ("membership_auc", "tpr_at_1pct_fpr")
    )
    assert not isinstance(auc, str) and auc.low(0.025) > 0 and auc.n == 75 + 50
    assert not isinstance(rate, str) and rate.n == 75
    assert isinstance(compare_paired_metric("membership_auc", 3, *sides), str)


def test_by_repeat_count() -> None:
    measured = {
        "1": measure_share("recall", hits(100)),
        "16": measure_share("recall", hits(100, range(60))),
    }
    right = np.arange(200) < 120
    right[1::2] = False  # every other secret is of count 16
    new = run(right, findings=(finding(right, by_repeats=measured),))
    assert verdicts(new, new, "recall(count=1) <= 0.05", "recall(count=16) <= 0.05") == [
        "held",
        "failed",
    ]
    (ruling,) = judge_gate_rules(new.result, [Rule("recall", 0.5, count=2)])
    assert ruling.verdict == "failed" and "repeat counts: 1, 16" in ruling.reason


def test_repeat_counts_are_of_the_main_number_and_of_no_other() -> None:
    """What is recorded by repeat count is recall's: nothing is judged on another metric's
    numbers."""
    few, all_right = (
        measure_share("near_verbatim_recall", hits(200, range(2))),
        measure_share("recall", hits(200, range(200))),
    )
    made = replace(finding(hits(200)), measurements=(all_right, few), by_repeats={"16": all_right})
    for metric, row in (("near_verbatim_recall", made), ("recall", replace(made, by_repeats={}))):
        (ruling,) = judge_gate_rules(
            run(hits(200), findings=(row,)).result, [Rule(metric, 0.5, count=16)]
        )
        assert (
            ruling.verdict == "failed"
            and f"this attack has no {metric} by repeat count" in ruling.reason
        )


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        (
            {"family": "gpt_neox with 270 tokens"},
            "model family 'gpt_neox with 270 tokens' against 'gpt2",
        ),
        (
            {"benchmark": BenchmarkRecord("lab", "", 200, 0, 10, digest="d1-ff")},
            "data set: name 'lab' against 'files'",
        ),
        ({"benchmark": BenchmarkRecord("files", "", 200, 0, 10, digest="d2-ff")}, "other secrets"),
        (
            {"benchmark": BenchmarkRecord("files", "x", 200, 0, 10)},
            "data set 'x' against 'data.jsonl'",
        ),
        (
            {"benchmark": BenchmarkRecord("files", "", 200, 5, 10, digest="d1-ff")},
            "nonmembers 5 against 0",
        ),
        ({"findings": (finding(hits(200), options={"samples": 9}),)}, "a.samples 9 against 4"),
        (
            {"findings": (finding(hits(200), decoding="greedy"),)},
            "decoding of undefended, white-box, attack a",
        ),
        (
            {"findings": (finding(hits(200), access=("distribution",)),)},
            "access of undefended, white-box, attack a",
        ),
        (
            {"plan": {"defense": [], "reference": "gpt2"}},
            "attack settings: reference 'gpt2' against none",
        ),
    ],
)
def test_a_baseline_of_something_else_is_refused(changed: dict[str, Any], named: str) -> None:
    with pytest.raises(AuditError, match=r"^base is no baseline for run: ") as refusal:
        verdicts(
            run(hits(200)),
            run(hits(200), "base", **changed),
            "recall not worse than baseline by 0.02",
        )
    assert named in str(refusal.value)


def test_a_refusal_is_short_and_ends_with_a_command_that_makes_them_comparable() -> None:
    mine = {"model": "./new model", "data": "other.jsonl", "attack": ["membership"], "limit": 9}
    theirs = {
        "model": "./old",
        "data": "d.jsonl",
        "attack": ["perplexity", "zlib"],
        "reference": "work/base",
    }
    theirs |= {"attack_options": {"perplexity": {"temperature": 0}}, "seed": 3}
    base = run(
        hits(200),
        "base",
        plan=theirs,
        benchmark=BenchmarkRecord("files", "", 200, 5, 10, digest="d2-ff"),
    )
    with pytest.raises(AuditError) as refusal:
        check_comparable(run(hits(200), plan=mine), base, "match")
    why, command = str(refusal.value).split("; a run that can be compared: ")
    assert (
        why
        == "base is no match for run: data set: nonmembers 5 against 0 (and 2 other differences)"
    )
    assert command == (
        "audit run --model './new model' --reference work/base --data d.jsonl --attack perplexity "
        "--attack zlib -A perplexity.temperature=0 --seed 3"
    )


def test_checks_that_ran_out_of_time_are_to_be_resumed() -> None:
    """The other run's settings make nothing comparable if it has not asked all of its records."""
    asked = RecordCounts(given=200, audited=5, not_attacked={NO_TIME: 195})
    records = BenchmarkRecord("files", "", 5, 0, 10, digest="d2-ff", records={"members": asked})
    base = run(hits(5), "runs/my check", benchmark=records)
    with pytest.raises(AuditError) as refusal:
        check_comparable(run(hits(200)), base, "match")
    why, commands = str(refusal.value).split(
        "; checks can be compared only after all records were asked: "
    )
    assert "is no match for run: data set: members 5 against 200" in why
    assert commands == "audit check --resume 'runs/my check'"


def test_another_checkpoint_and_another_seed_may_be_compared() -> None:
    check_comparable(
        run(hits(200)),
        run(hits(200), "base", seed=7, plan={"model": "other", "defense": []}),
        "baseline",
    )


def test_other_secrets_in_a_row_are_refused() -> None:
    base = run(hits(200), "base")
    with pytest.raises(
        AuditError, match="secrets of undefended, white-box, attack a: 100 only here, 0 only there"
    ):
        verdicts(
            replace(base, outcomes={ROW: per_secret(hits(100))}),
            base,
            "recall not worse than baseline by 0.02",
        )


def test_an_older_baseline_is_refused_and_none_at_all_too() -> None:
    new = run(hits(200))
    rule = Policy((parse_gate_rule("recall not worse than baseline by 0.02"),))
    with pytest.raises(
        AuditError, match=r"old contains no secrets.parquet, by which runs are paired"
    ):
        apply_gate_policy(new, rule, RunOutcomes("old", new.result, {}))
    with pytest.raises(AuditError, match="needs a baseline: give --baseline RUN"):
        apply_gate_policy(new, rule)
    with pytest.raises(AuditError, match="at least one rule"):
        apply_gate_policy(new, Policy())


def probe(name: str, unit: str, attack: str, value: float = 0.5) -> Finding:
    measured = Measurement(name, value, value - 0.1, value + 0.1, 200, unit)
    options = {"options": {"samples": 4}, "access": ("draw",), "decoding": "ancestral"}
    return Finding(
        *ROW[:2], attack, claim_applies=None, claim_reason="", measurements=(measured,), **options
    )


def scored(name: str, shift: float, *findings: Finding) -> RunOutcomes:
    """A run of 200 members and 200 non-members; members score higher by `shift`."""
    noise = np.random.default_rng(0).normal(size=400)
    member = np.arange(400) < 200
    score = noise + shift * member
    value = roc.auc(score[member], score[~member])
    rows = probe("membership_auc", "AUC", "m", value), *findings
    record = BenchmarkRecord("files", "data.jsonl", 200, 200, 10, digest="d1-ff")
    made = run(hits(200), name, findings=rows, benchmark=record)
    ids = tuple(f"s{i:05d}" for i in range(400))
    kept = ValuesBySecret(ids, member, (None,) * 400, {"membership_score": score})
    return replace(made, outcomes={ROW._replace(attack="m"): kept})


def test_runs_without_recall_are_held_to_what_both_measured() -> None:
    """A run passes against itself, and fails if its AUC rises; recall that neither has is no
    loss."""
    base = scored("base", 0.5)

    def decide(new: RunOutcomes) -> list[tuple[str, str, str]]:
        rulings = judge_gate_rules(
            new.result, choose_baseline_rules(new.result, base.result), new.outcomes, base
        )
        return [(r.attack, r.metric, r.verdict) for r in rulings]

    assert decide(scored("same", 0.5)) == [("m", "membership_auc", "held")]
    assert decide(scored("worse", 1.5)) == [("m", "membership_auc", "failed")]
    (*_, ruling) = apply_gate_policy(base, Policy(), base).rulings
    assert (ruling.verdict, ruling.rule) == (
        "held",
        "membership_auc not worse than baseline by 0.02",
    )


def test_the_default_rules_are_of_recall_wherever_a_run_has_it() -> None:
    """Recall that one of the runs lost is still asked for, and nothing in common is refused."""
    of_recall, without = run(hits(200), "base").result, scored("base", 0.5).result
    for sides in ((of_recall, of_recall), (without, of_recall), (of_recall, without)):
        assert choose_baseline_rules(*sides) == (NO_WORSE,)
    assert apply_gate_policy(run(hits(200)), Policy(), run(hits(200), "base")).exit_code == 0
    chance = probe("extraction_probability", "probability", "e", 0.2)
    both = scored("base", 0.5, chance, probe("exposure", "bits", "x")).result
    rules = choose_baseline_rules(both, both)
    assert [rule.metric for rule in rules] == ["membership_auc", "extraction_probability"]
    assert choose_baseline_rules(both, without) == rules[:1]
    assert choose_baseline_rules(both, both, (None, None, "e")) == rules[1:]
    for base, attack in ((replace(both, findings=()), None), (both, "x")):
        with pytest.raises(AuditError, match="expected --max-increase METRIC=MARGIN"):
            choose_baseline_rules(both, base, (None, None, attack))
    with pytest.raises(AuditError, match="attack"):
        choose_baseline_rules(both, both, (None, None, "nobody"))


def test_what_cannot_be_paired_fails() -> None:
    new, base = run(hits(200)), run(hits(200), "base")
    other = replace(base, outcomes={CellKey("x", "y", "z"): base.outcomes[ROW]})
    (ruling,) = judge_gate_rules(
        new.result, [parse_gate_rule("recall not worse than baseline by 1")], new.outcomes, other
    )
    assert ruling.verdict == "failed" and "no results by secret to pair" in ruling.reason
    unkept = {
        ROW: ValuesBySecret(
            base.outcomes[ROW].ids, base.outcomes[ROW].member, base.outcomes[ROW].repeats, {}
        )
    }
    assert verdicts(new, replace(base, outcomes=unkept), "recall not worse than baseline by 1") == [
        "failed"
    ]
    assert verdicts(new, base, "any_of_k not worse than baseline by 1") == ["failed"]
    lost = np.full(200, math.nan)
    assert "not a number" in str(
        compare_paired_metric(
            "p", None, per_secret(hits(200), p=lost), per_secret(hits(200), p=np.zeros(200))
        )
    )


def test_many_rules_are_not_many_chances_to_fail() -> None:
    """One in twenty breaks its limit at 5% by chance; corrected for twenty, it is inconclusive."""
    lucky, plain = hits(100, range(10)), hits(100, range(5))
    alone = run(lucky)
    assert [r.verdict for r in judge_gate_rules(alone.result, [Rule("recall", 0.05)])] == ["failed"]
    rows = tuple(replace(finding(lucky if i == 0 else plain), attack=f"a{i}") for i in range(20))
    many = judge_gate_rules(run(lucky, findings=rows).result, [Rule("recall", 0.05)])
    assert [r.verdict for r in many] == ["inconclusive"] * 20


def test_the_fingerprint_tells_secrets_apart_and_little_of_the_answers() -> None:
    secret = Secret("a", (1, 2), (3, 4), 2)
    other = Secret("b", (5,), (6,), 1)
    prints = [
        digest_comparable_secrets(x)
        for x in ([secret, other], [replace(secret, prefix=(1, 9)), other], [other])
    ]
    assert len({p.split("-")[0] for p in prints}) == 3
    assert digest_comparable_secrets([other, secret]) == prints[0]
    answers = [
        digest_comparable_secrets([replace(secret, suffix=(i, 4)), other]).split("-")
        for i in range(300)
    ]
    assert len({public for public, _ in answers}) == 1
    assert 100 < len({bits for _, bits in answers}) <= 256


# --- how often it is wrong ---


@pytest.mark.parametrize("which", ["one limit", "ten limits", "baseline", "ten baselines"])
def test_false_alarms_on_the_limit_are_at_most_five_percent(which: str) -> None:
    s, runs = simulation, 400
    scenario = {
        "one limit": s.GateScenario("", (s.limit(0.1),), s.shares(60, 0.1)),
        "ten limits": s.GateScenario(
            "", tuple(s.limit(0.1, i) for i in range(10)), s.shares(60, 0.1, 10)
        ),
        "baseline": s.GateScenario("", (s.margin(0.05),), s.changes(60, 0.05, 0.15)),
        "ten baselines": s.GateScenario(
            "", tuple(s.margin(0.0, row=i) for i in range(10)), s.changes(60, 0.0, 0.15, 10)
        ),
    }[which]
    seen = s.rates(scenario, runs, 0)
    noise = 2.6 * math.sqrt(0.05 * 0.95 / runs)
    assert seen["failed"] <= 0.05 + noise and seen["held"] <= 0.05 + noise


def test_the_plan_finds_what_it_promises() -> None:
    s = simulation
    asked = count_pair_secrets(0.1, 0.0, 0.15, 0.05, 0.8)
    found = s.rates(s.GateScenario("", (s.margin(0.0),), s.changes(asked, 0.1, 0.15)), 300, 0)[
        "failed"
    ]
    half = s.rates(s.GateScenario("", (s.margin(0.0),), s.changes(asked // 2, 0.1, 0.15)), 100, 0)[
        "failed"
    ]
    assert found >= 0.8 - 0.06 and half < 0.7


def test_secrets_for_a_limit_by_the_exact_test() -> None:
    """0 of 59 hold 5%, 0 of 299 hold 1%: nothing less does, and with no leak at all every run finds
    that."""
    assert (
        count_failing_secrets(1 - 0.05, 1 - 0.0, 0.05, 0.8) == 59
        and count_failing_secrets(1 - 0.01, 1 - 0.0, 0.05, 0.8) == 299
    )
    needed = count_failing_secrets(0.05, 0.15, 0.05, 0.8)
    power: Callable[[int], float] = lambda n: sum(  # noqa: E731
        math.comb(n, k) * 0.15**k * 0.85 ** (n - k)
        for k in range(n + 1)
        if judge_gate_rules(run(hits(n, range(k))).result, [Rule("recall", 0.05)])[0].verdict
        == "failed"
    )
    assert power(needed) >= 0.8 > power(needed - 1)


def test_plans_are_read_or_refused() -> None:
    change = parse_planned_share_change("recall=0.05:0.10")
    assert change.discordant == pytest.approx(0.05 * 0.9 + 0.1 * 0.95)
    assert [need.secrets for need in count_change_secrets(change, 0.8, 1)] < [
        need.secrets for need in count_change_secrets(change, 0.8, 10)
    ]
    # one tells none from all
    assert [
        need.secrets
        for need in count_change_secrets(parse_planned_share_change("recall=0:1"), 0.8, 1)
    ][:2] == [
        1,
        1,
    ]
    for power in (0.0, 1.0, 1.5):
        with pytest.raises(AuditError, match="power between 0 and 1"):
            count_change_secrets(change, power, 1)
    for bad in (
        "recall",
        "recall=0.1",
        "recall=0.2:0.1",
        "recall=0.1:1.2",
        "recall=a:b",
        "recall=0.1:0.2:0.9",
    ):
        with pytest.raises(AuditError, match=r"expected"):
            parse_planned_share_change(bad)
    for bad in (
        "recall=0.1:1.2",
        "recall=1.1:1.2",
        "recall=1.1:0.2",
    ):  # not for what would follow from them
        with pytest.raises(AuditError, match="shares between 0 and 1"):
            parse_planned_share_change(bad)
    for end in (0, 1):
        with pytest.raises(AuditError, match=f"from less to more, got {end} to {end}"):
            parse_planned_share_change(f"recall={end}:{end}")
    with pytest.raises(AuditError, match="more than 1,000,000 secrets"):
        count_change_secrets(parse_planned_share_change("recall=0.5:0.5001"), 0.8, 1)


# --- side by side ---


def test_best_is_marked_only_where_it_is_significant() -> None:
    a, b, c = (run(hits(200, range(k)), f"r{k}") for k in (80, 78, 20))
    (line,) = compare_finished_runs([a, b, c]).lines
    assert line.best_run == 2 and [cell.delta is None for cell in line.comparands] == [
        True,
        False,
        False,
    ]
    assert line.comparands[2].delta is not None and line.comparands[2].delta.high < 0
    # the first
    assert [cell.delta.value for cell in line.comparands if cell.delta] == pytest.approx(
        [-2 / 200, -60 / 200]
    )
    (line,) = compare_finished_runs([a, b]).lines
    assert line.best_run is None  # two fewer of 200 may be chance
    (line,) = compare_finished_runs([a, c, run(hits(200, range(20)), "again")]).lines
    assert line.best_run is None  # two share the lowest


def test_runs_that_cannot_be_compared_are_refused() -> None:
    a = run(hits(200), "a")
    with pytest.raises(AuditError, match=r"^a is no match for b: model family.*audit export a b "):
        compare_finished_runs([a, run(hits(200), "b", family="other")])
    with pytest.raises(AuditError, match="at least two runs"):
        compare_finished_runs([a])
    with pytest.raises(AuditError, match="unknown metric 'recal'; did you mean 'recall'"):
        compare_finished_runs([a, run(hits(200), "b")], ["recal"])


def test_a_row_one_run_lacks_is_said_and_never_best() -> None:
    a, b = run(hits(200, range(80)), "a"), run(hits(200, range(80)), "b", findings=())
    (line,) = compare_finished_runs([a, b]).lines
    assert line.best_run is None and line.comparands[1].reason == "not in this run"


def test_a_form_is_held_against_the_undefended_model_of_the_same_run() -> None:
    full, same, worse = (hits(200, range(some)) for some in (10, 10, 60))
    form = replace(finding(worse), target="int4")
    held = run(full)
    plan = {**held.result.plan, "defense": ["int4"]}
    result = replace(held.result, findings=(*held.result.findings, form), plan=plan)
    rule = parse_gate_rule("recall not worse than undefended by 0.05")

    def verdict(of_form: np.ndarray) -> str:
        own = {**held.outcomes, form.cell_key: per_secret(of_form)}
        (ruling,) = judge_gate_rules(result, [rule], own)
        return ruling.verdict

    assert [verdict(same), verdict(worse)] == ["held", "failed"]
    (ruling,) = judge_gate_rules(held.result, [rule], held.outcomes)
    assert ruling.verdict == "failed" and "the undefended model, with which" in ruling.reason
    assert str(rule) == "recall not worse than undefended by 0.05"


@pytest.mark.parametrize(
    ("mine", "theirs", "told"), [("ab", "abc", 0), ("abc", "ab", 0), ("abd", "abc", 1)]
)
def test_a_run_that_stopped_before_another_is_compared_on_what_both_asked(
    mine: str, theirs: str, told: int
) -> None:
    """Stopped by `--until`, one asked fewer of the same secrets; without it fewer are others."""
    row = CellKey("undefended", "white-box", "a")
    for anytime in (True, False):
        runs: list[Any] = [
            SimpleNamespace(outcomes={row: SimpleNamespace(ids=tuple(ids), anytime=anytime)})
            for ids in (mine, theirs)
        ]
        assert len(list(comparability._list_secret_obstacles(*runs, row))) == (
            told if anytime else 1
        )


def test_a_decision_is_told_line_by_line() -> None:
    """`assert decision.exit_code == 0, str(decision)` hid the reasons in a long repr."""
    decision = apply_gate_policy(run(hits(200, range(20))), Policy((Rule("recall", 0.01),)))
    first, last = str(decision).splitlines()
    assert first.startswith("failed        undefended, white-box, attack a: recall 0.1 between ")
    assert last == "gate failed: 1 failed"
