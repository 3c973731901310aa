"""Serve PMixED's model, which keeps each member within a radius of the public distribution."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from auditor.core.errors import AuditError, NotApplicable
from auditor.core.secret_randomness import make_keyed_generator
from auditor.models.base import DivergenceCheck, LanguageModel, Neighbours
from auditor.models.decoding import Decoding
from auditor.models.ensemble import Ensemble, PermutedEnsemble
from auditor.models.rows import Rows
from auditor.models.wrapping import MappedRows, WrappingModel
from auditor.privacy.accounting import compute_two_sided_renyi, realised_renyi
from auditor.privacy.mixing import (
    Adjacency,
    compute_member_mixing_weight,
    compute_subset_sizes,
    neighbour_distributions,
)
from auditor.privacy.projection import compute_projection_weight, compute_two_sided_weight

_NO_SHARE = 1e-9  # a share of subsets so small that it changes no single-precision distribution
_TUNING_MEMBERS = 4  # members in one gradient step; each step draws others


@dataclass(frozen=True)
class PMixedMemberProjection:
    """Keep each member within a radius of the public distribution.

    Each member gets the largest mixing weight for which it is within the radius. The radius depends
    on the size of the sampled subset of members. two_sided: whether the divergences in both
    directions must be within the radius.
    """

    alpha: int
    radii: tuple[float, ...]  # nats, for subsets of size 1..N
    cap: float  # on the weight
    two_sided: bool

    def radii_by_subset_size(self) -> tuple[float, ...]:
        """Return the radii (nats) for subset sizes 1 to N; only one radius if all are equal."""
        if len(set(self.radii)) == 1:
            return self.radii[:1]
        return self.radii

    @torch.no_grad()
    def mixing_weights_within_radius(
        self, log_p: Tensor, log_p0: Tensor, radius: Tensor | float
    ) -> Tensor:
        """Return the mixing weight lambda of each distribution, of shape (...), without gradients.

        This solves Eq. 5 of Flemings et al. (2024). log_p, log_p0: (..., V), in nats, of the
        members and of the public model. radius: in nats, either a single one or one per
        distribution.
        """
        if self.radii[0] == math.inf:  # set by `build_unmixed_projection`
            shape = torch.broadcast_shapes(log_p.shape[:-1], torch.as_tensor(radius).shape)
            return torch.full(shape, self.cap, dtype=torch.float64, device=log_p.device)
        if self.two_sided:
            return compute_two_sided_weight(log_p, log_p0, self.alpha, radius)
        return compute_projection_weight(log_p, log_p0, self.alpha, radius, self.cap)


def build_unmixed_projection(members: int) -> PMixedMemberProjection:
    """Return a projection that leaves the distribution of each of `members` models as it is."""
    return PMixedMemberProjection(2, (math.inf,) * members, cap=1.0, two_sided=False)


@dataclass(frozen=True)
class QueryRDP:
    """State the claim for one drawn token. Checks compare the served model with this claim.

    query_rdp: the claimed Renyi divergence in nats, keyed by (neighbouring relation, order).
    """

    projection: PMixedMemberProjection
    query_rdp: Mapping[tuple[Adjacency, int], float]


class EnsembleModel(WrappingModel):
    """Define the base of models that mix the distributions of an ensemble's parts."""

    # Hidden states of the public model answer for no other part.
    cache_hidden_states = staticmethod(nullcontext)

    def __init__(self, ensemble: Ensemble, name: str) -> None:
        super().__init__(ensemble.public)
        self.ensemble = ensemble
        self.name = name
        self.parts = 1 + ensemble.size

    def released_token_distribution(self, distributions: Tensor) -> Tensor:
        """Return the log-probabilities with which the token is drawn, (..., V) in nats.

        distributions: (..., 1 + N, V) log-probabilities in nats, the public model's first.
        """
        raise NotImplementedError

    def start(
        self,
        prefixes: Tensor,
        length: int,
        *,
        prompt: Tensor | None = None,
        distribution: bool = True,
    ) -> Rows:
        # The exact distribution, for which each token queries every part.
        rows = self.ensemble.start(prefixes, length, prompt=prompt)
        return MappedRows(rows, self.released_token_distribution)

    def log_probs(self, contexts: Tensor, last: int, *, prompt: Tensor | None = None) -> Tensor:
        return self.released_token_distribution(self.query_all_parts(contexts, last, prompt))

    def query_all_parts(self, contexts: Tensor, last: int, prompt: Tensor | None = None) -> Tensor:
        """Return distributions (contexts, last, 1 + N, V) in nats, the public model's first."""
        parts = torch.arange(self.parts, device=self.device)
        return self.ensemble.distributions(contexts, parts, last, prompt=prompt)

    def row_bytes(self, positions: int, distribution: bool = True) -> int:
        part_bytes = self.ensemble.public.row_bytes(positions)
        return self.parts * part_bytes + super().row_bytes(positions)


