"""Replace each `membership_auc` by the AUC of the target's strongest membership score.

The AUC is corrected for all scores that the membership probe and plug-ins tried on the target.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from auditor.core.nouns import CellKey
from auditor.core.result import Finding
from auditor.runs.per_secret_results import PerSecretCollector, ScoredRow
from auditor.statistics.metrics import ADJUSTED_AUC, name_score_column
from auditor.statistics.strongest_score import (
    CandidateScore,
    choose_strongest_score,
    compute_simultaneous_widening,
)


def add_strongest_membership(
    findings: Sequence[Finding], collector: PerSecretCollector
) -> list[Finding]:
    """Return a target's findings, with the AUC of the strongest score in each membership finding.

    Findings of a setting that scored equal records share an error probability. The strongest score
    also replaces the main score's column in the collector, so that the numbers can be recomputed.
    """
    changed = {}
    for family in _group_row_families(findings, collector.scored):
        scores = list(_align_scores(family))
        widening = compute_simultaneous_widening(scores, next(iter(family.values())).records)
        for key, row in family.items():
            strongest = choose_strongest_score(row.candidates, row.records, widening, len(scores))
            collector.set_row_column(key, name_score_column(""), strongest.values)
            measured = {}
            for m in (*strongest.measurements, *strongest.corrected):
                measured[m.name] = m
            finding = next(f for f in findings if f.cell_key == key)
            measurements = [measured.get(m.name, m) for m in finding.measurements]
            if strongest.adjusted is not None:
                adjusted, parts = strongest.adjusted
                if adjusted.n:
                    collector.set_row_column(key, ADJUSTED_AUC, parts)
                measurements.insert(1, adjusted)
            changed[key] = replace(
                finding,
                measurements=tuple(measurements),
                by_repeats=strongest.by_copies,
                scores_tried=len(scores),
                notes=(
                    *finding.notes,
                    *_list_strongest_notes(strongest.measurements[0].note, len(scores)),
                ),
            )
    return [changed.get(finding.cell_key, finding) for finding in findings]


def _group_row_families(
    findings: Sequence[Finding], scored: Mapping[CellKey, ScoredRow]
) -> Iterator[dict[CellKey, ScoredRow]]:
    """Yield groups of membership results in the same setting that scored the same records.

    Keys name target, setting and probe.
    """
    families: dict[tuple[str, frozenset[str]], dict[CellKey, ScoredRow]] = {}
    for finding in findings:
        row = scored.get(finding.cell_key)
        if row is not None and not finding.not_applicable:
            families.setdefault((finding.setting, frozenset(row.ids)), {})[finding.cell_key] = row
    yield from families.values()


def _align_scores(family: Mapping[CellKey, ScoredRow]) -> Iterator[CandidateScore]:
    """Yield the membership scores of all results in `family`.

    Each is in the order of the first result's records. Keys name target, setting and probe.
    """
    first = next(iter(family.values()))
    for row in family.values():
        place = {secret: i for i, secret in enumerate(row.ids)}
        order = np.array([place[secret] for secret in first.ids])
        for score in row.candidates.values():
            yield replace(score, values=score.values[order])


def _list_strongest_notes(title: str, tried: int) -> tuple[str, ...]:
    if tried < 2:
        return ()
    return (
        f"the membership AUC is of the strongest score ({title}), over all members and by "
        f"copies; all AUCs of this row have intervals that hold for the {tried} scores and all "
        "groups of copies together (bootstrap of the maximum)",
    )
