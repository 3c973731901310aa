"""Privacy accounting of the Poisson-subsampled Gaussian mechanism: what DP-SGD costs, by dp-accounting.

Add/remove neighbours, Poisson sampling at rate q, noise of standard deviation sigma times the clipping norm, T steps.
The privacy loss distribution (PLD) is what is reported: tight, and rounded up. Renyi accounting (RDP) is the
cross-check and the quick running number. Epsilons in nats. Knows nothing of models, nor whether sampling was Poisson.
"""

from __future__ import annotations

import functools
import logging
import math
from typing import TYPE_CHECKING, Any

from auditor.errors import AuditError

if TYPE_CHECKING:
    from dp_accounting import PrivacyAccountant

_LEAST, _MOST = 1e-2, 1e4  # noise multipliers that are looked at
_PLD_FROM = 0.3  # smallest noise multiplier whose privacy loss distribution can be computed in seconds
_CLOSE = 1e-3  # a solved sigma spends at least (1 - this) of the epsilon asked for, and never more than it


@functools.lru_cache(maxsize=64)
def pld_epsilon(sigma: float, q: float, steps: int, delta: float) -> float:
    """Epsilon of T steps by the privacy loss distribution: the reported value. 0 for no step.

    Raises AuditError for parameters that no mechanism has.
    """
    from dp_accounting.pld.pld_privacy_accountant import PLDAccountant

    return _epsilon(PLDAccountant(), sigma, q, steps, delta)


@functools.lru_cache(maxsize=64)
def rdp_epsilon(sigma: float, q: float, steps: int, delta: float) -> float:
    """Epsilon of T steps by Renyi accounting: an upper bound, a tenth to a quarter looser, in a tenth of the time."""
    from dp_accounting.rdp.rdp_privacy_accountant import RdpAccountant

    return _epsilon(RdpAccountant(), sigma, q, steps, delta)


def quick_epsilon(sigma: float, q: float, steps: int, delta: float) -> float:
    """`rdp_epsilon` at whole orders only, where the formula is a short sum: milliseconds, for a running number."""
    from dp_accounting.rdp.rdp_privacy_accountant import RdpAccountant

    return _epsilon(RdpAccountant([*range(2, 65), 96, 128, 256, 512]), sigma, q, steps, delta)


def reported_epsilon(sigma: float, q: float, steps: int, delta: float) -> tuple[float, str]:
    """Epsilon and the accountant it is by: PLD; RDP, an upper bound too, where there is hardly any noise."""
    if sigma >= _PLD_FROM:
        return pld_epsilon(sigma, q, steps, delta), "dp-accounting PLD"
    return quick_epsilon(sigma, q, steps, delta), "dp-accounting RDP"


def _epsilon(accountant: PrivacyAccountant, sigma: float, q: float, steps: int, delta: float) -> float:
    check_mechanism(sigma, q, steps, delta)
    if steps == 0:
        return 0.0
    # It warns of orders that it leaves out, which only ever raises epsilon.
    absl = logging.getLogger("absl")
    before = absl.level
    absl.setLevel(logging.ERROR)
    try:
        return float(accountant.compose(_event(sigma, q, steps)).get_epsilon(delta))
    finally:
        absl.setLevel(before)


def _event(sigma: float, q: float, steps: int) -> Any:
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent

    return SelfComposedDpEvent(PoissonSampledDpEvent(q, GaussianDpEvent(sigma)), steps)


def check_mechanism(sigma: float, q: float, steps: int, delta: float) -> None:
    """Raises AuditError for parameters that no subsampled Gaussian mechanism has."""
    if not 0 < sigma < math.inf:
        raise AuditError(f"expected a noise multiplier > 0, got {sigma}: without noise there is no epsilon")
    if not 0 < q <= 1:
        raise AuditError(f"expected a sampling rate in (0, 1], got {q}")
    if not 0 < delta < 1:
        raise AuditError(f"expected delta in (0, 1), got {delta}")
    if steps < 0:
        raise AuditError(f"expected a number of steps >= 0, got {steps}")


@functools.lru_cache(maxsize=32)
def noise_for(epsilon: float, delta: float, q: float, steps: int) -> float:
    """The smallest noise multiplier, to within a thousandth of epsilon, whose PLD epsilon is at most this one.

    Raises AuditError where none up to 10,000 is enough, and for an epsilon that is not positive.
    """
    if not 0 < epsilon < math.inf:
        raise AuditError(f"expected epsilon > 0, got {epsilon}")
    # RDP is an upper bound and fast: its sigma is enough, and PLD's lies shortly below.
    high = _bisect(lambda sigma: quick_epsilon(sigma, q, steps, delta) <= epsilon, _LEAST, _MOST, 0.02)
    spent = pld_epsilon(high, q, steps, delta)
    low, low_spent = high, spent
    while low_spent <= epsilon and low > _LEAST:
        low *= 0.85
        low_spent = pld_epsilon(low, q, steps, delta)
    while spent < (1 - _CLOSE) * epsilon:
        # Regula falsi on log epsilon against log sigma, which is nearly straight; kept off the ends.
        share = math.log(epsilon / spent) / math.log(low_spent / spent)
        middle = high * (low / high) ** min(0.95, max(0.05, share * (1 - _CLOSE)))
        found = pld_epsilon(middle, q, steps, delta)
        if found <= epsilon:
            high, spent = middle, found
        else:
            low, low_spent = middle, found
    return high


def _bisect(enough: Any, low: float, high: float, precision: float) -> float:
    """The upper end of a log-bracket of this width around where `enough` becomes true."""
    if not enough(high):
        raise AuditError(f"expected an epsilon that some noise multiplier up to {high:g} gives; none is enough")
    while math.log(high / low) > precision:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high
