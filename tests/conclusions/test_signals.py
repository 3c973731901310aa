"""Each signal is decided by its own baseline, says what it would have taken, and names the gate
that holds it."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from auditor.conclusions.signals import (
    NOT_SHOWN,
    NOT_TESTED,
    SHOWN,
    LeakSignal,
    assess_leak_signals,
)
from auditor.core.result import (
    RELEASED_TEXT,
    AuditResult,
    BenchmarkRecord,
    Finding,
    Measurement,
    TargetRecord,
)
from auditor.gate.policy import parse_gate_limits
from auditor.statistics.intervals import (
    clopper_pearson,
    subtract_nonmember_mean,
    subtract_nonmember_share,
)
from auditor.statistics.metrics import ADJUSTED_AUC
from auditor.statistics.rank_tests import adjust_false_discovery, compute_rank_p_values
from tests.conftest import methods

N, OTHERS = 60, 40


def share(name: str, hits: int, n: int) -> Measurement:
    return Measurement(name, hits / n, *clopper_pearson(hits, n), n)


def probability(name: str, value: float, reach: float, n: int) -> Measurement:
    return Measurement(name, value, max(0.0, value - reach), value + reach, n, "probability")


def auc(low: float, high: float, name: str = "membership_auc") -> Measurement:
    return Measurement(name, (low + high) / 2, low, high, N + OTHERS, "AUC")


def row(
    *measured: Measurement,
    attack: str = "any",
    target: str = "undefended",
    setting: str = "white-box",
) -> Finding:
    return Finding(target, setting, attack, {}, (), "ancestral", None, "", measured)


def run(*findings: Finding, **of_data: object) -> AuditResult:
    data = replace(BenchmarkRecord("own", "", N, OTHERS, 0), **of_data)  # type: ignore[arg-type]
    names = dict.fromkeys(("undefended", *(f.target for f in findings)))
    targets = tuple(TargetRecord(name, name, "", companion=name == "control") for name in names)
    return AuditResult("run", "", "", "", {}, data, targets, findings, {}, {}, 0, methods=methods())


def signal(result: AuditResult, kind: str, target: str = "undefended") -> LeakSignal:
    (found,) = (
        s for s in assess_leak_signals(result).list_target_signals(target) if s.kind.name == kind
    )
    return found


@pytest.mark.parametrize(("hits", "others"), [(0, 0), (3, 0), (12, 0), (12, 3), (3, 6)])
def test_the_smallest_leak_that_would_have_been_shown_is_the_smallest(
    hits: int, others: int
) -> None:
    """Against a search over all that could have been seen, by the row's own excess."""

    def counted(k: int) -> LeakSignal:
        left = subtract_nonmember_share(
            "excess_recall", *(_ones(a, b) for a, b in ((k, N), (others, OTHERS)))
        )
        return signal(
            run(row(share("recall", k, N), share("recall_nonmembers", others, OTHERS), left)),
            "verbatim",
        )

    least = next(k for k in range(N + 1) if counted(k).status == SHOWN)
    found = counted(hits)
    assert found.smallest_detectable == pytest.approx(least / N)
    assert (found.status == SHOWN) == (hits >= least)
    assert found.suspected == (found.status == NOT_SHOWN and hits / N > others / OTHERS)


def _ones(hits: int, n: int) -> object:
    import numpy as np

    return np.arange(n) < hits


def test_what_released_text_tells_is_one_question_with_one_level() -> None:
    """Four numbers at 5%: each is held to 1.25%, and says the smallest that would have been shown
    so."""

    def told(hits: int, low: float) -> AuditResult:
        left = subtract_nonmember_share("excess_recall", _ones(hits, N), _ones(0, OTHERS))
        text = row(share("recall", hits, N), share("recall_nonmembers", 0, OTHERS), left)
        nearly = row(
            share("near_verbatim_recall", 0, N), share("near_verbatim_recall_nonmembers", 0, OTHERS)
        )
        rate = Measurement("tpr_at_1pct_fpr", 0.0, 0.0, 0.02, N)
        return run(text, nearly, row(auc(low, 0.6), rate, attack="membership"))

    def released(result: AuditResult, kind: str) -> LeakSignal:
        return signal(replace(result, family=RELEASED_TEXT), kind)

    slight = told(0, 0.505)
    assert signal(slight, "membership").status == SHOWN
    assert (
        released(slight, "membership").status == NOT_SHOWN
        and released(slight, "membership").suspected
    )
    assert released(told(0, 0.53), "membership").status == SHOWN
    least = next(k for k in range(N + 1) if released(told(k, 0.505), "verbatim").status == SHOWN)
    assert released(slight, "verbatim").smallest_detectable == pytest.approx(least / N)
    assert signal(slight, "verbatim").smallest_detectable < least / N


