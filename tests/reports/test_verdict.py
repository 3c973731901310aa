"""The verdict says what the numbers support, and no more."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace

from rich.console import Console

from auditor.core.result import AuditResult, Chain, ChainStep, Finding, Measurement
from auditor.reports import markdown
from auditor.reports.terminal import terminal_run_summary
from auditor.reports.verdict import headline, strongest_attack_row, verdict_by_question, verdict_paragraph


def test_the_whole_story(result: AuditResult) -> None:
    text = verdict_paragraph(result)
    assert "166/320 (52% [46–57]) extracted verbatim, white-box (non-members 0/160)" in text
    assert "PMixED (sound): Seen, but not significant: 4/320 (1.2%) extracted verbatim, white-box" in text
    assert "It would have been shown from: verbatim extraction 2.8%" in text
    assert "21.3 against 11.2 (+90%)" in text
    assert "does not cover white-box access (log-probabilities, top-p 0.7)" in text
    assert "Ensemble, unmixed: " not in text  # a control is judged for the sake of what it isolates
    assert "Not tested: near-verbatim extraction, exact extraction probability" in text
    assert "\n" not in text


def test_the_headline_says_what_leaks_of_each_target(result: AuditResult) -> None:
    assert headline(result) == (
        "Undefended leaks: 166/320 (52% [46–57]) extracted verbatim, white-box (non-members 0/160); 150/320 (47% "
        "[41–53]) extracted by greedy decoding, 64/64 of those trained on 16 times (not compared with non-members). "
        "PMixED (sound): inconclusive: 4/320 (1.2%) extracted verbatim, white-box (not significant; "
        "non-members 0/160, difference 1.2 points [−1.2 to 3.7]). Uniform mixing leaks: 166/320 (52% "
        "[46–57]) extracted verbatim, white-box (non-members 0/160)."
    )


def test_a_zero_is_never_said_without_its_bound(result: AuditResult) -> None:
    none = changed(result, "pmixed", lambda f: replace(f, measurements=(Measurement("recall", 0.0, 0.0, 0.011, 320),)))
    zero = "none of 320 extracted verbatim, text-only or white-box (up to 1.1% not ruled out)"
    assert (
        f"PMixED (sound): no leakage seen in what was tested: {zero}; not tested: near-verbatim extraction"
        in headline(none)
    )
    assert f"Not shown: {zero}" in verdict_paragraph(none)


def test_deltas_are_at_matched_decoding(result: AuditResult) -> None:
    text = verdict_paragraph(result)
    assert "text-only −45 points [−49 to −41] (1/320 (0.3% [0.0–1.7]) against 145/320" in text
    assert "white-box −51 points [−55 to −46] (4/320 (1.2% [0.3–3.2]) against 166/320" in text
    moved = changed(result, "undefended", lambda f: replace(f, decoding="greedy"))
    assert (
        "4/320 (1.2% [0.3–3.2]) by ethicist, with no undefended configuration at the same decoding"
        in verdict_paragraph(moved)
    )


def test_an_infinite_epsilon_promises_nothing(result: AuditResult) -> None:
    assert "for its unit, any two models. That promises nothing." in verdict_paragraph(result)


def test_an_epsilon_beside_recall_names_its_unit(result: AuditResult) -> None:
    """Recall counts records; the epsilon of a shard is none of a record's."""
    pmixed = result.target("pmixed")
    assert pmixed.claim is not None

    def said(unit: str, shard: bool, whole: str = "", **epsilon: float) -> str:
        claim = replace(pmixed.claim, unit=unit, shard=shard, whole=whole, epsilon={"add_remove": 8.0, **epsilon})
        return verdict_paragraph(
            replace(result, targets=tuple(replace(t, claim=claim) if t is pmixed else t for t in result.targets))
        )

    alone = said("shard", shard=True)
    assert "sound) for its unit, shard: it promises nothing about a single record." in alone
    assert " in it, ε 19.4 (replace)." in said("shard of whole records", shard=True, whole="record", replace=19.4)
    assert "sound) for its unit, record. It does not cover white-box access" in said("record", shard=False)
    assert "covers what was measured" not in alone


def test_what_no_row_isolates_is_credited_to_nothing(result: AuditResult) -> None:
    assert (
        "Of PMixED (sound)'s −51 points [−55 to −47] against no defense (ethicist, white-box, n 320), by control "
        "rows: training configuration and splitting −47 points [−50 to −44] (not separated, for want of "
        "'One adapter, all data' "
        "(train it)); mixing −4.1 points [−7.1 to −1.1]. "
        "One step further, no private data: not measured, for want of 'Public model' (--public MODEL)."
    ) in verdict_paragraph(result)


