"""Describe how many records were audited, and how extraction depends on their copies."""

from __future__ import annotations

from collections.abc import Sequence

from auditor.conclusions.signals import SETTINGS
from auditor.conclusions.strata import has_unattacked_records, measure_weighted_share
from auditor.core.counts import format_count
from auditor.core.result import AuditResult, Finding, Measurement, RecordCounts, Stratum
from auditor.reports import escaping, phrases


def format_stratum(stratum: Stratum) -> str:
    """Return a clause about the extracted records with a given number of copies.

    `all 14 records that occur 16 times are recited`, `3 of the 12 asked ...`
    """
    m = stratum.extracted
    often = f"that {'occurs' if m.n == 1 else 'occur'} {format_count(stratum.copies or 1, 'time')}"
    return _format_recited_share(m, often, is_whole=m.n == stratum.population)


def group_sentence_part(group: tuple[str, Measurement]) -> str:
    """Return a clause such as `all 36 records of the group wanted are recited`.

    group: the group's name (`wanted`) and its extracted share.
    """
    name, m = group
    return _format_recited_share(
        m, f"of the group {escaping.make_printable_line(name)}", is_whole=True
    )


def _format_recited_share(m: Measurement, clause: str, *, is_whole: bool) -> str:
    """Return `all 14 records CLAUSE are recited` or `3 of the 12 asked records CLAUSE are
    recited`.

    is_whole: whether all records that CLAUSE describes were asked.
    """
    hits = m.hits
    note = f", {m.note}" if m.note else ""
    adjective = "" if is_whole else "asked "
    if hits == m.n == 1:
        return f"the only {adjective}record {clause} is recited{note}"
    if hits == m.n:
        return f"all {m.n:,} {adjective}records {clause} are recited{note}"
    return (
        f"{hits:,} of the {m.n:,} {adjective}records {clause} "
        f"{'is' if hits == 1 else 'are'} recited{note}"
    )


def format_strata(finding: Finding) -> str:
    """Return extracted counts by copies, most copies first: `16 copies: 14 of 14; 1 copy: 0 of 27`.

    If only a sample was attacked, add the population: `0 of 27 asked (121 in all)`. More than two
    strata without an attacked record are counted together, at the end. Return "" if copies were not
    counted.
    """
    parts = []
    unasked = [stratum for stratum in finding.strata if not stratum.extracted.n]
    merged = unasked if len(unasked) > 2 else []
    for stratum in finding.strata:
        if stratum in merged:
            continue
        if stratum.copies is None:
            copies = "copies not known"
        else:
            copies = format_count(stratum.copies, "copy", "copies")
        m = stratum.extracted
        if not m.n:
            parts.append(f"{copies}: none of {stratum.population:,} asked")
            continue
        rest = ""
        if m.n != stratum.population:
            rest = f" asked ({stratum.population:,} in all)"
        parts.append(f"{copies}: {m.hits:,} of {m.n:,}{rest}")
    if merged:
        parts.append(f"other numbers of copies: none of {_count_population(merged):,} asked")
    return "; ".join(parts)


def format_audited_share(result: AuditResult) -> str:
    """Return how many of the attackable records were audited, without duplicates: `41 of 135`.

    Return "" if records were not counted.
    """
    counts = result.benchmark.records.get("members")
    if counts is None:
        return ""
    return f"{counts.audited:,} of {counts.askable:,}"


def format_coverage(result: AuditResult) -> str:
    """Return how many records were audited, and how many rows were not, by reason.

    `41 of 135 records audited (150 rows given: 94 not asked ..., 15 auxiliary data)`. The rows
    given include identical copies and auxiliary data; the records do not. Splits and files of the
    data that are not read come last. Return "" if records were not counted.
    """
    counts = result.benchmark.records.get("members")
    if counts is None:
        return ""
    rules = {"identical copies": counts.copies, **counts.left_out, **counts.not_attacked}
    omissions = []
    for rule, n in rules.items():
        if n:
            omissions.append(f"{n:,} {rule}")
    for rule, n in counts.parts_left_out.items():
        omissions.append(f"{format_count(n, 'part')}: {rule}")
    rest = ", ".join(omissions)
    if counts.rows_note:
        rest = f"{counts.rows_note}: {rest}"
    tokens = ""
    if counts.attacked_tokens < counts.tokens:  # half of a short record is the prefix
        tokens = f", {counts.attacked_tokens / counts.tokens:.0%} of their tokens attacked"
        if counts.context_tokens:
            context = format_count(counts.context_tokens, "token")
            tokens += f", with at most {context} of context"
    if rest:
        tokens += f" ({rest})"
    summary = f"{format_audited_share(result)} records audited{tokens}"
    return "; ".join((summary, *list_unread_parts(result)))


