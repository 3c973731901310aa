"""Show the model's owner where the model leaks, and which secrets leak."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from auditor.conclusions import secret_details as detailed
from auditor.conclusions.outcomes import ValuesBySecret
from auditor.conclusions.secret_details import SecretDetails
from auditor.core.nouns import UNDEFENDED
from auditor.core.result import AuditResult, Finding
from auditor.records.private_texts import SecretText
from auditor.reports import escaping, figures, personal, phrases, secrets
from auditor.reports.blocks import (
    Block,
    Figure,
    Figures,
    Forest,
    ForestSpan,
    Group,
    Paragraph,
    PlotPoint,
    Series,
    Table,
    make_table,
)
from auditor.reports.topics import (
    MEND,
    ReportMaterial,
    Topic,
    build_forest_span,
    title_attack_row,
)
from auditor.reports.verdict import find_strongest_attack_row, list_strongest_rows
from auditor.statistics import intervals

_DOCUMENTS = 20  # documents listed for each attack
_SUFFIX_LENGTHS = (16, 32, 50)  # tokens: lower edges of the rows of the table by length
_POSITIONS = 400  # suffix tokens in the figure by place
_REVEALED_AT_MOST = 1_000_000  # characters: browsers still handle such a page well


def _pair_strongest_rows(
    result: AuditResult, details: SecretDetails
) -> list[tuple[Finding, ValuesBySecret]]:
    """Return each model's most successful attack, paired with the attack's outcomes by secret.

    Attacks whose outcomes are not stored are left out.
    """
    pairs = []
    for target in result.targets:
        best = find_strongest_attack_row(result, target.name)
        if best and best.cell_key in details.values_by_cell:
            pairs.append((best, details.values_by_cell[best.cell_key]))
    return pairs


def _build_leak_location_blocks(material: ReportMaterial) -> Iterator[Block]:
    result = material.result
    details = material.details
    rows = _pair_strongest_rows(result, details)
    yield Figures(figures.draw_all_figures(result, research=False))
    yield Figures(
        [
            *_draw_length_recall_figures(result, details, rows),
            *_draw_position_probability_figures(result, details),
        ]
    )
    yield _build_suffix_length_table(result, details)
    yield from _build_group_recall_blocks(
        result, [f for f, _ in rows if not result.target(f.target).companion]
    )
    yield _build_worst_document_table(result, details, rows)


def _build_personal_data_blocks(material: ReportMaterial) -> Iterator[Block]:
    """Return blocks about personal data extracted by each model's most successful attacks."""
    result = material.result
    best = []
    for target in result.targets:
        if not target.companion:
            best += list_strongest_rows(result, target.name)
    return personal.build_personal_kind_blocks(result, best)


def _build_group_recall_blocks(result: AuditResult, rows: Sequence[Finding]) -> Iterator[Block]:
    tables = []
    spans: list[ForestSpan | None] = []
    notes = []
    some_extracted = any(phrases.has_hits(f.by_group) for f in rows)
    for finding in rows:
        if groups := finding.by_group:
            title = title_attack_row(result, finding)
            if some_extracted and not phrases.has_hits(groups):
                notes.append(phrases.describe_no_hits(title, groups.values()))
                continue
            shares = []
            for name, m in groups.items():
                shares.append((escaping.make_printable_line(name), phrases.format_share(m)))
            tables.append(Group(title, shares))
            spans += map(build_forest_span, groups.values())
    column = result.plan.get("group_column")
    if not isinstance(column, str):
        column = "kind of record"
    yield Forest(
        Table("groups-table", f"Recall by {column}", ("Group", "Recall"), tables, {1}), spans
    )
    yield Paragraph(" ".join(notes))


