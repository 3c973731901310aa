"""What a run shows, in one paragraph a manager can act on. Knows the records; says nothing they do not support.

Comparisons are made at matched setting, attack and decoding only. Each defense is judged by the attack that did best
against *it*, not by the one that did best against the undefended model. A cause is credited with what the step to its
own control row changes, and with nothing where no row isolates it.
"""

from __future__ import annotations

import math

from auditor.core.nouns import UNDEFENDED, Claim
from auditor.core.result import AuditResult, Finding, Measurement, TargetRecord
from auditor.reports import claims, unlearning, words
from auditor.reports.blocks import Facts
from auditor.statistics.memorised import RECORDS
from auditor.statistics.metrics import RECALL, auc_of, excess_of, floor_of


def headline(result: AuditResult) -> str:
    """One sentence: what came out, and what still did with each defense; first, where they differ, who was compared."""
    return " ".join((*_differ(result), _came_out(result)))


def _differ(result: AuditResult) -> list[str]:
    """That members and non-members are no match: whatever tells them apart without having seen the model."""
    if blind := _told_apart(result, "blind"):
        return [
            "Members and non-members differ in kind: without any model, their tokens and lengths tell them apart "
            f"(AUC {words.with_bounds(blind)}), so no membership number here means what it says, and what members leak "
            "beyond non-members may be that difference."
        ]
    if reference := _told_apart(result, "reference_alone"):
        return [
            f"The reference alone tells members from non-members (AUC {words.with_bounds(reference)}): it saw some of "
            "them, or they differ in kind, and either way no membership number here means what it says."
        ]
    return []


def _told_apart(result: AuditResult, control: str) -> Measurement | None:
    """How well, where beyond chance, what never saw the model tells members from non-members."""
    seen = (finding.measurement(auc_of(control)) for finding in result.findings)
    return max((m for m in seen if m is not None and m.low > 0.5), key=lambda m: m.low, default=None)


def _came_out(result: AuditResult) -> str:
    best = strongest(result, UNDEFENDED)
    if best is None:
        probed = _probed(result, UNDEFENDED)
        return f"Undefended: {probed}." if probed else "Nothing was measured on the undefended model."
    recall = _recall(best)
    if not words.hits(recall):
        bound = words.percent(recall.high)
        return f"No leakage seen in {recall.n:,} attempts; up to {bound}% of such secrets could still come out."
    if not _above_floor(best):
        return "Inconclusive: what came out cannot be told from guessing."
    left = tuple(filter(None, (_left(result, target) for target in _defended(result))))
    opening = f"{words.value(recall)} of the attacked secrets came out of the undefended model verbatim"
    return "; ".join((opening, *left)) + "."


def verdict(result: AuditResult) -> str:
    """The paragraph: what got out and how sure, what each defense changed, at what cost, and what its claim covers."""
    sentences = [*_differ(result), *_undefended(result), *_drawn(result)]
    for target in _defended(result):
        sentences += _defense(result, target)
    sentences += [unlearning.sentence(result, one) for one in result.unlearning]
    sentences += [*(because(result, target) for target in _explained(result)), *_exposed(result)]
    sentences += [claims.sentence(stands) for stands in claims.told(result)]
    return " ".join(sentences)


def answers(result: AuditResult) -> Facts:
    """The verdict by question, for a page: what came out, what did with each defense, at what cost, how sure."""
    found: list[tuple[str, str]] = [("What came out", " ".join([*_undefended(result), *_drawn(result)]))]
    for target in _defended(result):
        found.append(
            (f"With {target.title}", " ".join([*_change_sentences(result, target), *_refuted(result, target)]))
        )
    found += [("What is left of the forgotten", unlearning.sentence(result, one)) for one in result.unlearning]
    found += [(f"Why, with {target.title}", because(result, target)) for target in _explained(result)]
    found += [("At what cost", " ".join(_costs(result)))] if _defended(result) else []
    promises = [*_promises(result), *(claims.sentence(stands) for stands in claims.told(result))]
    found += [("What is promised", " ".join(promises))] if promises else []
    return (*found, ("How sure", _how_sure(result)))


def _change_sentences(result: AuditResult, target: TargetRecord) -> list[str]:
    best = _best(result, target)
    if best:
        return [f"With {target.title}, {', and '.join(_change(result, finding) for finding in best)}."]
    probed = _probed(result, target.name)
    return [f"{target.title}: {probed}." if probed else f"{target.title} was not measured."]


