"""Independent games: the threshold that some teach against trying all of them, and the guesses of
the others."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from auditor.core.errors import AuditError
from auditor.statistics.games import (
    FEWEST,
    audit_games,
    count_confusion,
    epsilon_clopper_pearson,
    make_confusion_matrix,
)


def games(seed: int, n: int, shift: float) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    noise = np.random.default_rng(seed)
    included = noise.random(n) < 0.5
    return np.round(noise.normal(size=n) + shift * included, 1), included


def best_threshold(
    scores: NDArray[np.float64], included: NDArray[np.bool_], delta: float, level: float
) -> float:
    """The score that would prove most, had three times as many games gone as these did; tried one
    after the other."""

    def proved(cut: float) -> float:
        tp = sum(score >= cut and own for score, own in zip(scores, included, strict=True))
        fp = sum(score >= cut and not own for score, own in zip(scores, included, strict=True))
        own, others = int(included.sum()), int((~included).sum())
        return epsilon_clopper_pearson(
            3 * tp, 3 * (own - tp), 3 * fp, 3 * (others - fp), delta, level
        )

    return max(sorted(set(scores.tolist())), key=proved)


def test_the_first_quarter_teaches_the_threshold_and_is_not_counted() -> None:
    for seed in range(40):
        scores, included = games(seed, 120, 1.0)
        cut = best_threshold(scores[:30], included[:30], 1e-5, 0.05)
        tp, fn, fp, tn = count_confusion(scores, included, 1e-5, 0.05)
        guessed, own = scores[30:] >= cut, included[30:]
        assert (tp, fn) == ((guessed & own).sum(), (~guessed & own).sum())
        assert (fp, tn) == ((guessed & ~own).sum(), (~guessed & ~own).sum())


def test_a_bound_is_of_the_games_counted_and_says_how_many_were_right() -> None:
    found = audit_games((50, 7, 4, 60), 1e-5, 0.05)
    assert (found.canaries, found.guesses, found.right, found.table) == (
        121,
        121,
        110,
        (50, 7, 4, 60),
    )
    assert found.epsilon == epsilon_clopper_pearson(50, 7, 4, 60, 1e-5, 0.05) > 1
    assert found.best == epsilon_clopper_pearson(57, 0, 0, 64, 1e-5, 0.05) > found.epsilon
    assert (found.delta, found.level) == (1e-5, 0.05)


def test_coins_that_fell_alike_while_it_learnt_leave_nothing_to_guess_with() -> None:
    included = np.arange(80) % 2 == 0
    included[:20] = True
    tp, fn, fp, tn = count_confusion(np.arange(80.0), included, 0.0, 0.05)
    assert (tp, fp) == (0, 0) and fn == included[20:].sum() and tn == 60 - fn


@pytest.mark.parametrize(
    ("n", "spoilt", "said"),
    [(FEWEST - 1, 0.0, "at least 64 games"), (FEWEST, math.nan, "got NaN for 1 of 64")],
)
def test_too_few_games_and_games_without_a_score_are_refused(
    n: int, spoilt: float, said: str
) -> None:
    scores, included = games(0, n, 1.0)
    scores[0] = spoilt
    with pytest.raises(AuditError, match=said):
        count_confusion(scores, included, 1e-5, 0.05)
    assert sum(make_confusion_matrix(scores >= 0, included)) == n
