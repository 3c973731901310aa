"""Metrics by hand and against naive loops."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from auditor.core.nouns import Guess, Guesses, Pair, Secret
from auditor.statistics import compare, extraction, intervals, judging, near_pairs, ranking
from tests.rows import judge_columns


def outcome(hits: list[bool], scores: list[float]) -> judging.Outcome:
    n = len(hits)
    hit = np.array(hits, dtype=bool)
    one, edits = np.ones(n, dtype=bool), np.where(hit, 0, 9)
    return judge_columns(
        tuple(map(str, range(n))), hit, hit, np.array(scores), (None,) * n, one, edits, edits * 0
    )


def naive_recall(hits: list[bool], scores: list[float], errors: int) -> float:
    wrong = solved = 0
    for _, hit in sorted(zip(scores, hits, strict=True), key=lambda row: (-row[0], row[1])):
        if hit and wrong < errors:
            solved += 1
        wrong += not hit
    return solved / len(hits)


@given(
    st.lists(st.tuples(st.booleans(), st.integers(0, 9)), min_size=1, max_size=60),
    st.integers(1, 20),
)
def test_recall_at_errors_equals_the_walk(rows: list[tuple[bool, int]], errors: int) -> None:
    hits, scores = [h for h, _ in rows], [float(s) for _, s in rows]
    measured = ranking.measure_error_recall("recall_at_errors", outcome(hits, scores), errors)
    assert measured.value == pytest.approx(naive_recall(hits, scores, errors))
    assert measured.low <= measured.value <= measured.high
    assert ("equals recall" in measured.note) == (hits.count(False) < errors)


def test_intervals_known_answers() -> None:
    assert intervals.clopper_pearson(0, 59, 0.90)[1] == pytest.approx(1 - 0.05 ** (1 / 59))
    assert (
        intervals.clopper_pearson(0, 59, 0.90)[1] < 0.05 < intervals.clopper_pearson(0, 58, 0.90)[1]
    )
    assert (
        intervals.clopper_pearson(0, 299, 0.90)[1]
        < 0.01
        < intervals.clopper_pearson(0, 298, 0.90)[1]
    )
    assert intervals.clopper_pearson(5, 10) == pytest.approx((0.187086, 0.812914), abs=1e-6)
    assert intervals.clopper_pearson(0, 0) == (0, 1)
    # Newcombe (1998), Table II: 56/70 - 48/80 by the hybrid score method: (0.0524, 0.3339).
    a, b = np.arange(70) < 56, np.arange(80) < 48
    measured = intervals.subtract_nonmember_share("excess_recall", a, b)
    assert (measured.low, measured.high) == (
        pytest.approx(0.0524, abs=1e-4),
        pytest.approx(0.3339, abs=1e-4),
    )


def test_paired_difference_and_mcnemar_by_hand() -> None:
    first, second = (np.where(np.arange(20) < hits, 1.0, 0.0) for hits in (10, 2))
    measured = compare.measure_mean_difference("recall_difference", "share", first, second)
    assert measured.value == pytest.approx(0.4)
    assert "0.0078" in measured.note  # 2 * 0.5 ** 8
    assert compare.measure_mean_difference("d", "share", first, first).note == "exact McNemar p = 1"


def test_a_text_of_probability_0_makes_perplexity_infinite_and_is_counted() -> None:
    """Resamples without it are finite: one of 100 texts is in 63% of them, so that the interval
    begins finite."""
    measured = intervals.estimate_perplexity([(math.inf, 5), *((2.0, 2) for _ in range(99))])
    assert (measured.value, measured.high) == (math.inf, math.inf) and math.isfinite(measured.low)
    assert measured.note == "1 of 100 texts have a token of probability 0; 2.72 over the others"
    never = intervals.estimate_perplexity([(math.inf, 5)])
    assert never.low == math.inf and never.note == "1 of 1 texts have a token of probability 0"


def test_perplexity_weighs_tokens_not_texts() -> None:
    measured = intervals.estimate_perplexity([(2.0, 1), (0.0, 3)])
    assert measured.value == pytest.approx(math.exp(0.5))
    assert measured.unit == "perplexity"


def test_judging_compares_verbatim_and_keeps_groups_apart() -> None:
    secrets = {
        "a": Secret("a", (1,), (5, 6), repeats=2),
        "b": Secret("b", (2,), (7, 8), repeats=4),
        "n": Secret("n", (3,), (9, 9), repeats=0, member=False),
    }
    guesses = [
        Guesses("n", (Guess((9, 9), 1.0),), 2, 4),
        Guesses("b", (Guess((7, 7), 0.5), Guess((7, 8), 0.4)), 2, 4),
        Guesses("a", (Guess((5, 6), 0.9),), 2, 4),
    ]
    judged = judging.judge_guesses(guesses, secrets)
    by_name = {m.name: m for m in extraction.measure_extraction(judged)}
    assert (
        by_name["recall"].value,
        by_name["any_of_k"].value,
        by_name["recall_nonmembers"].value,
    ) == (0.5, 1.0, 1.0)
    assert by_name["recall"].n == 2 and by_name["excess_recall"].value == -0.5
    assert {
        k: m.value
        for k, m in extraction.measure_hit_shares(
            "recall", judged.select_secrets(judged.member)
        ).items()
    } == {
        "2": 1.0,
        "4": 0.0,
    }
    assert extraction.compute_recall_error_curve(judged.select_secrets(judged.member))[-1] == (
        1,
        0.5,
    )


def test_any_of_the_guesses_is_measured_of_nonmembers_too() -> None:
    secrets = {
        name: Secret(name, (1,), (5, 6), member=name == "member")
        for name in ("member", "other", "third")
    }
    ranked = {"member": ((5, 6),), "other": ((7, 7), (5, 6)), "third": ((7, 7), (8, 8))}
    guesses = [
        Guesses(name, tuple(Guess(one, -i) for i, one in enumerate(some)), 2, 4)
        for name, some in ranked.items()
    ]
    finding = {
        m.name: m for m in extraction.measure_extraction(judging.judge_guesses(guesses, secrets))
    }
    assert (finding["any_of_k_nonmembers"].value, finding["any_of_k_nonmembers"].n) == (0.5, 2)
    assert finding["recall_nonmembers"].value == 0


# --- near-verbatim ---


def naive_levenshtein(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """The textbook recursion, row by row."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        before, row = row, [i]
        for j, y in enumerate(b, 1):
            row.append(min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (x != y)))
    return row[-1]


