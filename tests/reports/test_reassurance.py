"""A zero must be earned: where any signal is above its baseline, nothing that speaks of the run
reassures.

Imports only what speaks: whatever decides underneath, these are promises to a reader.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from auditor.conclusions.leak_readings import PROBABLE, VERBATIM
from auditor.conclusions.secret_details import SecretDetails
from auditor.conclusions.signals import SHOWN, assess_leak_signals
from auditor.core.nouns import UNDEFENDED
from auditor.core.result import (
    AuditResult,
    BenchmarkRecord,
    Doubt,
    Finding,
    Measurement,
    TargetRecord,
)
from auditor.reports import advice, edpb, markdown, phrases, severity, verdict
from auditor.reports.screen import build_first_screen
from auditor.reports.signals import format_least_detectable
from auditor.statistics.intervals import (
    clopper_pearson,
    subtract_nonmember_mean,
    subtract_nonmember_share,
)
from tests.conftest import methods

REASSURING = ("no leakage", "nothing here to mend", "none seen")
EXAMPLES = 120
N, OTHERS = 60, 40


def share(name: str, hits: int, n: int) -> Measurement:
    return Measurement(name, hits / n, *clopper_pearson(hits, n), n)


def probability(name: str, value: float, low: float, high: float, n: int = N) -> Measurement:
    return Measurement(name, value, low, high, n, "probability")


def auc(value: float, low: float, high: float, name: str = "membership_auc") -> Measurement:
    return Measurement(name, value, low, high, N + OTHERS, "AUC")


def row(
    attack: str, *measured: Measurement, target: str = "undefended", setting: str = "white-box"
) -> Finding:
    return Finding(target, setting, attack, {}, ("draw",), "ancestral", None, "", tuple(measured))


BASE = AuditResult(
    name="own",
    created="2025-11-21T09:14:03Z",
    tool_version="0.1.0",
    command="audit run --model own --data own.jsonl",
    plan={"model": "own"},
    benchmark=BenchmarkRecord("mine", "Records of one's own.", N, OTHERS, 0),
    targets=(TargetRecord("undefended", "Undefended", ""), TargetRecord("pmixed", "PMixED", "")),
    findings=(),
    environment={},
    timings={},
    seed=0,
    methods=methods(),
)


def run_of(*findings: Finding, greedy: dict[str, Measurement] | None = None) -> AuditResult:
    """A run over somebody's own records with these findings alone."""
    asked = {"undefended", *(finding.target for finding in findings)}
    targets = tuple(target for target in BASE.targets if target.name in asked)
    return replace(
        BASE,
        benchmark=replace(BASE.benchmark, greedy_recall=greedy or {}),
        findings=findings,
        targets=targets,
    )


def sentences(result: AuditResult) -> Iterator[tuple[str, str]]:
    """What speaks of a run, without its layout."""
    yield "screen", " ".join(build_first_screen(result, Path("runs/own")).plain.split())
    yield "headline", verdict.write_verdict_headline(result)
    seen = assess_leak_signals(result)
    yield (
        "severity",
        " ".join(severity.rate_severity(seen, target).word for target in seen.targets),
    )
    yield (
        "advise",
        " ".join(one.line for one in advice.list_advice(result, SecretDetails())),
    )
    yield "EDPB", edpb._signal_counts_paragraph(edpb.EdpbEvidence(result, "digest"))


def pages(result: AuditResult) -> Iterator[tuple[str, str]]:
    """The same, and as it is laid out, but for figures and tables of single numbers."""
    yield from sentences(result)
    page = edpb.build_edpb_document(
        edpb.EdpbEvidence(phrases.make_result_printable(result), "digest")
    )
    yield "EDPB page", f"{page.headline} {page.verdict}"


def told(result: AuditResult) -> dict[str, str]:
    return dict(pages(result))


def assert_no_reassurance(
    result: AuditResult, of: Callable[[AuditResult], Iterator[tuple[str, str]]] = pages
) -> None:
    for where, text in of(result):
        assert not [said for said in REASSURING if said in text.lower()], (where, text)


# --- what the reviewers saw ---


