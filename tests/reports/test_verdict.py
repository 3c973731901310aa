"""The verdict says what the numbers support, and no more."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace

from rich.console import Console

from auditor.core.result import AuditResult, Chain, Finding, Measurement, Step
from auditor.reports import markdown
from auditor.reports.terminal import summary
from auditor.reports.verdict import answers, headline, strongest, verdict


def test_the_whole_story(result: AuditResult) -> None:
    text = verdict(result)
    assert "166/320 (52% [46–57]) of the attacked secrets came out verbatim" in text
    assert "the strongest of 4 undefended rows" in text
    assert "never trained on, 0/160 (0.0% [0.0–2.3]) did" in text
    assert "With PMixED (sound), 1/320 (0.3% [0.0–1.7]) came out when only sampled tokens come back" in text
    assert "21.3 against 11.2 (+90%)" in text
    assert "does not cover the worst case (log-probabilities, top-p 0.7)" in text
    assert "With Ensemble, unmixed" not in text  # a control is judged for the sake of what it isolates
    assert "at least 47% were learned, not guessed, with 95% confidence, if non-members are alike" in text
    assert "\n" not in text


def test_a_zero_is_never_said_without_its_bound(result: AuditResult) -> None:
    none = changed(result, "pmixed", lambda f: replace(f, measurements=(Measurement("recall", 0.0, 0.0, 0.011, 320),)))
    assert "with PMixED (sound) none seen (at most 1.1%)" in headline(none)


def test_deltas_are_at_matched_decoding(result: AuditResult) -> None:
    text = verdict(result)
    assert "1/320 (0.3% [0.0–1.7]) came out when only sampled tokens come back (ethicist) against 145/320" in text
    assert "4/320 (1.2% [0.3–3.2]) came out in the worst case (ethicist) against 166/320" in text
    moved = changed(result, "undefended", lambda f: replace(f, decoding="greedy"))
    assert "against" not in verdict(moved).split("Held-out")[0]
    assert "no undefended row at the same decoding to compare with" in verdict(moved)


def test_an_infinite_epsilon_promises_nothing(result: AuditResult) -> None:
    assert "for its unit, any two models. That promises nothing." in verdict(result)


def test_an_epsilon_beside_recall_names_its_unit(result: AuditResult) -> None:
    """Recall counts records; the epsilon of a shard is none of a record's."""
    pmixed = result.target("pmixed")
    assert pmixed.claim is not None

    def said(unit: str, shard: bool, whole: str = "", **epsilon: float) -> str:
        claim = replace(pmixed.claim, unit=unit, shard=shard, whole=whole, epsilon={"add_remove": 8.0, **epsilon})
        return verdict(
            replace(result, targets=tuple(replace(t, claim=claim) if t is pmixed else t for t in result.targets))
        )

    alone = said("shard", shard=True)
    assert "sound) for its unit, shard: it promises nothing about a single record." in alone
    assert " in it, ε 19.4 (replace)." in said("shard of whole records", shard=True, whole="record", replace=19.4)
    assert "sound) for its unit, record. It does not cover the worst case" in said("record", shard=False)
    assert "covers what was measured" not in alone


def test_what_no_row_isolates_is_credited_to_nothing(result: AuditResult) -> None:
    assert (
        "Of PMixED (sound)'s −51 points [−55 to −47] against no defense (ethicist, worst case, n 320), by control "
        "rows: recipe and splitting −47 points [−50 to −44] (not told apart, for want of 'One adapter, all data' "
        "(train it)); mixing −4.1 points [−7.1 to −1.1]. "
        "One step further, no private data: not measured, for want of 'Public model' (--public MODEL)."
    ) in verdict(result)


def test_each_cause_is_credited_with_its_own_step(result: AuditResult) -> None:
    """A step whose interval holds zero is not shown; a row that is the undefended one is none."""
    apart = Chain(
        (
            Step({"recipe": "trained so"}, "undefended", "undefended", None, "the undefended target is that row"),
            Step({"splitting": "shards"}, "undefended", "ensemble-unmixed", points(-0.3, -0.35, -0.25)),
            Step({"mixing": "mixed"}, "ensemble-unmixed", "pmixed", points(-0.01, -0.03, 0.01)),
            Step({"no private data": "public"}, "pmixed", "public", points(-0.0125, -0.03, 0.0)),
        ),
        points(-0.31, -0.36, -0.26),
    )
    told = (
        "recipe: the undefended target is that row; splitting −30 points [−35 to −25]; "
        "mixing −1.0 points [−3.0 to 1.0], not shown. "
        "One step further, no private data −1.2 points [−3.0 to 0.0], not shown."
    )
    explained = changed(result, "pmixed", lambda f: replace(f, chain=apart if f.chain else None))
    assert told in verdict(explained)
    assert dict(answers(explained))["Why, with PMixED (sound)"].endswith(told)
    shown = summary_text(explained)
    assert "splitting −30 points [−35 to −25] · mixing −1.0 points [−3.0 to 1.0], not shown" in shown
    page = markdown.render(explained)
    assert (
        "| mixing | Ensemble, unmixed | PMixED (sound) | mixed | −1.0 points | [−3.0 to 1.0] | 320 | not shown |"
        in page
    )
    assert "no step: the undefended target is that row" in page and "| all of these |" in page


