"""A table as text for a terminal, Markdown, CSV or LaTeX: sweeps and ledgers. Knows cells of text, and escaping."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.table import Table as RichTable
from rich.text import Text

from auditor.reports.words import clean

_SENTENCE = 40  # characters
_LATEX = {
    **{character: f"\\{character}" for character in "&%$#_{}"},
    **{character: f"{{{character}}}" for character in "[]*"},  # behind a row's end they would belong to it
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "−": "$-$",
    "–": "--",
    "…": r"\ldots{}",
    "ε": r"$\varepsilon$",
    "δ": r"$\delta$",
    "Δ": r"$\Delta$",
    "≥": r"$\geq$",
    "≤": r"$\leq$",
    "×": r"$\times$",
    "∞": r"$\infty$",
    "·": r"\textperiodcentered{}",
}


@dataclass(frozen=True)
class Grid:
    """Rows under one head. `machine`: the same rows in columns for programs; without it CSV holds what people read."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""
    machine_head: tuple[str, ...] = ()
    machine_rows: tuple[tuple[object, ...], ...] = field(default=())


def to_rich(grid: Grid, styles: Sequence[str] = ()) -> RichTable:
    """A rich table; `styles`: one a row."""
    table = RichTable(title=grid.title, title_justify="left", caption=grid.note or None, caption_justify="left")
    for name in grid.head:
        table.add_column(name, overflow="fold")
    for i, row in enumerate(grid.rows):
        table.add_row(*(Text(clean(cell)) for cell in row), style=styles[i] if styles else None)
    return table


def to_markdown(grid: Grid) -> str:
    lines = [f"# {_markdown(grid.title)}", ""] + ([grid.note, ""] if grid.note else [])
    lines += [_line(grid.head), _line(("---",) * len(grid.head)), *map(_line, grid.rows)]
    return "\n".join(lines) + "\n"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(map(_markdown, cells)) + " |"


def _markdown(cell: str) -> str:
    text = clean(cell)
    for character in "\\|*_`<[":
        text = text.replace(character, f"\\{character}")
    return text


def to_csv(grid: Grid) -> str:
    """RFC 4180 with "\\n" line ends. A cell that a spreadsheet would run as a formula is preceded by an apostrophe."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(grid.machine_head or grid.head)
    for row in grid.machine_rows or grid.rows:
        writer.writerow([_plain(cell) for cell in row])
    return buffer.getvalue()


def _plain(cell: object) -> object:
    if not isinstance(cell, str):
        return "" if cell is None else cell
    text = clean(cell)
    return f"'{text}" if text.startswith(("=", "+", "-", "@")) else text


def to_latex(grid: Grid) -> str:
    """A `tabular` with booktabs rules, for \\input; columns with sentences in them are paragraphs."""
    widest = [max(map(len, column)) for column in zip(grid.head, *grid.rows, strict=True)]
    columns = "".join(r"p{0.25\linewidth}" if width > _SENTENCE else "l" for width in widest)
    rows = [" & ".join(map(_latex, row)) + r" \\" for row in grid.rows]
    note = [f"% {clean(grid.note)}"] if grid.note else []
    head = " & ".join(map(_latex, grid.head)) + r" \\"
    lines = [f"% {clean(grid.title)}", *note, rf"\begin{{tabular}}{{{columns}}}", r"\toprule", head, r"\midrule"]
    return "\n".join([*lines, *rows, r"\bottomrule", r"\end{tabular}"]) + "\n"


def _latex(cell: str) -> str:
    return "".join(_LATEX.get(character, character) for character in clean(cell))
