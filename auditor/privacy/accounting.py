"""Compute divergences and epsilons, in nats.

The functions are for uniform mixing, Renyi and concentrated DP, and pairs of distributions.
"""

import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy
from scipy.special import logsumexp

from auditor.core.arrays import Floats
from auditor.core.errors import AuditError

MASS_TOLERANCE = 1e-3  # a total mass further than this from 1 is not due to rounding


def compute_uniform_mixing_epsilon(weight: float, vocab_size: int, queries: int = 1) -> float:
    """Return the pure-DP epsilon (nats) of drawing `queries` tokens from a uniform mixture.

    The mixture is weight * model + (1 - weight) * uniform (Majmudar et al. 2022, Theorem 1, Eq. 2).
    Epsilon is 0 for a vocabulary of one token. It holds between *any* two models, so it does not
    depend on the neighbouring relation. Raise AuditError on bad input.
    """
    require_unit_interval("weight", weight)
    vocab_size = require_count("vocab_size", vocab_size, 1)
    queries = require_count("queries", queries, 0)
    if queries == 0 or weight == 0 or vocab_size == 1:
        return 0.0
    if weight == 1:
        return math.inf
    # log1p twice keeps its relative accuracy as weight -> 0 (Majmudar et al. 2022, Eq. 2)
    return queries * (math.log1p((vocab_size - 1) * weight) - math.log1p(-weight))


def compute_rdp_budget(epsilon: float, delta: float, alpha: int) -> float:
    """Return the largest Renyi divergence of order `alpha` (nats) that implies (epsilon, delta)-DP.

    This is PMixED Theorem C.3, inverted. Raise AuditError if no divergence is small enough.
    """
    alpha = require_renyi_order(alpha)
    require_positive("epsilon", epsilon)
    cost = _compute_rdp_conversion_cost(delta, alpha)
    if epsilon <= cost:
        raise AuditError(
            f"expected epsilon above {cost:.6g} nats, which the conversion from order alpha "
            f"{alpha} costs at delta {delta:g}, got {epsilon:g}: raise epsilon or delta, or use a "
            "higher alpha"
        )
    return epsilon - cost


def convert_rdp(rdp: float, delta: float, alpha: int) -> float:
    """Return the epsilon (nats) at `delta` that Renyi divergence `rdp` of order `alpha` implies.

    `rdp` is in nats. The conversion is PMixED Theorem C.3 (Balle et al. 2020). The result is at
    least 0, and is 0 for divergence 0. Raise AuditError on bad input.
    """
    alpha = require_renyi_order(alpha)
    require_nonnegative("rdp", rdp)
    cost = _compute_rdp_conversion_cost(delta, alpha)
    return 0.0 if rdp == 0 else max(0.0, rdp + cost)


def compute_bounded_range_rho(spread: float) -> float:
    """Return rho = spread^2 / 8, the zCDP of a mechanism whose log-ratios span `spread` nats.

    See Cesar and Rogers 2021, Lemma 3.4. The Renyi divergence is D_alpha <= alpha rho at every
    order. Raise AuditError on bad input.
    """
    require_nonnegative("spread", spread)
    return spread**2 / 8


def compute_zcdp_epsilon(rho: float, delta: float) -> float:
    """Return the epsilon (nats) at `delta` of a rho-zCDP mechanism, minimised over real orders.

    See Canonne et al. 2020, Proposition 12. The result is 0 for rho 0, and inf for infinite rho.
    Raise AuditError on bad input.
    """
    require_nonnegative("rho", rho)
    _compute_rdp_conversion_cost(delta, 2)  # raises AuditError if delta is invalid
    if rho in (0, math.inf):
        return rho

    def at_order(log_above: float) -> float:
        alpha = 1 + math.exp(log_above)
        return alpha * rho + _compute_rdp_conversion_cost(delta, alpha)

    # Any order gives a bound. The best is near 1 + sqrt(log(1/delta) / rho): its excess over 1 is
    # within a factor of e^3.
    middle = 0.5 * math.log(-math.log(delta) / rho)
    best = scipy.optimize.minimize_scalar(
        at_order, bounds=(middle - 3, middle + 3), method="bounded", options={"xatol": 1e-9}
    )
    return max(0.0, float(best.fun))


