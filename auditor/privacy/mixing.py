"""Compute the privacy cost, in nats, of drawing tokens from a mixture of an ensemble's members.

There are two accounting methods for PMixED (Flemings et al. 2024). The proof of the *published*
method has gaps, and its claim can be violated. The *sound* method is our own. All divergences,
epsilons, radii and caps are in nats.
"""

import math
from collections.abc import Callable
from functools import cache
from typing import Literal, get_args

import numpy as np

from auditor.core.arrays import Floats
from auditor.core.errors import AuditError, refuse_unknown_names
from auditor.privacy.accounting import (
    compute_rdp_budget,
    convert_rdp,
    find_largest_affordable,
    require_count,
    require_nonnegative,
    require_renyi_order,
    require_unit_interval,
)

Adjacency = Literal["zero_out", "add_remove", "replace"]

_Terms = list[tuple[float, float]]  # a sum, as pairs (log weight, log value)
_SMALLEST_RADIUS = 2.0**-60  # a budget too small for this radius counts as none


def compute_published_query_rdp(alpha: int, q: float, beta: float, subset_size: int) -> float:
    """Return the Renyi divergence (nats) that PMixED claims for one query to `subset_size` members.

    It follows from Theorems 5.1 and C.4, but is not a bound, because the triangle inequality in the
    proof fails at a single order. Raise AuditError on bad input.
    """
    alpha = require_renyi_order(alpha)
    require_unit_interval("q", q)
    require_nonnegative("beta", beta)
    # For an empty subset, for which the public model answers, the authors' code uses the formula
    # for one member.
    size = max(1, require_count("subset_size", subset_size, 0))
    # With other members the factor is 4, by the triangle inequality of Theorem C.5, which is false
    # at a single order: Hoelder's inequality needs a higher order on the right.
    factor = 1 if size == 1 else 4
    # Theorem 5.1: e^{(k-1) eps(k)} = (n - 1 + e^{(k-1) 4 beta k}) / n, so its excess over 1 is
    # expm1(.) / n. It is 0 for k = 0 and k = 1, whose probability is the bracket's first term, (1 -
    # q)^(alpha - 1) (1 + (alpha - 1) q).
    terms = []
    for k in range(2, alpha + 1):
        weight = _log_binomial_probability(k, alpha, q) - math.log(size)
        terms.append((weight, _log_expm1((k - 1) * factor * beta * k)))
    return _add_log1p(terms) / (alpha - 1)


@cache
def find_largest_published_beta(
    epsilon: float, delta: float, alpha: int, queries: int, q: float, subset_size: int
) -> float:
    """Return the largest beta for which `queries` queries are within (epsilon, delta).

    See PMixED 5.2. Each query costs `compute_published_query_rdp`. Members are projected to the
    radius alpha * beta (nats). The result is inf if the queries cost nothing. Raise AuditError on
    bad input, or if (epsilon, delta, alpha) leaves no budget.
    """
    return _find_largest_radius(
        lambda beta: compute_published_query_rdp(alpha, q, beta, subset_size),
        *(epsilon, delta, alpha, queries),
    )


def compute_member_mixing_weight(q: float, members: int) -> float:
    """Return w = (1 - (1-q)^N) / N, each member's weight in a token's distribution.

    N members are sampled by Poisson(q). If the projection does not depend on the size of the
    subset, the distribution is exactly public + w * sum_j (projected_j - public) (the collapse
    lemma). `public` is the distribution towards which the members are projected. Raise AuditError
    on bad input.
    """
    require_unit_interval("q", q)
    members = require_count("members", members, 1)
    if members == 1:
        return q
    return -math.expm1(members * _log1m(q)) / members


def compute_subset_sizes(q: float, members: int) -> Floats:
    """Return the probability of each subset size 0..N under Poisson(q) sampling of N members.

    The shape is (N + 1,). Raise AuditError on bad input.
    """
    require_unit_interval("q", q)
    members = require_count("members", members, 0)
    return np.exp([_log_binomial_probability(size, members, q) for size in range(members + 1)])