class PMixedModel(EnsembleModel):
    """Serve the mixed ensemble; a draw queries at most one member.

    The model's distribution is that of the released token, over all subsets. served: a function
    that maps the number of members to the projection. promise: the claim; None if there is no
    claim.
    """

    def __init__(
        self,
        ensemble: Ensemble,
        q: float,
        served: Callable[[int], PMixedMemberProjection],
        name: str,
        promise: QueryRDP | None = None,
    ) -> None:
        super().__init__(ensemble, name)
        self.q = q
        self.served = served
        self.promise = promise
        self.projection = projection = served(ensemble.size)
        sizes = compute_subset_sizes(q, ensemble.size)
        self.size_cdf = torch.from_numpy(np.cumsum(sizes)).to(self.device)
        # By the size of the subset, from 0, at which no member is queried.
        self.radii = torch.tensor((0.0, *projection.radii), dtype=torch.float64, device=self.device)
        # Sizes with the same radius act alike. `like_size`, (1 + N,), has the first of them;
        # `shares` has the probability of each radius.
        self.like_size = (self.radii.unsqueeze(0) == self.radii.unsqueeze(1)).long().argmax(1)
        self.shares: dict[float, float] = {}
        for radius, share in zip(projection.radii, sizes[1:].tolist(), strict=True):
            if share > _NO_SHARE:
                self.shares[radius] = self.shares.get(radius, 0.0) + share
        # Exact for one radius: P(|S| > 0) = N w, w = (1 - (1 - q)^N) / N.
        if len(set(projection.radii)) == 1:
            self.shares = {
                projection.radii[0]: ensemble.size * compute_member_mixing_weight(q, ensemble.size)
            }

    def start(
        self,
        prefixes: Tensor,
        length: int,
        *,
        prompt: Tensor | None = None,
        distribution: bool = True,
    ) -> Rows:
        if distribution:
            return super().start(prefixes, length, prompt=prompt)
        return _PMixedDrawRows(self, prefixes.to(self.device), length, prompt)

    def tuning_log_probs(
        self, contexts: Tensor, last: int, prompt: Tensor, noise: torch.Generator
    ) -> Tensor:
        """Estimate the output distribution from a few random members, for tuning a soft prompt.

        The estimate is unbiased, and no probability is negative.
        """
        few = min(_TUNING_MEMBERS, self.ensemble.size)
        chosen = 1 + torch.randperm(self.ensemble.size, generator=noise, device=noise.device)[:few]
        parts = torch.cat([chosen.new_zeros(1), chosen]).to(self.device)
        return self.released_token_distribution(
            self.ensemble.distributions(contexts, parts, last, prompt=prompt)
        )

    def released_token_distribution(self, distributions: Tensor) -> Tensor:
        """Return the exact distribution of the released token, of shape (..., V), in nats.

        The distribution is p0 + (1/N) sum_j Lambda_j (p_j - p0). Lambda_j is the mixing weight of
        member j, averaged over subset sizes.

        distributions: (..., 1 + n, V), in nats, the public distribution p0 first. If only n < N
        members are given, the mean over these n members replaces that over all N.
        """
        log_p0 = distributions[..., :1, :]
        log_p = distributions[..., 1:, :]
        radii, shares = torch.tensor(
            list(self.shares.items()), dtype=torch.float64, device=distributions.device
        ).T
        # The radii, (radii, 1, ..., 1), broadcast against the members, (..., n), to (radii, ...,
        # n).
        by_radius = self.projection.mixing_weights_within_radius(
            log_p, log_p0, radii.view(-1, *(1,) * (log_p.ndim - 1))
        )
        weights = (torch.tensordot(shares, by_radius, 1) / log_p.shape[-2]).to(distributions.dtype)
        rest = (1 - weights.sum(-1, keepdim=True)).clamp_min(0.0)  # only rounding puts it below 0
        private = (weights.unsqueeze(-2) @ log_p.exp()).squeeze(-2)  # (..., V): summed over members
        return torch.log(private + rest * log_p0.squeeze(-2).exp())

    @torch.no_grad()
    def published_perplexity_nll(
        self, texts: Sequence[tuple[int, ...]], seed: int, n_context: int = 1
    ) -> Mapping[str, Sequence[float]]:
        """Return each text's summed nll (nats), averaged over subsets as in the paper (Sec. 6.1).

        For each token y, a Poisson subset S of the members is drawn, and -log p_S(y) is added. The
        subsets depend only on `seed` and the text's index, so defenses can be compared.

        By Jensen's inequality, the result is on average at least the nll of the released
        distribution, which an attacker queries.
        """
        if self.promise is None:
            return {}
        nll = []
        for index, text in enumerate(texts):
            noise = make_keyed_generator("subset average", seed, index)
            nll.append(
                self._nll_under_poisson_subsets(
                    text, noise.random((len(text) - n_context, self.ensemble.size))
                )
            )
        return {"perplexity_subset_average": nll}

    def _nll_under_poisson_subsets(self, text: tuple[int, ...], uniforms: np.ndarray) -> float:
        """Return the sum of -log p_S(y) over the last tokens y of a text, in nats.

        uniforms: (tokens, N). S consists of the members whose uniform number is below q.
        """
        tokens = torch.tensor([text], device=self.device)
        inside = torch.from_numpy(uniforms < self.q).to(self.device)
        # members of any subset, which are few
        sampled_members = inside.any(0).nonzero().squeeze(-1)
        # (tokens, queried members), like `weight`.
        inside = inside[:, sampled_members]
        parts = torch.cat([sampled_members.new_zeros(1), 1 + sampled_members])
        # (tokens, parts, V)
        distributions = self.ensemble.distributions(tokens[:, :-1], parts, len(uniforms))[0]
        size, (at, member) = inside.sum(-1), inside.nonzero(as_tuple=True)
        weight = torch.zeros(inside.shape, dtype=torch.float64, device=self.device)
        radii = self.radii[size[at]]
        own_weight = self.projection.mixing_weights_within_radius(
            distributions[at, 1 + member], distributions[at, 0], radii
        )
        weight[at, member] = own_weight / size[at]
        targets = tokens[0, len(text) - len(uniforms) :, None, None].expand(-1, len(parts), 1)
        p = distributions.gather(-1, targets).squeeze(-1).double().exp()
        mixed = (weight * p[:, 1:]).sum(-1) + (1 - weight.sum(-1)) * p[:, 0]
        return float(-torch.log(mixed).sum())

    @torch.no_grad()
    def divergence_checks(
        self, contexts: Tensor, last: int, at: Sequence[int], order: int = 0
    ) -> Sequence[DivergenceCheck]:
        """Compare the output's divergence from neighbouring outputs with the claimed limit.

        In a neighbour, one member of the ensemble is absent, emptied, or replaced by the next
        member.

        Two premises of the proof are also checked for every member. `projection` checks that the
        member's distance from the public distribution is within the radius. `cap` checks how much
        of a public probability the member may remove.
        """
        promise = self.promise
        if promise is None:
            return super().divergence_checks(contexts, last, at, order)
        order = order or promise.projection.alpha
        if not 2 <= order <= promise.projection.alpha:
            raise AuditError(
                f"expected order in 2..{promise.projection.alpha}, which the claim controls, got "
                f"{order}"
            )
        distributions = self.query_all_parts(contexts, last)[:, at]
        released = _compute_float64_member_probabilities(
            self.released_token_distribution(distributions)
        )[..., None, :]
        exact = _compute_float64_member_probabilities(distributions)
        checks = []
        for (adjacency, k), claimed in promise.query_rdp.items():
            if k == order:
                with np.errstate(divide="ignore"):
                    neighbours = np.log(
                        self._neighbour_token_distributions(adjacency, distributions)
                    )
                    realised = compute_two_sided_renyi(np.log(released), neighbours, k)
                checks.append(DivergenceCheck(adjacency, k, claimed, torch.from_numpy(realised)))
        by_size = _tabulate_mixing_weights(self.projection, distributions)
        return [
            *checks,
            *_check_radii(promise.projection, exact[..., :1, :], exact[..., 1:, :], by_size),
        ]

    @torch.no_grad()
    def neighbour_distributions(
        self, contexts: Tensor, last: int, at: Sequence[int]
    ) -> Sequence[Neighbours]:
        """Return the distributions of the claim's neighbours, with each member changed in turn.

        If there is no claim, each member is emptied.
        """
        distributions = self.query_all_parts(contexts, last)[:, at]
        return [
            Neighbours(
                adjacency,
                torch.from_numpy(
                    self._neighbour_token_distributions(adjacency, distributions)
                ).log(),
            )
            for adjacency in self.claimed_neighbour_relations
        ]

    def neighbour_model(self, relation: str, index: int) -> LanguageModel:
        places = list_neighbour_parts(relation, index, self.ensemble.size)
        if not places[1:]:  # without its only member, the public model remains
            return self.ensemble.public
        return type(self)(
            PermutedEnsemble(self.ensemble, places), self.q, self.served, self.name, self.promise
        )

    @property
    def claimed_neighbour_relations(self) -> tuple[Adjacency, ...]:
        """Return the neighbouring relations of the claim; `zero_out` if there is no claim."""
        claimed = () if self.promise is None else self.promise.query_rdp
        return tuple(dict.fromkeys(adjacency for adjacency, _ in claimed)) or ("zero_out",)

    def _neighbour_token_distributions(
        self, adjacency: Adjacency, distributions: Tensor
    ) -> np.ndarray:
        """Return output probabilities (B, positions, N, V) with each member changed in turn.

        distributions: (B, positions, 1 + N, V), in nats, the public distribution first.
        """
        served = self.projection
        if adjacency == "add_remove" and self.ensemble.size > 1:
            served = self.served(self.ensemble.size - 1)
        exact = _compute_float64_member_probabilities(distributions)
        weights = _tabulate_mixing_weights(served, distributions)
        return neighbour_distributions(
            adjacency, exact[..., 0, :], exact[..., 1:, :], weights, self.q
        )

    def claim_premise_counts(self) -> Mapping[str, int]:
        if self.promise is None:
            return {}
        return self.ensemble.count_shard_overlaps()

    def row_bytes(self, positions: int, distribution: bool = True) -> int:
        if not distribution:  # a draw queries at most one member
            return 2 * self.ensemble.public.row_bytes(positions)
        return super().row_bytes(positions)