def test_a_mean_probability_is_held_to_the_interval_of_its_baseline() -> None:
    strangers = probability("extraction_probability_nonmembers", 0.01, 0.03, OTHERS)

    def found(value: float) -> LeakSignal:
        own = probability("extraction_probability", value, 0.03, N)
        return signal(
            run(
                row(
                    own,
                    strangers,
                    subtract_nonmember_mean("excess_extraction_probability", own, strangers),
                )
            ),
            "probability",
        )

    assert [found(p).status for p in (0.03, 0.2)] == [NOT_SHOWN, SHOWN]
    assert found(0.01).smallest_detectable == pytest.approx(0.01 + math.hypot(0.01, 0.03))
    alone = signal(run(row(probability("extraction_probability", 1e-6, 0.0, N))), "probability")
    # of any model each suffix has some probability
    assert alone.status == NOT_SHOWN and not alone.suspected
    assert (
        signal(run(row(probability("extraction_probability", 0.4, 0.1, N))), "probability").status
        == SHOWN
    )


def test_many_samples_show_what_one_does_not() -> None:
    one = [
        probability(f"extraction_probability{x}", 1e-4, 0.04, n)
        for x, n in (("", N), ("_nonmembers", OTHERS))
    ]
    many = [
        probability("expected_any_of_10000", 0.63, 0.1, N),
        probability("expected_any_of_10000_nonmembers", 0.01, 0.05, OTHERS),
    ]
    assert signal(run(row(*one)), "probability").status == NOT_SHOWN
    assert signal(run(row(*one, *many)), "probability").status == SHOWN


def test_membership_counts_either_way_and_by_its_strongest_score() -> None:
    assert signal(run(row(auc(0.56, 0.66))), "membership").status == SHOWN
    assert signal(run(row(auc(0.34, 0.44))), "membership").status == SHOWN


def test_an_older_record_is_read_by_the_strongest_of_its_scores_corrected_for_their_number() -> (
    None
):
    main, ez_mia = auc(0.54, 0.74), auc(0.54, 0.74, "membership_auc_ez_mia")
    found = signal(run(row(main, ez_mia, auc(0.7, 0.87, "membership_auc_loss"))), "membership")
    assert found.status == SHOWN and found.gate_rule == "membership_auc=0.6"
    assert found.measured is not None and found.measured.note == "loss, best of 2 scores"
    assert found.measured.value == pytest.approx(0.785) and found.measured.low < 0.7
    two = run(
        row(
            auc(0.45, 0.55),
            auc(0.505, 0.7, "membership_auc_loss"),
            auc(0.5, 0.6, "membership_auc_min_k"),
        )
    )
    not_shown = signal(two, "membership")  # above chance by itself, and not as the best of two
    assert not_shown.status == NOT_SHOWN and not_shown.suspected is False
    assert not_shown.measured is not None and not_shown.measured.low < 0.5


def test_a_suffix_as_likely_as_those_of_non_members_is_not_called_extracted() -> None:
    def found(*more: Measurement) -> LeakSignal:
        mean = probability("extraction_probability", 0.0, 0.0, N)
        floor = share("discoverable_1_0.5_nonmembers", 1, OTHERS)
        measured = (mean, share("discoverable_1_0.5", 20, N), floor, *more)
        return signal(run(row(*measured)), "probability")

    raw = found().measured
    assert raw is not None and raw.name == "discoverable_1_0.5"
    floor = share("extracted_1_0.5_nonmembers", 1, OTHERS)
    calibrated = found(share("extracted_1_0.5", 12, N), floor).measured
    assert calibrated is not None and calibrated.name == "extracted_1_0.5"
    assert calibrated.value == 12 / N


def test_those_trained_on_most_often_are_looked_at_by_themselves() -> None:
    quiet = row(auc(0.46, 0.7))
    often = replace(quiet, by_repeats={"1": auc(0.4, 0.6), "16": auc(0.7, 0.95)})
    assert signal(run(quiet), "membership").status == NOT_SHOWN
    found = signal(run(often), "membership")
    assert (found.status, found.count, found.gate_rule) == (
        SHOWN,
        "16",
        "membership_auc(count=16)=0.6",
    )
    assert parse_gate_limits([found.gate_rule])[0].count == 16
    chance = replace(quiet, by_repeats={"1": auc(0.4, 0.6), "16": auc(0.505, 0.95)})
    assert signal(run(chance), "membership").status == NOT_SHOWN


