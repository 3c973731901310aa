"""Report how much a model still reveals of the records that it should forget.

The measurements are before unlearning, after unlearning, and after relearning other records.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from auditor.core.result import AuditResult, GroupRecall, Unlearning
from auditor.reports import phrases
from auditor.reports.blocks import Block, Group, Paragraph, Table
from auditor.reports.topics import DECIDE, ReportMaterial, Topic
from auditor.statistics.unlearning import (
    AFTER,
    BEFORE,
    FORGOTTEN,
    NONMEMBERS,
    RELEARNED,
    RETAINED,
    RETRAINED,
    RETRAINED_RELEARNED,
)

_HEADS = {
    BEFORE: "Before",
    AFTER: "After",
    RELEARNED: "Relearned",
    RETRAINED: "Retrained",
    RETRAINED_RELEARNED: "Retrained, relearned",
}
_GROUPS = {FORGOTTEN: "forgotten", RETAINED: "retained", NONMEMBERS: "non-members"}
_NAMES = {
    "greedy": "greedy decoding gives",
    "rank_bound": "the ceiling over all temperatures, top-k and top-p",
}
_USELESS = 1.5  # ratio of perplexities; above it, the model leaks little only because it is useless
_NOTE = (
    "Forgotten: members that the model was to forget; retained: the other members, the control; "
    "non-members: the baseline; retrained: a model that never saw the forgotten records. "
    "Relearning trains a copy on other training records, which are neither attacked nor to be "
    "forgotten: the forgotten records that it brings back were still in the weights, unless the "
    "same steps bring back as many in the retrained model. Changes are paired by secret, with 95% "
    "intervals. A useless model forgets too, so the table shows perplexity on held-out text."
)


def describe_forgetting(result: AuditResult, unlearning: Unlearning) -> str:
    """Describe the remaining leakage and, if measured, the effect of relearning and the cost."""
    title = phrases.title_target(result, unlearning.target)
    labels = [_format_unlearning_change(r) for r in unlearning.numbers if r.group == FORGOTTEN]
    if not labels:
        return f"{title}: nothing was measured about the records that it should have forgotten."
    opening = (
        f"{title}, {unlearning.forgotten:,} records forgotten of "
        f"{unlearning.forgotten + unlearning.retained:,}: "
        f"{'; '.join(labels)}"
    )
    sentences = (
        *_describe_forgotten_records(unlearning),
        *_describe_relearning(unlearning),
        _describe_perplexity_cost(unlearning),
    )
    return " ".join((f"{opening}.", *sentences))


def _format_unlearning_change(row: GroupRecall) -> str:
    retrained = ""
    if RETRAINED in row.values:
        retrained = f", retrained {phrases.format_value(row.values[RETRAINED])}"
    before, after = map(phrases.format_value, (row.values[BEFORE], row.values[AFTER]))
    if before != after:
        after = phrases.format_measurement_value(row.values[AFTER])
    return f"{_format_recall_measure(row)} {before} → {after}{retrained}"


def _format_recall_measure(row: GroupRecall) -> str:
    return _NAMES.get(row.name) or phrases.lower_first(phrases.format_metric(row.name))


def _describe_forgotten_records(unlearning: Unlearning) -> Iterator[str]:
    """Yield sentences that say whether the records are forgotten.

    Compare with a model trained without these records or, if none exists, with non-members.
    """
    floors = {}
    for row in unlearning.numbers:
        if row.group == NONMEMBERS:
            floors[(row.attack, row.name)] = row.values[AFTER]
    possible = []
    remaining = []
    with_floor = False
    higher = []
    for row in unlearning.numbers:
        if row.group != FORGOTTEN:
            continue
        if excess := row.changes.get("left"):
            most = phrases.format_point_difference(replace(excess, value=excess.high))
            possible.append(f"{_format_recall_measure(row)} at most {most} more")
            if excess.low > 0:
                remaining.append(_format_recall_measure(row))
        if floor := floors.get((row.attack, row.name)):
            with_floor = True
            if row.values[AFTER].low > floor.high:
                higher.append(_format_recall_measure(row))
    if remaining:
        yield f"Still there, more than in the retrained model, by {', '.join(remaining)}."
    elif possible:
        yield (
            "Queried as it is, the model is not shown to hold more of them than the retrained "
            f"model: {'; '.join(possible)}."
        )
    elif higher:
        yield f"Above non-members by {', '.join(higher)}."
    elif with_floor:
        yield "Not shown to be above non-members."


def _describe_relearning(unlearning: Unlearning) -> Iterator[str]:
    if not unlearning.steps:
        return
    trained = f"{unlearning.steps} steps of relearning on {unlearning.texts:,} other records"
    rows = [r for r in unlearning.numbers if r.group == FORGOTTEN and RELEARNED in r.values]
    if not rows:
        yield f"{trained} were not measured."
        return
    back: list[str] = []
    rest: list[str] = []
    for row in rows:
        (back if _is_relearning_shown(row) else rest).append(_format_relearned_records(row))
    if back:
        yield f"{trained} bring them back, so they were hidden and not gone: {'; '.join(back)}."
    if rest:
        opening = f"{trained} are not shown to bring them back"
        if back:
            opening = "Not shown to come back"
        yield f"{opening}: {'; '.join(rest)}."
    if not any("came_back" in row.changes for row in rows):
        yield (
            "Without --retrained, records that come back cannot be distinguished from what such "
            "steps teach any model."
        )


def _is_relearning_shown(row: GroupRecall) -> bool:
    """Return whether relearning significantly restores the leakage of forgotten records.

    The effect on a model that never saw these records is subtracted, if measured.
    """
    return row.changes.get("came_back", row.changes["relearned"]).low > 0


def _format_relearned_records(row: GroupRecall) -> str:
    share = row.changes.get("share_back")
    never = row.values.get(RETRAINED_RELEARNED)
    part = ""
    if share and _is_relearning_shown(row):
        part = f", {phrases.format_measurement_value(share)} of what was forgotten"
    retrained = f", retrained {phrases.format_value(never)}" if never else ""
    after, again = map(phrases.format_value, (row.values[AFTER], row.values[RELEARNED]))
    return f"{_format_recall_measure(row)} {after} → {again}{part}{retrained}"


def _describe_perplexity_cost(unlearning: Unlearning) -> str:
    before, after, ratio = map(unlearning.perplexity.get, (BEFORE, AFTER, "ratio"))
    if before is None or after is None:
        return "What it cost in perplexity was not measured."
    times = ""
    if ratio:
        times = f" ({phrases.format_relative_change(ratio.value - 1)})"
    useless = ""
    if ratio and ratio.low > _USELESS:
        useless = "; a model that says little leaks little"
    return (
        f"Held-out perplexity {phrases.format_value(before)} → "
        f"{phrases.format_value(after)}{times}{useless}."
    )


# --- the table ---


def _build_unlearning_blocks(material: ReportMaterial) -> Iterator[Block]:
    result = material.result
    measured = [unlearning for unlearning in result.unlearning if unlearning.numbers]
    for unlearning in measured:
        yield Paragraph(describe_forgetting(result, unlearning))
        yield _build_forgotten_records_table(result, unlearning)
    if measured:
        yield Paragraph(_NOTE)


def _build_forgotten_records_table(result: AuditResult, unlearning: Unlearning) -> Table:
    shown_models = []
    for model in _HEADS:
        if any(model in row.values for row in unlearning.numbers):
            shown_models.append(model)
    rows: dict[str, list[tuple[str, ...]]] = {}
    cell = phrases.format_measurement_value
    for row in unlearning.numbers:
        cells = [f"{_GROUPS[row.group]} ({row.values[AFTER].n:,})"]
        cells += map(cell, map(row.values.get, shown_models))
        cells += map(cell, map(row.changes.get, ("unlearned", "relearned", "came_back")))
        title = f"{phrases.format_metric(row.name)} · {row.attack}"
        rows.setdefault(title, []).append(tuple(cells))
    costs = map(phrases.format_value, map(unlearning.perplexity.get, shown_models))
    ratio = unlearning.perplexity.get("ratio")
    times = f"× {cell(ratio)}" if ratio else phrases.NOTHING
    rows["Held-out perplexity"] = [("all", *costs, times)]
    head = (
        "Records",
        *map(_HEADS.__getitem__, shown_models),
        "After − before",
        "Relearned − after",
        "The same, minus retrained",
    )
    title = phrases.title_target(result, unlearning.target)
    return Table(
        f"unlearning-{unlearning.target}",
        f"What {title} still knows of the records to forget",
        head,
        [Group(group, group_rows) for group, group_rows in rows.items()],
        range(1, len(head)),
    )


TOPICS = (
    Topic(
        "unlearning",
        "What remains of the forgotten records",
        _build_unlearning_blocks,
        DECIDE,
        6,
        turn=15,
    ),
)
