"""What a report says, in order: the sections of the Markdown report and of the three readers' page.

One page for whoever decides, whoever mends the model and whoever checks the method; Markdown for a
pull request. Knows the records and the words; not how a block is drawn.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from dataclasses import replace
from functools import cache, partial

from auditor import reports
from auditor.conclusions.secret_details import SecretDetails
from auditor.conclusions.signals import assess_signals
from auditor.core.result import AuditResult, OwnSection
from auditor.gate.compare import Comparison
from auditor.records.private_texts import SecretText
from auditor.reports import escaping, phrases, severity, signals, subject_line
from auditor.reports.blocks import (
    Block,
    Document,
    Facts,
    Group,
    Paragraph,
    Section,
    Table,
    TargetSummary,
)
from auditor.reports.topics import CHECK, DECIDE, MEND, ReportMaterial, Topic
from auditor.reports.verdict import headline, list_judged_targets
from auditor.statistics import documents

REVEALED = "This report shows private text (--reveal): keep it to yourself."
PARTS = (DECIDE, MEND, CHECK)


@cache
def all_report_topics() -> tuple[Topic, ...]:
    """The topics of all modules of this package, which are imported for it, in the order of the
    page."""
    names = (
        f"{reports.__name__}.{module.name}" for module in pkgutil.iter_modules(reports.__path__)
    )
    found = [
        topic for name in names for topic in getattr(importlib.import_module(name), "TOPICS", ())
    ]
    return tuple(sorted(found, key=lambda topic: (PARTS.index(topic.part), topic.place)))


def markdown_document(
    result: AuditResult,
    details: SecretDetails | None = None,
    texts: Mapping[str, SecretText] | None = None,
) -> Document:
    """The Markdown report: the sections that have a turn in it.

    Every string in it is cleaned of control characters; none is escaped. texts: the private text to
    show, by id.
    """
    material = ReportMaterial(
        phrases.result_with_printable_strings(result), details or SecretDetails(), texts=texts
    )
    told = sorted(
        (topic for topic in all_report_topics() if topic.turn), key=lambda topic: topic.turn
    )
    made = (
        (t, (t.brief or t.make)(material)) for t in (*told, *_plugin_report_topics(material.result))
    )
    sections = tuple(
        Section(topic.id, topic.title, tuple(blocks)) for topic, blocks in made if blocks
    )
    source = (
        "Rendered from result.json alone"
        if texts is None
        else "Rendered from result.json and texts.jsonl"
    )
    return replace(_build_report_document(material, sections), source=source)


def page_document(
    result: AuditResult,
    details: SecretDetails | None = None,
    since: Comparison | None = None,
    texts: Mapping[str, SecretText] | None = None,
) -> Document:
    """The whole page: every section that has something to say, part by part.

    since: another run and this one, in that order. texts: the private text to show, by id.
    """
    material = ReportMaterial(
        phrases.result_with_printable_strings(result), details or SecretDetails(), since, texts
    )
    made = (
        (topic, topic.make(material))
        for topic in (*all_report_topics(), *_plugin_report_topics(material.result))
    )
    sections = tuple(
        Section(topic.id, topic.title, tuple(blocks), topic.part)
        for topic, blocks in made
        if blocks
    )
    return _build_report_document(material, sections)


def _build_report_document(material: ReportMaterial, sections: tuple[Section, ...]) -> Document:
    result, since = material.result, material.since
    compared = (("Compared with", escaping.to_printable_line(since.runs[0])),) if since else ()
    return Document(
        title=subject_line.audit_subject_line(result),
        facts=(*_report_header_facts(result), *compared),
        headline=headline(result),
        sections=sections,
        warning="" if material.texts is None else REVEALED,
        doubts=tuple(doubt.sentence for doubt in signals.all_doubts(assess_signals(result))),
        standings=_target_severity_summaries(result),
        rule=f"{severity.RULE} {signals.NOTE}",
    )


def _plugin_report_topics(result: AuditResult) -> list[Topic]:
    """The sections that plug-ins brought, behind all others."""
    found = []
    for i, (name, own) in enumerate(result.sections.items()):
        # partial binds i and own now; a lambda would see the last of the loop.
        make = partial(_plugin_section_blocks, i, own)
        found.append(Topic(f"own-{i}", f"{own.title} ({name})", make, CHECK, 0))
    return found


def _plugin_section_blocks(i: int, own: OwnSection, _: ReportMaterial) -> list[Block]:
    tables = (
        Table(f"own-{i}-{n}", one.caption, one.head, (Group("", one.rows),))
        for n, one in enumerate(own.tables)
    )
    return [*map(Paragraph, own.text), *tables]


def _report_header_facts(result: AuditResult) -> Facts:
    n = result.benchmark
    has_parts = any(finding.measurement(documents.RECALL) for finding in result.findings)
    attacked = "Parts of records" if has_parts else "Records"
    written = n.text_form.partition(" (")[0]
    return (
        (attacked, f"{n.members:,} trained on (members), {n.nonmembers:,} not (non-members)"),
        *((("Text form", f"--template {written}"),) if written else ()),
        ("Run", f"{result.name}, seed {result.seed}"),
    )


def _target_severity_summaries(result: AuditResult) -> tuple[TargetSummary, ...]:
    seen = assess_signals(result)
    found = {name: severity.severity_of_target(seen, name) for name in list_judged_targets(seen)}
    return tuple(
        TargetSummary(
            signals.target_title_or_undefended(result, name), of.word, of.reason, of.decision
        )
        for name, of in found.items()
    )
