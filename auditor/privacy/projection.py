"""Compute the largest weight with which a private distribution can be mixed into a public one.

The mixture lambda p + (1 - lambda) p0 must be within a Renyi radius of p0. The distributions p
(private) and p0 (public) are tensors of normalised log-probabilities in nats over the last
dimension, with any leading dimensions. Weights have no gradient.
"""

import copy
import itertools
import math
from collections.abc import Iterable, Iterator
from typing import Self

import torch
from torch import Tensor

from auditor.core.errors import AuditError
from auditor.privacy.accounting import MASS_TOLERANCE, require_renyi_order

_CHUNK = 1 << 18  # elements per chunk, so that the working copies of a chunk stay in the cache
# From order 12 on, alternating sums of central moments lose more digits than _SHAVE allows for.
_DIRECT_ORDERS = 8
_ITERATIONS = 64  # Newton needs 3 to 20
_ROUNDING = 1e-12  # relative cut of every radius: divergence that double precision may hide
_SHAVE = 1e-4  # the same for single precision
_SMALLEST_STEP = 1e-15  # relative to the weight


@torch.no_grad()
def log_ratio_moments(log_p: Tensor, log_p0: Tensor, alpha: int) -> Tensor:
    """Return log E_{p0} (p / p0)^k for k = 0..alpha, of shape (alpha + 1, ...), in float64.

    A moment is inf if a token has p > 0 and p0 = 0. Half precision is renormalised in float32.
    Raise AuditError if a distribution is invalid: it has NaN, or a total mass other than 1.
    """
    log_p, log_p0 = _align_distributions(log_p, log_p0)
    moments = log_p.new_empty(
        require_renyi_order(alpha) + 1, *log_p.shape[:-1], dtype=torch.float64
    )
    if alpha <= _DIRECT_ORDERS:
        of_chunk = _compute_moments
    else:
        of_chunk = _compute_log_moments
    for index in _list_distribution_chunk_slices(log_p.shape):
        private, public = (
            _broadcast_slice(distribution, index) for distribution in (log_p, log_p0)
        )
        moments[(slice(None), *index)] = of_chunk(private, public, alpha)
    return moments


@torch.no_grad()
def find_largest_mixing_weight(
    moments: Tensor, radius: float | Tensor, max_weight: float = 1.0
) -> Tensor:
    """Return the largest lambda in [0, max_weight] whose mixture is within `radius` of p0.

    The condition is D_alpha(lambda p + (1 - lambda) p0 || p0) <= radius (nats). `moments` are the
    `log_ratio_moments` up to alpha. `radius` is broadcast against the dimensions of the moments
    after the first, and may have extra dimensions in front. The result is float64. Raise AuditError
    on bad input.
    """
    if not 0 <= max_weight <= 1:
        raise AuditError(f"expected max_weight in [0, 1], got {max_weight}")
    alpha = len(moments) - 1
    # largest allowed log E x^alpha
    budget = (alpha - 1) * _apply_rounding_margin(radius, moments.device)
    shape = torch.broadcast_shapes(moments.shape[1:], budget.shape)
    budget = budget.expand(shape)
    # Dimensions that only the radius has come between the orders and the distributions' dimensions.
    moments = moments.reshape(
        alpha + 1, *(1,) * (len(shape) + 1 - moments.ndim), *moments.shape[1:]
    ).expand(-1, *shape)
    full_weight = torch.full(shape, max_weight, dtype=torch.float64, device=moments.device)
    fits = (
        _log_mixture_moment_excess(moments, full_weight) <= _log_expm1(budget)
    ) | budget.isposinf()
    weight = torch.where(fits, full_weight, 0.0)
    # If p > 0 = p0 for a token, no positive weight is allowed.
    unsettled = ~fits & (budget > 0) & moments[alpha].isfinite()
    if unsettled.any():
        weight[unsettled] = _solve_weight(moments[:, unsettled], budget[unsettled], max_weight)
    return weight


def compute_projection_weight(
    log_p: Tensor, log_p0: Tensor, alpha: int, radius: float | Tensor, max_weight: float = 1.0
) -> Tensor:
    """Return the largest lambda in [0, max_weight] whose mixture is within `radius` of p0.

    The condition is D_alpha(lambda p + (1 - lambda) p0 || p0) <= radius (nats). `radius` broadcasts
    with the leading dimensions; single precision reduces it by a factor of 1 - 1e-4. The result is
    float64. Raise AuditError on bad input.
    """
    return find_largest_mixing_weight(
        log_ratio_moments(log_p, log_p0, alpha),
        _apply_precision_margin(radius, log_p, log_p0),
        max_weight,
    )


