"""For whoever mends the model: where it leaks, and which secrets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from auditor.core.nouns import UNDEFENDED
from auditor.core.result import AuditResult, Finding
from auditor.records import secret_details as detailed
from auditor.records.outcomes import PerSecret
from auditor.records.private_texts import SecretText
from auditor.records.secret_details import Details
from auditor.reports import escaping, figures, personal, phrases, secrets
from auditor.reports.blocks import Block, Figure, Figures, Forest, Group, Paragraph, PlotPoint, Series, Table
from auditor.reports.topics import MEND, Topic, forest_span, titled_row
from auditor.reports.verdict import strongest_attack_row

_DOCUMENTS = 20  # that the table of documents names, a row
_POSITIONS = 400  # of a suffix that the figure of token positions shows
_REVEALED_AT_MOST = 1_000_000  # characters: a page that a browser still likes


def _strongest_rows(result: AuditResult, details: Details) -> list[tuple[Finding, PerSecret]]:
    """The row that did best against each target, where its outcomes are kept."""
    found = (
        (best, details.rows.get(best.key)) for t in result.targets if (best := strongest_attack_row(result, t.name))
    )
    return [(finding, seen) for finding, seen in found if seen is not None]


def _where_it_leaks_blocks(result: AuditResult, details: Details) -> list[Block]:
    rows, alone = (
        _strongest_rows(result, details),
        [f for f in figures.all_figures(result) if f.plot not in figures.RESEARCH],
    )
    beside = [*_recall_by_length_figures(result, details, rows), *_probability_by_place_figures(result, details)]
    shown: list[Block] = [Figures(tuple(drawn)) for drawn in (alone, beside) if drawn]
    return [*shown, *_recall_by_group_blocks(result, details, rows), *_worst_document_blocks(result, details, rows)]


def _all_figure_blocks(result: AuditResult) -> list[Block]:
    """Where the page shows some with the evidence."""
    drawn = figures.all_figures(result)
    return [Figures(tuple(drawn))] if drawn else []


def _personal_data_blocks(result: AuditResult) -> list[Block]:
    """What the attacks with the highest recall extract of it."""
    best = (
        strongest_attack_row(result, target.name, setting) for target in result.targets for setting in phrases.SETTINGS
    )
    return personal.extracted_by_kind_blocks(result, [finding for finding in best if finding])


def _recall_by_group_blocks(
    result: AuditResult, details: Details, rows: Sequence[tuple[Finding, PerSecret]]
) -> list[Block]:
    measured = [(finding, detailed.recall_by_group(details, seen)) for finding, seen in rows]
    shown = [(finding, groups) for finding, groups in measured if groups]
    if not shown:
        return []
    tables = tuple(
        Group(
            titled_row(result, f),
            tuple(
                (escaping.to_printable_line(name), phrases.format_share_with_interval(m)) for name, m in groups.items()
            ),
        )
        for f, groups in shown
    )
    spans = tuple(forest_span(m) for _, groups in shown for m in groups.values())
    column = result.plan.get("group_column")
    caption = f"Recall by {column}" if isinstance(column, str) else "Recall by kind of record"
    return [Forest(Table("groups-table", caption, ("Group", "Extracted"), tables, frozenset({1})), spans)]


def _worst_document_blocks(
    result: AuditResult, details: Details, rows: Sequence[tuple[Finding, PerSecret]]
) -> list[Block]:
    """Records that several secrets are parts of, the worst of each row."""
    measured = [(finding, detailed.extraction_by_document(details, seen)) for finding, seen in rows]
    groups = tuple(
        Group(
            titled_row(result, f),
            tuple((name, f"{block:,}", f"{out:,} of {of:,}") for name, (block, out, of) in found.items() if block)[
                :_DOCUMENTS
            ],
        )
        for f, found in measured
        if found
    )
    if not any(group.rows for group in groups):
        return []
    caption = f"Longest block extracted from a document, in tokens; at most {_DOCUMENTS} documents a row"
    head = ("Document, by its first part", "Longest block", "Parts extracted")
    return [Table("documents-table", caption, head, groups, frozenset({1, 2}))]


def _recall_by_length_figures(
    result: AuditResult, details: Details, rows: Sequence[tuple[Finding, PerSecret]]
) -> list[Figure]:
    measured = [(finding, detailed.prefix_accuracy_by_length(details, seen)) for finding, seen in rows]
    shown = [(finding, lengths) for finding, lengths in measured if lengths]
    if not shown:
        return []
    series = tuple(
        Series(
            phrases.target_title(result, f.target),
            tuple(PlotPoint(L, m.value, m.low, m.high) for L, m in lengths.items()),
        )
        for f, lengths in shown
    )
    groups = tuple(
        Group(
            titled_row(result, f),
            tuple(
                (f"{L:,}", phrases.format_share_without_interval(m), phrases.format_interval(m))
                for L, m in lengths.items()
            ),
        )
        for f, lengths in shown
    )
    title = "Recall of the first tokens of a suffix"
    text = (
        "Share of members, of those with a suffix so long, whose first guess is right up to that token, by the "
        "strongest attack on each target."
    )
    head, axes = ("First tokens", "Right", "95% interval"), ("Tokens from the start", "Recall")
    return [Figure("lengths", "shares", title, text, head, groups, series=series, axes=axes)]


def _probability_by_place_figures(result: AuditResult, details: Details) -> list[Figure]:
    """Where in the suffix: how likely the true token is at each place, over the members."""
    shown = [
        (t, _mean_probability_by_place(details.tokens[t.name].values()))
        for t in result.targets
        if details.tokens.get(t.name)
    ]
    if not shown:
        return []
    series = tuple(Series(t.title, tuple(PlotPoint(i, p) for i, p in enumerate(means, 1))) for t, means in shown)
    groups = tuple(
        Group(t.title, tuple((f"{i:,}", f"{phrases.format_percent(p)}%") for i, p in enumerate(means, 1)))
        for t, means in shown
    )
    title = "Probability of the true token, by its place in the suffix"
    text = "Mean over the members, each token given all that stands before it: where a continuation gives itself away."
    head, axes = ("Token", "Mean probability"), ("Token of the suffix", "Mean probability")
    return [Figure("positions", "shares", title, text, head, groups, series=series, axes=axes)]


def _mean_probability_by_place(suffixes: Iterable[Sequence[float]]) -> list[float]:
    """Mean probability by position, of the suffixes that reach it."""
    rows = [np.exp(np.array(suffix[:_POSITIONS])) for suffix in suffixes]
    longest = max(map(len, rows), default=0)
    return [float(np.mean([row[i] for row in rows if len(row) > i])) for i in range(longest)]


def _per_secret_blocks(result: AuditResult, details: Details, texts: Mapping[str, SecretText]) -> list[Block]:
    block = secrets.secret_list_block(result, details, texts)
    counts = _extraction_count_blocks(result, details)
    return [*counts, *([block] if block else [])]


def _extraction_count_blocks(result: AuditResult, details: Details) -> list[Block]:
    """What each row extracted of the members: what the list below adds up to."""
    rows = []
    for finding in phrases.findings_undefended_first(result):
        seen = details.rows.get(finding.key)
        if seen is None or seen.outcome is None:
            continue
        o = seen.outcome.only(seen.outcome.member)
        kinds = (o.hit, o.any_hit & ~o.hit, o.near & ~o.any_hit, ~(o.near | o.any_hit))
        counted = (f"{int(kind.sum()):,}" for kind in kinds)
        rows.append((phrases.row_title(result, finding), finding.attack, *counted, f"{len(o.ids):,}"))
    if not rows:
        return []
    head = ("Target", "Attack", "Verbatim", "Another guess", "Nearly", "Not", "Members")
    caption = "Members by what each configuration extracts of them"
    return [Table("counts-table", caption, head, (Group("", tuple(rows)),), frozenset({2, 3, 4, 5, 6}))]


def _revealed_secret_blocks(result: AuditResult, texts: Mapping[str, SecretText]) -> list[Block]:
    """The secrets that most rows gave away come first, and stay where there are too many to show."""
    titles = {str(f.key): f"{phrases.row_title(result, f)}: {f.attack}" for f in result.findings}
    best = strongest_attack_row(result, UNDEFENDED)
    row = str(best.key) if best else ""
    rows, left = [], _REVEALED_AT_MOST
    for text in sorted(texts.values(), key=lambda text: -len(text.verbatim)):
        given = ", ".join(titles.get(name, name) for name in text.verbatim) or phrases.NOTHING
        shown = (
            text.alias,
            *map(escaping.show_invisible_characters, (text.prefix, text.suffix, text.guesses.get(row, ""))),
            escaping.to_printable_line(given),
        )
        left -= sum(map(len, shown))
        if left < 0:
            break
        rows.append(shown)
    note = f"{len(rows):,} of {len(texts):,} secrets, most extracted first. Line ends are written as ↵."
    if any(text.decoded for text in texts.values()):
        note += " The data hold token ids alone: texts are what the model's tokenizer makes of them."
    guess = f"First guess, {titles[row]}" if row in titles else "First guess"
    head = ("Secret", "Prefix", "Suffix", guess, "Given away verbatim by")
    table = Table(
        "private-table",
        "What the secrets say, and what the strongest undefended row guessed",
        head,
        (Group("", tuple(rows)),),
    )
    return [Paragraph(note), table]


TOPICS = (
    Topic(
        "where",
        "Where it leaks",
        lambda m: _where_it_leaks_blocks(m.result, m.details),
        MEND,
        1,
        6,
        lambda m: _all_figure_blocks(m.result),
    ),
    Topic("personal", "Personal data", lambda m: _personal_data_blocks(m.result), MEND, 2, turn=17),
    Topic("secrets", "Secret by secret", lambda m: _per_secret_blocks(m.result, m.details, m.texts or {}), MEND, 3),
    Topic(
        "private",
        "Private text",
        lambda m: () if m.texts is None else _revealed_secret_blocks(m.result, m.texts),
        MEND,
        4,
        turn=14,
    ),
)