def _costs(result: AuditResult) -> list[str]:
    return [
        f"{target.title}: {_lowered(_cost(result, target))}{_slower(result, target)}" for target in _defended(result)
    ]


def _slower(result: AuditResult, target: TargetRecord) -> str:
    base = next((t.milliseconds_per_token for t in result.targets if t.name == UNDEFENDED), None)
    if not base or target.milliseconds_per_token is None:
        return ""
    return f" A token takes {words.number(target.milliseconds_per_token / base)} times as long."


def _promises(result: AuditResult) -> list[str]:
    return [f"{target.title}: {_lowered(_coverage(target, _best(result, target)))}" for target in _defended(result)]


def _lowered(sentence: str) -> str:
    return sentence[:1].lower() + sentence[1:]


def _how_sure(result: AuditResult) -> str:
    n, rows = result.benchmark.members, sum(1 for f in result.findings if f.main and not f.not_applicable)
    return (
        f"{n:,} secrets were attacked, {rows} {'row' if rows == 1 else 'rows'} of target, setting and attack measured. "
        f"Brackets hold 95% intervals over the choice of secrets; a share of none would still leave up to "
        f"{words.percent(words.zero_hits_bound(n))}%. An attack gives a lower bound: a stronger one may get more out."
    )


def strongest(result: AuditResult, target: str, setting: str | None = None) -> Finding | None:
    """The measured row with the highest recall, the first of equals."""
    measured = [
        finding
        for finding in result.findings
        if finding.target == target and setting in (None, finding.setting) and _measured(finding)
    ]
    return max(measured, key=lambda finding: _recall(finding).value, default=None)


def _measured(finding: Finding) -> bool:
    recall = finding.measurement(RECALL)
    return not finding.not_applicable and recall is not None and recall.n > 0 and not math.isnan(recall.value)


def _recall(finding: Finding) -> Measurement:
    recall = finding.measurement(RECALL)
    assert recall is not None  # _measured() chose the finding
    return recall


def _best(result: AuditResult, target: TargetRecord) -> list[Finding]:
    """The strongest row of each setting that has one, inside the claim first."""
    return [f for f in (strongest(result, target.name, setting) for setting in words.SETTINGS) if f is not None]


def _defended(result: AuditResult) -> list[TargetRecord]:
    return [target for target in result.targets if target.name != UNDEFENDED and not target.companion]


# --- what got out ---------------------------------------------------------------------------------------------------


def _undefended(result: AuditResult) -> list[str]:
    best = strongest(result, UNDEFENDED)
    if best is None and (probed := _probed(result, UNDEFENDED)):
        return [f"No attack on single secrets was measured on the undefended model, only {probed}."]
    if best is None:
        reasons = {f.not_applicable for f in result.findings if f.target == UNDEFENDED and f.not_applicable}
        why = f" ({'; '.join(sorted(reasons))})" if reasons else ""
        return [f"Nothing was measured on the undefended model{why}, so this run supports no conclusion."]
    recall = _recall(best)
    if not words.hits(recall):
        return [
            f"No secret came out of the undefended model in {recall.n:,} attempts.",
            f"No leakage seen is not no leakage: with 0 hits among {recall.n:,} secrets the 95% upper bound is "
            f"{words.percent(recall.high)}%, and a stronger attack may find more.",
        ]
    measured = sum(1 for f in result.findings if f.target == UNDEFENDED and _measured(f))
    chosen = f", the strongest of {measured} undefended rows" if measured > 1 else ""
    opening = f"Without a defense, {words.share(recall)} of the attacked secrets came out verbatim"
    return [f"{opening} ({best.attack}, {best.decoding}{chosen}; brackets hold 95% intervals); {_floor(best)}."]


def _drawn(result: AuditResult) -> list[str]:
    """What came out of each target without any prefix, where texts were drawn; beside held-out records, if any."""
    seen = []
    for finding in result.findings:
        records, floor = finding.measurement(RECORDS), finding.measurement(floor_of(RECORDS))
        if records is None:
            continue
        beside = f", and {words.value(floor)} {floor.note}" if floor else ""
        title = words.row_title(result, finding)
        seen.append(f"{title} {words.value(records)} {records.note} in {records.n:,} texts{beside}")
    return [f"Without any prefix, records came out: {'; '.join(seen)}."] if seen else []


