"""What a run shows, in one paragraph a manager can act on. Knows the records; says nothing they do not support.

Comparisons are made at matched setting, attack and decoding only. Each defense is judged by the attack that did best
against *it*, not by the one that did best against the undefended model. A cause is credited with what the step to its
own control row changes, and with nothing where no row isolates it.
"""

from __future__ import annotations

import math

from auditor.core.counts import counted
from auditor.core.nouns import UNDEFENDED, Claim
from auditor.core.result import AuditResult, Finding, Measurement, TargetRecord
from auditor.records.signals import Assessment, assess_signals
from auditor.reports import claims, phrases, signals, unlearning
from auditor.reports.blocks import Facts
from auditor.statistics.metrics import RECALL


def headline(result: AuditResult) -> str:
    """A sentence a target: whether it leaks and by what. First, what forbids a conclusion from what was not seen."""
    return " ".join((*doubt_sentences(result), *summary_by_target(result).values()))


def doubt_sentences(result: AuditResult) -> tuple[str, ...]:
    """What forbids a conclusion from what was not seen, a sentence each."""
    return tuple(doubt.sentence for doubt in signals.all_doubts(assess_signals(result)))


def summary_by_target(result: AuditResult) -> dict[str, str]:
    """By target, what leaks of it, in a sentence; of the undefended one also where it was not attacked."""
    seen = assess_signals(result)
    told = {target: signals.target_summary(result, seen, target) for target in _targets_to_summarise(seen)}
    return told if UNDEFENDED in told else {**told, UNDEFENDED: "Nothing was measured on the undefended model."}


def _targets_to_summarise(seen: Assessment) -> list[str]:
    """The targets that anything was measured of, or the undefended one, which is always told of."""
    return [target for target in seen.targets if target == UNDEFENDED or seen.tested(target)]


def verdict_paragraph(result: AuditResult) -> str:
    """The paragraph: what leaks and how sure, what each defense changed, at what cost, and what its claim covers."""
    return " ".join(
        f"{term}: {text}" if term in _target_titles(result) else text for term, text in _verdict_facts(result)
    )


def verdict_by_question(result: AuditResult) -> Facts:
    """The verdict by question, for a page: what leaks of each target, at what cost, what is promised, how sure."""
    return (*_verdict_facts(result), ("How sure", _certainty_sentences(result)))


def _target_titles(result: AuditResult) -> set[str]:
    return {"Undefended", *(target.title for target in result.targets)}


def _verdict_facts(result: AuditResult) -> Facts:
    seen, found = assess_signals(result), list[tuple[str, str]]()
    if against := signals.all_doubts(seen):
        found.append(("What may hide a leak", " ".join(doubt.sentence for doubt in against)))
    found.append(("Undefended", signals.target_signals_paragraph(result, seen, UNDEFENDED)))
    for target in _defended_targets(result):
        found.append(
            (
                target.title,
                " ".join(
                    [
                        signals.target_signals_paragraph(result, seen, target.name),
                        *_recall_change_sentences(result, target),
                    ]
                ),
            )
        )
    found += [
        ("What is left of the forgotten", unlearning.forgetting_sentences(result, one)) for one in result.unlearning
    ]
    found += [(f"Why, with {target.title}", explain_effect(result, target)) for target in _explained_targets(result)]
    found += [("At what cost", " ".join(_cost_sentences(result)))] if _defended_targets(result) else []
    promises = [
        *_promise_sentences(result),
        *(claims.claim_verdict_sentence(stands) for stands in claims.claims_to_report(result)),
    ]
    found += [("What is promised", " ".join(promises))] if promises else []
    return tuple(found)


def _recall_change_sentences(result: AuditResult, target: TargetRecord) -> list[str]:
    """Its recall against that of no defense, at each access."""
    told = [_recall_change_label(result, finding) for finding in _strongest_by_access(result, target)]
    return [f"Verbatim, against no defense at the same decoding: {'; '.join(told)}."] if told else []


def _cost_sentences(result: AuditResult) -> list[str]:
    return [
        f"{target.title}: {phrases.lower_first(_perplexity_cost_sentence(result, target))}"
        f"{_slowdown_sentence(result, target)}"
        for target in _defended_targets(result)
    ]


