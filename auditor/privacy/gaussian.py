"""Account for the privacy of the Poisson-subsampled Gaussian mechanism (DP-SGD) by dp-accounting.

The mechanism has add/remove neighbours, Poisson sampling at rate q, noise whose standard deviation
is sigma times the clipping norm, and T steps. Two upper bounds on epsilon (nats) are computed, and
the smaller one is reported. The first uses the privacy loss distribution (PLD), which is tight and
rounded up. The second uses Renyi accounting (RDP), which is looser and faster, and used for running
numbers. If delta is very small, PLD's truncation (1e-15) and the rounding of its Fourier transforms
matter, and only RDP gives a bound. This module does not check that sampling was Poisson.
"""

from __future__ import annotations

import functools
import logging
import math
from typing import TYPE_CHECKING, Any

import scipy

from auditor.core.errors import AuditError

if TYPE_CHECKING:
    from dp_accounting import PrivacyAccountant

Earlier = tuple[tuple[float, float, int], ...]  # (sigma, q, steps) of each mechanism
# Range of noise multipliers to search.
_LEAST = 1e-2
_MOST = 1e4
# Smallest noise multiplier and largest epsilon for which the PLD takes only seconds and little
# memory.
_PLD_FROM = 0.3
_PLD_TO = 100.0
# Largest epsilon and number of steps to solve for: more would give no protection or no training.
MOST_EPSILON = 1000.0
MOST_STEPS = 10**7
# Smallest delta compared with which PLD's arithmetic errors, about 1e-13 of mass, are small.
_PLD_DELTA = 1e-10
_FINE = 1e-4  # width of a privacy loss distribution's cells in nats; dp-accounting's default
_CLOSED = 1e-4  # a bracket of sigma this narrow is not divided further
# A solved sigma spends at least (1 - _CLOSE) of the requested epsilon, and never more than it.
_CLOSE = 1e-3


@functools.lru_cache(maxsize=64)
def compute_pld_epsilon(
    sigma: float, q: float, steps: int, delta: float, earlier: Earlier = (), cell: float = _FINE
) -> float:
    """Return the epsilon (nats) of T steps by the privacy loss distribution; 0 for no steps.

    The result is an upper bound unless delta is tiny. Raise AuditError if no mechanism can have
    these parameters.

    Args:
        earlier: other mechanisms applied to the same records, (sigma, q, steps) each, whose outputs
            the attacker also has.
        cell: width of the distribution's bins in nats, rounded up. Ten times the width takes a
            tenth of the time.
    """
    from dp_accounting.pld.pld_privacy_accountant import PLDAccountant

    return _compose_epsilon(
        PLDAccountant(value_discretization_interval=cell), sigma, q, steps, delta, earlier
    )


@functools.lru_cache(maxsize=64)
def compute_rdp_epsilon(
    sigma: float, q: float, steps: int, delta: float, earlier: Earlier = ()
) -> float:
    """Return the epsilon (nats) of T steps by Renyi accounting, an upper bound.

    The bound is a tenth to a quarter looser than PLD's, and takes a tenth of the time. For
    `earlier`, see `compute_pld_epsilon`.
    """
    from dp_accounting.rdp.rdp_privacy_accountant import RdpAccountant

    return _compose_epsilon(RdpAccountant(), sigma, q, steps, delta, earlier)


@functools.lru_cache(maxsize=64)
def compute_quick_rdp_epsilon(
    sigma: float, q: float, steps: int, delta: float, earlier: Earlier = ()
) -> float:
    """Return `compute_rdp_epsilon`, but minimised over integer orders only.

    This is a short sum, fast enough to update epsilon during training.
    """
    from dp_accounting.rdp.rdp_privacy_accountant import RdpAccountant

    return _compose_epsilon(
        RdpAccountant([*range(2, 65), 96, 128, 256, 512]), sigma, q, steps, delta, earlier
    )


def compute_tightest_epsilon(
    sigma: float, q: float, steps: int, delta: float, earlier: Earlier = (), cell: float = _FINE
) -> tuple[float, str]:
    """Return the smaller of PLD's and RDP's epsilon (nats), and the name of its accountant.

    RDP's epsilon is used if there is almost no noise or delta is tiny. For `earlier` and `cell`,
    see `compute_pld_epsilon`.
    """
    quick = compute_quick_rdp_epsilon(sigma, q, steps, delta, earlier)
    if min([sigma, *(other for other, _, _ in earlier)]) < _PLD_FROM or quick > _PLD_TO:
        return quick, "dp-accounting RDP"
    loose = compute_rdp_epsilon(sigma, q, steps, delta, earlier), "dp-accounting RDP"
    if delta < _PLD_DELTA:
        return loose
    # Comparing tuples: if both epsilons are equal, PLD's comes first.
    return min(
        (compute_pld_epsilon(sigma, q, steps, delta, earlier, cell), "dp-accounting PLD"), loose
    )


def _compose_epsilon(
    accountant: PrivacyAccountant,
    sigma: float,
    q: float,
    steps: int,
    delta: float,
    earlier: Earlier,
) -> float:
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent

    require_valid_gaussian_mechanism(sigma, q, steps, delta)
    if steps == 0 and not earlier:
        return 0.0
    # It warns of orders that it leaves out; leaving out orders can only raise epsilon.
    absl = logging.getLogger("absl")
    before = absl.level
    absl.setLevel(logging.ERROR)
    try:
        for scale, rate, count in ((sigma, q, steps), *earlier):
            accountant.compose(
                SelfComposedDpEvent(PoissonSampledDpEvent(rate, GaussianDpEvent(scale)), count)
            )
        return float(accountant.get_epsilon(delta))
    finally:
        absl.setLevel(before)