def list_neighbour_parts(relation: str, index: int, size: int) -> list[int]:
    """Return the indices of the distributions to mix after a change of member `index`.

    Index 0 is the public model, index 1 + j is member j of `size` members. The relation determines
    whether the changed member is absent, emptied (the public model) or replaced by the next member.
    """
    places = list(range(1 + size))
    if relation == "add_remove":
        del places[1 + index]
    else:  # as in `neighbour_distributions`
        places[1 + index] = 0 if relation == "zero_out" else 1 + (index + 1) % size
    return places


def _tabulate_mixing_weights(
    projection: PMixedMemberProjection, distributions: Tensor
) -> np.ndarray:
    """Return each member's mixing weight for each subset size, of shape (..., sizes, N).

    If all radii are equal, `sizes` is 1. distributions: (..., 1 + N, V), in nats, the public
    distribution first.
    """
    public = distributions[..., :1, :]
    members = distributions[..., 1:, :]
    weights = []
    for radius in projection.radii_by_subset_size():
        weights.append(projection.mixing_weights_within_radius(members, public, radius))
    return torch.stack(weights, dim=-2).cpu().numpy()


def _compute_float64_member_probabilities(distributions: Tensor) -> np.ndarray:
    return distributions.double().log_softmax(-1).exp().cpu().numpy()