def _slowdown_sentence(result: AuditResult, target: TargetRecord) -> str:
    base = next((t.milliseconds_per_token for t in result.targets if t.name == UNDEFENDED), None)
    if not base or target.milliseconds_per_token is None:
        return ""
    return f" A token takes {phrases.format_number(target.milliseconds_per_token / base)} times as long."


def _promise_sentences(result: AuditResult) -> list[str]:
    return [
        f"{target.title}: {phrases.lower_first(_claim_coverage_sentence(target, _strongest_by_access(result, target)))}"
        for target in _defended_targets(result)
    ]


def _certainty_sentences(result: AuditResult) -> str:
    n, rows = result.benchmark.members, sum(1 for f in result.findings if f.main and not f.not_applicable)
    least = fewest_members_attacked(result)
    of = "" if least == n else f", where only {least:,} were attacked"
    return (
        f"{counted(n, 'secret')} attacked, {counted(rows, 'configuration')} (target, access, attack) measured. "
        "Brackets hold 95% intervals over the choice of secrets; none extracted would still leave up to "
        f"{phrases.format_percent(phrases.zero_hits_bound(least))}%{of}. "
        f"An attack gives a lower bound: a stronger one may "
        "extract more."
    )


def fewest_members_attacked(result: AuditResult) -> int:
    """Members that the least attacked target was attacked for: what its zeros leave open, all others' leave less."""
    asked = (recall.n for f in result.findings if not f.not_applicable and (recall := f.measurement(RECALL)))
    return min((n for n in asked if n > 0), default=result.benchmark.members)


def strongest_attack_row(result: AuditResult, target: str, setting: str | None = None) -> Finding | None:
    """The measured row with the highest recall, the first of equals."""
    measured = [
        finding
        for finding in result.findings
        if finding.target == target and setting in (None, finding.setting) and _has_recall(finding)
    ]
    return max(measured, key=lambda finding: _recall_measurement(finding).value, default=None)


def _has_recall(finding: Finding) -> bool:
    recall = finding.measurement(RECALL)
    return not finding.not_applicable and recall is not None and recall.n > 0 and not math.isnan(recall.value)


def _recall_measurement(finding: Finding) -> Measurement:
    recall = finding.measurement(RECALL)
    assert recall is not None  # _has_recall() chose the finding
    return recall


def _strongest_by_access(result: AuditResult, target: TargetRecord) -> list[Finding]:
    """The strongest row of each setting that has one, inside the claim first."""
    return [
        f for f in (strongest_attack_row(result, target.name, setting) for setting in phrases.SETTINGS) if f is not None
    ]


def _defended_targets(result: AuditResult) -> list[TargetRecord]:
    return [target for target in result.targets if target.name != UNDEFENDED and not target.companion]


# --- what a defense changed -----------------------------------------------------------------------------------------


def _recall_change_label(result: AuditResult, finding: Finding) -> str:
    """`white-box −51 points [−55 to −47] (4/320 against 166/320, ethicist)`"""
    difference, reference = finding.measurement("recall_difference"), _matching_undefended_row(result, finding)
    access, own = finding.setting, phrases.format_share_with_interval(_recall_measurement(finding))
    if reference is None or difference is None or math.isnan(difference.value):
        return f"{access} {own} by {finding.attack}, with no undefended configuration at the same decoding"
    points = f"{phrases.format_percent(difference.value)} points {phrases.format_interval(difference)}"
    if difference.low <= 0 <= difference.high:
        points += ", not significant"
    elif difference.low > 0:
        points += ", worse than no defense"
    return (
        f"{access} {points} ({own} against "
        f"{phrases.format_share_with_interval(_recall_measurement(reference))}, {finding.attack})"
    )


def _matching_undefended_row(result: AuditResult, finding: Finding) -> Finding | None:
    """The undefended row at the same setting, attack and decoding."""
    key = (finding.setting, finding.attack, finding.decoding)
    undefended = (f for f in result.findings if f.target == UNDEFENDED and _has_recall(f))
    return next((f for f in undefended if (f.setting, f.attack, f.decoding) == key), None)