def test_no_verbatim_extraction_beside_membership_that_is_shown() -> None:
    result = run_of(
        row("perplexity", share("recall", 0, N), share("recall_nonmembers", 0, OTHERS)),
        row("membership", auc(0.642, 0.577, 0.704)),
    )
    assert_no_reassurance(result)
    text = told(result)
    assert (
        text["headline"]
        == "Undefended: MODERATE. No extraction of text is shown; another signal is above its "
        "baseline (membership AUC 0.642, white-box)."
    )
    assert "leaks (Undefended): no extraction of text is shown; another" in text["advise"]
    assert "NEXT audit advise runs/own" in text["screen"]
    assert "leakage is shown by membership" in text["EDPB"]


def test_one_greedy_hit_counts() -> None:
    """At 40 copies 1 of 11, while an exact probability says next to nothing."""
    greedy = {"1": share("greedy", 0, 25), "40": share("greedy", 1, 11)}
    p = probability("extraction_probability", 3e-5, 1e-6, 0.1, 36)
    result = run_of(row("extraction-probability", p), greedy=greedy)
    assert_no_reassurance(result)
    assert told(result)["headline"].startswith(
        "Undefended: HIGH. Training text can be extracted (2.8% by greedy decoding)."
    )
    assert "2.8% by greedy decoding" in told(result)["advise"]


def test_probable_extraction_that_does_not_come_is_a_contradiction() -> None:
    """A filter, a truncation, another distribution: 0 of 20 cannot be, where each has a probability
    of 40%."""

    def run(hits: int, *others: Measurement, target: str = "undefended") -> AuditResult:
        seen = row(
            "perplexity",
            share("recall", hits, 20),
            share("recall_nonmembers", 0, 20),
            target=target,
        )
        return run_of(seen, row("extraction-probability", *others, target=target))

    likely = probability("extraction_probability", 0.4, 0.2, 0.6, 20)
    # else the probability shows it
    strangers = probability("extraction_probability_nonmembers", 0.4, 0.2, 0.6, 20)
    for target in ("undefended", "pmixed"):
        result = run(0, likely, strangers, target=target)
        assert_no_reassurance(result)
        assert (
            "perplexity extracts 0 of 20, but at the measured probability of 40%"
            in told(result)["headline"]
        )
        assert "a filter, a truncation or another distribution" in told(result)["headline"]
        assert told(result)["advise"].startswith(
            "resolve first (contradiction): perplexity extracts 0 of 20"
        )
        assert "audit advise" in told(result)["screen"]
    # 5 or fewer of 20 at 40%: 13%
    assert "a filter" not in told(run(5, likely, strangers))["headline"]
    few = probability("extraction_probability", 0.1, 0.0, 0.2, 20)
    assert "a filter" not in told(run(0, few, strangers))["headline"]  # none of 20 at 10%: 12%


def test_greedy_hits_beside_no_sampled_hit_are_a_contradiction() -> None:
    drawn = row("perplexity", share("recall", 0, N), share("any_of_k", 0, N))
    said = "Greedy decoding extracts {} of 60, but no attack extracts any"
    assert said.format(9) in verdict.write_verdict_headline(
        run_of(drawn, greedy={"all": share("greedy", 9, N)})
    )
    assert said.format(3) not in verdict.write_verdict_headline(
        run_of(drawn, greedy={"all": share("greedy", 3, N)})
    )


def test_greedy_hits_on_other_secrets_are_no_contradiction() -> None:
    drawn = row("perplexity", share("recall", 0, 20), share("any_of_k", 0, 20))
    assert "no attack extracts" not in verdict.write_verdict_headline(
        run_of(drawn, greedy={"all": share("greedy", 9, N)})
    )