def compute_mean_member_weights(weights: Floats, q: float, members: int) -> Floats:
    """Return each member's share in one token's distribution, (..., n).

    The distribution is public + sum_j share_j (member_j - public), because all members are equally
    likely to be in a subset of a given size.

    Args:
        weights: mixing weights of n <= N members for subset sizes 1..N, (..., N, n), or for all
            sizes, (..., 1, n).
        q: probability with which a member is in the subset.
        members: N.
    """
    if weights.shape[-2] == 1:
        return weights[..., 0, :] * compute_member_mixing_weight(q, members)
    if weights.shape[-2] != members:
        raise AuditError(
            f"expected weights of 1 or {members} subset sizes, got {weights.shape[-2]}"
        )
    # (1 / N) sum_m Bin(m; N, q) (weight for size m). If no member is sampled, the public model
    # answers.
    return np.einsum("m,...mj->...j", compute_subset_sizes(q, members)[1:], weights) / members


def neighbour_distributions(
    adjacency: Adjacency, public: Floats, distributions: Floats, weights: Floats, q: float
) -> Floats:
    """Return the distribution of one token under each neighbour, (..., N, V) probabilities.

    In the i-th neighbour, member i has changed. It answers like the public model (zero_out), is
    absent (add_remove), or answers like the next member (replace, for which there are other
    neighbours too). The cost is O(N V), by the collapse lemma. Only non-negative terms are added,
    so that small probabilities keep their precision.

    Args:
        public: probabilities (..., V).
        distributions: probabilities (..., N, V).
        weights: as in `compute_mean_member_weights`; for add_remove, the weights for sizes 1..N -
            1, which the neighbour uses.
    """
    n_remaining = distributions.shape[-2] - (adjacency == "add_remove")
    shares = np.zeros(distributions.shape[:-1])
    if n_remaining:
        shares = compute_mean_member_weights(weights, q, n_remaining)
    parts = shares[..., None] * distributions
    mixed = _sum_without_each_member(parts)
    private = _sum_without_each_member(shares[..., None])
    if adjacency == "replace":
        mixed = mixed + np.roll(parts, -1, axis=-2)
        private = private + np.roll(shares, -1, axis=-1)[..., None]
    return mixed + np.maximum(1 - private, 0.0) * public[..., None, :]


def _sum_without_each_member(parts: Floats) -> Floats:
    """Return sums over the second-to-last axis, each leaving out one entry, without subtraction."""
    before = np.zeros_like(parts)
    after = np.zeros_like(parts)
    np.cumsum(parts[..., :-1, :], axis=-2, out=before[..., 1:, :])
    after[..., :-1, :] = np.cumsum(parts[..., :0:-1, :], axis=-2)[..., ::-1, :]
    return before + after


def compute_sound_query_rdp(
    adjacency: Adjacency, alpha: int, q: float, members: int, radius: float, cap: float
) -> float:
    """Return the sound bound on the Renyi divergence of order `alpha` (nats) of one token.

    The bound holds in both directions. Every member is projected to `radius` by the forward
    divergence only, of order `alpha` or higher, and its weight never exceeds 1 - e^-cap. `radius`
    and `cap` are public constants, equal for every subset and for both neighbours. Neighbours
    differ in one member: its distribution is the public one (zero_out), it is absent (add_remove),
    or it has any other distribution (replace).

    For zero_out and replace, the number of `members` does not change and is public. For add_remove,
    neighbours differ in this number; the bound does not use it, so the claim covers any number. The
    removal direction depends on an inequality that was checked numerically to 60 digits but is not
    proved; Theorem C.4 (Steinke 2022) states the same result. zero_out and replace do not need this
    inequality, because they bound the moments of a member's ratio to the public model. Raise
    AuditError on bad input.
    """
    alpha = require_renyi_order(alpha)
    require_unit_interval("q", q)
    members = require_count("members", members, 1)
    require_nonnegative("radius", radius)
    require_nonnegative("cap", cap)
    refuse_unknown_names("adjacency", [adjacency], get_args(Adjacency))
    if q == 0 or radius == 0 or cap == 0:  # every token is drawn from the public distribution
        return 0.0
    if adjacency == "add_remove":
        terms = _compute_add_remove_terms(alpha, q, radius, cap)
    else:
        terms = _compute_fixed_member_terms(adjacency, alpha, q, members, radius, cap)
    return max(map(_add_log1p, terms)) / (alpha - 1)


@cache
def bound_pmixed_epsilon(
    adjacency: Adjacency,
    delta: float,
    alpha: int,
    queries: int,
    q: float,
    members: int,
    radius: float,
    cap: float,
) -> float:
    """Return the epsilon (nats) at `delta` of `queries` tokens, by the sound method.

    Members are projected at order `alpha`. The epsilon is the smallest over the integer orders
    2..alpha, because such a projection bounds all lower orders but no higher order. Raise
    AuditError on bad input.
    """
    queries = require_count("queries", queries, 0)

    def at_order(order: int) -> float:
        rdp = compute_sound_query_rdp(adjacency, order, q, members, radius, cap)
        return convert_rdp(queries * rdp if queries else 0.0, delta, order)

    return min(map(at_order, range(2, require_renyi_order(alpha) + 1)))


