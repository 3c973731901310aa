"""Summarise leaks, untested signals, changes and limits for a release decision."""

from __future__ import annotations

from auditor.gate.compare import Comparison
from auditor.reports import changes, signals
from auditor.reports.blocks import Block, Bullets, Forest, Paragraph
from auditor.reports.topics import BEFORE, DECIDE, ReportMaterial, Topic, build_forest_span


def _build_changes_since_blocks(since: Comparison) -> list[Block]:
    """Return each attack's paired change since the earlier run, with intervals on a common
    scale.
    """
    spans = []
    for line in changes.sort_rows_leaking_more_first(since):
        delta = line.comparands[-1].delta
        spans.append(build_forest_span(delta) if delta else None)
    note = Paragraph(
        "Left of the middle line less leaks than before, right of it more; a bar that "
        "crosses it shows neither."
    )
    return [
        Paragraph(changes.write_comparison_headline(since)),
        Forest.of_differences(changes.build_paired_change_table(since), spans),
        note,
    ]


def _build_limitations_blocks(material: ReportMaterial) -> list[Block]:
    result = material.result
    limits = [
        "Zero hits is not zero leakage: the upper end of the interval remains possible.",
        "An attack gives a lower bound: other attacks, more samples, more queries or other records "
        "may leak more.",
        "Recall counts (nearly) verbatim text, not paraphrases, partial disclosure, membership or "
        "attribute inference.",
        "Intervals cover the choice of secrets, not another training seed or the choice of the "
        "best configuration.",
    ]
    if any(target.claim for target in result.targets):
        limits.append(
            "Low recall does not prove a claim. An ε holds for its unit, relation, access, "
            "decoding and number of tokens: a claim about a shard is no claim about a person."
        )
    if result.benchmark.is_of_builtin_lab:
        limits.append(
            "The lab is a small model on synthetic records: it shows that the method works, not "
            "what your model leaks."
        )
    return [Bullets(limits)]


TOPICS = (
    Topic(
        "glance",
        "Signal by signal",
        lambda m: signals.build_signals_section_blocks(m.result),
        DECIDE,
        2,
        turn=2,
    ),
    Topic(
        "since",
        BEFORE,
        lambda m: _build_changes_since_blocks(m.comparison) if m.comparison else (),
        DECIDE,
        3,
    ),
    Topic(
        "limits",
        "What a good result does not mean",
        _build_limitations_blocks,
        DECIDE,
        4,
        turn=11,
    ),
)
