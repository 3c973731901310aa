"""Compute the power of an audit of epsilon.

The power is the probability that an audit of this kind exceeds a limit. This module returns the
smallest epsilon that reaches a wanted power. No mechanism makes every guess right, so the power
does not assume that all guesses are right. For an audit of one run, the canaries are assumed to be
trained by DP-SGD with the audit's own sampling rate and steps (or by a Gaussian mechanism), but
with less noise. Each canary is observed exactly. The distribution of right guesses among the surest
is then known exactly (`compute_canary_shape_p_value`). Only refutations by one fixed number of
guesses count towards the power. For an audit by games, the model is assumed to reveal epsilon
evenly, like randomised response. Scores that reveal less have less power, by an unknown amount.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from functools import lru_cache
from itertools import takewhile

import numpy as np
from numpy.typing import NDArray

from auditor.core.nouns import Claim
from auditor.core.result import Audited
from auditor.core.secret_randomness import make_keyed_generator
from auditor.statistics.audit_by_shape import (
    GAUSSIAN,
    LikelihoodRatioDistribution,
    Sampling,
    compute_canary_shape_p_value,
    compute_final_model_distribution,
    compute_likelihood_ratio_distribution,
    convert_shape_noise,
    find_largest_passing_noise,
)
from auditor.statistics.distributions import find_binomial_quantile
from auditor.statistics.games import epsilon_clopper_pearson
from auditor.statistics.one_run import (
    epsilon_one_run,
    find_largest_refuted_value,
    find_refuting_right_counts,
    list_guess_counts,
    yield_epsilon_grid,
)

# Probabilities of detection: a verdict states USUAL, a gate SURE, which misses at most one in
# twenty.
USUAL = 0.8
SURE = 0.95
_MOST = 50.0  # nats: the search for a detectable epsilon of games ends here
_FINE = 1e-3
# details of a claim about a subsampled Gaussian mechanism
_MECHANISM = {"noise_multiplier", "sampling_rate", "steps"}
_SIMULATED = 400  # number of simulated audits; the result is their median


@lru_cache(maxsize=2**12)
def find_detectable_epsilon(audit: Audited, limit: float, power: float = USUAL) -> float:
    """Return the smallest true epsilon that such audits detect with probability `power`.

    An audit detects it if its lower bound exceeds `limit`. The result is in nats, at the audit's
    delta; inf if no epsilon is large enough.
    """
    if audit.best <= limit:
        return math.inf
    if audit.table is not None:
        return _find_game_detectable_epsilon(audit, limit, power)
    m = audit.canaries
    copies = audit.copies
    sampling = audit.sampling or GAUSSIAN
    # The smallest epsilon above the limit that an audit can report.
    beyond = next(epsilon for epsilon in yield_epsilon_grid() if epsilon > limit)
    needed = find_refuting_right_counts(m, beyond, audit.delta, audit.level, copies)

    def caught(noise: float) -> bool:
        return any(
            compute_canary_shape_p_value(m, r, v, noise, sampling) >= power
            for r, v in zip(list_guess_counts(m), needed, strict=True)
        )

    noise = find_largest_passing_noise(caught)
    if noise is None:
        return math.inf
    return convert_shape_noise(noise * copies, sampling, audit.delta)


def describe_detection_power(audit: Audited, limit: float, power: float = USUAL) -> str:
    """Return a phrase about the smallest epsilon that this audit detects with probability `power`.

    For example, `ε 3.51 of a Gaussian mechanism that its scores see in full would have been caught
    with 80% probability`
    """
    epsilon = find_detectable_epsilon(audit, limit, power)
    if audit.table is not None:
        model = "a model that gives it away evenly"
    elif (audit.sampling or GAUSSIAN) == GAUSSIAN:
        model = "a Gaussian mechanism that its scores see in full"
    else:
        model = "DP-SGD by its sampling and steps, and less noise"
    if math.isfinite(epsilon):
        smallest = f"ε {epsilon:.3g}"
    else:
        smallest = "no ε"
    return f"{smallest} of {model} would have been caught with {power:.0%} probability"


def describe_audit_ceiling(audit: Audited, claim: Claim | None) -> str:
    """Return a phrase like `of the claimed ε 4 this audit could show at most about 0.71 (...)`.

    Return "" if the claim is not about a subsampled Gaussian mechanism.
    """
    ceiling = find_audit_ceiling(audit, claim)
    if ceiling is None or claim is None:
        return ""
    if _sees_steps(audit):
        release = "each step of the training"
    else:
        release = "the finished model"
    return (
        f"of the claimed ε {claim.epsilon[claim.relation]:.3g} this audit could show at most about "
        f"{ceiling:.2f} (median, if the training is as it claims and the scores see all that "
        f"{release} shows)"
    )


def find_audit_ceiling(audit: Audited, claim: Claim | None) -> float | None:
    """Return the epsilon that an audit like this proves in half of all cases, if the claim is true.

    Scores are assumed to be ideal. Return None if the claim is not about a subsampled Gaussian
    mechanism. An audit that recorded its sampling observes each step; other audits observe only the
    finished model.
    """
    if claim is None or audit.table is not None or not set(claim.details) >= _MECHANISM:
        return None
    details = claim.details
    return estimate_median_epsilon(
        audit.canaries,
        details["noise_multiplier"],
        (details["sampling_rate"], int(details["steps"])),
        audit.delta,
        audit.level,
        audit.copies,
        _sees_steps(audit),
    )


def _sees_steps(audit: Audited) -> bool:
    return audit.sampling not in (None, GAUSSIAN)


@lru_cache(maxsize=2**10)
def estimate_median_epsilon(
    m: int,
    noise_multiplier: float,
    sampling: Sampling,
    delta: float,
    level: float,
    copies: int = 1,
    sees_steps: bool = False,
) -> float:
    """Return the median lower bound on epsilon over simulated audits of DP-SGD with m canaries.

    Scores are ideal: likelihood ratios. sampling: (sampling rate, steps). copies: the number of
    insertions of each canary. sees_steps: True if the scores use every step; otherwise they use
    only the sum of the steps, which the finished model reveals.
    """
    distribution = compute_final_model_distribution(noise_multiplier, sampling, copies)
    if sees_steps:
        distribution = compute_likelihood_ratio_distribution(noise_multiplier, sampling)
    right = _simulate_right_counts(m, distribution)
    best = epsilon_one_run(m, list_guess_counts(m), delta, level, copies)
    grid = list(takewhile(lambda epsilon: epsilon <= best, yield_epsilon_grid()))

    def is_mostly_spared(epsilon: float) -> bool:
        needed = find_refuting_right_counts(m, epsilon, delta, level, copies)
        return bool((right >= np.array(needed)).any(axis=1).mean() < 0.5)

    n_refuted = bisect_left(grid, True, key=is_mostly_spared)
    return grid[max(0, n_refuted - 1)]


def _simulate_right_counts(m: int, distribution: LikelihoodRatioDistribution) -> NDArray[np.int64]:
    """Simulate audits and return their numbers of right guesses, of shape (audits, counts).

    Each column is for one r of `list_guess_counts(m)`: the number of right guesses among the r
    surest.
    """
    as_sure, right = distribution.compute_guess_probabilities()
    mass = np.diff(as_sure, prepend=0.0)
    chance = np.diff(right, prepend=0.0) / np.maximum(mass, 1e-300)
    rng = make_keyed_generator("audit ceiling", m)
    # Sorted uniform numbers are the ranks of the guesses, the surest first.
    cells = np.searchsorted(as_sure, np.sort(rng.random((_SIMULATED, m)), axis=1))
    is_right = rng.random((_SIMULATED, m)) < chance[np.minimum(cells, len(mass) - 1)]
    n_right: NDArray[np.int64] = np.cumsum(is_right, axis=1)
    return n_right[:, np.array(list_guess_counts(m)) - 1]


def _find_game_detectable_epsilon(audit: Audited, limit: float, power: float) -> float:
    """Return the result of `find_detectable_epsilon` for an audit by games.

    The audit misses if it makes too many wrong guesses of either kind (false positives or false
    negatives). By a union bound, each kind may do so with probability (1 - power) / 2.
    """
    assert audit.table is not None  # callers check it
    tp, fn, fp, tn = audit.table
    played = tp + fn
    others = fp + tn
    half = (1 - power) / 2

    def missed(epsilon: float) -> bool:
        p = 1 / (1 + math.exp(-epsilon))  # probability of the true answer in randomised response
        right = int(find_binomial_quantile(half, played, p))
        wrong = int(find_binomial_quantile(1 - half, others, 1 - p))
        counts = (right, played - right, wrong, others - wrong)
        return epsilon_clopper_pearson(*counts, audit.delta, audit.level) <= limit

    epsilon_limit = find_largest_refuted_value(missed, _MOST, _FINE)
    # If the audit misses every epsilon, the bisection ends just below _MOST.
    if epsilon_limit < _MOST * (1 - _FINE):
        return epsilon_limit
    return math.inf
