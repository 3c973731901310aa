"""Render a table of a sweep, or of a ledger of runs, for a terminal, Markdown, CSV or LaTeX."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from auditor.reports import escaping

if TYPE_CHECKING:
    from rich.table import Table as RichTable

# Points in LaTeX's article class at 10 pt: a line, a space between columns and, on average, a
# character.
_LATEX_LINE = 345.0
_LATEX_GAP = 8.0
_LATEX_CHARACTER = 5.2
# points
_LATEX_CAPITAL = 7.5
_LATEX_WIDE = {"m": 8.4, "w": 7.3, "M": 9.2, "W": 10.3, "%": 8.4}
LATEX_GAP = "\n\\par\\bigskip\n"  # between tables


@dataclass(frozen=True)
class RowTable:
    """A table for readers, and optionally a different table for programs.

    machine_head, machine_rows: the table written to CSV; if empty, `head` and `rows` are written.
    """

    title: str
    head: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    note: str = ""
    machine_head: tuple[str, ...] = ()
    machine_rows: Sequence[tuple[object, ...]] = ()


def render_rich_table(grid: RowTable, styles: Sequence[str] = ()) -> RichTable:
    """Return a table of the package rich. styles: one style per row."""
    from rich.table import Table as RichTable
    from rich.text import Text

    clean = escaping.escape_for_terminal
    note = None
    if grid.note:
        # Line by line: cleaning the full text would turn line ends into spaces.
        note = Text("\n").join(map(clean, grid.note.split("\n")))
    table = RichTable(
        title=clean(grid.title), title_justify="left", caption=note, caption_justify="left"
    )
    for name in grid.head:
        table.add_column(clean(name), overflow="fold")
    for i, row in enumerate(grid.rows):
        table.add_row(*map(clean, row), style=styles[i] if styles else None)
    return table


def render_markdown_table(grid: RowTable) -> str:
    parts = [f"# {escaping.escape_for_markdown(grid.title)}"]
    if grid.note:
        parts.append(escaping.escape_for_markdown(grid.note))
    parts.append("\n".join(render_markdown_lines(grid)))
    return "\n\n".join(parts) + "\n"


def render_markdown_lines(grid: RowTable) -> list[str]:
    """Return the head and the rows as lines of Markdown."""
    lines = []
    for cells in (grid.head, *grid.rows):
        lines.append(f"| {' | '.join(map(escaping.escape_for_markdown, cells))} |")
    lines.insert(1, f"|{' --- |' * len(grid.head)}")
    return lines


def render_csv_table(grid: RowTable) -> str:
    """Return CSV of the table for programs if it exists, otherwise of the table for readers."""
    return escaping.render_csv(grid.machine_head or grid.head, grid.machine_rows or grid.rows)


def render_latex_table(grid: RowTable) -> str:
    """Return a `tabular` with booktabs rules, for \\input, at most as wide as an article's line."""
    widest_cells = []
    longest_words = []
    for column in zip(grid.head, *grid.rows, strict=True):
        words = " ".join(column).replace("-", " ").split(" ")
        widest_cells.append(max(map(_measure_latex_points, column)))
        longest_words.append(max(map(_measure_latex_points, words)))
    columns = _format_latex_columns(widest_cells, longest_words)
    rows = []
    for row in (grid.head, *grid.rows):
        rows.append(" & ".join(map(escaping.escape_for_latex, row)) + r" \\")
    # A comment ends with its line: on one line no title can continue as LaTeX.
    about = []
    for text in (grid.title, *filter(None, (grid.note,))):
        about.append(f"% {escaping.make_printable_line(text)}")
    opening = rf"{{\setlength{{\tabcolsep}}{{{_LATEX_GAP / 2:g}pt}}\begin{{tabular}}{{@{{}}{columns}@{{}}}}"  # noqa: E501
    lines = [*about, opening, r"\toprule", rows[0], r"\midrule", *rows[1:], r"\bottomrule"]
    return "\n".join([*lines, r"\end{tabular}}", ""])


def _measure_latex_points(text: str) -> float:
    """Return an upper bound on a text's width in points, in 10-point Computer Modern."""
    return sum(
        _LATEX_WIDE.get(sign, _LATEX_CAPITAL if sign.isupper() else _LATEX_CHARACTER)
        for sign in text
    )


def _format_latex_columns(natural: Sequence[float], words: Sequence[float]) -> str:
    """Return LaTeX column types that fit the width of a line.

    natural, words: widths of each column's widest cell and of its widest word, in points. A column
    keeps its natural width if this is at most an equal share of the line. The other columns become
    paragraphs and share the remaining width.
    """
    room = _LATEX_LINE - _LATEX_GAP * (len(natural) - 1)
    wide = set(range(len(natural)))
    while fitting := {i for i in wide if natural[i] <= room / len(wide)}:
        room -= sum(natural[i] for i in fitting)
        wide -= fitting
    paragraphs = dict[int, float]()
    while wide:
        # Half of the room in equal parts, to avoid narrow paragraphs; half by content.
        total = sum(natural[i] for i in wide)
        shares = {}
        for i in wide:
            shares[i] = room / 2 * (1 / len(wide) + natural[i] / total)
        # Words are not broken: a paragraph narrower than its longest word takes room from the
        # others.
        short = {}
        for i in wide:
            if shares[i] < words[i]:
                short[i] = words[i]
        paragraphs |= short or shares
        room = max(0.0, room - sum(short.values()))
        wide -= set(short or wide)
    return "".join(
        f"p{{{int(paragraphs[i])}pt}}" if i in paragraphs else "l" for i in range(len(natural))
    )