def _build_worst_document_table(
    result: AuditResult, details: SecretDetails, rows: Sequence[tuple[Finding, ValuesBySecret]]
) -> Table:
    """Return a table of documents that hold several secrets, grouped by attack result."""
    groups = []
    for finding, values in rows:
        if counts := detailed.count_document_extractions(details, values):
            cells = []
            for name, (block, out, total) in counts.items():
                if block:
                    cells.append((name, f"{block:,}", f"{out:,} of {total:,}"))
            groups.append(Group(title_attack_row(result, finding), cells[:_DOCUMENTS]))
    caption = (
        f"Longest block extracted from a document, in tokens; at most {_DOCUMENTS} documents a row"
    )
    head = ("Document (its first part)", "Longest block", "Parts extracted")
    return Table("documents-table", caption, head, groups, {1, 2})


def _draw_length_recall_figures(
    result: AuditResult, details: SecretDetails, rows: Sequence[tuple[Finding, ValuesBySecret]]
) -> Iterator[Figure]:
    series = []
    columns = []
    for f, values in rows:
        if lengths := detailed.measure_length_accuracy(details, values):
            points = []
            column = {}
            for length, m in lengths.items():
                points.append(PlotPoint(length, m.value, m.low, m.high))
                column[f"{length:,}"] = phrases.format_measurement_value(m)
            series.append(Series(phrases.title_target(result, f.target), points))
            columns.append((title_attack_row(result, f), column))
    title = "Recall of the first tokens of a suffix"
    text = (
        "Share of members, of those whose suffix is this long, whose first guess is right up to "
        "that token; the strongest attack on each target."
    )
    if columns:
        table = figures.tabulate_targets("Tokens", columns)
        axes = ("Tokens from the start", "Recall")
        yield Figure("lengths", "shares", title, text, *table, series, axes=axes)


def _draw_position_probability_figures(
    result: AuditResult, details: SecretDetails
) -> Iterator[Figure]:
    """Plot the members' mean probability of the true token at each position of the suffix."""
    series = []
    columns = []
    for t in result.targets:
        if suffixes := details.tokens.get(t.name):
            points = []
            column = {}
            longest = min(_POSITIONS, int(suffixes.lengths.max(initial=0)))
            for i in range(1, longest + 1):
                _, nats = suffixes.take_position(i - 1)  # of the suffixes that are long enough
                p = float(np.mean(np.exp(nats)))
                points.append(PlotPoint(i, p))
                # The table has positions 1, 2, 4, 8, … and the last.
                if i & (i - 1) == 0 or i == longest:
                    column[f"{i:,}"] = f"{phrases.format_percent(p)}%"
            series.append(Series(t.title, points))
            columns.append((t.title, column))
    title = "Probability of the true token, by position in the suffix"
    text = "Mean probability over the members, given all earlier tokens."
    if columns:
        table = figures.tabulate_targets("Tokens", columns)
        axes = ("Token of the suffix", "Mean probability")
        yield Figure("positions", "shares", title, text, *table, series, axes=axes)


def _build_suffix_length_table(result: AuditResult, details: SecretDetails) -> Table:
    """Return a table of the mean probability of a whole suffix, by length of the suffix.

    A model whose suffixes are all about equally long has no rows.
    """
    groups = []
    for target in result.targets:
        if (suffixes := details.tokens.get(target.name)) is None:
            continue
        probabilities = np.exp(suffixes.sums)
        bands = np.digitize(suffixes.lengths, _SUFFIX_LENGTHS)
        rows = []
        for band in np.unique(bands):
            lengths = suffixes.lengths[bands == band]
            mean = intervals.compute_mean_probability(
                "extraction_probability_ancestral", probabilities[bands == band]
            )
            tokens = f"{lengths.min()}"
            if lengths.min() < lengths.max():
                tokens = f"{lengths.min()} to {lengths.max()}"
            rows.append((tokens, f"{len(lengths):,}", *phrases.format_measurement_cells(mean)[:2]))
        if len(rows) > 1:
            groups.append(Group(target.title, rows))
    caption = (
        "Probability of a whole suffix by its length, in one sample of the model's own "
        "distribution: a short suffix is more likely than a long one, so compare only suffixes of "
        "the same length"
    )
    head = ("Tokens", "Secrets", "Chance per sample", "95% interval")
    return Table("suffix-lengths-table", caption, head, groups, {1, 2, 3})


