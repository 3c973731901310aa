"""Report how much a model still reveals of records that it was to forget.

The measurements are before unlearning, after unlearning, and after relearning other records.
"""

from __future__ import annotations

from collections.abc import Iterator

from auditor.core.result import AuditResult, GroupRecall, Unlearning
from auditor.reports import phrases
from auditor.reports.blocks import Block, Group, Paragraph, Table
from auditor.reports.topics import DECIDE, Topic
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
    RETRAINED: "Never saw them",
    RETRAINED_RELEARNED: "Never saw them, relearned",
}
_GROUPS = {FORGOTTEN: "forgotten", RETAINED: "retained", NONMEMBERS: "non-members"}
_NAMES = {
    "greedy": "greedy decoding gives",
    "rank_bound": "the ceiling over all temperatures, top-k and top-p",
}
_USELESS = 1.5  # times the perplexity: beyond, the model leaks little because it says little
_NOTE = (
    "Forgotten: members that the model was to forget; retained: the other members, the control; "
    "non-members: the baseline. Relearning trains a copy on records that were trained on before, "
    "none of which is attacked or should be forgotten: forgotten records that it brings back were "
    "still in the weights, unless the same steps bring back as many in a model that never saw "
    "them. Changes are paired by secret, with 95% intervals. A useless model forgets too: "
    "perplexity on held-out text is next to it."
)


def describe_forgetting(result: AuditResult, unlearning: Unlearning) -> str:
    """Describe the remaining leakage, the leakage that relearning restores, and the cost, if
    measured.
    """
    title = phrases.title_target(result, unlearning.target)
    labels = []
    for row in unlearning.numbers:
        if row.group == FORGOTTEN:
            labels.append(_format_unlearning_change(row))
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
    if RETRAINED in row.values:
        retrained = f", never seen {phrases.format_value(row.values[RETRAINED])}"
    else:
        retrained = ""
    before, after = (phrases.format_value(row.values[model]) for model in (BEFORE, AFTER))
    if before == after:
        now = after
    else:
        now = phrases.format_measurement_value(row.values[AFTER])
    return f"{_format_recall_measure(row)} {before} → {now}{retrained}"


def _format_recall_measure(row: GroupRecall) -> str:
    return _NAMES.get(row.name) or phrases.lower_first(phrases.format_metric(row.name))


def _describe_forgotten_records(unlearning: Unlearning) -> Iterator[str]:
    """Yield a sentence on whether the records are forgotten, compared with a model trained without
    them.

    Without such a model, compare with non-members.
    """
    rows = [row for row in unlearning.numbers if row.group == FORGOTTEN]
    # "left": recall minus that of the model trained without the records.
    compared = [row for row in rows if "left" in row.changes]
    if compared:
        remaining = []
        for row in compared:
            if row.changes["left"].low > 0:
                remaining.append(_format_recall_measure(row))
        forgotten = "Queried as it is, the model shows no more of it than one that never saw it."
        yield (
            f"Still there, more than in a model that never saw it, by {', '.join(remaining)}."
            if remaining
            else forgotten
        )
        return
    floors = {}
    for row in unlearning.numbers:
        if row.group == NONMEMBERS:
            floors[(row.attack, row.name)] = row
    baselines = []
    for row in rows:
        if (row.attack, row.name) in floors:
            baselines.append((row, floors[row.attack, row.name]))
    # Other records, so not paired: require disjoint intervals, which is stricter than a test of the
    # difference.
    remaining = []
    for row, floor in baselines:
        if row.values[AFTER].low > floor.values[AFTER].high:
            remaining.append(_format_recall_measure(row))
    if baselines:
        sentence = f"Above records it never saw by {', '.join(remaining)}."
        yield sentence if remaining else "Not shown to be above records it never saw."


