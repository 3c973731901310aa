"""Write advice for the model's owner from the results of one run.

Each piece of advice names the result that supports it; no generic advice is given.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from auditor.conclusions.leak_readings import NEAR, VERBATIM
from auditor.conclusions.outcomes import measure_paired_change
from auditor.conclusions.secret_details import SecretDetails
from auditor.conclusions.signals import LeakAssessment, assess_leak_signals
from auditor.core.arrays import Bools
from auditor.core.counts import format_count
from auditor.core.nouns import UNDEFENDED
from auditor.core.result import AuditResult, Finding, Measurement
from auditor.records.attacked_secrets import SecretAttributes
from auditor.reports import coverage, escaping, phrases, severity, signals
from auditor.reports.blocks import Block, Bullets, Code
from auditor.reports.topics import DECIDE, ReportMaterial, Topic, title_attack_row
from auditor.reports.verdict import find_strongest_attack_row
from auditor.statistics import copies_effect
from auditor.statistics.bootstrap import CONFIDENCE
from auditor.statistics.judging import Outcome
from auditor.statistics.metrics import RECALL

RESOLVE = "resolve first"
UNFINISHED = "not finished"
LEAKS = "leaks"
CLEAR = "nothing shown"
TEST = "not tested"
HELPS = "helps"
HIDES = "may only hide"
COPIES = "fewer copies"
WHERE = "where the leak is"
_LEVEL = 1 - CONFIDENCE
_MOST_LIMITS = 4  # limits on copies listed in one advice
NO_DETAILS = SecretDetails()
RUN = "RUN"


@dataclass(frozen=True)
class Advice:
    """A piece of advice for the model's owner.

    kind: the heading, such as "leaks" or "not tested".
    sentence: the advice itself.
    row: the measured attack and model that support the advice, as a title.
    command: a command for a gate on the next model; "" if there is none.
    """

    kind: str
    sentence: str
    row: str
    command: str = ""

    @property
    def line(self) -> str:
        keep = ""
        if self.command:
            keep = f"; hold the next model to a limit: {self.command}"
        return f"{self.kind} ({self.row}): {self.sentence}{keep}"


def list_advice(
    result: AuditResult, details: SecretDetails = NO_DETAILS, run: str = RUN
) -> tuple[Advice, ...]:
    """Return all advice that the run supports.

    The order is: reasons to distrust the results, the rest of an unfinished check, leaks with
    commands for gates, where leaks concentrate, helpful defenses, and untested kinds of leak.
    Concentration and defenses are reported only for the attack with the highest recall on the
    undefended model, and only if its results per secret are stored. run: the run's name in
    commands.
    """
    assessment = assess_leak_signals(result)
    if not any(map(assessment.list_tested_signals, assessment.targets)):
        return ()
    advices = []
    for doubt in signals.list_doubts(assessment):
        advices.append(Advice(RESOLVE, doubt.sentence, doubt.kind))
    if assessment.unasked:
        missing = f"{format_count(assessment.unasked, 'record')} not asked for lack of time"
        advices.append(
            Advice(UNFINISHED, f"{missing}: {_format_resume_command(run)}", "audit check")
        )
    advices += _list_severity_advice(result, assessment, run)
    advices += _list_verbatim_leakage_advice(result, details, run)
    for on, text in signals.list_untested_signals(result, assessment):
        advices.append(Advice(TEST, text, on.removeprefix(" on ") or "audit run"))
    return tuple(advices)


def _list_severity_advice(
    result: AuditResult, assessment: LeakAssessment, run: str
) -> Iterator[Advice]:
    """Yield advice on each model's severity.

    The sentence gives the reason for the severity; the command sets a gate for the next model.
    """
    for target in assessment.targets:
        kinds = signals.group_signals(assessment.list_shown_signals(target))
        if not kinds and not assessment.shows_no_leakage(target):
            continue
        strongest = map(signals.pick_strongest_signal, kinds)
        gated = [signal for signal in strongest if signal.gate_rule]
        if not kinds and (signal := assessment.find_gate_signal(target)):
            gated = [signal]
        command = ""
        if gated:
            command = signals.suggest_gate_command(assessment, gated, run)
        severe = severity.rate_severity(assessment, target)
        proof = f" ({severe.proof})" if severe.proof else ""
        kind = LEAKS if kinds else CLEAR
        title = phrases.title_target(result, target)
        yield Advice(kind, f"{severe.clause}{proof}", title, command)


def _list_verbatim_leakage_advice(
    result: AuditResult, details: SecretDetails, run: str
) -> Iterator[Advice]:
    """Yield advice on verbatim extraction from the undefended model.

    The advice says which records are extracted most, how fewer copies would change the recall, and
    which defenses help.
    """
    known = _find_strongest_attack_row(result, details)
    if known is None:
        return
    worst, members = known
    row = title_attack_row(result, worst)
    facts = {secret.id: secret for secret in details.secrets}
    if _has_document_parts(details, members):
        by_copies = ""
        if len(worst.strata) > 1:
            by_copies = f"records recited by copies: {coverage.format_strata(worst)}; "
        reason = "parts of one record are not independent, so nothing is tested or predicted"
        yield Advice(WHERE, f"{by_copies}{reason}", row)
        return
    for sentence in _describe_leak_concentration(members, facts):
        yield Advice(WHERE, sentence, row)
    if limits := list(_predict_recall_under_copy_limits(members)):
        yield Advice(COPIES, _copy_limits_sentence(limits, members, run), row)
    yield from _list_defense_advice(result, details, worst)


def _find_strongest_attack_row(
    result: AuditResult, details: SecretDetails
) -> tuple[Finding, Outcome] | None:
    """Return the finding with the highest recall on the undefended model, and members' outcomes.

    Return None if no member was extracted, or if outcomes are not stored.
    """
    worst = find_strongest_attack_row(result, UNDEFENDED)
    if worst is None or worst.cell_key not in details.values_by_cell:
        return None
    values = details.values_by_cell[worst.cell_key]
    if not values.is_judged:
        return None
    members = values.select_secrets(values.member)
    return (worst, members) if members.hit.any() else None


def _has_document_parts(details: SecretDetails, members: Outcome) -> bool:
    """Return whether any member is a part of a document; such parts are statistically dependent."""
    member_ids = set(members.ids)
    return any(secret.document is not None for secret in details.secrets if secret.id in member_ids)


# --- concentration of leaks ---


def _describe_leak_concentration(
    members: Outcome, facts: Mapping[str, SecretAttributes]
) -> Iterator[str]:
    """Yield a sentence for each feature that is significantly more common among extracted members.

    Features are the number of copies, the group and the length of a record. The test is Fisher's
    exact test; all features share its level. `members` is the strongest attack's outcome for each
    member; `facts` gives each member's group and length, keyed by id.
    """
    features = (
        _mask_members_per_copies(members),
        _mask_members_per_group(members, facts),
        _mask_members_per_length(members, facts),
    )
    level = _LEVEL / max(1, sum(map(bool, features)))
    for parts in features:
        top = copies_effect.find_most_concentrated_part(parts, members.hit, level)
        if top is not None:
            if top.hits == top.of_hits:
                hits = f"all {top.hits:,}"
            else:
                hits = f"{top.hits:,} of the {top.of_hits:,}"
            yield (
                f"{hits} extracted members {top.part}; only {top.members:,} of all "
                f"{format_count(top.of_members, 'member')} do (Fisher's exact test, p {top.p:.2g})"
            )


def _mask_members_per_copies(members: Outcome) -> dict[str, Bools]:
    """Return masks of shape (members,), keyed by a phrase such as `occur 4 times or more`."""
    if None in members.repeats:
        return {}
    times = np.array(members.repeats)
    # Skip the lowest count, which all members reach.
    return {f"occur {count:,} times or more": times >= count for count in np.unique(times)[1:]}


def _mask_members_per_group(
    members: Outcome, facts: Mapping[str, SecretAttributes]
) -> dict[str, Bools]:
    """Return each group's mask, (members,), keyed by a phrase such as `belong to the group A`."""
    member_groups = []
    for id in members.ids:
        member_groups.append(facts[id].group if id in facts else None)
    masks = {}
    # Skip a group that contains all members: Fisher's test has nothing to compare it with.
    for name in sorted({group for group in member_groups if group is not None}):
        label = f"belong to the group {escaping.make_printable_line(name)}"
        masks[label] = np.array(member_groups, dtype=object) == name
    return masks