def require_valid_gaussian_mechanism(sigma: float, q: float, steps: int, delta: float) -> None:
    """Raise AuditError if no subsampled Gaussian mechanism can have these parameters."""
    if not 0 < sigma < math.inf:
        raise AuditError(
            f"expected a noise multiplier > 0, got {sigma}: without noise there is no epsilon"
        )
    if not 0 < q <= 1:
        raise AuditError(f"expected a sampling rate in (0, 1], got {q}")
    if not 0 < delta < 1:
        raise AuditError(f"expected delta in (0, 1), got {delta}")
    if steps < 0:
        raise AuditError(f"expected a number of steps >= 0, got {steps}")


@functools.lru_cache(maxsize=32)
def find_noise_multiplier(epsilon: float, delta: float, q: float, steps: int) -> float:
    """Return the smallest noise multiplier whose reported epsilon is at most `epsilon`.

    Its epsilon is within a thousandth of `epsilon`. With almost no noise, the multiplier itself is
    only precise to a fiftieth. Raise AuditError if no multiplier up to 10,000 is enough, if epsilon
    is not in (0, MOST_EPSILON], or if there are more than MOST_STEPS steps.
    """
    if not 0 < epsilon <= MOST_EPSILON:
        raise AuditError(f"expected epsilon > 0 and at most {MOST_EPSILON:g}, got {epsilon:g}")
    if steps > MOST_STEPS:
        raise AuditError(
            f"expected at most {MOST_STEPS:,} steps, got {steps:,}: lower epochs, or raise batch"
        )

    def reported(sigma: float) -> float:
        return compute_tightest_epsilon(sigma, q, steps, delta)[0]

    # RDP is fast and gives an upper bound: its sigma is enough, and the final one is slightly
    # below.
    high = _find_noise_multiplier(
        lambda sigma: compute_quick_rdp_epsilon(sigma, q, steps, delta) <= epsilon,
        _LEAST,
        _MOST,
        0.02,
    )
    if high < _PLD_FROM or epsilon > _PLD_TO:
        return high
    epsilon_spent = reported(high)
    low = high
    low_spent = epsilon_spent
    while low_spent <= epsilon and low > _PLD_FROM:
        low = max(0.85 * low, _PLD_FROM)
        low_spent = reported(low)
    if low_spent <= epsilon:
        return low
    # epsilon can jump where PLD is no longer used
    while epsilon_spent < (1 - _CLOSE) * epsilon and low < high * (1 - _CLOSED):
        # Regula falsi on log epsilon against log sigma, which is nearly a straight line. Stay away
        # from the ends, and aim slightly towards `high`: a sigma just within the budget ends the
        # search.
        share = math.log(epsilon / epsilon_spent) / math.log(low_spent / epsilon_spent)
        middle = high * (low / high) ** min(0.95, max(0.05, share * (1 - _CLOSE)))
        achieved = reported(middle)
        if achieved <= epsilon:
            high = middle
            epsilon_spent = achieved
        else:
            low = middle
            low_spent = achieved
    return high


def _find_noise_multiplier(enough: Any, low: float, high: float, precision: float) -> float:
    """Return a noise multiplier slightly above the smallest one for which `enough` is true.

    The search bisects [low, high] until log(high / low) is at most `precision`, and returns `high`.
    """
    if not enough(high):
        raise AuditError(
            f"expected an epsilon that some noise multiplier up to {high:g} gives; none is enough"
        )
    while math.log(high / low) > precision:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


# --- two scales of noise ---


def compute_noise_scale_divergence(
    order: float, parameters: int, first: float, second: float
) -> float:
    """Return the Renyi divergence (nats) of noise N(0, first^2 I) from N(0, second^2 I).

    The result is inf if the divergence is undefined. `parameters` is the dimension of the noise. If
    the noise scale depends on the data, the scale by itself reveals this divergence, as in
    ADP (Wu et al. 2022, Eq. 5 and 6).
    """
    mixed = order * second**2 + (1 - order) * first**2
    if mixed <= 0:
        return math.inf
    return parameters * (math.log(second / first) + math.log(second**2 / mixed) / (2 * (order - 1)))


def compute_noise_scale_epsilon(
    parameters: int, first: float, second: float, delta: float
) -> float:
    """Return the smallest epsilon (nats) at which noise of two scales is (epsilon, delta)-close.

    It covers both directions and is at least 0. The squared norm of the noise is a sufficient
    statistic, which is chi-squared after scaling.
    """
    return max(
        _compute_one_way_epsilon(parameters, *pair, delta)
        for pair in ((first, second), (second, first))
    )


def _compute_one_way_epsilon(parameters: int, first: float, second: float, delta: float) -> float:
    if first == second:
        return 0.0
    slope = (second**-2 - first**-2) / 2  # slope of the log-ratio as a function of the squared norm
    # L = parameters log(second / first) + slope |x|^2. L > epsilon is the upper tail of |x|^2, or
    # the lower tail if slope < 0.
    tail = scipy.stats.chi2.cdf
    if slope > 0:
        tail = scipy.stats.chi2.sf

    # delta(epsilon) = P[L > epsilon] - e^epsilon Q[L > epsilon], where L is the log-ratio (Balle
    # and Wang 2018, Theorem 5).
    def excess(epsilon: float) -> float:
        edge = (epsilon - parameters * math.log(second / first)) / slope
        more = float(tail(edge / first**2, parameters))
        less = float(tail(edge / second**2, parameters))
        # In logs, because e^epsilon itself overflows if the share is tiny.
        if less:
            more -= math.exp(epsilon + math.log(less))
        return more - delta

    if excess(0.0) <= 0:
        return 0.0
    most = 1.0
    while excess(most) > 0:
        most *= 2
    return float(scipy.optimize.brentq(excess, 0.0, most, xtol=1e-9))
