"""The verdict says what the numbers support, and no more."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from auditor.core.result import AuditResult, Chain, ChainStep, Finding, Measurement
from auditor.reports import markdown
from auditor.reports.verdict import find_strongest_attack_row, write_verdict_headline


def test_the_headline_says_what_leaks_of_each_target(result: AuditResult) -> None:
    assert write_verdict_headline(result) == (
        "Undefended: HIGH. Training text can be extracted (52% verbatim, white-box; also greedy "
        "decoding). PMixED (sound): INCONCLUSIVE. No leak is shown, but a signal above its "
        "baseline is not significant (verbatim), 8 of 9 signals untested. Uniform "
        "mixing: HIGH. Training text can be extracted (52% verbatim, white-box)."
    )


def test_a_zero_is_never_said_without_its_bound(result: AuditResult) -> None:
    none = changed(
        result,
        "pmixed",
        lambda f: replace(f, measurements=(Measurement("recall", 0.0, 0.0, 0.011, 320),)),
    )
    assert (
        "PMixED (sound): INCONCLUSIVE. No leakage seen, but 8 of 9 signals are "
        "untested (still possible: verbatim up to 1.1% (0/320))." in write_verdict_headline(none)
    )


def test_what_no_row_isolates_is_credited_to_nothing(result: AuditResult) -> None:
    page = markdown.render_markdown_report(result)
    assert "| training configuration and splitting: " in page
    assert "not separated without 'One adapter, all data' (train it)" in page
    assert "no step: not measured without 'Public model' (--public MODEL)" in page


def test_each_cause_is_credited_with_its_own_step(result: AuditResult) -> None:
    """A step whose interval holds zero is not significant; a row that is the undefended one is
    none."""
    apart = Chain(
        (
            ChainStep(
                {"recipe": "trained so"},
                "undefended",
                "undefended",
                None,
                "the undefended target itself is the control",
            ),
            ChainStep(
                {"splitting": "shards"},
                "undefended",
                "ensemble-unmixed",
                points(-0.3, -0.35, -0.25),
            ),
            ChainStep(
                {"mixing": "mixed"}, "ensemble-unmixed", "pmixed", points(-0.01, -0.03, 0.01)
            ),
            ChainStep(
                {"no private data": "public"}, "pmixed", "public", points(-0.0125, -0.03, 0.0)
            ),
        ),
        points(-0.31, -0.36, -0.26),
    )
    explained = changed(result, "pmixed", lambda f: replace(f, chain=apart if f.chain else None))
    page = markdown.render_markdown_report(explained)
    assert (
        "| mixing: mixed | PMixED (sound) | −1.0 points [−3.0 to 1.0] | not significant |" in page
    )
    assert "trained so" not in page and "| total |" in page


def test_without_a_chain_nothing_is_credited(result: AuditResult) -> None:
    bare = changed(result, "pmixed", lambda f: replace(f, chain=None))
    text = markdown.render_markdown_report(bare)
    assert not any(word in text for word in ("mixing −", "by control rows", "credit", "due to"))


def points(value: float, low: float, high: float) -> Measurement:
    return Measurement("recall_difference", value, low, high, 320)


def test_not_above_the_baseline_is_inconclusive(result: AuditResult) -> None:
    excess = Measurement("excess_recall", 0.02, -0.01, 0.05, 320)
    weak = changed(
        result,
        "undefended",
        lambda f: with_recall(f, Measurement("recall", 0.05, 0.03, 0.08, 320), excess),
    )
    weak = replace(weak, benchmark=replace(weak.benchmark, greedy_recall={}))
    assert write_verdict_headline(weak).startswith(
        "Undefended: INCONCLUSIVE. No leak is shown, but a signal above its baseline is not "
        "significant (verbatim), "
    )


def test_nothing_measured(result: AuditResult) -> None:
    empty = replace(result, findings=(), targets=())
    assert write_verdict_headline(empty) == "Nothing was measured on the undefended model."


def test_strongest_looks_within_a_setting(result: AuditResult) -> None:
    best = find_strongest_attack_row(result, "undefended", "text-only")
    assert best is not None
    assert (best.attack, best.setting) == ("ethicist", "text-only")
    assert find_strongest_attack_row(result, "nobody") is None


def changed(result: AuditResult, target: str, change: Callable[[Finding], Finding]) -> AuditResult:
    """The result with every measured finding of one target changed."""
    return replace(
        result,
        findings=tuple(
            change(f) if f.target == target and f.measurements else f for f in result.findings
        ),
    )


def with_recall(finding: Finding, *measured: Measurement) -> Finding:
    """The finding with these measurements in place of its own of the same names."""
    names = {m.name for m in measured}
    return replace(
        finding, measurements=(*(m for m in finding.measurements if m.name not in names), *measured)
    )


def test_probes_are_told_as_attacks_are(probe_only: AuditResult, with_probe: AuditResult) -> None:
    bare = replace(probe_only, benchmark=replace(probe_only.benchmark, greedy_recall={}))
    probed = "also greedy decoding, extraction probability"
    assert write_verdict_headline(bare).startswith(
        "Undefended: MODERATE. No extraction of text is shown; another signal is above its "
        "baseline (extraction probability, mean 31%, white-box)."
    )
    assert probed in write_verdict_headline(
        with_probe
    ) and "52% verbatim" in write_verdict_headline(with_probe)


def test_a_claim_that_was_seen_to_fail_is_said_aloud(result: AuditResult) -> None:
    def checked(violations: int) -> AuditResult:
        measured = (
            Measurement("claim_violations", violations, violations, violations, 1600, "count"),
        )
        row = next(f for f in result.findings if f.target == "pmixed" and f.setting == "white-box")
        row = replace(row, attack="claim-check", measurements=measured, by_repeats={}, curve=())
        return replace(result, findings=(*result.findings, row))

    said = "its claim is VIOLATED 38 times in 1,600 queries"
    assert said in write_verdict_headline(checked(38)) and "VIOLATED" not in write_verdict_headline(
        checked(0)
    )
    alone = checked(38)
    assert said in write_verdict_headline(replace(alone, findings=alone.findings[-1:]))
