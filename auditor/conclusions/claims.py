"""What is claimed of a target against what its audits prove: consistent, contradicted, or too weak
to tell.

The one place where a claim is judged: reports say what it finds, a gate decides by it. Numbers of
the record alone.

Of several audits of one target each gets an equal share of the level (Bonferroni), at which its
bound is worked out anew from its guesses; any of them can contradict the claim. A nominal epsilon
is no claim, and is held to the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from auditor.core.errors import AuditError
from auditor.core.nouns import CellKey, Claim
from auditor.core.result import Audited, AuditResult, Finding, TargetRecord
from auditor.statistics.audit_power import find_detectable_epsilon
from auditor.statistics.audited import HELD, explain_powerless_audit, repeat_audit
from auditor.statistics.bounds import LEVEL

# of a training, and of so many drawn tokens
BOUNDS, BOUNDS_OF_TOKENS = (
    "epsilon",
    "epsilon of tokens",
)
Verdict = Literal["consistent", "claim contradicted", "audit too weak to tell"]
CONSISTENT: Verdict = "consistent"  # it could have been contradicted, and was not
CONTRADICTED: Verdict = "claim contradicted"
# it could not have contradicted the claim (`powerless_reason`)
TOO_WEAK: Verdict = "audit too weak to tell"


@dataclass(frozen=True)
class BoundAgainstClaim:
    """One audit, at its share of the level, and the epsilon that is promised for the game that it
    plays."""

    row: CellKey
    audit: Audited
    promised: float

    @property
    def powerless_reason(self) -> str:
        """Why it could not have contradicted the claim; "" where it could have."""
        return explain_powerless_audit(self.audit, self.promised)


@dataclass(frozen=True)
class UncomparableBound:
    """An audit that the claim is not held to, and why: it is about another delta, relation, unit or
    access."""

    row: CellKey
    audit: Audited
    why: str


@dataclass(frozen=True)
class ClaimEvidence:
    """What a target claims, and all that speaks to it.

    claimed: the epsilon of its relation; None where nothing finite is claimed. nominal: what some
    paper would print, which is held to the bounds where there is no claim, and promises nothing.
    """

    target: TargetRecord
    claimed: float | None
    nominal: float | None
    bounds: tuple[BoundAgainstClaim, ...] = ()
    unheld: tuple[UncomparableBound, ...] = ()
    refuted: tuple[str, ...] = ()  # how the claim was seen to fail without an audit, sentences
    unmeasured: tuple[str, ...] = ()  # audits that could not run, and why
    usual: str = ""  # the probe that audits such a claim; "": an older record does not say

    @property
    def verdict(self) -> Verdict | None:
        """None: nothing to judge, or nothing to judge it by. Without a claim the nominal epsilon is
        judged."""
        if self.refuted or any(bound.audit.epsilon > bound.promised for bound in self.bounds):
            return CONTRADICTED
        if self.claimed is None and self.nominal is None:
            return None
        if any(not bound.powerless_reason for bound in self.bounds):
            return CONSISTENT
        return TOO_WEAK if self.bounds else None

    @property
    def most_sensitive_bound(self) -> BoundAgainstClaim | None:
        """Of the audits that could have contradicted the claim the one that catches the smallest
        violation."""
        able = [bound for bound in self.bounds if not bound.powerless_reason]
        return min(
            able,
            key=lambda bound: find_detectable_epsilon(bound.audit, bound.promised),
            default=None,
        )

    @property
    def has_anything_to_report(self) -> bool:
        """Whether a report has something to say of it."""
        return bool(self.target.claim or self.nominal is not None or self.bounds)


def weigh_claim_against_audits(
    result: AuditResult,
    target: TargetRecord,
    level: float = LEVEL,
    *,
    setting: str | None = None,
    attack: str | None = None,
) -> ClaimEvidence:
    """How the claim of one target stands; setting, attack: by these rows alone."""
    claim, rows = (
        target.claim,
        [finding for finding in result.findings if finding.target == target.name],
    )
    rows = [row for row in rows if setting in (None, row.setting) and attack in (None, row.attack)]
    claimed = None if claim is None else claim.epsilon.get(claim.relation, math.inf)
    if claimed is not None and not math.isfinite(claimed):
        claimed = None
    held: list[tuple[Finding, Audited, float]] = []
    unheld: list[UncomparableBound] = []
    for row, audit in _findings_with_distinct_epsilon_audits(rows):
        promised = _promised_epsilon_of_audit_game_or_reason(
            None if claimed is None else claim, row, audit, target.nominal_epsilon
        )
        if isinstance(promised, str):
            unheld.append(UncomparableBound(row.cell_key, audit, promised))
        else:
            held.append((row, audit, promised))
    bounds = []
    for row, audit, promised in held:
        # Bonferroni; an audit of a smaller level keeps its own.
        share = min(audit.level, level / len(held))
        try:
            bounds.append(BoundAgainstClaim(row.cell_key, repeat_audit(audit, share), promised))
        except AuditError as why:
            unheld.append(UncomparableBound(row.cell_key, audit, str(why)))
    refuted = tuple(dict.fromkeys(why for row in rows for why in row.violations)) if claim else ()
    probes = result.methods_measuring(BOUNDS, BOUNDS_OF_TOKENS)
    missing = tuple(
        f"{r.attack}: {r.not_applicable}" for r in rows if r.attack in probes and r.not_applicable
    )
    usual = result.methods_measuring(
        BOUNDS if claim is None or claim.queries is None else BOUNDS_OF_TOKENS
    )
    return ClaimEvidence(
        *(target, claimed, target.nominal_epsilon, tuple(bounds), tuple(unheld), refuted),
        unmeasured=tuple(dict.fromkeys(missing)),
        usual=next(iter(usual), ""),
    )


def _findings_with_distinct_epsilon_audits(rows: list[Finding]) -> list[tuple[Finding, Audited]]:
    """The (epsilon, delta) bound of each row that has one. Rows of one probe that saw the same are
    one audit."""
    found: dict[tuple[str, str, Audited], Finding] = {}
    for row in rows:
        # no bound that assumes a shape
        main = next((audit for audit in row.audits if audit.estimator in HELD), None)
        if main is not None and not row.not_applicable:
            key = (row.attack, str(row.options), main)
            # Of rows that are one audit, one that the claim is about stands for all.
            before = found.get(key)
            if before is None or (before.claim_applies is False and row.claim_applies):
                found[key] = row
    return [(row, main) for (_, _, main), row in found.items()]


def _promised_epsilon_of_audit_game_or_reason(
    claim: Claim | None, row: Finding, audit: Audited, nominal: float | None
) -> float | str:
    """The epsilon promised of the game that was played, or why none is. claim: None where nothing
    finite is claimed."""
    if claim is None:
        return math.inf if nominal is None else nominal
    if row.claim_applies is False:
        return f"outside the claim ({row.claim_reason or 'no reason recorded'})"
    if audit.delta < claim.delta:
        return f"at delta {audit.delta:g}, and the claim is at {claim.delta:g}"
    return promised_epsilon_or_reason(claim, audit.relation, audit.unit)


def promised_epsilon_or_reason(claim: Claim, relation: str, unit: str) -> float | str:
    """The epsilon of a claim for these neighbours, or why it has none.

    What holds at the claim's delta holds at any larger one too, so that an audit at a larger delta
    can refute it.
    """
    if claim.any_two:
        return claim.epsilon[claim.relation]
    if claim.shard and unit in ("record", claim.whole) and claim.whole and relation == "add_remove":
        # One in a shard more or less is another shard, as a whole replaced.
        relation, unit = "replace", "shard"
    own = "shard" if claim.shard else claim.unit
    if unit != own and not (
        unit == "record" and own == "user"
    ):  # what holds for a user holds for each record
        return f"about one {unit}, and the claim is about one {claim.unit}"
    if relation not in claim.epsilon:
        return f"about {relation} neighbours, and the claim is about {' and '.join(claim.epsilon)}"
    return claim.epsilon[relation]
