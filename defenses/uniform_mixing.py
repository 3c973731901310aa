"""Implement uniform mixing of next-token distributions (Majmudar et al. 2022).

The uniform distribution covers the whole vocabulary, as published. It may instead cover only the
tokens that a *public* model finds likeliest; the paper leaves such a smaller support to future
work. The defense works for causal and masked language models.

**The claim on a smaller support.** S = S(x) is the public model's top-k after the context x, and
q_S the private distribution q restricted to S and renormalised. A token is drawn from q' = weight
q_S + (1 - weight)/k on S. Take any two private models with the same public model, and a context x.
Both have the same S, which depends only on x and the public model. 0 <= q_S <= 1 gives (1 -
weight)/k <= q'(y) <= weight + (1 - weight)/k for every y in S and both models; outside S both are
0. So no token's log-ratio exceeds log((weight + (1 - weight)/k) / ((1 - weight)/k)), which is
Theorem 1 with k for |V|. Over a text the log-ratios add up, because for the same output both models
have the same next context. Tokens of one masked text are drawn independently. If q has no mass on
S, q_S is uniform, and the bounds hold.

With `tail=public`, the output on S is q' times P0(S), the total public mass of S. Outside S the
output is the public distribution p0. On S, both models have the same additional factor P0(S);
outside S, their ratio is 1. So the bound holds, and no token has probability 0.

The bound does not hold for a top-k of the *private* distribution: its support depends on the
private data, so two models' supports differ and the log-ratio is infinite. Nor does the bound hold
if the public model has seen the private data. Therefore the option requires a public model.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor

from auditor.core.errors import AuditError, NotApplicable
from auditor.core.nouns import Claim
from auditor.models.base import DivergenceCheck, LanguageModel, Neighbours
from auditor.models.masked import MaskedModel
from auditor.models.rows import Rows
from auditor.models.wrapping import WrappingModel, WrappingRows
from auditor.plugins.defense import Defense, MaskedScenario, Scenario
from auditor.plugins.options import CountOrZero, Limits
from auditor.privacy.accounting import compute_uniform_mixing_epsilon, realised_pure_dp

ANY_TWO = "any two models"
_RELATION = "any_two_models"  # the same relation, as part of a metric's name


@dataclass(frozen=True)
class UniformMixing(Defense):
    """Mix the model's distribution q with the uniform distribution (Majmudar et al. 2022).

    A token is drawn from q' = weight q + (1 - weight)/|V|.

    public_top_k: mix only on this many of the public model's likeliest tokens; 0 mixes on the whole
    vocabulary.
    tail: the other tokens' probability: `none` gives them 0, `public` their public probability.
    """

    name = "uniform-mixing"
    title = "Uniform mixing"
    claims = "pure epsilon, any two models, per token drawn under ancestral decoding"
    weight: Annotated[float, Limits(0, 1, "[]")] = 0.9
    public_top_k: CountOrZero = 0
    tail: Literal["none", "public"] = "none"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tail == "public" and not self.public_top_k:
            raise AuditError(
                "expected public_top_k >= 1 with tail=public: without it no token is left out"
            )

    def protect(self, scenario: Scenario) -> LanguageModel:
        mixing = self._make_mixture(scenario)
        return UniformMixingModel(
            scenario.target,
            self.weight,
            mixing.epsilon(),
            scenario.public,
            top_k=mixing.top_k,
            tail=mixing.tail,
        )

    def claim(self, scenario: Scenario, n_tokens: int) -> Claim:
        mixing = self._make_mixture(scenario)
        return _build_claim(mixing, scenario.queries or 1, scenario.answer_length, n_tokens)

    def remarks(self, scenario: Scenario) -> tuple[str, ...]:
        if scenario.queries:
            return ()
        return (
            "no attack here draws tokens inside the claim, so epsilon is for one token: each "
            "further token costs the same",
        )

    def protect_masked(self, scenario: MaskedScenario) -> tuple[MaskedModel, Claim]:
        mixing = self._make_mixture(scenario)
        claim = _build_claim(mixing, scenario.queries, scenario.queries, 0)
        return UniformMixingMasked(scenario.target, mixing, scenario.public), claim

    def _make_mixture(self, scenario: Scenario | MaskedScenario) -> UniformMixture:
        vocab_size = scenario.target.vocab_size
        if self.public_top_k and scenario.public is None:
            raise AuditError(
                "public_top_k restricts the distribution to what a public model finds likeliest: "
                "give --public"
            )
        if self.public_top_k > vocab_size:
            raise AuditError(
                f"expected public_top_k of at most {vocab_size} tokens, got {self.public_top_k}"
            )
        return UniformMixture(self.weight, vocab_size, self.public_top_k, self.tail == "public")


def _build_claim(mixing: UniformMixture, queries: int, answer_length: int, n_tokens: int) -> Claim:
    top_k = mixing.top_k
    return Claim(
        epsilon={ANY_TWO: mixing.epsilon(queries)},
        delta=0.0,
        relation=ANY_TWO,
        unit="the whole training set",
        queries=queries,
        theorem="Majmudar et al. 2022, Theorem 1, composed over the tokens drawn"
        + ("; on the public top-k as proved in defenses/uniform_mixing.py" if top_k else ""),
        status="sound; neighbouring data sets are never used, which is why it is so large"
        + ("; the public model must have seen no private data" if top_k else ""),
        sound=True,
        any_two=True,
        spent_queries=n_tokens,
        spent_epsilon={ANY_TWO: mixing.epsilon(n_tokens)},
        details={
            "epsilon_per_token": mixing.epsilon(),
            "epsilon_per_answer": mixing.epsilon(answer_length),
            "weight": mixing.weight,
            "vocab_size": float(mixing.vocab_size),
            **({"public_top_k": float(top_k)} if top_k else {}),
        },
    )


@dataclass(frozen=True)
class UniformMixture:
    """Hold the parameters of a mixture.

    top_k: how many of a public model's likeliest tokens to mix on (0: all tokens). tail: whether
    all other tokens keep their public probability.
    """

    weight: float
    vocab_size: int
    top_k: int = 0
    tail: bool = False

    def epsilon(self, tokens: int = 1) -> float:
        """Return the pure-DP epsilon (nats) of `tokens` drawn tokens for any two private models."""
        # T (log(1 + (k - 1) weight) - log(1 - weight)), where k is the size of the support
        # (Majmudar et al. 2022, Eq. 2).
        return compute_uniform_mixing_epsilon(self.weight, self.top_k or self.vocab_size, tokens)

    def mix_next_token_distribution(self, distribution: Tensor, public: Tensor | None) -> Tensor:
        """Return the mixed distribution, of shape (..., V), in nats (float64).

        distribution: (..., V), in nats; public: the public distribution, if the mixture needs it.
        With float32, rounding would break the claim if the weight is small.
        """
        if not self.top_k:
            # Normalise first: the bound is for distributions whose sum is 1, which float32 ones
            # rarely have.
            return self.mix_token_log_probs(distribution.double().log_softmax(-1))
        assert public is not None  # `UniformMixing` guarantees it
        public = public.to(distribution.device).double()
        return mix_public_top_k(distribution.double(), public, self.weight, self.top_k, self.tail)

    @property
    def mixes_single_tokens(self) -> bool:
        """True if a token's mixed probability depends only on its own probability."""
        return not self.top_k

    def mix_token_log_probs(self, log_probs: Tensor) -> Tensor:
        """Mix single tokens' log-probabilities, (...), in nats, over the whole vocabulary."""
        return mix_uniform(log_probs.double(), self.weight, self.vocab_size)


