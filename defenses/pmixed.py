"""PMixED (Flemings et al. 2024): private next-token prediction, an ensemble's distributions mixed with a public one."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal, cast, get_args

from auditor.core.errors import AuditError
from auditor.core.nouns import Claim
from auditor.defenses.control_rows import CONTROL, OneAdapterControl, PublicModelControl
from auditor.defenses.pmixed_model import PMixedMemberProjection, PMixedModel, QueryRDP, unmixed_member_projection
from auditor.models.base import LanguageModel
from auditor.plugins.defense import Cause, Defense, QueryBudget, Scenario
from auditor.plugins.options import require_listed_options
from auditor.privacy.accounting import rdp_budget, rdp_to_dp
from auditor.privacy.mixing import (
    Adjacency,
    largest_published_pmixed_beta,
    largest_sound_pmixed_radius,
    sound_pmixed_epsilon,
    sound_pmixed_query_rdp,
    subset_size_distribution,
)

ADJACENCIES: tuple[Adjacency, ...] = get_args(Adjacency)
_MOST_EPSILON, MOST_ORDER = 1000, 256  # more is no protection; higher orders buy nothing and take minutes to solve


def mixed_ensemble_cause_chain(ensemble: str, mixing: str) -> tuple[Cause, ...]:
    """Causes of a mixed ensemble; mixing: what it does with the members' distributions."""
    members = "each adapter sees one shard only, their distributions averaged"
    alone = "one adapter, all data, trained as the members are"
    return (
        Cause("training configuration", alone, OneAdapterControl(ensemble), CONTROL),
        Cause("splitting", members, UnmixedEnsemble(ensemble)),
        Cause("mixing", mixing),
        Cause("no private data", "the public model alone", PublicModelControl(), "--public MODEL"),
    )


