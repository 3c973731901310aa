"""Bound decoding probabilities if only the most likely tokens are known, as from a server.

The bounds cover all distributions that agree with the reported values (formulas.md C3). They limit
the partition function after temperature and the mass that truncation keeps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from auditor.models.decoding import Decoding

# Tokens next to the given token: vLLM's default of --max-logprobs.
LIKELIEST = 20
# Mass: float32 log-probabilities of a distribution may sum to 1 plus or minus this.
_ROUNDING = 1e-5
_EDGE = 1e-6  # relative to a threshold: a token this close to it may be kept or cut


@dataclass(frozen=True)
class PartialDistribution:
    """The reported part of n next-token distributions: a given token and the K most likely tokens.

    Attributes:
        tokens: ids of the given tokens, (n,).
        log_probs: log-probabilities of the given tokens in nats, (n,).
        ranks: number of tokens at least as likely as the given token, counting the token itself,
            (n,).
        likeliest: ids of the K most likely tokens, in descending order, (n, K).
        top: log-probabilities of the K most likely tokens, in descending order, (n, K).
        max_vocabulary: upper bound on the vocabulary size.
    """

    tokens: Tensor
    log_probs: Tensor
    ranks: Tensor
    likeliest: Tensor
    top: Tensor
    max_vocabulary: int

    def truncation_ranks(self) -> Tensor:
        """Return each given token's rank, from 1, in the order used by truncation, of shape (n,).

        Equally likely tokens are ordered by id. A given token that is not among the K most likely
        gets its worst possible rank.
        """
        return torch.where(self._is_among_likeliest, 1 + self._outranking_mask.sum(-1), self.ranks)

    @property
    def _is_among_likeliest(self) -> Tensor:
        """Mask of the given tokens that are among the K most likely tokens, (n,)."""
        return (self.likeliest == self.tokens.unsqueeze(-1)).any(-1)

    @property
    def _outranking_mask(self) -> Tensor:
        """Mask of the K most likely tokens that certainly rank before the given token, (n, K)."""
        log_probs = self.log_probs.unsqueeze(-1)
        ids = self.tokens.unsqueeze(-1)
        return (self.top > log_probs) | ((self.top == log_probs) & (self.likeliest < ids))


def reduce_to_partial_distribution(
    distribution: Tensor, tokens: Tensor, count: int
) -> PartialDistribution:
    """Return the part of distributions (n, V) that a server would report.

    `tokens` (n,) are the given tokens. `count` is K, the number of most likely tokens to report.
    """
    log_probs = distribution.gather(-1, tokens.unsqueeze(-1))
    top, likeliest = distribution.topk(min(count, distribution.shape[-1]), dim=-1)
    return PartialDistribution(
        tokens,
        log_probs.squeeze(-1),
        (distribution >= log_probs).sum(-1),
        likeliest,
        top,
        distribution.shape[-1],
    )


def concatenate_partial_distributions(parts: Sequence[PartialDistribution]) -> PartialDistribution:
    """Concatenate partial distributions that report the same number of tokens."""
    columns = {}
    for name in ("tokens", "log_probs", "ranks", "likeliest", "top"):
        columns[name] = torch.cat([getattr(part, name) for part in parts])
    most = max(part.max_vocabulary for part in parts)
    return PartialDistribution(**columns, max_vocabulary=most)


def decoded_log_prob_bounds(
    decoding: Decoding, distribution: PartialDistribution
) -> tuple[Tensor, Tensor]:
    """Return lower and upper bounds on each given token's log-probability under `decoding`.

    Each bound has shape (n,), in float64 nats. Both equal the exact value (formulas.md A4) if the
    reported tokens determine it. `distribution` holds what the server reported before decoding.
    `decoding` must not forbid tokens: it is unknown whether a forbidden token ranks before a given
    token.
    """
    assert not decoding.forbidden
    if decoding.is_ancestral:
        exact = distribution.log_probs.double()
        return exact, exact
    if decoding.temperature == 0:
        return _bound_greedy_log_probs(distribution)
    distributions = _TemperedWeights.from_partial_distribution(
        distribution, 1 / decoding.temperature
    )
    sure, possible, least, most = _bound_top_k_kept(decoding.top_k, distribution, distributions)
    if decoding.top_p < 1:
        surely_kept, possibly_kept, least, most = _bound_top_p_kept(
            decoding, distribution, distributions, least, most
        )
        sure = sure & surely_kept
        possible = possible & possibly_kept
    # More total weight means a smaller share; rounding may put the lower bound above an upper bound
    # capped at 0.
    low = distributions.log_own - most.log()
    high = (distributions.log_own - least.log()).clamp(max=0.0)
    return torch.where(sure, torch.minimum(low, high), -math.inf), torch.where(
        possible, high, -math.inf
    )


def _bound_greedy_log_probs(distribution: PartialDistribution) -> tuple[Tensor, Tensor]:
    """Return the bounds for greedy decoding (the most likely token; for ties, the lowest id).

    The lower bound is 0 only if no unreported token can be as likely as the given token.
    """
    first = ~distribution._outranking_mask.any(-1)
    sure = first & ((distribution.ranks == 1) | (distribution.log_probs > distribution.top[:, -1]))
    always = torch.zeros(len(first), dtype=torch.float64)
    never = torch.full((len(first),), -math.inf).double()
    return torch.where(sure, always, never), torch.where(first, always, never)


# --- constraints shared by all distributions that agree with the report ---


def _bound_unreported_weight(
    power: float,
    middle: Tensor,
    n_less_likely: Tensor,
    given_share: Tensor,
    cap: Tensor,
    low: Tensor,
    masses: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor]:
    """Return the least and greatest total weight of the unreported tokens of n distributions.

    The share of a token is its probability divided by that of the most likely token. The mass of
    several tokens is the sum of their shares. The weight of a token is its share to the power 1 /
    temperature. All tensors are (n,).

    Args:
        power: 1 / temperature.
        middle: number of unreported tokens with shares in [given_share, cap].
        n_less_likely: number of unreported tokens with shares in [0, low].
        given_share: share of the given token.
        cap: largest possible share of an unreported token.
        low: largest possible share of the less likely tokens.
        masses: least and greatest total mass of the unreported tokens.
    """

    def weigh_equal_shares(mass: Tensor, count: Tensor) -> Tensor:
        return count * (mass / count.clamp(min=1)).pow(power)

    def weigh_even_split(mass: Tensor) -> Tensor:
        # The shares are as equal as their ranges allow.
        average = mass / (middle + n_less_likely).clamp(min=1)
        middle_mass = middle * torch.maximum(given_share, average)
        rest = (mass - middle_mass).clamp(min=0)
        return weigh_equal_shares(middle_mass, middle) + weigh_equal_shares(rest, n_less_likely)

    def weigh_uneven_split(mass: Tensor) -> Tensor:
        # The shares are as unequal as possible. The weight is a curved function of the share; in
        # each range of shares, the bound uses the straight line between the curve's ends instead.
        width = cap - given_share
        rise = (cap.pow(power) - given_share.pow(power)) / torch.where(width > 0, width, 1.0)
        middle_mass = torch.maximum(torch.minimum(mass, middle * cap), middle * given_share)
        of_middle = middle * given_share.pow(power) + rise * (middle_mass - middle * given_share)
        rest = (mass - middle_mass).clamp(min=0)
        # low ** (power - 1): the slope of the chord from a share of 0 to a share of `low`.
        return of_middle + torch.where(rest > 0, rest * low.pow(power - 1), 0.0)

    least, most = masses
    # A weight is a power of a share: convex at temperatures up to 1, which give equal shares the
    # least weight (Jensen).
    if power >= 1:
        return weigh_even_split(least), weigh_uneven_split(most)
    return weigh_uneven_split(least), weigh_even_split(most)


@dataclass(frozen=True)
class _TemperedWeights:
    """Weights of tokens after temperature, relative to the most likely token.

    A weight is the token's probability divided by that of the most likely token, to the power 1 /
    temperature. Attributes have shape (n,) unless another is given.

    Attributes:
        log_own: log of the given token's weight.
        given_weight: the given token's weight.
        top: weights of the K most likely tokens, (n, K).
        extra: the given token's weight if `top` does not contain it, otherwise 0.
        middle: number of unreported tokens that are at least as likely as the given token.
        n_less_likely: number of unreported tokens that are less likely than the given token.
        any_of: largest possible weight of a single unreported token.
        unknown: least and greatest possible total weight of the unreported tokens.
    """

    log_own: Tensor
    given_weight: Tensor
    top: Tensor
    extra: Tensor
    middle: Tensor
    n_less_likely: Tensor
    any_of: Tensor
    unknown: tuple[Tensor, Tensor]

    @classmethod
    def from_partial_distribution(
        cls, distribution: PartialDistribution, power: float
    ) -> _TemperedWeights:
        first = distribution.top[:, 0].double()
        known = distribution._is_among_likeliest
        top = distribution.top.double() - first.unsqueeze(-1)
        log_share = distribution.log_probs.double() - first
        likelier = (top >= log_share.unsqueeze(-1)).sum(-1) - known.long()
        middle = (distribution.ranks - 1 - likelier).clamp(min=0)
        rest = (distribution.max_vocabulary - top.shape[1] - (~known).long() - middle).clamp(min=0)
        # Shares are relative to the likeliest token's: their sum is 1 over its probability.
        total_mass = (-first).exp()
        missing = total_mass - top.exp().sum(-1) - torch.where(known, 0.0, log_share.exp())
        # Without temperature the total weight is `total_mass` for every distribution.
        slack = 0.0 if power == 1 else _ROUNDING * total_mass
        least = (missing - slack).clamp(min=0)
        most = (missing + slack).clamp(min=0)
        # No unreported token is more likely than the last of the K, nor, if the given token is
        # unreported, is any of `n_less_likely` more likely than it.
        cap = torch.minimum(top[:, -1].exp(), most)
        share = torch.minimum(log_share.exp(), cap)
        low = torch.where(known, cap, share)
        unknown = _bound_unreported_weight(power, middle, rest, share, cap, low, (least, most))
        weight = (power * log_share).exp()
        top_weights = (power * top).exp()
        extra = torch.where(known, 0.0, weight)
        return cls(
            power * log_share, weight, top_weights, extra, middle, rest, cap.pow(power), unknown
        )

    @property
    def reported_weight(self) -> Tensor:
        """Total weight of the K most likely tokens and the given token, (n,)."""
        return self.top.sum(-1) + self.extra


# --- truncation ---

# Whether the token is surely kept, whether it may be kept; if so, the least and greatest kept
# weight.
_Kept = tuple[Tensor, Tensor, Tensor, Tensor]


def _bound_top_k_kept(
    k: int, distribution: PartialDistribution, distributions: _TemperedWeights
) -> _Kept:
    least, most = (distributions.reported_weight + unknown for unknown in distributions.unknown)
    always = torch.ones_like(distribution.tokens, dtype=torch.bool)
    if k == 0:
        return always, always, least, most
    if k <= distribution.top.shape[1]:
        last = distribution.top[:, k - 1]
        # `extra` is nonzero only for a given token that ties with the last; the bounds of a cut
        # token are unused.
        weight = (distributions.top * (distribution.top >= last.unsqueeze(-1))).sum(
            -1
        ) + distributions.extra
        # Some unknown tokens may tie with the last.
        is_kept = distribution.log_probs >= last
        open_end = last == distribution.top[:, -1]
        return is_kept, is_kept, weight, torch.where(open_end, most, weight)
    n_unreported_kept = (
        k - distribution.top.shape[1] - (~distribution._is_among_likeliest).long()
    ).clamp(min=0)
    # The likeliest tokens have no less than their share.
    share = (
        n_unreported_kept / (distributions.middle + distributions.n_less_likely).clamp(min=1)
    ).clamp(max=1.0)
    more = torch.maximum(
        distributions.middle * torch.minimum(distributions.given_weight, distributions.any_of),
        share * distributions.unknown[0],
    )
    return (
        distribution._is_among_likeliest | (distribution.ranks <= k),
        always,
        distributions.reported_weight + more,
        most,
    )


def _bound_top_p_kept(
    decoding: Decoding,
    distribution: PartialDistribution,
    distributions: _TemperedWeights,
    least: Tensor,
    most: Tensor,
) -> _Kept:
    """Bound the effect of top-p after top-k.

    Args:
        decoding: the decoding, whose `top_p` is below 1.
        distribution: the reported tokens.
        distributions: their weights after temperature.
        least: lower bound on the total weight of the tokens that top-k kept, (n,).
        most: upper bound on the same total weight, (n,).

    Returns:
        Whether the given token is certainly kept, (n,).
        Whether the given token may be kept, (n,).
        The least total weight of the kept tokens, (n,).
        The greatest total weight of the kept tokens, (n,).
    """
    low = decoding.top_p * least * (1 - _EDGE)
    high = decoding.top_p * most * (1 + _EDGE)
    before = (distributions.top * distribution._outranking_mask).sum(-1)
    # A token is kept iff the mass before it is < p (formulas.md A4); that mass is between `before`
    # and `latest`.
    latest = before + torch.minimum(
        distributions.middle * distributions.any_of, distributions.unknown[1]
    )
    fewest = torch.maximum(
        _nucleus_weight(distributions.top, low, low), before + distributions.given_weight
    )
    # If the given token is kept, the last kept token is not more likely.
    widest = torch.minimum(
        _nucleus_weight(distributions.top, high, most),
        torch.minimum(high + distributions.given_weight, most),
    )
    return latest < low, before < high, fewest, widest


def _nucleus_weight(top: Tensor, mass: Tensor, beyond: Tensor) -> Tensor:
    """Return the weight of the smallest set of most likely tokens that weighs at least `mass`.

    `top` (n, K) holds the weights of the K most likely tokens. Return `beyond` if all K tokens
    together weigh less.
    """
    cumulative = top.cumsum(-1)
    index = (cumulative < mass.unsqueeze(-1)).sum(-1)
    reaches_mass = index < top.shape[1]
    weight = cumulative.gather(-1, index.clamp(max=top.shape[1] - 1).unsqueeze(-1)).squeeze(-1)
    return torch.where(reaches_mass, weight, beyond)
