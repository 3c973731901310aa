"""Thresholds chosen on the data that errors are counted on: each method pays for its choice.

Each method is simulated many times on data for which its claim is just true, next to a naive twin
that chooses as it does and pays nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from auditor.statistics import games, roc
from auditor.statistics.audited import audit_epsilon_bounds
from auditor.statistics.intervals import clopper_pearson
from auditor.statistics.one_run import bound_share_logit, list_guess_counts

LEVEL = 0.05
EPSILON = 1.0
Rng = np.random.Generator


def draw_canaries(rng: Rng, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Scores and coins of randomised response at EPSILON, with ranks that say nothing."""
    coins = rng.random(count) < 0.5
    right = rng.random(count) < 1 / (1 + math.exp(-EPSILON))
    return np.where(coins == right, 1, -1) * rng.random(count), coins


def count_best_cut(scores: np.ndarray, coins: np.ndarray) -> int:
    """How many guesses are right at the cut that the coins themselves like best."""
    included = coins[np.argsort(scores)].cumsum()
    excluded = np.arange(1, len(coins) + 1) - included
    return int((excluded + included[-1] - included).max())


def audit_canaries(rng: Rng) -> tuple[bool, bool]:
    """The number of surest guesses, of which the best of several counts."""
    scores, coins = draw_canaries(rng, 256)
    audited = audit_epsilon_bounds(scores, coins, 1e-5)[0]
    counts = zip(list_guess_counts(256), audited.rights, strict=True)
    best_alone = max(bound_share_logit(r, v, LEVEL) for r, v in counts)
    return audited.epsilon > EPSILON, best_alone > EPSILON


def audit_canaries_by_a_cut(rng: Rng) -> tuple[bool, bool]:
    """The cut between the guesses "included" and "excluded"; the twin takes the best of all."""
    scores = rng.normal(size=256)  # they say nothing
    coins = rng.random(256) < 0.5
    audited = audit_epsilon_bounds(scores, coins, 1e-5)[0]
    return audited.epsilon > 0, bound_share_logit(256, count_best_cut(scores, coins), LEVEL) > 0


def play_games(rng: Rng) -> tuple[bool, bool]:
    """The threshold of independent games, learnt from other games than are counted."""
    scores = rng.normal(size=400)  # they say nothing
    coins = rng.random(400) < 0.5
    proved = games.audit_games(games.count_confusion(scores, coins, 0.0, LEVEL), 0.0, LEVEL)
    return proved.epsilon > 0, bound_share_logit(400, count_best_cut(scores, coins), LEVEL) > 0


def exceed_a_conformal_threshold(rng: Rng) -> tuple[bool, bool]:
    """The threshold that a new non-member exceeds; the twin is the share of the old ones."""
    others, new = rng.normal(size=20), rng.normal()
    naive = np.sort(others)[::-1][int(20 * LEVEL)]
    return new > roc.compute_conformal_threshold(others, LEVEL), new > naive


def bound_a_rate(rng: Rng) -> tuple[bool, bool]:
    """The members above a threshold that non-members set; truly as many as the rate."""
    members, others = rng.normal(size=800), rng.normal(size=400)
    number = roc.bound_tpr(members, others, 0.1)
    naive = clopper_pearson(roc.tpr_at_fpr(members, others, 0.1).true_positives, 800)
    wrong = not number.low(LEVEL / 2) <= 0.1 <= number.high(LEVEL / 2)
    return wrong, not naive[0] <= 0.1 <= naive[1]


def bound_a_partial_auc(rng: Rng) -> tuple[bool, bool]:
    """The mean of such rates, each with its threshold; the twin has no error of a threshold."""
    members, others = rng.normal(size=300), rng.normal(size=60)
    number = roc.bound_partial_auc(members, others, 0.2)
    above = np.clip(1 - (others > members[:, None]).mean(1) / 0.2, 0, None)
    half = 1.96 * above.std(ddof=1) / math.sqrt(300)
    wrong = not number.low(LEVEL / 2) <= 0.1 <= number.high(LEVEL / 2)
    return wrong, abs(above.mean() - 0.1) > half


def compare_two_rates(rng: Rng) -> tuple[bool, bool]:
    """The difference of two such rates, if neither score is better."""
    base, new = ((rng.normal(size=600), rng.normal(size=400)) for _ in range(2))
    number = roc.bound_tpr_difference(new, base, 0.1)
    gained = np.zeros(600)
    for sign, (members, others) in ((1, new), (-1, base)):
        gained += sign * (members > roc.compute_conformal_threshold(others, 0.1))
    naive = abs(gained.mean()) > 1.96 * gained.std(ddof=1) / math.sqrt(600)
    return number.low(LEVEL / 2) > 0 or number.high(LEVEL / 2) < 0, naive


@pytest.mark.parametrize(
    ("simulate", "runs"),
    [
        (audit_canaries, 300),
        (audit_canaries_by_a_cut, 300),
        (play_games, 300),
        (exceed_a_conformal_threshold, 3000),
        (bound_a_rate, 300),
        (bound_a_partial_auc, 200),
        (compare_two_rates, 100),
    ],
)
def test_a_chosen_threshold_is_paid_for(
    simulate: Callable[[Rng], tuple[bool, bool]], runs: int
) -> None:
    rng = np.random.default_rng(0)
    wrong, wrong_naively = np.array([simulate(rng) for _ in range(runs)]).sum(axis=0)
    limit = runs * LEVEL + 3 * math.sqrt(runs * LEVEL * (1 - LEVEL))
    assert wrong <= limit < wrong_naively
