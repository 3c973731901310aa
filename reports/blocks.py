"""Define the blocks of a report, such as tables and figures, as plain dataclasses.

Strings are plain text, which renderers escape.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import chain, compress, filterfalse, groupby
from typing import Any, NamedTuple

Facts = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Paragraph:
    text: str


@dataclass(frozen=True)
class Bullets:
    items: Sequence[str]


@dataclass(frozen=True)
class FactList:
    title: str
    facts: Facts


@dataclass(frozen=True)
class Code:
    title: str
    text: str
    folded: bool = False


@dataclass(frozen=True)
class Group:
    """Table rows under one heading.

    If a row has fewer cells than the table's head, its last cell spans the rest.
    """

    title: str
    rows: Sequence[tuple[str, ...]]


@dataclass(frozen=True)
class Table:
    id: str
    caption: str
    head: tuple[str, ...]
    groups: Sequence[Group]
    numeric: Container[int] = ()  # columns of numbers, right-aligned
    folded: bool = False
    links: Sequence[str] = ()  # link of each row's first cell, over all groups; "": no link

    def fold_constant_columns(self, known: Set[str] = frozenset()) -> Table:
        """Move each column of equal cells into the caption, for example `Attack: ethicist`.

        The first column is never moved. A table with a single row or with spanning cells is
        unchanged. known: column heads to leave out of the caption.
        """
        rows = list(chain.from_iterable(group.rows for group in self.groups))
        if len(rows) < 2 or any(len(row) < len(self.head) for row in rows):
            return self
        varying = [True]
        constant = []
        for name, column in list(zip(self.head, zip(*rows, strict=True), strict=True))[1:]:
            varying.append(len(set(column)) > 1)
            if not varying[-1] and column[0] not in ("", "–") and name not in known:
                constant.append(f"{name}: {column[0]}")
        groups = []
        for group in self.groups:
            groups.append(
                Group(group.title, tuple(tuple(compress(r, varying)) for r in group.rows))
            )
        indices = compress(range(len(varying)), varying)
        return replace(
            self,
            caption=f"{self.caption} ({'; '.join(constant)})" if constant else self.caption,
            head=tuple(compress(self.head, varying)),
            groups=groups,
            numeric={place for place, i in enumerate(indices) if i in self.numeric},
        )


def make_table(
    id: str,
    caption: str,
    head: tuple[str, ...],
    rows: Iterable[tuple[str, ...]],
    numeric: Container[int] = (),
) -> Table:
    """Return a table with a single group of rows, which has no heading."""
    return Table(id, caption, head, (Group("", tuple(rows)),), numeric)


@dataclass(frozen=True)
class ForestSpan:
    """A number with its interval, to be drawn on the scale of a `Forest`.

    floor: the baseline, if any.
    """

    low: float
    value: float
    high: float
    floor: float | None = None


@dataclass(frozen=True)
class Forest:
    """A table with a plot of each row's interval.

    spans: the intervals of all groups' rows, in order; None draws nothing.
    low, high: the limits of the scale.
    """

    table: Table
    spans: Sequence[ForestSpan | None]
    low: float = 0.0
    high: float = 1.0

    @classmethod
    def of_differences(cls, table: Table, spans: Sequence[ForestSpan | None]) -> Forest:
        """Return a forest on a scale centred on 0, from -1 to 1 if all differences are 0."""
        reach = (
            max((abs(end) for span in spans if span for end in (span.low, span.high)), default=0.0)
            or 1.0
        )
        return cls(table, spans, -reach, reach)


class PlotPoint(NamedTuple):
    x: float
    y: float
    low: float = math.nan  # interval of y; NaN: no interval
    high: float = math.nan
    left: float = math.nan  # interval of x
    right: float = math.nan


@dataclass(frozen=True)
class Series:
    """A line of a plot.

    The line style shows `kind`; the marker and the colour show `target`, or `label` without one.
    """

    label: str
    points: Sequence[PlotPoint]
    kind: str = ""
    target: str = ""  # several targets may have one title
    baseline: Sequence[PlotPoint] = ()  # dotted


@dataclass(frozen=True)
class Figure:
    """A plot of `series`.

    The table of `head` and `groups` holds the plotted numbers for readers who cannot see plots.
    """

    id: str
    plot: str  # a key of reports.plots.PLOTS
    title: str
    description: str
    head: tuple[str, ...] = ()  # no head: another section has the numbers
    groups: Sequence[Group] = ()
    series: Sequence[Series] = ()
    text: Container[int] = ()  # columns without numbers
    subject: str = ""  # of the numbers, if the title does not name it
    note: str = ""  # data that the numbers omit
    axes: tuple[str, str] = ("", "")  # labels of x and y
    # the series expected by chance: a line, and the upper end of the line's band
    null: Series | None = None
    ticks: Sequence[str] = ()  # labels of x = 0, 1, 2, … if they count something
    shaded_until: float = (
        math.nan
    )  # right end of the shade over equally useful models, on the x axis

    @property
    def points(self) -> list[PlotPoint]:
        """Points of all series."""
        points: list[PlotPoint] = []
        for series in self.series:
            points += series.points
        return points

    @property
    def explanation(self) -> str:
        return " ".join(filter(None, (self.description, self.note)))

    @property
    def table(self) -> Table:
        numeric = set(filterfalse(self.text.__contains__, range(len(self.head))))
        name = f"{self.id.removesuffix('-plot')}-table"
        caption = f"Numbers{self.subject}"
        return Table(name, caption, self.head, self.groups, numeric, folded=True)


@dataclass(frozen=True)
class Figures:
    figures: Sequence[Figure]


@dataclass(frozen=True)
class Secrets:
    """All secrets of the run, which readers search on the HTML page.

    data: the input of the page's script.
    """

    data: Mapping[str, Any]
    notes: Sequence[str]  # omitted secrets, and where to find them


Block = Paragraph | Bullets | FactList | Code | Table | Forest | Figures | Secrets


def has_content(block: Block) -> bool:
    """Test if a block shows anything: a table without rows does not."""
    match block:
        case Paragraph(text=content) | Bullets(items=content) | Figures(figures=content):
            return bool(content)
        case Table(groups=groups) | Forest(table=Table(groups=groups)):
            return any(group.rows for group in groups)
    return True


@dataclass(frozen=True)
class Section:
    id: str
    title: str
    blocks: tuple[Block, ...]
    part: str = ""  # part of the page, by its reader


@dataclass(frozen=True)
class TargetSummary:
    """The severity of a model's leaks: a word, the reason, and the consequence for a release."""

    name: str
    word: str
    reason: str
    decision: str


@dataclass(frozen=True)
class Document:
    title: str
    facts: Facts
    headline: str
    sections: tuple[Section, ...]
    verdict: str = ""  # paragraph under the headline
    kind: str = ""  # line above the title, if the title does not say it
    lead: str = "Verdict"
    source: str = "Rendered only from the run folder"
    answers: Facts = ()  # the verdict by question; replaces it if there is room
    warning: str = ""  # warning of private text; empty if there is none
    doubts: tuple[str, ...] = ()  # doubts that forbid a conclusion, shown first
    standings: tuple[TargetSummary, ...] = ()  # replace the headline and the verdict
    glossary: Facts = ()  # meaning of the words and measures

    @property
    def parts(self) -> tuple[tuple[str, tuple[Section, ...]], ...]:
        """Return each part's name with its consecutive sections."""
        return tuple(
            (part, tuple(sections)) for part, sections in groupby(self.sections, lambda s: s.part)
        )
