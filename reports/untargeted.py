"""Report training data in texts drawn without a prefix.

The report shows the amount, the extracted records, and the growth expected with more texts.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping

from auditor.conclusions.secret_details import SecretDetails
from auditor.core.result import AuditResult, Finding
from auditor.records.table import Column
from auditor.reports import phrases
from auditor.reports.blocks import Block, Group, Paragraph, Table, make_table
from auditor.reports.topics import MEND, Topic, title_attack_row
from auditor.statistics.memorised import (
    COMMON,
    GENERATIONS,
    MEMORISED,
    NEW,
    PER,
    PRECISION,
    RECORDS,
    RICHNESS,
)
from auditor.statistics.metrics import RANKINGS, name_excess_metric, name_nonmember_metric

_SHOWN = 30  # records listed for each attack
_UNKNOWN = "not known"
_NOTE = (
    "A memorised n-gram is n tokens in a row that occur in the training data and in no held-out "
    "text; those that overlap count once. The baseline is n-grams of held-out text, which nothing "
    "was trained on, scaled to the number in the training data: so many are common in such texts, "
    "not memorised. N-grams in both count for neither. The public model has not seen the "
    "training data either: what it writes of them is not memorised. A record is extracted if a "
    "generation contains an n-gram of it that no other record has; held-out records extracted in "
    "this way are the baseline. New records are those that the next generations would add, "
    "estimated from the records seen once (Good–Turing). The number for any number of generations, "
    "from the records seen once and twice, is a lower bound (Chao); other prompts reach others."
)


def _build_untargeted_blocks(result: AuditResult, details: SecretDetails | None) -> Iterator[Block]:
    """Report attacks whose drawn texts were compared with all training data.

    details: values stored per record; None omits the tables of records.
    """
    rows = phrases.list_measured_findings(result, MEMORISED)
    if not rows:
        return
    yield _build_memorised_rates_table(result, rows)
    yield _build_expected_further_records_table(result, rows)
    yield _build_ranking_precision_table(result, rows)
    yield Paragraph(_NOTE)
    if details is not None:
        yield from _build_extracted_records_tables(result, details, rows)


def _build_memorised_rates_table(result: AuditResult, findings: list[Finding]) -> Table:
    names = (
        GENERATIONS,
        MEMORISED,
        name_nonmember_metric(MEMORISED),
        name_excess_metric(MEMORISED),
        COMMON,
    )
    head = ("Target", "Generations", "With n-grams", "Memorised", "Baseline", "Excess", "Common")
    cells = []
    notes: dict[str, None] = {}
    for f in findings:
        main = f.measurement(MEMORISED)
        assert main is not None  # the findings have it
        numbers = map(phrases.format_measurement_value, map(f.measurement, names))
        cells.append((title_attack_row(result, f), f"{main.n:,}", *numbers))
        notes[main.note.split(";")[0]] = None
    caption = f"Memorised n-grams per {PER:,} generations, with 95% intervals ({', '.join(notes)})"
    return make_table("untargeted-table", caption, head, cells, range(1, 7))


def _build_expected_further_records_table(result: AuditResult, findings: list[Finding]) -> Table:
    head = (
        "Target",
        "Records extracted",
        "Non-members",
        f"New in {PER:,} more generations",
        "In any number, at least",
    )
    cells = []
    for f in findings:
        cells.append(
            (
                title_attack_row(result, f),
                _format_noted_value(f, RECORDS),
                _format_noted_value(f, name_nonmember_metric(RECORDS)),
                phrases.format_measurement_value(f.measurement(NEW)),
                phrases.format_measurement_value(f.measurement(RICHNESS)),
            )
        )
    # NEW: Good-Turing; RICHNESS: Chao's lower bound (`statistics.unseen_species`).
    caption = "Training records extracted, and expected with more generations, with 95% intervals"
    return make_table("to-come-table", caption, head, cells, {1, 2, 3, 4})


def _format_noted_value(finding: Finding, name: str) -> str:
    """Return a measured value and the note of its measurement; a dash if it was not measured."""
    m = finding.measurement(name)
    if m:
        return f"{phrases.format_value(m)} {m.note}"
    return phrases.NOTHING


def _build_ranking_precision_table(result: AuditResult, findings: list[Finding]) -> Table:
    head = ["Target"]
    names = []
    for name, title in RANKINGS.items():
        metric = f"{PRECISION}_{name}"
        if any(f.measurement(metric) for f in findings):
            names.append(metric)
            head.append(title.capitalize())
    cells = []
    for f in findings:
        precisions = list(map(f.measurement, names))
        if any(precisions):
            cells.append((title_attack_row(result, f), *map(phrases.format_share, precisions)))
    caption = (
        "Share of generations with a memorised n-gram among the first 100 of each ranking, without "
        "near-duplicates"
    )
    return make_table("rankings-table", caption, tuple(head), cells, range(1, len(head)))


def _build_extracted_records_tables(
    result: AuditResult, details: SecretDetails, findings: list[Finding]
) -> Iterator[Table]:
    """Yield two tables: extracted records by number of copies, then a row per extracted record."""
    by_copies = []
    records = []
    for f in findings:
        columns = details.records.get(f.cell_key, {})
        if "generations" not in columns:
            continue
        title = title_attack_row(result, f)
        cells = tuple(_build_extracted_copies_rows(columns))
        if cells != () and cells[0][0] != _UNKNOWN:
            by_copies.append(Group(title, cells))
        n = len(columns["generations"].ids)
        if n > _SHOWN:
            title += f" · {_SHOWN} of {n:,}"
        records.append(Group(title, tuple(_build_extracted_record_table_rows(columns))))
    caption = "Training records extracted, by copies"
    yield Table("copies-table", caption, ("Copies", "Extracted"), by_copies)
    head = ("Record", "Attacked as", "Copies", "Generations", "Longest run of tokens")
    caption = f"Training records extracted, those in most generations first; at most {_SHOWN} a row"
    yield Table("records-table", caption, head, records, {2, 3, 4}, folded=True)


def _build_extracted_copies_rows(columns: Mapping[str, Column]) -> Iterator[tuple[str, str]]:
    """Yield a row per number of copies in the training data; unknown numbers come last."""
    out = Counter(columns["generations"].repeats)
    counts = dict(zip(columns["trained"].repeats, columns["trained"].values, strict=True))
    for n in sorted(counts, key=lambda n: (n is None, n or 0)):
        yield _UNKNOWN if n is None else str(n), f"{out[n]:,} of {counts[n]:,.0f}"


def _build_extracted_record_table_rows(columns: Mapping[str, Column]) -> Iterator[tuple[str, ...]]:
    extracted = columns["generations"]
    inside = columns.get("record")
    # inside: by attacked secret, the index of its record in `generations`.
    attacked: dict[int, list[str]] = {}
    for secret, place in zip(inside.ids, inside.values, strict=True) if inside else ():
        attacked.setdefault(int(place), []).append(secret)
    # In the order of the run, most often extracted first (runs/generations.py).
    rows = zip(
        extracted.ids, extracted.repeats, extracted.values, columns["longest"].values, strict=True
    )
    for i, (alias, n, generations, longest) in enumerate(itertools.islice(rows, _SHOWN)):
        copies = phrases.NOTHING if n is None else f"{n:,}"
        secrets = ", ".join(attacked.get(i, ())) or phrases.NOTHING
        yield alias, secrets, copies, f"{generations:,.0f}", f"{longest:,.0f}"


TOPICS = (
    Topic(
        "untargeted",
        "Untargeted extraction",
        lambda m: _build_untargeted_blocks(m.result, m.details),
        MEND,
        5,
        14,
        lambda m: _build_untargeted_blocks(m.result, None),
    ),
)
