"""Report leakage by person, and the most affected people, if records name people."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from auditor.conclusions.secret_details import SecretDetails, count_person_extractions
from auditor.core.nouns import UNDEFENDED
from auditor.core.result import AuditResult, Finding
from auditor.reports import phrases
from auditor.reports.blocks import Block, Forest, Group, Paragraph, Table
from auditor.reports.topics import MEND, Topic, build_forest_span, title_attack_row
from auditor.reports.verdict import find_strongest_attack_row
from auditor.statistics import people
from auditor.statistics.intervals import measure_share

_WORST = 10  # people listed by their aliases
_BANDS = (
    (0.0, "no record"),
    (0.25, "a quarter at most"),
    (0.5, "half at most"),
    (1.0, "more than half"),
)


def _build_person_extraction_blocks(result: AuditResult, details: SecretDetails) -> list[Block]:
    best = []
    for target in result.targets:
        best.append(find_strongest_attack_row(result, target.name))
    rows = []
    for f in best:
        if f is not None and f.measurement("user_recall") is not None:
            rows.append(f)
    if not rows:
        return _build_person_inference_blocks(result)
    intro = Paragraph(
        "Each person counts once, however many records: intervals are over people. The baseline is "
        "people none of whose records were trained on. No file of a run contains their names: "
        "people have aliases."
    )
    head = ("Target", "Recall by person", "Baseline", "People with an extracted record")
    names = ("user_recall", "user_recall_nonmembers", "users_extracted")
    rows_by_person = tuple(
        (
            title_attack_row(result, f),
            *(phrases.format_share(f.measurement(name)) for name in names),
        )
        for f in rows
    )
    table = Table(
        "people-table",
        "Extraction by person, with 95% intervals",
        head,
        (Group("", rows_by_person),),
        frozenset(),
    )
    return [
        intro,
        table,
        *_build_people_spread_blocks(result, details, rows),
        *_build_person_inference_blocks(result),
    ]


def _build_person_inference_blocks(result: AuditResult) -> list[Block]:
    results = [
        f"{title_attack_row(result, f)}: AUC {m.value:.3f} [{m.low:.3f}–{m.high:.3f}], {m.note}."
        for f in phrases.sort_findings(result)
        if (m := f.measurement(people.INFERENCE)) is not None
    ]
    intro = (
        "Whether a person's data was trained on, decided by records of that person that were not "
        "(0.5: chance)."
    )
    if results:
        return [Paragraph(" ".join((intro, *results)))]
    return []


def _build_people_spread_blocks(
    result: AuditResult, details: SecretDetails, rows: Sequence[Finding]
) -> list[Block]:
    """Return tables of people, for each attack result.

    People are counted by the extracted share of their records; the most affected are listed.
    """
    by_row = []
    for f in rows:
        if f.cell_key in details.rows:
            by_row.append((f, count_person_extractions(details, details.rows[f.cell_key])))
    groups = []
    spans = []
    worst = []
    for finding, counts in by_row:
        # (people,): the extracted share of each person's attacked records.
        shares = np.array([out / attacked for out, attacked in counts.values()])
        # From the left: a share at the end of a band belongs to it, and only 0 to "no record".
        band = np.searchsorted([most for most, _ in _BANDS], shares)
        parts = []
        for i, (_, name) in enumerate(_BANDS):
            parts.append(measure_share(name, band == i))
        cells = tuple((m.name.capitalize(), phrases.format_share(m)) for m in parts)
        groups.append(Group(title_attack_row(result, finding), cells))
        spans += [build_forest_span(m) for m in parts]
        if finding.target == UNDEFENDED:
            # `count_person_extractions` lists the worst affected first.
            worst = [
                (person, f"{out:,} of {attacked:,}")
                for person, (out, attacked) in counts.items()
                if out
            ][:_WORST]
    if not groups:
        return []
    caption = "People by the share of their records that were extracted"
    spread = Table(
        "people-spread", caption, ("Extracted of theirs", "People"), tuple(groups), frozenset({1})
    )
    blocks: list[Block] = [Forest(spread, tuple(spans))]
    if worst:
        head = ("Person", "Records extracted")
        blocks.append(
            Table(
                "people-worst", "Who is hit worst", head, (Group("", tuple(worst)),), frozenset({1})
            )
        )
    return blocks


TOPICS = (
    Topic(
        "people",
        "By person",
        lambda m: _build_person_extraction_blocks(m.result, m.details),
        MEND,
        6,
        turn=17,
    ),
)
