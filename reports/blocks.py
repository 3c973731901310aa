"""The blocks a report is made of, as plain records. Know neither what they say nor how they are
drawn.

The strings are plain text: renderers escape them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, ClassVar

from auditor.core.result import Finding

Facts = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Paragraph:
    kind: ClassVar[str] = "paragraph"
    text: str


@dataclass(frozen=True)
class Bullets:
    kind: ClassVar[str] = "bullets"
    items: tuple[str, ...]


@dataclass(frozen=True)
class FactList:
    kind: ClassVar[str] = "facts"
    title: str
    facts: Facts


@dataclass(frozen=True)
class Code:
    kind: ClassVar[str] = "code"
    title: str
    text: str
    folded: bool = False


@dataclass(frozen=True)
class Group:
    """Rows under one heading. A row shorter than the head ends in a cell that spans what is
    left."""

    title: str
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Table:
    kind: ClassVar[str] = "table"
    id: str
    caption: str
    head: tuple[str, ...]
    groups: tuple[Group, ...]
    numeric: frozenset[int] = frozenset()  # columns of numbers, set flush right
    folded: bool = False
    links: tuple[
        str, ...
    ] = ()  # where a page leads to from each row's first cell, over all groups; "": nowhere


@dataclass(frozen=True)
class ForestSpan:
    """A number with its interval on the scale of a `Forest`, and the floor it is held against, if
    there is one."""

    low: float
    value: float
    high: float
    floor: float | None = None


@dataclass(frozen=True)
class Forest:
    """A table with each row's interval drawn beside it. spans: one a row, over all groups; None:
    nothing to draw."""

    kind: ClassVar[str] = "forest"
    table: Table
    spans: tuple[ForestSpan | None, ...]
    low: float = 0.0  # ends of the scale
    high: float = 1.0

    @classmethod
    def of_differences(cls, table: Table, spans: Sequence[ForestSpan | None]) -> Forest:
        """On a scale with 0 in its middle, that has a width where all differences are 0."""
        reach = (
            max((abs(end) for span in spans if span for end in (span.low, span.high)), default=0.0)
            or 1.0
        )
        return cls(table, tuple(spans), -reach, reach)


@dataclass(frozen=True)
class PlotPoint:
    x: float
    y: float
    low: float = math.nan  # of the interval of y; NaN: none
    high: float = math.nan
    left: float = math.nan  # of the interval of x
    right: float = math.nan


@dataclass(frozen=True)
class Series:
    """One line of a plot. kind: what its line style says, where the marker and colour say the
    label."""

    label: str
    points: tuple[PlotPoint, ...]
    kind: str = ""


@dataclass(frozen=True)
class Figure:
    """A plot of findings or of series, and the numbers behind it (head, groups) for whoever cannot
    see it."""

    id: str
    plot: str  # a name in reports.plots.PLOTS
    title: str
    description: str
    head: tuple[str, ...]
    groups: tuple[Group, ...]
    findings: tuple[Finding, ...] = ()
    series: tuple[Series, ...] = ()
    text: frozenset[int] = frozenset()  # columns that hold no numbers
    of: str = ""  # whom the numbers are of, where the title does not say it
    axes: tuple[str, str] = ("", "")  # what series are drawn over: x, y
    # what the series would be by chance: a line, and what chance stays under
    null: Series | None = None
    labels: tuple[
        tuple[str, str], ...
    ] = ()  # what its legend says of targets beyond their titles, by name
    ticks: tuple[str, ...] = ()  # what x = 0, 1, 2, … stand for, where they count something
    until: float = math.nan  # where on the x axis the shade ends, over models that are as useful

    @property
    def table(self) -> Table:
        numeric = frozenset(range(len(self.head))) - self.text
        name = f"{self.id.removesuffix('-plot')}-table"
        return Table(
            name,
            f"{self.title}: the numbers{self.of}",
            self.head,
            self.groups,
            numeric,
            folded=True,
        )


@dataclass(frozen=True)
class Figures:
    kind: ClassVar[str] = "figures"
    figures: tuple[Figure, ...]


@dataclass(frozen=True)
class Card:
    title: str
    text: str
    facts: Facts
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Cards:
    kind: ClassVar[str] = "cards"
    cards: tuple[Card, ...]


@dataclass(frozen=True)
class Secrets:
    """Every secret of the run, for a page that can search them. data: what the page's script
    reads."""

    kind: ClassVar[str] = "secrets"
    data: Mapping[str, Any]
    notes: tuple[str, ...]  # what was left out of it, and where that is


Block = Paragraph | Bullets | FactList | Code | Table | Forest | Figures | Cards | Secrets


@dataclass(frozen=True)
class Section:
    id: str
    title: str
    blocks: tuple[Block, ...]
    part: str = ""  # of the page: whose question it answers


@dataclass(frozen=True)
class TargetSummary:
    """How severe it is with one target: a word, the reason, and what that means for a release."""

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
    verdict: str = ""  # a paragraph under the headline
    kind: str = ""  # stands above the title, where that does not say it
    lead: str = "Verdict"
    source: str = "Rendered from the run folder alone"
    answers: Facts = ()  # the verdict by question; in its place where there is room for it
    warning: str = ""  # that it shows private text; without one, it shows none
    doubts: tuple[str, ...] = ()  # what forbids a conclusion: said before anything else
    standings: tuple[TargetSummary, ...] = ()  # in the place of the headline and the verdict
    rule: str = ""  # by which the words of the standings are chosen

    @property
    def parts(self) -> tuple[tuple[str, tuple[Section, ...]], ...]:
        """Neighbouring sections of one part, in order."""
        return tuple(
            (part, tuple(sections)) for part, sections in groupby(self.sections, lambda s: s.part)
        )
