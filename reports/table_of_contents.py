"""Order the sections of the Markdown report and of the HTML page.

The page has three readers: people who decide, owners of models, and reviewers of methods. The
Markdown report is for a pull request.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

from auditor import reports
from auditor.conclusions.secret_details import SecretDetails
from auditor.conclusions.signals import assess_leak_signals
from auditor.core.result import AuditResult, OwnSection
from auditor.gate.compare import Comparison
from auditor.records.private_texts import SecretText
from auditor.reports import escaping, evidence, phrases, signals, subject_line
from auditor.reports.blocks import (
    Block,
    Document,
    Facts,
    Paragraph,
    Section,
    Table,
    TargetSummary,
    has_content,
    make_table,
)
from auditor.reports.topics import (
    CHECK,
    DECIDE,
    MEND,
    ReportMaterial,
    Topic,
    find_only_attack,
)
from auditor.reports.verdict import rate_targets, write_verdict_headline
from auditor.statistics import documents

REVEALED = "This report shows private text (--reveal): keep it to yourself."
PARTS = (DECIDE, MEND, CHECK)
_LAST = 1_000  # the turn of a plug-in's section


@cache
def list_topics() -> tuple[Topic, ...]:
    """Return the topics of all modules of this package, in page order."""
    topics: list[Topic] = []
    for file in sorted(Path(reports.__path__[0]).glob("*.py")):
        if b"\nTOPICS" in file.read_bytes():  # to import all modules takes longer than to render
            module = importlib.import_module(f"{reports.__name__}.{file.stem}")
            topics += module.TOPICS
    return tuple(sorted(topics, key=lambda topic: (PARTS.index(topic.part), topic.place)))


def build_markdown_document(
    result: AuditResult,
    details: SecretDetails | None = None,
    texts: Mapping[str, SecretText] | None = None,
    folder: Path | None = None,
) -> Document:
    """Return the Markdown report, which has only the topics with a position (`turn`) in it.

    result: cleaned by `make_result_printable`; the writer of Markdown escapes its texts. texts:
    private text, keyed by secret id.
    """
    material = ReportMaterial(result, details or SecretDetails(), texts=texts, folder=folder)
    topics = []
    for topic in (*list_topics(), *_list_plugin_topics(material.result)):
        if topic.turn:
            # Markdown shows no parts.
            topics.append(replace(topic, part="", make=topic.brief or topic.make))
    topics.sort(key=lambda topic: topic.turn)
    source = "Rendered only from result.json"
    if texts is not None:
        source = "Rendered from result.json and texts.jsonl"
    return replace(_build_report_document(material, topics), source=source)


def build_page_document(
    result: AuditResult,
    details: SecretDetails | None = None,
    since: Comparison | None = None,
    texts: Mapping[str, SecretText] | None = None,
    folder: Path | None = None,
) -> Document:
    """Return the full HTML page with all nonempty sections, grouped by part.

    since: a comparison of an earlier run with this run. texts: private text, keyed by secret id.
    """
    material = ReportMaterial(
        phrases.make_result_printable(result), details or SecretDetails(), since, texts, folder
    )
    topics = (*list_topics(), *_list_plugin_topics(material.result))
    return _build_report_document(material, topics)


def _build_report_document(material: ReportMaterial, topics: Iterable[Topic]) -> Document:
    """Return the report with the nonempty sections of these topics.

    In the tables, a column of equal cells becomes part of the caption. If the run has a single
    attack, only the report's head names the attack.
    """
    result = material.result
    facts = [*_report_header_facts(result)]
    known = {"Attack"} if find_only_attack(result) else set()
    sections = []
    for topic in topics:
        blocks: list[Block] = []
        for block in filter(has_content, topic.make(material)):
            blocks.append(block.fold_constant_columns(known) if isinstance(block, Table) else block)
        if blocks:
            sections.append(Section(topic.id, topic.title, tuple(blocks), topic.part))
    if since := material.comparison:
        facts.append(("Compared with", escaping.make_printable_line(since.runs[0])))
    assessment = assess_leak_signals(result)
    summaries = []
    for name, grade in rate_targets(assessment).items():
        title = phrases.title_target(result, name)
        summaries.append(TargetSummary(title, grade.word, grade.reason, grade.decision))
    return Document(
        title=subject_line.audit_subject_line(result),
        facts=tuple(facts),
        headline=write_verdict_headline(result),
        sections=tuple(sections),
        warning="" if material.texts is None else REVEALED,
        doubts=signals.list_doubt_sentences(assessment),
        standings=tuple(summaries),
        glossary=evidence.list_glossary_terms(result),
    )


def _list_plugin_topics(result: AuditResult) -> list[Topic]:
    """Return the topics of plug-ins, whose sections come last."""
    topics = []
    for i, (name, section) in enumerate(result.sections.items()):
        # partial binds the current values; a lambda would use the loop's last values.
        make = partial(_build_plugin_section_blocks, i, section)
        topics.append(Topic(f"own-{i}", f"{section.title} ({name})", make, CHECK, 0, _LAST))
    return topics


def _build_plugin_section_blocks(i: int, section: OwnSection, _: ReportMaterial) -> list[Block]:
    blocks: list[Block] = [*map(Paragraph, section.text)]
    for n, table in enumerate(section.tables):
        blocks.append(make_table(f"own-{i}-{n}", table.caption, table.head, table.rows))
    return blocks


def _report_header_facts(result: AuditResult) -> Facts:
    n = result.benchmark
    counts = n.records.get("members")
    has_parts = counts is not None and counts.audited < n.members
    has_parts |= any(finding.measurement(documents.RECALL) for finding in result.findings)
    attacked = "Parts of records" if has_parts else "Records"
    attack = find_only_attack(result)
    text_form = n.text_form.partition(" (")[0]
    return (
        (attacked, f"{n.members:,} trained on (members), {n.nonmembers:,} not (non-members)"),
        *((("Attack", attack),) if attack else ()),
        *((("Text form", f"--template {text_form}"),) if text_form else ()),
        ("Run", f"{result.name}, seed {result.seed}"),
    )
