"""A table as text for a terminal, Markdown, CSV or LaTeX: sweeps and ledgers. Knows cells of text, and escaping."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.table import Table as RichTable
from rich.text import Text

from auditor.reports import escaping

_SENTENCE = 40  # characters: in LaTeX a column with a wider cell is of paragraphs


@dataclass(frozen=True)
class RowTable:
    """Rows under one head. `machine`: the same rows in columns for programs; without it CSV holds what people read."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""
    machine_head: tuple[str, ...] = ()
    machine_rows: tuple[tuple[object, ...], ...] = field(default=())


def row_table_to_rich(grid: RowTable, styles: Sequence[str] = ()) -> RichTable:
    """A rich table; `styles`: one a row."""
    clean = escaping.escape_for_terminal
    # Line by line: cleaned as one text its line ends would be spaces.
    note = Text("\n").join(map(clean, grid.note.split("\n"))) if grid.note else None
    table = RichTable(title=clean(grid.title), title_justify="left", caption=note, caption_justify="left")
    for name in grid.head:
        table.add_column(clean(name), overflow="fold")
    for i, row in enumerate(grid.rows):
        table.add_row(*map(clean, row), style=styles[i] if styles else None)
    return table


def row_table_to_markdown(grid: RowTable) -> str:
    note = [escaping.escape_for_markdown(grid.note), ""] if grid.note else []
    return (
        "\n".join([f"# {escaping.escape_for_markdown(grid.title)}", "", *note, *row_table_markdown_lines(grid)]) + "\n"
    )


def row_table_markdown_lines(grid: RowTable) -> list[str]:
    """The rows under their head, as lines of Markdown."""
    head, *rows = (list(map(escaping.escape_for_markdown, cells)) for cells in (grid.head, *grid.rows))
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]


def row_table_to_csv(grid: RowTable) -> str:
    """The rows for programs where there are some, else what people read."""
    return escaping.csv_text(grid.machine_head or grid.head, grid.machine_rows or grid.rows)


def row_table_to_latex(grid: RowTable) -> str:
    """A `tabular` with booktabs rules, for \\input; columns with sentences in them are paragraphs."""
    widest = [max(map(len, column)) for column in zip(grid.head, *grid.rows, strict=True)]
    columns = "".join(r"p{0.25\linewidth}" if width > _SENTENCE else "l" for width in widest)
    head, *rows = (" & ".join(map(escaping.escape_for_latex, row)) + r" \\" for row in (grid.head, *grid.rows))
    # A comment ends with its line: on one line no title can go on as LaTeX.
    about = [f"% {escaping.to_printable_line(text)}" for text in (grid.title, *filter(None, (grid.note,)))]
    lines = [*about, rf"\begin{{tabular}}{{{columns}}}", r"\toprule", head, r"\midrule", *rows]
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"]) + "\n"