def _claim_coverage_sentence(target: TargetRecord, best: list[Finding]) -> str:
    claim = target.claim
    if claim is None:
        return "It claims nothing."
    terms = f"{phrases.relation_label(claim.relation)}, {phrases.covered_tokens(claim)}; {claim.status}"
    opening = (
        f"It claims ε {phrases.format_number(phrases.claimed_epsilon(claim))} "
        f"({terms}) for its unit, {_protection_unit_phrase(claim)}."
    )
    if math.isinf(phrases.claimed_epsilon(claim)):
        return f"{opening} That promises nothing."
    uncovered = [finding for finding in best if not finding.claim_applies]
    if not best:
        return f"{opening} It was not put to the test."
    if not uncovered:
        return f"{opening} Access and decoding of what was measured are those of the claim."
    if len(uncovered) == len(best):
        return (
            f"{opening} Access and decoding of what was measured are outside the claim ({_claim_reasons_text(best)})."
        )
    return f"{opening} It does not cover {uncovered[0].setting} access ({_claim_reasons_text(uncovered)})."


def _protection_unit_phrase(claim: Claim) -> str:
    """What is protected; of a shard, that its epsilon is not about the single records that recall counts."""
    said = phrases.protection_unit_label(claim)
    if not claim.shard:
        return said
    return f"{said}: it promises nothing about a single record" if said == claim.unit else said


def _claim_reasons_text(findings: list[Finding]) -> str:
    return "; ".join(dict.fromkeys(finding.claim_reason or "no reason recorded" for finding in findings))


def _perplexity_cost_sentence(result: AuditResult, target: TargetRecord) -> str:
    base = next((t.perplexity for t in result.targets if t.name == UNDEFENDED), None)
    if target.perplexity is None or base is None or not base.value > 0:
        return "Its cost in perplexity was not measured."
    change = phrases.format_relative_change(target.perplexity.value / base.value - 1)
    return (
        f"Held-out perplexity is {phrases.format_value(target.perplexity)} "
        f"against {phrases.format_value(base)} ({change})."
    )


def _explained_targets(result: AuditResult) -> list[TargetRecord]:
    """The defended targets of which some row says what their effect is due to."""
    return [target for target in _defended_targets(result) if explained_row(result, target.name)]


def explained_row(result: AuditResult, target: str) -> Finding | None:
    """The row whose chain is told: the strongest attack's, of equals the one that fell most; else a probe's."""

    def rank(finding: Finding) -> tuple[float, float]:
        assert finding.chain is not None
        return (_recall_measurement(finding).value if _has_recall(finding) else -1.0, -finding.chain.whole.value)

    return max((f for f in result.findings if f.target == target and f.chain), key=rank, default=None)


def explain_effect(result: AuditResult, target: TargetRecord) -> str:
    """What each cause is credited with: its own step, and no more than that."""
    finding = explained_row(result, target.name)
    assert finding is not None and finding.chain is not None  # `_explained_targets` has seen to it
    where = finding.setting
    whole = finding.chain.whole
    told = "; ".join(
        map(
            phrases.step_effect_in_full,
            phrases.steps_between_targets(phrases.steps_to_target(finding.chain, target.name)),
        )
    )
    of = f"{finding.attack}, {where}{phrases.note_above_nonmembers(whole)}, n {whole.n:,}"
    opening = f"Of {target.title}'s {phrases.points(whole)} against no defense ({of})"
    beyond = phrases.steps_to_target(finding.chain, target.name, beyond=True)
    further = (f"One step further, {phrases.step_effect_in_full(step)}." for step in beyond)
    return " ".join((f"{opening}, by control rows: {told}.", *further, *_likelihood_causes_sentences(target)))


def _likelihood_causes_sentences(target: TargetRecord) -> list[str]:
    """What no guess shows: what each cause takes of the members' advantage in likelihood."""
    if target.likelihood is None:
        return []
    told = "; ".join(
        map(
            phrases.step_effect_in_full,
            phrases.steps_between_targets(phrases.steps_to_target(target.likelihood, target.name)),
        )
    )
    whole = phrases.points(target.likelihood.whole)
    return [f"By {phrases.MORE_LIKELY}, {whole} (n {target.likelihood.whole.n:,}): {told}."]
