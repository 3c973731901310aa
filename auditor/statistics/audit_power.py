"""Compute the power of an audit: the smallest epsilon whose audits exceed a limit with a wanted
probability.

Power is not computed from all-right guesses, which no mechanism makes. For one run, the canaries
come from DP-SGD with the audit's own sampling rate and steps (or from a Gaussian mechanism) and
less noise, each seen exactly; the number of right guesses among the surest is then known exactly
(`compute_canary_shape_p_value`), and a single number of guesses has to refute. For games, the model
gives away epsilon evenly, as randomised response does. Scores that see less than this have less
power, by an unknown amount.
"""

from __future__ import annotations

import math
from functools import lru_cache

from scipy.stats import binom

from auditor.core.result import Audited
from auditor.statistics.audit_by_shape import (
    GAUSSIAN,
    compute_canary_shape_p_value,
    convert_shape_noise,
    find_largest_passing_noise,
)
from auditor.statistics.one_run import (
    compute_group_delta,
    find_largest_refuted_value,
    find_refuting_right_counts,
    list_guess_counts,
    yield_epsilon_grid,
)
from auditor.statistics.two_samples import epsilon_clopper_pearson

# what a verdict states; what a gate does: missed at most once in twenty
USUAL = 0.8
SURE = 0.95
_MOST = 50.0  # nats, beyond which games are no longer looked at
_FINE = 1e-3


@lru_cache(maxsize=2**12)
def find_detectable_epsilon(audit: Audited, limit: float, power: float = USUAL) -> float:
    """The least epsilon, at the audit's delta, at which such audits exceed the limit with this
    power; inf: none.
    """
    if audit.best <= limit:
        return math.inf
    if audit.table is not None:
        return _find_game_detectable_epsilon(audit, limit, power)
    m = audit.canaries
    copies = audit.copies
    sampling = audit.sampling or GAUSSIAN
    # the least that an audit can say above it
    beyond = next(epsilon for epsilon in yield_epsilon_grid() if epsilon > limit)
    needed = find_refuting_right_counts(
        m,
        copies * beyond,
        compute_group_delta(beyond, audit.delta, copies),
        audit.level,
    )

    def caught(noise: float) -> bool:
        return any(
            compute_canary_shape_p_value(m, r, v, noise, sampling) >= power
            for r, v in zip(list_guess_counts(m), needed, strict=True)
        )

    noise = find_largest_passing_noise(caught)
    return math.inf if noise is None else convert_shape_noise(noise * copies, sampling, audit.delta)


def describe_detection_power(audit: Audited, limit: float, power: float = USUAL) -> str:
    """`ε 3.51 of a Gaussian mechanism that its scores see in full would have been caught with 80%
    probability`.
    """
    epsilon = find_detectable_epsilon(audit, limit, power)
    if audit.table is not None:
        model = "a model that gives it away evenly"
    elif (audit.sampling or GAUSSIAN) == GAUSSIAN:
        model = "a Gaussian mechanism that its scores see in full"
    else:
        model = "DP-SGD by its sampling and steps, and less noise"
    smallest = f"ε {epsilon:.3g}" if math.isfinite(epsilon) else "no ε"
    return f"{smallest} of {model} would have been caught with {power:.0%} probability"


def _find_game_detectable_epsilon(audit: Audited, limit: float, power: float) -> float:
    """Each kind of wrong guess has a half of the probability with which the audit may miss (a union
    bound).
    """
    assert audit.table is not None  # whoever asks has seen to it
    tp, fn, fp, tn = audit.table
    played = tp + fn
    others = fp + tn
    half = (1 - power) / 2

    def missed(epsilon: float) -> bool:
        p = 1 / (1 + math.exp(-epsilon))  # randomised response at epsilon tells the truth so often
        right = int(binom.ppf(half, played, p))
        wrong = int(binom.ppf(1 - half, others, 1 - p))
        counts = (right, played - right, wrong, others - wrong)
        return epsilon_clopper_pearson(*counts, audit.delta, audit.level) <= limit

    epsilon_limit = find_largest_refuted_value(missed, _MOST, _FINE)
    # where every epsilon is missed, the bisection ends just below _MOST
    return epsilon_limit if epsilon_limit < _MOST * (1 - _FINE) else math.inf