def compute_zcdp_budget(epsilon: float, delta: float) -> float:
    """Return the largest rho of zCDP whose epsilon at `delta` is at most `epsilon` (nats).

    See `compute_zcdp_epsilon`. Raise AuditError on bad input.
    """
    require_positive("epsilon", epsilon)

    def is_affordable(rho: float) -> bool:
        return compute_zcdp_epsilon(rho, delta) <= epsilon

    # A rho that exceeds epsilon: its cost is more than rho itself.
    return find_largest_affordable(is_affordable, 0.0, epsilon + 1)


def find_largest_affordable(
    is_affordable: Callable[[float], bool], low: float, high: float
) -> float:
    """Return the largest affordable number, to the last bit; `low` is affordable, `high` is not."""
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if is_affordable(middle) else (low, middle)
    return low


def realised_renyi(log_p: npt.ArrayLike, log_q: npt.ArrayLike, alpha: float) -> Floats:
    """Return the Renyi divergence D_alpha(p || q) (nats) over the last axis.

    `log_p` and `log_q` are log-probabilities in nats. `alpha` must be above 1 and may be inf. The
    result is inf if a token has p > 0 and q = 0. Distributions are renormalised, so that the 1e-7
    of mass missing in float32 does not count as divergence. Raise AuditError on bad input.
    """
    if not alpha > 1:
        raise AuditError(f"expected alpha > 1, got {alpha}")
    log_p, log_q = np.broadcast_arrays(_normalize_log_probs(log_p), _normalize_log_probs(log_q))
    alive = ~np.isneginf(log_p)
    log_ratio = np.subtract(log_p, log_q, out=np.full(log_p.shape, -np.inf), where=alive)
    if alpha == math.inf:  # the limit is the largest log-ratio among tokens with p > 0
        return log_ratio.max(-1)
    # sum p^alpha q^(1 - alpha) = sum p (p / q)^(alpha - 1), in logs, so that powers of small
    # probabilities do not underflow.
    with np.errstate(
        invalid="ignore"
    ):  # logsumexp computes inf - inf if the divergence is infinite
        divergence = logsumexp(
            np.where(alive, log_p + (alpha - 1) * log_ratio, -np.inf), axis=-1
        ) / (alpha - 1)
    # A plain number if no dimensions are left.
    return np.where(np.isposinf(log_ratio).any(-1), np.inf, divergence)[()]


def realised_pure_dp(log_p: npt.ArrayLike, log_q: npt.ArrayLike) -> Floats:
    """Return the largest |log p - log q| (nats) over the last axis; inf if the supports differ.

    Raise AuditError on bad input.
    """
    return compute_two_sided_renyi(log_p, log_q, math.inf)


def compute_two_sided_renyi(log_p: npt.ArrayLike, log_q: npt.ArrayLike, alpha: float) -> Floats:
    """Return the larger of D_alpha(p || q) and D_alpha(q || p), in nats (see `realised_renyi`)."""
    return np.maximum(realised_renyi(log_p, log_q, alpha), realised_renyi(log_q, log_p, alpha))


def _compute_rdp_conversion_cost(delta: float, alpha: float) -> float:
    if not 0 < delta < 1:
        raise AuditError(f"expected delta in (0, 1), got {delta}")
    # PMixED Theorem C.3 (Balle et al. 2020): epsilon minus the Renyi divergence of order alpha
    return math.log1p(-1 / alpha) - (math.log(delta) + math.log(alpha)) / (alpha - 1)


def _normalize_log_probs(log_distribution: npt.ArrayLike) -> Floats:
    distribution = np.asarray(log_distribution, dtype=np.float64)
    log_mass = logsumexp(distribution, axis=-1, keepdims=True)
    if not np.all(np.abs(log_mass) < MASS_TOLERANCE):  # also true for NaN
        raise AuditError(
            f"expected log-probabilities of total mass 1, got mass {np.exp(log_mass).ravel()}"
        )
    return distribution - log_mass


def require_unit_interval(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise AuditError(f"expected {name} in [0, 1], got {value}")


def require_nonnegative(name: str, value: float) -> None:
    if not value >= 0:
        raise AuditError(f"expected {name} >= 0, got {value}")


def require_positive(name: str, value: float) -> None:
    if not value > 0:
        raise AuditError(f"expected {name} > 0, got {value}")


def require_count(name: str, value: Any, least: int) -> int:
    try:
        count = operator.index(value)
    except TypeError:
        raise AuditError(f"expected a whole number for {name}, got {value}") from None
    if count < least:
        raise AuditError(f"expected {name} >= {least}, got {count}")
    return count


def require_renyi_order(alpha: Any) -> int:
    return require_count("alpha", alpha, 2)
