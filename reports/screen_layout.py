"""Lay out labelled entries as lines of a given width.

Entries are wrapped and cut; omitted items are counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.text import Text

RESULT = "RESULT"
GUTTER = 8  # columns of the labels


@dataclass(frozen=True)
class ScreenEntry:
    """A labelled entry of the screen.

    items: sentences, most important first; max_lines: the maximum number of lines.
    """

    label: str
    items: tuple[str, ...]
    max_lines: int
    between: str = "; "


def lay_out_entries(entries: Sequence[ScreenEntry], width: int) -> list[Text]:
    """Return lines of `width` columns, each entry after its label."""
    lines = []
    for entry in entries:
        style = "bold" if entry.label == RESULT else ""
        for i, line in enumerate(_fit_screen_lines(entry, width - GUTTER) if entry.items else ()):
            lines.append(
                Text.assemble((f"{'' if i else entry.label:{GUTTER}}", "bold"), (line, style))
            )
    return lines


def _fit_screen_lines(entry: ScreenEntry, width: int) -> list[str]:
    """Return the items that fit into `entry.max_lines` lines, then the number of omitted items.

    If not even the first item fits, cut it.
    """
    # Try all items, then ever fewer: only wrapping tells how many lines they take.
    for n_items in range(len(entry.items), 0, -1):
        n_left = len(entry.items) - n_items
        more = (f"{n_left:,} more in the report",) if n_left else ()
        lines = wrap_line(entry.between.join((*entry.items[:n_items], *more)), width)
        if len(lines) <= entry.max_lines:
            return lines
    *full_lines, last = wrap_line(entry.items[0], width)[: entry.max_lines]
    return [*full_lines, f"{cut_line(last, width - 2)} …"]


def wrap_line(text: str, width: int) -> list[str]:
    """Return lines of at most `width` terminal columns; a wide character takes two columns."""
    return [line.plain.rstrip() for line in Text(text).wrap(Console(width=width), width)]


def cut_line(text: str, width: int) -> str:
    """Return the text; if it is wider than `width` terminal columns, end it with an ellipsis."""
    if cell_len(text) <= width:
        return text
    return set_cell_size(text, width - 1).rstrip() + "…"
