"""N-gram scores against naive twins of their formulas, and their level where nothing was seen."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest

from auditor.core.nouns import Tokens
from auditor.statistics import roc
from auditor.statistics.ngram_scores import (
    NGramCounts,
    measure_jaccard_similarity,
    score_against_other_records,
)


def texts(count: int, kinds: int, seed: int) -> list[Tokens]:
    rng = np.random.default_rng(seed)
    return [tuple(rng.integers(1, kinds, rng.integers(1, 9)).tolist()) for _ in range(count)]


def naive(known: list[Tokens], kinds: int, order: int, text: Tokens) -> list[float]:
    """Witten and Bell, word by word, by counting anew."""
    padded = [(0,) * order + other for other in known]
    places = [(other, i) for other in padded for i in range(order, len(other))]
    whole, found = (0,) * order + text, []
    for i in range(order, len(whole)):
        p = 1 / kinds
        for k in range(order):
            before = whole[i - k : i]
            behind = Counter(other[j] for other, j in places if other[j - k : j] == before)
            if behind:
                p = (behind[whole[i]] + len(behind) * p) / (behind.total() + len(behind))
        found.append(math.log(p))
    return found


@pytest.mark.parametrize("order", [1, 2, 4])
def test_interpolated_n_grams_are_those_that_are_counted_by_hand(order: int) -> None:
    known, asked = texts(12, 5, order), texts(6, 7, order + 10)
    found = NGramCounts.count_ngrams(known, 7, order).log_probs(asked)
    assert found == pytest.approx([x for text in asked for x in naive(known, 7, order, text)])


def test_what_may_follow_has_a_mass_of_one() -> None:
    model = NGramCounts.count_ngrams(texts(20, 6, 0), 5)
    p = np.exp(model.log_probs([(2, 3, word) for word in range(1, 6)]).reshape(5, 3)[:, 2])
    assert p.sum() == pytest.approx(1)


def test_bigrams_with_one_added_to_every_count() -> None:
    model = NGramCounts.count_ngrams([(1, 2), (1, 2), (1, 3)], 4)
    expected = [(math.log(4 / 7) + math.log(3 / 7)) / 2, (math.log(1 / 7) + math.log(1 / 4)) / 2]
    assert model.average_laplace_log_prob([(1, 2), (3, 3)]) == pytest.approx(expected)


def test_likeness_is_the_mean_of_the_nearest() -> None:
    found = measure_jaccard_similarity([(1, 2), (3,)], [(1, 2, 2), (1, 3), (4,)], 4, nearest=2)
    assert found == pytest.approx([(1 + 1 / 3) / 2, 1 / 4])


def test_members_of_texts_that_saw_nothing_are_not_told() -> None:
    """AUCs of 60 draws: their intervals hold one half in 95% of them, in fewer than 51 once in a
    thousand times."""
    held = 0
    for seed in range(60):
        every = texts(90, 12, seed)
        scores = score_against_other_records(
            NGramCounts.count_ngrams(every[60:], 12, 3), every[:60], seed
        )
        m = roc.estimate_auc("", scores[:30], scores[30:])
        held += m.low <= 0.5 <= m.high
    assert held >= 51


def test_members_that_were_copied_are_told() -> None:
    every = texts(60, 40, 1)
    scores = score_against_other_records(NGramCounts.count_ngrams(every[:30], 40), every, 0)
    assert roc.auc(scores[:30], scores[30:]) > 0.9