@dataclass(frozen=True)
class PMixed(Defense):
    """Mix each member of an ensemble with the public model, then sample (PMixED, Flemings et al. 2024).

    epsilon, delta: what `queries` drawn tokens may cost; queries=0: as many as this run draws. alpha: Renyi order.
    q: Poisson share of members a query asks. accounting: `sound` (one radius and a cap on the mixing weight, for every
    subset) or `published` (the paper's radius by subset size, whose proof has gaps). adjacency: of the sound claim.
    Under `zero_out` (a shard's data are removed, its member has learnt nothing) and `replace` (they are others) the
    number of members is public: the radius depends on it. Under `add_remove` (the member is absent) it is not, the
    radius serves any number, and the claim rests on an inequality that was checked numerically and is not proved.
    on_exhaustion: what happens when a fixed number of queries is spent. ensemble: folder of LoRA members; the lab has
    its own.
    """

    name: ClassVar[str] = "pmixed"
    title: ClassVar[str] = "PMixED"
    needs: ClassVar[tuple[str, ...]] = ("public", "ensemble")
    claims: ClassVar[str] = "(epsilon, delta) for one shard, over the tokens drawn under ancestral decoding"
    epsilon: float = 8.0
    delta: float = 1e-5
    alpha: int = 4
    q: float = 0.03
    accounting: Literal["sound", "published"] = "sound"
    adjacency: Literal["zero_out", "add_remove", "replace"] = "zero_out"
    queries: int = 0
    on_exhaustion: Literal["stop", "public"] = "stop"
    ensemble: str = ""

    def __post_init__(self) -> None:
        for option, most in (("epsilon", _MOST_EPSILON), ("alpha", MOST_ORDER)):
            if getattr(self, option) > most:
                raise AuditError(f"expected {option} of at most {most:,}, got {getattr(self, option):,}")
        rdp_budget(self.epsilon, self.delta, self.alpha)  # refuses what leaves no budget
        if not 0 < self.q <= 1:
            raise AuditError(f"expected q in (0, 1], got {self.q}")
        if self.queries < 0:
            raise AuditError(f"expected queries >= 0 (0: as many as the row draws), got {self.queries}")
        require_listed_options(self)

    def protect(self, scenario: Scenario) -> LanguageModel:
        served = partial(self._projection_for_query_budget, self._covered_token_count(scenario))
        return PMixedModel(scenario.ensemble, self.q, served, "PMixED", self._query_rdp_claim(scenario))

    def fixed_token_budget(self, scenario: Scenario) -> QueryBudget | None:
        return QueryBudget(self.queries, self.on_exhaustion) if self.queries else None

    def remarks(self, scenario: Scenario) -> tuple[str, ...]:
        if self.queries or scenario.queries:
            return ()
        return (
            "no attack here draws tokens inside the claim, so epsilon is spent on one token and private members "
            "weigh more than in service: give -D pmixed.queries=N, the tokens to answer, or add an attack that draws",
        )

    def cause_chain(self) -> tuple[Cause, ...]:
        return mixed_ensemble_cause_chain(self.ensemble, "each distribution is mixed with the public one")

    def _covered_token_count(self, scenario: Scenario) -> int:
        """T: the drawn tokens that epsilon covers. With nothing to draw, the radius is that of one token."""
        return self.queries or scenario.queries or 1

    def _projection_for_query_budget(self, queries: int, members: int) -> PMixedMemberProjection:
        """How an ensemble of so many members is projected for the budget to cover so many queries."""
        if self.accounting == "sound":
            radius = largest_sound_pmixed_radius(
                self.adjacency, self.epsilon, self.delta, self.alpha, queries, self.q, members
            )
            # formulas B2.5: forward divergence only, and lambda <= 1 - e^-s with s = r.
            return PMixedMemberProjection(self.alpha, (radius,) * members, cap=-math.expm1(-radius), two_sided=False)
        # The paper's beta depends on the size of the subset, not on N (formulas B2.1).
        radii = tuple(
            self.alpha * largest_published_pmixed_beta(self.epsilon, self.delta, self.alpha, queries, self.q, size)
            for size in range(1, members + 1)
        )
        return PMixedMemberProjection(self.alpha, radii, cap=1.0, two_sided=True)

    def _claimed_adjacencies(self) -> tuple[Adjacency, ...]:
        """The relations that the radius serves: one solved from N serves no neighbours of another number of members."""
        if self.accounting == "published":  # which claims all the same: its radii are by the size of the subset
            return "add_remove", "zero_out"
        return ADJACENCIES if self.adjacency == "add_remove" else ("zero_out", "replace")

    def _query_rdp_claim(self, scenario: Scenario) -> QueryRDP:
        """What is claimed of one token: by `adjacency` its share of the budget, by others what the radius gives."""
        queries, members = self._covered_token_count(scenario), scenario.ensemble.size
        projection = self._projection_for_query_budget(queries, members)
        share = rdp_budget(self.epsilon, self.delta, self.alpha) / queries
        # Orders above alpha are not controlled by the projection (formulas B2.5).
        claims = [(adjacency, order) for adjacency in self._claimed_adjacencies() for order in range(2, self.alpha + 1)]
        if self.accounting == "published":  # D_k <= D_alpha, so that the claim is one at every order up to alpha
            return QueryRDP(projection, dict.fromkeys(claims, share))
        radius = projection.radii[0]
        query_rdp = {(a, k): sound_pmixed_query_rdp(a, k, self.q, members, radius, radius) for a, k in claims}
        return QueryRDP(projection, {**query_rdp, (self.adjacency, self.alpha): share})

    def claim(self, scenario: Scenario, spent: int) -> Claim:
        queries, ensemble = self._covered_token_count(scenario), scenario.ensemble
        spent = min(spent, queries)  # past the budget the public model answers, or nobody
        sound, counts = self.accounting == "sound", ensemble.shard_overlap_counts()
        relations: tuple[str, ...] = self._claimed_adjacencies() if sound else ("as published",)
        theorem = "formulas B2.5: Renyi composition of the capped forward projection" if sound else "PMixED Theorem 5.1"
        projection, shared = self._projection_for_query_budget(queries, ensemble.size), counts["shared_records"]
        whole = "" if shared or counts["unlisted_shards"] else ensemble.unit

        def epsilon(tokens: int) -> dict[str, float]:
            # A record in two shards changes two members, and no theorem here is about two.
            return {
                r: math.inf if tokens and shared else self._epsilon_of_drawn_tokens(r, tokens, scenario)
                for r in relations
            }

        return Claim(
            epsilon=epsilon(queries),
            delta=self.delta,
            relation=self.adjacency if sound else "as published",
            unit=f"shard of whole {whole}s" if whole else "shard",
            queries=queries,
            theorem=theorem,
            status=self._claim_status_phrase(shared),
            sound=sound and not shared,
            spent_queries=spent,
            spent_epsilon=epsilon(spent),
            shard=True,
            whole=whole,
            details={
                "members": float(ensemble.size),
                "q": self.q,
                "alpha": float(self.alpha),
                "radius": projection.radii[0],
                "weight_cap": projection.cap,
                "public_share": float(subset_size_distribution(self.q, ensemble.size)[0]),
            },
        )

    def _claim_status_phrase(self, shared: int) -> str:
        if shared:
            return f"promises nothing: {shared} records lie in more than one shard"
        if self.accounting == "published":
            return "claim; proof has gaps"
        if self.adjacency == "add_remove":
            return (
                "sound up to an inequality that was checked numerically, not proved; for any number of members, which "
                "is public in what is said of zero-out and replace"
            )
        return "sound; the number of ensemble models is public"

    def _epsilon_of_drawn_tokens(self, relation: str, queries: int, scenario: Scenario) -> float:
        """Epsilon in nats of so many drawn tokens at this defense's radius."""
        if queries == 0:
            return 0.0
        if relation == "as published":
            # RDP adds up over queries: so many have this share of the budget.
            share = queries / self._covered_token_count(scenario)
            return rdp_to_dp(share * rdp_budget(self.epsilon, self.delta, self.alpha), self.delta, self.alpha)
        members = scenario.ensemble.size
        radius = self._projection_for_query_budget(self._covered_token_count(scenario), members).radii[0]
        budget = (self.delta, self.alpha, queries, self.q, members, radius, radius)
        return sound_pmixed_epsilon(cast(Adjacency, relation), *budget)


@dataclass(frozen=True)
class UnmixedEnsemble(Defense):
    """The ensemble without mixing: each model saw 1/N of the data; the mean of their distributions. No claim."""

    name: ClassVar[str] = "ensemble-unmixed"
    title: ClassVar[str] = "Ensemble, unmixed"
    needs: ClassVar[tuple[str, ...]] = ("public", "ensemble")
    claims: ClassVar[str] = "none: the control row of pmixed"
    ensemble: str = ""

    def protect(self, scenario: Scenario) -> LanguageModel:
        return PMixedModel(scenario.ensemble, 1.0, unmixed_member_projection, "ensemble without mixing")
