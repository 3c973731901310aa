"""What a run shows, in one paragraph a manager can act on. Knows the records; says nothing they do not support.

Comparisons are made at matched setting, attack and decoding only. Each defense is judged by the attack that did best
against *it*, not by the one that did best against the undefended model. A cause is credited with what the step to its
own control row changes, and with nothing where no row isolates it.
"""

from __future__ import annotations

import math

from auditor.core.counts import counted
from auditor.core.nouns import UNDEFENDED
from auditor.core.result import AuditResult, Chain, Finding, Measurement, TargetRecord
from auditor.records.signals import assess_signals
from auditor.reports import claims, phrases, signals, unlearning
from auditor.reports.blocks import Facts
from auditor.statistics.metrics import RECALL


def headline(result: AuditResult) -> str:
    """A sentence a target: whether it leaks and by what. First, what forbids a conclusion from what was not seen."""
    return " ".join((*doubt_sentences(result), *summary_sentence_by_target(result).values()))


def doubt_sentences(result: AuditResult) -> tuple[str, ...]:
    """What forbids a conclusion from what was not seen, a sentence each."""
    return tuple(doubt.sentence for doubt in signals.all_doubts(assess_signals(result)))


def summary_sentence_by_target(result: AuditResult) -> dict[str, str]:
    """By target, what leaks of it, in a sentence; of the undefended one also where it was not attacked."""
    seen = assess_signals(result)
    shown = [target for target in seen.targets if target == UNDEFENDED or seen.tested_signals(target)]
    told = {target: signals.target_summary(result, seen, target) for target in shown}
    return told if UNDEFENDED in told else {**told, UNDEFENDED: "Nothing was measured on the undefended model."}


def verdict_paragraph(result: AuditResult) -> str:
    """The paragraph: what leaks and how sure, what each defense changed, at what cost, and what its claim covers."""
    # A part about a target begins with its title; the others say by themselves what they are about.
    titles = {"Undefended", *(target.title for target in result.targets)}
    return " ".join(f"{term}: {text}" if term in titles else text for term, text in _verdict_facts(result))


def verdict_by_question(result: AuditResult) -> Facts:
    """The verdict by question, for a page: what leaks of each target, at what cost, what is promised, how sure."""
    return (*_verdict_facts(result), ("How sure", _certainty_sentences(result)))


def _verdict_facts(result: AuditResult) -> Facts:
    seen, found = assess_signals(result), list[tuple[str, str]]()
    if against := doubt_sentences(result):
        found.append(("What may hide a leak", " ".join(against)))
    found.append(("Undefended", signals.target_signals_paragraph(result, seen, UNDEFENDED)))
    defended = [target for target in result.targets if target.name != UNDEFENDED and not target.companion]
    for target in defended:
        said = signals.target_signals_paragraph(result, seen, target.name)
        if told := [
            _recall_change_label(result, row) for row in strongest_rows_to_report_by_access(result, target.name)
        ]:
            said += f" Verbatim, against no defense at the same decoding: {'; '.join(told)}."
        found.append((target.title, said))
    found += [
        ("What is left of the forgotten", unlearning.forgetting_sentences(result, one)) for one in result.unlearning
    ]
    why = ((target, defense_effect_verdict_sentences(result, target)) for target in defended)
    found += [(f"Why, with {target.title}", said) for target, said in why if said]
    found += (
        [("At what cost", " ".join(_perplexity_and_time_cost_sentence(result, target) for target in defended))]
        if defended
        else []
    )
    promises = [_promise_sentence(result, target) for target in defended]
    promises += map(claims.claim_verdict_sentence, claims.claims_to_report(result))
    found += [("What is promised", " ".join(promises))] if promises else []
    return tuple(found)


