"""Render a report's sections, or shares that belong to no run, for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from rich.console import RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from auditor.conclusions.secret_details import SecretDetails
from auditor.conclusions.signals import assess_leak_signals
from auditor.core.result import AuditResult, Measurement
from auditor.reports import escaping, phrases
from auditor.reports.advice import suggest_next_command
from auditor.reports.blocks import (
    Block,
    Bullets,
    Code,
    FactList,
    Figures,
    Forest,
    Paragraph,
    Secrets,
    Table,
)
from auditor.reports.table_of_contents import build_page_document
from auditor.reports.tables import RowTable, render_rich_table


def build_report_screen(
    result: AuditResult, folder: Path, details: SecretDetails | None = None
) -> Iterator[RenderableType]:
    """Yield the sections of the report, then the report's path and the next command."""
    document = build_page_document(result, details)
    yield Text(document.headline, style="bold")
    if result.prefix_token:
        yield escaping.escape_for_terminal(result.prefix_token)
    for section in document.sections:
        yield Text(f"\n{section.title}", style="bold cyan")
        for block in section.blocks:
            yield from _render_terminal_block(block)
    command = suggest_next_command(assess_leak_signals(result), folder)
    report = escaping.make_printable_line(str(folder / "report.html"))
    yield Text.assemble(("\nreport", "bold"), f": {report}", overflow="fold")
    yield Text.assemble(("next", "bold"), f":   {command}", overflow="fold")


def _render_terminal_block(block: Block) -> Iterator[RenderableType]:
    match block:
        case Paragraph():
            yield Text(block.text)
        case Bullets(items=items) | Secrets(notes=items):
            yield from (Text(f"- {item}") for item in items)
        case FactList():
            yield from (Text(f"{term}: {text}") for term, text in block.facts)
        case Code():
            yield Text(f"{block.title}:\n{block.text}")
        case Table():
            yield _render_terminal_table(block, block.caption)
        case Forest(table=table):
            yield _render_terminal_table(table, table.caption)
        case Figures():
            for figure in block.figures:
                if figure.head:
                    yield _render_terminal_table(figure.table, figure.title)


def _render_terminal_table(table: Table, title: str) -> RichTable:
    rows: list[tuple[str, ...]] = []
    for group in table.groups:
        if group.title:
            rows.append((group.title,))
        rows += group.rows
    return render_rich_table(RowTable(title, table.head, tuple(rows)))


def share_measurement_table(measurements: Iterable[Measurement]) -> RichTable:
    """Return a table of shares, with three decimals as in a challenge's ranking."""
    table = RichTable("", "share", "95% interval", "hits", "n", "note")
    for m in measurements:
        cells = (
            f"{m.value:.3f}",
            f"{m.low:.3f}–{m.high:.3f}",
            f"{m.hits:,}",
            f"{m.n:,}",
            m.note,
        )
        table.add_row(Text(phrases.format_metric(m.name)), *map(Text, cells))
    return table