@torch.no_grad()
def compute_two_sided_weight(
    log_p: Tensor, log_p0: Tensor, alpha: int, radius: float | Tensor
) -> Tensor:
    """Return the largest lambda in [0, 1] whose mixture is within `radius` (nats) both ways.

    This is PMixED Sec. 4.2. The result is `compute_projection_weight`, reduced if D_alpha(p0 ||
    mixture) is the larger divergence. Raise AuditError on bad input.
    """
    radius = _apply_precision_margin(radius, log_p, log_p0)
    moments = log_ratio_moments(log_p, log_p0, alpha)
    weight = find_largest_mixing_weight(moments, radius)
    budget = ((alpha - 1) * radius).expand(weight.shape)
    # Taylor: E x^(1 - alpha) - 1 <= C(alpha, 2) lambda^2 E h^2 (1 - lambda)^-(alpha + 1), because x
    # >= 1 - lambda everywhere.
    most = math.comb(alpha, 2) * weight**2 * torch.expm1(moments[2]) * (1 - weight) ** -(alpha + 1)
    unsure = ~(most.log1p() <= budget)  # also for NaN (no weight left or needed)
    # Leading dimensions of the distributions; before these, `weight` may have dimensions that only
    # the radius has.
    lead = weight.shape[weight.ndim - moments.ndim + 1 :]
    log_p, log_p0 = _align_distributions(log_p, log_p0, lead)
    sizes = math.prod(weight.shape[: weight.ndim - len(lead)])
    two_sided_weight, budget, unsure = (x.reshape(sizes, *lead) for x in (weight, budget, unsure))
    for index in _list_distribution_chunk_slices(log_p.shape):
        chunk = (slice(None), *index)
        chunk_weight, allowed, looked_at = (
            x[chunk].reshape(sizes, -1).clone() for x in (two_sided_weight, budget, unsure)
        )
        active = looked_at.any(0)  # distributions of the chunk to look at
        if not active.any():
            continue
        shape = _broadcast_slice(log_p, index).shape
        private, public = (
            _broadcast_slice(distribution, index).expand(shape).reshape(-1, shape[-1])[active]
            for distribution in (log_p, log_p0)
        )
        chunk_weight[:, active] = _bound_reverse_weights(
            private,
            public,
            chunk_weight[:, active],
            allowed[:, active],
            looked_at[:, active],
            alpha,
        )
        two_sided_weight[chunk] = chunk_weight.view(two_sided_weight[chunk].shape)
    return two_sided_weight.view(weight.shape)


def _compute_moments(log_p: Tensor, log_p0: Tensor, alpha: int) -> Tensor:
    """Return `log_ratio_moments` quickly, from the central moments of p / p0.

    This needs one exponential per token and is precise for small divergences.
    """
    # A p0 below the smallest normal number is rounded up to it. This only raises the divergence and
    # lowers the weight, so it is safe.
    public = log_p0.clamp_min(math.log(torch.finfo(log_p0.dtype).tiny)).exp_()
    _require_total_mass_one(public.sum(-1))
    excess = _compute_ratio_excess(log_p, log_p0)
    term = excess * public
    powers = [term.sum(-1)]  # E h, which is 0
    for _ in range(2, alpha + 1):
        powers.append(term.mul_(excess).sum(-1))  # E h^k
    central = torch.stack(powers).double()
    # central[0] is E h, the difference between the masses of p and p0. If either is not a
    # distribution, `_compute_log_moments` refuses it.
    fine = central.isfinite().all(0) & (central[0].abs() <= MASS_TOLERANCE)
    moments = central.new_zeros(alpha + 1, *fine.shape)  # the first two are log 1
    for k in range(
        2, alpha + 1
    ):  # E (1 + h)^k - 1 = sum_j C(k, j) E h^j because E h = 0; central[j - 1] is E h^j
        weights = central.new_tensor([math.comb(k, j) for j in range(2, k + 1)])
        moments[k] = torch.tensordot(weights, central[1:k], 1).log1p()
    if not fine.all():  # a ratio or p0 is out of the dtype's range, or there is no distribution
        moments[:, ~fine] = _compute_log_moments(
            log_p[~fine], log_p0.expand(log_p.shape)[~fine], alpha
        )
    return moments


