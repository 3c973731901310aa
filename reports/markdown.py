"""The report as Markdown, for a pull request or a wiki. Knows blocks; not what they say."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

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
    Paragraph,
    Secrets,
    Table,
)
from auditor.reports.contents import document
from auditor.types import AuditResult

_SPECIAL = re.compile(r"[\\`*|~$]|(?<!\w)_|_(?!\w)|\](?=[(\[:])")  # a `]` matters only where a link could follow
_LINE_START = re.compile(r"^(\d*)([#+=-]|(?<=\d)[.)](?=\s|$))")  # headings, rules, list items


def render(result: AuditResult) -> str:
    """The whole report as GitHub-flavoured Markdown."""
    return page(document(result))


def page(doc: Document) -> str:
    """A document as GitHub-flavoured Markdown."""
    parts = [f"# {escape(doc.title)}", _facts(doc.facts)]
    parts += [f"## {escape(doc.lead)}", f"**{escape(doc.headline)}**", escape(doc.verdict)]
    for section in doc.sections:
        parts += [f"## {escape(section.title)}", *map(_block, section.blocks)]
    return "\n\n".join(filter(None, parts)) + "\n"


def escape(text: str) -> str:
    """Plain text that Markdown shows as it stands: no HTML, no links, no emphasis, no table cells, no mathematics."""
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return _LINE_START.sub(r"\1\\\2", _SPECIAL.sub(r"\\\g<0>", text))


def _block(block: Block) -> str:
    match block:
        case Paragraph():
            return escape(block.text)
        case Bullets():
            return _bullets(block.items)
        case FactList():
            return _titled(block.title, _facts(block.facts))
        case Code():
            return _titled(block.title, _code(block.text))
        case Table():
            return _table(block)
        case Figures():
            return "\n\n".join(_titled(f.title, f"{escape(f.description)}\n\n{rows(f.table)}") for f in block.figures)
        case Forest():
            return _table(block.table)
        case Secrets():
            return _bullets(block.notes)
        case Cards():
            return "\n\n".join(_titled(card.title, _card(card)) for card in block.cards)


def _card(card: Card) -> str:
    return "\n\n".join(filter(None, (escape(card.text), _facts(card.facts), _bullets(card.notes))))


def _titled(title: str, body: str) -> str:
    return f"### {escape(title)}\n\n{body}" if title and body else body


def _bullets(items: Iterable[str]) -> str:
    return "\n".join(f"- {escape(item)}" for item in items)


def _facts(facts: Facts) -> str:
    return "\n".join(f"- {escape(term)}: {escape(text)}" for term, text in facts)


def _code(text: str) -> str:
    """Fenced by more backticks than the text holds in a row."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}\n{text}\n{fence}"


def _table(table: Table) -> str:
    return f"{escape(table.caption)}:\n\n{rows(table)}"


def rows(table: Table) -> str:
    """The table without its caption."""
    rule = ["---:" if column in table.numeric else "---" for column in range(len(table.head))]
    lines = [_line(map(escape, table.head)), _line(rule)]
    for group in table.groups:
        if group.title:
            lines.append(_line(_padded([f"**{escape(group.title)}**"], len(rule))))
        lines += [_line(_padded([escape(cell) for cell in row], len(rule))) for row in group.rows]
    return "\n".join(lines)


def _padded(cells: Sequence[str], width: int) -> list[str]:
    return [*cells, *[""] * (width - len(cells))]


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