def _check_radii(
    promised: PMixedMemberProjection, public: np.ndarray, members: np.ndarray, weights: np.ndarray
) -> Iterator[DivergenceCheck]:
    """Check that each member's mixed distribution stays within the radius of the projection.

    The radius is the largest Renyi divergence from the public model, in nats. Each size of the
    random subset of members that answers may have its own radius. Yield one check for each subset
    size. If the projection also has a cap on the mixing weight, yield a check of the cap after
    each. If neither radii nor weights depend on the subset size, there is only one size.

    Args:
        promised: the projection whose radii are checked.
        public: (..., 1, V) probabilities of the public model.
        members: (..., N, V) probabilities of the members.
        weights: (..., sizes, N) mixing weights with which the model answers.
    """
    alpha = promised.alpha
    sizes = max(len(promised.radii_by_subset_size()), weights.shape[-2])
    for size, radius in enumerate(promised.radii[:sizes]):
        weight = weights[..., min(size, weights.shape[-2] - 1), :, None]
        with np.errstate(divide="ignore"):
            mixed, log_public = np.log(weight * members + (1 - weight) * public), np.log(public)
        if promised.two_sided:
            divergence = compute_two_sided_renyi
        else:
            divergence = realised_renyi
        yield DivergenceCheck(
            "projection", alpha, radius, torch.from_numpy(divergence(mixed, log_public, alpha))
        )
        if promised.cap < 1:
            # cap = 1 - e^-s keeps D_inf(public || mixed) <= s.
            lost = torch.from_numpy(realised_renyi(log_public, mixed, math.inf))
            yield DivergenceCheck("cap", math.inf, -math.log1p(-promised.cap), lost)