@pytest.mark.parametrize(
    ("extracted", "n_greedy", "chance"),
    [(0, 9, "0.002"), (4, 30, "3e-06"), (9, 30, "0.0005"), (4, 9, None), (0, 6, None)],
)
def test_a_tuned_attack_below_greedy_decoding_has_not_earned_its_number(
    extracted: int, n_greedy: int, chance: str | None
) -> None:
    """The chance is McNemar's, exact, at the worst pairing: 4 extracted secrets, 30 others."""
    tuned = replace(row("ethicist", share("recall", extracted, N)), drawn=100, samples=0)
    headline = verdict.write_verdict_headline(
        run_of(tuned, greedy={"all": share("greedy", n_greedy, N)})
    )
    said = f"ethicist extracts {extracted} of 60, but greedy decoding, which needs no tuning, "
    if chance is None:
        assert "needs no tuning" not in headline
    else:
        said += f"extracts {n_greedy} (paired; {chance} by chance if both were equally strong)"
        assert said in headline
    white_box = replace(row("ethicist", share("recall", n_greedy, N)), drawn=100, samples=0)
    both = run_of(
        tuned, replace(white_box, setting="white-box"), greedy={"all": share("greedy", n_greedy, N)}
    )
    assert "needs no tuning" not in verdict.write_verdict_headline(both)
    plain = run_of(replace(tuned, samples=100), greedy={"all": share("greedy", n_greedy, N)})
    assert "needs no tuning" not in verdict.write_verdict_headline(plain)


def test_greedy_decoding_must_give_what_is_more_probable_than_not() -> None:
    found = row("extraction-probability", share("discoverable_1_0.9", 4, N))
    said = "4 of 60 suffixes have an extraction probability of 90% or more, so greedy decoding"
    assert said in verdict.write_verdict_headline(
        run_of(found, greedy={"all": share("greedy", 3, N)})
    )
    assert said not in verdict.write_verdict_headline(
        run_of(found, greedy={"all": share("greedy", 4, N)})
    )


def test_what_is_likely_of_untrained_suffixes_too_is_not_called_extracted() -> None:
    """Short suffixes, 18 of 60 of them all but certain: of 60 non-members as many, or none."""
    name = "discoverable_1_0.9"
    for n_others, suspected in ((18, False), (0, True)):
        found = row(
            "extraction-probability",
            share(name, 18, N),
            share(f"{name}_nonmembers", n_others, N),
        )
        readings = [r for r in PROBABLE.read_numbers(found) if r.measured.name == name]
        assert [r.is_above_baseline for r in readings] == [suspected]


def test_a_defended_target_is_not_called_clean_over_its_own_signals() -> None:
    undefended = row("perplexity", share("recall", 9, N), share("recall_nonmembers", 0, OTHERS))
    defended = row(
        "perplexity", share("recall", 0, N), share("recall_nonmembers", 0, OTHERS), target="pmixed"
    )
    result = run_of(undefended, defended, row("membership", auc(0.7, 0.6, 0.8), target="pmixed"))
    assert "PMixED: MODERATE. " in verdict.write_verdict_headline(result)
    assert "(membership AUC 0.700, white-box)" in verdict.write_verdict_headline(result)
    assert_no_reassurance(result)
    assert "--max membership_auc=0.6" in told(result)["advise"]  # a gate that does not hold


@pytest.mark.parametrize("whose", ["data", "target"])
def test_a_doubt_forbids_reassurance(whose: str) -> None:
    result = run_of(row("perplexity", share("recall", 0, N), share("recall_nonmembers", 0, OTHERS)))
    assert "No leakage seen" in verdict.write_verdict_headline(result)
    doubt = Doubt("text form", "No rendering makes members more likely than non-members.")
    if whose == "data":
        doubtful = replace(result, benchmark=replace(result.benchmark, doubts=(doubt,)))
    else:
        doubtful = replace(
            result, targets=tuple(replace(t, doubts=(doubt,)) for t in result.targets)
        )
    assert_no_reassurance(doubtful)
    assert verdict.write_verdict_headline(doubtful).startswith(doubt.sentence)
    assert told(doubtful)["advise"].startswith(f"resolve first (text form): {doubt.sentence}")
    # the box of the page began in lower case, and the next sentence ran on
    bare = replace(doubt, sentence=phrases.lower_first(doubt.sentence).removesuffix("."))
    told_bare = replace(result, benchmark=replace(result.benchmark, doubts=(bare,)))
    assert verdict.write_verdict_headline(told_bare).startswith(f"{doubt.sentence} ")


