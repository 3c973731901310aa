"""The blocks a report is made of, as plain records. Know neither what they say nor how they are drawn.

The strings are plain text: renderers escape them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from auditor.types import Finding

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
    """Rows under one heading. A row shorter than the head ends in a cell that spans what is left."""

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


@dataclass(frozen=True)
class Figure:
    """A plot of the findings of one setting, and the numbers behind it for whoever cannot see it."""

    id: str
    plot: str  # a name in reports.plots.PLOTS
    findings: tuple[Finding, ...]
    title: str
    description: str
    table: Table
    labels: tuple[tuple[str, str], ...] = ()  # what its legend says of targets beyond their titles, by name


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


Block = Paragraph | Bullets | FactList | Code | Table | Figures | Cards


@dataclass(frozen=True)
class Section:
    id: str
    title: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class Document:
    title: str
    facts: Facts
    headline: str
    verdict: str
    sections: tuple[Section, ...]
    kind: str = "Privacy audit of a language model"
    lead: str = "Verdict"
    source: str = "Rendered from result.json alone"
