"""Implement PMixED (Flemings et al. 2024): private prediction by mixing with a public model."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Annotated, Literal, cast, get_args

from auditor.core.errors import AuditError
from auditor.core.nouns import Claim
from auditor.defenses.control_rows import CONTROL, OneAdapterControl, PublicModelControl
from auditor.defenses.pmixed_model import (
    PMixedMemberProjection,
    PMixedModel,
    QueryRDP,
    build_unmixed_projection,
)
from auditor.models.base import LanguageModel
from auditor.plugins.defense import BudgetedDefense, Cause, Defense, Scenario
from auditor.plugins.options import CountOrZero, Limits, ShareOrAll
from auditor.privacy.accounting import compute_rdp_budget, convert_rdp
from auditor.privacy.mixing import (
    Adjacency,
    bound_pmixed_epsilon,
    compute_sound_query_rdp,
    compute_subset_sizes,
    find_largest_published_beta,
    find_largest_sound_radius,
)

ADJACENCIES: tuple[Adjacency, ...] = get_args(Adjacency)
MOST_ORDER = 256  # higher orders gain nothing and take minutes to solve


def build_ensemble_cause_chain(ensemble: str, mixing: str) -> tuple[Cause, ...]:
    """Return a chain of control models, from a single adapter on all data to the public model.

    Each model differs from the next in one cause, so the differences show what splitting the data
    and mixing contribute to a mixed ensemble.

    mixing: describes how the members' distributions are mixed.
    """
    splitting = "each adapter sees one shard only, their distributions averaged"
    one_adapter = "one adapter, all data, trained as the members are"
    return (
        Cause("training configuration", one_adapter, OneAdapterControl(ensemble), CONTROL),
        Cause("splitting", splitting, UnmixedEnsemble(ensemble)),
        Cause("mixing", mixing),
        Cause("no private data", "the public model alone", PublicModelControl(), "--public MODEL"),
    )


@dataclass(frozen=True)
class PMixed(BudgetedDefense):
    """Mix the members of an ensemble with the public model, then sample (PMixED, 2024).

    The method is by Flemings et al. 2024.

    epsilon, delta: the privacy cost of `queries` drawn tokens.
    queries: 0 takes the number of tokens that this run draws.
    alpha: the Renyi order.
    q: the probability that a query samples a given member (Poisson sampling).
    accounting: `sound` has the same radius and the same cap on the mixing weight for all subsets of
    members. `published` has the paper's radius, which depends on the subset's size; its proof has
    gaps.
    adjacency: the neighbouring relation of the sound claim. `zero_out` removes a shard's data, so
    that its member has learnt nothing. `replace` replaces the shard's data by different data. For
    both, the number of members is public, and the radius depends on it. `add_remove` removes the
    member itself; the number of members is then secret, and the radius is valid for any number. The
    proof for `add_remove` uses an inequality that was checked only numerically.
    on_exhaustion: what to do when a fixed number of queries is spent: `stop`, or answer with the
    `public` model.
    ensemble: the folder of LoRA members; a built-in lab trains its own.
    """

    name = "pmixed"
    title = "PMixED"
    needs = ("public", "ensemble")
    claims = "(epsilon, delta) for one shard, over the tokens drawn under ancestral decoding"
    epsilon: Annotated[float, Limits(0, 1000, "(]")] = 8.0  # more than this does not protect
    delta: float = 1e-5
    alpha: Annotated[int, Limits(2, MOST_ORDER, "[]")] = 4
    q: ShareOrAll = 0.03
    accounting: Literal["sound", "published"] = "sound"
    adjacency: Literal["zero_out", "add_remove", "replace"] = "zero_out"
    queries: CountOrZero = 0
    on_exhaustion: Literal["stop", "public"] = "stop"
    ensemble: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.accounting == "published" and self.adjacency != "zero_out":
            raise AuditError(
                f"adjacency={self.adjacency} is an option of accounting=sound: the published "
                "radius is the same for every adjacency"
            )
        # Rejects values that leave no budget.
        compute_rdp_budget(self.epsilon, self.delta, self.alpha)

    def protect(self, scenario: Scenario) -> LanguageModel:
        make_projection = partial(self._make_projection, self.count_covered_tokens(scenario))
        claim = self._make_query_claim(scenario)
        return PMixedModel(scenario.ensemble, self.q, make_projection, "PMixED", claim)

    def cause_chain(self) -> tuple[Cause, ...]:
        mixing = "each distribution is mixed with the public one"
        return build_ensemble_cause_chain(self.ensemble, mixing)

    def _make_projection(self, queries: int, members: int) -> PMixedMemberProjection:
        """Return the projection whose radius spends the entire budget in this many queries.

        members: the number of members in the ensemble.
        """
        if self.accounting == "sound":
            radius = find_largest_sound_radius(
                self.adjacency, self.epsilon, self.delta, self.alpha, queries, self.q, members
            )
            # The rule with a proof: forward divergence only, and lambda <= 1 - e^-s with s = r.
            cap = -math.expm1(-radius)
            radii = (radius,) * members
            return PMixedMemberProjection(self.alpha, radii, cap=cap, two_sided=False)
        # The paper's beta depends on the size of the subset, not on N (its Section 5.2).
        budget = (self.epsilon, self.delta, self.alpha, queries, self.q)
        sized_radii = []
        for size in range(1, members + 1):
            sized_radii.append(self.alpha * find_largest_published_beta(*budget, size))
        return PMixedMemberProjection(self.alpha, tuple(sized_radii), cap=1.0, two_sided=True)

    def _list_claimed_adjacencies(self) -> tuple[Adjacency, ...]:
        """Return the neighbouring relations for which the radius is valid.

        A radius for N members is invalid for a neighbour with a different number of members.
        """
        if self.accounting == "published":  # its radii depend on the size of the subset
            return "add_remove", "zero_out"
        if self.adjacency == "add_remove":
            return ADJACENCIES
        return ("zero_out", "replace")

    def _make_query_claim(self, scenario: Scenario) -> QueryRDP:
        """Return the claim for one token.

        For the relation `adjacency`, the claim is the token's share of the budget. For other
        relations, it is the Renyi divergence that the radius allows.
        """
        queries = self.count_covered_tokens(scenario)
        members = scenario.ensemble.size
        projection = self._make_projection(queries, members)
        share = compute_rdp_budget(self.epsilon, self.delta, self.alpha) / queries
        # The projection does not control orders above alpha.
        claims = list(product(self._list_claimed_adjacencies(), range(2, self.alpha + 1)))
        if self.accounting == "published":
            # D_k <= D_alpha: the claim holds at every order up to alpha.
            return QueryRDP(projection, dict.fromkeys(claims, share))
        radius = projection.radii[0]
        query_rdp: dict[tuple[Adjacency, int], float] = {}
        for adjacency, order in claims:
            query_rdp[adjacency, order] = compute_sound_query_rdp(
                adjacency,
                order,
                self.q,
                members,
                radius,
                radius,
            )
        query_rdp[self.adjacency, self.alpha] = share
        return QueryRDP(projection, query_rdp)

    def claim(self, scenario: Scenario, n_tokens: int) -> Claim:
        ensemble = scenario.ensemble
        queries = self.count_covered_tokens(scenario)
        # After the budget, the public model answers, or the defense stops.
        n_spent = min(n_tokens, queries)
        counts = ensemble.count_shard_overlaps()
        n_shared = counts["shared_records"]
        is_sound = self.accounting == "sound"
        relations: tuple[str, ...] = ("as published",)
        relation = "as published"
        theorem = "PMixED Theorem 5.1"
        if is_sound:
            relations = self._list_claimed_adjacencies()
            relation = self.adjacency
            theorem = "our proof: Renyi composition of the capped forward projection"
        projection = self._make_projection(queries, ensemble.size)
        if n_shared or counts["unlisted_shards"]:
            unit = ""
        else:
            unit = ensemble.unit

        def compute_epsilon(tokens: int) -> dict[str, float]:
            # A record in two shards changes two members, and no theorem here covers two.
            if tokens and n_shared:
                return dict.fromkeys(relations, math.inf)
            return {name: self._compute_epsilon(name, tokens, scenario) for name in relations}

        return Claim(
            epsilon=compute_epsilon(queries),
            delta=self.delta,
            relation=relation,
            unit=f"shard of whole {unit}s" if unit else "shard",
            queries=queries,
            theorem=theorem,
            status=self._describe_claim_status(n_shared),
            sound=is_sound and not n_shared,
            spent_queries=n_spent,
            spent_epsilon=compute_epsilon(n_spent),
            shard=True,
            whole=unit,
            details={
                "members": float(ensemble.size),
                "q": self.q,
                "alpha": float(self.alpha),
                "radius": projection.radii[0],
                "weight_cap": projection.cap,
                "public_share": float(compute_subset_sizes(self.q, ensemble.size)[0]),
            },
        )

    def _describe_claim_status(self, n_shared: int) -> str:
        """Say how far the claim is proved. n_shared: number of records in more than one shard."""
        if n_shared:
            return f"promises nothing: {n_shared} records are in more than one shard"
        if self.accounting == "published":
            return "claim; proof has gaps"
        if self.adjacency == "add_remove":
            return (
                "sound up to an inequality that was checked numerically, not proved; for any "
                "number of members, which is public in the claims for zero-out and replace"
            )
        return "sound; the number of ensemble models is public"

    def _compute_epsilon(self, relation: str, queries: int, scenario: Scenario) -> float:
        """Return the epsilon, in nats, of `queries` drawn tokens at this defense's radius.

        relation: the neighbouring relation.
        """
        if queries == 0:
            return 0.0
        n_covered = self.count_covered_tokens(scenario)
        if relation == "as published":
            # RDP adds up over queries: these have this share of the budget.
            share = queries / n_covered
            budget = compute_rdp_budget(self.epsilon, self.delta, self.alpha)
            return convert_rdp(share * budget, self.delta, self.alpha)
        members = scenario.ensemble.size
        radius = self._make_projection(n_covered, members).radii[0]
        mechanism = (self.delta, self.alpha, queries, self.q, members, radius, radius)
        return bound_pmixed_epsilon(cast(Adjacency, relation), *mechanism)


@dataclass(frozen=True)
class UnmixedEnsemble(Defense):
    """Serve the mean of the members' distributions, without mixing in the public model.

    Each member saw 1/N of the data. This control makes no privacy claim.

    ensemble: the folder of LoRA members; a built-in lab trains its own.
    """

    name = "ensemble-unmixed"
    title = "Ensemble, unmixed"
    needs = ("public", "ensemble")
    claims = "none: the control of pmixed"
    ensemble: str = ""

    def protect(self, scenario: Scenario) -> LanguageModel:
        return PMixedModel(
            scenario.ensemble,
            1.0,
            build_unmixed_projection,
            "ensemble without mixing",
        )
