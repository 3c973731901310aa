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
from auditor.reports.blocks import Block, Group, Paragraph, Table
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

_SHOWN = 30  # records of a row
_NOTE = (
    "A memorised n-gram is n tokens in a row that occur in the training data and in no held-out "
    "text; those that overlap count once. The baseline is n-grams of held-out text, which nothing "
    "was trained on, scaled to the number in the training data: that many are common in such texts "
    "and not memorised. N-grams in both count for neither. The public model has not seen the "
    "training data either: what it writes of them is not memorised. A record is extracted if a "
    "generation contains an n-gram of it that no other record has; held-out records extracted in "
    "this way are the baseline. New records are those that the next generations would add, "
    "estimated from the records seen once (Good–Turing); those in the end, from the records seen "
    "once and twice, are a lower bound (Chao): other kinds of prompts reach other records."
)


def _build_untargeted_blocks(result: AuditResult, details: SecretDetails | None) -> list[Block]:
    """Report attacks whose drawn texts were compared with all training data.

    details: values stored per record; None omits the tables of records.
    """
    rows = []
    for finding in phrases.sort_findings(result):
        if finding.measurement(MEMORISED):
            rows.append(finding)
    if not rows:
        return []
    return [
        _build_memorised_rates_table(result, rows),
        _build_expected_further_records_table(result, rows),
        *_build_ranking_precision_tables(result, rows),
        Paragraph(_NOTE),
        *(_build_copies_blocks(result, details, rows) if details is not None else []),
        *(_build_extracted_records_blocks(result, details, rows) if details is not None else []),
    ]


def _build_memorised_rates_table(result: AuditResult, findings: list[Finding]) -> Table:
    names = (MEMORISED, name_nonmember_metric(MEMORISED), name_excess_metric(MEMORISED), COMMON)
    known = [(f, main) for f in findings if (main := f.measurement(MEMORISED))]
    head = ("Target", "Generations", "That hold some", "Memorised", "Baseline", "Excess", "Common")
    cells = tuple(
        (
            title_attack_row(result, f),
            f"{main.n:,}",
            *(
                phrases.format_measurement_value(f.measurement(name))
                for name in (GENERATIONS, *names)
            ),
        )
        for f, main in known
    )
    # Keep `n 50` of a note `n 50; not in held-out text`.
    notes = dict.fromkeys(main.note.split(";")[0] for _, main in known)
    caption = f"Memorised n-grams per {PER:,} generations, with 95% intervals ({', '.join(notes)})"
    return Table("untargeted-table", caption, head, (Group("", cells),), frozenset(range(1, 7)))


def _build_expected_further_records_table(result: AuditResult, findings: list[Finding]) -> Table:
    head = (
        "Target",
        "Records extracted",
        "Non-members",
        f"New in the next {PER:,}",
        "In the end, at least",
    )
    cells = tuple(
        (
            title_attack_row(result, f),
            _format_noted_value(f, RECORDS),
            _format_noted_value(f, name_nonmember_metric(RECORDS)),
            *(phrases.format_measurement_value(f.measurement(name)) for name in (NEW, RICHNESS)),
        )
        for f in findings
    )
    # NEW: Good-Turing; RICHNESS: Chao's lower bound (`statistics.unseen_species`).
    caption = (
        "Training records extracted, and how many more would with more generations, with 95% "
        "intervals"
    )
    return Table("to-come-table", caption, head, (Group("", cells),), frozenset({1, 2, 3, 4}))


def _format_noted_value(finding: Finding, name: str) -> str:
    m = finding.measurement(name)
    if m:
        return f"{phrases.format_value(m)} {m.note}"
    return phrases.NOTHING


def _build_ranking_precision_tables(
    result: AuditResult, findings: list[Finding]
) -> Iterator[Block]:
    measured = [
        (f, {name: m for name in RANKINGS if (m := f.measurement(f"{PRECISION}_{name}"))})
        for f in findings
    ]
    names = []
    for name in RANKINGS:
        if any(name in precisions for _, precisions in measured):
            names.append(name)
    cells = tuple(
        (
            title_attack_row(result, f),
            *(phrases.format_share(precisions.get(name)) for name in names),
        )
        for f, precisions in measured
        if precisions
    )
    if cells:
        head = ("Target", *(RANKINGS[name].capitalize() for name in names))
        caption = (
            "Of the first 100 generations of a ranking, near-duplicates left out, those with a "
            "memorised n-gram"
        )
        yield Table(
            "rankings-table", caption, head, (Group("", cells),), frozenset(range(1, len(head)))
        )


def _pair_untargeted_rows(
    details: SecretDetails, findings: list[Finding]
) -> list[tuple[Finding, Mapping[str, Column]]]:
    """Return the findings that extracted training records, each with the values of these
    records.
    """
    return [
        (f, record_columns)
        for f in findings
        if "generations" in (record_columns := details.records.get(f.cell_key, {}))
    ]


def _build_copies_blocks(
    result: AuditResult, details: SecretDetails, findings: list[Finding]
) -> list[Block]:
    """Return a table of extracted records by their number of copies in the training data."""
    groups = []
    for f, columns in _pair_untargeted_rows(details, findings):
        out = Counter(columns["generations"].repeats)
        trained = columns["trained"]
        counts = sorted(
            zip(trained.repeats, trained.values, strict=True),
            key=lambda group: (group[0] is None, group[0] or 0),
        )
        if any(n is not None for n, _ in counts):
            cells = tuple(
                ("not known" if n is None else str(n), f"{out[n]:,} of {count:,.0f}")
                for n, count in counts
            )
            groups.append(Group(title_attack_row(result, f), cells))
    if not groups:
        return []
    head = ("Copies", "Extracted")
    return [Table("copies-table", "Training records extracted, by copies", head, tuple(groups))]


def _build_extracted_records_blocks(
    result: AuditResult, details: SecretDetails, findings: list[Finding]
) -> list[Block]:
    groups = []
    for f, columns in _pair_untargeted_rows(details, findings):
        n = len(columns["generations"].ids)
        title = title_attack_row(result, f) + (f" · {_SHOWN} of {n:,}" if n > _SHOWN else "")
        groups.append(Group(title, tuple(_build_extracted_record_table_rows(columns))))
    if not groups:
        return []
    head = ("Record", "Attacked as", "Repetitions", "Generations", "Longest run of tokens")
    caption = f"Training records extracted, those in most generations first; at most {_SHOWN} a row"
    return [Table("records-table", caption, head, tuple(groups), frozenset({2, 3, 4}), folded=True)]


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