def test_without_a_chain_nothing_is_credited(result: AuditResult) -> None:
    bare = changed(result, "pmixed", lambda f: replace(f, chain=None))
    for text in (verdict(bare), summary_text(bare), markdown.render(bare)):
        assert not any(word in text for word in ("mixing −", "by control rows", "credit", "due to"))


def points(value: float, low: float, high: float) -> Measurement:
    return Measurement("recall_difference", value, low, high, 320)


def summary_text(result: AuditResult) -> str:
    console = Console(width=400, file=io.StringIO(), no_color=True)
    console.print(summary(result))
    return str(console.file.getvalue())  # type: ignore[attr-defined]


def test_a_difference_around_zero_is_inconclusive(result: AuditResult) -> None:
    assert "(0.0 points [−0.4 to 0.4], inconclusive: these secrets cannot tell the two apart)" in verdict(result)


def test_no_leakage_seen_is_not_no_leakage(result: AuditResult) -> None:
    none = changed(result, "undefended", lambda f: with_recall(f, Measurement("recall", 0, 0, 0.0115, 320)))
    assert headline(none).startswith("No leakage seen in 320 attempts; up to 1.1%")
    assert "No leakage seen is not no leakage: with 0 hits among 320 secrets the 95% upper bound is 1.1%" in verdict(
        none
    )


def test_a_defended_row_without_hits_keeps_its_bound(result: AuditResult) -> None:
    none = changed(result, "pmixed", lambda f: with_recall(f, Measurement("recall", 0, 0, 0.0115, 320)))
    assert (
        "0/320 (0.0% [0.0–1.1]) came out when only sampled tokens come back (ethicist, so up to 1.1% is not ruled out)"
        in verdict(none)
    )


def test_not_above_the_floor_is_inconclusive(result: AuditResult) -> None:
    excess = Measurement("excess_recall", 0.02, -0.01, 0.05, 320)
    weak = changed(result, "undefended", lambda f: with_recall(f, Measurement("recall", 0.05, 0.03, 0.08, 320), excess))
    assert headline(weak) == "Inconclusive: what came out cannot be told from guessing."
    assert "this run is inconclusive" in verdict(weak)


def test_worse_than_no_defense_is_said(result: AuditResult) -> None:
    worse = Measurement("recall_difference", 0.1, 0.05, 0.15, 320)
    recall = Measurement("recall", 0.6, 0.54, 0.66, 320)
    harmful = changed(result, "pmixed", lambda f: with_recall(f, recall, worse))
    assert "(10 points [5–15], worse than no defense)" in verdict(harmful)


def test_nothing_measured(result: AuditResult) -> None:
    empty = replace(result, findings=(), targets=())
    assert headline(empty) == "Nothing was measured on the undefended model."
    assert "supports no conclusion" in verdict(empty)


def test_strongest_looks_within_a_setting(result: AuditResult) -> None:
    best = strongest(result, "undefended", "claim")
    assert best is not None
    assert (best.attack, best.setting) == ("ethicist", "claim")
    assert strongest(result, "nobody") is None


def changed(result: AuditResult, target: str, change: Callable[[Finding], Finding]) -> AuditResult:
    """The result with every measured finding of one target changed."""
    return replace(
        result,
        findings=tuple(change(f) if f.target == target and f.measurements else f for f in result.findings),
    )


def with_recall(finding: Finding, *measured: Measurement) -> Finding:
    """The finding with these measurements in place of its own of the same names."""
    names = {m.name for m in measured}
    return replace(finding, measurements=(*(m for m in finding.measurements if m.name not in names), *measured))


def test_probes_alone_are_told(probe_only: AuditResult) -> None:
    assert headline(probe_only) == (
        "Undefended: extraction probability, mean 31% [27–35] (non-members <0.01% [0.00–4.00])."
    )
    told = verdict(probe_only)
    assert "No attack on single secrets was measured on the undefended model" in told
    assert "PMixED (sound): extraction probability, mean 2.0% [0.0–6.0]" in told and "Uniform mixing was not" in told


def test_a_probe_does_not_pass_for_the_strongest_attack(result: AuditResult, with_probe: AuditResult) -> None:
    assert headline(with_probe) == headline(result) and verdict(with_probe) == verdict(result)


def test_a_claim_that_was_seen_to_fail_is_said_aloud(result: AuditResult) -> None:
    def checked(violations: int) -> AuditResult:
        measured = (Measurement("claim_violations", violations, violations, violations, 1600, "count"),)
        row = next(f for f in result.findings if f.target == "pmixed" and f.setting == "worst")
        row = replace(row, attack="claim-check", measurements=measured, by_repeats={}, curve=())
        return replace(result, findings=(*result.findings, row))

    said = "The claim of PMixED (sound) is VIOLATED: 38 times in 1,600 queries looked at"
    assert said in verdict(checked(38))
    assert "VIOLATED" not in verdict(checked(0))
    alone = checked(38)
    assert said in verdict(replace(alone, findings=alone.findings[-1:]))
