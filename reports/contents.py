"""What a report says, in order: the sections of the Markdown report and of the three readers' page.

One page for whoever decides, whoever mends the model and whoever checks the method; Markdown for a pull request. Knows
the records and the words; not how a block is drawn.
"""

from __future__ import annotations

from collections.abc import Mapping

from auditor.core.counts import counted
from auditor.core.result import AuditResult
from auditor.gate.compare import Comparison
from auditor.records.details import Details
from auditor.records.texts import SecretText
from auditor.reports import (
    advice,
    bracket,
    changes,
    evidence,
    frontier,
    glance,
    inert,
    leaks,
    membership,
    terms,
    unlearning,
    untargeted,
    words,
)
from auditor.reports.blocks import Document, Facts, Section
from auditor.reports.topics import BEFORE, CHECK, DECIDE, MEND, Material
from auditor.reports.verdict import answers, headline, verdict

REVEALED = "This report shows private text (--reveal): keep it to yourself."
PARTS = (
    (DECIDE, (*glance.TOPICS, *frontier.TOPICS, *unlearning.TOPICS)),
    (MEND, (*leaks.TOPICS, *untargeted.TOPICS, *advice.TOPICS)),
    (CHECK, (*evidence.TOPICS, *bracket.TOPICS, *membership.TOPICS, *terms.TOPICS)),
)


def document(
    result: AuditResult, details: Details | None = None, texts: Mapping[str, SecretText] | None = None
) -> Document:
    """The Markdown report: the sections that have a turn in it.

    Every string in it is cleaned of control characters; none is escaped. texts: the private text to show, by id.
    """
    material = Material(words.cleaned(result), details or Details(), texts=texts)
    told = sorted((topic for _, topics in PARTS for topic in topics if topic.turn), key=lambda topic: topic.turn)
    made = ((topic, (topic.brief or topic.make)(material)) for topic in told)
    return Document(
        title=material.result.name,
        facts=_masthead(material.result),
        headline=headline(material.result),
        verdict=verdict(material.result),
        sections=tuple(Section(topic.id, topic.title, tuple(blocks)) for topic, blocks in made if blocks),
        source="Rendered from result.json alone" if texts is None else "Rendered from result.json and texts.jsonl",
        warning="" if texts is None else REVEALED,
    )


def page(
    result: AuditResult,
    details: Details | None = None,
    since: Comparison | None = None,
    texts: Mapping[str, SecretText] | None = None,
) -> Document:
    """The whole page: every section that has something to say, part by part.

    since: another run and this one, in that order. texts: the private text to show, by id.
    """
    material = Material(words.cleaned(result), details or Details(), since, texts)
    made = ((part, topic, topic.make(material)) for part, topics in PARTS for topic in topics)
    compared = (("Compared with", inert.clean(since.runs[0])),) if since else ()
    return Document(
        title=material.result.name,
        facts=(*_masthead(material.result), *compared),
        headline=headline(material.result),
        verdict=verdict(material.result),
        sections=tuple(Section(topic.id, topic.title, tuple(blocks), part) for part, topic, blocks in made if blocks),
        warning="" if texts is None else REVEALED,
        answers=(*answers(material.result), *(((BEFORE, changes.headline(since)),) if since else ())),
    )


def _masthead(result: AuditResult) -> Facts:
    n = result.benchmark
    return (
        ("Benchmark", n.name),
        ("Secrets", f"{counted(n.members, 'member')}, {counted(n.nonmembers, 'non-member')}"),
        ("Run", result.created),
        ("Made with", f"audit {result.tool_version}, seed {result.seed}"),
    )