def _compute_log_moments(log_p: Tensor, log_p0: Tensor, alpha: int) -> Tensor:
    """Return `log_ratio_moments` by log-sum-exp in float64, with both distributions renormalised.

    This is slow, but right for any ratio.
    """
    log_p = log_p.double()
    log_p0 = log_p0.double()
    log_mass = log_p.logsumexp(-1)
    log_mass0 = log_p0.logsumexp(-1)
    _require_total_mass_one(log_mass.exp())
    _require_total_mass_one(log_mass0.exp())
    log_ratio = log_p - log_p0
    moments = log_p.new_zeros(alpha + 1, *log_ratio.shape[:-1])
    for k in range(2, alpha + 1):
        terms = log_p + (k - 1) * log_ratio
        # log_ratio is NaN if p0 is 0 too
        terms.masked_fill_(log_p.isneginf(), -math.inf)
        # E over the renormalised distributions: (p / mass)^k (p0 / mass0)^(1 - k)
        moments[k] = terms.logsumexp(-1) - k * log_mass + (k - 1) * log_mass0
    return moments.clamp_min_(0.0)  # negative values are rounding errors


def _compute_ratio_excess(log_p: Tensor, log_p0: Tensor) -> Tensor:
    """Return h = p / p0 - 1; 0 if p = p0 = 0, inf if only p0 is 0."""
    return _log_ratio(log_p, log_p0).expm1_()


def _log_ratio(log_p: Tensor, log_p0: Tensor) -> Tensor:
    """Return log p / p0; 0 if p = p0 = 0, inf if only p0 is 0."""
    ratio = log_p - log_p0
    dead = log_p0.isneginf()
    if dead.any():
        return ratio.masked_fill_(dead & log_p.isneginf(), 0.0)
    return ratio


def _solve_weight(moments: Tensor, budget: Tensor, max_weight: float) -> Tensor:
    """Return the mixing weight lambda at which log E x^alpha = budget > 0, with x = mixture / p0.

    `moments` is (alpha + 1, n), finite; `budget` is (n,). (E x^alpha)^(1/alpha) is convex in lambda
    (Minkowski), so Newton steps from an upper bound never pass the root.
    """
    alpha = len(moments) - 1
    # Upper bounds of the weight: from a single term of E x^alpha, and from E x^alpha >= (E
    # x^2)^(alpha/2).
    one_term = torch.exp((budget - moments[alpha]) / alpha)
    square = torch.exp((_log_expm1(2 * budget / alpha) - _log_expm1(moments[2])) / 2)
    weight = torch.minimum(one_term, square).clamp_max(max_weight)
    # M_(k+1) - M_k >= 0: the slope of a Bernstein polynomial is alpha times the Bernstein
    # polynomial of its coefficients' differences.
    log_rises = moments[2:] + torch.log(-torch.expm1((moments[1:-1] - moments[2:]).clamp_max(0.0)))
    for _ in range(_ITERATIONS):
        log_moment = torch.logaddexp(
            _log_mixture_moment_excess(moments, weight), budget.new_zeros(())
        )
        log_slope = math.log(alpha) + _log_bernstein_polynomial(log_rises, alpha - 1, weight)
        # Newton on F^(1/alpha), F = E x^alpha: (1 - (e^budget / F)^(1/alpha)) alpha F / F'
        step = (
            -alpha * torch.expm1((budget - log_moment) / alpha) * torch.exp(log_moment - log_slope)
        )
        step = step.clamp_min(0.0)
        if not (step > _SMALLEST_STEP * weight).any():
            break
        weight = (weight - step).clamp_min(0.0)
    # Remove any excess over the budget by the chord from (0, 1). The chord lies above the convex
    # function, so its end satisfies the budget.
    chord = torch.exp(_log_expm1(budget) - _log_mixture_moment_excess(moments, weight))
    return weight * chord.clamp_max(1.0)


def _log_mixture_moment_excess(moments: Tensor, weight: Tensor) -> Tensor:
    """Return log(E x^alpha - 1) of the mixtures at these weights, with x = mixture / p0.

    It is computed as a sum of positive terms only, so it is precise for small divergences.
    """
    return _log_bernstein_polynomial(_log_expm1(moments[2:]), len(moments) - 1, weight)


def _log_bernstein_polynomial(log_coefficients: Tensor, degree: int, weight: Tensor) -> Tensor:
    """Return log sum_k C(degree, k) weight^k (1 - weight)^(degree - k) e^(c_k).

    `log_coefficients` are c_k for the highest k, up to k = degree. The sum has only these terms.
    """
    first = degree + 1 - len(log_coefficients)
    log_weight = weight.log()  # xlog1py, unlike a product, is 0 at weight 1 and k = degree
    return torch.stack(
        [
            math.log(math.comb(degree, k))
            + k * log_weight
            + torch.special.xlog1py(degree - k, -weight)
            + coefficient
            for k, coefficient in enumerate(log_coefficients, start=first)
        ]
    ).logsumexp(0)