class _LeastLikelyMixture(UniformMixture):
    """Mix a model that is certain of the token that the mixed model finds least likely.

    The token is chosen among those that the mixture can draw.
    """

    @property
    def mixes_single_tokens(self) -> bool:
        return False

    def mix_next_token_distribution(self, distribution: Tensor, public: Tensor | None) -> Tensor:
        mixed = super().mix_next_token_distribution(distribution, public)
        # All neighbours have the same support.
        possible = mixed.masked_fill(mixed == -math.inf, math.inf)
        if self.top_k:
            assert public is not None  # `UniformMixing` guarantees it
            outside = torch.ones_like(mixed, dtype=torch.bool)
            outside = outside.scatter(-1, _find_public_top_k(public, self.top_k), False)
            possible = possible.masked_fill(outside, math.inf)
        point_mass = torch.full_like(mixed, -math.inf).scatter(
            -1, possible.argmin(-1, keepdim=True), 0.0
        )
        return super().mix_next_token_distribution(point_mass, public)


class UniformMixingModel(WrappingModel):
    """Mix a model's distribution with the uniform distribution.

    The mixture has log-probabilities and gradients.

    claimed: the claimed epsilon of one token in nats; None if there is no claim.
    public: a model trained without the private data, or None. It serves as a neighbour in audits of
    epsilon.
    top_k: how many of the public model's likeliest tokens the uniform distribution covers; 0 means
    all tokens.
    tail: whether all other tokens keep their public probability.
    """

    def __init__(
        self,
        target: LanguageModel,
        weight: float,
        claimed: float | None = None,
        public: LanguageModel | None = None,
        *,
        top_k: int = 0,
        tail: bool = False,
    ) -> None:
        super().__init__(target)
        self.claimed = claimed
        self.public = public
        self.mixing = UniformMixture(weight, target.vocab_size, top_k, tail)
        self.name = f"{target.name} under uniform mixing"
        if top_k and public is not None:
            self.capabilities = self.capabilities & public.capabilities  # both models are queried

    def start(
        self,
        prefixes: Tensor,
        length: int,
        *,
        prompt: Tensor | None = None,
        distribution: bool = True,
    ) -> Rows:
        rows = self.model.start(prefixes, length, prompt=prompt, distribution=distribution)
        if not self.mixing.top_k:
            return _UniformMixingRows(rows, self.mixing)
        public = self._get_public_model(prompt).start(prefixes, length, prompt=prompt)
        return _UniformMixingRows(rows, self.mixing, public)

    def log_probs(self, contexts: Tensor, last: int, *, prompt: Tensor | None = None) -> Tensor:
        public = None
        if self.mixing.top_k:
            public = self._get_public_model(prompt).log_probs(contexts, last, prompt=prompt)
        return self.mixing.mix_next_token_distribution(
            self.model.log_probs(contexts, last, prompt=prompt), public
        )

    def token_log_probs(
        self, prefixes: Tensor, suffixes: Tensor, *, prompt: Tensor | None = None
    ) -> Tensor:
        if not self.mixing.mixes_single_tokens:
            return super().token_log_probs(prefixes, suffixes, prompt=prompt)
        return self.mixing.mix_token_log_probs(
            self.model.token_log_probs(prefixes, suffixes, prompt=prompt)
        )

    def _get_public_model(self, prompt: Tensor | None) -> LanguageModel:
        """Return the public model.

        Raise NotApplicable if a soft prompt's width does not fit the public model.
        """
        assert self.public is not None
        if prompt is not None:
            width = self.public.embedding_rows(1).shape[1]
            if prompt.shape[1] != width:
                raise NotApplicable(
                    f"the soft prompt is {prompt.shape[1]} wide, but the public model is {width}"
                )
        return self.public

    @torch.no_grad()
    def divergence_checks(
        self, contexts: Tensor, last: int, at: Sequence[int], order: int = 0
    ) -> Sequence[DivergenceCheck]:
        """Compare the output with those of two neighbours: the worst case and the public model.

        The worst case is a model that is certain of the least likely token. Divergences are of
        infinite order (pure DP), the order at which they are largest.
        """
        if self.claimed is None:
            return super().divergence_checks(contexts, last, at, order)
        distribution = self.log_probs(contexts, last)[:, at]
        (others,) = self.neighbour_distributions(contexts, last, at)
        # Compare (B, positions, 1, V) with (B, positions, neighbours, V).
        realised = realised_pure_dp(
            distribution.unsqueeze(-2).cpu().numpy(), others.log_probs.cpu().numpy()
        )
        return [
            DivergenceCheck(others.relation, math.inf, self.claimed, torch.from_numpy(realised))
        ]

    @torch.no_grad()
    def neighbour_distributions(
        self, contexts: Tensor, last: int, at: Sequence[int]
    ) -> Sequence[Neighbours]:
        """Return the distributions of two neighbours: the worst case and the public model.

        The worst case is a model that is certain of this model's least likely token.
        """
        # One-hot distributions attain the bound (Majmudar et al. 2022, Eq. 2), and the first
        # neighbour is one-hot.
        others = []
        for index in range(1 if self.public is None else 2):
            others.append(self.neighbour_model(_RELATION, index))
        distributions = []
        for other in others:
            distributions.append(other.log_probs(contexts, last)[:, at].double())
        return [Neighbours(_RELATION, torch.stack(distributions, dim=-2))]

    def neighbour_model(self, relation: str, index: int) -> LanguageModel:
        assert relation == _RELATION
        # with the same public model and name, but a different target
        other = copy.copy(self)
        if index:
            assert self.public is not None
            other.model = self.public
        else:
            other.mixing = _LeastLikelyMixture(**vars(self.mixing))
        return other

    def row_bytes(self, positions: int, distribution: bool = True) -> int:
        if self.mixing.top_k and self.public:
            support = self.public.row_bytes(positions, distribution)
        else:
            support = 0
        return (
            self.model.row_bytes(positions, distribution)
            + support
            + super().row_bytes(positions, distribution)
        )


