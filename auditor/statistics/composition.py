"""Compute the exact epsilon, at a delta, of repeated independent draws from two distributions.

P and Q are distributions over tokens. Epsilon covers both directions, P against Q and Q against P.
It is what the results of guessing-game audits are compared with.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import scipy
from scipy.special import logsumexp

from auditor.core.arrays import Floats
from auditor.core.errors import AuditError

_CELLS = 2**20  # of the grid for sums of losses
_CUT = 1e-13  # bound on the probability that a summed loss is beyond either end of the grid
# slopes at which Chernoff's bound is tried
_SLOPES = np.concatenate([np.geomspace(1e-4, 1, 25), np.geomspace(1.25, 1e3, 40)])
# orders, minus 1, of the converted Renyi divergences
_ABOVE = (0.25, 0.5, 1, 2, 4, 8, 16, 32, 64)


def bound_game_epsilon(log_p: Floats, log_q: Floats, draws: int, delta: float) -> Floats:
    """Return an upper bound on `compute_exact_game_epsilon`, in nats, for many pairs at once.

    log_p, log_q: (..., V) in nats; the result has shape (...). The bound composes Renyi divergences
    of a few orders and converts them (Canonne, Kamath and Steinke 2020, Proposition 12).
    """
    log_p, log_q = np.broadcast_arrays(log_p, log_q)
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        return np.maximum(
            _bound_one_sided_epsilon(log_p, log_q, draws, delta),
            _bound_one_sided_epsilon(log_q, log_p, draws, delta),
        )


def compute_renyi_conversion_penalty(order: float, delta: float) -> float:
    """Return the nats to add to a Renyi divergence of this order to obtain epsilon at delta.

    See Canonne, Kamath and Steinke 2020, Proposition 12.
    """
    return math.log1p(-1 / order) - (math.log(delta) + math.log(order)) / (order - 1)


def compute_exact_game_epsilon(log_p: Floats, log_q: Floats, draws: int, delta: float) -> float:
    """Return the epsilon (nats, >= 0) of `draws` independent draws from P or from Q, at delta.

    It is the smallest epsilon for which the draws are (epsilon, delta)-indistinguishable in both
    directions. log_p, log_q: (V,) in nats. The result is inf if outcomes that only one distribution
    allows have a probability above delta. Delta 0 and a single draw have closed forms. Otherwise
    the privacy loss is summed by FFT on a grid that keeps its mean, accurate to about a millionth
    of the sum's range. Raise AuditError on bad input.
    """
    if draws < 1 or not 0 <= delta < 1:
        raise AuditError(f"expected draws >= 1 and delta in [0, 1), got {draws} and {delta}")
    return max(
        _compute_one_sided_epsilon(PrivacyLossDistribution.from_log_probs(a, b), draws, delta)
        for a, b in ((log_p, log_q), (log_q, log_p))
    )


def compute_best_game_advantage(log_p: Floats, log_q: Floats, draws: int) -> float:
    """Return the largest advantage with which anyone can guess the distribution from `draws` draws.

    This is the total variation distance between the draws of the two distributions.
    """
    total = PrivacyLossDistribution.from_log_probs(log_p, log_q)
    # Delta at epsilon 0 is the total variation.
    return _compute_summed_loss_delta(
        0.0,
        *_compute_summed_loss_distribution(total, draws),
        total.compute_infinite_loss_probability(draws),
    )


@dataclass(frozen=True)
class PrivacyLossDistribution:
    """Describe the distribution of the privacy loss log P/Q (nats) of one draw from P.

    values, p: the possible losses, and their probabilities under P.
    certain: the probability under P of outcomes that are impossible under Q.
    """

    values: Floats
    p: Floats
    certain: float

    @classmethod
    def from_log_probs(cls, log_p: Floats, log_q: Floats) -> PrivacyLossDistribution:
        support = log_p > -math.inf
        possible = support & (log_q > -math.inf)
        p = np.exp(log_p)
        return cls(
            (log_p - np.where(possible, log_q, 0.0))[possible],
            p[possible],
            float(p[support & ~possible].sum()),
        )

    def compute_infinite_loss_probability(self, draws: int) -> float:
        """Return the probability that any of `draws` draws from P is impossible under Q."""
        if self.certain >= 1:
            return 1.0
        return -math.expm1(draws * math.log1p(-self.certain))

    def sum_range(self, draws: int) -> tuple[float, float]:
        """Return a range of the summed loss of `draws` draws, in nats.

        The sum lies beyond each end with probability at most `_CUT` (Chernoff).
        """
        ends = []
        for sign in (-1.0, 1.0):
            slopes = _SLOPES[:, None] * sign
            mass = draws * logsumexp(np.log(self.p) + slopes * self.values, axis=-1)
            # P[sum > s] <= e^(mass - slope s) for every slope. Find the s at which the bound is
            # _CUT, with the best slope.
            tail = float(np.min((mass - math.log(_CUT)) / _SLOPES))
            most = draws * float((sign * self.values).max())
            ends.append(min(tail, most))
        return -ends[0], ends[1]


def _compute_one_sided_epsilon(loss: PrivacyLossDistribution, draws: int, delta: float) -> float:
    rest = loss.compute_infinite_loss_probability(draws)
    if rest > delta:
        return math.inf
    live = loss.p > 0
    if not live.any():
        return 0.0
    if delta == 0:  # the largest possible sum: every draw is the worst
        return max(0.0, draws * float(loss.values[live].max()))
    sums, mass = _compute_summed_loss_distribution(loss, draws)

    def excess(epsilon: float) -> float:
        return _compute_summed_loss_delta(epsilon, sums, mass, rest) - delta

    most = float(sums[-1])
    if excess(0.0) <= 0:
        return 0.0
    # Above the largest sum only infinite losses remain, so a larger epsilon does not reduce delta.
    if excess(most) >= 0:
        return most
    return float(scipy.optimize.brentq(excess, 0.0, most, xtol=1e-9))


def _compute_summed_loss_delta(epsilon: float, sums: Floats, mass: Floats, rest: float) -> float:
    # Hockey-stick divergence: E[1 - e^(epsilon - loss)] over losses above epsilon; an infinite loss
    # counts fully.
    first_above = np.searchsorted(sums, epsilon, side="right")
    return rest + float(np.sum(mass[first_above:] * -np.expm1(epsilon - sums[first_above:])))


def _compute_summed_loss_distribution(
    loss: PrivacyLossDistribution, draws: int
) -> tuple[Floats, Floats]:
    """Return the distribution of the sum of `draws` independent losses.

    The result is the values in nats, ascending, and the probability of each.
    """
    if draws == 1:
        order = np.argsort(loss.values)
        return loss.values[order], loss.p[order]
    low, high = loss.sum_range(draws)
    reach = max(high - low, 1e-12)
    step = 2 * reach / _CELLS  # the transform wraps around, so the grid is twice as wide as the sum
    centre = float(loss.p @ loss.values) / max(float(loss.p.sum()), 1e-300)
    single = np.zeros(_CELLS)
    # Split each loss over its two neighbouring cells, which keeps its mean. Cells are counted from
    # the mean, and wrap around the grid.
    place = (loss.values - centre) / step
    cell = np.floor(place)
    share = place - cell
    for at, part in ((cell, 1 - share), (cell + 1, share)):
        np.add.at(single, at.astype(np.int64) % _CELLS, loss.p * part)
    total: Floats = np.fft.irfft(np.fft.rfft(single) ** draws, _CELLS).clip(0.0)
    middle = draws * centre
    first = math.floor((low - middle - reach / 2) / step)
    sums: Floats = middle + step * (first + np.arange(_CELLS, dtype=np.float64))
    # Index 0 of the transform is `middle`: move the lowest sum to the front.
    return sums, np.roll(total, -first)


def _bound_one_sided_epsilon(log_p: Floats, log_q: Floats, draws: int, delta: float) -> Floats:
    support = log_p > -math.inf
    log_ratio = np.subtract(log_p, log_q, out=np.full(log_p.shape, -math.inf), where=support)
    if delta == 0:
        return draws * np.maximum(log_ratio.max(-1), 0.0)
    p = np.exp(log_p)
    power = np.exp(log_ratio / 4)
    best = np.full(log_p.shape[:-1], math.inf)
    for excess_order in _ABOVE:  # order minus 1; each power is the square of the previous one
        divergence = np.log(np.einsum("...v,...v->...", p, power)) / excess_order
        epsilon = draws * divergence + compute_renyi_conversion_penalty(1 + excess_order, delta)
        best = np.fmin(best, epsilon)  # `fmin` ignores an order whose power overflows a float
        power *= power
    return np.maximum(best, 0.0)