def test_copies_that_are_not_told_do_not_stand_for_all_members() -> None:
    """A small group is often far from chance by chance: the number over all members is then the one
    that is shown."""
    whole = replace(
        row(auc(0.46, 0.6)), by_repeats={"1": auc(0.44, 0.56), "8": auc(0.3, 0.9)}, scores_tried=11
    )
    found = signal(run(whole), "membership")
    assert (found.status, found.count) == (NOT_SHOWN, "")


def test_a_number_that_shares_its_level_is_shown_with_the_interval_that_decides() -> None:
    """Never "not significant" next to an interval that excludes chance."""
    by_repeats = {
        "1": probability("extraction_probability", 0.02, 0.02, N),
        "16": probability("extraction_probability", 0.3, 0.2, N),
    }
    strangers = probability("extraction_probability_nonmembers", 0.05, 0.03, OTHERS)
    whole = replace(
        row(probability("extraction_probability", 0.05, 0.04, N), strangers), by_repeats=by_repeats
    )
    found = signal(run(whole), "probability")
    assert found.status == SHOWN and found.count == "16" and found.n_tests == 2
    assert found.measured is not None
    assert found.measured.low == pytest.approx(0.3 - 0.2 * 2.2414 / 1.96, abs=1e-3)


def test_members_of_another_kind_are_a_doubt_and_no_membership() -> None:
    result = run(row(auc(0.8, 0.9), auc(0.7, 0.9, "blind_auc")))
    found = signal(result, "membership")
    assert found.status == NOT_TESTED and "differ in kind" in found.reason
    (doubt,) = assess_leak_signals(result).doubts["undefended"]
    assert doubt.kind == "non-members" and not assess_leak_signals(result).shows_no_leakage(
        "undefended"
    )


@pytest.mark.parametrize(
    ("low", "status"), [(0.45, NOT_SHOWN), (0.55, SHOWN), (math.nan, NOT_TESTED)]
)
def test_members_of_another_kind_are_judged_by_the_adjusted_auc(low: float, status: str) -> None:
    adjusted = replace(auc(low, low + 0.2, ADJUSTED_AUC), n=0 if math.isnan(low) else 100)
    result = run(row(auc(0.8, 0.9), adjusted, auc(0.7, 0.9, "blind_auc")))
    found = signal(result, "membership")
    assert found.status == status and not assess_leak_signals(result).shows_no_leakage("undefended")
    (doubt,) = assess_leak_signals(result).doubts["undefended"]
    assert ("on what both have in common" in doubt.sentence) == (status != NOT_TESTED)
    assert ("too few texts in common" in doubt.sentence) == (status == NOT_TESTED)


def test_an_auc_that_the_adjustment_does_not_confirm_is_a_hint() -> None:
    def found(low: float) -> LeakSignal:
        like = auc(0.4, 0.6, "blind_auc")
        return signal(run(row(auc(0.6, 0.8), auc(low, 0.8, ADJUSTED_AUC), like)), "membership")

    assert found(0.55).status == SHOWN
    hint = found(0.45)
    assert hint.status == NOT_SHOWN and hint.suspected and not hint.can_show_leak


def test_greedy_hits_stand_beside_those_of_non_members() -> None:
    def found(hits: int, others: int | None) -> LeakSignal:
        strangers = None if others is None else share("greedy_nonmembers", others, OTHERS)
        return signal(
            run(greedy_recall={"1": share("greedy", hits, N)}, greedy_nonmembers=strangers),
            "greedy",
        )

    assert [found(*of).status for of in ((0, None), (1, None), (1, 0), (1, 2))] == [
        NOT_SHOWN,
        SHOWN,
        SHOWN,
        NOT_SHOWN,
    ]
    assert found(1, 2).suspected and not found(0, None).suspected
    # A share that is a little higher than that of non-members is no leak: it is in half of runs.
    close, far = found(19, 12), found(40, 12)
    assert (close.status, close.suspected, far.status) == (NOT_SHOWN, True, SHOWN)
    smallest = round(close.smallest_detectable * N)
    assert [found(hits, 12).status for hits in (smallest - 1, smallest)] == [NOT_SHOWN, SHOWN]


