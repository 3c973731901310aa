"""Implement InvisibleInk (Vinod et al. 2025): a public model sees private records in context.

(Source: arXiv 2507.02974.) The model reads B private records, a batch, each in a context of its
own. The B contexts together draw each token once. p_0 is the next-token distribution without a
record, p_i with record i. A record's influence on the next token is the change that it makes to the
log-probabilities, clipped to C:

    phi = log p_0 + (1/B) sum_i clip(log p_i - log p_0, -C, C),    y ~ softmax(phi / tau).

Only tokens that the *public* distribution finds likely (top-k+) can be drawn. Their log p_0 is at
least that of the k-th likeliest token, less 2C/B, as in the authors' code. This set contains no
private information, so it costs nothing. (It may lack a token that is among the k likeliest by phi,
because a mean over B records moves phi by up to C, not C/B. A margin of 2C would include all such
tokens.)

**The claim.** Neighbours differ in one record of the batch, which is removed without a replacement
(replace-by-null, our `zero_out`). Its p_i then becomes p_0, so its term becomes 0, and phi moves by
at most C/B at any token. The log-ratio of neighbouring distributions is a difference of phi/tau
plus a difference of log-normalisers, which is the same for all tokens. So the log-ratio ranges over
at most eta = 2C/(B tau) nats. A mechanism with bounded range eta satisfies eta^2/8-zCDP, so rho =
C^2/(2 B^2 tau^2) per token, and T times that for T tokens. If the record is replaced by a different
one (`replace`), phi moves by at most 2C/B, which gives 4 rho. p_i may be any distribution. The
paper uses logits; log-probabilities are logits minus a constant for each model, with the same
bounds. The public model must not have seen any private record.

Batches are disjoint, so each record influences only the text of its batch, and T counts the tokens
drawn from one batch. An audit queries a batch about its own records. The auditor chooses the batch,
and this choice reveals nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor

from auditor.core.errors import AuditError, NotApplicable
from auditor.core.nouns import Claim
from auditor.defenses.control_rows import PublicModelControl
from auditor.defenses.pmixed_model import EnsembleModel, list_neighbour_parts
from auditor.models.base import DivergenceCheck, LanguageModel, Neighbours
from auditor.models.decoding import Decoding
from auditor.models.ensemble import Ensemble, PermutedEnsemble
from auditor.models.in_context import InContextEnsemble, InContextRecordBatches
from auditor.models.rows import Rows
from auditor.models.wrapping import MappedRows
from auditor.plugins.defense import BudgetedDefense, Cause, Defense, Scenario
from auditor.plugins.options import CountOrZero, Limits, Nonnegative, Positive, Share
from auditor.privacy.accounting import (
    compute_bounded_range_rho,
    compute_two_sided_renyi,
    compute_zcdp_budget,
    compute_zcdp_epsilon,
    realised_renyi,
)

UNIT = "reference"
_RELATIONS = ("zero_out", "replace")
# Factor on a solved clip, so that rounding cannot make it exceed the requested epsilon.
_PRIVATE_END = 1 - 1e-12
# Order of the checked divergences: the lowest integer, at which a bounded range uses most of its
# zCDP.
_ORDER = 2


@dataclass(frozen=True)
class InvisibleInk(BudgetedDefense):
    """Let a public model write with private records in its context (InvisibleInk, 2025).

    The influence of each record is clipped. The method is by Vinod et al. 2025.

    batch: B, the number of records that influence one text; the attacked records are divided into
    batches in order.
    clip: C, the most that a record may change a log-probability, in nats (0: as much as epsilon and
    delta allow).
    temperature: tau.
    top_k: the k of top-k+ under the public distribution (0: the whole vocabulary).
    epsilon, delta: the privacy cost of `queries` tokens drawn from one batch.
    queries: 0 takes the largest number of tokens that this run draws from any batch.
    on_exhaustion: what to do when a fixed number of queries is spent: `stop`, or answer with the
    `public` model.
    """

    name = "invisible-ink"
    title = "InvisibleInk"
    needs = ("public", "records")
    claims = "(epsilon, delta) for one record in the context, over the tokens drawn of its batch"
    epsilon: Annotated[float, Limits(0, 1000, "(]")] = 8.0
    delta: Share = 1e-5
    batch: Annotated[int, Limits(1, 1024, "[]")] = 8
    clip: Nonnegative = 0.0
    temperature: Positive = 1.1
    top_k: CountOrZero = 0
    queries: CountOrZero = 0
    on_exhaustion: Literal["stop", "public"] = "stop"

    def protect(self, scenario: Scenario) -> LanguageModel:
        ink = self._clip_and_decoding_parameters(scenario)
        ensemble = _build_context_ensemble(scenario, self.batch)
        ranges = bound_log_ratio_ranges(ink, self.batch)
        return InvisibleInkModel(ensemble, ink, "InvisibleInk", ranges)

    def budget_lots(self, scenario: Scenario) -> Mapping[str, int]:
        batches = deal_records_into_context_batches(scenario, self.batch)
        return {prompt.secret: batches.batch_by_start[prompt.given] for prompt in scenario.prompts}

    def remarks(self, scenario: Scenario) -> tuple[str, ...]:
        batches = deal_records_into_context_batches(scenario, self.batch)
        sentences = [
            f"{len(batches.records)} batches of {self.batch} private records, read in the context "
            "of the public model: each is asked about its own records, and T counts the tokens of "
            "one batch"
        ]
        elsewhere = 0
        for prompt in scenario.prompts:
            batch = batches.records[batches.batch_by_start[prompt.given]]
            elsewhere += bool(prompt.record) and prompt.record not in batch
        if elsewhere:
            sentences.append(
                f"{elsewhere} records share their prefix with one of another batch, whose model "
                "answers: the extraction rate of these records is a lower bound"
            )
        return (*sentences, *super().remarks(scenario))

    def cause_chain(self) -> tuple[Cause, ...]:
        in_context = "records are read in a context, and nothing is trained on them"
        return (
            Cause("no training", in_context, UnclippedReferences(self.batch, self.temperature)),
            Cause("clipping", "the change by each record is clipped, as the claim assumes"),
            Cause(
                "no private data", "the public model alone", PublicModelControl(), "--public MODEL"
            ),
        )

    def _clip_and_decoding_parameters(self, scenario: Scenario) -> InkOptions:
        """Return the parameters for drawing a token.

        If no clip is given, the budget rho is divided among T tokens, so C = tau B sqrt(2 rho / T)
        (formulas C4).
        """
        # zCDP adds up over tokens (Bun and Steinke 2016, Lemma 1.7): each has an equal share.
        rho = compute_zcdp_budget(self.epsilon, self.delta) / self.count_covered_tokens(scenario)
        clip = self.clip or self.temperature * self.batch * math.sqrt(2 * rho) * _PRIVATE_END
        return InkOptions(clip, self.temperature, self.top_k)

    def claim(self, scenario: Scenario, n_tokens: int) -> Claim:
        queries = self.count_covered_tokens(scenario)
        ink = self._clip_and_decoding_parameters(scenario)
        rho_by_relation = {}
        for relation, width in bound_log_ratio_ranges(ink, self.batch).items():
            rho_by_relation[relation] = compute_bounded_range_rho(width)
        n_tokens = min(n_tokens, queries)  # later tokens do not depend on any record

        def epsilon(tokens: int) -> dict[str, float]:
            return {
                name: compute_zcdp_epsilon(tokens * rho, self.delta)
                for name, rho in rho_by_relation.items()
            }

        return Claim(
            epsilon=epsilon(queries),
            delta=self.delta,
            relation="zero_out",
            unit=UNIT,
            queries=queries,
            theorem="bounded range of a clipped mean, T C²/(2 B² τ²)-zCDP (Vinod et al. 2025; "
            "formulas C4)",
            status="sound; the public model must have seen no private record; each record must "
            "be in one batch only",
            sound=True,
            spent_queries=n_tokens,
            spent_epsilon=epsilon(n_tokens),
            details={
                "batch": float(self.batch),
                "clip": ink.clip,
                "temperature": ink.temperature,
                "top_k": float(ink.top_k),
                "rho_per_token": rho_by_relation["zero_out"],
                "batches": float(
                    len(deal_records_into_context_batches(scenario, self.batch).records)
                ),
            },
        )


@dataclass(frozen=True)
class UnclippedReferences(Defense):
    """Let a public model write with private records in context, without clipping.

    The log-probabilities, given each record in turn, are averaged. This control makes no privacy
    claim.
    """

    name = "references-unclipped"
    title = "References, unclipped"
    needs = ("public", "records")
    claims = "none: the control of invisible-ink"
    batch: int = 8
    temperature: float = 1.1

    def protect(self, scenario: Scenario) -> LanguageModel:
        ink = InkOptions(math.inf, self.temperature, 0)
        return InvisibleInkModel(
            _build_context_ensemble(scenario, self.batch), ink, "references without clipping"
        )


@dataclass(frozen=True)
class InkOptions:
    """Hold the parameters of a draw: clip C (nats), temperature, k of top-k+ (0: all tokens)."""

    clip: float
    temperature: float
    top_k: int = 0

    def clipped_mean_distribution(self, distributions: Tensor) -> Tensor:
        """Return the float64 log-probabilities (nats) from which the token is drawn, (..., V).

        distributions: (..., 1 + B, V), in nats, the public distribution first. With float32,
        rounding would break the claim if the clip is small.
        """
        public = distributions[..., 0, :].double()
        private = distributions[..., 1:, :].double()
        impossible = (public == -math.inf).unsqueeze(-2)  # impossible for every record
        # -inf minus -inf would be NaN; a record's own -inf is clamped to -C.
        change = (
            (private - public.unsqueeze(-2))
            .masked_fill(impossible, 0.0)
            .clamp(-self.clip, self.clip)
        )
        phi = public + change.mean(-2)
        phi = phi.masked_fill(~self.public_top_k_plus_mask(public, private.shape[-2]), -math.inf)
        return (phi / self.temperature).log_softmax(-1)

    def public_top_k_plus_mask(self, public: Tensor, batch: int) -> Tensor:
        """Return the mask of top-k+ tokens, which depends only on `public`, of shape (..., V)."""
        if not 0 < self.top_k < public.shape[-1]:
            return torch.ones_like(public, dtype=torch.bool)
        least = public.topk(self.top_k, dim=-1).values[..., -1:]
        return public >= least - 2 * self.clip / batch


def bound_log_ratio_ranges(ink: InkOptions, batch: int) -> dict[str, float]:
    """Bound the range of one token's log-ratio between neighbours, in nats, by relation."""
    # The most that removing a record changes phi / tau.
    moved = ink.clip / (batch * ink.temperature)
    # Twice this, because the log-normaliser changes too. A replacement is a removal and an
    # addition.
    return {"zero_out": 2 * moved, "replace": 4 * moved}