def _bound_reverse_weights(
    log_p: Tensor, log_p0: Tensor, weight: Tensor, budget: Tensor, unsure: Tensor, alpha: int
) -> Tensor:
    """Reduce weights so that the reverse divergence is within the budget.

    The condition is log E x^(1-alpha) <= budget with x = mixture / p0. Only weights in `unsure` are
    reduced.

    Args:
        log_p: (n, V) nats.
        log_p0: (n, V) nats.
        weight: (sizes, n).
        budget: (sizes, n).
        unsure: (sizes, n).
    """
    weight = weight.clone()
    reverse = _ReverseDivergence(log_p, log_p0, alpha)
    exact = None
    # Single precision may be a few percent off if the mixture loses nearly all of a token's mass,
    # so check weights near the budget again.
    near = torch.where(weight > 0.9, 0.9, 1.0) * budget
    for size, rows in enumerate(unsure):
        at = rows.nonzero().squeeze(-1)
        if not len(at):
            continue
        at = at[
            ~(
                reverse.select_distributions(at).reverse_moment_excess(weight[size, at]).log1p()
                <= near[size, at]
            )
        ]
        if len(at):
            exact = exact or _ReverseDivergence(log_p.double(), log_p0.double(), alpha)
            weight[size, at] = exact.select_distributions(at).shrink_weight_to_budget(
                weight[size, at], budget[size, at]
            )
    return weight


class _ReverseDivergence:
    """The moment E x^(1 - alpha) of distributions (n, V) at any weights lambda; x = mixture / p0.

    x is 1 + lambda h with E h = 0. So adding (alpha - 1) lambda h to each token's term changes
    nothing, but avoids cancellation: the excess over 1 is the mean of lambda^2 h^2 sum_j (alpha -
    j) x^-j over j = 1..alpha - 1. Its slope is the mean of (alpha - 1) lambda h^2 sum_j x^-j over j
    = 1..alpha.
    """

    def __init__(self, log_p: Tensor, log_p0: Tensor, alpha: int) -> None:
        self.alpha = alpha
        self.ratio, excess = _log_ratio(log_p, log_p0).exp_(), _compute_ratio_excess(log_p, log_p0)
        self.square = log_p0.exp().mul_(excess).mul_(excess)  # p0 h^2

    def select_distributions(self, distributions: Tensor) -> Self:
        """Return a copy with only the distributions at these indices."""
        subset = copy.copy(self)
        subset.ratio, subset.square = self.ratio[distributions], self.square[distributions]
        return subset

    def reverse_moment_excess(self, weight: Tensor, inverse: Tensor | None = None) -> Tensor:
        """Return E x^(1 - alpha) - 1, (n,) in float64; `inverse` is 1 / x if already computed."""
        if inverse is None:
            inverse = self._inverse_of_mixture_ratio(weight)
        # coefficients alpha - j, from j = alpha - 1, the highest power, down
        return weight**2 * self._mean_weighted_by_squared_excess(
            _evaluate_polynomial(inverse, range(1, self.alpha))
        )

    def _inverse_of_mixture_ratio(self, weight: Tensor) -> Tensor:
        # x = lambda p / p0 + 1 - lambda has no subtraction that cancels either
        weight_column = weight.unsqueeze(-1)
        public_part = (1 - weight_column).to(self.ratio)
        return torch.addcmul(public_part, self.ratio, weight_column.to(self.ratio)).reciprocal_()

    def _mean_weighted_by_squared_excess(self, term: Tensor) -> Tensor:
        """Return E (h^2 term), (n,), under the public distribution; `term` is overwritten."""
        return term.mul_(self.square).sum(-1).double()

    def shrink_weight_to_budget(self, weight: Tensor, budget: Tensor) -> Tensor:
        """Return the largest lambda <= weight with log E x^(1 - alpha) <= budget.

        Inputs are float64. (E x^(1 - alpha))^(-1/(alpha - 1)) is concave and decreasing (reverse
        Minkowski), so Newton steps never pass the root.
        """
        order = self.alpha - 1
        # At weight 1, a token with p = 0 makes the moment infinite; below this weight, it fits into
        # float64.
        weight = weight.clamp_max(1 - max(_ROUNDING, 10.0 ** (-280 / order)))
        for _ in range(_ITERATIONS):
            inverse = self._inverse_of_mixture_ratio(weight)
            moment = self.reverse_moment_excess(weight, inverse)
            log_moment = torch.log1p(moment)
            slope = (
                order
                * weight
                * self._mean_weighted_by_squared_excess(
                    _evaluate_polynomial(inverse, [1] * self.alpha)
                )
            )
            # Newton on G^(-1/order), G = E x^-order: ((G / e^budget)^(1/order) - 1) order G / G'
            step = order * torch.expm1((log_moment - budget) / order) * (1 + moment) / slope
            step = torch.where(log_moment > budget, step, 0.0)
            if not (step > _SMALLEST_STEP * weight).any():
                break
            weight = (weight - step).clamp_min(0.0)
        # as in `_solve_weight`
        chord = torch.expm1(budget) / self.reverse_moment_excess(weight)
        return weight * chord.nan_to_num(nan=1.0).clamp_max(1.0)


