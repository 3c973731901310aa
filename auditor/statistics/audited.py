"""Compute lower bounds on epsilon from the scores and coins of one run's canaries.

A fair coin decides whether a canary is included. A higher score means more confidence that the
canary was included. Scores are cut near their median: the guess is "in" for a higher score and
"out" for a lower score. A guess is surer the farther its score is from the cut. Ties in score or
distance count against the guesser, so the order of the canaries reveals nothing about their coins.
Sureness is a distance and not a rank, because high scores identify included canaries well, while
low scores hardly identify excluded canaries.

All numbers of guesses in `list_guess_counts(m)` are tested together
(`one_run.compute_one_run_p_value`), without dividing the significance level among them. jax_privacy
instead divides the level (Bonferroni) among the points on the ROC's hull, which depend on the
coins.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from itertools import repeat

import numpy as np
from numpy.typing import NDArray

from auditor.core.arrays import Bools
from auditor.core.errors import AuditError
from auditor.core.result import Audited, Measurement
from auditor.statistics import games
from auditor.statistics.audit_by_shape import (
    GAUSSIAN,
    Sampling,
    bound_shape_epsilon,
    bound_shape_mu,
)
from auditor.statistics.bounds import LEVEL
from auditor.statistics.distributions import compute_sign_test_p_value
from auditor.statistics.one_run import (
    Counts,
    bound_share_logit,
    check_audit_parameters,
    check_right_counts,
    epsilon_fdp,
    epsilon_one_run,
    is_epsilon_refuted,
    list_guess_counts,
    yield_epsilon_grid,
)

_LEAST = 1e-9  # an epsilon must exceed this to count as above 0
_UNFAIR = 1e-9  # probability of rejecting fair coins
_MOST_CANARIES = 10**6
_FARTHEST = 1e300  # distance from the middle: infinite scores are as sure as this

MAIN = "one_run"
GAMES = "games"  # of independent games, by Clopper-Pearson (statistics/games.py)
FDP = "fdp"
SHAPE = "shape"
ESTIMATORS = (MAIN, FDP, SHAPE)
HELD = (MAIN, GAMES)  # compared with claims, because they are valid for any mechanism
METRICS = {
    MAIN: "epsilon_lower_bound",
    GAMES: "epsilon_lower_bound",
    FDP: "epsilon_lower_bound_fdp",
    SHAPE: "epsilon_lower_bound_shape",
}


def audit_epsilon_bounds(
    scores: NDArray[np.floating],
    included: Bools,
    delta: float,
    level: float = LEVEL,
    copies: int = 1,
    sampling: Sampling = GAUSSIAN,
) -> tuple[Audited, ...]:
    """Return one lower bound on epsilon per estimator, with the (epsilon, delta) bound first.

    Each bound by itself holds at significance `level`. At delta 0, return only the first bound.
    Raise AuditError for NaN scores, for scores that are all equal, for unfair coins, or for too few
    canaries for any bound.

    Args:
        scores: (canaries,) higher for a canary that seems to be included.
        included: (canaries,) True if the coin included the canary.
        delta: delta of the bounds.
        level: significance level.
        copies: number of insertions of each included canary.
        sampling: sampling rate and number of steps of DP-SGD, which the last bound ("shape")
            assumes.
    """
    _check_audit_inputs(scores, included, delta, level, copies)
    right = count_right_guesses(scores, included)
    return tuple(
        _audit_estimator(name, len(scores), right, delta, level, copies, sampling)
        for name in (ESTIMATORS if delta else ESTIMATORS[:1])
    )


def _audit_estimator(
    name: str,
    m: int,
    right: Counts,
    delta: float,
    level: float,
    copies: int,
    sampling: Sampling | None,
) -> Audited:
    check_right_counts(m, right)
    if not delta and name != MAIN:
        raise AuditError(
            "expected delta > 0: at delta 0 no Gaussian mechanism has a finite epsilon"
        )
    bounds: dict[str, Callable[..., float]] = {
        MAIN: epsilon_one_run,
        FDP: epsilon_fdp,
        SHAPE: partial(bound_shape_epsilon, sampling=sampling or GAUSSIAN),
    }
    counts = list_guess_counts(m)
    logits = list(map(bound_share_logit, counts, right, repeat(level)))
    surest = logits.index(max(logits))  # only reported: the bound uses all counts
    proved, best = (bounds[name](m, n_right, delta, level, copies) for n_right in (right, counts))
    return Audited(
        *(name, proved, delta, level, m, counts[surest], right[surest], best),
        rights=right,
        sampling=sampling,
        copies=copies,
    )


def plan_epsilon_audit(
    m: int, delta: float, level: float = LEVEL, copies: int = 1, sampling: Sampling = GAUSSIAN
) -> Audited:
    """Return a planned audit by the (epsilon, delta) bound, before any guess is made.

    Its number of right guesses and its epsilon are 0.
    """
    check_audit_parameters(delta, level, copies)
    none_right = tuple(0 for _ in list_guess_counts(m))
    return _audit_estimator(MAIN, m, none_right, delta, level, copies, sampling)


def repeat_epsilon_audit(audit: Audited, level: float) -> Audited:
    """Recompute the audit's proved and best provable bounds at a different significance level.

    For example, several audits of one model may share a level. Raise AuditError if
    `audit_epsilon_bounds` cannot have made the audit.
    """
    if audit.estimator == GAMES and audit.table is not None:
        again = games.audit_games(audit.table, audit.delta, level)
        return replace(audit, epsilon=again.epsilon, best=again.best, level=level)
    counts = list_guess_counts(audit.canaries)
    if audit.estimator not in ESTIMATORS or len(audit.rights) != len(counts):
        raise AuditError(
            f"expected a bound by {', '.join(ESTIMATORS)} with the right ones of "
            f"{', '.join(map(str, counts))} guesses of {audit.canaries} canaries, got "
            f"{audit.estimator} with {len(audit.rights)} such counts: run it anew"
        )
    again = _audit_estimator(
        audit.estimator,
        audit.canaries,
        audit.rights,
        audit.delta,
        level,
        audit.copies,
        audit.sampling,
    )
    return replace(again, relation=audit.relation, unit=audit.unit)


def explain_powerless_audit(audit: Audited, limit: float) -> str:
    """Return why this audit could not exceed the limit on epsilon in any case; "" if it could.

    A game may use only some of the tokens that a claim covers. It then proves at most the epsilon
    that these tokens reveal. If this epsilon is within the limit, no guesses can contradict the
    claim.
    """
    if audit.best <= limit:
        return (
            "the audit had no power to refute it: even if every guess had been right, its bound "
            "would not exceed it"
        )
    if audit.table is None:
        return ""
    if audit.tokens is None:
        return "how many tokens its games had is not recorded: run it again"
    covered = "any number of"
    if audit.covered is not None:
        if audit.tokens >= audit.covered:
            return ""
        covered = f"the {audit.covered:,}"
    exact = ""
    if audit.exact is not None:
        if audit.exact > limit:
            return ""
        exact = f", which give away no more than {audit.exact:.3g} exactly"
    return f"its games look at {audit.tokens:,} of {covered} tokens covered{exact}"


def count_right_guesses(scores: NDArray[np.floating], included: Bools) -> Counts:
    """Return the number of right guesses among the r surest, for each r of `list_guess_counts`.

    scores, included: (canaries,).
    """
    scores = np.clip(scores, -_FARTHEST, _FARTHEST)
    middle = _find_median_threshold(np.sort(scores))
    right = ((scores > middle) & included) | ((scores < middle) & ~included)
    # Of equally sure guesses, wrong ones come first.
    n_right = np.concatenate([[0], np.cumsum(right[np.lexsort((right, -np.abs(scores - middle)))])])
    return tuple(int(n_right[r]) for r in list_guess_counts(len(scores)))


def _find_median_threshold(ordered: NDArray[np.floating]) -> float:
    """Return the score that separates guesses "in" from guesses "out".

    It lies midway between two neighbours of different score in sorted order, as close in rank to
    the median as possible.
    """
    steps = np.flatnonzero(np.diff(ordered)) + 1
    if not len(steps):
        return float(ordered[0])
    cut = steps[np.argmin(np.abs(steps - len(ordered) / 2))]
    return float((ordered[cut - 1] + ordered[cut]) / 2)


# --- power ---


@lru_cache(maxsize=2**14)
def compute_best_provable_epsilon(
    m: int, delta: float, level: float = LEVEL, copies: int = 1
) -> float:
    """Return the lower bound on epsilon that m canaries prove if every guess is right.

    They can refute no claim of a larger epsilon.
    """
    return epsilon_one_run(m, list_guess_counts(m), delta, level, copies)


def count_needed_canaries(
    epsilon: float, delta: float, level: float = LEVEL, copies: int = 1
) -> int:
    """Return the smallest number m of canaries that can prove a lower bound of `epsilon`.

    The condition is compute_best_provable_epsilon(m, ...) >= epsilon. Raise AuditError if even a
    million canaries cannot.
    """
    if not 0 < epsilon < math.inf:
        raise AuditError(f"expected an epsilon > 0 to prove, got {epsilon:g}")
    check_audit_parameters(delta, level, copies)

    # The walk for m canaries must come at least this far.
    aim = next(step for step in yield_epsilon_grid() if step >= epsilon)

    def comes_there(m: int) -> bool:
        is_refuted = is_epsilon_refuted(m, list_guess_counts(m), aim, delta, level, copies)
        return is_refuted and bound_share_logit(m, m, level) >= copies * aim

    def is_proved(m: int) -> bool:
        return compute_best_provable_epsilon(m, delta, level, copies) >= epsilon

    least = _find_fewest_canaries(comes_there, epsilon, delta, level, copies)
    if is_proved(least):
        return least
    # If `least` canaries refute epsilon, they may still fail to refute a smaller epsilon, at which
    # the walk stops: bisect with the walk itself.
    return _find_fewest_canaries(is_proved, epsilon, delta, level, copies)


def _find_fewest_canaries(
    enough: Callable[[int], bool], epsilon: float, delta: float, level: float, copies: int
) -> int:
    """Return the smallest number of canaries for which `enough` is True, by bisection.

    Raise AuditError like `count_needed_canaries`.
    """
    # Double until it is enough, then bisect. Both steps assume that more canaries never prove less.
    low = 1
    high = 2
    while not enough(high):
        low = high
        high = 2 * high
        if high > _MOST_CANARIES:
            raise AuditError(
                f"expected an epsilon that up to a million canaries can prove at delta {delta:g}: "
                f"{low:,}, all guessed rightly, prove less than "
                f"{bound_share_logit(low, low, level) / copies:.3g}, got {epsilon:g}"
            )
    return low + 1 + bisect_left(range(low + 1, high), True, key=enough)


def audit_measurements(audits: Sequence[Audited]) -> list[Measurement]:
    """Return measurements for each bound, for the best provable bound and for the right guesses.

    audits: all bounds of one audit. A bound's interval is one-sided, [bound, inf), and its n is the
    number of canaries. To compare a bound with a claim, use the `Audited` itself, not its
    measurement.
    """
    main = audits[0]
    measurements = []
    for a in audits:
        times = ""
        if a.copies != 1:
            times = (
                f"; each inserted {a.copies} times, compared with claims for groups of {a.copies}"
            )
        note = (
            f"one-sided, {1 - a.level:.0%}; at delta {a.delta:g}, {a.relation}, by {a.unit}{times}"
        )
        if a.estimator == SHAPE and (mu := describe_shape_mu(a)):
            note += f"; {mu}"
        ends = (a.epsilon, a.epsilon, math.inf)
        measurements.append(Measurement(METRICS[a.estimator], *ends, a.canaries, "nats", note))
    best_note = f"of {main.canaries:,} canaries, had every guess been right"
    right_note = (
        f"of the {main.guesses:,} surest guesses, which prove the most; all {main.canaries:,} "
        "were considered"
    )
    best = (main.best,) * 3
    right = (main.right,) * 3
    return [
        *measurements,
        Measurement("epsilon_best_provable", *best, main.canaries, "nats", best_note),
        Measurement("guesses_right", *right, main.guesses, "count", right_note),
    ]


def describe_shape_mu(audit: Audited) -> str:
    """Return a phrase like `of a Gaussian mechanism and these scores, μ is 0.41 to 1.20 (...)`.

    Return "" for games, and for scores that use each step of a training.
    """
    if not audit.rights or audit.sampling not in (None, GAUSSIAN):
        return ""
    low, high = bound_shape_mu(audit.canaries, audit.rights, audit.level, audit.copies)
    return (
        f"of a Gaussian mechanism and these scores, μ is {low:.2f} to {high:.2f} "
        f"({1 - audit.level:.0%}, two-sided)"
    )


def _check_audit_inputs(
    scores: NDArray[np.floating], included: Bools, delta: float, level: float, copies: int
) -> None:
    if scores.shape != included.shape or scores.ndim != 1:
        raise AuditError(
            f"expected one score a canary, got {scores.shape} scores and {included.shape} coins"
        )
    m = len(scores)
    inside = int(included.sum())
    check_audit_parameters(delta, level, copies)
    if compute_best_provable_epsilon(m, delta, level, copies) <= 0:
        raise AuditError(
            f"expected at least {count_needed_canaries(_LEAST, delta, level, copies)} canaries, "
            f"below which no bound of epsilon exceeds 0, got {m}"
        )
    if np.isnan(scores).any():
        raise AuditError(
            f"expected a score of every canary, got NaN for {int(np.isnan(scores).sum())} of {m}"
        )
    if (scores == scores[0]).all():
        raise AuditError(
            f"expected scores that distinguish canaries, got {float(scores[0]):g} for all {m}"
        )
    if compute_sign_test_p_value(inside, m) < _UNFAIR:
        raise AuditError(f"expected canaries that went in by fair coins, got {inside} of {m} in")
