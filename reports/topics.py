"""Define a section of the report as a `Topic`, with the function that builds the section.

Modules with topics share the helpers in this module.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from auditor.conclusions.secret_details import SecretDetails
from auditor.core.result import AuditResult, Finding, Measurement
from auditor.gate.compare import Comparison
from auditor.records.private_texts import SecretText
from auditor.reports import phrases
from auditor.reports.blocks import Block, ForestSpan, Group

DECIDE = "For the decision"
MEND = "For fixing the model"
CHECK = "For checking the method"
BEFORE = "Since the last run"


@dataclass(frozen=True)
class ReportMaterial:
    """The inputs from which sections are built.

    result: the cleaned result.
    details: values stored per secret.
    comparison: comparison of an earlier run with this run.
    texts: private text, keyed by secret id.
    folder: the run's folder, for commands; runs/NAME by default.
    """

    result: AuditResult
    details: SecretDetails = field(default_factory=SecretDetails)
    comparison: Comparison | None = None
    texts: Mapping[str, SecretText] | None = None
    folder: Path | None = None


Maker = Callable[[ReportMaterial], Iterable[Block]]  # no block with content: no section


@dataclass(frozen=True)
class Topic:
    """A section of the report, registered in `TOPICS` of a module of this package.

    make: builds the section's blocks.
    brief: builds the Markdown report's blocks, if different.
    part: the part of the page, one for each kind of reader.
    place: the position in this part.
    turn: the position in the Markdown report, or 0 to leave the section out. If sections do not
    fit, the last are omitted.
    """

    id: str
    title: str
    make: Maker
    part: str
    place: int
    turn: int = 0
    brief: Maker | None = None


def group_table_rows(
    result: AuditResult, row: Callable[[Finding], tuple[str, ...]]
) -> tuple[Group, ...]:
    """Return the table rows of all findings in report order, in one untitled group per model.

    row: returns the cells of one finding.
    """
    grouped: dict[str, list[tuple[str, ...]]] = {}
    for finding in phrases.sort_findings(result):
        grouped.setdefault(finding.target, []).append(row(finding))
    return tuple(Group("", group) for group in grouped.values())


def build_forest_span(m: Measurement, floor: float | None = None) -> ForestSpan | None:
    if any(map(math.isnan, (m.low, m.value, m.high))):
        return None
    return ForestSpan(m.low, m.value, m.high, None if floor is None or math.isnan(floor) else floor)


def title_attack_row(result: AuditResult, finding: Finding) -> str:
    """Return `PMixED, white-box · ethicist`; omit the attack if the run has only one attack."""
    return name_attack(result, finding, phrases.title_row(result, finding))


def name_attack(result: AuditResult, finding: Finding, title: str) -> str:
    """Return the title with the attack: `PMixED · ethicist`; omit the attack if there is only
    one.
    """
    if find_only_attack(result):
        return title
    return f"{title} · {finding.attack}"


def find_only_attack(result: AuditResult) -> str | None:
    attacks = {finding.attack for finding in result.findings}
    return attacks.pop() if len(attacks) == 1 else None