class _UniformMixingRows(WrappingRows):
    def __init__(self, rows: Rows, mixing: UniformMixture, public: Rows | None = None) -> None:
        super().__init__(rows)
        self.mixing = mixing
        self.public = public

    def log_probs(self) -> Tensor:
        public = None
        if self.public is not None:
            public = self.public.log_probs()
        return self.mixing.mix_next_token_distribution(self.rows.log_probs(), public)

    def token_log_probs(self, row_of_token: Tensor, tokens: Tensor) -> Tensor:
        if not self.mixing.mixes_single_tokens:
            return super().token_log_probs(row_of_token, tokens)
        return self.mixing.mix_token_log_probs(self.rows.token_log_probs(row_of_token, tokens))

    def advance(self, parents: Tensor, tokens: Tensor) -> None:
        super().advance(parents, tokens)
        if self.public is not None:
            self.public.advance(parents, tokens)


class UniformMixingMasked(MaskedModel):
    """Mix a masked model's distributions with the uniform distribution.

    public: a model or None. If a model is given, the uniform distribution covers only its likeliest
    tokens.
    """

    def __init__(
        self, target: MaskedModel, mixing: UniformMixture, public: MaskedModel | None = None
    ) -> None:
        self.target = target
        self.mixing = mixing
        self.public = public
        self.name = f"{target.name} under uniform mixing"
        self.vocab_size = target.vocab_size
        self.max_positions = target.max_positions
        self.device = target.device

    def log_probs(self, contexts: Tensor, positions: Tensor) -> Tensor:
        if self.mixing.top_k and self.public:
            public = self.public.log_probs(contexts, positions)
        else:
            public = None
        return self.mixing.mix_next_token_distribution(
            self.target.log_probs(contexts, positions), public
        )

    def token_log_probs(self, contexts: Tensor, positions: Tensor) -> Tensor:
        if not self.mixing.mixes_single_tokens:
            return super().token_log_probs(contexts, positions)
        return self.mixing.mix_token_log_probs(self.target.token_log_probs(contexts, positions))


