"""Derive a run's headline and each model's most successful attack, from records only.

A defense is judged by the attack that was most successful against this defense, not against the
undefended model.
"""

from __future__ import annotations

import math

from auditor.conclusions.signals import LeakAssessment, assess_signals
from auditor.core.nouns import UNDEFENDED
from auditor.core.result import AuditResult, Finding, Measurement
from auditor.reports import phrases, severity, signals
from auditor.statistics.metrics import RECALL

NOTHING_MEASURED = "Nothing was measured on the undefended model."


def write_headline(result: AuditResult) -> str:
    """Return the headline: reasons to distrust the results, then each model's severity and its
    reason.
    """
    signal_assessment = assess_signals(result)
    sentences = []
    for target in list_judged_targets(signal_assessment):
        sentences.append(
            severity.rate_severity(signal_assessment, target).describe(
                signals.title_signal_target(result, target)
            )
        )
    doubts = (doubt.sentence for doubt in signals.list_doubts(signal_assessment))
    missing = () if UNDEFENDED in signal_assessment.targets else (NOTHING_MEASURED,)
    return " ".join((*doubts, *sentences, *missing))


def list_judged_targets(assessment: LeakAssessment) -> list[str]:
    """Return the names of models on which a kind of leak was tested, and of the undefended
    model.
    """
    return [
        name
        for name in assessment.targets
        if name == UNDEFENDED or assessment.list_tested_signals(name)
    ]


def find_strongest_attack_row(
    result: AuditResult, target: str, setting: str | None = None
) -> Finding | None:
    """Return the finding with the highest recall on a model; the first if several are equal.

    setting: consider only this access, text-only or white-box.
    """
    # The best of several, picked afterwards: its interval does not cover the selection.
    measured = [
        (recall.value, finding)
        for finding in result.findings
        if finding.target == target
        and setting in (None, finding.setting)
        and (recall := _find_verdict_recall(finding))
    ]
    return max(measured, key=lambda measured_row: measured_row[0], default=(0.0, None))[1]


def _find_verdict_recall(finding: Finding) -> Measurement | None:
    recall = finding.measurement(RECALL)
    known = (
        not finding.not_applicable
        and recall is not None
        and recall.n > 0
        and not math.isnan(recall.value)
    )
    return recall if known else None


def list_strongest_rows(result: AuditResult, target: str) -> list[Finding]:
    """Return the finding with the highest recall at each measured access, text-only first."""
    best = (find_strongest_attack_row(result, target, setting) for setting in phrases.SETTINGS)
    return [finding for finding in best if finding is not None]


def find_strongest_chained_row(result: AuditResult, target: str) -> Finding | None:
    """Return the finding whose chain of control models is reported for this model.

    Among attacks, choose the highest recall, then the largest reduction; choose a probe only if no
    attack has a chain.
    """

    def rank(finding: Finding) -> tuple[float, float]:
        assert finding.chain is not None
        recall = _find_verdict_recall(finding)
        # A difference is negative if less leaks: the largest fall is first among equals.
        return (recall.value if recall else -1.0, -finding.chain.whole.value)

    return max(
        (f for f in result.findings if f.target == target and f.chain), key=rank, default=None
    )
