"""Check a defense's privacy claim for each single query.

The claim limits how far the next-token distributions of neighbouring models may diverge. The
defended model reports its claim and, after given prefixes, its divergence from each neighbour.
A claim that fails here is refuted. A claim that holds here is not proved, because it may fail for
other contexts and neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter

import numpy as np
import torch
from torch import Tensor

from auditor.core.nouns import Observation, Secret
from auditor.core.result import Measurement
from auditor.core.secret_randomness import draw_secret_uniforms
from auditor.models.base import DivergenceCheck
from auditor.models.decoding import ANCESTRAL
from auditor.plugins.options import CountOrZero
from auditor.plugins.probe import (
    DELTA,
    AncestralProbe,
    Observed,
    observe_in_batches,
    strip_observed_prefix,
    value_column,
)
from auditor.plugins.view import View
from auditor.statistics.composition import compute_renyi_conversion_penalty

_DISTRIBUTION_ELEMENTS = 2**24  # probabilities of all parts in memory at once: 128 MiB of float64
# tolerance for rounding: relative, and nats
_SLACK = 1e-6
_LEAST = 1e-9
_FALSE_ALARM = 1e-9  # false alarm rate for draws that do have the distribution
_PRIVATE = "realised divergences depend on the private data: do not publish"


@dataclass(frozen=True)
class ClaimCheck(AncestralProbe):
    """Compare the divergence of neighbouring models with the claim.

    The measured divergence is between the next-token distributions of the model and of a neighbour,
    such as the same model without one record. The model reads each suffix as given (teacher
    forcing).

    positions: the number of evenly spaced positions of a suffix to check; 0 checks all.
    order: the order of the Renyi divergence; 0 takes the claimed order.
    draws: the number of tokens drawn after each prefix, to test that the model draws from the
    distribution that the claim is about. Only the auditor sees these tokens, so they cost no
    budget.
    """

    name = "claim-check"
    page = "how-to/audit-an-epsilon"
    measures = "claim"
    needs = ("distribution",)
    positions: CountOrZero = 4
    order: CountOrZero = 0
    draws: CountOrZero = 16

    def check_inputs(self, view: View, secrets: Sequence[Secret]) -> None:
        for secret in secrets[:1]:
            contexts = torch.tensor([secret.prefix + secret.suffix[:1]], device=view.target.device)
            # raises if nothing is claimed
            view.target.divergence_checks(contexts, 1, [0], self.order)

    def observe_secrets(self, view: View, secrets: Sequence[Secret]) -> Iterator[Observation]:
        view.require_capability(*self.required_capabilities)
        model, longest = view.target, max((len(secret.suffix) for secret in secrets), default=1)
        size = max(1, _DISTRIBUTION_ELEMENTS // (longest * model.vocab_size * model.parts))

        def look(batch: Sequence[Secret], prefixes: Tensor, suffixes: Tensor) -> list[Observation]:
            length = suffixes.shape[1]
            observed = list[Observation]()
            positions = space_suffix_positions(self.positions, length)
            # Without the last token: suffix token i is drawn from the distribution after position
            # i.
            checks = model.divergence_checks(
                torch.cat([prefixes, suffixes[:, :-1]], dim=1), length, positions, self.order
            )
            excess = self._drawn_token_probability_excess(view, batch, prefixes)
            for i, secret in enumerate(batch):
                values = summarise_text_checks(checks, i, positions)
                for name, x in excess.items():
                    values[name] = float(x[i])
                observed.append(Observation(secret.id, values))
            return observed

        yield from observe_in_batches(view, secrets, size, look)

    def facts(
        self, view: View, secrets: Sequence[Secret], observations: Sequence[Observation]
    ) -> dict[str, float]:
        """Count the events that break a premise of the claim, keyed by name.

        For example, the budget was not charged for a token.
        """
        premises = {
            **view.target.claim_premise_counts(),
            "uncharged_tokens": view.meter.uncharged_token_count,
        }
        return {name: float(count) for name, count in premises.items()}

    @torch.no_grad()
    def _drawn_token_probability_excess(
        self, view: View, secrets: Sequence[Secret], prefixes: Tensor
    ) -> dict[str, Tensor]:
        """Compare the tokens that the model draws after each prefix with its distribution p.

        Return two arrays, (B,) each. `draw_excess` is the sum of p(y) - E p(Y) over the drawn
        tokens y, where Y has distribution p. `draw_variance` is the variance of this sum if the
        tokens are really drawn from p. prefixes: (B, n).
        """
        model = view.target
        key = (view.seed, view.target_name, self.name)
        # Normalise again in float64: float32 probabilities add up to 1 only roughly, and the sums
        # below are long.
        p = model.log_probs(prefixes, 1)[:, 0].double().log_softmax(-1).exp()
        # For Y ~ p: E p(Y) = sum p^2, Var p(Y) = sum p^3 - (sum p^2)^2.
        mean = (p**2).sum(-1)
        # (secrets x draws, CHANNELS): a token has one position, and its own draw on every channel.
        noise = np.concatenate(
            [draw_secret_uniforms(self.draws, 1, *key, secret.id)[:, 0] for secret in secrets]
        )
        owner = torch.arange(len(secrets), device=p.device).repeat_interleave(self.draws)
        excess = torch.zeros_like(mean)
        if self.draws:
            # draw as the service does, not by p
            rows = model.start(prefixes, 1, distribution=False)
            tokens, _ = rows.draw(owner, torch.from_numpy(noise).to(p.device), ANCESTRAL)
            excess.index_add_(0, owner, p[owner, tokens] - mean[owner])
        variance = self.draws * ((p**3).sum(-1) - mean**2).clamp_min(0.0)
        return {"draw_excess": excess, "draw_variance": variance}

    def measurements(self, secrets: Sequence[Secret], observations: Observed) -> list[Measurement]:
        queries = int(value_column(observations, "queries").sum())
        n_violations = int(value_column(observations, "violations").sum())
        faults = list_claim_faults(observations)
        if n_violations or faults:
            verdict = "VIOLATED"
        else:
            verdict = "holds on every examined query"
        measured = []
        if list_claimed_relations(observations):
            measured.append(
                _measure_checked_queries(
                    "claim_violations", n_violations + len(faults), queries, "count", verdict
                )
            )
        for relation in list_unclaimed_relations(observations):
            epsilon = compose_query_epsilons(observations, relation)
            most = float(value_column(observations, f"realised_{relation}").max())
            note = f"of all {queries} examined queries together, δ {DELTA:g}; {_PRIVATE}"
            measured += [
                _measure_checked_queries("epsilon_data_dependent", epsilon, queries, "nats", note),
                _measure_checked_queries(f"realised_{relation}", most, queries, "nats", _PRIVATE),
            ]
        for worst in _list_worst_texts(observations):
            relation = worst.relation
            measured += [
                _measure_checked_queries(
                    f"realised_{relation}", worst.realised, queries, "nats", _PRIVATE
                ),
                _measure_checked_queries(
                    f"claimed_{relation}", worst.claimed, queries, "nats", "of one query"
                ),
                _measure_checked_queries(
                    f"margin_{relation}", 1 - worst.ratio, queries, "part of the claim", _PRIVATE
                ),
            ]
        return measured

    def notes(self, secrets: Sequence[Secret], observations: Observed) -> tuple[str, ...]:
        sentences = []
        for worst in _list_worst_texts(observations):
            if not worst.is_violated:
                # below 0 only by rounding
                sentences.append(f"holds with margin {max(0.0, 1 - worst.ratio):.1%}: {worst}")
        for relation in list_unclaimed_relations(observations):
            sentences.append(
                "nothing is claimed; the distributions of the examined queries "
                f"({relation.replace('_', ' ')}) cost ε "
                f"{compose_query_epsilons(observations, relation):.6g} at δ {DELTA:g}: for "
                "the auditor only"
            )
        unlisted = int(observations.facts.get("unlisted_shards", 0))
        if unlisted:
            sentences.append(
                f"{unlisted} members do not record their training data: whether shards are "
                "disjoint was not checked"
            )
        return (*sentences, _PRIVATE)

    def claim_violations(
        self, secrets: Sequence[Secret], observations: Observed
    ) -> tuple[str, ...]:
        sentences = list_claim_faults(observations)
        alias = {secret.id: secret.alias for secret in secrets}
        for worst in _list_worst_texts(observations):
            if worst.is_violated:
                sentences.append(
                    f"{worst}, at {alias[worst.text.secret]}, position "
                    f"{worst.read('position'):.0f}, neighbour {worst.read('neighbour'):.0f}"
                )
        return tuple(sentences)


def space_suffix_positions(positions: int, length: int) -> list[int]:
    """Return `positions` evenly spaced positions in [0, length), starting at 0.

    Return all positions if `positions` is 0 or too large.
    """
    count = min(positions or length, length)
    return [i * length // count for i in range(count)]


def summarise_text_checks(
    checks: Sequence[DivergenceCheck], row: int, at: Sequence[int]
) -> dict[str, float]:
    """Summarise the divergence checks of one text as numbers, keyed by name.

    `violations` is the number of positions at which a divergence exceeds its claim. For a
    neighbouring relation with a claim, the other numbers describe the largest ratio of measured to
    claimed divergence. For a relation without a claim, `loss_RELATION` adds up the largest
    divergence of each position, in nats.

    row: the text's index in the batch; at: the positions of the checked tokens.
    """
    is_violated = torch.zeros(len(at), dtype=torch.bool, device="cpu")
    worst: dict[str, tuple[float, dict[str, float]]] = {}
    costs: dict[str, float] = {}
    for check in checks:
        relation = check.relation
        realised = check.realised[row].cpu()  # (positions, neighbours)
        if check.claimed is None:
            # Renyi divergences of one order add up over queries (Mironov 2017, Proposition 1).
            costs |= {
                f"loss_{relation}": float(realised.amax(-1).sum()),
                f"realised_{relation}": float(realised.max()),
                f"order_{relation}": check.order,
            }
            continue
        # NaN is not within a claim
        is_violated |= ~(realised <= check.claimed * (1 + _SLACK) + _LEAST).all(-1)
        # argmax treats NaN as the largest
        position, neighbour = divmod(int(realised.argmax()), realised.shape[-1])
        most = float(realised[position, neighbour])
        ratio = _compute_realised_ratio(most, check.claimed)
        if relation not in worst or ratio > worst[relation][0]:
            values = {
                f"realised_{relation}": most,
                f"claimed_{relation}": float(check.claimed),
                f"order_{relation}": float(check.order),
                f"neighbour_{relation}": float(neighbour),
                f"position_{relation}": float(at[position]),
            }
            worst[relation] = ratio, values
    summary = {"queries": float(len(at)), "violations": float(is_violated.sum())}
    for _, values in worst.values():
        summary |= values
    return summary | costs


def list_claimed_relations(observations: Sequence[Observation]) -> list[str]:
    """Return the neighbouring relations that have a claim, in the order of the checks."""
    return strip_observed_prefix("claimed_", Observed(observations).names)


def list_unclaimed_relations(observations: Sequence[Observation]) -> list[str]:
    """Return the measured neighbouring relations without a claim, in the order of the checks."""
    return strip_observed_prefix("loss_", Observed(observations).names)


def compose_query_epsilons(observations: Sequence[Observation], relation: str) -> float:
    """Return the total epsilon of all checked queries, in nats, at delta = `DELTA`.

    Compose it from the queries' measured divergences under the neighbouring relation `relation`.
    """
    loss = float(value_column(observations, f"loss_{relation}").sum())
    order = observations[0].values[f"order_{relation}"]
    # Identical distributions cost 0, without the constant that the conversion to epsilon adds.
    if loss:
        return max(0.0, loss + compute_renyi_conversion_penalty(order, DELTA))
    return 0.0


def list_claim_faults(observations: Observed) -> list[str]:
    """Return a sentence for each premise of the claim that does not hold.

    The premises are that tokens have the claimed distribution, that no record is in two shards, and
    that every token is charged.
    """
    faults = []
    excess = float(value_column(observations, "draw_excess").sum())
    variance = float(value_column(observations, "draw_variance").sum())
    log_odds = math.log(2 / _FALSE_ALARM)
    # `not ... <=`, so that NaN is a fault too.
    if (
        not abs(excess) <= math.sqrt(2 * variance * log_odds) + log_odds
    ):  # Bernstein: terms within 1 of their mean
        faults.append(
            "drawn tokens do not have the distribution that the claim is about: decoding is not "
            "ancestral"
        )
    shared = int(observations.facts.get("shared_records", 0))
    uncharged = int(observations.facts.get("uncharged_tokens", 0))
    if shared:
        faults.append(f"{shared} records are in more than one shard, and the claim is about one")
    if uncharged:
        faults.append(f"{uncharged} tokens were drawn inside the claim and not charged")
    return faults


@dataclass(frozen=True)
class _WorstText:
    """The text with the largest ratio of realised to claimed divergence, for one relation."""

    relation: str
    text: Observation

    def read(self, name: str) -> float:
        return self.text.values[f"{name}_{self.relation}"]

    @property
    def realised(self) -> float:
        return self.read("realised")

    @property
    def claimed(self) -> float:
        return self.read("claimed")

    @property
    def ratio(self) -> float:
        return _compute_realised_ratio(self.realised, self.claimed)

    @property
    def is_violated(self) -> bool:
        # NaN is not within a claim
        return not self.realised <= self.claimed * (1 + _SLACK) + _LEAST

    def __str__(self) -> str:
        words = f"{self.relation.replace('_', ' ')}, order {self.read('order'):g}"
        return f"{words}: {self.realised:.6g} nats realised, {self.claimed:.6g} claimed"


def _list_worst_texts(observations: Sequence[Observation]) -> Iterator[_WorstText]:
    for relation in list_claimed_relations(observations):
        yield max((_WorstText(relation, o) for o in observations), key=attrgetter("ratio"))


def _compute_realised_ratio(realised: float, claimed: float) -> float:
    """Return the measured divergence over the claimed divergence.

    The ratio is 0 for an infinite claim, and inf if the measured value is NaN or the claim is 0.
    """
    if math.isnan(realised):
        return math.inf
    if math.isinf(claimed) or realised <= 0:
        return 0.0
    return realised / claimed if claimed > 0 else math.inf


def _measure_checked_queries(name: str, value: float, n: int, unit: str, note: str) -> Measurement:
    """Return a measurement whose interval is the value itself.

    It is about the checked queries only, so it has no sampling error.
    """
    return Measurement(name, value, value, value, n, unit, note)