def mix_uniform(log_probs: Tensor, weight: float, vocab_size: int) -> Tensor:
    """Return log(weight q + (1 - weight)/|V|), in nats, for each log-probability log q.

    The result is exact for weights 0 and 1.
    """
    if weight == 1:
        return log_probs
    # log1p, because 1 - weight loses digits if the weight is small.
    floor = math.log1p(-weight) - math.log(vocab_size)
    if weight == 0:
        return torch.full_like(log_probs, floor)
    return torch.logaddexp(log_probs + math.log(weight), log_probs.new_tensor(floor))


def mix_public_top_k(
    distribution: Tensor, public: Tensor, weight: float, top_k: int, tail: bool
) -> Tensor:
    """Mix the private and the uniform distribution on the public model's top-k tokens.

    The result has shape (..., V), in nats. Other tokens have probability 0; with `tail`, they keep
    their public probability, and the top-k tokens share the rest.
    """
    top_tokens = _find_public_top_k(public, top_k)
    inside = distribution.gather(-1, top_tokens)
    nowhere = (inside == -math.inf).all(-1, keepdim=True)
    # without mass on the support, uniform
    inside = inside.masked_fill(nowhere, 0.0).log_softmax(-1)
    mixed = mix_uniform(inside, weight, top_k)
    if not tail:
        return torch.full_like(distribution, -math.inf).scatter(-1, top_tokens, mixed)
    # On the top-k, the mixture times the public mass P0(S), a factor that both neighbours share.
    return public.scatter(
        -1, top_tokens, mixed + public.gather(-1, top_tokens).logsumexp(-1, keepdim=True)
    )


def _find_public_top_k(public: Tensor, top_k: int) -> Tensor:
    """Return the ids of the `top_k` likeliest public tokens, of shape (..., top_k).

    If tokens are equally likely, the lowest ids come first.
    """
    # `topk` does not define the order of equal values, and all neighbours must have the same
    # support.
    return public.sort(dim=-1, descending=True, stable=True).indices[..., :top_k]