def _evaluate_polynomial(x: Tensor, coefficients: Iterable[int]) -> Tensor:
    """Return c_n x^n + ... + c_1 x, without a constant term, by Horner's rule.

    coefficients: c_n, ..., c_1.
    """
    first, *others = coefficients
    total = first * x
    for coefficient in others:
        total.add_(coefficient).mul_(x)
    return total


def _log_expm1(x: Tensor) -> Tensor:
    return x + torch.log(-torch.expm1(-x))


def _align_distributions(
    log_p: Tensor, log_p0: Tensor, lead: torch.Size | None = None
) -> tuple[Tensor, Tensor]:
    """Return both distributions with the same dtype and number of dimensions.

    p is expanded to all leading dimensions. p0 is not expanded: its missing leading dimensions are
    1, so that work on p0 is not repeated for each p.
    """
    if log_p.shape[-1] != log_p0.shape[-1]:
        raise AuditError(
            f"expected one vocabulary, got {log_p.shape[-1]} and {log_p0.shape[-1]} tokens"
        )
    shape = torch.broadcast_shapes(log_p.shape, log_p0.shape, (*(lead or ()), 1))
    dtype = torch.promote_types(log_p.dtype, log_p0.dtype)
    if dtype in (torch.float16, torch.bfloat16):
        log_p = log_p.float().log_softmax(-1)
        log_p0 = log_p0.float().log_softmax(-1)
    elif dtype not in (torch.float32, torch.float64):
        raise AuditError(f"expected log-probabilities in floating point, got {dtype}")
    else:
        log_p = log_p.to(dtype)
        log_p0 = log_p0.to(dtype)
    # Neither is copied. If a dimension of p0 is 1, work on p0 is done once for the whole dimension
    # of p.
    return log_p.expand(shape), log_p0[(None,) * (len(shape) - log_p0.ndim)]


def _list_distribution_chunk_slices(shape: torch.Size) -> Iterator[tuple[slice, ...]]:
    """Yield slices of the leading dimensions.

    A slice has at most _CHUNK elements, or is a single distribution.
    """
    ranges = []
    for dim, size in enumerate(shape[:-1]):
        step = max(1, _CHUNK // max(1, math.prod(shape[dim + 1 :])))
        ranges.append([slice(start, start + step) for start in range(0, size, step)])
    return itertools.product(*ranges)


def _broadcast_slice(distribution: Tensor, index: tuple[slice, ...]) -> Tensor:
    return distribution[
        tuple(
            slice(None) if size == 1 else part
            for part, size in zip(index, distribution.shape, strict=False)
        )
    ]


def _apply_rounding_margin(radius: float | Tensor, device: torch.device) -> Tensor:
    """Return the radii minus what rounding in float64 may hide, in float64."""
    radii = torch.as_tensor(radius, dtype=torch.float64, device=device)
    if not bool((radii >= 0).all()):
        raise AuditError(f"expected radius >= 0, got {radii.min().item()}")
    return radii * (1 - _ROUNDING)


def _apply_precision_margin(radius: float | Tensor, *distributions: Tensor) -> Tensor:
    """Return the radii minus what rounding in the distributions' precision may hide, in float64."""
    exact = all(distribution.dtype == torch.float64 for distribution in distributions)
    return _apply_rounding_margin(radius, distributions[0].device) * (1 if exact else 1 - _SHAVE)


def _require_total_mass_one(mass: Tensor) -> None:
    off = (mass - 1).abs()
    if not bool((off <= MASS_TOLERANCE).all()):  # NaN too
        worst = mass.flatten()[off.flatten().argmax()].item()
        raise AuditError(f"expected log-probabilities of total mass 1, got mass {worst:.6g}")