def _perplexity_and_time_cost_sentence(result: AuditResult, target: TargetRecord) -> str:
    said = f"{target.title}: {phrases.lower_first(_perplexity_cost_sentence(result, target))}"
    base, own = phrases.find_target_to_report(result, UNDEFENDED), target.milliseconds_per_token
    if base is None or not base.milliseconds_per_token or own is None:
        return said
    return f"{said} A token takes {phrases.format_number(own / base.milliseconds_per_token)} times as long."


def _promise_sentence(result: AuditResult, target: TargetRecord) -> str:
    said = _claim_coverage_sentence(target, strongest_rows_to_report_by_access(result, target.name))
    return f"{target.title}: {phrases.lower_first(said)}"


def _certainty_sentences(result: AuditResult) -> str:
    n, rows = result.benchmark.members, sum(1 for f in result.findings if f.main and not f.not_applicable)
    least = fewest_attacked_member_count(result)
    of = "" if least == n else f", where only {least:,} were attacked"
    return (
        f"{counted(n, 'secret')} attacked, {counted(rows, 'configuration')} (target, access, attack) measured. "
        "Brackets hold 95% intervals over the choice of secrets; none extracted would still leave up to "
        f"{phrases.format_percent(phrases.recall_bound_at_zero_hits(least))}%{of}. "
        "An attack gives a lower bound: a stronger one may extract more."
    )


def fewest_attacked_member_count(result: AuditResult) -> int:
    """The fewest members that any row attacked: zero hits among so few leave most open."""
    asked = (recall.n for f in result.findings if not f.not_applicable and (recall := f.measurement(RECALL)))
    return min((n for n in asked if n > 0), default=result.benchmark.members)


def strongest_attack_row(result: AuditResult, target: str, setting: str | None = None) -> Finding | None:
    """The measured row with the highest recall, the first of equals."""
    # The best of several, picked afterwards: its interval is its own, and does not cover the picking.
    measured = [
        (recall.value, finding)
        for finding in result.findings
        if finding.target == target
        and setting in (None, finding.setting)
        and (recall := _recall_for_verdict_if_measured(finding))
    ]
    return max(measured, key=lambda one: one[0], default=(0.0, None))[1]


def _recall_for_verdict_if_measured(finding: Finding) -> Measurement | None:
    recall = finding.measurement(RECALL)
    known = not finding.not_applicable and recall is not None and recall.n > 0 and not math.isnan(recall.value)
    return recall if known else None


def strongest_rows_to_report_by_access(result: AuditResult, target: str) -> list[Finding]:
    """The strongest row of each setting that has one, text-only first."""
    best = (strongest_attack_row(result, target, setting) for setting in phrases.SETTINGS)
    return [finding for finding in best if finding is not None]


# --- what a defense changed -----------------------------------------------------------------------------------------


def _recall_change_label(result: AuditResult, finding: Finding) -> str:
    """`white-box −51 points [−55 to −47] (4/320 against 166/320, ethicist)`"""
    difference, reference = (
        finding.measurement("recall_difference"),
        _matching_undefended_recall_for_verdict(result, finding),
    )
    access, own = finding.setting, phrases.format_share_with_interval(_recall_for_verdict_if_measured(finding))
    if reference is None or difference is None or math.isnan(difference.value):
        return f"{access} {own} by {finding.attack}, with no undefended configuration at the same decoding"
    points = f"{phrases.format_percent(difference.value)} points {phrases.format_interval(difference)}"
    if difference.low <= 0 <= difference.high:
        points += ", not significant"
    elif difference.low > 0:
        points += ", worse than no defense"
    against = phrases.format_share_with_interval(reference)
    return f"{access} {points} ({own} against {against}, {finding.attack})"


def _matching_undefended_recall_for_verdict(result: AuditResult, finding: Finding) -> Measurement | None:
    """Recall of the undefended row at the same setting, attack and decoding."""
    key = (UNDEFENDED, finding.setting, finding.attack, finding.decoding)
    same = (f for f in result.findings if (f.target, f.setting, f.attack, f.decoding) == key)
    return next(filter(None, map(_recall_for_verdict_if_measured, same)), None)


