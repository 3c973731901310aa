"""Bounds on a decoding distribution of which only the likeliest tokens are known, as a server tells
them (formulas.md C3).

What is missing, the partition function after temperature and the mass that truncation keeps, lies
between what any distribution can have that agrees with all that was told. Pure functions of
tensors; knows no model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from auditor.models.decoding import Decoding

# tokens beside the given one: as many as vLLM tells unless it is told otherwise (--max-logprobs)
LIKELIEST = 20
# mass: what the float32 log-probabilities of a distribution may be short of, or beyond, a sum of 1
_ROUNDING = 1e-5
_EDGE = 1e-6  # of a threshold: a token this close to it may be kept or cut


@dataclass(frozen=True)
class PartialDistribution:
    """What is told of given tokens, each in its distribution: (n,) each, or (n, K) of the likeliest
    tokens there.

    log_probs: its own, nats; ranks: how many tokens are at least as likely, itself included;
    likeliest, with top: ids and log-probabilities of the K likeliest, falling; most: no
    distribution has more tokens than these.
    """

    tokens: Tensor
    log_probs: Tensor
    ranks: Tensor
    likeliest: Tensor
    top: Tensor
    most: int

    def truncation_ranks(self) -> Tensor:
        """(n,) the rank of each token in the order of truncation, from 1; where not all is told,
        the last it can be.

        Equal tokens stand by their ids; a token that is none of the K likeliest behind all that are
        equal to it.
        """
        return torch.where(
            self._is_among_likeliest, 1 + self._surely_ranked_higher.sum(-1), self.ranks
        )

    @property
    def _is_among_likeliest(self) -> Tensor:
        """(n,) whether the given token is one of the K likeliest."""
        return (self.likeliest == self.tokens.unsqueeze(-1)).any(-1)

    @property
    def _surely_ranked_higher(self) -> Tensor:
        """(n, K) which of the likeliest tokens surely stand before the given one."""
        own, at = self.log_probs.unsqueeze(-1), self.tokens.unsqueeze(-1)
        return (self.top > own) | ((self.top == own) & (self.likeliest < at))


def reduce_to_partial_distribution(
    distribution: Tensor, tokens: Tensor, count: int
) -> PartialDistribution:
    """What a server with this distribution tells. distribution: (n, V) nats; tokens: (n,); count:
    of the likeliest."""
    own = distribution.gather(-1, tokens.unsqueeze(-1))
    top, likeliest = distribution.topk(min(count, distribution.shape[-1]), dim=-1)
    return PartialDistribution(
        tokens,
        own.squeeze(-1),
        (distribution >= own).sum(-1),
        likeliest,
        top,
        distribution.shape[-1],
    )


def concatenate_partial_distributions(parts: Sequence[PartialDistribution]) -> PartialDistribution:
    """One after another, of distributions of one width."""
    return PartialDistribution(
        torch.cat([part.tokens for part in parts]),
        torch.cat([part.log_probs for part in parts]),
        torch.cat([part.ranks for part in parts]),
        torch.cat([part.likeliest for part in parts]),
        torch.cat([part.top for part in parts]),
        max(part.most for part in parts),
    )


def decoded_log_prob_bounds(decoding: Decoding, seen: PartialDistribution) -> tuple[Tensor, Tensor]:
    """(n,) each, float64 nats: the least and the most that the log-probability of each token can be
    under `decoding`.

    Equal to the exact one (formulas.md A4) where all that it depends on was told. No token may be
    forbidden: where a masked one stands in the distribution is not told.
    """
    assert not decoding.forbidden
    if decoding.is_ancestral:
        exact = seen.log_probs.double()
        return exact, exact
    if decoding.temperature == 0:
        return _greedy_log_prob_bounds(seen)
    distributions = _TemperedWeights.from_partial_distribution(seen, 1 / decoding.temperature)
    sure, possible, least, most = _top_k_kept_bounds(decoding.top_k, seen, distributions)
    if decoding.top_p < 1:
        kept, may, least, most = _top_p_kept_bounds(decoding, seen, distributions, least, most)
        sure, possible = sure & kept, possible & may
    # The more all tokens weigh, the less a token's share; rounding may put the least above a most
    # capped at 0.
    low, high = (
        distributions.log_own - most.log(),
        (distributions.log_own - least.log()).clamp(max=0.0),
    )
    return torch.where(sure, torch.minimum(low, high), -math.inf), torch.where(
        possible, high, -math.inf
    )


def _greedy_log_prob_bounds(seen: PartialDistribution) -> tuple[Tensor, Tensor]:
    """The likeliest token, of equal ones the lowest id: for sure if no other that was not told can
    be as likely."""
    first = ~seen._surely_ranked_higher.any(-1)
    sure = first & ((seen.ranks == 1) | (seen.log_probs > seen.top[:, -1]))
    always, never = (
        torch.zeros(len(first), dtype=torch.float64),
        torch.full((len(first),), -math.inf).double(),
    )
    return torch.where(sure, always, never), torch.where(first, always, never)


# --- what the distributions that agree with all that was told have in common
# ------------------------------------------


@dataclass(frozen=True)
class _UntoldTokens:
    """Tokens that were not told, (n,) each: of these `middle` have a share from `own` to `cap`,
    `rest` up to `low`.

    Shares and masses are by the likeliest token's; a weight is a share to the power of 1 /
    temperature.
    """

    power: float
    middle: Tensor
    rest: Tensor
    own: Tensor
    cap: Tensor
    low: Tensor

    def _total_weight_bounds(self, least: Tensor, most: Tensor) -> tuple[Tensor, Tensor]:
        """The least and the most that they weigh together, if their mass is between these two."""
        # A weight is a power of a share: convex at temperatures up to 1, where even shares weigh
        # least (Jensen).
        if self.power >= 1:
            return self._weight_of_even_split(least), self._weight_of_uneven_split(most)
        return self._weight_of_uneven_split(least), self._weight_of_even_split(most)

    def _weight_of_even_split(self, mass: Tensor) -> Tensor:
        """As equal as may be: for a convex weight the least, for a concave one the most
        (Jensen)."""
        average = mass / (self.middle + self.rest).clamp(min=1)
        middle = self.middle * torch.maximum(self.own, average)
        return self._weight_of_equal_shares(middle, self.middle) + self._weight_of_equal_shares(
            (mass - middle).clamp(min=0), self.rest
        )

    def _weight_of_equal_shares(self, mass: Tensor, count: Tensor) -> Tensor:
        return count * (mass / count.clamp(min=1)).pow(self.power)

    def _weight_of_uneven_split(self, mass: Tensor) -> Tensor:
        """As unequal as may be, or beyond: each weight is on the chord of its range."""
        width = self.cap - self.own
        rise = (self.cap.pow(self.power) - self.own.pow(self.power)) / torch.where(
            width > 0, width, 1.0
        )
        middle = torch.maximum(torch.minimum(mass, self.middle * self.cap), self.middle * self.own)
        of_middle = self.middle * self.own.pow(self.power) + rise * (
            middle - self.middle * self.own
        )
        rest = (mass - middle).clamp(min=0)
        # low ** (power - 1): the slope of the chord from a share of 0 to one of `low`.
        return of_middle + torch.where(rest > 0, rest * self.low.pow(self.power - 1), 0.0)


@dataclass(frozen=True)
class _TemperedWeights:
    """Weights after temperature, by the likeliest token's: (n,) each, `top` (n, K).

    extra: the own token's where it is none of the K; unknown: (least, most) that the tokens weigh
    that were not told: `middle` of them are at least as likely as the own one, `rest` are not;
    any_of: the most that one of them weighs.
    """

    log_own: Tensor
    own: Tensor
    top: Tensor
    extra: Tensor
    middle: Tensor
    rest: Tensor
    any_of: Tensor
    unknown: tuple[Tensor, Tensor]

    @classmethod
    def from_partial_distribution(cls, seen: PartialDistribution, power: float) -> _TemperedWeights:
        first, known = seen.top[:, 0].double(), seen._is_among_likeliest
        top, own = seen.top.double() - first.unsqueeze(-1), seen.log_probs.double() - first
        likelier = (top >= own.unsqueeze(-1)).sum(-1) - known.long()
        middle = (seen.ranks - 1 - likelier).clamp(min=0)
        rest = (seen.most - top.shape[1] - (~known).long() - middle).clamp(min=0)
        # Shares are by the likeliest token's: together they are 1 over its probability.
        whole = (-first).exp()
        missing = whole - top.exp().sum(-1) - torch.where(known, 0.0, own.exp())
        # without temperature all weighs `whole`, whoever has it
        slack = 0.0 if power == 1 else _ROUNDING * whole
        least, most = (missing - slack).clamp(min=0), (missing + slack).clamp(min=0)
        # No untold token is likelier than the last of the K; beside an untold own one, none of
        # `rest` than that.
        cap = torch.minimum(top[:, -1].exp(), most)
        share = torch.minimum(own.exp(), cap)
        unknown = _UntoldTokens(
            power, middle, rest, share, cap, torch.where(known, cap, share)
        )._total_weight_bounds(least, most)
        weight, every = (power * own).exp(), (power * top).exp()
        extra = torch.where(known, 0.0, weight)
        return cls(power * own, weight, every, extra, middle, rest, cap.pow(power), unknown)

    @property
    def told_token_weight(self) -> Tensor:
        """(n,) what the K likeliest weigh, and the own token."""
        return self.top.sum(-1) + self.extra


# --- truncation
# -----------------------------------------------------------------------------------------------

# whether for sure, and at all; if so, the least and most that stays
_Kept = tuple[Tensor, Tensor, Tensor, Tensor]


def _top_k_kept_bounds(k: int, seen: PartialDistribution, distributions: _TemperedWeights) -> _Kept:
    least, most = (distributions.told_token_weight + unknown for unknown in distributions.unknown)
    always = torch.ones_like(seen.tokens, dtype=torch.bool)
    if k == 0:
        return always, always, least, most
    if k <= seen.top.shape[1]:
        last = seen.top[:, k - 1]
        # `extra` stays only with an own token that ties with the last; one that is cut has no use
        # for these bounds.
        weight = (distributions.top * (seen.top >= last.unsqueeze(-1))).sum(
            -1
        ) + distributions.extra
        # of unknown tokens some may tie with the last
        kept, open_end = (
            seen.log_probs >= last,
            last == seen.top[:, -1],
        )
        return kept, kept, weight, torch.where(open_end, most, weight)
    left = (k - seen.top.shape[1] - (~seen._is_among_likeliest).long()).clamp(min=0)
    # the likeliest have no less than their share
    share = (left / (distributions.middle + distributions.rest).clamp(min=1)).clamp(max=1.0)
    more = torch.maximum(
        distributions.middle * torch.minimum(distributions.own, distributions.any_of),
        share * distributions.unknown[0],
    )
    return (
        seen._is_among_likeliest | (seen.ranks <= k),
        always,
        distributions.told_token_weight + more,
        most,
    )


def _top_p_kept_bounds(
    decoding: Decoding,
    seen: PartialDistribution,
    distributions: _TemperedWeights,
    least: Tensor,
    most: Tensor,
) -> _Kept:
    """Of what top-k left, which weighs between `least` and `most`."""
    low, high = decoding.top_p * least * (1 - _EDGE), decoding.top_p * most * (1 + _EDGE)
    before = (distributions.top * seen._surely_ranked_higher).sum(-1)
    # It stays iff the mass before it is < p (formulas.md A4), which is no less than `before` and no
    # more than `latest`.
    latest = before + torch.minimum(
        distributions.middle * distributions.any_of, distributions.unknown[1]
    )
    fewest = torch.maximum(_nucleus_weight(distributions.top, low, low), before + distributions.own)
    # The last token that stays is no likelier than the own one, if that stays too.
    widest = torch.minimum(
        _nucleus_weight(distributions.top, high, most),
        torch.minimum(high + distributions.own, most),
    )
    return latest < low, before < high, fewest, widest


def _nucleus_weight(top: Tensor, mass: Tensor, beyond: Tensor) -> Tensor:
    """What the fewest of the likeliest tokens weigh that weigh `mass` together; `beyond` where all
    do not."""
    through = top.cumsum(-1)
    at = (through < mass.unsqueeze(-1)).sum(-1)
    within = at < top.shape[1]
    found = through.gather(-1, at.clamp(max=top.shape[1] - 1).unsqueeze(-1)).squeeze(-1)
    return torch.where(within, found, beyond)