class _PMixedDrawRows(Rows):
    """Hold texts being generated token by token, as the service draws them.

    A draw queries the public model and at most one member.

    The subset size is n ~ Binomial(N, q). If n = 0, the token is drawn from p0. Otherwise it is
    drawn from a member, chosen uniformly, with the radius for n. The token then has the
    distribution of the average over a Poisson subset, as all members are equally likely.
    """

    def __init__(
        self, model: PMixedModel, prefixes: Tensor, length: int, prompt: Tensor | None
    ) -> None:
        self.model = model
        self.public = model.ensemble.public.start(prefixes, length, prompt=prompt)
        self.members = model.ensemble.start_member_rows(prefixes, length, prompt=prompt)

    def __len__(self) -> int:
        return len(self.members)

    def log_probs(self) -> Tensor:
        raise NotApplicable("only sampled tokens come back in this setting")

    def advance(self, parents: Tensor, tokens: Tensor) -> None:
        self.members.advance(parents, tokens)
        self.public.advance(parents, tokens)

    @torch.no_grad()
    def draw(
        self, row_of_draw: Tensor, uniforms: Tensor, decoding: Decoding
    ) -> tuple[Tensor, Tensor]:
        if not decoding.is_ancestral:
            raise AuditError(
                f"expected ancestral decoding, got {decoding}: PMixED's claim covers no other"
            )
        model = self.model
        distribution = self.public.log_probs()
        # Channel 0 draws the token, channel 1 the size of the subset, channel 2 the member. Channel
        # 1 is -1 for a draw that no budget pays for (`View._uniform_draws_of_query`): the public
        # model answers it. Rounding may leave the last sum below 1.
        size = torch.searchsorted(
            model.size_cdf, uniforms[:, 1].contiguous(), right=True
        ).clamp_max(model.parts - 1)
        draws, near = decoding.draw(distribution, row_of_draw, uniforms[:, 0])
        private = (size > 0).nonzero().squeeze(-1)
        if len(private):
            # A uniform is at most 1 - 2^-53, so its product with N is below N even after rounding.
            member = 1 + (uniforms[private, 2] * model.ensemble.size).long()
            like = model.like_size[size[private]]
            # (row, member, size) as a single number.
            combinations = (row_of_draw[private] * model.parts + member) * model.parts + like
            distinct, combination_index = torch.unique(
                combinations, return_inverse=True
            )  # mixed once for all draws
            pairs, like = distinct // model.parts, distinct % model.parts
            rows, members = pairs // model.parts, pairs % model.parts
            log_p0 = distribution[rows]
            log_p = self.members.distributions(rows, members)
            weight = (
                model.projection.mixing_weights_within_radius(log_p, log_p0, model.radii[like])
                .to(log_p)
                .unsqueeze(-1)
            )
            mixture = torch.log(weight * log_p.exp() + (1 - weight) * log_p0.exp())
            draws[private], near[private] = decoding.draw(
                mixture, combination_index, uniforms[private, 0]
            )
        return draws, near