def list_unread_parts(result: AuditResult) -> list[str]:
    """Return phrases about splits and files that are not read, those of non-members last."""
    parts = []
    for side, owner in (("members", ""), ("nonmembers", "non-members: ")):
        if counts := result.benchmark.records.get(side):
            for part in counts.unread_parts:
                parts.append(f"{owner}{part}")
    return parts


def list_missing_attacks(result: AuditResult) -> list[str]:
    """Return `Ethicist did not run on Undefended, white-box: WHY.` for each attack that did not
    run.

    The sentence names no access level if the attack ran at no access level. If the attack ran at
    one level, it is reported only if it did not run at the widest level.
    """
    ran = set()
    for f in result.findings:
        if _has_run(f):
            ran.add((f.target, f.attack))
    widest = SETTINGS[-1]
    targets: dict[tuple[str, str, str], dict[str, None]] = {}
    for finding in result.findings:
        is_in_part = (finding.target, finding.attack) in ran
        if _has_run(finding) or (is_in_part and finding.setting != widest):
            continue
        access = f", {widest}" if is_in_part else ""
        key = (finding.attack, access, finding.not_applicable)
        targets.setdefault(key, {})[phrases.title_target(result, finding.target)] = None
    sentences = []
    for (attack, access, reason), titles in targets.items():
        name = f"{attack[:1].upper()}{attack[1:]}"
        sentences.append(f"{name} did not run on {', '.join(titles)}{access}: {reason}.")
    return sentences


def _has_run(finding: Finding) -> bool:
    """Return whether an attack queried its model, even if the answers were uninformative."""
    return not finding.not_applicable or finding.seconds > 0


def explain_missing_attacks(result: AuditResult) -> dict[str, str]:
    """Return why an attack did not run, keyed by attack, for each attack that ran on no model."""
    ran = set()
    for f in result.findings:
        if _has_run(f):
            ran.add(f.attack)
    return {f.attack: f.not_applicable for f in result.findings if f.attack not in ran}


def list_copies_phrases(finding: Finding, owner: str) -> list[str]:
    """Return phrases about extraction by number of copies.

    If only a sample of the records was queried, add the estimate over all records.
    owner: words for the data's owner, used in the phrases.
    """
    copies = f"recited by copies: {format_strata(finding)} {owner}"
    share = measure_weighted_share(finding)
    if share is None or not has_unattacked_records(finding):
        return [copies]
    between = f"{phrases.format_percent(share.low)}% to {phrases.format_percent(share.high)}%"
    return [copies, f"share of all {share.n:,} records: {between} (95% interval)"]


def describe_asked_records(result: AuditResult) -> str:
    """Describe how many of the records with copies, and of those without, were queried.

    `41 of 135 records were asked: all 12 that occur more than once, 29 of the 123 others.` Return
    "" if all were queried, or if records were not counted.
    """
    counts = result.benchmark.records.get("members")
    if counts is None or not counts.by_copies or counts.audited == counts.askable:
        return ""
    summary = f"{_describe_asked_population(counts)} were asked"
    strata = next((finding.strata for finding in result.findings if finding.strata), ())
    copied: list[Stratum] = []
    others: list[Stratum] = []
    for stratum in strata:
        (copied if (stratum.copies or 1) > 1 else others).append(stratum)
    if not copied:
        return f"{summary}."
    n_copied = _count_population(copied)
    verb = "occurs" if n_copied == 1 else "occur"
    parts = [_describe_asked_strata(copied, f"{n_copied:,} that {verb} more than once")]
    if others:
        noun = format_count(_count_population(others), "other")
        parts.append(_describe_asked_strata(others, noun))
    return f"{summary}: {', '.join(parts)}."


def _count_population(strata: Sequence[Stratum]) -> int:
    return sum(stratum.population for stratum in strata)


def _describe_asked_strata(strata: Sequence[Stratum], description: str) -> str:
    """Return how many records of these strata were queried: `all 12 that occur more than once`.

    description: the words after "all": number and description of the records.
    """
    n_asked = sum(stratum.extracted.n for stratum in strata)
    if n_asked == _count_population(strata):
        return f"all {description}"
    if n_asked:
        return f"{n_asked:,} of the {description}"
    return f"none of the {description}"


def _describe_asked_population(counts: RecordCounts) -> str:
    return f"{counts.audited:,} of {counts.askable:,} records"


def format_progress_line(result: AuditResult) -> str:
    """Return the progress line: how many records were attacked and extracted so far."""
    row = None
    most = -1
    for finding in result.findings:
        hits = sum(s.extracted.hits for s in finding.strata)
        if finding.strata and hits > most:
            row = finding
            most = hits
    if row is None:
        return f"{result.benchmark.members:,} records asked"
    n_asked = _describe_asked_population(result.benchmark.records["members"])
    return f"{n_asked} asked so far: {most:,} recited word for word ({format_strata(row)})"
