"""Render the report as Markdown, short enough for a pull request comment.

The headline, advice, signals, results, claims and changes are visible; the rest is folded, as far
as it fits.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace

from auditor.conclusions.secret_details import SecretDetails
from auditor.core.counts import counted
from auditor.core.result import AuditResult
from auditor.gate.compare import Comparison
from auditor.records.private_texts import SecretText
from auditor.reports import changes, claims, escaping, phrases
from auditor.reports.blocks import (
    Block,
    Bullets,
    Card,
    Cards,
    Code,
    Document,
    FactList,
    Facts,
    Figures,
    Forest,
    Group,
    Paragraph,
    Secrets,
    Section,
    Table,
    TargetSummary,
)
from auditor.reports.escaping import escape_for_markdown as escape
from auditor.reports.table_of_contents import markdown_document

# characters of a report; GitHub takes 65,536 in a comment, which leaves room for a gate's decision
MOST = 32_000
_MOST_TABLE, _MOST_TEXT, _MOST_CELL, _MOST_CLAIM, _MOST_CLAIMS, _MOST_POINTS = (
    6_000,
    500,
    160,
    300,
    3,
    12,
)
# of a claim: a consistent audit names the violation it would have detected
_MOST_VERDICT = 400
_MOST_HEADLINE, _MOST_STANDINGS = 1_500, 8
_AT_ONCE = ("advice", "glance", "results")  # unfolded sections


def render_markdown_report(
    result: AuditResult,
    since: Comparison | None = None,
    texts: Mapping[str, SecretText] | None = None,
    details: SecretDetails | None = None,
) -> str:
    """Render the report as GitHub-flavoured Markdown of at most MOST characters.

    since: a comparison of a baseline with this run. texts: the private text to show, by id; none by
    default. details: values stored by secret.
    """
    result = phrases.result_with_printable_strings(result)
    doc = markdown_document(result, details, texts)
    plain = [section for section in doc.sections if section.id in _AT_ONCE]
    rest = [section for section in doc.sections if section.id not in _AT_ONCE]
    parts = [
        f"## {escape(phrases.shorten(doc.title, _MOST_TEXT))}",
        f"**{escape(doc.warning)}**" if doc.warning else "",
    ]
    parts += (
        [f"**{escape(phrases.shorten(' '.join(doc.doubts), _MOST_HEADLINE))}**"]
        if doc.doubts
        else []
    )
    parts += [] if doc.standings else [escape(doc.headline)]
    parts += ["\n".join(map(_target_severity_line, doc.standings[:_MOST_STANDINGS]))]
    n_left = len(doc.standings) - _MOST_STANDINGS
    parts += [f"… and {counted(n_left, 'more target')}, in report.html."] if n_left > 0 else []
    for section in plain:
        parts += [f"### {escape(section.title)}", *_unfolded_section_markdown_parts(section)]
    parts += [
        escape(
            phrases.shorten(" · ".join(f"{term}: {text}" for term, text in doc.facts), _MOST_TEXT)
        )
    ]
    violations = _claim_violation_lines(result)[:_MOST_CLAIMS]
    verdicts = [
        claims.claim_verdict_sentence(claim)
        for claim in claims.claims_to_report(result)[:_MOST_CLAIMS]
    ]
    parts += [_bullet_list_markdown(phrases.shorten(line, _MOST_CLAIM) for line in violations)]
    parts += [_bullet_list_markdown(phrases.shorten(line, _MOST_VERDICT) for line in verdicts)]
    if since is not None:
        before = phrases.shorten(escaping.to_printable_line(since.runs[0]), _MOST_CELL)
        parts += [
            f"### Since {escape(before)}",
            escape(changes.headline(since)),
            truncated_table_markdown(changes.paired_change_table(since)),
        ]
    # Unfolded sections show tables and lists above: their paragraphs come last, folded.
    notes = (
        Paragraph(doc.rule),
        *(block for section in plain for block in section.blocks if isinstance(block, Paragraph)),
    )
    return _markdown_fitted_to_comment(
        parts, [Section("reading", "How to read this", notes), *rest]
    )


def _target_severity_line(standing: TargetSummary) -> str:
    # Shorten before escaping, here and below: a cut could split an entity.
    name, reason = (phrases.shorten(t, _MOST_CLAIM) for t in (standing.name, standing.reason))
    return f"- {escape(name)}: **{standing.word.upper()}**. {escape(reason)} {standing.decision}"


def _unfolded_section_markdown_parts(section: Section) -> list[str]:
    """Return a section's tables, cut, and the first points of its lists."""
    parts = list[str]()
    for block in section.blocks:
        match block:
            case Forest() | Table():
                parts.append(
                    truncated_table_markdown(block.table if isinstance(block, Forest) else block)
                )
            case Bullets():
                n_left = len(block.items) - _MOST_POINTS
                parts.append(
                    _bullet_list_markdown(
                        phrases.shorten(item, _MOST_TEXT) for item in block.items[:_MOST_POINTS]
                    )
                )
                parts += (
                    [f"… and {counted(n_left, 'more point')}, in report.html."]
                    if n_left > 0
                    else []
                )
            case Code():
                fenced = _block_markdown(replace(block, title=""))
                parts.append(f"{escape(block.title)}:\n\n{fenced}")
    return parts