def _describe_relearning(unlearning: Unlearning) -> Iterator[str]:
    if not unlearning.steps:
        return
    trained = f"{unlearning.steps} steps of relearning on {unlearning.texts:,} other records"
    rows = []
    for row in unlearning.numbers:
        if row.group == FORGOTTEN and RELEARNED in row.values:
            rows.append(row)
    if not rows:
        yield f"{trained} were not measured."
        return
    back = [row for row in rows if _is_relearning_shown(row)]
    rest = [row for row in rows if not _is_relearning_shown(row)]
    if back:
        yield (
            f"{trained} bring it back, so it was hidden and not gone: "
            f"{'; '.join(map(_format_relearned_records, back))}."
        )
    if rest:
        if back:
            opening = "Not shown to come back"
        else:
            opening = f"{trained} are not shown to bring it back"
        yield f"{opening}: {'; '.join(map(_format_relearned_records, rest))}."
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
    if share and _is_relearning_shown(row):
        part = f", {phrases.format_measurement_value(share)} of what was taken"
    else:
        part = ""
    if never:
        retrained = f", never seen {phrases.format_value(never)}"
    else:
        retrained = ""
    after, again = (phrases.format_value(row.values[model]) for model in (AFTER, RELEARNED))
    return f"{_format_recall_measure(row)} {after} → {again}{part}{retrained}"


def _describe_perplexity_cost(unlearning: Unlearning) -> str:
    before, after, ratio = (unlearning.perplexity.get(name) for name in (BEFORE, AFTER, "ratio"))
    if before is None or after is None:
        return "What it cost in perplexity was not measured."
    if ratio:
        times = f" ({phrases.format_relative_change(ratio.value - 1)})"
    else:
        times = ""
    if ratio and ratio.low > _USELESS:
        useless = "; a model that says little leaks little"
    else:
        useless = ""
    return (
        f"Held-out perplexity {phrases.format_value(before)} → "
        f"{phrases.format_value(after)}{times}{useless}."
    )


# --- the table
# -----------------------------------------------------------------------------------------------


def _build_unlearning_blocks(result: AuditResult) -> list[Block]:
    blocks = list[Block]()
    for unlearning in result.unlearning:
        if unlearning.numbers:
            blocks += [
                Paragraph(describe_forgetting(result, unlearning)),
                _build_forgotten_records_table(result, unlearning),
            ]
    return [*blocks, Paragraph(_NOTE)] if blocks else []


def _build_forgotten_records_table(result: AuditResult, unlearning: Unlearning) -> Table:
    shown_models = []
    for model in _HEADS:
        if any(model in row.values for row in unlearning.numbers):
            shown_models.append(model)
    kinds = dict.fromkeys((row.attack, row.name) for row in unlearning.numbers)
    groups = tuple(
        Group(
            f"{phrases.format_metric(name)} · {attack}",
            tuple(
                _record_group_table_row(row, shown_models)
                for row in unlearning.numbers
                if (row.attack, row.name) == (attack, name)
            ),
        )
        for attack, name in kinds
    )
    costs = tuple(phrases.format_value(unlearning.perplexity.get(model)) for model in shown_models)
    ratio = unlearning.perplexity.get("ratio")
    if ratio:
        times = f"× {phrases.format_measurement_value(ratio)}"
    else:
        times = phrases.NOTHING
    last = Group("Held-out perplexity", (("all", *costs, times),))
    head = (
        "Records",
        *(_HEADS[model] for model in shown_models),
        "After − before",
        "Relearned − after",
        "That − never saw",
    )
    caption = (
        f"What is left of what {phrases.title_target(result, unlearning.target)} was to forget"
    )
    return Table(
        f"unlearning-{unlearning.target}",
        caption,
        head,
        (*groups, last),
        frozenset(range(1, len(head))),
    )


def _record_group_table_row(row: GroupRecall, models: list[str]) -> tuple[str, ...]:
    changes = (row.changes.get(name) for name in ("unlearned", "relearned", "came_back"))
    return (
        f"{_GROUPS[row.group]} ({row.values[AFTER].n:,})",
        *(phrases.format_measurement_value(row.values.get(model)) for model in models),
        *map(phrases.format_measurement_value, changes),
    )


TOPICS = (
    Topic(
        "unlearning",
        "What is left of the forgotten",
        lambda m: _build_unlearning_blocks(m.result),
        DECIDE,
        6,
        turn=15,
    ),
)