@pytest.mark.parametrize(
    ("length", "edits"), [(1, 0), (2, 1), (5, 1), (9, 1), (10, 2), (50, 10), (54, 10)]
)
def test_the_tolerance_is_a_fifth_of_the_tokens(length: int, edits: int) -> None:
    assert judging.compute_near_verbatim_limit(length) == edits


def test_near_verbatim_recall_by_hand() -> None:
    """Ten tokens, so two edits: a token left out shifts the rest and costs one deletion and one
    insertion."""
    answer = tuple(range(10, 20))
    guessed = {
        "a": answer,  # verbatim
        "b": (10, 0, 12, 13, 0, *answer[5:]),  # two replaced
        "c": (*answer[1:], 0),  # shifted: no token stands in its place, yet two edits
        "d": (0, 11, 0, 13, 0, *answer[5:]),  # three replaced
        "n": (0, *answer[1:]),
        "o": tuple(range(50, 60)),
    }
    secrets = {name: Secret(name, (1,), answer, member=name < "m") for name in guessed}
    judged = judging.judge_guesses(
        [Guesses(name, (Guess(g, 0.0),), 1, 10) for name, g in guessed.items()], secrets
    )
    assert judged.columns["distance"].tolist() == [0, 2, 2, 3, 1, 10]
    assert set(judged.columns["tolerance"]) == {2}
    by_name = {m.name: m for m in extraction.measure_extraction(judged)}
    near, floor = by_name["near_verbatim_recall"], by_name["near_verbatim_recall_nonmembers"]
    assert (near.value, near.n) == (0.75, 4) and (floor.value, floor.n) == (0.5, 2)
    assert (near.low, near.high) == intervals.clopper_pearson(3, 4)
    assert by_name["recall"].value == 0.25 and by_name["recall_nonmembers"].value == 0
    assert "the baseline" in floor.note


def test_near_duplicates_by_hand() -> None:
    known = (Pair((1,), tuple(range(10))), Pair((2,), (7, 7)))
    suffixes = {
        "same": tuple(range(10)),
        "two edits": (*range(1, 10), 0),
        "three edits": (0, 0, 0, 0, *range(4, 10)),
        "other prefix, short": (7, 8),
        "one token": (7,),  # one edit from (7, 7), but of a single token nothing may change
    }
    secrets = [Secret(name, (3,), suffix) for name, suffix in suffixes.items()]
    assert judging.find_near_duplicate_ids(secrets, known) == (
        "same",
        "two edits",
        "other prefix, short",
    )
    assert (
        judging.find_near_duplicate_ids(secrets, ())
        == ()
        == judging.find_near_duplicate_ids((), known)
    )


SUFFIX = st.lists(st.integers(0, 2), min_size=1, max_size=12).map(tuple)


@given(st.lists(SUFFIX, max_size=8), st.lists(SUFFIX, max_size=5))
def test_near_duplicates_equal_the_naive_search(
    attacked: list[tuple[int, ...]], known: list[tuple[int, ...]]
) -> None:
    secrets = [Secret(str(i), (), suffix) for i, suffix in enumerate(attacked)]
    expected = tuple(
        s.id
        for s in secrets
        for limit in [judging.compute_near_verbatim_limit(len(s.suffix))]
        if any(naive_levenshtein(s.suffix, other) <= limit for other in known)
    )
    assert (
        judging.find_near_duplicate_ids(secrets, [Pair((), other) for other in known]) == expected
    )


def test_near_duplicates_of_more_secrets_than_are_compared_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(near_pairs, "_ROWS", 3)
    secrets = [Secret(str(i), (), (i, i + 1, i + 2)) for i in range(10)]
    known = [Pair((), (i, i + 1, 99)) for i in (0, 4, 9)]
    assert judging.find_near_duplicate_ids(secrets, known) == ("0", "4", "9")


@pytest.mark.parametrize("n_solved", [0, 1, 2, 4])
def test_few_solved_secrets_have_an_interval_that_covers(n_solved: int) -> None:
    """Before: the upper end was below the true recall at 100 errors in 14% of samples of 300."""
    judged = outcome([True] * n_solved + [False] * (300 - n_solved), list(range(300, 0, -1)))
    m = ranking.measure_error_recall("recall_at_100_errors", judged, 100)
    low, high = intervals.clopper_pearson(n_solved, 300)
    assert m.value == n_solved / 300 and m.low <= low and m.high >= high