def _build_per_secret_blocks(
    result: AuditResult, details: SecretDetails, texts: Mapping[str, SecretText]
) -> Iterator[Block]:
    yield _build_extraction_count_table(result, details)
    if block := secrets.build_secret_list(result, details, texts):
        yield block


def _build_extraction_count_table(result: AuditResult, details: SecretDetails) -> Table:
    """Return a table of how many members each attack extracted."""
    rows = []
    for finding in phrases.sort_findings(result):
        values = details.values_by_cell.get(finding.cell_key)
        if values is None or not values.is_judged:
            continue
        o = values.select_secrets(values.member)
        counts = []
        for kind in (o.hit, o.any_hit & ~o.hit, o.is_near_verbatim & ~o.any_hit):
            counts.append(f"{kind.sum():,}")
        if {*counts} != {"0"}:
            rows.append((phrases.title_row(result, finding), finding.attack, *counts))
    head = ("Target", "Attack", "First guess", "Another guess", "Near-verbatim only")
    caption = "Extracted members; configurations with none are left out"
    return make_table("counts-table", caption, head, rows, {2, 3, 4})


def _build_revealed_secret_blocks(
    result: AuditResult, texts: Mapping[str, SecretText]
) -> list[Block]:
    """Return blocks of private text; secrets that the most attacks extracted come first.

    In total, at most _REVEALED_AT_MOST characters are shown.
    """
    titles = {}
    for f in result.findings:
        titles[str(f.cell_key)] = f"{phrases.title_row(result, f)}: {f.attack}"
    best = find_strongest_attack_row(result, UNDEFENDED)
    guess = "First guess"
    row = ""
    if best is not None:
        row = str(best.cell_key)
        guess = f"First guess, {titles[row]}"
    rows = []
    n_characters_left = _REVEALED_AT_MOST
    for text in sorted(texts.values(), key=lambda text: -len(text.verbatim)):
        rows_phrase = ", ".join(map(titles.get, text.verbatim, text.verbatim))
        private = (text.prefix, text.suffix, text.guesses.get(row, ""))
        cells = (
            text.alias,
            *map(escaping.show_invisible_characters, private),
            escaping.make_printable_line(rows_phrase or phrases.NOTHING),
        )
        n_characters_left -= sum(map(len, cells))
        if n_characters_left < 0:
            break
        rows.append(cells)
    note = (
        f"{len(rows):,} of {len(texts):,} secrets, most extracted first. Line ends are written as "
        "↵."
    )
    if any(text.decoded for text in texts.values()):
        note += " The data contain only token ids: the model's tokenizer made the texts."
    head = ("Secret", "Prefix", "Suffix", guess, "Extracted verbatim by")
    caption = "Text of the secrets, and the guesses of the strongest attack without a defense"
    return [Paragraph(note), make_table("private-table", caption, head, rows)]


TOPICS = (
    Topic(
        "where",
        "Where it leaks",
        _build_leak_location_blocks,
        MEND,
        1,
        6,
        # The page shows some of these figures with the evidence.
        lambda m: [Figures(figures.draw_all_figures(m.result))],
    ),
    Topic(
        "personal",
        "Personal data",
        _build_personal_data_blocks,
        MEND,
        2,
        turn=16,
    ),
    Topic(
        "secrets",
        "Secret by secret",
        lambda m: _build_per_secret_blocks(m.result, m.details, m.texts or {}),
        MEND,
        3,
    ),
    Topic(
        "private",
        "Private text",
        lambda m: () if m.texts is None else _build_revealed_secret_blocks(m.result, m.texts),
        MEND,
        4,
        turn=13,
    ),
)
