"""Build the first screen after a run: leaks, confidence, cost and next step, in at most 25 lines.

The screen shortens the signals of the reports (`conclusions.signals`). If there is too little
space, leaks are omitted last. `--verbose` and the report show the rest.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.text import Text

from auditor.conclusions import secret_details as detailed
from auditor.conclusions.claims import CONTRADICTED
from auditor.conclusions.disagreements import ANY
from auditor.conclusions.leak_readings import PERSONAL, VERBATIM
from auditor.conclusions.signals import SHOWN, LeakAssessment, LeakSignal, assess_leak_signals
from auditor.core.counts import format_count
from auditor.core.nouns import UNDEFENDED
from auditor.core.result import AuditResult, Finding, Measurement
from auditor.records.remarks import CommandRemarks, read_command_remarks
from auditor.reports import (
    advice,
    attack_table,
    claims,
    coverage,
    escaping,
    personal,
    phrases,
    severity,
    signals,
    unlearning,
)
from auditor.reports.verdict import (
    NOTHING_MEASURED,
    find_strongest_attack_row,
    find_strongest_chained_row,
    rate_targets,
)
from auditor.statistics import documents
from auditor.statistics.metrics import RECALL

RESULT = "RESULT"
GUTTER = 8  # columns of the labels
LINES, WIDTH = 25, 100
_NARROWEST = 60  # columns; the terminal wraps narrower screens
_LONGEST = 24  # characters of a target's name
_SHORTEST = 10  # characters to which a name is cut before numbers are
_GROUPS = 4  # groups of secrets listed on the screen
_SHORT_REMARKS = {  # by metric
    RECALL: "",
    documents.RECALL: "records, in part",
    ANY: "by any guess",
}


@dataclass(frozen=True)
class ScreenEntry:
    """A labelled entry of the screen.

    items: sentences, most important first; max_lines: the maximum number of lines.
    """

    label: str
    items: tuple[str, ...]
    max_lines: int
    between: str = "; "


def build_first_screen(result: AuditResult, folder: Path, width: int = WIDTH) -> Text:
    """Return the screen, of at most LINES lines of `width` columns.

    folder: the run folder. The screen also shows the remarks of its command, and predicts the
    effect of fewer copies from its results per secret.
    """
    remarks = read_command_remarks(folder)
    result, width = (
        phrases.make_result_printable(result),
        max(_NARROWEST, min(width, WIDTH)),
    )
    leaks = assess_leak_signals(result)
    known = detailed.read_secret_details(folder)
    doubts = ScreenEntry("DOUBT", signals.list_doubt_sentences(leaks), 3, " ")
    top = _lay_out_entries((_build_result_screen_entry(result, leaks, width), doubts), width)
    body = (
        _build_other_signals_screen_entry(result, leaks),
        _build_copies_screen_entry(result, leaks),
        _build_personal_data_screen_entry(result, leaks),
        _build_defense_causes_screen_entry(result),
        *_build_promise_screen_entries(result),
    )
    page = escaping.make_printable_line(os.path.join(folder, "report.html"))
    after = (
        _build_next_step_screen_entry(result, leaks, known, folder, remarks, width),
        ScreenEntry("report", (page,), 3),
    )
    # With room for every row: the full length of the table.
    table = _list_verbatim_extraction_lines(result, leaks, width, len(leaks.signals) + LINES)
    attacks = _attack_table_lines(result, known, width)
    # More lines of limits if the rest has room.
    for most in (5, 4, 3, 2) if coverage.list_unread_parts(result) else (3, 2):
        bottom = _lay_out_entries(
            (*body, _build_limitations_screen_entry(result, leaks, remarks, most), *after),
            width,
        )
        if len(top) + len(table) + len(attacks) + len(bottom) <= LINES:
            return Text("\n").join([*top, *table, *attacks, *bottom])
    room = LINES - len(top) - len(bottom)
    # The shortest table: its head, one row and its baseline.
    least = _list_verbatim_extraction_lines(result, leaks, width, 0)
    attacks = _attack_table_lines(result, known, width, room - len(least))
    rows = _list_verbatim_extraction_lines(result, leaks, width, room - len(attacks))
    return Text("\n").join([*top, *rows, *attacks, *bottom])


def _build_promise_screen_entries(
    result: AuditResult,
) -> tuple[ScreenEntry, ScreenEntry]:
    """Return an entry on unlearning, and one on privacy claims with contradicted claims first."""
    forgetting = map(partial(unlearning.describe_forgetting, result), result.unlearning)
    stand = map(claims.summarise_claim, claims.select_reported_claims(result))
    return (
        ScreenEntry("FORGET", tuple(forgetting), 3, " "),
        ScreenEntry("CLAIM", tuple(stand), 2),
    )


def _short_target_title(result: AuditResult, target: str) -> str:
    return _cut_line(phrases.title_target(result, target), _LONGEST)


# --- leaks, and doubts that may hide a leak ---


def _build_result_screen_entry(
    result: AuditResult, assessment: LeakAssessment, width: int
) -> ScreenEntry:
    """Return the RESULT of the first screen: each model's severity, most severe first.

    Models of the same severity share a sentence. If the sentences do not fit, first omit numbers,
    then reasons.
    """
    judged = rate_targets(assessment)
    for target in judged:
        # LIMITS shows the bounds of zeros.
        if not assessment.list_shown_signals(target):
            judged[target] = replace(judged[target], proof="")
    stand = []
    for s in claims.select_reported_claims(result):
        if s.verdict == CONTRADICTED:
            stand.append(s.target.title)
    opening = ""
    if stand:
        opening = f"The claim of {_format_first_titles(stand, 2)} is contradicted."
    ending = ""
    if UNDEFENDED not in assessment.targets:
        ending = NOTHING_MEASURED
    asked_records = coverage.describe_asked_records(result)
    worst_first = sorted(judged, key=lambda name: -severity.WORDS.index(judged[name].word))
    entry = ScreenEntry(RESULT, (), 4)
    for level, names in ((0, 4), (1, 4), (2, 2)):
        groups = dict[severity.Severity, list[str]]()
        for target in worst_first:
            brief = judged[target]
            if level >= 1:
                brief = replace(brief, proof="")
            if level == 2:
                brief = replace(brief, clause="")
            groups.setdefault(brief, []).append(target)
        sentences = [opening]
        for verdict, targets in groups.items():
            titles = [phrases.title_target(result, target) for target in targets]
            cost = _format_perplexity_cost(result, targets)
            sentences.append(verdict.describe(_format_first_titles(titles, names), cost))
        sentences += [ending, asked_records]
        entry = ScreenEntry(RESULT, tuple(filter(None, sentences)), 4, " ")
        if len(_wrap_line(" ".join(entry.items), width - GUTTER)) <= entry.max_lines:
            break
    return entry


def _format_first_titles(titles: Sequence[str], names: int) -> str:
    """Return the first `names` titles and the number of the others: `A, B and 7 more`."""
    short = [_cut_line(title, _LONGEST) for title in titles[:names]]
    n_left = len(titles) - names
    if n_left > 0:
        short.append(f"{n_left:,} more")
    return phrases.join_names(short)


def _format_perplexity_cost(result: AuditResult, targets: Sequence[str]) -> str:
    """Return `; 3.84x the perplexity (Public model: 4.87x)` for a single defended model.

    The brackets compare it with the last control model of its chain, here the public model. Return
    "" for several models, for the undefended model, or if a perplexity is unknown.
    """
    target, *others = targets
    costs = {record.name: record.perplexity for record in result.targets}
    cost, base = costs.get(target), costs.get(UNDEFENDED)
    if others or target == UNDEFENDED or cost is None or base is None or not base.value > 0:
        return ""
    control = ""
    row = find_strongest_chained_row(result, target)
    if row and row.chain:
        for step in phrases.list_defense_chain_steps(row.chain, target, beyond=True)[-1:]:
            if end := costs.get(step.after):
                title = _short_target_title(result, step.after)
                control = f" ({title}: {phrases.format_number(end.value / base.value)}x)"
    return f"; {phrases.format_number(cost.value / base.value)}x the perplexity{control}"


# --- the table ---


def _list_verbatim_extraction_lines(
    result: AuditResult, assessment: LeakAssessment, width: int, room: int
) -> list[Text]:
    """Return a line on verbatim extraction for each model and access, then the baseline.

    room: the number of lines that fit. If too many, lines without extraction are omitted first.
    """
    tested = _list_verbatim_signals(assessment)
    if not tested:
        return []
    baseline_lines = _lay_out_entries(
        (ScreenEntry("", (_format_nonmember_baseline(result, tested),), 2),), width
    )
    most = max(1, room - 1 - len(baseline_lines))
    fitting = tested
    if len(tested) > most:
        # One line of the room counts the omitted rows.
        fitting = sorted(tested, key=_key_severity)[: max(1, most - 1)]
    rows = []
    previous = None
    for s in tested:
        if s in fitting:
            first = s.target != previous
            rows.append(_build_verbatim_extraction_screen_cells(result, s, first=first))
            previous = s.target
    extracted = "extracted verbatim"
    # Columns: 0 target, 1 access, 2 count, 3 share, 4 interval, 5 remark, 6 perplexity.
    widths = []
    for column in zip(*rows, strict=True):
        widths.append(max(map(cell_len, column)))
    cost = "perplexity" if widths[6] else ""
    widths[6] = max(widths[6], len(cost))
    # The head spans columns 2 to 4 with their two gaps of two cells, and any remarks.
    gaps = 2 * (len(widths) - 1)
    overflow = sum(widths) + gaps - (width - GUTTER)
    widths[0] = min(widths[0], max(_SHORTEST, widths[0] - overflow))
    widths[3] = max(widths[3], len(extracted) - widths[2] - widths[4] - 4)
    head = (
        f"{'':{sum(widths[:2]) + 4}}{extracted:<{sum(widths[2:6]) + 6 + 2 * bool(widths[5])}}{cost}"
    )
    lines = [Text(f"{'':{GUTTER}}{head.rstrip()}", "dim")]
    for row in rows:
        line = _cut_line(_format_aligned_row(row, widths), width - GUTTER)
        lines.append(Text(" " * GUTTER + line))
    more = len(tested) - len(rows)
    if more:
        lines += [Text(f"{'':{GUTTER}}and {more:,} more rows in the report", "dim")]
    return [*lines, *baseline_lines]


def _list_verbatim_signals(assessment: LeakAssessment) -> list[LeakSignal]:
    return [s for s in assessment.signals if s.kind is VERBATIM and s.measured is not None]


def _key_severity(signal: LeakSignal) -> tuple[bool, bool, float]:
    """Return a sort key: shown leaks first, then suspected leaks; larger numbers first in each."""
    assert signal.measured is not None
    return signal.status != SHOWN, not signal.suspected, -signal.measured.value


def _build_verbatim_extraction_screen_cells(
    result: AuditResult, signal: LeakSignal, first: bool
) -> tuple[str, ...]:
    m = signal.measured
    assert m is not None  # callers pass tested signals only
    remarks = [_SHORT_REMARKS.get(m.name, signal.kind.counted.get(m.name, ""))]
    interval = phrases.format_interval(m)
    if signal.suspected:
        remarks.append(signals.format_suspicion(signal).partition(":")[0])
        if signals.is_excess_decisive(signal):
            interval = ""
    remark = ", ".join(filter(None, remarks))
    cost = ""
    title = ""
    if first:
        cost = phrases.format_target_perplexity(result, signal.target).strip(phrases.NOTHING)
        title = _short_target_title(result, signal.target)
    counts = f"{m.hits:,}/{m.n:,}"
    return title, signal.setting, counts, phrases.format_value(m), interval, remark, cost


def _format_aligned_row(row: Sequence[str], widths: Sequence[int]) -> str:
    """Return the cells of a table row on one line, names aligned left and numbers right."""
    padded = []
    for i, (text, w) in enumerate(zip(row, widths, strict=True)):
        text = _cut_line(text, w)
        space = " " * (w - cell_len(text))
        if w or i != 5:  # 0: no row has a remark
            padded.append(text + space if i in (0, 1, 4, 5) else space + text)
    return "  ".join(padded).rstrip()


def _format_nonmember_baseline(result: AuditResult, signals: Sequence[LeakSignal]) -> str:
    """Return the line that counts the non-members extracted from each model.

    Example: `non-members: 0/100 Undefended, 0/20 PMixED (attack ethicist; 95% intervals)`.
    """
    used = set()
    highest: dict[str, Measurement] = {}
    for s in signals:
        used.add(s.cell)
        if isinstance(s.baseline, Measurement):
            known = highest.setdefault(s.target, s.baseline)
            highest[s.target] = max(known, s.baseline, key=lambda m: m.value)
    # An attack that ranks samples draws only one if it decodes greedily.
    greedily = {True: ", greedy, one sample", False: ""}
    attacks = dict[str, None]()  # an ordered set
    for f in result.findings:
        if f.cell_key in used:
            attacks[f"{f.attack}{greedily[f.decodes_greedily]}"] = None
    method = "(95% intervals)"
    if attacks:
        method = f"(attack {', '.join(attacks)}; 95% intervals)"
    length = ""
    # Short suffixes are extracted of untrained text too, at a rate that depends on their length.
    if n_tokens := result.plan.get("suffix_length"):
        length = f" (suffixes of {format_count(n_tokens, 'token')})"
    if not highest:
        reason = "no non-members"
        if n := result.benchmark.nonmembers:
            reason = f"not measured on the {n:,} non-members"
        return f"{reason}: how much guessing would extract{length} is unknown {method}"
    counts = []
    for target, m in highest.items():
        counts.append(f"{m.hits:,}/{m.n:,} {_short_target_title(result, target)}")
    return f"non-members{length}: {', '.join(counts)} {method}"


def _attack_table_lines(
    result: AuditResult, known: detailed.SecretDetails, width: int, room: int = LINES
) -> list[Text]:
    lines = []
    most = width - GUTTER
    compared = attack_table.format_attack_lines(result, known, room)
    for line in compared:
        # A cut line would lose its interval.
        if cell_len(line) > most:
            first, *rest = _wrap_line(line, most - 4)
            lines.append(first)
            for part in rest:
                lines.append(f"    {part}")
        else:
            lines.append(line)
    if len(lines) > room:
        lines = [_cut_line(line, most) for line in compared]
    label = "ATTACKS"
    labelled = []
    for line in lines:
        labelled.append(Text.assemble((f"{label:{GUTTER}}", "bold"), line))
        label = ""
    return labelled


# --- below the table ---


def _build_other_signals_screen_entry(
    result: AuditResult, assessment: LeakAssessment
) -> ScreenEntry:
    """Return an entry with all signals except verbatim text and personal data, significant leaks
    first."""
    best = _find_highest_recall_row(result, assessment)
    entries = []
    for target in assessment.targets:
        for group in signals.group_signals(assessment.list_tested_signals(target)):
            listed = (
                group[0].kind is PERSONAL
                and best is not None
                and best.by_kind
                and target == best.target
            )
            if group[0].kind is not VERBATIM and not listed:
                worst = min(map(_key_severity, group))[:2]
                title = _short_target_title(result, target)
                entries.append((worst, title, signals.describe_signal_kind(group)))
    entries.sort(key=lambda entry: entry[0])
    # Name a target once, before the first of its signals.
    last = ""
    texts = []
    for _, title, text in entries:
        texts.append(text if title == last else f"{title}: {text}")
        last = title
    label = "ALSO" if _list_verbatim_signals(assessment) else "TESTED"
    return ScreenEntry(label, tuple(texts), 3)


def _find_highest_recall_row(result: AuditResult, assessment: LeakAssessment) -> Finding | None:
    """Return the finding with the highest recall on the undefended model.

    If no attack measured that model, use the first measured model.
    """
    for target in assessment.targets:
        if best := find_strongest_attack_row(result, target):
            return best
    return None


def _format_tested_target(result: AuditResult, finding: Finding) -> str:
    target = ""
    if finding.target != UNDEFENDED:
        target = f"{_short_target_title(result, finding.target)}, "
    return f"({target}{finding.setting})"


def _build_copies_screen_entry(result: AuditResult, assessment: LeakAssessment) -> ScreenEntry:
    """Return an entry on extraction by group and by copies, and on exposure by insertions."""
    best, items = _find_highest_recall_row(result, assessment), list[str]()
    if best is not None and 1 < len(best.by_group) <= _GROUPS:
        counts = _format_hit_counts(best.by_group.items())
        items.append(f"{counts} {_format_tested_target(result, best)}")
    if best is not None and len(best.strata) > 1:
        items += coverage.list_copies_phrases(best, _format_tested_target(result, best))
    elif (
        best is not None and len(best.by_repeats) > 1 and not best.measurement(documents.RECALL)
    ):  # repeats then count parts
        groups = phrases.sort_repeats(best.by_repeats)
        counts = _format_hit_counts(groups)
        items.append(f"copies {counts} {_format_tested_target(result, best)}")
        zeros = [m for _, m in groups if m.unit == "share" and m.value == 0]
        if zeros:
            widest = max(zeros, key=lambda m: m.high)
            items[-1] += (
                f"; the {phrases.format_hit_count(widest)} leaves up to "
                f"{phrases.format_percent(widest.high)}% possible"
            )
    for finding in result.findings:
        if finding.target == UNDEFENDED and (
            measured := phrases.select_insertion_exposure(finding)
        ):
            exposures = []
            for count, m in measured:
                exposures.append(f"{count}: {phrases.format_value(m)} bits")
            ns = sorted({m.n for _, m in measured})
            few = "a single canary each"
            if ns != [1]:
                few = f"means of {' to '.join(map(str, dict.fromkeys((ns[0], ns[-1]))))} canaries"
            items.append(f"exposure of canaries by copies {', '.join(exposures)} ({few})")
    return ScreenEntry("WHERE", tuple(items), 2)


def _format_hit_counts(counts: Iterable[tuple[str, Measurement]]) -> str:
    return ", ".join(
        f"{escaping.make_printable_line(name)}: {phrases.format_hit_count(m)}" for name, m in counts
    )


def _build_personal_data_screen_entry(
    result: AuditResult, assessment: LeakAssessment
) -> ScreenEntry:
    best = _find_highest_recall_row(result, assessment)
    if best is None or not best.by_kind:
        return ScreenEntry("WHAT", (), 2)
    shown_rows = set()
    for s in assessment.signals:
        if s.kind is PERSONAL and s.target == best.target and s.status == SHOWN:
            shown_rows.add(s.cell)
    if shown_rows and best.cell_key not in shown_rows:  # another attack extracts them
        best = next(finding for finding in result.findings if finding.cell_key in shown_rows)
    if shown_rows:
        remark = ""
    elif phrases.has_hits(best.by_kind):
        remark = ", not significant"
    else:
        remark = ": none extracted"
    counts = personal.format_personal_data_counts(best)
    if n_cut := sum(count.cut for count in result.benchmark.kinds.values()):
        remark += f"; {format_count(n_cut, 'more value')} cut off by a suffix's end: not counted"
    return ScreenEntry("WHAT", (f"{counts} {_format_tested_target(result, best)}{remark}",), 2)


def _build_defense_causes_screen_entry(result: AuditResult) -> ScreenEntry:
    """Return an entry with the effect of each step in every defense's chain of control models."""
    items = []
    for target in result.targets:
        row = find_strongest_chained_row(result, target.name)
        if row is None or row.chain is None:
            continue
        steps = []
        for step in phrases.list_defense_chain_steps(row.chain, target.name):
            if step.difference is not None:
                steps.append(phrases.format_brief_chain_step_effect(step))
        secrets = format_count(row.chain.whole.n, "secret")
        remark = phrases.format_baseline_excess(row.chain.whole)
        subject = f"{_cut_line(target.title, _LONGEST)} ({row.setting}, the same {secrets}{remark})"
        if steps:
            items += [f"{subject}: {'; '.join(steps)}"]
    return ScreenEntry("WHY", tuple(items), 2, ". ")


