"""The best of many membership scores: it errs no more often than it says, and less carefully than
Bonferroni."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from scipy.stats import norm

from auditor.core.secret_randomness import make_keyed_generator
from auditor.statistics import roc
from auditor.statistics.intervals import Z, clopper_pearson
from auditor.statistics.strongest_score import (
    CandidateScore,
    ScoredRecords,
    bound_strongest_auc,
    choose_strongest_score,
    compute_simultaneous_widening,
    select_strongest_auc,
)
from validation.trust.interval_membership import draw_scores_tried_together

MEMBERS, OTHERS = 40, 40


def records(
    members: int = MEMBERS, others: int = OTHERS, unit: Sequence[int] | None = None
) -> ScoredRecords:
    codes = None if unit is None else np.array(unit)
    return ScoredRecords(np.arange(members + others) < members, {}, codes)


def bonferroni(count: int) -> float:
    return float(norm.isf(0.025 / count) / Z)


def test_scores_that_say_the_same_count_as_one() -> None:
    values = make_keyed_generator("alike").normal(size=MEMBERS + OTHERS)
    alike = [CandidateScore(values + 1e-9 * i, f"s{i}") for i in range(11)]
    assert compute_simultaneous_widening(alike, records()) == pytest.approx(1, abs=0.1)


def test_the_widening_lies_between_one_interval_and_bonferroni() -> None:
    rng = make_keyed_generator("between")
    scores, who = draw_scores_tried_together(rng, 60, 60, [0.0] * 11, 0.8)
    found = compute_simultaneous_widening(list(scores.values()), who)
    assert 1.1 < found < bonferroni(11) - 0.1


def test_records_of_one_person_are_drawn_together() -> None:
    """Forty copies of one person's record are no forty records."""
    rng = make_keyed_generator("persons")
    of_person = rng.normal(size=16)
    person = np.repeat(np.arange(16), 5)
    score = CandidateScore(of_person[person] + 0.01 * rng.normal(size=80), "loss")
    alone = compute_simultaneous_widening([score], records())
    together = compute_simultaneous_widening([score], records(unit=person.tolist()))
    assert alone == pytest.approx(1, abs=0.1) and together > 1.7


def test_records_of_one_person_show_no_rate_of_members() -> None:
    """Of 40 people with 20 like records each, that no model saw, a quarter had members found at 1%
    false positives."""
    rng = make_keyed_generator("rates of persons")
    person = np.repeat(np.arange(40), 20)
    who = records(400, 400, person.tolist())
    above = [0, 0]
    for _ in range(60):
        values = 3 * rng.normal(size=40)[person] + rng.normal(size=800)
        for i, of in enumerate((who, records(400, 400))):
            found = choose_strongest_score({"loss": CandidateScore(values, "loss")}, of, 1.0, 1)
            _, rate, *_ = found.measurements
            assert rate.name == "tpr_at_1pct_fpr" and rate.n == 400
            above[i] += rate.low > 0.01
    assert above[0] == 0 and above[1] > 6


def test_the_strongest_is_the_one_that_is_surely_farthest_from_chance_in_either_direction() -> None:
    rng = make_keyed_generator("reversed")
    member = records().member
    scores = {
        name: CandidateScore(rng.normal(size=80) + shift * member, name)
        for name, shift in (("a", 0.8), ("b", -3))
    }
    name, best = select_strongest_auc(scores, member, ~member, 1.2)
    assert (
        name == "b" and best.value < 0.1 and best.high < 0.5 and best.note == "b, best of 2 scores"
    )
    held = bound_strongest_auc(scores, member, ~member, 1.2)
    assert held.low <= best.low and held.high == best.high


def test_copies_have_a_strongest_score_of_their_own() -> None:
    rng = make_keyed_generator("copies")
    member = np.arange(80) < 40
    often = np.arange(80) < 12
    values = {"even": rng.normal(size=80) + 1.2 * member, "often": rng.normal(size=80) + 5 * often}
    scores = {name: CandidateScore(x, name) for name, x in values.items()}
    who = ScoredRecords(member, {"1": member & ~often, "8": often})
    found = choose_strongest_score(
        scores, who, compute_simultaneous_widening(list(scores.values()), who), 2
    )
    assert found.measurements[0].note == "even, best of 2 scores"
    assert (
        found.by_copies["8"].note == "often, best of 2 scores" and found.by_copies["8"].value > 0.95
    )
    plain = roc.estimate_auc("membership_auc_even", values["even"][member], values["even"][~member])
    assert found.corrected[0].low < plain.low and found.corrected[0].high > plain.high


@pytest.mark.parametrize(
    ("members", "others", "shared"), [(40, 40, 0.0), (12, 68, 0.6), (150, 150, 0.9)]
)
def test_scores_without_information_are_shown_in_at_most_one_of_twenty(
    members: int, others: int, shared: float
) -> None:
    rng = make_keyed_generator("family-wise", members, shared)
    shown = 0
    for _ in range(60):
        scores, who = draw_scores_tried_together(rng, members, others, [0.0] * 8, shared)
        widening = compute_simultaneous_widening(list(scores.values()), who)
        _, best = select_strongest_auc(scores, who.member, ~who.member, widening)
        shown += best.low > 0.5 or best.high < 0.5
    assert clopper_pearson(shown, 60)[0] <= 0.05
    # The plain interval of the best is shown far more often, so the test can fail.
