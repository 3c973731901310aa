"""Report leakage by person, and the most affected people, if records name people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from auditor.conclusions.secret_details import SecretDetails, count_person_extractions
from auditor.core.nouns import UNDEFENDED
from auditor.core.result import AuditResult, Finding
from auditor.reports import phrases
from auditor.reports.blocks import Block, Forest, Group, Paragraph, Table, make_table
from auditor.reports.topics import MEND, ReportMaterial, Topic, build_forest_span, title_attack_row
from auditor.reports.verdict import find_strongest_attack_row
from auditor.statistics import people
from auditor.statistics.intervals import measure_share

_WORST = 10  # people listed by their aliases
_BANDS = {0.0: "no record", 0.25: "a quarter at most", 0.5: "half at most", 1.0: "more than half"}
_INTRO = (
    "Each person counts once, however many records: intervals are over people. The baseline is "
    "people none of whose records were trained on. No file of a run contains their names: "
    "people have aliases."
)


def _build_person_extraction_blocks(material: ReportMaterial) -> Iterator[Block]:
    result = material.result
    names = ("user_recall", "user_recall_nonmembers", "users_extracted")
    rows = []
    cells = []
    for target in result.targets:
        f = find_strongest_attack_row(result, target.name)
        if f is not None and f.measurement("user_recall") is not None:
            rows.append(f)
            shares = map(phrases.format_share, map(f.measurement, names))
            cells.append((title_attack_row(result, f), *shares))
    if rows:
        yield Paragraph(_INTRO)
        head = ("Target", "Recall by person", "Baseline", "People with an extracted record")
        caption = "Extraction by person, with 95% intervals"
        yield make_table("people-table", caption, head, cells)
        yield from _build_people_spread_blocks(result, material.details, rows)
    yield _build_person_inference_paragraph(result)


def _build_person_inference_paragraph(result: AuditResult) -> Paragraph:
    results = []
    for f in phrases.sort_findings(result):
        if (m := f.measurement(people.INFERENCE)) is not None:
            number = f"AUC {m.value:.3f} [{m.low:.3f}–{m.high:.3f}], {m.note}."
            results.append(f"{title_attack_row(result, f)}: {number}")
    intro = (
        "User inference: was a person's data trained on? Tested with other records of that person "
        "(AUC 0.5: chance)."
    )
    return Paragraph(" ".join((intro, *results)) if results else "")


def _build_people_spread_blocks(
    result: AuditResult, details: SecretDetails, rows: Sequence[Finding]
) -> Iterator[Block]:
    """Return a table that counts people by the extracted share of their records.

    Add a list of the most affected people. Both are grouped by attack result.
    """
    groups = []
    spans = []
    worst: list[tuple[str, str]] = []
    for f in rows:
        if f.cell_key not in details.values_by_cell:
            continue
        counts = count_person_extractions(details, details.values_by_cell[f.cell_key])
        shares = np.array([out / attacked for out, attacked in counts.values()])
        band = np.searchsorted(list(_BANDS), shares)
        cells = []
        for i, name in enumerate(_BANDS.values()):
            m = measure_share(name, band == i)
            cells.append((name.capitalize(), phrases.format_share(m)))
            spans.append(build_forest_span(m))
        groups.append(Group(title_attack_row(result, f), cells))
        if f.target == UNDEFENDED:
            worst = []
            for person, (out, attacked) in counts.items():
                if out:
                    worst.append((person, f"{out:,} of {attacked:,}"))
    caption = "People by the share of their records that were extracted"
    spread = Table("people-spread", caption, ("Share of their records", "People"), groups, {1})
    yield Forest(spread, spans)
    head = ("Person", "Records extracted")
    yield make_table("people-worst", "Most affected people", head, worst[:_WORST], {1})


TOPICS = (
    Topic(
        "people",
        "By person",
        _build_person_extraction_blocks,
        MEND,
        6,
        turn=17,
    ),
)
