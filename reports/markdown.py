"""Render the report as Markdown that fits a pull request comment.

The headline, advice, leak signals, results, claims and changes are visible. Other sections are
folded, and cut if they do not fit.
"""

from __future__ import annotations

import html
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from auditor.conclusions.secret_details import SecretDetails
from auditor.core.counts import format_count
from auditor.core.result import AuditResult
from auditor.gate.compare import Comparison
from auditor.records.private_texts import SecretText
from auditor.reports import changes, claims, escaping, phrases
from auditor.reports.blocks import (
    Block,
    Bullets,
    Code,
    Document,
    FactList,
    Facts,
    Figures,
    Forest,
    Paragraph,
    Secrets,
    Section,
    Table,
    TargetSummary,
)
from auditor.reports.escaping import escape_for_markdown as escape
from auditor.reports.table_of_contents import build_markdown_document

# characters of a report; GitHub takes 65,536 in a comment, which leaves room for a gate's decision
MOST = 32_000
_MOST_TABLE = 6_000
_MOST_TEXT = 500
_MOST_CELL = 160
_MOST_CLAIM = 300
_MOST_CLAIMS = 3
_MOST_POINTS = 12
# characters of a claim: a consistent audit names the violation that it would have detected
_MOST_VERDICT = 600
_MOST_HEADLINE = 1_500
_MOST_STANDINGS = 8
_AT_ONCE = ("advice", "glance", "results")  # unfolded sections


def render_markdown_report(
    result: AuditResult,
    since: Comparison | None = None,
    texts: Mapping[str, SecretText] | None = None,
    details: SecretDetails | None = None,
    folder: Path | None = None,
) -> str:
    """Render the report as GitHub-flavoured Markdown of at most MOST characters.

    since: a comparison of a baseline with this run. details: values stored per secret.
    texts: private text to show, keyed by secret id; none by default. folder: the run, for commands.
    """
    result = phrases.make_result_printable(result)
    doc = build_markdown_document(result, details, texts, folder)
    visible = []
    folded = []
    # Unfolded sections show tables and lists: their paragraphs come last, folded.
    notes: list[Block] = [FactList("", doc.glossary)]
    for section in doc.sections:
        if section.id not in _AT_ONCE:
            folded.append(section)
            continue
        visible += [f"### {escape(section.title)}", *_render_unfolded_sections(section)]
        for block in section.blocks:
            if isinstance(block, Paragraph):
                notes.append(block)
    parts = [
        f"## {escape(phrases.shorten(doc.title, _MOST_TEXT))}",
        f"**{escape(doc.warning)}**" if doc.warning else "",
    ]
    if doc.doubts:
        parts += [f"**{escape(phrases.shorten(' '.join(doc.doubts), _MOST_HEADLINE))}**"]
    parts += [] if doc.standings else [escape(doc.headline)]
    parts += ["\n".join(map(_format_target_severity, doc.standings[:_MOST_STANDINGS]))]
    n_left = len(doc.standings) - _MOST_STANDINGS
    if n_left > 0:
        parts += [f"… and {format_count(n_left, 'more target')}, in report.html."]
    parts += visible
    facts = " · ".join(map(": ".join, doc.facts))
    parts.append(escape(phrases.shorten(facts, _MOST_TEXT)))
    for sentences, width in (
        (_format_claim_violations(result), _MOST_CLAIM),
        (
            list(map(claims.describe_claim_verdict, claims.select_reported_claims(result))),
            _MOST_VERDICT,
        ),
    ):
        n_left = len(sentences) - _MOST_CLAIMS
        parts.append(_render_bullet_list(sentences[:_MOST_CLAIMS], width))
        if n_left > 0:
            parts.append(f"… and {format_count(n_left, 'more claim')}, in report.html.")
    if since is not None:
        before = phrases.shorten(escaping.make_printable_line(since.runs[0]), _MOST_CELL)
        parts += [
            f"### Since {escape(before)}",
            escape(changes.write_comparison_headline(since)),
            render_truncated_table(changes.build_paired_change_table(since)),
        ]
    return _fit_comment(parts, [Section("reading", "How to read this", tuple(notes)), *folded])


def _format_target_severity(standing: TargetSummary) -> str:
    # Shorten before escaping, here and below: a cut could split an entity.
    name = escape(phrases.shorten(standing.name, _MOST_CLAIM))
    reason = escape(phrases.shorten(standing.reason, _MOST_CLAIM))
    return f"- {name}: **{standing.word.upper()}**. {reason} {standing.decision}"


def _render_unfolded_sections(section: Section) -> list[str]:
    """Render a visible section: shortened tables, and the first items of each list."""
    parts = []
    for block in section.blocks:
        match block:
            case Forest():
                parts.append(render_truncated_table(block.table))
            case Table():
                # The caption names the measure, and the columns whose cells are all equal.
                parts.append(f"{escape(block.caption)}:\n\n{render_truncated_table(block)}")
            case Bullets():
                n_left = len(block.items) - _MOST_POINTS
                parts.append(_render_bullet_list(block.items[:_MOST_POINTS], _MOST_TEXT))
                if n_left > 0:
                    parts += [f"… and {format_count(n_left, 'more point')}, in report.html."]
            case Code():
                fenced = _render_block(replace(block, title=""))
                parts.append(f"{escape(block.title)}:\n\n{fenced}")
    return parts