def _mask_members_per_length(
    members: Outcome, facts: Mapping[str, SecretAttributes]
) -> dict[str, Bools]:
    """Return masks of shape (members,), keyed by a phrase such as `have at most 32 tokens`."""
    # Unknown lengths count as 0. Split at the median; if it is the maximum, the upper half is
    # empty.
    n_tokens = []
    for id in members.ids:
        n_tokens.append((facts[id].length or 0) if id in facts else 0)
    lengths = np.array(n_tokens)
    half = int(np.median(lengths))
    shorter = lengths <= half
    if shorter.all() or not shorter.any():
        return {}
    return {f"have at most {half:,} tokens": shorter, f"have more than {half:,} tokens": ~shorter}


# --- fewer copies ---


def _predict_recall_under_copy_limits(
    members: Outcome,
) -> Iterator[tuple[int, Measurement]]:
    """Yield each limit on copies, with the recall predicted if no record had more copies."""
    if None in members.repeats:
        return
    times = [count for count in members.repeats if count is not None]
    for most in sorted(set(times))[:-1]:
        yield (
            most,
            copies_effect.predict_recall(times, members.hit, np.minimum(times, most).tolist()),
        )


def _copy_limits_sentence(
    limits: Sequence[tuple[int, Measurement]], members: Outcome, run: str
) -> str:
    # Every k-th limit, with k rounded up.
    listed_limits = limits[:: -(-len(limits) // _MOST_LIMITS)]
    predictions = []
    for most, recall in listed_limits:
        copies = format_count(most, "copy", "copies")
        predictions.append(f"{copies}: {phrases.format_measurement_value(recall)}")
    return (
        f"predicted recall with at most {'; '.join(predictions)}; now "
        f"{phrases.format_percent(float(members.hit.mean()))}%; to measure it: "
        f"audit mitigate {run} --by dedup, or cap:N"
    )


def describe_mildest_copy_limit(result: AuditResult, details: SecretDetails) -> str:
    """Describe the highest limit on copies whose predicted recall is within `VERBATIM.limits`.

    If no limit on copies reaches this recall, describe the lowest limit. Return "" if copy counts
    are unknown, if the attack used parts of documents, or if nothing was extracted.
    """
    known = _find_strongest_attack_row(result, details)
    if known is None or _has_document_parts(details, known[1]):
        return ""
    limits = list(_predict_recall_under_copy_limits(known[1]))
    if not limits:
        return ""
    # Compare the upper end, as a gate does: the prediction may be too low.
    most_recall = dict(VERBATIM.limits)[RECALL]
    within = [limit for limit in limits if limit[1].high <= most_recall]
    # Limits rise: the last of `within` is the mildest, the first of `limits` the strictest.
    most, recall = within[-1] if within else limits[0]
    text = phrases.format_measurement_value(recall)
    copies = format_count(most, "copy", "copies")
    return f"keep at most {copies} of a record: recall {text} predicted, not measured"


def predict_undefended_recall(
    result: AuditResult, details: SecretDetails, count_remaining: Callable[[int], int | None]
) -> tuple[Finding, Measurement] | None:
    """Predict the recall of the strongest attack if the training data had fewer copies.

    Return the attack's result on the undefended model, and the predicted recall. Return None if
    nothing was extracted, if records were attacked in several parts, or if no record has the number
    of copies that would remain.

    count_remaining: function from a record's number of copies to the number that would remain after
    the advice, for example after removing duplicates; None if that is unknown.
    """
    known = _find_strongest_attack_row(result, details)
    if known is None or _has_document_parts(details, known[1]) or None in known[1].repeats:
        return None
    worst, members = known
    outcome = details.values_by_cell[worst.cell_key]
    # Non-members represent a count of 0: records without a remaining copy.
    times = []
    remaining = []
    for count in members.repeats:
        assert count is not None
        rest = count_remaining(count)
        if rest is None:
            return None
        times.append(count)
        remaining.append(rest)
    try:
        return worst, copies_effect.predict_recall(
            times, members.hit, remaining, outcome.hit[~outcome.member]
        )
    except ValueError:  # no member has this many copies
        return None


# --- measured defenses ---


def _list_defense_advice(
    result: AuditResult, details: SecretDetails, worst: Finding
) -> Iterator[Advice]:
    """Yield advice on each defense: its cost, and its effect on verbatim and near-verbatim recall.

    Each defended model is compared with the undefended model, by secret and under the same attack.
    Control models are skipped, because they promise nothing. worst: the attack's result on the
    undefended model.
    """
    base = details.values_by_cell[worst.cell_key]
    for target in result.targets:
        finding = next(
            iter(result.select_findings(*worst.cell_key._replace(target=target.name))), None
        )
        if (
            finding is None
            or finding.not_applicable
            or target.companion
            or target.name == UNDEFENDED
        ):
            continue
        values = details.values_by_cell.get(finding.cell_key)
        verbatim = measure_paired_change(RECALL, "share", values, base)
        near = measure_paired_change(NEAR, "share", values, base)
        if isinstance(verbatim, str) or isinstance(near, str):
            continue
        row = title_attack_row(result, finding)
        exact, near_change = map(phrases.format_difference, (verbatim, near))
        changes = f"verbatim {exact}, near-verbatim {near_change}"
        if verbatim.high < 0 and near.high < 0:
            yield Advice(HELPS, f"{changes}; {_describe_perplexity_cost(result, target.name)}", row)
        elif verbatim.high < 0:
            # As with a filter of verbatim text (Ippolito et al. 2022): the words change, little
            # else.
            yield Advice(
                HIDES, f"{changes}: the wording changes, the content may still be extracted", row
            )


def _describe_perplexity_cost(result: AuditResult, name: str) -> str:
    perplexity = result.target(name).perplexity
    base = result.target(UNDEFENDED).perplexity
    if perplexity is None or base is None:
        return "the cost was not measured"
    change = f"{phrases.format_value(perplexity)} instead of {phrases.format_value(base)}"
    return f"held-out perplexity {change} ({perplexity.value / base.value:.2f} times)"


# --- the next command ---


def suggest_next_command(assessment: LeakAssessment, folder: Path) -> str:
    """Return the next command for the user.

    After a leak or an unreliable result, suggest `audit advise`. Otherwise suggest a gate that
    checks later models.
    """
    # Clean before quoting: text copied into a shell has no control characters.
    quoted_folder = shlex.quote(escaping.make_printable_line(str(folder)))
    gated = assessment.find_gate_signal()
    if (
        gated is None
        or signals.list_doubts(assessment)
        or any(map(assessment.list_shown_signals, assessment.targets))
    ):
        return f"audit advise {quoted_folder}"
    return signals.suggest_gate_command(assessment, [gated], quoted_folder)


def format_resume_line(unasked: int, folder: Path) -> str:
    """Return the command that resumes the check, and how many records it will query."""
    rest = f"asks the {format_count(unasked, 'record')} that {'is' if unasked == 1 else 'are'} left"
    command = _format_resume_command(shlex.quote(escaping.make_printable_line(str(folder))))
    return f"{command}    {rest}"


def _format_resume_command(run: str) -> str:
    return f"audit check --resume {run} --minutes 30"


# --- the section ---


def _build_decision_blocks(material: ReportMaterial) -> Sequence[Block]:
    """Return blocks with the advice on how to fix leaks, and the next command.

    Leaks and untested kinds of leak are omitted, because the verdict and the picture show them.
    """
    folder = Path("runs", material.result.name)
    if material.folder is not None:
        working_folder = Path.cwd().resolve()
        folder = material.folder.resolve()  # `latest` is another run tomorrow
        if folder.is_relative_to(working_folder):
            folder = folder.relative_to(working_folder)
    run = shlex.quote(escaping.make_printable_line(str(folder)))
    advices = list_advice(material.result, material.details, run)
    items = []
    row = ""
    advise = f"audit advise {run}"
    command = ""
    for item in advices:
        if item.kind in (WHERE, COPIES, HELPS, HIDES):
            place = f" ({item.row})" if item.row != row else ""
            items.append(f"{item.kind.capitalize()}: {item.sentence}{place}")
            row = item.row
        if item.kind == RESOLVE:
            command = advise
        elif item.kind == UNFINISHED:  # as the screen's NEXT
            command = _format_resume_command(run)
        elif item.command and not command:
            # One option a line: a page breaks no line inside an option, and the block can be
            # copied.
            command = item.command.replace(f" {run}", f" \\\n  {run}")
            command = command.replace(" --", " \\\n  --")
    blocks: list[Block] = [Bullets(items)] if items else []
    if advices:
        return [*blocks, Code(_COMMAND, command or advise)]
    return blocks


_COMMAND = "Next command (choose your own limits)"
TOPICS = (
    Topic(
        "advice",
        "What to do now",
        _build_decision_blocks,
        DECIDE,
        1,
        turn=1,
    ),
)