def deal_records_into_context_batches(scenario: Scenario, size: int) -> InContextRecordBatches:
    """Divide the distinct private records into batches of `size`, in order.

    A prompt gets the batch with its record; prompts that belong to no record get the batches in
    turn. Raise AuditError if there are no private records.
    """
    records = list(dict.fromkeys(prompt.record for prompt in scenario.prompts if prompt.record))
    if not records:
        raise AuditError(
            "expected private records to put into the context of the public model, got none"
        )
    batches = tuple(tuple(records[i : i + size]) for i in range(0, len(records), size))
    where = {}
    for i, batch in enumerate(batches):
        for record in batch:
            where[record] = i
    batch_by_beginning: dict[tuple[int, ...], int] = {}
    for prompt in scenario.prompts:
        if prompt.record:
            # A prefix has one batch: that of the first record that begins with it.
            batch_by_beginning.setdefault(prompt.given, where[prompt.record])
    for i, prompt in enumerate(prompt for prompt in scenario.prompts if not prompt.record):
        batch_by_beginning.setdefault(prompt.given, i % len(batches))
    return InContextRecordBatches(batches, size, batch_by_beginning)


def _build_context_ensemble(scenario: Scenario, size: int) -> InContextEnsemble:
    """Return the public model as an ensemble: each member has one record in its context."""
    assert scenario.public is not None  # the run checks `needs`
    return InContextEnsemble(scenario.public, deal_records_into_context_batches(scenario, size))