def _fit_comment(parts: list[str], folded: Iterable[Section]) -> str:
    """Return the parts, then as many folded sections as fit, then the titles of omitted
    sections.
    """
    parts = list(filter(None, parts))
    cut_titles = []
    for section in folded:
        # Reserve 1,000 for folds and the last line; 2 are the blank line between two parts.
        room = MOST - 1_000 - sum(len(part) + 2 for part in parts)
        bodies = []
        for body in filter(None, map(_render_block, section.blocks)):
            if len(body) <= room:
                bodies.append(body)
                room -= len(body) + 2
            elif section.title not in cut_titles:
                cut_titles.append(section.title)
        if bodies:
            body = "\n\n".join(bodies)
            # Inside a tag GitHub reads HTML, which needs another escaping. Blank lines end the
            # HTML: after one GitHub reads Markdown again.
            parts.append(
                f"<details><summary>{html.escape(section.title)}</summary>\n\n{body}\n\n</details>"
            )
    if cut_titles:
        parts.append(f"Too long for here, in report.html: {escape(', '.join(cut_titles))}.")
    return "\n\n".join(parts) + "\n"


def _format_claim_violations(result: AuditResult) -> list[str]:
    """Return sentences about claim violations that a probe found; these must stay visible."""
    sentences = []
    for finding in phrases.sort_findings(result):
        title = phrases.title_row(result, finding)
        for violation in phrases.list_violation_warnings(finding):
            sentences.append(f"{title}, {finding.attack}: {violation}")
    return sentences


def render_truncated_table(table: Table) -> str:
    """Return the table as Markdown, with shortened cells and as many rows as fit."""
    groups = []
    room = _MOST_TABLE
    n_left = 0
    for group in table.groups:
        title = phrases.shorten(group.title, _MOST_CELL)
        short_rows = []
        room -= len(escape(title))
        for row in group.rows:
            short = tuple(phrases.shorten(cell, _MOST_CELL) for cell in row)
            # Measure escaped cells, which are longer; 3 are the ` | ` of a cell. After a row too
            # many no other row fits.
            room -= sum(map(len, map(escape, short))) + 3 * len(short)
            if room >= 0:
                short_rows.append(short)
        n_left += len(group.rows) - len(short_rows)
        if short_rows:
            groups += [replace(group, title=title, rows=tuple(short_rows))]
    more = ""
    if n_left:
        more = f"\n\n… and {format_count(n_left, 'more row')}."
    return render_table_rows(replace(table, groups=tuple(groups))) + more


def render_markdown_document(doc: Document) -> str:
    """Render a document as GitHub-flavoured Markdown."""
    warning = ""
    if doc.warning:
        warning = f"**{escape(doc.warning)}**"
    parts = [f"# {escape(doc.title)}", warning, _render_facts(doc.facts)]
    parts += [f"## {escape(doc.lead)}", f"**{escape(doc.headline)}**", escape(doc.verdict)]
    for section in doc.sections:
        parts += [f"## {escape(section.title)}", *map(_render_block, section.blocks)]
    return "\n\n".join(filter(None, parts)) + "\n"


def _render_block(block: Block) -> str:
    match block:
        case Paragraph():
            return escape(block.text)
        case Bullets():
            return _render_bullet_list(block.items)
        case FactList():
            return _render_headed_body(block.title, _render_facts(block.facts))
        case Code():
            longest = max(map(len, re.findall("`+", block.text)), default=0)
            fence = "`" * max(3, longest + 1)  # longer than any run in the text
            # Not escaped: within a fence Markdown reads only the end of the fence.
            return _render_headed_body(block.title, f"{fence}\n{block.text}\n{fence}")
        case Table():
            return _render_captioned_table(block)
        case Figures():
            # Markdown shows no picture, so a figure whose numbers are elsewhere is left out.
            bodies = []
            for f in block.figures:
                if f.head:
                    body = f"{escape(f.explanation)}\n\n{render_table_rows(f.table)}"
                    bodies.append(_render_headed_body(f.title, body))
            return "\n\n".join(bodies)
        case Forest():
            return _render_captioned_table(block.table)
        case Secrets():
            return _render_bullet_list(block.notes)


def _render_headed_body(title: str, body: str) -> str:
    return f"### {escape(title)}\n\n{body}" if title and body else body


def _render_bullet_list(items: Iterable[str], most: int = sys.maxsize) -> str:
    """Return a list of the items. most: the maximum number of characters of an item."""
    return "\n".join(f"- {escape(phrases.shorten(item, most))}" for item in items)


def _render_facts(facts: Facts) -> str:
    return "\n".join(f"- {escape(term)}: {escape(text)}" for term, text in facts)


def _render_captioned_table(table: Table) -> str:
    return f"{escape(table.caption)}:\n\n{render_table_rows(table)}"


def render_table_rows(table: Table) -> str:
    """Return the table as Markdown without its caption."""
    width = len(table.head)
    rules = ["---"] * width
    for i in range(width):
        if i in table.numeric:
            rules[i] = "---:"
    grid = [list(map(escape, table.head)), rules]
    for group in table.groups:
        if group.title:
            grid.append([f"**{escape(group.title)}**"])
        for row in group.rows:
            grid.append(list(map(escape, row)))
    lines = []
    for cells in grid:
        # Markdown has no cells that span columns: pad short rows.
        lines.append(f"| {' | '.join(cells + [''] * (width - len(cells)))} |")
    return "\n".join(lines)
