"""For whoever mends the model: where it leaks, and which secrets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from auditor.conclusions import secret_details as detailed
from auditor.conclusions.outcomes import RowValuesBySecret
from auditor.conclusions.secret_details import SecretDetails
from auditor.core.nouns import UNDEFENDED
from auditor.core.result import AuditResult, Finding
from auditor.records.private_texts import SecretText
from auditor.reports import escaping, figures, personal, phrases, secrets
from auditor.reports.blocks import (
    Block,
    Figure,
    Forest,
    ForestSpan,
    Group,
    Paragraph,
    PlotPoint,
    Series,
    Table,
)
from auditor.reports.topics import MEND, Topic, figures_blocks, forest_span, row_title_with_attack
from auditor.reports.verdict import strongest_attack_row, strongest_rows_to_report_by_access
from auditor.statistics import intervals

_DOCUMENTS = 20  # documents that their table names for each row
_SUFFIX_LENGTHS = (16, 32, 50)  # tokens, at which the next row of the table by length begins
_POSITIONS = 400  # tokens of a suffix that the figure by place shows
_REVEALED_AT_MOST = 1_000_000  # characters: a page that a browser still likes


def _strongest_rows_to_report_with_outcomes(
    result: AuditResult, details: SecretDetails
) -> list[tuple[Finding, RowValuesBySecret]]:
    """The row that did best against each target, where its outcomes are kept."""
    best = (strongest_attack_row(result, target.name) for target in result.targets)
    return [
        (finding, details.rows[finding.cell_key])
        for finding in best
        if finding and finding.cell_key in details.rows
    ]


def _where_it_leaks_blocks(result: AuditResult, details: SecretDetails) -> list[Block]:
    rows = _strongest_rows_to_report_with_outcomes(result, details)
    beside = [
        *_recall_by_length_figures(result, details, rows),
        *_probability_by_position_figures(result, details),
    ]
    return [
        *figures_blocks(f for f in figures.all_figures(result) if f.plot not in figures.RESEARCH),
        *figures_blocks(beside),
        *_probability_by_suffix_length_blocks(result, details),
        *_recall_by_group_blocks(
            result, [f for f, _ in rows if not result.target(f.target).companion]
        ),
        *_worst_document_blocks(result, details, rows),
    ]


def _personal_data_blocks(result: AuditResult) -> list[Block]:
    """What the attacks with the highest recall extract of personal data."""
    best = [
        f
        for target in result.targets
        if not target.companion
        for f in strongest_rows_to_report_by_access(result, target.name)
    ]
    return personal.personal_data_by_kind_blocks(result, best)


def _recall_by_group_blocks(result: AuditResult, rows: Sequence[Finding]) -> list[Block]:
    tables, spans = list[Group](), list[ForestSpan | None]()
    for finding in rows:
        if result.target(finding.target).companion:
            continue
        if groups := finding.by_group:
            told = ((escaping.to_printable_line(name), m) for name, m in groups.items())
            shares = tuple((name, phrases.format_share_with_interval(m)) for name, m in told)
            tables.append(Group(row_title_with_attack(result, finding), shares))
            spans += map(forest_span, groups.values())
    column = result.plan.get("group_column")
    caption = f"Recall by {column}" if isinstance(column, str) else "Recall by kind of record"
    table = Table("groups-table", caption, ("Group", "Extracted"), tuple(tables), frozenset({1}))
    return [Forest(table, tuple(spans))] if tables else []


def _worst_document_blocks(
    result: AuditResult, details: SecretDetails, rows: Sequence[tuple[Finding, RowValuesBySecret]]
) -> list[Block]:
    """Documents that several secrets are parts of: in each row those with the longest extracted
    block."""
    groups = []
    for finding, seen in rows:
        if found := detailed.extraction_counts_by_document(details, seen):
            told = [
                (name, f"{block:,}", f"{out:,} of {of:,}")
                for name, (block, out, of) in found.items()
                if block
            ]
            groups.append(Group(row_title_with_attack(result, finding), tuple(told[:_DOCUMENTS])))
    caption = (
        f"Longest block extracted from a document, in tokens; at most {_DOCUMENTS} documents a row"
    )
    head = ("Document, by its first part", "Longest block", "Parts extracted")
    table = Table("documents-table", caption, head, tuple(groups), frozenset({1, 2}))
    return [table] if any(group.rows for group in groups) else []


def _recall_by_length_figures(
    result: AuditResult, details: SecretDetails, rows: Sequence[tuple[Finding, RowValuesBySecret]]
) -> list[Figure]:
    series, groups = [], []
    for f, seen in rows:
        if lengths := detailed.first_suffix_tokens_accuracy_by_length(details, seen):
            points = tuple(PlotPoint(L, m.value, m.low, m.high) for L, m in lengths.items())
            series.append(Series(phrases.target_title(result, f.target), points))
            told = tuple(
                (f"{L:,}", *phrases.cells_of_measurement(m)[:2]) for L, m in lengths.items()
            )
            groups.append(Group(row_title_with_attack(result, f), told))
    title = "Recall of the first tokens of a suffix"
    text = (
        "Share of members, of those with a suffix so long, whose first guess is right up to that "
        "token, by the strongest attack on each target."
    )
    head, axes = ("First tokens", "Right", "95% interval"), ("Tokens from the start", "Recall")
    figure = Figure(
        "lengths", "shares", title, text, head, tuple(groups), series=tuple(series), axes=axes
    )
    return [figure] if groups else []


def _probability_by_position_figures(result: AuditResult, details: SecretDetails) -> list[Figure]:
    """Where in the suffix: how likely the true token is at each place, over the members."""
    series, groups = [], []
    for t in result.targets:
        if suffixes := details.tokens.get(t.name):
            means = list(enumerate(_plotted_mean_probability_by_position(suffixes.values()), 1))
            series.append(Series(t.title, tuple(PlotPoint(i, p) for i, p in means)))
            groups.append(
                Group(t.title, tuple((f"{i:,}", f"{phrases.format_percent(p)}%") for i, p in means))
            )
    title = "Probability of the true token, by its place in the suffix"
    text = (
        "Mean over the members, each token given all that stands before it: where a continuation "
        "gives itself away."
    )
    head, axes = ("Token", "Mean probability"), ("Token of the suffix", "Mean probability")
    figure = Figure(
        "positions", "shares", title, text, head, tuple(groups), series=tuple(series), axes=axes
    )
    return [figure] if groups else []


def _probability_by_suffix_length_blocks(
    result: AuditResult, details: SecretDetails
) -> list[Block]:
    """Return a table of the probability of whole suffixes by their length, if their lengths
    differ."""
    groups: list[Group] = []
    for target in result.targets:
        suffixes = list(details.tokens.get(target.name, {}).values())
        probabilities = np.exp([sum(suffix) for suffix in suffixes])
        bands = np.digitize([len(suffix) for suffix in suffixes], _SUFFIX_LENGTHS)
        rows = []
        for band in np.unique(bands):
            lengths = [
                len(suffix) for suffix, of in zip(suffixes, bands, strict=True) if of == band
            ]
            mean = intervals.mean_probability(
                "extraction_probability_ancestral", probabilities[bands == band]
            )
            tokens = (
                f"{min(lengths)} to {max(lengths)}"
                if min(lengths) < max(lengths)
                else f"{min(lengths)}"
            )
            rows.append((tokens, f"{len(lengths):,}", *phrases.cells_of_measurement(mean)[:2]))
        if len(rows) > 1:
            groups.append(Group(target.title, tuple(rows)))
    caption = (
        "Probability of a whole suffix by its length, in one sample of the model's own "
        "distribution: a short suffix is more likely than a long one, so compare only suffixes of "
        "the same length"
    )
    head = ("Tokens of the suffix", "Secrets", "Mean probability", "95% interval")
    return (
        [Table("suffix-lengths-table", caption, head, tuple(groups), frozenset({1, 2, 3}))]
        if groups
        else []
    )


def _plotted_mean_probability_by_position(suffixes: Iterable[Sequence[float]]) -> list[float]:
    """Mean probability by position, of the suffixes that reach it."""
    # `Details.tokens` holds log-probabilities, in nats.
    rows = [np.exp(np.array(suffix[:_POSITIONS])) for suffix in suffixes]
    longest = max(map(len, rows), default=0)
    return [float(np.mean([row[i] for row in rows if len(row) > i])) for i in range(longest)]


def _per_secret_blocks(
    result: AuditResult, details: SecretDetails, texts: Mapping[str, SecretText]
) -> list[Block]:
    block = secrets.secret_list_block(result, details, texts)
    return [*_extraction_count_blocks(result, details), *([block] if block else [])]


def _extraction_count_blocks(result: AuditResult, details: SecretDetails) -> list[Block]:
    """What each row extracted of the members: what the list below adds up to."""
    rows = []
    for finding in phrases.findings_in_report_order(result):
        seen = details.rows.get(finding.cell_key)
        if seen is None or seen.outcome is None:
            continue
        o = seen.outcome.select_secrets(seen.outcome.member)
        # Each member counts once, by the best that was extracted of it; the first guess is one of
        # any_hit.
        kinds = (
            o.hit,
            o.any_hit & ~o.hit,
            o.is_near_verbatim & ~o.any_hit,
            ~(o.is_near_verbatim | o.any_hit),
        )
        counted = (f"{int(kind.sum()):,}" for kind in kinds)
        rows.append(
            (phrases.row_title(result, finding), finding.attack, *counted, f"{len(o.ids):,}")
        )
    head = ("Target", "Attack", "Verbatim", "Another guess", "Nearly", "Not", "Members")
    caption = "Members by what each configuration extracts of them"
    table = Table(
        "counts-table", caption, head, (Group("", tuple(rows)),), frozenset({2, 3, 4, 5, 6})
    )
    return [table] if rows else []


def _revealed_secret_blocks(result: AuditResult, texts: Mapping[str, SecretText]) -> list[Block]:
    """Private text, the secrets that most rows gave away first; what is beyond _REVEALED_AT_MOST is
    left out."""
    titles = {
        str(f.cell_key): f"{phrases.row_title(result, f)}: {f.attack}" for f in result.findings
    }
    best = strongest_attack_row(result, UNDEFENDED)
    # Private texts name rows by the text of their key.
    row = str(best.cell_key) if best else ""
    rows, left = [], _REVEALED_AT_MOST
    for text in sorted(texts.values(), key=lambda text: -len(text.verbatim)):
        given = ", ".join(titles.get(name, name) for name in text.verbatim) or phrases.NOTHING
        shown = (
            text.alias,
            *map(
                escaping.show_invisible_characters,
                (text.prefix, text.suffix, text.guesses.get(row, "")),
            ),
            escaping.to_printable_line(given),
        )
        left -= sum(map(len, shown))
        if left < 0:
            break
        rows.append(shown)
    note = (
        f"{len(rows):,} of {len(texts):,} secrets, most extracted first. Line ends are written as "
        "↵."
    )
    if any(text.decoded for text in texts.values()):
        note += (
            " The data hold token ids alone: texts are what the model's tokenizer makes of them."
        )
    guess = f"First guess, {titles[row]}" if row in titles else "First guess"
    head = ("Secret", "Prefix", "Suffix", guess, "Given away verbatim by")
    caption = "What the secrets say, and what the strongest undefended row guessed"
    return [Paragraph(note), Table("private-table", caption, head, (Group("", tuple(rows)),))]


TOPICS = (
    Topic(
        "where",
        "Where it leaks",
        lambda m: _where_it_leaks_blocks(m.result, m.details),
        MEND,
        1,
        6,
        lambda m: figures_blocks(
            figures.all_figures(m.result)
        ),  # the page shows some with the evidence
    ),
    Topic("personal", "Personal data", lambda m: _personal_data_blocks(m.result), MEND, 2, turn=16),
    Topic(
        "secrets",
        "Secret by secret",
        lambda m: _per_secret_blocks(m.result, m.details, m.texts or {}),
        MEND,
        3,
    ),
    Topic(
        "private",
        "Private text",
        lambda m: () if m.texts is None else _revealed_secret_blocks(m.result, m.texts),
        MEND,
        4,
        turn=13,
    ),
)
