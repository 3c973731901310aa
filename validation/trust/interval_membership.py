"""Define interval cases for membership: rates at few false positives, AUCs, and bounds on
epsilon.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray
from scipy.integrate import quad
from scipy.stats import cauchy, norm

from auditor.statistics import roc
from auditor.statistics.audited import LEVEL, audit_epsilon_bounds
from auditor.statistics.bounds import bound_recorded_interval
from auditor.statistics.games import audit_games as games_audited
from auditor.statistics.games import count_confusion
from auditor.statistics.one_run import compute_gaussian_epsilon
from auditor.statistics.strongest_score import (
    CandidateScore,
    ScoredRecords,
    compute_simultaneous_widening,
    select_strongest_auc,
)
from auditor.testing import tpr_interval
from validation.trust.interval_case import Ends, Floats, IntervalCase, Rng, ends, lower

SIZES = ((100, 100), (300, 100), (500, 100), (200, 200), (1000, 1000))
Distribution = Callable[[Rng, int, int], tuple[Floats, Floats]]


def jump(rng: Rng, m: int, n: int) -> tuple[Floats, Floats]:
    """Return the scores of the worst case for a rate at 1% false positives.

    A tenth of the m members are above all n non-members; the rest are just below the highest
    hundredth.
    """
    return np.where(rng.random(m) < 0.1, 2.0, rng.uniform(0.98, 0.99, m)), rng.random(n)


def ties(rng: Rng, m: int, n: int) -> tuple[Floats, Floats]:
    own, others = (
        rng.choice(4, m, p=[0.5, 0.2, 0.2, 0.1]),
        rng.choice(4, n, p=[0.9, 0.08, 0.015, 0.005]),
    )
    return own.astype(float), others.astype(float)


def leaks_rarely(rng: Rng, m: int, n: int) -> tuple[Floats, Floats]:
    return rng.normal(0, 1, m) + 50 * (rng.random(m) < 0.01), rng.normal(0, 1, n)


def shifted(by: float) -> Distribution:
    return lambda rng, m, n: (rng.normal(by, 1, m), rng.normal(0, 1, n))


def heavy(rng: Rng, m: int, n: int) -> tuple[Floats, Floats]:
    return rng.standard_cauchy(m) + 2, rng.standard_cauchy(n)


RATES: dict[
    str, tuple[Distribution, float]
] = {  # with the true share of members at 1% false positives
    "normal, 1.5σ": (shifted(1.5), float(norm.sf(norm.isf(0.01) - 1.5))),
    "Cauchy": (heavy, float(cauchy.sf(cauchy.isf(0.01) - 2))),
    "1% of members leak": (leaks_rarely, 0.01 + 0.99 * 0.01),
    "ties": (ties, 0.1),
    "a jump at 1%": (jump, 0.1),
}


def rate_of(own: Floats, others: Floats) -> Ends:
    found = tpr_interval(own, others, 0.01)
    return (found.low, found.high, *ends(roc.bound_tpr(own, others, 0.01))[2:])


def of_membership(rate: Callable[[Floats, Floats], Ends] = rate_of) -> Iterator[IntervalCase]:
    """Yield the membership cases. rate: measures the share found at 1% false positives."""
    for m, n in SIZES:
        for distribution, (draw, truth) in RATES.items():
            yield IntervalCase(
                "TPR at 1% FPR", distribution, f"{m}/{n}", truth, scored(rate, draw, m, n)
            )
        for by in (0.0, 1.5):
            truth = float(quad(lambda rate, by=by: norm.sf(norm.isf(rate) - by), 0, 0.1)[0]) / 0.1
            case = scored(partial_of, shifted(by), m, n)
            yield IntervalCase(
                "partial AUC to 10% FPR", f"normal, {by:g}σ", f"{m}/{n}", truth, case
            )
    for (m, n), by in (((300, 100), 0.0), ((300, 100), 1.0), ((60, 20), 1.0)):
        truth = float(norm.cdf(by / math.sqrt(2)))
        yield IntervalCase(
            "AUC", f"normal, {by:g}σ", f"{m}/{n}", truth, scored(auc_of, shifted(by), m, n), 0.5
        )
    yield from of_strongest_scores()
    yield IntervalCase(
        "difference of TPR at 1% FPR", "1.5σ; as many for sure", "300/100", 0.0, rates_apart, 0.05
    )
    yield IntervalCase("difference of AUC", "1σ, paired", "300/100", 0.0, aucs_apart)


# --- the strongest of many scores ---

TRIED = 11  # scores, as many as a run with a reference has
# Members, non-members, and of the members those in 8 copies.
STRONGEST_SIZES = ((40, 40, 0), (12, 68, 0), (61, 68, 12), (150, 150, 12))


def draw_scores_tried_together(
    rng: Rng, m: int, n: int, shifts: Sequence[float], shared: float, often: int = 0
) -> tuple[dict[str, CandidateScore], ScoredRecords]:
    """Return normal scores of m members and n non-members, and the records with their sides.

    shifts: for each score, how many deviations members are higher; shared: correlation of any two
    scores; often: number of members in 8 copies, which form a group.
    """
    member = np.arange(m + n) < m
    common = rng.normal(size=m + n)
    scores = {}
    for i, shift in enumerate(shifts):
        values = (
            math.sqrt(shared) * common
            + math.sqrt(1 - shared) * rng.normal(size=m + n)
            + shift * member
        )
        scores[f"s{i}"] = CandidateScore(values, f"s{i}")
    first = np.arange(m + n) < often
    return scores, ScoredRecords(member, {"1": member & ~first, "8": first} if often else {})


def of_strongest_scores() -> Iterator[IntervalCase]:
    """Yield cases of the highest AUC among several scores.

    They test the family-wise error without any signal, and whether the winner's interval contains
    its own AUC. The ends are differences from the winner's true AUC, so the truth is 0.
    """
    for m, n, often in STRONGEST_SIZES:
        for shared in (0.0, 0.5, 0.9):
            for leak in (0.0, 1.0, 2.5):
                shifts = [leak, 0.9 * leak, 0.9 * leak, *[0.5 * leak] * (TRIED - 3)]
                what = f"{TRIED} scores, correlation {shared:g}, {leak:g}σ"
                case = partial(strongest_apart, m=m, n=n, shifts=shifts, shared=shared, often=often)
                size = f"{m}/{n}" + (f", {often} in 8 copies" if often else "")
                yield IntervalCase("strongest AUC", what, size, 0.0, case, 0.5)


def strongest_apart(
    rng: Rng, m: int, n: int, shifts: Sequence[float], shared: float, often: int
) -> Ends:
    """Return the ends, minus the true AUC, of the interval that is farthest off.

    Intervals cover all members, and members by number of copies.
    """
    scores, records = draw_scores_tried_together(rng, m, n, shifts, shared, often)
    widening = compute_simultaneous_widening(list(scores.values()), records)
    found = []
    for own in (records.member, *records.copies.values()):
        name, best = select_strongest_auc(scores, own, ~records.member, widening)
        truth = float(norm.cdf(shifts[int(name[1:])] / math.sqrt(2)))
        found.append((best.low - truth, best.high - truth))
    low, high = max(low for low, _ in found), min(high for _, high in found)
    return low, high, low, high


def scored(
    measure: Callable[[Floats, Floats], Ends], draw: Distribution, m: int, n: int
) -> Callable[[Rng], Ends]:
    return lambda rng: measure(*draw(rng, m, n))


def auc_of(own: Floats, others: Floats) -> Ends:
    """Return the ends of the AUC's recorded interval, in the direction above 1/2, as in a
    report.
    """
    found = roc.estimate_auc("membership_auc", own, others)
    return (
        found.low,
        found.high,
        *ends(bound_recorded_interval(found))[2:],
    )


def partial_of(own: Floats, others: Floats) -> Ends:
    return ends(roc.bound_partial_auc(own, others, 0.1))


def rates_apart(rng: Rng) -> Ends:
    equal = RATES["normal, 1.5σ"][1]
    sure = np.where(rng.random(300) < equal, 9.0, rng.normal(-9, 1, 300)), rng.normal(0, 1, 100)
    return ends(roc.bound_tpr_difference(shifted(1.5)(rng, 300, 100), sure, 0.01))


def aucs_apart(rng: Rng) -> Ends:
    own, others = shifted(1.0)(rng, 300, 100)
    sides = [(own + rng.normal(size=300), others + rng.normal(size=100)) for _ in range(2)]
    return ends(roc.compute_auc_difference(*sides))


# --- epsilon ---


def of_epsilon() -> Iterator[IntervalCase]:
    right = 1 / (1 + math.exp(-1.0))

    def response(rng: Rng, n: int) -> tuple[Floats, NDArray[np.bool_]]:
        coins = rng.random(n) < 0.5
        return (coins == (rng.random(n) < right)) + rng.random(n) / 10, coins

    def normal(rng: Rng, n: int) -> tuple[Floats, NDArray[np.bool_]]:
        coins = rng.random(n) < 0.5
        return 2.0 * coins + rng.normal(size=n), coins

    for n in (100, 1000):
        pure, approximate = one_run(response, n, 0.0, 0), one_run(normal, n, 1e-5, 1)
        yield IntervalCase(
            "ε of one run", "randomised response, ε 1", f"{n} canaries", 1.0, pure, 0.3
        )
        yield IntervalCase(
            "ε by f-DP",
            "Gaussian, μ 2",
            f"{n} canaries",
            compute_gaussian_epsilon(2.0, 1e-5),
            approximate,
            0.1,
        )

    def game(rng: Rng) -> Ends:
        scores, coins = response(rng, 768)
        return lower(
            games_audited(count_confusion(np.round(scores), coins, 0.0, LEVEL), 0.0, LEVEL).epsilon
        )

    yield IntervalCase("ε of games", "randomised response, ε 1", "768 games", 1.0, game, 0.3)


def one_run(
    play: Callable[[Rng, int], tuple[Floats, NDArray[np.bool_]]],
    canaries: int,
    delta: float,
    which: int,
) -> Callable[[Rng], Ends]:
    return lambda rng: lower(audit_epsilon_bounds(*play(rng, canaries), delta)[which].epsilon)
