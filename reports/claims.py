"""Describe the privacy claim of each model and the audits of the claim, in sentences and a table.

Verdicts come from `conclusions.claims`. No text calls a model private.
"""

from __future__ import annotations

import math
from operator import attrgetter

from auditor.conclusions.claims import (
    CONSISTENT,
    CONTRADICTED,
    BoundAgainstClaim,
    ClaimEvidence,
    weigh_claim_against_audits,
)
from auditor.core.result import AuditResult
from auditor.reports import phrases
from auditor.reports.blocks import Group, Table
from auditor.statistics.audit_power import (
    describe_audit_ceiling,
    describe_detection_power,
    find_audit_ceiling,
)
from auditor.statistics.audited import describe_shape_mu
from auditor.statistics.bounds import LEVEL


def select_reported_claims(result: AuditResult) -> list[ClaimEvidence]:
    """Return the evidence on each model that has a claim, a nominal ε or an audit.

    Contradicted claims come first: a report may have room for only a few.
    """
    reported = []
    for target in result.targets:
        evidence = weigh_claim_against_audits(result, target)
        if evidence.has_anything_to_report:
            reported.append(evidence)
    return sorted(reported, key=lambda evidence: evidence.verdict != CONTRADICTED)


def describe_claim_verdict(evidence: ClaimEvidence) -> str:
    """Return a sentence about a claim, its strongest audit, and the verdict.

    evidence: the evidence for and against the claim. Example:
    `DP-SGD: claimed ε 1.00 (...); audited ε ≥ 0.42 (...), provable at best 5.79, and of the claimed
    ε 1 this audit could show at most about 0.16 (...): consistent.`
    """
    parts = [f"{evidence.target.title}: {_describe_claimed_epsilon(evidence)}"]
    for reason in evidence.refuted:
        parts.append(f"refuted ({reason})")
    for bound in evidence.bounds:
        parts.append(_describe_audited_bound(evidence, bound))
    for other in evidence.unheld:
        epsilon = phrases.format_number(other.audit.epsilon)
        parts.append(f"{other.cell.attack} proves ε ≥ {epsilon}, {other.reason}")
    if evidence.verdict is None:
        return f"{'; '.join(parts)}; {_describe_missing_audit(evidence)}."
    return f"{'; '.join(parts)}: {format_claim_verdict(evidence)}."


def describe_claim_evidence(evidence: ClaimEvidence) -> str:
    """Return `describe_claim_verdict`, or only a sentence on the missing audit if no audit ran."""
    if evidence.verdict is None and not evidence.bounds and not evidence.unheld:
        return f"{evidence.target.title}: {_describe_missing_audit(evidence)}."
    return describe_claim_verdict(evidence)


def summarise_claim(evidence: ClaimEvidence) -> str:
    """Return a short summary of the claim.

    `PMixED: claimed ε 8 (zero-out, shard, δ 1e-5); 6,400 drawn tokens, all spent; not audited`
    """
    claim = evidence.target.claim
    parts = [f"{evidence.target.title}: {_describe_claimed_epsilon(evidence)}"]
    if claim:
        parts.append(phrases.format_single_record_epsilon(claim))
        parts.append(phrases.format_covered_tokens(claim))
    verdict = format_claim_verdict(evidence)
    if evidence.refuted:
        verdict += f" ({'; '.join(evidence.refuted)})"
    return "; ".join(filter(None, (*parts, verdict)))


def format_claim_verdict(evidence: ClaimEvidence) -> str:
    """Return the verdict on a claim, or the audited ε if there is no claim to compare it with.

    After "consistent", add the smallest violation that the audit could detect.
    """
    if evidence.verdict is None and evidence.bounds:
        largest = max(evidence.bounds, key=attrgetter("audit.epsilon"))
        return f"audited ε ≥ {phrases.format_number(largest.audit.epsilon)}"
    if evidence.verdict is None:
        return "not audited"
    power = ""
    strongest = evidence.most_sensitive_bound
    if evidence.verdict == CONSISTENT and strongest:
        power = f" ({describe_detection_power(strongest.audit, strongest.promised)})"
    if evidence.claimed is not None:
        return f"{evidence.verdict}{power}"
    nominal = f"nominal ε {phrases.format_number(evidence.nominal or math.nan)}"
    if evidence.verdict == CONTRADICTED:
        return f"{nominal} contradicted"
    return f"{nominal}: {evidence.verdict}{power}"


