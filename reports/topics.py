"""Define a section of the report as a `Topic`, with its builder and its place.

Modules with topics share the helpers here.
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

DECIDE = "For the decision"
MEND = "For fixing the model"
CHECK = "For checking the method"
BEFORE = "Since the last run"


@dataclass(frozen=True)
class ReportMaterial:
    """The inputs of sections. result: cleaned; comparison: compares an earlier run with this run;
    texts: private text.
    """

    result: AuditResult
    details: SecretDetails = field(default_factory=SecretDetails)
    comparison: Comparison | None = None
    texts: Mapping[str, SecretText] | None = None


Maker = Callable[[ReportMaterial], Sequence[Block]]  # no block: no section


@dataclass(frozen=True)
class Topic:
    """A section of the report, registered in `TOPICS` of a module of this package.

    part: the page's part, by reader; place: the position in this part. turn: the position in the
    Markdown report, which may omit its last sections; 0: not in it. brief: the builder for
    Markdown, if different.
    """

    id: str
    title: str
    make: Maker
    part: str
    place: int
    turn: int = 0
    brief: Maker | None = None


def build_figures_blocks(plotted: Iterable[Figure]) -> list[Block]:
    """Return one block of these figures, or nothing without figures."""
    figures = tuple(plotted)
    return [Figures(figures)] if figures else []


def group_table_rows(
    result: AuditResult, row: Callable[[Finding], tuple[str, ...]]
) -> tuple[Group, ...]:
    """Return one group of rows without a title per target, in report order."""
    grouped: dict[str, list[tuple[str, ...]]] = {}
    for finding in phrases.sort_findings(result):
        grouped.setdefault(finding.target, []).append(row(finding))
    return tuple(Group("", tuple(group)) for group in grouped.values())


def build_forest_span(m: Measurement, floor: float | None = None) -> ForestSpan | None:
    if any(math.isnan(value) for value in (m.low, m.value, m.high)):
        return None
    return ForestSpan(m.low, m.value, m.high, None if floor is None or math.isnan(floor) else floor)


def title_attack_row(result: AuditResult, finding: Finding) -> str:
    """Return `PMixED, white-box · ethicist`, without the attack if the run has only this one."""
    title = phrases.title_row(result, finding)
    if len({f.attack for f in result.findings}) == 1:
        return title
    return f"{title} · {finding.attack}"