def _probed(result: AuditResult, target: str) -> str:
    """The main number of each row that has no recall, with its floor: what probes saw of a target."""
    seen = []
    for finding in result.findings:
        main = finding.main
        if finding.target != target or main is None or finding.measurement(RECALL):
            continue
        floor = finding.measurement(floor_of(main.name))
        beside = f" (non-members {words.with_bounds(floor)})" if floor else ""
        blind = finding.measurement(auc_of("blind"))
        beside = f" (without a model {words.with_bounds(blind)})" if blind else beside
        seen.append(f"{_lowered(words.label(main.name))} {words.between(finding, main)}{beside}")
    return "; ".join(seen)


def _above_floor(finding: Finding) -> bool:
    """Whether members come out more often than records the model never saw, beyond the intervals."""
    excess, floor = finding.measurement(excess_of(RECALL)), finding.measurement(floor_of(RECALL))
    if excess is not None and not math.isnan(excess.low):
        return excess.low > 0
    return floor is None or floor.n == 0 or _recall(finding).low > floor.high


def _floor(finding: Finding) -> str:
    floor, excess = finding.measurement(floor_of(RECALL)), finding.measurement(excess_of(RECALL))
    if floor is None or floor.n == 0:
        return "no non-members were attacked, so how much of this is guessing is not known"
    seen = f"of records that were never trained on, {words.share(floor)} did"
    if not _above_floor(finding):
        return f"{seen}: the two cannot be told apart, and this run is inconclusive"
    if excess is None or math.isnan(excess.low):
        return f"{seen}: guessing does not explain what came out, if non-members are alike"
    least = words.percent(excess.low)
    return f"{seen}, so at least {least}% were learned, not guessed, with 95% confidence, if non-members are alike"


# --- what a defense changed -----------------------------------------------------------------------------------------


def _defense(result: AuditResult, target: TargetRecord) -> list[str]:
    best = _best(result, target)
    price = [_cost(result, target), _coverage(target, best)] if best else []
    return [*_change_sentences(result, target), *price, *_refuted(result, target)]


def _refuted(result: AuditResult, target: TargetRecord) -> list[str]:
    """That the claim itself was seen to fail, whatever did or did not come out."""
    found = (f.measurement("claim_violations") for f in result.findings if f.target == target.name)
    return [
        f"The claim of {target.title} is VIOLATED: {words.value(m)} times in {m.n:,} queries looked at (see its notes)."
        for m in found
        if m is not None and m.value > 0
    ][:1]


def _change(result: AuditResult, finding: Finding) -> str:
    recall = _recall(finding)
    where = "in the worst case" if finding.setting == "worst" else "when only sampled tokens come back"
    bound = "" if words.hits(recall) else f", so up to {words.percent(recall.high)}% is not ruled out"
    return f"{words.share(recall)} came out {where} ({finding.attack}{bound}) {_compared(result, finding)}"


def _compared(result: AuditResult, finding: Finding) -> str:
    difference, reference = finding.measurement("recall_difference"), _matched(result, finding)
    if reference is None or difference is None or math.isnan(difference.value):
        return "with no undefended row at the same decoding to compare with"
    points = f"{words.percent(difference.value)} points {words.bounds(difference)}"
    if difference.low <= 0 <= difference.high:
        points += ", inconclusive: these secrets cannot tell the two apart"
    elif difference.low > 0:
        points += ", worse than no defense"
    return f"against {words.share(_recall(reference))} undefended at the same decoding ({points})"


def _matched(result: AuditResult, finding: Finding) -> Finding | None:
    """The undefended row at the same setting, attack and decoding."""
    key = (finding.setting, finding.attack, finding.decoding)
    undefended = (f for f in result.findings if f.target == UNDEFENDED and _measured(f))
    return next((f for f in undefended if (f.setting, f.attack, f.decoding) == key), None)