def _describe_claimed_epsilon(evidence: ClaimEvidence) -> str:
    claim = evidence.target.claim
    nominal = evidence.nominal
    nominal_phrase = ""
    if nominal is not None:
        nominal_phrase = f"; nominal ε {phrases.format_number(nominal)}, which is no claim"
    if claim is None:
        return f"it claims no ε{nominal_phrase}"
    number = phrases.format_number
    if evidence.claimed is None:
        epsilon = "it claims no finite ε"
    else:
        epsilon = f"claimed ε {number(evidence.claimed)}"
    terms = f"{phrases.format_relation(claim.relation)}, {claim.unit}, δ {number(claim.delta)}"
    return f"{epsilon} ({terms}){nominal_phrase}"


def _describe_audited_bound(evidence: ClaimEvidence, bound: BoundAgainstClaim) -> str:
    """Describe the lower bound on ε that an audit proved, and the significance level.

    If the claim promises a different ε for the audit's unit and relation, add this ε.
    """
    audit = bound.audit
    number = phrases.format_number
    differs = evidence.claimed is not None and bound.promised != evidence.claimed
    against = ""
    if differs:
        against = f", against ε {number(bound.promised)} of one {audit.unit}"
    shared = ""
    if len(evidence.bounds) > 1:
        shared = f", one of {len(evidence.bounds)} audits"
    # level: the part of LEVEL for this audit (Bonferroni over all audits of the model).
    game = (
        f"{bound.cell.attack}, {phrases.format_relation(audit.relation)}, {audit.unit}, δ "
        f"{number(audit.delta)}, {audit.right:,} of {audit.guesses:,} guesses right, "
        f"{audit.canaries_or_games_label}, one-sided {100 * (1 - audit.level):.4g}%{shared}"
    )
    # If no audit could have proved more than the promise, "provable at best" says so.
    weak = ""
    if bound.powerless_reason and audit.best > bound.promised:
        weak = f", but {bound.powerless_reason}"
    best = f"provable at best {number(audit.best)}{against}{weak}"
    ceiling = describe_audit_ceiling(audit, evidence.target.claim)
    power = filter(None, (best, ceiling, describe_shape_mu(audit)))
    return f"audited ε ≥ {number(audit.epsilon)} ({game}), {', and '.join(power)}"


def _describe_missing_audit(evidence: ClaimEvidence) -> str:
    """Return why no audit can judge the claim, and the command that would audit the claim."""
    if evidence.bounds:  # audited, but with neither a claim nor a nominal ε
        return "there is no claim to compare the audit with"
    reasons = ""
    if evidence.unmeasured:
        reasons = f" ({'; '.join(evidence.unmeasured)})"
    if evidence.claimed is not None:
        subject = "this claim"
    elif evidence.nominal is not None:
        subject = "this ε"
    else:
        subject = "it"
    would = ""
    if evidence.usual:
        would = f": `audit run --attack {evidence.usual}` would audit it"
    return f"{subject} was not audited{reasons}{would}"


def build_claim_audit_table(result: AuditResult) -> Table:
    """Return a table with a row per audit of any claim.

    Audits that cannot be compared with the claim are included. A claim that was refuted without an
    audit has one row.
    """
    groups = []
    for evidence in select_reported_claims(result):
        if evidence.bounds or evidence.unheld or evidence.refuted:
            groups.append(Group(evidence.target.title, _build_claim_audit_rows(evidence)))
    head = (
        "Claimed ε",
        "Nominal ε",
        "Audit",
        "ε at least",
        "Provable at best",
        "Could show (median)",
        "Canaries or games",
        "Verdict",
    )
    caption = (
        f"Claims against evidence: lower bounds of ε that are too high in at most {LEVEL:.0%} of "
        "audits of a model, all of its audits together"
    )
    return Table("evidence-table", caption, head, groups, {0, 1, 3, 4, 5, 6})


def _build_claim_audit_rows(evidence: ClaimEvidence) -> list[tuple[str, ...]]:
    number = phrases.format_number
    nothing = phrases.NOTHING
    claimed = nothing if evidence.claimed is None else number(evidence.claimed)
    nominal = nothing if evidence.nominal is None else number(evidence.nominal)
    end = "no claim to compare with"
    if evidence.verdict or not evidence.bounds:
        end = format_claim_verdict(evidence)
    lines = []
    for bound in evidence.bounds:
        lines.append((bound.cell.attack, bound.audit, end))
    for other in evidence.unheld:
        lines.append((other.cell.attack, other.audit, other.reason))
    rows: list[tuple[str, ...]] = []
    for attack, a, remark in lines:
        audit = f"{attack}, δ {number(a.delta)}"
        ceiling = find_audit_ceiling(a, evidence.target.claim)
        median = nothing if ceiling is None else number(ceiling)
        bounds = (number(a.epsilon), number(a.best), median)
        rows.append((claimed, nominal, audit, *bounds, f"{a.canaries:,}", remark))
    if evidence.refuted and not evidence.bounds:
        rows.append((claimed, nominal, "refuted", *[nothing] * 4, end))
    return rows
