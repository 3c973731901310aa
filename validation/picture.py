"""Draw the pictures of a page of evidence from its own tables: one dot a row, with its 95%
interval.

    python -m validation.picture docs/evidence/real-lab.md

A page describes its pictures in comments that begin with `picture`, in TOML. `file`: the picture's
file. `panels`: by title, the number of one of the page's tables, from 1, and a column of numbers.
`labels`: how many first columns name a row. `line`: the value without a leak, of all panels or by
title. `together`: all panels have the same rows, named once, and scales of their own. `log`: the
panels with a logarithmic scale.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from validation.harness import run, save_svg

_SAID = re.compile(r"^<!-- picture\n(.*?)^-->", re.DOTALL | re.MULTILINE)
_TABLE = re.compile(r"(?:^\|.*\n)+", re.MULTILINE)
_NUMBER = r"([+\-−]?\d*\.?\d+)"
_MEASURED = re.compile(rf"{_NUMBER}(?:[^\[]*\[{_NUMBER}\D+?{_NUMBER})?")


@dataclass(frozen=True)
class Row:
    name: str
    value: float
    low: float
    high: float


def main(page: Path) -> None:
    for said in pictures(page):
        save_svg(drawn(page, said), page.parent / said["file"])


def pictures(page: Path) -> Iterator[dict[str, Any]]:
    yield from map(tomllib.loads, _SAID.findall(page.read_text(encoding="utf-8")))


def drawn(page: Path, said: dict[str, Any]) -> Figure:
    panels = {
        title: rows(page, *where, labels=said["labels"]) for title, where in said["panels"].items()
    }
    together, line = said.get("together", False), said["line"]
    names = list(dict.fromkeys(row.name for found in panels.values() for row in found))
    longest = len(names) if together else max(map(len, panels.values()))
    width = 3 * len(panels) + 2 if together else 5 * len(panels)
    figure = Figure(figsize=(width, 0.8 + 0.28 * longest), layout="constrained")
    every = figure.subplots(1, len(panels), squeeze=False, sharex="none" if together else "all")[0]
    for axes, (title, found) in zip(every, panels.items(), strict=True):
        at = [names.index(row.name) for row in found] if together else range(len(found))
        reach = [[r.value - r.low for r in found], [r.high - r.value for r in found]]
        axes.errorbar(
            [r.value for r in found], at, xerr=reach, fmt="o", color="C0", markersize=4, capsize=2
        )
        axes.axvline(
            line[title] if isinstance(line, dict) else line,
            color="0.5",
            linewidth=0.8,
            linestyle="--",
        )
        if title in said.get("log", ()):
            values = [row.value for row in found]
            subs = (1,) if max(values) > 100 * min(values) else (1, 2, 5)
            axes.set_xscale("log")
            axes.xaxis.set(
                major_locator=LogLocator(subs=subs),
                major_formatter="{x:g}",
                minor_formatter="",
            )
        if together:
            axes.set_yticks(range(longest), names if axes is every[0] else [], fontsize=8)
            axes.grid(axis="y", color="0.9", linewidth=0.6)
        else:
            axes.set_yticks(at, [r.name for r in found], fontsize=8)
        axes.set_title(title, fontsize=9)
        axes.set_ylim(longest - 0.5, -0.5)
    return figure


def rows(page: Path, table: int, column: str, labels: int) -> list[Row]:
    """Return the rows of a table with a number in this column."""
    head, _, *body = (
        _cells(line)
        for line in _TABLE.findall(page.read_text(encoding="utf-8"))[table - 1].splitlines()
    )
    at, found = head.index(column), list[Row]()
    for cells in body:
        if measured := _MEASURED.match(cells[at]):
            groups = (number or measured[1] for number in measured.groups())
            numbers = (float(number.replace("−", "-")) for number in groups)
            found.append(Row(" · ".join(filter(None, cells[:labels])), *numbers))
    return found


def _cells(line: str) -> list[str]:
    return [cell.strip().strip("*") for cell in line.strip().strip("|").split("|")]


if __name__ == "__main__":
    raise SystemExit(run(main))
