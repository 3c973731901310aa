"""Find signs that a run hides a leak.

Such signs are numbers that contradict each other, and non-members that differ from members in kind.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product, starmap
from typing import TypeGuard

from auditor.core.nouns import UNDEFENDED
from auditor.core.result import AuditResult, Doubt, Finding, Measurement
from auditor.statistics.distributions import compute_binomial_cdf
from auditor.statistics.metrics import ADJUSTED_AUC, AT_LEAST, CONTROLS, RECALL, name_auc

ANY = "any_of_k"
EXACT = "extraction_probability"
_ANCESTRAL = "ancestral"
# hit counts less probable than this contradict the measured probabilities; attacks share the level
_IMPROBABLE = 0.01


def is_measured(m: Measurement | None) -> TypeGuard[Measurement]:
    return m is not None and m.n > 0 and not math.isnan(m.value)


def is_auc_above_chance(m: Measurement) -> bool:
    return m.low > 0.5


def has_unlike_nonmembers(finding: Finding) -> bool:
    """Test if members and non-members differ in kind.

    They do if a score that never queries the target separates members from non-members.
    """
    for control in CONTROLS:
        m = finding.measurement(name_auc(control))
        if m is not None and is_auc_above_chance(m):
            return True
    return False


def list_nonmember_doubts(result: AuditResult) -> tuple[Doubt, ...]:
    """Return one doubt if members and non-members differ in kind, otherwise ().

    They differ if a score that never queries the target separates them. A doubt is a sentence that
    tells why the numbers may be wrong.
    """

    def highest(control: str) -> Measurement | None:
        best = None
        for finding in result.findings:
            m = finding.measurement(name_auc(control))
            if m is None or not is_auc_above_chance(m):
                continue
            if best is None or m.low > best.low:
                best = m
        return best

    if blind := highest("blind"):
        reason = (
            "Members and non-members differ in kind: without any model, their tokens and lengths "
            f"distinguish them ({_format_auc(blind)}), so {_describe_adjustment(result)}, and the "
            "excess leakage of members may only be that difference."
        )
        if not result.plan.get("user_column"):
            reason += " Are several records of one person or text? Name its column: --user-column."
    elif reference := highest("reference_alone"):
        reason = (
            "The reference alone distinguishes members from non-members "
            f"({_format_auc(reference)}): it saw some of them, or they differ in kind; either way, "
            f"{_describe_adjustment(result)}."
        )
    else:
        return ()
    return (Doubt("non-members", reason),)


def _describe_adjustment(result: AuditResult) -> str:
    """Return a clause about the adjusted AUC, which decides if members and non-members differ in
    kind.

    If no adjusted AUC was measured, the clause says that no membership number can be trusted.
    """
    adjusted = []
    reason = ""
    for finding in result.findings:
        m = finding.measurement(ADJUSTED_AUC)
        if is_measured(m):
            adjusted.append(m)
        elif m is not None and not reason:
            reason = f" (too few texts in common to adjust for it: {m.note})"
    if not adjusted:
        return f"no membership number here is reliable{reason}"
    strongest = max(adjusted, key=lambda m: max(m.low, 1 - m.high))
    return f"the verdict uses the adjusted {_format_auc(strongest)}, on what both have in common"


def _format_auc(m: Measurement) -> str:
    return f"AUC {m.value:.3f} [{m.low:.3f}–{m.high:.3f}]"


def list_contradiction_doubts(
    result: AuditResult, target: str, greedy: Measurement | None
) -> Iterator[Doubt]:
    """Yield a doubt for each pair of a target's numbers that contradict each other.

    A doubt is a sentence that tells why the numbers may be wrong. For example, an attack extracts
    fewer secrets than the measured probabilities predict. A filter or a truncation may then hide
    what the model knows.

    Args:
        result: result of the run.
        target: name of the target.
        greedy: share of secrets that greedy decoding of the undefended model extracts; None if
            unknown.
    """
    rows = [f for f in result.select_findings(target) if not f.not_applicable]
    attacks = [f for f in rows if is_measured(f.measurement(RECALL))]
    level = _IMPROBABLE / max(1, len(attacks))
    # an ordered set; "": the numbers agree
    sentences = dict.fromkeys(starmap(_describe_too_few_hits, product(rows, attacks, [level])))
    if target == UNDEFENDED and greedy is not None:
        sentences |= dict.fromkeys(_describe_greedy_contradiction(greedy, rows, attacks))
    for sentence in filter(None, sentences):
        yield Doubt("contradiction", sentence)


def _describe_too_few_hits(probe: Finding, attack: Finding, level: float) -> str:
    """Return a sentence if an attack has far fewer hits than a probe predicts, otherwise "".

    A secret is a hit if any guess is right. The probe measured p, the mean probability that one
    sample is the secret. Among n independent secrets, the probability of at most k hits is then at
    most the tail of a binomial distribution with n and p, for k <= n p - 1 (Hoeffding 1956, Theorem
    4).

    Args:
        probe: finding with the extraction probability.
        attack: finding with the recall.
        level: hit counts that are less probable contradict the probability.
    """
    untruncated = probe.measurement(f"{EXACT}_{_ANCESTRAL}")
    if untruncated is not None and attack.decoding.startswith(_ANCESTRAL):
        probability: Measurement | None = untruncated
    else:
        probability = probe.measurement(EXACT) or probe.measurement(f"{EXACT}{AT_LEAST}")
    recall = attack.measurement(RECALL)
    any_recall = attack.measurement(ANY)
    if recall is None or not is_measured(probability):
        return ""
    hits = max(m.hits for m in filter(is_measured, (recall, any_recall)))
    # Both methods attacked the same secrets: use the mean itself.
    if probability.n == recall.n:
        p = probability.value
    else:
        p = probability.low
    if hits > recall.n * p - 1 or (tail := float(compute_binomial_cdf(hits, recall.n, p))) >= level:
        return ""
    return (
        f"{attack.attack} extracts {hits:,} of {recall.n:,}, but at the measured probability of "
        f"{_format_percent(p)} one sample of each would extract about {recall.n * p:.0f} "
        f"({_format_tail_probability(tail)} by chance): a filter, a truncation or another "
        "distribution hides what the model knows."
    )


def _describe_greedy_contradiction(
    greedy: Measurement, rows: Sequence[Finding], sampled_rows: Sequence[Finding]
) -> Iterator[str]:
    n_greedy = greedy.hits
    hits = []
    # Of each attack that draws in its own way, the most in any setting: a text-only attacker tunes
    # a soft prompt on another model.
    n_by_attack = dict[str, int]()
    for f in sampled_rows:
        counts = []
        for m in filter(is_measured, (f.measurement(RECALL), f.measurement(ANY))):
            if m.n == greedy.n:  # else it attacked other secrets
                counts.append(m.hits)
        if counts and f.draws_its_own_way:
            n_by_attack[f.attack] = max(*counts, n_by_attack.get(f.attack, 0))
        else:
            hits += counts
    for attack, n_extracted in n_by_attack.items():
        if (tail := _bound_mcnemar_tail(n_greedy, n_extracted, greedy.n)) < _IMPROBABLE:
            yield (
                f"{attack} extracts {n_extracted:,} of {greedy.n:,}, but greedy decoding, which "
                f"needs no tuning, extracts {n_greedy:,} (paired; {_format_tail_probability(tail)} "
                "by chance if both were equally strong): the soft prompt or the sampling hides "
                "what the model knows."
            )
    if (
        hits
        and not any(hits)
        and (tail := _bound_mcnemar_tail(n_greedy, 0, greedy.n)) < _IMPROBABLE
    ):
        yield (
            f"Greedy decoding extracts {n_greedy:,} of {greedy.n:,}, but no attack extracts any "
            f"({_format_tail_probability(tail)} by chance if all were equally strong): the samples "
            "do not come from the model's own distribution."
        )
    for row in rows:
        for m in row.measurements:
            # Without this prefix, `removeprefix` returns the full name.
            level = m.name.removeprefix("discoverable_1_")
            # An equal number of secrets is assumed to be the secrets of greedy decoding.
            n_probable = 0
            if level != m.name and _parse_discoverable_level(level) > 0.5 and m.n == greedy.n:
                n_probable = m.hits
            if (
                n_probable > n_greedy
            ):  # above one half, every token of the suffix is the most probable token
                yield (
                    f"{n_probable:,} of {m.n:,} suffixes have an extraction probability of "
                    f"{_format_percent(_parse_discoverable_level(level))} or more, so greedy "
                    f"decoding must extract them, but it extracts {n_greedy:,}."
                )


def _bound_mcnemar_tail(more: int, fewer: int, n: int) -> float:
    """Return the p-value of McNemar's exact, one-sided test for two counts of hits among n secrets.

    If both methods were alike, a secret that only one of them extracts would be equally likely
    from either. Which secrets these are is unknown: the p-value is that of the pairing with most of
    them, the largest possible.
    """
    most = min(fewer, n - more)  # secrets that only the method with fewer hits extracts
    return float(compute_binomial_cdf(most, more - fewer + 2 * most, 0.5))


def _parse_discoverable_level(text: str) -> float:
    """Parse the probability in the name of a metric; return 0 if the text is not a number."""
    try:
        return float(text)
    except ValueError:
        return 0.0


def _format_percent(p: float) -> str:
    return f"{100 * p:.2g}%"


def _format_tail_probability(tail: float) -> str:
    if tail >= 1e-6:
        return f"{tail:.1g}"
    return "less than 1 in a million"