def test_kinds_of_personal_data_share_one_level() -> None:
    """Of 20 kinds of 300 values that leak nothing, one seemed to leak in a third of the runs."""

    def found(*members: int) -> LeakSignal:
        kinds = {f"kind {i}": share("recall", n, N) for i, n in enumerate(members)}
        others = dict.fromkeys(kinds, share("recall_nonmembers", 12, OTHERS))
        finding = replace(row(share("recall", 0, N)), by_kind=kinds, by_kind_nonmembers=others)
        return signal(run(finding), "personal data")

    several = found(35, *[18] * 19)
    assert (found(35).status, several.status, several.suspected) == (SHOWN, NOT_SHOWN, True)
    assert found(40, *[18] * 19).status == SHOWN
    # The smallest share is the first that this test, with its own interval, would show.
    smallest = round(several.smallest_detectable * N)
    statuses = [found(hits, *[18] * 19).status for hits in (smallest - 1, smallest)]
    assert statuses == [NOT_SHOWN, SHOWN]


def test_groups_show_a_leak_from_the_smallest_detectable_share_on() -> None:
    """21 of 94 names were not significant, and the report said that 22% would be."""

    def found(hits: int) -> LeakSignal:
        groups = {name: share("recall", hits if name == "a" else 0, 94) for name in "abcd"}
        others = share("recall_nonmembers", 0, 21)
        finding = replace(row(share("recall", 0, 376), others), by_group=groups)
        return signal(run(finding), "verbatim")

    shown = next(hits for hits in range(94) if found(hits).status == SHOWN)
    before = found(shown - 1)
    assert round(before.smallest_detectable * before.measured.n) == shown