def _coverage(target: TargetRecord, best: list[Finding]) -> str:
    claim = target.claim
    if claim is None:
        return "It claims nothing."
    terms = f"{words.relation(claim.relation)}, {words.covers(claim)}; {claim.status}"
    opening = f"It claims ε {words.number(words.claimed(claim))} ({terms}) for its unit, {_unit(claim)}."
    if math.isinf(words.claimed(claim)):
        return f"{opening} That promises nothing."
    uncovered = [finding for finding in best if not finding.claim_applies]
    if not best:
        return f"{opening} It was not put to the test."
    if not uncovered:
        return f"{opening} Access and decoding of what was measured are those of the claim."
    if len(uncovered) == len(best):
        return f"{opening} Access and decoding of what was measured are outside the claim ({_reasons(best)})."
    which = "worst case" if uncovered[0].setting == "worst" else "row with only sampled tokens"
    return f"{opening} It does not cover the {which} ({_reasons(uncovered)})."


def _unit(claim: Claim) -> str:
    """What is protected; of a shard, that its epsilon is not about the single records that recall counts."""
    said = words.unit(claim)
    if not claim.shard:
        return said
    return f"{said}: it promises nothing about a single record" if said == claim.unit else said


def _reasons(findings: list[Finding]) -> str:
    return "; ".join(dict.fromkeys(finding.claim_reason or "no reason recorded" for finding in findings))


def _cost(result: AuditResult, target: TargetRecord) -> str:
    base = next((t.perplexity for t in result.targets if t.name == UNDEFENDED), None)
    if target.perplexity is None or base is None or not base.value > 0:
        return "Its cost in perplexity was not measured."
    change = words.change(target.perplexity.value / base.value - 1)
    return f"Held-out perplexity is {words.value(target.perplexity)} against {words.value(base)} ({change})."


def _explained(result: AuditResult) -> list[TargetRecord]:
    """The defended targets of which some row says what their effect is due to."""
    return [target for target in _defended(result) if explained(result, target.name)]


def explained(result: AuditResult, target: str) -> Finding | None:
    """The row whose chain is told: the strongest attack's, of equals the one that fell most; else a probe's."""

    def rank(finding: Finding) -> tuple[float, float]:
        assert finding.chain is not None
        return (_recall(finding).value if _measured(finding) else -1.0, -finding.chain.whole.value)

    return max((f for f in result.findings if f.target == target and f.chain), key=rank, default=None)


def because(result: AuditResult, target: TargetRecord) -> str:
    """What each cause is credited with: its own step, and no more than that."""
    finding = explained(result, target.name)
    assert finding is not None and finding.chain is not None  # `_explained` has seen to it
    where = "worst case" if finding.setting == "worst" else "only sampled tokens"
    whole = finding.chain.whole
    told = "; ".join(map(words.credited_in_full, words.steps(finding.chain, target.name)))
    of = f"{finding.attack}, {where}{words.over(whole)}, n {whole.n:,}"
    opening = f"Of {target.title}'s {words.points(whole)} against no defense ({of})"
    beyond = words.steps(finding.chain, target.name, beyond=True)
    further = (f"One step further, {words.credited_in_full(step)}." for step in beyond)
    return " ".join((f"{opening}, by control rows: {told}.", *further, *_likelier(target)))


def _likelier(target: TargetRecord) -> list[str]:
    """What no guess shows: what each cause takes of the members' advantage in likelihood."""
    if target.likelihood is None:
        return []
    told = "; ".join(map(words.credited_in_full, words.steps(target.likelihood, target.name)))
    whole = words.points(target.likelihood.whole)
    return [f"By {words.LIKELIER}, {whole} (n {target.likelihood.whole.n:,}): {told}."]


def _exposed(result: AuditResult) -> list[str]:
    """What became of the canaries on each target; said once, beside what attacks got out."""
    seen = []
    for finding in result.findings:
        exposure, exposed = finding.measurement("exposure"), finding.measurement("exposed_share")
        if exposure is None or exposed is None or not exposed.n:
            continue
        title = words.target_title(result, finding.target)
        seen.append(f"{title} {words.with_bounds(exposure)} bits, {words.hits(exposed)} of {exposed.n:,} beyond chance")
    return [f"Mean exposure of canaries: {'; '.join(seen)}."] if seen else []


def _left(result: AuditResult, target: TargetRecord) -> str:
    best = _best(result, target)
    left = [_share_left(_recall(f)) + (" in the worst case" if f.setting == "worst" else "") for f in best]
    return f"with {target.title} {', or '.join(left)}" if left else ""


def _share_left(recall: Measurement) -> str:
    """A zero is never said without what it leaves open."""
    return words.value(recall) if words.hits(recall) else f"none seen (at most {words.percent(recall.high)}%)"
