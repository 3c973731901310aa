"""A table as text for a terminal, Markdown, CSV or LaTeX: sweeps and ledgers. Knows cells of text,
and escaping."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.table import Table as RichTable
from rich.text import Text

from auditor.reports import escaping

# Of LaTeX's article class at 10 pt: the width of a line, of a space between columns and, on
# average, of a character.
_LATEX_LINE, _LATEX_GAP, _LATEX_CHARACTER = 345.0, 8.0, 5.2
_LATEX_CAPITAL, _LATEX_WIDE = 7.5, {"m": 8.4, "w": 7.3, "M": 9.2, "W": 10.3, "%": 8.4}  # points


@dataclass(frozen=True)
class RowTable:
    """Rows under one head. `machine`: the same rows in columns for programs; without it CSV holds
    what people read."""

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
    table = RichTable(
        title=clean(grid.title), title_justify="left", caption=note, caption_justify="left"
    )
    for name in grid.head:
        table.add_column(clean(name), overflow="fold")
    for i, row in enumerate(grid.rows):
        table.add_row(*map(clean, row), style=styles[i] if styles else None)
    return table


def row_table_to_markdown(grid: RowTable) -> str:
    note = [escaping.escape_for_markdown(grid.note), ""] if grid.note else []
    return (
        "\n".join(
            [
                f"# {escaping.escape_for_markdown(grid.title)}",
                "",
                *note,
                *row_table_markdown_lines(grid),
            ]
        )
        + "\n"
    )


def row_table_markdown_lines(grid: RowTable) -> list[str]:
    """The rows under their head, as lines of Markdown."""
    head, *rows = (
        list(map(escaping.escape_for_markdown, cells)) for cells in (grid.head, *grid.rows)
    )
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]


def row_table_to_csv(grid: RowTable) -> str:
    """The rows for programs where there are some, else what people read."""
    return escaping.csv_text(grid.machine_head or grid.head, grid.machine_rows or grid.rows)


def row_table_to_latex(grid: RowTable) -> str:
    """A `tabular` with booktabs rules, for \\input, as wide as an article's line at most."""
    cells = list(zip(grid.head, *grid.rows, strict=True))
    longest_words = [
        max(_latex_points(word) for cell in column for word in cell.replace("-", " ").split(" "))
        for column in cells
    ]
    columns = _latex_columns([max(map(_latex_points, column)) for column in cells], longest_words)
    head, *rows = (
        " & ".join(map(escaping.escape_for_latex, row)) + r" \\" for row in (grid.head, *grid.rows)
    )
    # A comment ends with its line: on one line no title can go on as LaTeX.
    about = [
        f"% {escaping.to_printable_line(text)}"
        for text in (grid.title, *filter(None, (grid.note,)))
    ]
    lines = [
        *about,
        rf"{{\setlength{{\tabcolsep}}{{{_LATEX_GAP / 2:g}pt}}\begin{{tabular}}{{@{{}}{columns}@{{}}}}",  # noqa: E501
    ]
    return (
        "\n".join(
            [*lines, r"\toprule", head, r"\midrule", *rows, r"\bottomrule", r"\end{tabular}}"]
        )
        + "\n"
    )


def _latex_points(text: str) -> float:
    """Return how wide a text is in Computer Modern of 10 points, at most about."""
    return sum(
        _LATEX_WIDE.get(sign, _LATEX_CAPITAL if sign.isupper() else _LATEX_CHARACTER)
        for sign in text
    )


def _latex_columns(natural: Sequence[float], words: Sequence[float]) -> str:
    """Return a column specification that fits a line. natural, words: of the widest cells and
    words, in points.

    A column no wider than an equal share of the room keeps its width; the others are paragraphs and
    share the rest.
    """
    room = _LATEX_LINE - _LATEX_GAP * (len(natural) - 1)
    wide = set(range(len(natural)))
    while fitting := {i for i in wide if natural[i] <= room / len(wide)}:
        room -= sum(natural[i] for i in fitting)
        wide -= fitting
    paragraphs = dict[int, float]()
    while wide:
        # Half of the room in equal parts, so that no paragraph is a sliver; half by how much they
        # hold.
        total = sum(natural[i] for i in wide)
        shares = {i: room / 2 * (1 / len(wide) + natural[i] / total) for i in wide}
        # A word is not broken: a paragraph that is too narrow for its longest word takes from the
        # others.
        short = {i: words[i] for i in wide if shares[i] < words[i]}
        paragraphs |= short or shares
        room = max(0.0, room - sum(short.values()))
        wide -= set(short or wide)
    return "".join(
        f"p{{{int(paragraphs[i])}pt}}" if i in paragraphs else "l" for i in range(len(natural))
    )