def test_likelihood_alone_forbids_reassurance_and_adds_nothing_to_a_leak() -> None:
    doubt = Doubt("likelihood", "Undefended: members' true tokens are more likely.")
    targets = tuple(replace(t, doubts=(doubt,)) for t in BASE.targets[:1])
    clean, leaking = (
        replace(
            run_of(
                row("perplexity", share("recall", hits, N), share("recall_nonmembers", 0, OTHERS))
            ),
            targets=targets,
        )
        for hits in (0, 30)
    )
    assert_no_reassurance(clean)
    assert verdict.write_verdict_headline(clean).startswith(
        doubt.sentence
    ) and doubt.sentence not in verdict.write_verdict_headline(leaking)


def test_what_is_clean_is_said_to_be_with_what_it_would_have_taken() -> None:
    """The other side: not everything is alarming."""
    result = run_of(
        row("perplexity", share("recall", 0, N), share("recall_nonmembers", 0, OTHERS)),
        row("membership", auc(0.5, 0.44, 0.56)),
    )
    for where, text in told(result).items():
        assert "no leakage seen" in text.lower() or where == "severity", (where, text)
    page = markdown.render_markdown_report(result)
    (verbatim,) = re.findall(r"\| Verbatim, white-box \|.*", page)
    (membership,) = re.findall(r"\| Membership, white-box \|.*", page)
    assert verbatim.endswith("| no leak shown; 12% would show one |")
    assert membership.endswith("| no leak shown; 0.560 would show one |")


def test_of_so_few_that_all_would_have_to_be_extracted_no_percentage_is_told() -> None:
    """Of two records against two that were never trained on both are just enough; one never is."""
    for n, found in ((2, "all 2"), (1, "no value of so few records")):
        excess = subtract_nonmember_share("excess_recall", np.zeros(n) > 0, np.zeros(2) > 0)
        shares = share("recall", 0, n), share("recall_nonmembers", 0, 2)
        result = run_of(row("perplexity", *shares, excess))
        (seen,) = (
            s
            for s in assess_leak_signals(result).list_tested_signals("undefended")
            if s.kind is VERBATIM
        )
        assert format_least_detectable(seen) == found, (n, seen.smallest_detectable)


def test_a_number_that_can_only_hint_names_no_value_that_would_show_a_leak() -> None:
    """It said "only a hint ...; 7.1% would show one" of 14%."""
    surely = share("discoverable_1_0.9", 2, 14)
    result = run_of(row("extraction-probability", share("extraction_probability", 0, 14), surely))
    (line,) = re.findall(
        r"\| Extraction probability, white-box \|.*", markdown.render_markdown_report(result)
    )
    assert line.endswith("| only a hint: this number alone cannot show a leak |")
    assert "extracted by 1 sample with a probability of 90% or more" in line


def test_no_auc_above_1_is_said_to_be_significant() -> None:
    """Of six records against six even an AUC of 1 may be chance: 1.09 was the smallest."""
    for low, text in ((0.01, "no value of so few records"), (0.45, "0.650")):
        result = run_of(row("membership", auc(0.6, low, 1.0)))
        (signal,) = assess_leak_signals(result).list_tested_signals("undefended")
        assert format_least_detectable(signal) == text


# --- whatever else may be measured ---


@dataclass(frozen=True)
class Drawn:
    """A finding, greedy hits by repeat count, and whether something in them is above its
    baseline."""

    finding: Finding | None
    above: bool
    greedy: dict[str, Measurement] | None = None


@st.composite
def counts(draw: st.DrawFn, name: str, attack: str) -> Drawn:
    hits, others = draw(st.integers(0, 12)), draw(st.one_of(st.none(), st.integers(0, 6)))
    own, floor = (
        share(name, hits, N),
        () if others is None else (share(f"{name}_nonmembers", others, OTHERS),),
    )
    recall = () if name == "recall" else (share("recall", 0, N),)
    above = own.low > (others or 0) / OTHERS
    return Drawn(row(attack, *recall, own, *floor), above)


