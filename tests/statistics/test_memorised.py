"""What generations hold, counted: n-grams apart, records by their own n-grams, rankings without
near-duplicates."""

from __future__ import annotations

import numpy as np
import pytest

from auditor.statistics import memorised
from auditor.statistics.intervals import clopper_pearson
from auditor.statistics.memorised import CorpusCounts, MemorisedTokens, NGramMatches, TokenRun


def standing(*rows: tuple[int, bool, bool, int]) -> NGramMatches:
    at, trained, heldout, record = (np.array(column) for column in zip(*rows, strict=True))
    return NGramMatches(
        at.astype(np.int64), trained.astype(bool), heldout.astype(bool), record.astype(np.int64)
    )


def test_n_grams_that_overlap_are_one_and_a_record_is_named_by_what_it_alone_has() -> None:
    seen = standing(
        *(
            (at, True, False, 7) for at in (0, 1, 2, 3, 4, 9, 10)
        ),  # with n = 4: 0, 4 and 9 lie apart
        (20, True, False, -1),  # of several records: it names none
        (30, True, True, 8),  # of held-out text too
        (40, False, True, -1),
        (41, False, True, -1),
    )
    assert memorised.count_memorised_ngrams(seen, 4) == MemorisedTokens(
        4, 1, 1, {7: TokenRun(0, 8)}, ()
    )
    assert memorised.count_memorised_ngrams(standing((3, False, True, 9)), 4) == MemorisedTokens(
        0, 0, 1, {}, (9,)
    )


def test_rates_are_per_thousand_with_the_floor_scaled_to_as_many_n_grams() -> None:
    every = (
        [MemorisedTokens(2, 1, 0, {i % 3: TokenRun(0, 8)}) for i in range(10)]
        + [MemorisedTokens(0, 0, 1, {}, (7,))] * 10
        + [MemorisedTokens(0, 0, 0, {})] * 80
    )
    found = {
        m.name: m
        for m in memorised.measure_generation_memorisation(
            every, CorpusCounts(600, 200, 5, 2), 4, 16, {"zlib": range(20)}
        )
    }
    main, floor = found["memorised_per_1000"], found["memorised_per_1000_nonmembers"]
    assert main.value == pytest.approx(200) and main.unit == "per 1,000" and main.n == 100
    assert 90 < main.low < 200 < main.high < 390
    assert floor.value == pytest.approx(3 * 100) and "times 3" in floor.note
    assert found["excess_memorised_per_1000"].value == pytest.approx(-100)
    assert found["common_per_1000"].value == pytest.approx(100)
    share = found["memorised_generations"]
    assert (share.value, share.low, share.high) == (0.1, *clopper_pearson(10, 100))
    assert found["records_out"].value == 3 and found["records_out"].unit == "count"
    assert (
        found["records_out_nonmembers"].value == 1
        and found["records_out_nonmembers"].note == "of 2 held out"
    )
    assert found["new_records_per_1000"].value == 0 and found["records_to_come_out"].value == 3
    assert found["memorised_in_top_100_zlib"].value == 0.5
    assert all(m.low <= m.value <= m.high for m in found.values())


def test_a_floor_of_nothing_reaches_as_far_as_generations_that_hold_some_do() -> None:
    every = [MemorisedTokens(1 + i % 2, 0, 0, {}) for i in range(10)] + [
        MemorisedTokens(0, 0, 0, {})
    ] * 90
    found = {
        m.name: m
        for m in memorised.measure_generation_memorisation(
            every, CorpusCounts(40, 20, 5, 2), 4, 64, {}
        )
    }
    floor = found["memorised_per_1000_nonmembers"]
    assert floor.value == 0 and floor.high == pytest.approx(
        2 * 2 * 1000 * clopper_pearson(0, 100)[1]
    )


def test_no_n_gram_at_all_leaves_open_what_no_generation_rules_out() -> None:
    found = {
        m.name: m
        for m in memorised.measure_generation_memorisation(
            [MemorisedTokens(0, 0, 0, {})] * 50, CorpusCounts(9, 0, 1, 0), 4, 16, {}
        )
    }
    assert list(found) == [
        "memorised_per_1000",
        "memorised_generations",
        "records_out",
        "new_records_per_1000",
    ]
    assert found["memorised_per_1000"].high == pytest.approx(4 * 1000 * clopper_pearson(0, 50)[1])


def test_the_first_of_a_ranking_are_no_near_duplicates() -> None:
    texts = [
        (1, 2, 3, 4, 5, 6),
        (1, 2, 3, 4, 5, 7),
        (9, 1, 2, 3, 8, 8),
        (1, 2),
        (1, 2),
        (1, 2, 3, 4, 5, 6),
    ]
    # too short for a trigram: like nothing
    assert memorised.select_distinct_texts([5, 4, 3, 2, 1, 6], texts.__getitem__) == [
        5,
        2,
        3,
        4,
    ]
    assert memorised.select_distinct_texts([5, 4, 3, 2, 1, 6], texts.__getitem__, count=2) == [5, 2]
    assert memorised.select_distinct_texts([0.0] * 3, lambda i: (3 * i, 3 * i + 1, 3 * i + 2)) == [
        0,
        1,
        2,
    ]


@pytest.mark.parametrize(
    ("surer", "other", "alike"),
    [
        ((1, 2, 3), (1, 7, 3), False),  # a trigram has a middle
        ((1, 2, 3), (1, 2, 8, 3), False),  # and its tokens stand beside each other
        ((5, 1, 2, 3, 6), (1, 2, 3), True),
        ((1, 2, 3), (1, 2, 3, 9), True),  # half of its trigrams
        ((1, 2, 3), (1, 2, 3, 9, 9), False),  # a third
        ((1, 1, 1), (1, 1, 1, 1, 1), False),  # one of three, as often as the surer one has it
    ],
)
def test_near_duplicates_have_half_of_their_trigrams_in_common(
    surer: tuple[int, ...], other: tuple[int, ...], alike: bool
) -> None:
    assert memorised.select_distinct_texts([2.0, 1.0], [surer, other].__getitem__) == (
        [0] if alike else [0, 1]
    )
