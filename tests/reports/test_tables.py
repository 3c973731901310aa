"""Tables: what a reader or a program gets back is what was put in, whatever characters it holds."""

from __future__ import annotations

import csv
import io
import re

import pytest
from markdown_it import MarkdownIt
from rich.console import Console

from auditor.reports.tables import (
    RowTable,
    render_csv_table,
    render_latex_table,
    render_markdown_table,
    render_rich_table,
)

NASTY = [
    'a, "b"\nc',
    "x | y",
    "50% & more_{}",
    "=HYPERLINK(1)",
    "\x1b[31mred",
    r"\input{x} ~ ^ $",
    "[low]",
    "<b>*",
]
GRID = RowTable("A & B", ("name", "value"), tuple((cell, "1") for cell in NASTY), "a | note")


def test_csv_comes_back() -> None:
    rows = list(csv.reader(io.StringIO(render_csv_table(GRID))))
    assert rows[0] == ["name", "value"] and len(rows) == 1 + len(NASTY)
    assert [row[0] for row in rows[1:4]] == ['a, "b" c', "x | y", "50% & more_{}"]
    assert rows[4][0] == "'=HYPERLINK(1)" and rows[5][0] == "red"


def test_csv_for_programs_holds_numbers_and_gaps() -> None:
    grid = RowTable(
        "t", ("a",), (("12%",),), machine_head=("low", "high"), machine_rows=((-0.25, None),)
    )
    assert render_csv_table(grid) == "low,high\n-0.25,\n"


@pytest.mark.parametrize(
    ("cell", "latex"),
    [
        ("50% & x_1 #2 {a}", r"50\% \& x\_1 \#2 \{a\}"),
        (r"\input{x}", r"\textbackslash{}input\{x\}"),
        ("a~b^c$", r"a\textasciitilde{}b\textasciicircum{}c\$"),
        ("[−1–2]", "{[}$-$1--2{]}"),
        ("<0, ε ≥ 3", r"\textless{}0, $\varepsilon$ $\geq$ 3"),
    ],
)
def test_latex_is_escaped(cell: str, latex: str) -> None:
    text = render_latex_table(RowTable("t", ("h",), ((cell,),)))
    assert f"\n{latex} \\\\\n" in text
    assert text.count(r"\begin{tabular}{@{}l@{}}") == text.count(r"\end{tabular}") == 1


@pytest.mark.parametrize(
    "widths", [(10, 5), (90, 5), (30,) * 8, (200, 200), (8, 8, 70, 12, 12), (1,), (40, 41)]
)
def test_a_latex_table_fits_the_line_of_an_article(widths: tuple[int, ...]) -> None:
    cells = tuple(("word " * width)[:width].strip() or "w" for width in widths)
    text = render_latex_table(RowTable("t", tuple("h" * len(widths)), (cells,)))
    (columns,) = re.findall(r"\\begin\{tabular\}\{@\{\}(.*)@\{\}\}", text)
    found = re.findall(r"l|p\{([0-9]+)pt\}", columns)
    taken = sum(float(pt) if pt else 5.2 * len(cell) for pt, cell in zip(found, cells, strict=True))
    assert taken + 8 * (len(cells) - 1) <= 345 + len(cells) / 2
    assert ("p{" in columns) == (
        sum(5.2 * len(cell) for cell in cells) + 8 * (len(cells) - 1) > 345
    )


def test_wide_letters_take_their_room_in_latex() -> None:
    """A head was 32.2 points wide in a column of 31.2: five such columns of a real export did not
    fit the line."""
    narrow, wide = (render_latex_table(RowTable("t", ("h",), ((sign * 45,),))) for sign in "im")
    assert "{@{}l@{}}" in narrow and "{@{}p{" in wide


def test_a_latex_row_has_as_many_cells_as_the_head() -> None:
    for line in render_latex_table(GRID).splitlines():
        if line.endswith(r"\\"):
            assert line.replace(r"\&", "").count("&") == 1


def test_markdown_keeps_its_columns() -> None:
    lines = render_markdown_table(GRID).splitlines()
    rows = [line for line in lines if line.startswith("| ")]
    assert all(line.replace(r"\|", "").count("|") == 3 for line in rows) and len(rows) == 2 + len(
        NASTY
    )
    assert "\x1b" not in render_markdown_table(GRID)


def test_markdown_is_a_table() -> None:
    """Its rule is a rule and its cells are text: `-1` and `---` too."""
    text = render_markdown_table(RowTable("T", ("a", "b"), (("-1", "x | y"), ("---", "2"))))
    parsed = MarkdownIt("gfm-like", {"linkify": False}).parse(text)
    assert [token.type for token in parsed].count("table_open") == 1
    cells = [
        "".join(child.content for child in token.children or [])
        for token in parsed
        if token.type == "inline"
    ]
    assert cells == ["T", "a", "b", "-1", "x | y", "---", "2"]


def test_a_terminal_sees_text_not_markup() -> None:
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(render_rich_table(RowTable("t", ("h",), (("[red]x[/red]",),)), ["green"]))
    assert "[red]x[/red]" in console.export_text()