@st.composite
def personal_data(draw: st.DrawFn) -> Drawn:
    hits, others = draw(st.integers(0, 12)), draw(st.one_of(st.none(), st.integers(0, 6)))
    own, floor = (
        {"email": share("recall", hits, N)},
        {} if others is None else {"email": share("r", others, OTHERS)},
    )
    found = replace(row("ethicist", share("recall", 0, N)), by_kind=own, by_kind_nonmembers=floor)
    return Drawn(found, own["email"].low > (others or 0) / OTHERS)


@st.composite
def probabilities(draw: st.DrawFn, name: str, attack: str) -> Drawn:
    value, reach = draw(st.floats(0, 1)), draw(st.floats(0, 0.3))
    own = probability(name, value, max(0.0, value - reach), min(1.0, value + reach))
    other = draw(st.one_of(st.none(), st.floats(0, 0.2)))
    floor = (
        None
        if other is None
        else probability(f"{name}_nonmembers", other, other / 2, other + 0.1, OTHERS)
    )
    excess = (
        ()
        if floor is None or draw(st.booleans())
        else (subtract_nonmember_mean(f"excess_{name}", own, floor),)
    )
    above = (
        own.low * N >= 1
        if floor is None
        else own.low > floor.high or (own.low > floor.value and value * N >= 1)
    )
    measured = (own, *(() if floor is None else (floor,)), *excess)
    return Drawn(row(attack, *measured), above)


@st.composite
def canaries(draw: st.DrawFn) -> Drawn:
    bits, reach, exposed = draw(st.floats(0, 20)), draw(st.floats(0, 5)), draw(st.integers(0, 3))
    mean = Measurement("exposure", bits, max(0.0, bits - reach), bits + reach, 20, "bits")
    above = exposed > 0 or mean.low > 1 / math.log(2)
    measured = (mean, share("exposed_share", exposed, 20))
    return Drawn(row("exposure", *measured), above)


@st.composite
def members(draw: st.DrawFn) -> Drawn:
    value, reach = draw(st.floats(0.3, 0.7)), draw(st.floats(0, 0.3))
    own = auc(value, max(0.0, value - reach), min(1.0, value + reach))
    above = own.low > 0.5 or own.high < 0.5
    return Drawn(row("membership", own), above)


@st.composite
def generations(draw: st.DrawFn) -> Drawn:
    rate, reach, records = draw(st.floats(0, 30)), draw(st.floats(0, 20)), draw(st.integers(0, 3))
    floor, strangers = draw(st.floats(0, 10)), draw(st.one_of(st.none(), st.integers(0, 3)))
    per = "per 1,000"
    own = Measurement("memorised_per_1000", rate, max(0.0, rate - reach), rate + reach, 500, per)
    other = Measurement("memorised_per_1000_nonmembers", floor, floor / 2, floor * 2, 500, per)
    out = Measurement("records_out", records, records, records, 500, "count")
    held = (
        ()
        if strangers is None
        else (Measurement("records_out_nonmembers", *[strangers] * 3, 500, "count"),)
    )
    above = own.low > floor or records > (strangers or 0)
    return Drawn(row("untargeted", own, other, out, *held), above)


@st.composite
def audits(draw: st.DrawFn) -> Drawn:
    least, broken = draw(st.sampled_from([0.0, 0.01, 2.0])), draw(st.sampled_from([0, 0, 3]))
    bound = Measurement("epsilon_lower_bound", least, least, math.inf, 100, "nats")
    violated = Measurement("claim_violations", broken, broken, broken, 100, "count")
    above = least > 0 or broken > 0
    return Drawn(row("epsilon-audit", bound, violated), above)


@st.composite
def decoded(draw: st.DrawFn) -> Drawn:
    hits = draw(st.integers(0, 2))
    greedy = {"1": share("greedy", 0, 30), "8": share("greedy", hits, 30)}
    return Drawn(None, hits > 0, greedy)


