"""What a report has sections about: a `Topic` each, which says how it is made and where it stands.

Also what the modules with topics share. Knows neither the sections nor how a block is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from auditor.conclusions.secret_details import SecretDetails
from auditor.core.result import AuditResult, Finding, Measurement
from auditor.gate.compare import Comparison
from auditor.records.private_texts import SecretText
from auditor.reports import phrases
from auditor.reports.blocks import Block, Figure, Figures, ForestSpan, Group

DECIDE, MEND, CHECK = "For the decision", "For fixing the model", "For checking the method"
BEFORE = "Since the last run"


@dataclass(frozen=True)
class ReportMaterial:
    """What sections are made of. result: cleaned. since: another run and this one. texts: private,
    to be shown."""

    result: AuditResult
    details: SecretDetails = field(default_factory=SecretDetails)
    since: Comparison | None = None
    texts: Mapping[str, SecretText] | None = None


Maker = Callable[[ReportMaterial], Sequence[Block]]  # no block: no section


@dataclass(frozen=True)
class Topic:
    """A section before it is made, found by standing in `TOPICS` of a module of this package.

    part: of the page, by whose question it answers; place: within the part. turn: its place in the
    Markdown report, whose last sections may find no room; 0: it is not there. brief: how it is made
    there, where that differs.
    """

    id: str
    title: str
    make: Maker
    part: str
    place: int
    turn: int = 0
    brief: Maker | None = None


def figures_blocks(drawn: Iterable[Figure]) -> list[Block]:
    """One block of these figures; no block where there are none."""
    figures = tuple(drawn)
    return [Figures(figures)] if figures else []


def table_groups_by_target(
    result: AuditResult, row: Callable[[Finding], tuple[str, ...]]
) -> tuple[Group, ...]:
    """One untitled group a target, in report order."""
    grouped: dict[str, list[tuple[str, ...]]] = {}
    for finding in phrases.findings_in_report_order(result):
        grouped.setdefault(finding.target, []).append(row(finding))
    return tuple(Group("", tuple(group)) for group in grouped.values())


def forest_span(m: Measurement, floor: float | None = None) -> ForestSpan | None:
    if any(math.isnan(value) for value in (m.low, m.value, m.high)):
        return None
    return ForestSpan(m.low, m.value, m.high, None if floor is None or math.isnan(floor) else floor)


def row_title_with_attack(result: AuditResult, finding: Finding) -> str:
    return f"{phrases.row_title(result, finding)} · {finding.attack}"