def test_each_cause_is_credited_with_its_own_step(result: AuditResult) -> None:
    """A step whose interval holds zero is not significant; a row that is the undefended one is none."""
    apart = Chain(
        (
            ChainStep({"recipe": "trained so"}, "undefended", "undefended", None, "the undefended target is that row"),
            ChainStep({"splitting": "shards"}, "undefended", "ensemble-unmixed", points(-0.3, -0.35, -0.25)),
            ChainStep({"mixing": "mixed"}, "ensemble-unmixed", "pmixed", points(-0.01, -0.03, 0.01)),
            ChainStep({"no private data": "public"}, "pmixed", "public", points(-0.0125, -0.03, 0.0)),
        ),
        points(-0.31, -0.36, -0.26),
    )
    told = (
        "splitting −30 points [−35 to −25]; "
        "mixing −1.0 points [−3.0 to 1.0], not significant. "
        "One step further, no private data −1.2 points [−3.0 to 0.0], not significant."
    )
    explained = changed(result, "pmixed", lambda f: replace(f, chain=apart if f.chain else None))
    assert told in verdict_paragraph(explained)
    assert dict(verdict_by_question(explained))["Why, with PMixED (sound)"].endswith(told)
    shown = summary_text(explained)
    assert "splitting −30 points [−35 to −25] · mixing −1.0 points [−3.0 to 1.0], not significant" in shown
    page = markdown.render_markdown_report(explained)
    assert (
        "| mixing | Ensemble, unmixed | PMixED (sound) | mixed | −1.0 points | [−3.0 to 1.0] | 320 | not significant |"
        in page
    )
    assert "trained so" not in page and "| all of these |" in page


def test_without_a_chain_nothing_is_credited(result: AuditResult) -> None:
    bare = changed(result, "pmixed", lambda f: replace(f, chain=None))
    for text in (verdict_paragraph(bare), summary_text(bare), markdown.render_markdown_report(bare)):
        assert not any(word in text for word in ("mixing −", "by control rows", "credit", "due to"))


def points(value: float, low: float, high: float) -> Measurement:
    return Measurement("recall_difference", value, low, high, 320)


def summary_text(result: AuditResult) -> str:
    console = Console(width=400, file=io.StringIO(), no_color=True)
    console.print(terminal_run_summary(result))
    return str(console.file.getvalue())  # type: ignore[attr-defined]


def test_a_difference_around_zero_is_inconclusive(result: AuditResult) -> None:
    assert "white-box 0.0 points [−0.4 to 0.4], not significant (166/320" in verdict_paragraph(result)


def test_not_above_the_baseline_is_inconclusive(result: AuditResult) -> None:
    excess = Measurement("excess_recall", 0.02, -0.01, 0.05, 320)
    weak = changed(result, "undefended", lambda f: with_recall(f, Measurement("recall", 0.05, 0.03, 0.08, 320), excess))
    weak = replace(weak, benchmark=replace(weak.benchmark, greedy_recall={}))
    assert headline(weak).startswith("Undefended: inconclusive: 16/320 (5.0%) extracted verbatim, text-only")
    assert "Seen, but not significant: 16/320" in verdict_paragraph(weak)


def test_worse_than_no_defense_is_said(result: AuditResult) -> None:
    worse = Measurement("recall_difference", 0.1, 0.05, 0.15, 320)
    recall = Measurement("recall", 0.6, 0.54, 0.66, 320)
    harmful = changed(result, "pmixed", lambda f: with_recall(f, recall, worse))
    assert "10 points [5–15], worse than no defense (192/320" in verdict_paragraph(harmful)


def test_nothing_measured(result: AuditResult) -> None:
    empty = replace(result, findings=(), targets=())
    assert headline(empty) == "Nothing was measured on the undefended model."
    assert "supports no conclusion" in verdict_paragraph(empty)


def test_strongest_looks_within_a_setting(result: AuditResult) -> None:
    best = strongest_attack_row(result, "undefended", "text-only")
    assert best is not None
    assert (best.attack, best.setting) == ("ethicist", "text-only")
    assert strongest_attack_row(result, "nobody") is None


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


def test_probes_are_told_as_attacks_are(probe_only: AuditResult, with_probe: AuditResult) -> None:
    bare = replace(probe_only, benchmark=replace(probe_only.benchmark, greedy_recall={}))
    probed = "extraction probability, mean 31% [27–35], white-box (non-members <0.01%)"
    assert headline(bare).startswith(
        f"Undefended leaks: {probed}. PMixED (sound) leaks: 100 samples each would extract 87%"
    )
    assert "Not tested: verbatim extraction" in verdict_paragraph(
        bare
    ) and "Uniform mixing: Nothing was measured" in verdict_paragraph(bare)
    assert probed in headline(with_probe) and "166/320" in headline(with_probe)


def test_a_claim_that_was_seen_to_fail_is_said_aloud(result: AuditResult) -> None:
    def checked(violations: int) -> AuditResult:
        measured = (Measurement("claim_violations", violations, violations, violations, 1600, "count"),)
        row = next(f for f in result.findings if f.target == "pmixed" and f.setting == "white-box")
        row = replace(row, attack="claim-check", measurements=measured, by_repeats={}, curve=())
        return replace(result, findings=(*result.findings, row))

    said = "its claim is VIOLATED 38 times in 1,600 queries"
    assert said in verdict_paragraph(checked(38)) and said in headline(checked(38))
    assert "VIOLATED" not in verdict_paragraph(checked(0))
    alone = checked(38)
    assert said in verdict_paragraph(replace(alone, findings=alone.findings[-1:]))