SIGNALS = st.one_of(
    counts("recall", "perplexity"),
    counts("near_verbatim_recall", "zlib"),
    personal_data(),
    probabilities("extraction_probability", "extraction-probability"),
    probabilities("near_verbatim_probability", "near-verbatim"),
    canaries(),
    members(),
    generations(),
    audits(),
    decoded(),
)


@settings(max_examples=EXAMPLES)
@given(
    st.lists(
        st.tuples(SIGNALS, st.sampled_from(["text-only", "white-box"])), min_size=1, max_size=4
    ),
    st.booleans(),
)
def test_where_a_signal_is_above_its_baseline_nothing_reassures(
    seen: list[tuple[Drawn, str]], defended: bool
) -> None:
    """120 combinations of up to four signals, of the undefended model or of a defended one."""
    target = "pmixed" if defended else "undefended"
    greedy = None if defended else next((one.greedy for one, _ in seen if one.greedy), None)
    findings = [
        replace(one.finding, target=target, setting=setting) for one, setting in seen if one.finding
    ]
    result = run_of(*findings, greedy=greedy)
    if any(one.above for one, _ in seen if one.greedy is None or one.greedy is greedy):
        assert_no_reassurance(result, sentences)


@pytest.mark.parametrize(
    ("hits", "others", "shown"),
    [(2, 0, True), (1, 0, True), (0, 0, False), (1, 1, False), (2, 1, False)],
    ids=str,
)
def test_one_greedy_hit_counts_whichever_attack_decoded_greedily(
    hits: int, others: int, shown: bool
) -> None:
    """A check called both records that the model recited "inconclusive", a run called one of them a
    leak."""
    measured = share("recall", hits, 2), share("recall_nonmembers", others, 2)
    (seen,) = assess_leak_signals(
        run_of(replace(row("perplexity", *measured), decoding="greedy"))
    ).list_tested_signals(UNDEFENDED)
    assert (seen.kind, seen.status == SHOWN) == (VERBATIM, shown)
    # Non-members are recited too: one more of two members is no leak yet.
    assert (seen.suspected, seen.excess is None) == (hits > others > 0, False)
    (sampled,) = assess_leak_signals(run_of(row("perplexity", *measured))).list_tested_signals(
        UNDEFENDED
    )
    assert sampled.status != SHOWN


def test_a_record_that_samples_hold_is_named_though_no_text_is_significant() -> None:
    """One member of 28 is extracted by 100 samples with 99.9%, which a mean of 0.3% hides."""
    floor = probability("extraction_probability_nonmembers", 0.0, 0.0, 0.1)
    found = run_of(
        row("membership", auc(0.95, 0.85, 0.99)),
        row(
            "extraction-probability",
            probability("extraction_probability", 0.003, 0.0, 0.1),
            floor,
            share("discoverable_1_0.1", 0, N),
            share("discoverable_100_0.9", 1, N),
        ),
    )
    told = dict(sentences(found))
    assert (
        "(membership AUC 0.950, white-box; not significant: extraction probability)"
        in (told["screen"])
    )
    assert "extracted by 100 samples with a probability of 90% or more" in told["screen"]
    why = severity.rate_severity(assess_leak_signals(found), "undefended").clause
    assert why.startswith("no extraction of text is shown; ")


def test_personal_data_are_shown_by_whichever_attack_shows_them() -> None:
    def of(attack: str, hits: int, recall: int) -> Finding:
        kinds, floor = {"email": share("recall", hits, N)}, {"email": share("recall", 0, OTHERS)}
        base = row(attack, share("recall", recall, N), share("recall_nonmembers", 0, OTHERS))
        return replace(base, by_kind=kinds, by_kind_nonmembers=floor)

    both = run_of(of("perplexity", 1, 40), of("blend", 40, 30))
    line = next(
        x
        for x in build_first_screen(both, Path("runs/own")).plain.splitlines()
        if x.startswith("WHAT")
    )
    assert f"e-mail addresses 40/{N}" in line and "not significant" not in line
    alone = build_first_screen(run_of(of("perplexity", 1, 40)), Path("runs/own")).plain
    assert "not significant" in next(x for x in alone.splitlines() if x.startswith("WHAT"))
