"""Compare a target's privacy claim with its audits: consistent, contradicted, or too weak to tell.

Reports and gates take every verdict on a claim from this module, which reads only recorded numbers.

Several audits of a target share the significance level equally (Bonferroni). Each bound is
recomputed at its share of the level, and any audit can contradict the claim. A nominal epsilon is
not a claim, but is tested in the same way.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from auditor.core.errors import AuditError
from auditor.core.nouns import CellKey, Claim
from auditor.core.result import Audited, AuditResult, Finding, TargetRecord
from auditor.statistics.audit_power import find_detectable_epsilon
from auditor.statistics.audited import HELD, explain_powerless_audit, repeat_epsilon_audit
from auditor.statistics.bounds import LEVEL

# Measures of an epsilon for a training, and of an epsilon for a number of drawn tokens.
BOUNDS = "epsilon"
BOUNDS_OF_TOKENS = "epsilon of tokens"
Verdict = Literal["consistent", "claim contradicted", "audit too weak to tell"]
CONSISTENT: Verdict = "consistent"  # an audit could have contradicted it and did not
CONTRADICTED: Verdict = "claim contradicted"
# no audit could have contradicted the claim (`powerless_reason`)
TOO_WEAK: Verdict = "audit too weak to tell"


@dataclass(frozen=True)
class BoundAgainstClaim:
    """Lower bound on epsilon from an audit, next to the epsilon that the claim promises.

    Args:
        cell: target, setting and probe of the audit.
        audit: the audit, recomputed at its share of the significance level.
        promised: claimed epsilon at the audit's delta, for its neighbouring relation and privacy
            unit (such as a record or a user).
    """

    cell: CellKey
    audit: Audited
    promised: float

    @property
    def powerless_reason(self) -> str:
        """Reason why the audit could not have contradicted the claim; "" if it could have."""
        return explain_powerless_audit(self.audit, self.promised)


@dataclass(frozen=True)
class UncomparableBound:
    """Audit that cannot test the claim.

    For example, the audit is about one record, but the claim is about one shard.

    Args:
        cell: target, setting and probe of the audit.
        audit: the audit.
        reason: phrase that says why the audit cannot test the claim.
    """

    cell: CellKey
    audit: Audited
    reason: str


@dataclass(frozen=True)
class ClaimEvidence:
    """A target's privacy claim, with the evidence for and against it.

    Args:
        target: record of the target.
        claimed: epsilon for the claim's neighbouring relation; None if no finite claim exists.
        nominal: epsilon that a paper would print, which promises nothing; None if unknown. The
            audits test it if `claimed` is None.
        bounds: audits that test the claim.
        unheld: audits that cannot test the claim.
        refuted: sentences about violations of the claim that were found without an audit.
        unmeasured: sentences about audits that could not run.
        usual: name of the probe that normally audits this kind of claim; "" in older records.
    """

    target: TargetRecord
    claimed: float | None
    nominal: float | None
    bounds: tuple[BoundAgainstClaim, ...] = ()
    unheld: tuple[UncomparableBound, ...] = ()
    refuted: tuple[str, ...] = ()
    unmeasured: tuple[str, ...] = ()
    usual: str = ""

    @property
    def _sensitive_bounds(self) -> list[BoundAgainstClaim]:
        """Audits that could have contradicted the claim."""
        return [bound for bound in self.bounds if not bound.powerless_reason]

    @property
    def verdict(self) -> Verdict | None:
        """Verdict on the claim, or on the nominal epsilon if no claim exists.

        None if neither exists, or if no audit tested the claim.
        """
        if self.refuted or any(bound.audit.epsilon > bound.promised for bound in self.bounds):
            return CONTRADICTED
        if self.claimed is None and self.nominal is None:
            return None
        if self._sensitive_bounds:
            return CONSISTENT
        return TOO_WEAK if self.bounds else None

    @property
    def most_sensitive_bound(self) -> BoundAgainstClaim | None:
        """Audit that could detect the smallest violation; None if no audit could detect a
        violation.
        """
        return min(
            self._sensitive_bounds,
            key=lambda bound: find_detectable_epsilon(bound.audit, bound.promised),
            default=None,
        )

    @property
    def has_anything_to_report(self) -> bool:
        """True if a report has anything to print about the claim."""
        return bool(self.target.claim or self.nominal is not None or self.bounds)


def weigh_claim_against_audits(
    result: AuditResult,
    target: TargetRecord,
    level: float = LEVEL,
    *,
    setting: str | None = None,
    attack: str | None = None,
) -> ClaimEvidence:
    """Return the evidence for and against a target's claim at this significance level.

    Args:
        result: result of the run.
        target: the target whose claim is weighed.
        level: significance level that the target's audits share.
        setting: if given, use only audits in this access setting.
        attack: if given, use only audits by this probe.
    """
    claim = target.claim
    rows = result.select_findings(target.name, setting, attack)
    claimed = None
    usual = BOUNDS
    if claim is not None:
        if math.isfinite(claim.epsilon.get(claim.relation, math.inf)):
            claimed = claim.epsilon[claim.relation]
        if claim.queries is not None:
            usual = BOUNDS_OF_TOKENS
    comparable = []
    unheld = []
    for row, audit in _select_distinct_epsilon_audits(rows):
        promised = _find_tested_epsilon(
            None if claimed is None else claim, row, audit, target.nominal_epsilon
        )
        if isinstance(promised, str):
            unheld.append(UncomparableBound(row.cell_key, audit, promised))
        else:
            comparable.append((row, audit, promised))
    bounds = []
    for row, audit, promised in comparable:
        # Bonferroni; an audit at a smaller level keeps that level.
        share = min(audit.level, level / len(comparable))
        try:
            bounds.append(
                BoundAgainstClaim(row.cell_key, repeat_epsilon_audit(audit, share), promised)
            )
        except AuditError as error:
            unheld.append(UncomparableBound(row.cell_key, audit, str(error)))
    refuted = dict[str, None]()  # ordered sets
    unmeasured = dict[str, None]()
    probes = result.list_measuring_methods(BOUNDS, BOUNDS_OF_TOKENS)
    for row in rows:
        if claim:
            refuted |= dict.fromkeys(row.violations)
        if row.attack in probes and row.not_applicable:
            unmeasured[f"{row.attack}: {row.not_applicable}"] = None
    return ClaimEvidence(
        *(target, claimed, target.nominal_epsilon, tuple(bounds), tuple(unheld)),
        *(tuple(refuted), tuple(unmeasured)),
        usual=next(iter(result.list_measuring_methods(usual)), ""),
    )


def _select_distinct_epsilon_audits(rows: list[Finding]) -> list[tuple[Finding, Audited]]:
    """Return each finding that has an (epsilon, delta) audit, paired with this audit.

    If several findings of one probe have the same audit, return only one of them.
    """
    pairs: dict[tuple[str, str, Audited], tuple[Finding, Audited]] = {}
    for row in rows:
        # Skip bounds that assume a shape.
        main = next((audit for audit in row.audits if audit.estimator in HELD), None)
        if main is not None and not row.not_applicable:
            key = (row.attack, str(row.options), main)
            # Of attacks with the same audit, keep one that the claim covers.
            if key not in pairs or (pairs[key][0].claim_applies is False and row.claim_applies):
                pairs[key] = (row, main)
    return list(pairs.values())


def _find_tested_epsilon(
    claim: Claim | None, row: Finding, audit: Audited, nominal: float | None
) -> float | str:
    """Return the epsilon that an audit tests, or the reason why the audit tests none.

    The audit tests the claimed epsilon for its delta, neighbouring relation and privacy unit.

    Args:
        claim: the target's claim; None if it has no finite epsilon.
        row: finding of the audit.
        audit: the audit.
        nominal: epsilon that a paper would print. Without a claim, it is tested; None for infinity.
    """
    if claim is None:
        return math.inf if nominal is None else nominal
    if row.claim_applies is False:
        return f"outside the claim ({row.claim_reason or 'no reason recorded'})"
    if audit.delta < claim.delta:
        return f"at delta {audit.delta:g}, and the claim is at {claim.delta:g}"
    return find_promised_epsilon(claim, audit.relation, audit.unit)


def find_promised_epsilon(claim: Claim, relation: str, unit: str) -> float | str:
    """Return the claim's epsilon for this neighbouring relation and unit, or why it has none.

    A guarantee at the claim's delta also holds at any larger delta. An audit at a larger delta can
    therefore refute the claim.

    Args:
        claim: the privacy claim.
        relation: how neighbouring data sets differ, such as "add_remove".
        unit: whose data differ, such as "record" or "user".
    """
    if claim.any_two:
        return claim.epsilon[claim.relation]
    if claim.shard and unit in ("record", claim.whole) and claim.whole and relation == "add_remove":
        # Adding or removing one record changes the shard, as replacing the shard does.
        relation = "replace"
        unit = "shard"
    claim_unit = "shard" if claim.shard else claim.unit
    if unit != claim_unit and not (
        unit == "record" and claim_unit == "user"
    ):  # a guarantee for a user holds for each record
        return f"about one {unit}, and the claim is about one {claim.unit}"
    if relation not in claim.epsilon:
        return f"about {relation} neighbours, and the claim is about {' and '.join(claim.epsilon)}"
    return claim.epsilon[relation]
