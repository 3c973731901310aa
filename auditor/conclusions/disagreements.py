"""What in a run may hide a leak: numbers that contradict each other, and non-members unlike the
members.

Knows a result alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TypeGuard

from scipy.stats import binom

from auditor.core.nouns import UNDEFENDED
from auditor.core.result import AuditResult, Doubt, Finding, Measurement
from auditor.statistics.metrics import AT_LEAST, CONTROLS, RECALL, auc_name

ANY, EXACT = "any_of_k", "extraction_probability"
_ANCESTRAL = "ancestral"
# fewer hits than this is likely to give contradict the probabilities that were measured
_IMPROBABLE = 0.01


def is_measured(m: Measurement | None) -> TypeGuard[Measurement]:
    return m is not None and m.n > 0 and not math.isnan(m.value)


def is_auc_above_chance(m: Measurement) -> bool:
    return m.low > 0.5


def membership_control_aucs(finding: Finding) -> list[Measurement]:
    return [m for control in CONTROLS if (m := finding.measurement(auc_name(control))) is not None]


def member_mismatch_doubts(result: AuditResult) -> tuple[Doubt, ...]:
    """That members and non-members are no match: whatever distinguishes them without having seen
    the model."""

    def highest(control: str) -> Measurement | None:
        seen = (finding.measurement(auc_name(control)) for finding in result.findings)
        return max(
            (m for m in seen if m is not None and is_auc_above_chance(m)),
            key=lambda m: m.low,
            default=None,
        )

    if blind := highest("blind"):
        why = (
            "Members and non-members differ in kind: without any model, their tokens and lengths "
            f"distinguish them ({_auc_label(blind)}), so no membership number here means what it "
            "says, and what members leak beyond non-members may be that difference."
        )
        if not result.plan.get("user_column"):
            why += " Are several records of one person or text? Name its column: --user-column."
    elif reference := highest("reference_alone"):
        why = (
            "The reference alone distinguishes members from non-members "
            f"({_auc_label(reference)}): it saw some of them, or they differ in kind, and either "
            "way no membership number here means what it says."
        )
    else:
        return ()
    return (Doubt("non-members", why),)


def _auc_label(m: Measurement) -> str:
    return f"AUC {m.value:.3f} [{m.low:.3f}–{m.high:.3f}]"


def contradiction_doubts_about_target(
    result: AuditResult, target: str, greedy: Measurement | None
) -> Iterator[Doubt]:
    """Numbers of one target that cannot all be right: a filter, a truncation or another
    distribution lies between.

    greedy: the share of secrets that greedy decoding of the undefended model gives.
    """
    rows = [f for f in result.findings if f.target == target and not f.not_applicable]
    drawn = [f for f in rows if is_measured(f.measurement(RECALL))]
    exact = [f for f in rows if any(m.name.startswith(EXACT) for m in f.measurements)]
    too_few = dict.fromkeys(
        _too_few_hits_sentence(probe, attack) for probe in exact for attack in drawn
    )
    said = [sentence for sentence in too_few if sentence]
    if target == UNDEFENDED and greedy is not None:
        said += _greedy_contradiction_sentences(greedy, rows, drawn)
    yield from (Doubt("contradiction", sentence) for sentence in said)


def _too_few_hits_sentence(probe: Finding, attack: Finding) -> str:
    """That an attack has too few hits for the probabilities; "" where they agree.

    Hits of independent secrets with mean probability p are no less likely to be k or fewer than a
    binomial number is, for k <= n p - 1 (Hoeffding 1956, Theorem 4): its tail bounds theirs. Any of
    the guesses counts as a hit.
    """
    untruncated = probe.measurement(f"{EXACT}_{_ANCESTRAL}")
    if untruncated is not None and attack.decoding.startswith(_ANCESTRAL):
        probability: Measurement | None = untruncated
    else:
        probability = probe.measurement(EXACT) or probe.measurement(f"{EXACT}{AT_LEAST}")
    recall, other = attack.measurement(RECALL), attack.measurement(ANY)
    if recall is None or not is_measured(probability):
        return ""
    hits = max(round(m.value * m.n) for m in (recall, other) if is_measured(m))
    # the same secrets: their very mean
    p = probability.value if probability.n == recall.n else probability.low
    if hits > recall.n * p - 1 or (tail := float(binom.cdf(hits, recall.n, p))) >= _IMPROBABLE:
        return ""
    return (
        f"{attack.attack} extracts {hits:,} of {recall.n:,}, and at the measured probability of "
        f"{_percent_label(p)} a single sample of each would give about {recall.n * p:.0f} "
        f"({_tail_probability_label(tail)} by chance): a filter, a truncation or another "
        "distribution stands between what the model knows and what was drawn."
    )


def _greedy_contradiction_sentences(
    greedy: Measurement, rows: Sequence[Finding], drawn: Sequence[Finding]
) -> Iterator[str]:
    given = round(greedy.value * greedy.n)
    hits = [
        round(m.value * m.n)
        for f in drawn
        for name in (RECALL, ANY)
        if is_measured(m := f.measurement(name))
    ]
    # Secrets that one gives and the other does not are as many either way, were there no difference
    # (McNemar, exact).
    if hits and not any(hits) and given and (tail := 0.5**given) < _IMPROBABLE:
        yield (
            f"Greedy decoding extracts {given:,} of {greedy.n:,}, and no attack extracts any "
            f"({_tail_probability_label(tail)} by chance were they alike): what was drawn is not "
            "what the model gives."
        )
    for row in rows:
        for m in row.measurements:
            # the whole name where it begins otherwise
            level = m.name.removeprefix("discoverable_1_")
            # As many secrets as greedy decoding was asked for: taken for the same ones.
            likely = (
                round(m.value * m.n)
                if level != m.name and _discoverable_level_or_zero(level) > 0.5 and m.n == greedy.n
                else 0
            )
            if (
                likely > given
            ):  # more probable than not means that each of its tokens is the likeliest
                yield (
                    f"{likely:,} of {m.n:,} suffixes have an extraction probability of "
                    f"{_percent_label(_discoverable_level_or_zero(level))} or more, and greedy "
                    f"decoding, which must give these, gives {given:,}."
                )


def _discoverable_level_or_zero(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0


def _percent_label(p: float) -> str:
    return f"{100 * p:.2g}%"


def _tail_probability_label(tail: float) -> str:
    return f"{tail:.1g}" if tail >= 1e-6 else "less than 1 in a million"
