"""Derive a run's headline and each model's most successful attack, from records only.

A defense is judged by the attack that was most successful against this defense, not against the
undefended model.
"""

from __future__ import annotations

from auditor.conclusions.disagreements import is_measured
from auditor.conclusions.signals import SETTINGS, LeakAssessment, assess_leak_signals
from auditor.core.nouns import UNDEFENDED
from auditor.core.result import AuditResult, Finding
from auditor.reports import phrases, severity, signals
from auditor.statistics.metrics import RECALL

NOTHING_MEASURED = "Nothing was measured on the undefended model."


def write_verdict_headline(result: AuditResult) -> str:
    """Return the headline: reasons to distrust the results, then each model's severity and why."""
    assessment = assess_leak_signals(result)
    sentences = [*signals.list_doubt_sentences(assessment)]
    for target, severe in rate_targets(assessment).items():
        sentences.append(severe.describe(phrases.title_target(result, target)))
    if UNDEFENDED not in assessment.targets:
        sentences.append(NOTHING_MEASURED)
    return " ".join(sentences)


def rate_targets(assessment: LeakAssessment) -> dict[str, severity.Severity]:
    """Return the severity of the undefended model and of each tested model, keyed by model."""
    rated = {}
    for target in assessment.targets:
        if target == UNDEFENDED or assessment.list_tested_signals(target):
            rated[target] = severity.rate_severity(assessment, target)
    return rated


def find_strongest_attack_row(
    result: AuditResult, target: str, setting: str | None = None
) -> Finding | None:
    """Return the finding with the highest recall on a model; the first if several are equal.

    setting: consider only this access, text-only or white-box.
    """
    # The best of several attacks: its interval does not allow for the selection.
    measured = []
    for finding in result.select_findings(target, setting):
        recall = finding.measurement(RECALL)
        if is_measured(recall) and not finding.not_applicable:
            measured.append((recall.value, finding))
    return max(measured, key=lambda measured_row: measured_row[0], default=(0.0, None))[1]


def list_strongest_rows(result: AuditResult, target: str) -> list[Finding]:
    """Return the finding with the highest recall at each measured access, text-only first."""
    best = (find_strongest_attack_row(result, target, setting) for setting in SETTINGS)
    return [finding for finding in best if finding is not None]


def find_strongest_chained_row(result: AuditResult, target: str) -> Finding | None:
    """Return the finding whose chain of control models is reported for this model.

    Choose the attack with the highest recall. Of equal recalls, choose the one that the defense
    reduces most. Choose a probe only if no attack has a chain.
    """

    def rank(finding: Finding) -> tuple[float, float]:
        assert finding.chain is not None
        recall = finding.measurement(RECALL)
        known = is_measured(recall) and not finding.not_applicable
        # A reduction is a negative difference: of equal recalls, the largest reduction wins.
        return (recall.value if recall and known else -1.0, -finding.chain.whole.value)

    chained = [finding for finding in result.select_findings(target) if finding.chain]
    return max(chained, key=rank, default=None)
