"""Find reasons to doubt that a number is really within its limit.

The reasons are the run's recorded doubts, records with many copies, and records that were not
attacked.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from auditor.conclusions.signals import LeakAssessment
from auditor.conclusions.strata import measure_weighted_share
from auditor.core.counts import format_count
from auditor.core.result import AuditResult, Doubt, Finding
from auditor.gate.rulings import Ruling
from auditor.statistics.bounds import LEVEL, bound_binomial_share


def downgrade_doubtful_ruling(
    result: AuditResult, assessment: LeakAssessment, ruling: Ruling
) -> Ruling:
    """Return the ruling, changed from `held` to `inconclusive` if its number is in doubt.

    Any number about leakage is in doubt if the audit is unsure how the training text was formatted
    (the text form), or if an adapter is loaded onto another base than it names. A number from
    sampled answers is also in doubt if a server withheld answers, or if there are fewer hits than
    the model's probabilities predict.

    Args:
        result: result of the run.
        assessment: decisions on each kind of leak, with contradictions between the numbers.
        ruling: the ruling.
    """
    cell = (ruling.target, ruling.setting, ruling.attack)
    is_drawn = any(row.cell_key == cell and row.drawn for row in result.findings)
    doubts: list[Doubt] = []
    for target in result.targets:
        if target.name == ruling.target:
            doubts += target.doubts
    doubts += assessment.contradictions.get(ruling.target, ())
    reasons = []
    for doubt in doubts:
        if doubt.kind == "base" or (is_drawn and doubt.kind in ("answers", "contradiction")):
            reasons.append(doubt.sentence)
    for doubt in result.benchmark.doubts:
        # a defense's cost is not a leak
        if doubt.kind == "text form" and not ruling.metric.startswith("perplexity"):
            reasons.append(doubt.sentence)
    if not (ruling.verdict == "held" and reasons):
        return ruling
    reason = f"{ruling.reason}. {' '.join(reasons)}"
    return replace(ruling, verdict="inconclusive", unmeasured=True, missed=None, reason=reason)


def add_audited_share(result: AuditResult, ruling: Ruling) -> Ruling:
    """Return the ruling; if some records were not audited, its reason now states how many were."""
    counts = result.benchmark.records.get("members")
    if counts is None or not ruling.n or counts.audited == counts.given:
        return ruling
    share = f"{counts.audited:,} of {format_count(counts.askable, 'record')} audited"
    if counts.rows_note:
        share += f" ({counts.rows_note})"
    return replace(ruling, reason=f"{ruling.reason}; {share}")


def find_strata_objection(
    finding: Finding, limit: float, counts_with_a_rule: Collection[int]
) -> str:
    """Return why the extracted share of some records may exceed the limit; "" if it cannot.

    Records are grouped by number of copies.

    Args:
        finding: finding of the attack.
        limit: largest allowed share.
        counts_with_a_rule: numbers of copies with a separate rule, which are skipped.
    """
    weighted_share = measure_weighted_share(finding, LEVEL)
    if weighted_share is not None and weighted_share.high > limit:
        n_asked = sum(stratum.extracted.n for stratum in finding.strata)
        return (
            f"of all {weighted_share.n:,} records, weighted by copies, up to "
            f"{weighted_share.high:.4f} may be extracted: {n_asked:,} of them were attacked"
        )
    copied = []
    for s in finding.strata:
        if (s.copies or 1) > 1 and s.extracted.n and s.copies not in counts_with_a_rule:
            copied.append(s)
    for stratum in copied:
        # Bonferroni: each stratum gets an equal part of the level.
        low = bound_binomial_share(stratum.extracted.hits, stratum.extracted.n).low(
            LEVEL / len(copied)
        )
        if low > limit:
            return (
                f"{stratum.extracted.hits:,} of the "
                f"{format_count(stratum.extracted.n, 'record')} "
                f"that occur {stratum.copies:,} times are extracted, above the limit (to limit "
                f"these records: recall(count={stratum.copies}))"
            )
    return ""