def test_attacks_share_one_level() -> None:
    """Of ten attacks on a model that leaks nothing, one showed a leak in a fifth of the runs."""

    def attack(name: str, hits: int, **more: object) -> Finding:
        left = subtract_nonmember_share("excess_recall", _ones(hits, N), _ones(2, OTHERS))
        others = share("recall_nonmembers", 2, OTHERS)
        return replace(row(share("recall", hits, N), others, left, attack=name), **more)

    def found(hits: int, rivals: int, **more: object) -> LeakSignal:
        others = [attack(f"rival {i}", 3) for i in range(rivals)]
        return signal(run(attack("best", hits, **more), *others), "verbatim")

    alone = next(k for k in range(N) if found(k, 0).status == SHOWN)
    several = found(alone, 9)
    assert (several.status, several.suspected, several.n_tests) == (NOT_SHOWN, True, 10)
    smallest = round(several.smallest_detectable * N)
    assert alone < smallest < alone + 6
    assert [found(k, 9).status for k in (smallest - 1, smallest)] == [NOT_SHOWN, SHOWN]
    # Groups share another level: the share of all records keeps its own.
    groups = {f"{i}": share("recall", alone // 2, N // 2) for i in range(2)}
    assert found(alone, 0, by_group=groups).n_tests == 1
    # Without non-members a single hit is enough, whatever the number of attacks.
    hit = run(*(row(share("recall", i == 0, N), attack=str(i)) for i in range(10)))
    assert signal(hit, "verbatim").status == SHOWN


@pytest.mark.parametrize(("alternatives", "least"), [(99, 60), (999, 6), (99_999, 1)])
def test_the_smallest_share_of_ranked_values_is_that_of_the_discoveries(
    alternatives: int, least: int
) -> None:
    """It was one value of 300, which is no discovery among 99 or 999 alternatives."""
    n = 300
    options = {"fdr": 0.05, "alternatives": alternatives}
    ranked = replace(row(share("identifiers_above_chance", 0, n)), options=options)
    assert signal(run(ranked), "membership").smallest_detectable == pytest.approx(least / n)
    for hits, is_listed in ((least - 1, False), (least, True)):
        first = np.where(np.arange(n) < hits, 0.0, alternatives)
        p_values = compute_rank_p_values(first, np.zeros(n), np.full(n, float(alternatives)))
        assert (adjust_false_discovery(p_values) <= 0.05).any() == is_listed


def test_records_of_few_people_must_exceed_over_people() -> None:
    """Of 60 and 40 people with five records each, 10% of the runs without a leak showed one."""

    def found(reach: float, per_person: int = 5) -> LeakSignal:
        left = subtract_nonmember_share("excess_recall", _ones(45, 300), _ones(12, 200))
        records = share("recall", 45, 300), share("recall_nonmembers", 12, 200), left
        means = (
            probability("user_recall", 0.15, reach, 300 // per_person),
            probability("user_recall_nonmembers", 0.06, reach, 200 // per_person),
        )
        return signal(run(row(*records, *means)), "verbatim")

    certain, close = found(0.03), found(0.07)
    assert (certain.status, close.status, close.suspected) == (SHOWN, NOT_SHOWN, True)
    assert close.excess is not None and close.excess.low < 0
    assert close.smallest_detectable > 0.15
    # If each person has one record, the interval over records holds.
    assert found(0.07, per_person=1).status == SHOWN


def test_what_was_not_tested_says_why() -> None:
    found = signal(
        run(replace(row(attack="exposure"), not_applicable="there are no canaries")), "exposure"
    )
    assert (found.status, found.reason) == (NOT_TESTED, "there are no canaries")
    assert {s.kind.name for s in assess_leak_signals(run()).signals if s.status == NOT_TESTED} == {
        s.kind.name for s in assess_leak_signals(run()).signals
    }
    assert not assess_leak_signals(run()).shows_no_leakage(
        "undefended"
    )  # of nothing nothing follows


def test_greedy_decoding_behind_a_defense_is_not_tested_and_says_so() -> None:
    """It is tried on the undefended model alone: of a defended one nothing follows from it."""
    found = signal(run(row(share("recall", 0, N), target="pmixed")), "greedy", "pmixed")
    assert (found.status, bool(found.reason)) == (NOT_TESTED, True)


def test_controls_are_no_targets_of_their_own() -> None:
    assert assess_leak_signals(run(row(share("recall", 3, N), target="control"))).targets == (
        "undefended",
    )


def test_parts_of_records_show_nothing_that_their_records_do_not() -> None:
    """Twelve parts of one record are one record; before, they alone made a leak, and 12/60 was the
    headline."""
    parts = (
        share("recall", 12, 60),
        share("recall_nonmembers", 0, 60),
        share("near_verbatim_recall", 12, 60),
    )
    records = (share("document_recall", 1, 5), share("document_recall_nonmembers", 0, 5))
    near = (
        share("document_near_verbatim_recall", 5, 5),
        share("document_near_verbatim_recall_nonmembers", 0, 5),
    )
    result = run(row(*parts, *records, *near))
    verbatim, nearly = signal(result, "verbatim"), signal(result, "near-verbatim")
    assert verbatim.measured == records[0] and verbatim.baseline == records[1]
    assert verbatim.status == NOT_SHOWN and verbatim.suspected
    assert nearly.measured == near[0] and nearly.status == SHOWN
    assert nearly.gate_rule == "document_near_verbatim_recall=0.05"
    assert signal(run(row(*parts)), "verbatim").measured == parts[0]


@pytest.mark.parametrize(
    ("finding", "limit"),
    [
        (row(share("recall", 30, N)), "recall=0.05"),
        (row(share("recall", 1, N)), "recall=0.016"),  # 0.05 would hold
        (row(auc(0.577, 0.707)), "membership_auc=0.6"),
        (row(auc(0.51, 0.55)), "membership_auc=0.53"),
        (row(auc(0.3, 0.36)), "membership_auc=0.6"),
        (
            replace(row(share("recall", 0, N)), by_kind={"email": share("recall", 9, N)}),
            "recall(kind=email)=0.05",
        ),
        (row(share("recall", 0, N)), "recall=0.05"),
    ],
)
def test_the_gate_is_about_what_leaks_and_no_gate_that_holds(finding: Finding, limit: str) -> None:
    gated = assess_leak_signals(run(finding)).find_gate_signal()
    assert gated is not None and gated.gate_rule == limit
    (rule,) = parse_gate_limits([limit])
    m, most = gated.measured, float(limit.rpartition("=")[2])
    assert m is not None and rule is not None
    assert (
        gated.status == NOT_SHOWN
        or max(m.high, 1 - m.low if m.name == "membership_auc" else 0.0) > most
    )


def test_no_gate_is_proposed_where_none_is_about_what_leaks() -> None:
    quiet = row(share("recall", 0, N))
    assert (
        assess_leak_signals(
            run(quiet, greedy_recall={"1": share("greedy", 2, N)})
        ).find_gate_signal()
        is None
    )


def test_a_defended_target_that_leaks_is_what_the_gate_is_about() -> None:
    leaks = row(share("recall", 30, N))
    defended = row(auc(0.6, 0.7), target="pmixed")
    gated = assess_leak_signals(run(leaks, defended)).find_gate_signal()
    assert gated is not None and (gated.target, gated.gate_rule) == ("pmixed", "membership_auc=0.6")


def test_attacks_share_the_level_of_a_contradiction() -> None:
    """Of 10 attacks that draw from the measured distribution, one contradicted it in 6% of runs."""
    probe = row(probability("extraction_probability", 0.2, 0.1, 300), attack="probe")

    def count_doubts(*hits: int) -> int:
        rows = [row(share("recall", k, 300), attack=f"a{i}") for i, k in enumerate(hits)]
        assessment = assess_leak_signals(run(probe, *rows))
        return len(assessment.contradictions["undefended"])

    assert [count_doubts(43), count_doubts(43, *[60] * 9), count_doubts(36, *[60] * 9)] == [1, 0, 1]