def _list_upper_bounds(assessment: LeakAssessment) -> list[str]:
    """Return the highest upper limit for verbatim text, and for personal data, never extracted.

    What another attack or access extracted of the same model has no such limit.
    """
    extracted = set()
    for s in assessment.signals:
        if s.measured and s.measured.value > 0:
            extracted.add((s.target, s.kind, s.part))
    bounds = []
    for kind in (VERBATIM, PERSONAL):
        zeros = []
        for s in assessment.signals:
            is_extracted = (s.target, s.kind, s.part) in extracted
            if s.kind is kind and s.measured and s.measured.value == 0 and not is_extracted:
                zeros.append((s.measured.high, s))
        if zeros:
            _, widest = max(zeros, key=lambda pair: pair[0])
            bounds.append(signals.format_upper_bound(widest))
    return bounds


def _build_limitations_screen_entry(
    result: AuditResult, assessment: LeakAssessment, remarks: CommandRemarks, most: int
) -> ScreenEntry:
    """Return an entry on the run's limits, such as untested kinds and upper bounds on zero counts.

    most: maximum number of lines.
    """
    bounds = _list_upper_bounds(assessment)
    items = []
    if bounds:
        possible = "Still possible"
        if signals.list_doubts(assessment):
            possible = "Once DOUBT is resolved, still possible"
        items.append(f"{possible}: {', '.join(bounds)}.")
    for f in result.findings:
        if f.stopped:
            title = _short_target_title(result, f.target)
            items.append(f"{title}, {f.attack}: {f.stopped.early_stop_sentence}.")
    items = [*dict.fromkeys(items), *remarks.limits]
    if records_label := coverage.format_coverage(result):
        items += [f"{records_label}."]
    if unread := result.benchmark.unread_columns:
        items.append(
            "Columns of the data with texts or media that are not read: "
            f"{_format_first_titles(unread, 4)}."
        )
    for targets, untested in signals.group_untested_kinds(assessment).items():
        on = ""
        if targets:
            # some targets share a title
            titles = dict.fromkeys(map(partial(phrases.title_target, result), targets))
            on = f" on {_format_first_titles(list(titles), 2)}"
        items.append(f"Not tested{on}: {', '.join(kind.short for kind in untested)}.")
    origin = personal.describe_unmarked_personal_kinds(result)
    if result.benchmark.is_of_builtin_lab:
        origin = "Synthetic lab data."
    items.append(origin)
    idle = coverage.list_missing_attacks(result)
    limits = tuple(filter(None, (*items, *idle))) or ("An attack gives a lower bound.",)
    return ScreenEntry("LIMITS", limits, most + bool(remarks.limits) + bool(idle), " ")