@cache
def find_largest_sound_radius(
    adjacency: Adjacency,
    epsilon: float,
    delta: float,
    alpha: int,
    queries: int,
    q: float,
    members: int,
    cap: float | None = None,
) -> float:
    """Return the largest radius (nats) at which `queries` tokens are within the budget.

    The budget is (epsilon, delta) at order `alpha`, by the sound method. If `cap` is None, the cap
    (nats) equals the radius. The result is inf if the tokens cost nothing. Raise AuditError on bad
    input, if (epsilon, delta, alpha) leaves no budget, or if no radius is within the budget.
    """

    def query_rdp(radius: float) -> float:
        return compute_sound_query_rdp(
            adjacency, alpha, q, members, radius, radius if cap is None else cap
        )

    return _find_largest_radius(query_rdp, epsilon, delta, alpha, queries)


def _compute_fixed_member_terms(
    adjacency: Adjacency, alpha: int, q: float, members: int, radius: float, cap: float
) -> list[_Terms]:
    """Return the terms of E_Q (P/Q)^alpha - 1 for zero_out and replace, one list per direction.

    P and Q are a token's distributions under two neighbours. P = Q + w h public, where w is the
    mean mixing weight of a member and h = (change of the changed member's distribution) / public.
    Term j is C(alpha, j) w^j base^(1-j) E h^j, where `base` is a lower bound on Q / public.
    """
    share = compute_member_mixing_weight(q, members)
    log_reach = math.log(-math.expm1(-cap))  # a member is >= (1 - reach) * public
    absent = math.exp(members * _log1m(q))
    # The answer is at least b1 = 1 - w N c times public, without one member b0 = 1 - w (N - 1) c,
    # where c is `reach`; written as sums, which do not cancel.
    base_all = absent + (1 - absent) * math.exp(-cap)  # every member has its lowest probability
    base_others = base_all + share * math.exp(log_reach)  # the changed member is public

    # The term j = 0 is the 1 that is subtracted, and j = 1 is 0 because E h = 0.
    orders = range(2, alpha + 1)

    def terms(base: float, log_moment: Callable[..., float]) -> _Terms:
        log_base = math.log(base) if base > 0 else -math.inf
        weighted = []
        for j in orders:
            weight = math.log(math.comb(alpha, j)) + j * math.log(share) + (1 - j) * log_base
            weighted.append((weight, log_moment(j, radius, log_reach)))
        return weighted

    if adjacency == "replace":
        return [terms(base_all, _compute_replaced_moment)]
    return [terms(base_others, _compute_moment_above), terms(base_all, _compute_moment_below)]


# Bounds on the moments of h = member / public - 1, which has mean 0 and is at least -reach, if
# every moment M_j = E (1 + h)^j is at most e^{(j-1) radius}. The bounds vanish with the radius, so
# there is a small enough radius for a run of any length. They follow from |h|^j <= (1 + h)^j - 1 -
# j h, whose mean is M_j - 1. For h >= 0, this is the binomial theorem; for h = -x, (1 - x)^j - 1 +
# j x - x^j is 0 at 0 and increases, because (1 - x)^(j-1) + x^(j-1) <= 1.


def _compute_moment_above(j: int, radius: float, log_reach: float) -> float:
    """Return the log of an upper bound on the j-th moment E[h^j], by the Renyi radius.

    h = p(token) / p0(token) - 1, where p is a member's and p0 the public distribution. The mean is
    over tokens drawn from p0. If j is odd, only tokens with h > 0 count.

    Args:
        radius: the Rényi radius, in nats.
        log_reach: log of the largest possible h.
    """
    return _log_expm1((j - 1) * radius)


def _compute_moment_below(j: int, radius: float, log_reach: float) -> float:
    """Return the log of a bound on E (-h)^j, with h as in `_compute_moment_above`.

    If j is odd, the bound covers only tokens with h < 0.
    """
    if j % 2:
        return _log_odd_moment_below_public(j, radius, log_reach)
    return _compute_moment_above(j, radius, log_reach)