def _markdown_fitted_to_comment(parts: list[str], folded: Iterable[Section]) -> str:
    """Return the parts, the folded sections as far as they fit, and the titles of cut sections."""
    parts, cut_titles = list(filter(None, parts)), []
    for section in folded:
        # Reserve 1,000 for folds and the last line; 2 are the blank line between two parts.
        room, bodies = MOST - 1_000 - sum(len(part) + 2 for part in parts), []
        for body in filter(None, map(_block_markdown, section.blocks)):
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


def _claim_violation_lines(result: AuditResult) -> list[str]:
    """Return the claim violations found by a probe, which must stay unfolded."""
    return [
        f"{phrases.row_title(result, finding)}, {finding.attack}: {violation}"
        for finding in phrases.findings_in_report_order(result)
        for violation in phrases.violation_warnings(finding)
    ]


def truncated_table_markdown(table: Table) -> str:
    """Return the table with long cells shortened, and as many of its rows as fit."""
    groups, room, n_left = list[Group](), _MOST_TABLE, 0
    for group in table.groups:
        title, short_rows = phrases.shorten(group.title, _MOST_CELL), list[tuple[str, ...]]()
        room -= len(escape(title))
        for row in group.rows:
            short = tuple(phrases.shorten(cell, _MOST_CELL) for cell in row)
            # Measure escaped cells, which are longer; 3 are the ` | ` of a cell. After a row too
            # many no other row fits.
            room -= sum(len(escape(cell)) + 3 for cell in short)
            short_rows += [short] if room >= 0 else []
        n_left += len(group.rows) - len(short_rows)
        groups += [replace(group, title=title, rows=tuple(short_rows))] if short_rows else []
    more = f"\n\n… and {counted(n_left, 'more row')}." if n_left else ""
    return table_rows_markdown(replace(table, groups=tuple(groups))) + more


def render_markdown_document(doc: Document) -> str:
    """Render a document as GitHub-flavoured Markdown."""
    warning = f"**{escape(doc.warning)}**" if doc.warning else ""
    parts = [f"# {escape(doc.title)}", warning, _facts_bullet_list(doc.facts)]
    parts += [f"## {escape(doc.lead)}", f"**{escape(doc.headline)}**", escape(doc.verdict)]
    for section in doc.sections:
        parts += [f"## {escape(section.title)}", *map(_block_markdown, section.blocks)]
    return "\n\n".join(filter(None, parts)) + "\n"


def _block_markdown(block: Block) -> str:
    match block:
        case Paragraph():
            return escape(block.text)
        case Bullets():
            return _bullet_list_markdown(block.items)
        case FactList():
            return _body_under_heading_markdown(block.title, _facts_bullet_list(block.facts))
        case Code():
            longest = max((len(run) for run in re.findall("`+", block.text)), default=0)
            fence = "`" * max(3, longest + 1)  # longer than any run in the text
            # Not escaped: within a fence Markdown reads only the end of the fence.
            return _body_under_heading_markdown(block.title, f"{fence}\n{block.text}\n{fence}")
        case Table():
            return _captioned_table_markdown(block)
        case Figures():
            return "\n\n".join(
                _body_under_heading_markdown(
                    f.title, f"{escape(f.description)}\n\n{table_rows_markdown(f.table)}"
                )
                for f in block.figures
            )
        case Forest():
            return _captioned_table_markdown(block.table)
        case Secrets():
            return _bullet_list_markdown(block.notes)
        case Cards():
            return "\n\n".join(
                _body_under_heading_markdown(card.title, _card_markdown(card))
                for card in block.cards
            )


def _card_markdown(card: Card) -> str:
    return "\n\n".join(
        filter(
            None,
            (escape(card.text), _facts_bullet_list(card.facts), _bullet_list_markdown(card.notes)),
        )
    )


def _body_under_heading_markdown(title: str, body: str) -> str:
    return f"### {escape(title)}\n\n{body}" if title and body else body


def _bullet_list_markdown(items: Iterable[str]) -> str:
    return "\n".join(f"- {escape(item)}" for item in items)


def _facts_bullet_list(facts: Facts) -> str:
    return "\n".join(f"- {escape(term)}: {escape(text)}" for term, text in facts)


def _captioned_table_markdown(table: Table) -> str:
    return f"{escape(table.caption)}:\n\n{table_rows_markdown(table)}"


def table_rows_markdown(table: Table) -> str:
    """Return the table without its caption."""
    lines = [list(map(escape, table.head))]
    lines += [["---:" if column in table.numeric else "---" for column in range(len(table.head))]]
    for group in table.groups:
        lines += [[f"**{escape(group.title)}**"]] if group.title else []
        lines += [list(map(escape, row)) for row in group.rows]
    # Markdown has no cells that span columns: pad short rows.
    return "\n".join(
        f"| {' | '.join([*cells, *[''] * (len(table.head) - len(cells))])} |" for cells in lines
    )
