"""Implement AdaPMixED (Flemings et al. 2024, 2410.02016), a PMixED that measures privacy loss.

Members of the ensemble are mixed with the public distribution within a fixed radius, however many
queries there are. The cost of a query is computed afterwards: it is the Renyi divergence of its
token's distribution from the distribution without one of the members. A query on which the members
agree costs little. The costs, and any epsilon computed from costs, depend on the private data.
Printing these numbers, or stopping when a budget is spent, therefore reveals data. So this defense
makes no claim. Only the auditor may see the costs, which `claim-check` shows.

As in the source's data-dependent analysis, a neighbour lacks one member without a replacement. The
source also screens queries with noise, so that the public model answers the queries on which the
members disagree with it. This screening is not implemented.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import torch
from torch import Tensor

from auditor.core.errors import AuditError
from auditor.defenses.pmixed import MOST_ORDER, build_ensemble_cause_chain
from auditor.defenses.pmixed_model import PMixedMemberProjection, PMixedModel
from auditor.models.base import DivergenceCheck, LanguageModel
from auditor.plugins.defense import Cause, Defense, Scenario
from auditor.plugins.options import Limits
from auditor.privacy.accounting import compute_two_sided_renyi

_MOST_RADIUS = 1000  # nats: a larger radius restricts no member


@dataclass(frozen=True)
class AdaPMixed(Defense):
    """Mix an ensemble near the public model and measure each query's cost. No claim.

    The cost depends on private data, so this defense makes no privacy claim.

    alpha: the Renyi order.
    beta: sets the radius, alpha * beta (nats). After mixing, no member may diverge from the public
    model by more than the radius, in either direction.
    ensemble: the folder of LoRA members; a built-in lab trains its own.
    """

    name = "adapmixed"
    title = "AdaPMixED"
    needs = ("public", "ensemble")
    claims = "none: its epsilon depends on the private data; claim-check shows it to the auditor"
    alpha: Annotated[int, Limits(2, MOST_ORDER, "[]")] = 15
    beta: float = 0.3
    ensemble: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.beta * self.alpha <= _MOST_RADIUS:
            raise AuditError(
                f"expected beta >= 0 and alpha beta of at most {_MOST_RADIUS:,} nats, got "
                f"{self.beta:g}",
            )

    def protect(self, scenario: Scenario) -> LanguageModel:
        make_projection = partial(
            make_constant_radius_projection,
            self.alpha,
            self.alpha * self.beta,
        )
        return AdaPMixedModel(scenario.ensemble, 1.0, make_projection, "AdaPMixED")

    def remarks(self, scenario: Scenario) -> tuple[str, ...]:
        return (
            "AdaPMixED without its noisy screening: the mixed ensemble answers every query; the "
            "cost of a query depends on the private data, so its epsilon is not a claim and only "
            "the auditor may see it (claim-check)",
        )

    def cause_chain(self) -> tuple[Cause, ...]:
        mixing = "each distribution is mixed with the public one, within one radius for all queries"
        return build_ensemble_cause_chain(self.ensemble, mixing)


def make_constant_radius_projection(
    alpha: int,
    radius: float,
    members: int,
) -> PMixedMemberProjection:
    """Return a projection with the same radius (nats) for all sizes of the sampled subset.

    The divergences in both directions must be within the radius.
    """
    # No cap: the two-sided radius bounds the other direction too.
    return PMixedMemberProjection(alpha, (radius,) * members, cap=1.0, two_sided=True)


class AdaPMixedModel(PMixedModel):
    """Serve the mixed ensemble; every token queries all members."""

    @torch.no_grad()
    def divergence_checks(
        self, contexts: Tensor, last: int, at: Sequence[int], order: int = 0
    ) -> Sequence[DivergenceCheck]:
        """Return each query's cost: its largest divergence from a mixture that lacks one member."""
        order = order or self.projection.alpha
        if order < 2:
            raise AuditError(f"expected order >= 2, got {order}")
        log_probs = self.log_probs(contexts, last)[:, at].double().log_softmax(-1)
        mixed = log_probs.unsqueeze(-2).cpu().numpy()  # (B, positions, 1, V)
        # Use only zero_out, because there is no claim.
        (neighbours,) = self.neighbour_distributions(contexts, last, at)
        without_member = neighbours.log_probs.cpu().numpy()  # (B, positions, members, V)
        divergences = torch.from_numpy(compute_two_sided_renyi(mixed, without_member, order))
        return [DivergenceCheck(neighbours.relation, order, None, divergences)]
