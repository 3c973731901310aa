"""From scores to bounds: the rule of guessing against a plain one, ties, power, groups, and what is
refused."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import binom

from auditor.core.errors import AuditError
from auditor.core.jsonable import from_json, to_json
from auditor.core.result import Audited
from auditor.statistics import metrics
from auditor.statistics.audit_by_shape import bound_shape_epsilon
from auditor.statistics.audited import (
    audit_epsilon_bounds,
    audit_measurements,
    compute_best_provable_epsilon,
    count_needed_canaries,
    repeat_epsilon_audit,
)
from auditor.statistics.games import epsilon_clopper_pearson
from auditor.statistics.one_run import epsilon_fdp, epsilon_one_run, list_guess_counts


def game(m: int, shift: float, seed: int = 0) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    rng = np.random.default_rng(seed)
    included = rng.random(m) < 0.5
    return shift * included + rng.normal(size=m), included


def naive_rights(scores: NDArray[np.float64], included: NDArray[np.bool_]) -> tuple[int, ...]:
    """The farthest from the middle first, on either side of it."""
    ordered = sorted(scores)
    middle = (ordered[len(scores) // 2 - 1] + ordered[len(scores) // 2]) / 2
    surest = sorted(range(len(scores)), key=lambda i: -abs(scores[i] - middle))
    right = [bool(included[i]) == bool(scores[i] > middle) for i in surest]
    return tuple(sum(right[:r]) for r in list_guess_counts(len(scores)))


def test_the_bounds_are_of_the_right_guesses_at_every_count() -> None:
    scores, included = game(600, 1.5)
    right, counts = naive_rights(scores, included), list_guess_counts(600)
    one_run, fdp, shape = audit_epsilon_bounds(scores, included, 1e-5, 0.1)
    assert one_run.epsilon == epsilon_one_run(600, right, 1e-5, 0.1) > 0
    assert fdp.epsilon == epsilon_fdp(600, right, 1e-5, 0.1) > 0
    assert shape.epsilon == bound_shape_epsilon(600, right, 1e-5, 0.1) > 0
    for found in (one_run, fdp, shape):
        assert found.rights == right and found.right == right[counts.index(found.guesses)]
        assert (found.canaries, found.delta, found.level) == (600, 1e-5, 0.1)
    assert one_run.best == epsilon_one_run(600, counts, 1e-5, 0.1)


def test_the_numbers_of_guesses_depend_on_m_alone() -> None:
    assert [list_guess_counts(m) for m in (5, 31, 32, 130)] == [
        (5,),
        (31,),
        (32, 16),
        (130, 65, 32, 16),
    ]


def test_the_middle_lies_between_two_scores() -> None:
    """More of two equal scores on one side: both kinds are guessed all the same."""
    included = np.array([True] * 120 + [False] * 80)
    assert audit_epsilon_bounds(included.astype(float), included, 0.0)[0].rights[0] == 200
    infinite = np.where(included, 0.0, -np.inf)
    assert audit_epsilon_bounds(infinite, included, 0.0)[0].rights[0] == 200


def test_equal_scores_count_against_the_guesser() -> None:
    """However the canaries are listed: an order that tells the coins proves nothing."""
    included = np.array([True] * 100 + [False] * 100)
    scores = np.zeros(200)
    scores[0] = 1.0
    for order in (np.arange(200), np.arange(200)[::-1], np.random.default_rng(0).permutation(200)):
        assert [a.epsilon for a in audit_epsilon_bounds(scores[order], included[order], 1e-5)] == [
            0,
            0,
            0,
        ]
    half = np.where(included, 1.0, 0.0)  # two values that tell all of it
    assert audit_epsilon_bounds(half, included, 1e-5)[0].right == 200


def test_at_delta_0_there_is_no_gaussian_mechanism_to_refute() -> None:
    scores, included = game(400, 3)
    (found,) = audit_epsilon_bounds(scores, included, 0.0)
    assert found.estimator == "one_run" and found.epsilon > 1


def test_copies_are_paid_for() -> None:
    scores, included = game(400, 3)
    once, twice = (
        audit_epsilon_bounds(scores, included, 0.0)[0],
        audit_epsilon_bounds(scores, included, 0.0, copies=2)[0],
    )
    assert twice.epsilon == pytest.approx(
        once.epsilon / 2, abs=0.02
    ) and twice.best == pytest.approx(once.best / 2, abs=0.02)
    assert twice.copies == 2 and "groups of 2" in audit_measurements((twice,))[0].note


@pytest.mark.parametrize("delta", [0.0, 1e-5, 1e-3])
def test_what_could_be_proved_at_best_is_what_all_right_guesses_prove(delta: float) -> None:
    for m in (6, 20, 33, 150, 1000):
        included = np.arange(m) % 2 == 0
        found = audit_epsilon_bounds(included.astype(float), included, delta)[0]
        assert (
            compute_best_provable_epsilon(m, delta, copies=1)
            == found.best
            == epsilon_one_run(m, list_guess_counts(m), delta)
            == found.epsilon
        )


@pytest.mark.parametrize("delta", [0.0, 1e-3])
def test_the_canaries_needed_are_the_fewest_by_a_walk(delta: float) -> None:
    walked = {m: compute_best_provable_epsilon(m, delta, copies=1) for m in range(2, 140)}
    assert all(a <= b + 1e-5 for a, b in pairwise(walked.values()))
    for epsilon in (0.01, 0.3, 1.0, 2.0, 3.0, 3.6):
        assert count_needed_canaries(epsilon, delta) == next(
            m for m, most in walked.items() if most >= epsilon
        )


def test_what_no_million_of_canaries_proves_is_refused() -> None:
    with pytest.raises(
        AuditError, match=r"up to a million canaries .* 524,288, .* prove less than 12.*, got 20"
    ):
        count_needed_canaries(20, 1e-7)
    assert 8_900 < count_needed_canaries(8, 0.0) <= count_needed_canaries(8, 1e-5) < 9_100


def test_a_single_walk_confirms_the_canaries_needed() -> None:
    """A walk for 9,000 canaries takes a tenth of a second, and a bisection takes 20 steps."""
    compute_best_provable_epsilon.cache_clear()
    assert count_needed_canaries(8, 1e-5) == 8_951
    assert compute_best_provable_epsilon.cache_info().misses == 1


@pytest.mark.parametrize(
    ("scores", "included", "said"),
    [
        ([1.0, math.nan] * 50, [True, False] * 50, "got NaN for 50 of 100"),
        ([2.0] * 100, [True, False] * 50, "distinguish canaries, got 2 for all 100"),
        ([1.0, 2.0] * 50, [True] * 100, "fair coins, got 100 of 100 in"),
        ([1.0, 2.0] * 50, [False] * 100, "fair coins, got 0 of 100 in"),
        ([1.0, 2.0, 3.0], [True, False, True], "at least 5 canaries, .* got 3"),
        ([], [], "at least 5 canaries, .* got 0"),
        ([1.0, 2.0, 3.0], [True, False], "one score a canary"),
    ],
)
def test_what_cannot_be_audited_is_refused(
    scores: list[float], included: list[bool], said: str
) -> None:
    with pytest.raises(AuditError, match=said):
        audit_epsilon_bounds(np.array(scores), np.array(included, dtype=bool), 1e-5)


@pytest.mark.parametrize(
    ("delta", "level", "copies", "said"),
    [
        (1.0, 0.05, 1, "expected delta in"),
        (-1e-5, 0.05, 1, "expected delta in"),
        (0, 0, 1, "expected level in"),
        (0, 1, 1, "expected level in"),
        (0, 0.05, 0, "inserted at least once"),
    ],
)
def test_bad_numbers_are_refused(delta: float, level: float, copies: int, said: str) -> None:
    with pytest.raises(AuditError, match=said):
        audit_epsilon_bounds(*game(100, 1), delta, level, copies)
    with pytest.raises(AuditError, match=said):
        count_needed_canaries(1.0, delta, level, copies)


def test_fair_coins_are_refused_less_than_once_in_a_billion() -> None:
    """Of 1,000 the first count that is refused is the first that fair coins reach so seldom, on
    either side."""
    first = next(k for k in range(500, 1001) if 2 * binom.sf(k - 1, 1000, 0.5) < 1e-9)
    scores = np.arange(1000.0)
    for inside in (first, 1000 - first):
        with pytest.raises(AuditError, match=f"fair coins, got {inside} of 1000 in"):
            audit_epsilon_bounds(scores, np.arange(1000) < inside, 1e-5)
    for inside in (first - 1, 1001 - first):
        assert audit_epsilon_bounds(scores, np.arange(1000) < inside, 0.0)


def test_a_row_s_numbers() -> None:
    found = audit_epsilon_bounds(*game(400, 2), 1e-5)
    said = {m.name: m for m in audit_measurements(found)}
    assert list(said) == [
        "epsilon_lower_bound",
        "epsilon_lower_bound_fdp",
        "epsilon_lower_bound_shape",
        "epsilon_best_provable",
        "guesses_right",
    ]
    assert all(
        name in {m.name for m in metrics.METRICS} and m.unit == metrics.find_metric(name).unit
        for name, m in said.items()
    )
    main = said["epsilon_lower_bound"]
    assert (main.value, main.low, main.high, main.n) == (
        found[0].epsilon,
        found[0].epsilon,
        math.inf,
        400,
    )
    assert main.note == "one-sided, 95%; at delta 1e-05, add_remove, by record"
    assert (said["guesses_right"].value, said["guesses_right"].n) == (
        found[0].right,
        found[0].guesses,
    )
    assert from_json(tuple[Audited, ...], to_json(found)) == found


def test_the_same_guesses_at_another_level() -> None:
    """At its own level an audit is what it is; at a smaller one both numbers are smaller, and they
    are its rule's."""
    scores, included = game(601, 1.5)
    for found in audit_epsilon_bounds(scores, included, 1e-5):
        assert repeat_epsilon_audit(found, 0.05) == found
        stricter = repeat_epsilon_audit(found, 0.02)
        assert stricter == next(
            a
            for a in audit_epsilon_bounds(scores, included, 1e-5, 0.02)
            if a.estimator == found.estimator
        )
        assert stricter.epsilon < found.epsilon and stricter.best < found.best


def test_independent_games_at_another_level() -> None:
    proved, best = (
        epsilon_clopper_pearson(*table, 1e-5, 0.02)
        for table in ((90, 10, 12, 88), (100, 0, 0, 100))
    )
    played = Audited("games", 9.0, 1e-5, 0.05, 200, 200, 178, 9.0, table=(90, 10, 12, 88))
    again = repeat_epsilon_audit(played, 0.02)
    assert (again.epsilon, again.best, again.level) == (proved, best, 0.02)


def test_what_cannot_have_been_made_is_refused_another_level() -> None:
    found = audit_epsilon_bounds(*game(601, 1.5), 1e-5)[0]
    for changed in (
        replace(found, rights=(77,)),
        replace(found, estimator="mine"),
        replace(found, estimator="games"),
    ):
        with pytest.raises(AuditError, match="expected a bound by one_run, fdp, shape"):
            repeat_epsilon_audit(changed, 0.05)