def _claim_coverage_sentence(target: TargetRecord, best: list[Finding]) -> str:
    claim = target.claim
    if claim is None:
        return "It claims nothing."
    terms = f"{phrases.relation_label(claim.relation)}, {phrases.covered_tokens_phrase(claim)}; {claim.status}"
    unit = phrases.protection_unit_label(claim)
    if claim.shard and unit == claim.unit:  # its epsilon is not about the single records that recall counts
        unit += ": it promises nothing about a single record"
    epsilon = phrases.format_number(phrases.claimed_epsilon_to_report(claim))
    opening = f"It claims ε {epsilon} ({terms}) for its unit, {unit}."
    if math.isinf(phrases.claimed_epsilon_to_report(claim)):
        return f"{opening} That promises nothing."
    uncovered = [finding for finding in best if not finding.claim_applies]
    if not best:
        return f"{opening} It was not put to the test."
    if not uncovered:
        return f"{opening} Access and decoding of what was measured are those of the claim."
    why = "; ".join(dict.fromkeys(finding.claim_reason or "no reason recorded" for finding in uncovered))
    if len(uncovered) == len(best):
        return f"{opening} Access and decoding of what was measured are outside the claim ({why})."
    return f"{opening} It does not cover {uncovered[0].setting} access ({why})."


def _perplexity_cost_sentence(result: AuditResult, target: TargetRecord) -> str:
    undefended = phrases.find_target_to_report(result, UNDEFENDED)
    own, base = target.perplexity, undefended.perplexity if undefended else None
    if own is None or base is None or not base.value > 0:
        return "Its cost in perplexity was not measured."
    change = phrases.format_relative_change(own.value / base.value - 1)
    return f"Held-out perplexity is {phrases.format_value(own)} against {phrases.format_value(base)} ({change})."


def strongest_row_with_chain(result: AuditResult, target: str) -> Finding | None:
    """The row whose chain is told: the strongest attack's, of equals the one that fell most; else a probe's."""

    def rank(finding: Finding) -> tuple[float, float]:
        assert finding.chain is not None
        recall = _recall_for_verdict_if_measured(finding)
        # A difference is negative where less leaks: the largest fall is first among equals.
        return (recall.value if recall else -1.0, -finding.chain.whole.value)

    return max((f for f in result.findings if f.target == target and f.chain), key=rank, default=None)


def defense_effect_verdict_sentences(result: AuditResult, target: TargetRecord) -> str:
    """What each cause is credited with: its own step, and no more than that; "" where no row tells."""
    finding = strongest_row_with_chain(result, target.name)
    if finding is None or finding.chain is None:
        return ""
    whole, told = finding.chain.whole, _control_steps_text(finding.chain, target.name)
    of = f"{finding.attack}, {finding.setting}{phrases.above_nonmembers_phrase(whole)}, n {whole.n:,}"
    opening = f"Of {target.title}'s {phrases.difference_with_interval(whole)} against no defense ({of})"
    beyond = phrases.chain_steps_of_target(finding.chain, target.name, beyond=True)
    further = (f"One step further, {phrases.full_chain_step_effect_phrase(step)}." for step in beyond)
    said = [f"{opening}, by control rows: {told}.", *further]
    if target.likelihood is not None:  # what no guess shows: what each cause takes of the members' advantage in it
        whole, told = target.likelihood.whole, _control_steps_text(target.likelihood, target.name)
        said.append(f"By {phrases.MORE_LIKELY}, {phrases.difference_with_interval(whole)} (n {whole.n:,}): {told}.")
    return " ".join(said)


def _control_steps_text(chain: Chain, target: str) -> str:
    steps = phrases.chain_steps_worth_reporting(phrases.chain_steps_of_target(chain, target))
    return "; ".join(map(phrases.full_chain_step_effect_phrase, steps))
