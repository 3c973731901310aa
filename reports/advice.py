"""What to do now, for whoever mends the model: each advice is worked out of this run, and names the
row it stands on.

Nothing generic: what the run does not show is not advised.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from auditor.conclusions.leak_readings import VERBATIM
from auditor.conclusions.secret_details import SecretDetails
from auditor.conclusions.signals import LeakAssessment, assess_signals
from auditor.core.counts import counted
from auditor.core.nouns import UNDEFENDED
from auditor.core.result import AuditResult, Finding, Measurement
from auditor.records.attacked_secrets import SecretFacts
from auditor.reports import escaping, phrases, severity, signals
from auditor.reports.blocks import Block, Bullets, Code
from auditor.reports.topics import DECIDE, Topic, row_title_with_attack
from auditor.reports.verdict import strongest_attack_row
from auditor.statistics import copies_effect
from auditor.statistics.bootstrap import CONFIDENCE
from auditor.statistics.compare import measure_mean_difference
from auditor.statistics.judging import Outcome
from auditor.statistics.metrics import RECALL

RESOLVE, LEAKS, CLEAR, TEST = "resolve first", "leaks", "nothing shown", "not tested"
HELPS, HIDES, COPIES, WHERE = "helps", "may only hide", "fewer copies", "where it sits"
_LEVEL = 1 - CONFIDENCE
_MOST_LIMITS = 4  # limits on copies that one advice tells of
NO_DETAILS, RUN = SecretDetails(), "RUN"


@dataclass(frozen=True)
class Advice:
    """A sentence, and the row of the run it rests on. kind: its subject; command: what to run."""

    kind: str
    said: str
    row: str
    command: str = ""

    @property
    def line(self) -> str:
        keep = f"; hold the next model to a limit: {self.command}" if self.command else ""
        return f"{self.kind} ({self.row}): {self.said}{keep}"


def advice(
    result: AuditResult, details: SecretDetails = NO_DETAILS, run: str = RUN
) -> tuple[Advice, ...]:
    """Return what forbids a conclusion, what leaks and a gate on it, where it sits, what helps.

    The last two are about the undefended model's attack with the highest recall, if its outcomes
    are kept. run: as it is written in commands.
    """
    seen = assess_signals(result)
    if not any(seen.tested_signals(target) for target in seen.targets):
        return ()
    doubts = (Advice(RESOLVE, doubt.sentence, doubt.kind) for doubt in signals.all_doubts(seen))
    return (
        *doubts,
        *_severity_advice(result, seen, run),
        *_verbatim_leakage_advice(result, details),
        *(
            Advice(TEST, text, on.removeprefix(" on ") or "audit run")
            for on, text in signals.list_untested_signals(result, seen)
        ),
    )


def _severity_advice(result: AuditResult, seen: LeakAssessment, run: str) -> Iterator[Advice]:
    """Yield why each target that leaks, or shows no leak, is judged so, and a gate on the next
    model."""
    for target in seen.targets:
        kinds = signals.group_signals_by_kind(seen.shown_signals(target))
        if not kinds and not seen.shows_no_leakage(target):
            continue
        strongest = map(signals.pick_strongest_signal, kinds)
        gated = [signal for signal in strongest if signal.gate_rule]
        if not kinds and (signal := seen.signal_for_gate(target)):
            gated = [signal]
        command = signals.gate_command_to_suggest(seen, gated, run) if gated else ""
        severe = severity.severity_of_target(seen, target)
        proof = f" ({severe.proof})" if severe.proof else ""
        kind = LEAKS if kinds else CLEAR
        title = phrases.target_title(result, target)
        yield Advice(kind, f"{severe.why}{proof}", title, command)


def _verbatim_leakage_advice(result: AuditResult, details: SecretDetails) -> tuple[Advice, ...]:
    """Where the verbatim leakage sits, what fewer copies would leave, what each defense that was
    measured changes."""
    known = _strongest_attack_row_with_members(result, details)
    if known is None:
        return ()
    worst, members = known
    row = row_title_with_attack(result, worst)
    facts = {secret.id: secret for secret in details.secrets}
    if _has_document_parts(details, members):
        why = (
            "the secrets are parts of documents and not independent: no part is tested, nothing "
            "predicted or compared"
        )
        return (Advice(WHERE, why, row),)
    sits = (Advice(WHERE, said, row) for said in _leak_concentration_sentences(members, facts))
    # One advice of all limits together: the inner `for` only gives them a name.
    copies = (
        Advice(COPIES, _copy_limits_sentence(limits, members), row)
        for limits in [list(_advised_copy_limits_with_predicted_recall(members))]
        if limits
    )
    return (*sits, *copies, *_defense_advice(result, details, worst, members))


def _strongest_attack_row_with_members(
    result: AuditResult, details: SecretDetails
) -> tuple[Finding, Outcome] | None:
    """The undefended model's configuration of highest recall, and its members; None: not kept, or
    nothing extracted."""
    worst = strongest_attack_row(result, UNDEFENDED)
    seen = None if worst is None else details.rows.get(worst.cell_key)
    if worst is None or seen is None or seen.outcome is None:
        return None
    members = seen.outcome.select_secrets(seen.outcome.member)
    return (worst, members) if members.hit.any() else None


def _has_document_parts(details: SecretDetails, members: Outcome) -> bool:
    """Return whether a member is a part of a document: such secrets are not independent."""
    asked = set(members.ids)
    return any(secret.document is not None for secret in details.secrets if secret.id in asked)


# --- where it sits
# -----------------------------------------------------------------------------------------------


def _leak_concentration_sentences(
    members: Outcome, facts: Mapping[str, SecretFacts]
) -> Iterator[str]:
    """By repeats, by group and by length: the part of the members that was extracted more than
    chance explains."""
    for parts in (
        _member_masks_by_copies_phrase(members),
        _member_masks_by_group_phrase(members, facts),
        _member_masks_by_length_phrase(members, facts),
    ):
        if (
            one := copies_effect.find_most_concentrated_part(parts, members.hit, _LEVEL)
        ) is not None:
            yield (
                f"{one.hits:,} of the {one.of_hits:,} extracted members {one.part}, and so do "
                f"{one.members:,} of all {counted(one.of_members, 'member')} (Fisher p {one.p:.2g})"
            )


def _member_masks_by_copies_phrase(members: Outcome) -> dict[str, NDArray[np.bool_]]:
    if None in members.repeats:
        return {}
    times = np.array(members.repeats)
    # Without the lowest count, which all members reach.
    return {f"occur {count:,} times or more": times >= count for count in np.unique(times)[1:]}


def _member_masks_by_group_phrase(
    members: Outcome, facts: Mapping[str, SecretFacts]
) -> dict[str, NDArray[np.bool_]]:
    of = [facts[id].group if id in facts else None for id in members.ids]
    # A group of all members is never told: Fisher's test has nobody to hold it against.
    names = sorted({name for name in of if name is not None})
    labels = {name: f"belong to the group {escaping.to_printable_line(name)}" for name in names}
    return {labels[name]: np.array([group == name for group in of]) for name in names}


def _member_masks_by_length_phrase(
    members: Outcome, facts: Mapping[str, SecretFacts]
) -> dict[str, NDArray[np.bool_]]:
    # Unknown lengths count as 0. Split at the median: where that is the greatest, one half would be
    # empty.
    lengths = np.array([(facts[id].length or 0) if id in facts else 0 for id in members.ids])
    half = int(np.median(lengths))
    shorter = lengths <= half
    if shorter.all() or not shorter.any():
        return {}
    return {f"have at most {half:,} tokens": shorter, f"have more than {half:,} tokens": ~shorter}


# --- fewer copies
# -----------------------------------------------------------------------------------------------


def _advised_copy_limits_with_predicted_recall(
    members: Outcome,
) -> Iterator[tuple[int, Measurement]]:
    """Each count but the highest as a limit on copies, with the recall that is predicted then."""
    if None in members.repeats:
        return
    times = [count for count in members.repeats if count is not None]
    for most in sorted(set(times))[:-1]:
        yield (
            most,
            copies_effect.predict_recall(times, members.hit, np.minimum(times, most).tolist()),
        )


def _copy_limits_sentence(limits: Sequence[tuple[int, Measurement]], members: Outcome) -> str:
    # Every k-th limit, with k rounded up.
    told = limits[:: -(-len(limits) // _MOST_LIMITS)]
    left = "; ".join(
        f"{counted(most, 'copy', 'copies')}: {phrases.value_with_interval(recall)}"
        for most, recall in told
    )
    return (
        f"predicted recall with at most {left}; now "
        f"{phrases.format_percent(float(members.hit.mean()))}%"
    )


def mildest_copy_limit_phrase(result: AuditResult, details: SecretDetails) -> str:
    """The mildest limit on copies that keeps the predicted recall within `VERBATIM.limits`, or else
    the strictest.

    "" where copies are not known, parts of documents were attacked, or nothing is extracted.
    """
    known = _strongest_attack_row_with_members(result, details)
    limits = (
        []
        if known is None or _has_document_parts(details, known[1])
        else list(_advised_copy_limits_with_predicted_recall(known[1]))
    )
    if not limits:
        return ""
    # By its upper end, as a gate holds what is measured: the prediction itself may be too low.
    within = [limit for limit in limits if limit[1].high <= dict(VERBATIM.limits)[RECALL]]
    # Limits rise: the last within is the mildest, the first of all the strictest.
    most, left = within[-1] if within else limits[0]
    kept = phrases.value_with_interval(left)
    return f"at most {counted(most, 'copy', 'copies')} of a record: {kept} predicted, not measured"


def undefended_row_and_recall_with_copies_left(
    result: AuditResult, details: SecretDetails, left: Callable[[int], int | None]
) -> tuple[Finding, Measurement] | None:
    """The undefended row of highest recall, and the recall predicted for it were `left(copies)` of
    each record left.

    None where nothing is extracted, parts of documents were attacked, or a count that would be left
    was not measured.
    """
    known = _strongest_attack_row_with_members(result, details)
    if known is None or _has_document_parts(details, known[1]) or None in known[1].repeats:
        return None
    worst, members = known
    whole = details.rows[worst.cell_key].outcome
    assert whole is not None  # its members were taken from it
    # Non-members stand for a count of 0: records of which no copy would be left.
    times = [count for count in members.repeats if count is not None]
    after = [left(count) for count in times]
    kept = [count for count in after if count is not None]
    if len(kept) < len(after):
        return None
    try:
        return worst, copies_effect.predict_recall(
            times, members.hit, kept, whole.hit[~whole.member]
        )
    except ValueError:  # nobody was trained on so often
        return None


# --- what was measured of defenses
# -----------------------------------------------------------------------------------------------


def _defense_advice(
    result: AuditResult, details: SecretDetails, worst: Finding, members: Outcome
) -> Iterator[Advice]:
    """Each defense at the setting and attack of the worst row: verbatim and near-verbatim, paired,
    and what it costs.

    No control: it promises nothing.
    """
    found = {finding.cell_key: finding for finding in result.findings if not finding.not_applicable}
    for target in result.targets:
        finding = found.get(worst.cell_key._replace(target=target.name))
        aside = target.companion or target.name == UNDEFENDED
        seen = None if finding is None or aside else details.rows.get(finding.cell_key)
        if finding is None or seen is None or seen.outcome is None:
            continue
        pair = _recall_changes_for_defense_advice(members, seen.outcome)
        if pair is None:
            continue
        (verbatim, near), row = pair, row_title_with_attack(result, finding)
        exact, alike = map(phrases.difference_with_interval, (verbatim, near))
        said = f"verbatim {exact}, near-verbatim {alike}"
        if verbatim.high < 0 and near.high < 0:
            yield Advice(HELPS, f"{said}; {_perplexity_cost_sentence(result, target.name)}", row)
        elif verbatim.high < 0:
            # As behind a filter of verbatim text (Ippolito et al. 2022): the words change, little
            # else.
            yield Advice(
                HIDES, f"{said}: the words change, what they say may still be extracted", row
            )


def _recall_changes_for_defense_advice(
    members: Outcome, seen: Outcome
) -> tuple[Measurement, Measurement] | None:
    """Verbatim and near-verbatim recall minus the undefended model's, on the members that both were
    asked for."""
    place = {id: i for i, id in enumerate(members.ids)}
    own = [i for i, id in enumerate(seen.ids) if id in place]
    if not own:
        return None
    # own, base: (secrets asked of both,), places of the same secrets in the two outcomes.
    base = [place[seen.ids[i]] for i in own]
    return (
        measure_mean_difference("recall_difference", "share", seen.hit[own], members.hit[base]),
        measure_mean_difference(
            "recall_difference", "share", seen.is_near_verbatim[own], members.is_near_verbatim[base]
        ),
    )


def _perplexity_cost_sentence(result: AuditResult, name: str) -> str:
    own, base = result.target(name).perplexity, result.target(UNDEFENDED).perplexity
    if own is None or base is None:
        return "what it costs was not measured"
    change = f"{phrases.format_value(own)} instead of {phrases.format_value(base)}"
    return f"held-out perplexity {change}, {own.value / base.value:.2f} times"


# --- the section
# -----------------------------------------------------------------------------------------------


def _decision_blocks(result: AuditResult, details: SecretDetails) -> Sequence[Block]:
    """Return what the run says about a fix, and the one command to run next.

    What leaks and what was not tested is in the verdict and the picture, and not repeated.
    """
    run = f"runs/{shlex.quote(result.name)}"
    found = advice(result, details, run)
    told = [one for one in found if one.kind in (WHERE, COPIES, HELPS, HIDES)]
    rows = ["", *(one.row for one in told)]
    items = tuple(
        f"{one.kind.capitalize()}: {one.said}{f' ({one.row})' if one.row != row else ''}"
        for one, row in zip(told, rows, strict=False)
    )
    # An option a line: a page breaks no line inside one, and the whole can be copied.
    commands = [one.command.replace(" --", " \\\n  --") for one in found if one.command]
    doubts = any(one.kind == RESOLVE for one in found)
    command = f"audit advise {run}" if doubts or not commands else commands[0]
    blocks: list[Block] = [Bullets(items)] if items else []
    return [*blocks, Code(_COMMAND, command)] if found else blocks


_COMMAND = "Next command (its limits are examples, yours to choose)"
TOPICS = (
    Topic(
        "advice",
        "What to do now",
        lambda m: _decision_blocks(m.result, m.details),
        DECIDE,
        1,
        turn=1,
    ),
)
