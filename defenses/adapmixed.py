"""AdaPMixED (Flemings et al. 2024, 2410.02016): PMixED whose privacy loss is measured of each query.

Members are mixed with the public distribution within a radius that is the same for every query and number of queries,
and what a query costs is looked up afterwards: the Renyi divergence of the distribution of its token from that without
a member. Queries that the members agree on cost little. That loss is a function of the private data, and so is any
epsilon made of it: to print it, or to stop when it is spent, tells of the data. So nothing is claimed here.
`claim-check` shows the auditor what the queries that it looked at would cost; that is for no one else.

As in the data-dependent analysis, a neighbour has nothing in one member's place. Left out is the noisy screening, by
which the public model answers a query that the members and it disagree on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from auditor.core.errors import AuditError
from auditor.defenses.pmixed import MOST_ORDER, mixed_ensemble_cause_chain
from auditor.defenses.pmixed_model import PMixedMemberProjection, PMixedModel
from auditor.models.base import DivergenceCheck, LanguageModel
from auditor.plugins.defense import Cause, Defense, Scenario
from auditor.privacy.accounting import two_sided_renyi

_MOST_RADIUS = 1000  # nats: more holds no member back


@dataclass(frozen=True)
class AdaPMixed(Defense):
    """Mix an ensemble within one radius, and look up what each query cost: a loss that is private itself. No claim.

    alpha: Renyi order; beta: members are projected to the radius alpha beta (nats), in both directions. ensemble:
    folder of LoRA members; the lab has its own.
    """

    name: ClassVar[str] = "adapmixed"
    title: ClassVar[str] = "AdaPMixED"
    needs: ClassVar[tuple[str, ...]] = ("public", "ensemble")
    claims: ClassVar[str] = "none: its epsilon depends on the private data; claim-check shows it to the auditor"
    alpha: int = 15
    beta: float = 0.3
    ensemble: str = ""

    def __post_init__(self) -> None:
        if not 2 <= self.alpha <= MOST_ORDER:
            raise AuditError(f"expected alpha in 2..{MOST_ORDER}, got {self.alpha:,}")
        if not 0 <= self.beta * self.alpha <= _MOST_RADIUS:
            raise AuditError(f"expected beta >= 0 and alpha beta of at most {_MOST_RADIUS:,} nats, got {self.beta:g}")

    def protect(self, scenario: Scenario) -> LanguageModel:
        served = partial(adapmixed_constant_radius_projection, self.alpha, self.alpha * self.beta)
        return AdaPMixedModel(scenario.ensemble, 1.0, served, "AdaPMixED")

    def remarks(self, scenario: Scenario) -> tuple[str, ...]:
        return (
            "AdaPMixED without its noisy screening: the mixed ensemble answers every query; what one costs depends on "
            "the private data, so its epsilon is no claim and is for the auditor alone (claim-check)",
        )

    def cause_chain(self) -> tuple[Cause, ...]:
        how = "each distribution is mixed with the public one, within one radius for all queries"
        return mixed_ensemble_cause_chain(self.ensemble, how)


def adapmixed_constant_radius_projection(alpha: int, radius: float, members: int) -> PMixedMemberProjection:
    """One two-sided radius, whatever the number of members."""
    # No cap: the two-sided radius bounds the other direction too.
    return PMixedMemberProjection(alpha, (radius,) * members, cap=1.0, two_sided=True)


class AdaPMixedModel(PMixedModel):
    """The mixed ensemble, all members asked at every token."""

    @torch.no_grad()
    def divergence_checks(
        self, contexts: Tensor, last: int, at: Sequence[int], order: int = 0
    ) -> Sequence[DivergenceCheck]:
        """What each query costs: how far its distribution is from each without a member. Nothing is claimed of it."""
        order = order or self.projection.alpha
        if order < 2:
            raise AuditError(f"expected order >= 2, got {order}")
        own = self.log_probs(contexts, last)[:, at].double().log_softmax(-1).unsqueeze(-2).cpu().numpy()
        (without,) = self.neighbour_distributions(contexts, last, at)  # zero_out alone, as nothing is claimed
        # (B, positions, 1, V) against (B, positions, members, V).
        other = without.log_probs.cpu().numpy()
        return [DivergenceCheck(without.relation, order, None, torch.from_numpy(two_sided_renyi(own, other, order)))]