def _log_odd_moment_below_public(j: int, radius: float, log_reach: float) -> float:
    """Return the log of a bound on E (-h)^j for odd j >= 3, with 0 for tokens with h > 0."""
    # h_- <= reach, so E h_-^j <= reach^(j - 2) E h_-^2, and E h^2 = M_2 - 1 <= e^radius - 1
    return (j - 2) * log_reach + min(2 * log_reach, _log_expm1(radius))


def _compute_replaced_moment(j: int, radius: float, log_reach: float) -> float:
    """Return the log of a bound on E (h - h')^j, with h of the old member and h' of the new one.

    For h, see `_compute_moment_above`. If j is odd, the bound covers only tokens with h > h'.
    """
    if j == 2:
        # Minkowski: each norm is at most sqrt(e^radius - 1)
        return math.log(4) + _log_expm1(radius)
    # (f - f')_+ <= f; (h - h')_+ <= h_+ + h'_-, and Minkowski again
    norms = _log_expm1((j - 1) * radius) / j, _log_odd_moment_below_public(j, radius, log_reach) / j
    log_bound = min((j - 1) * radius, j * float(np.logaddexp(*norms)))
    # h and h' can be exchanged, so the bound for negative differences is the same
    return log_bound if j % 2 else math.log(2) + log_bound


def _compute_add_remove_terms(alpha: int, q: float, radius: float, cap: float) -> list[_Terms]:
    """Return the terms of E_Q (P/Q)^alpha - 1 for one absent member, in the two worst cases.

    In the first case, only this member is sampled. Its divergence from the public distribution is
    at most max(radius, cap). In the second case, one other member is sampled, too. The divergence
    between the two members is at most radius + cap. With more members, the absent member's weight
    is smaller.
    """
    # Theorem C.4's bracket minus 1: sum_k Bin(k; alpha, rate) (e^{(k-1) divergence} - 1), for k >=
    # 2.
    return [
        [
            (_log_binomial_probability(k, alpha, rate), _log_expm1((k - 1) * apart))
            for k in range(2, alpha + 1)
        ]
        for rate, apart in ((q, max(radius, cap)), (q / 2, radius + cap))
    ]


def _find_largest_radius(
    query_rdp: Callable[[float], float], epsilon: float, delta: float, alpha: int, queries: int
) -> float:
    """Return the largest radius x (nats) at which `queries` queries cost at most (epsilon, delta).

    A query costs `query_rdp(x)` nats of Renyi divergence of order alpha. `query_rdp` must be
    nondecreasing.
    """
    budget = compute_rdp_budget(epsilon, delta, alpha)
    queries = require_count("queries", queries, 0)

    # Compare the epsilon that is finally reported: a budget divided by the queries could round to
    # slightly above it.
    def affordable(x: float) -> bool:
        return convert_rdp(queries * query_rdp(x), delta, alpha) <= epsilon

    if queries == 0 or affordable(math.inf):
        return math.inf
    low = 1.0
    while not affordable(low):
        low /= 2
        if low < _SMALLEST_RADIUS:
            raise AuditError(
                f"no radius fits {queries} queries into the budget of {budget:.6g} nats (epsilon "
                f"{epsilon:g}, delta {delta:g}, alpha {alpha}): lower the cap or the number of "
                "queries, or add members"
            )
    while affordable(2 * low):
        low = 2 * low
    return find_largest_affordable(affordable, low, 2 * low)


def _add_log1p(log_terms: _Terms) -> float:
    """Return log(1 + sum of weight * value) without overflow.

    `log_terms` holds pairs (log weight, log value). A small sum keeps its relative accuracy.
    """
    # a weight of 0 cancels even inf
    terms = []
    for weight, value in log_terms:
        if weight > -math.inf:
            terms.append(weight + value)
    top = max(terms, default=-math.inf)
    if top < 700:  # floats overflow above e^709
        return math.log1p(math.fsum(map(math.exp, terms)))
    # compared with e^700, the 1 is negligible
    if top == math.inf:
        return top
    return top + math.log(math.fsum(math.exp(t - top) for t in terms))


def _log_expm1(x: float) -> float:
    # log(e^x - 1) = x + log(1 - e^-x), because e^x itself would overflow
    if x == 0:
        return -math.inf
    return x + math.log(-math.expm1(-x))


def _log1m(x: float) -> float:
    return -math.inf if x == 1 else math.log1p(-x)


def _log_binomial_probability(k: int, n: int, p: float) -> float:
    """Return the log of the binomial probability of k successes in n trials."""
    if p in (0, 1):
        return 0.0 if k == n * p else -math.inf
    return math.log(math.comb(n, k)) + k * math.log(p) + (n - k) * math.log1p(-p)