class InvisibleInkModel(EnsembleModel):
    """Write with a batch of records in context.

    Each member is the public model with one of the records in its context. promise: the claimed
    bounds from `bound_log_ratio_ranges`, or None. Checks compare the output with the claim, to
    detect mistakes.
    """

    def __init__(
        self,
        ensemble: Ensemble,
        ink: InkOptions,
        name: str,
        promise: Mapping[str, float] | None = None,
    ) -> None:
        super().__init__(ensemble, name)
        self.ink = ink
        self.promise = promise
        # The ensemble of a neighbour is permuted; the inner ensemble knows the records.
        if isinstance(ensemble, PermutedEnsemble):
            inner = ensemble.inner
        else:
            inner = ensemble
        # Number of tokens that a record takes in a context.
        if isinstance(inner, InContextEnsemble):
            self.longest = inner.batches.longest_record_token_count
        else:
            self.longest = 0
        if self.max_positions is not None:
            self.max_positions -= self.longest  # a record takes this room in the context

    def released_token_distribution(self, distributions: Tensor) -> Tensor:
        return self.ink.clipped_mean_distribution(distributions)

    def start(
        self,
        prefixes: Tensor,
        length: int,
        *,
        prompt: Tensor | None = None,
        distribution: bool = True,
    ) -> Rows:
        self.check_text_fits(prefixes.shape[1], length, prompt)
        return _InkRows(self, self.ensemble.start(prefixes, length, prompt=prompt), distribution)

    @torch.no_grad()
    def divergence_checks(
        self, contexts: Tensor, last: int, at: Sequence[int], order: int = 0
    ) -> Sequence[DivergenceCheck]:
        """Compare the output with that of each neighbour: one record is removed or replaced.

        The replacement is the next record of the batch. In addition to the divergence, check the
        range of log-ratios that the proof uses (`range_...`).
        """
        promise = self.promise
        if promise is None:
            return super().divergence_checks(contexts, last, at, order)
        order = order or _ORDER
        if order < 2:
            raise AuditError(f"expected order >= 2, got {order}")
        distributions = self.query_all_parts(contexts, last)[:, at]
        released = self.released_token_distribution(distributions).unsqueeze(-2).cpu().numpy()
        checks = []
        for relation in _RELATIONS:
            other = self._neighbour_token_distributions(relation, distributions).cpu().numpy()
            realised = torch.from_numpy(compute_two_sided_renyi(released, other, order))
            # The largest log-ratio minus the smallest: the sum of the largest ones in both
            # directions.
            ranges = torch.from_numpy(
                realised_renyi(released, other, math.inf)
                + realised_renyi(other, released, math.inf)
            )
            rho = compute_bounded_range_rho(promise[relation])
            # rho-zCDP: D_a <= rho a at every order a (Bun and Steinke 2016, Definition 1.1).
            checks += [
                DivergenceCheck(relation, order, order * rho, realised),
                DivergenceCheck(f"range_{relation}", math.inf, promise[relation], ranges),
            ]
        return checks

    @torch.no_grad()
    def neighbour_distributions(
        self, contexts: Tensor, last: int, at: Sequence[int]
    ) -> Sequence[Neighbours]:
        distributions = self.query_all_parts(contexts, last)[:, at]
        relations = _RELATIONS if self.promise else _RELATIONS[:1]
        return [
            Neighbours(relation, self._neighbour_token_distributions(relation, distributions))
            for relation in relations
        ]

    def neighbour_model(self, relation: str, index: int) -> LanguageModel:
        places = list_neighbour_parts(relation, index, self.ensemble.size)
        other = PermutedEnsemble(self.ensemble, places)
        return type(self)(other, self.ink, self.name, self.promise)

    def _neighbour_token_distributions(self, relation: str, distributions: Tensor) -> Tensor:
        """Return the output log-probabilities, (..., B, V) in nats, of each neighbour of the data.

        In neighbour j, record j is removed or replaced, as `relation` says. distributions: (...,
        1 + B, V) log-probabilities in nats, the public model's first.
        """
        neighbours = []
        for j in range(self.ensemble.size):
            parts = list_neighbour_parts(relation, j, self.ensemble.size)
            neighbours.append(self.released_token_distribution(distributions[..., parts, :]))
        return torch.stack(neighbours, dim=-2)

    def row_bytes(self, positions: int, distribution: bool = True) -> int:
        # In every part, a record may precede the text.
        return super().row_bytes(positions + self.longest)


class _InkRows(MappedRows):
    def __init__(self, model: InvisibleInkModel, rows: Rows, distribution: bool) -> None:
        super().__init__(rows, model.released_token_distribution)
        self.distribution = distribution

    def log_probs(self) -> Tensor:
        if not self.distribution:
            raise NotApplicable("only sampled tokens come back in this setting")
        return super().log_probs()

    @torch.no_grad()
    def draw(
        self, row_of_draw: Tensor, uniforms: Tensor, decoding: Decoding
    ) -> tuple[Tensor, Tensor]:
        """Draw tokens, using the public model for draws that no budget covers.

        See `View._uniform_draws_of_query`.
        """
        if not self.distribution and not decoding.is_ancestral:
            raise AuditError(
                f"expected ancestral decoding, got {decoding}: InvisibleInk's claim covers no other"
            )
        draws, near = decoding.draw(super().log_probs(), row_of_draw, uniforms[:, 0])
        unpaid = (uniforms[:, 1] < 0).nonzero().squeeze(-1)
        if len(unpaid):
            public = self.rows.log_probs()[:, 0].double()
            draws[unpaid], near[unpaid] = decoding.draw(
                public, row_of_draw[unpaid], uniforms[unpaid, 0]
            )
        return draws, near