def _build_next_step_screen_entry(
    result: AuditResult,
    assessment: LeakAssessment,
    known: detailed.SecretDetails,
    folder: Path,
    remarks: CommandRemarks,
    width: int,
) -> ScreenEntry:
    """Return an entry with the next step.

    Its command stays on one line, so that users can copy the command.
    """
    if remarks.your_own:
        return ScreenEntry("NEXT", (f"your own model -> {remarks.your_own}",), 2)
    text = advice.suggest_next_command(assessment, folder)
    if assessment.unasked:
        steps = [advice.format_resume_line(assessment.unasked, folder)]
        if any(map(assessment.list_shown_signals, assessment.targets)):
            steps.append(text)
        return ScreenEntry("NEXT", tuple(steps), 1 + len(steps), "\n")
    if remarks.deeper and text.startswith("audit gate"):
        text = remarks.deeper
    first = "resolve DOUBT first"
    if not signals.list_doubts(assessment):
        first = advice.describe_mildest_copy_limit(result, known)
    if first:
        text = f"{first} -> {text}"
        if cell_len(text) > width - GUTTER:
            text = text.replace(" -> ", " ->\n", 1)
    return ScreenEntry("NEXT", (text,), 2)


# --- layout ---


def _lay_out_entries(entries: Sequence[ScreenEntry], width: int) -> list[Text]:
    """Return lines of `width` columns, each entry after its label."""
    lines = []
    for entry in entries:
        style = "bold" if entry.label == RESULT else ""
        for i, line in enumerate(_fit_screen_lines(entry, width - GUTTER) if entry.items else ()):
            lines.append(
                Text.assemble((f"{'' if i else entry.label:{GUTTER}}", "bold"), (line, style))
            )
    return lines


def _fit_screen_lines(entry: ScreenEntry, width: int) -> list[str]:
    """Return the items that fit into `entry.max_lines` lines, then the number of omitted items.

    If not even the first item fits, cut it.
    """
    # Try all items, then ever fewer: only wrapping tells how many lines they take.
    for n_items in range(len(entry.items), 0, -1):
        n_left = len(entry.items) - n_items
        more = (f"{n_left:,} more in the report",) if n_left else ()
        lines = _wrap_line(entry.between.join((*entry.items[:n_items], *more)), width)
        if len(lines) <= entry.max_lines:
            return lines
    *full_lines, last = _wrap_line(entry.items[0], width)[: entry.max_lines]
    return [*full_lines, _cut_line(f"{last} …", width)]


def _wrap_line(text: str, width: int) -> list[str]:
    """Return lines of at most `width` terminal columns; a wide character takes two columns."""
    return [line.plain.rstrip() for line in Text(text).wrap(Console(width=width), width)]


def _cut_line(text: str, width: int) -> str:
    """Return the text; if it is wider than `width` terminal columns, end it with an ellipsis."""
    if cell_len(text) <= width:
        return text
    return set_cell_size(text, width - 1).rstrip() + "…"
