"""Write the top of the EDPB page: model, date, author, results and coverage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from auditor.core.counts import format_count
from auditor.core.result import AuditResult
from auditor.reports import coverage, subject_line
from auditor.reports.blocks import Paragraph, Section, make_table

_WHAT_IT_IS = (
    "Measured numbers next to the questions, in our own words, that a supervisory authority may "
    "ask about a model's file. This is not legal advice, and no number here says that a model is "
    "anonymous: whether a likelihood is insignificant for every person, by all means reasonably "
    "likely to be used, is for the controller and the authority to say."
)
_ATTACKERS = {
    "white-box": "somebody who has the model's files and the first words of a record",
    "text-only": "somebody who can only ask the model for text and has the first words of a record",
}


def build_limits_section() -> Section:
    """Return a section on the limits of the page."""
    return Section("limits", "What this is not", (Paragraph(_WHAT_IT_IS),))


def write_edpb_title(result: AuditResult) -> str:
    """Return the title `Test results for the impact assessment of MODEL (...), tested DATE`."""
    model = subject_line.format_model(result)
    date = subject_line.format_date(result)
    return f"Test results for the impact assessment of {model}, tested {date}"


def describe_threat(result: AuditResult) -> str:
    """Describe the attackers that the run simulated; return "" if nothing was measured."""
    measured = set()
    for f in result.findings:
        if f.measurements and not f.not_applicable:
            measured.add(f.setting)
    attackers = []
    for setting, attacker in _ATTACKERS.items():
        if setting in measured:
            attackers.append(attacker)
    if attackers:
        return f"Attacker: {'; or '.join(attackers)}."
    return ""


def describe_audited_records(result: AuditResult) -> str:
    """Return `41 of 150 records audited (...).`, or only the number of attacked records."""
    counted = coverage.format_coverage(result)
    return f"{counted or f'{result.benchmark.members:,} records attacked'}."


def build_coverage_section(questions: Sequence[tuple[str, str, str]]) -> Section:
    """Return a table of the Opinion's paragraphs that this test answers or leaves open.

    questions: (paragraph, question, "" or the reason why an answer is missing).
    """
    by_paragraph: dict[str, tuple[list[str], list[str]]] = {}
    for paragraph, question, reason in questions:
        measured, missing = by_paragraph.setdefault(paragraph, ([], []))
        if reason:
            missing.append(f"{question}: {reason}.")
        else:
            measured.append(question)
    rows = []
    for paragraph, (measured, missing) in by_paragraph.items():
        rows.append((paragraph, " ".join(measured) or "nothing", " ".join(missing) or "nothing"))
    head = ("Paragraph", "In scope of this test", "Out of scope, and why")
    caption = "What this test covers, by paragraph of the opinion"
    table = make_table("coverage", caption, head, rows)
    return Section("coverage", "What is in scope and what is not", (table,))


def _format_attacked_records(result: AuditResult, side: Literal["members", "nonmembers"]) -> str:
    """Return the number of attacked members or non-members: `41 members`.

    If parts of records were attacked, return `33 members (52 parts)`.
    """
    n_parts = getattr(result.benchmark, side)
    counts = result.benchmark.records.get(side)
    noun = {"members": "member", "nonmembers": "non-member"}[side]
    if counts is None or counts.audited == n_parts:
        return format_count(n_parts, noun)
    return f"{format_count(counts.audited, noun)} ({format_count(n_parts, 'part')})"


def audit_scope_sentences(r: AuditResult) -> list[str]:
    """Return sentences about attacked records, methods and cost; [] if nothing was measured."""
    attacks = dict[str, None]()  # ordered sets
    settings = dict[str, None]()
    n_measured = 0
    n_drawn = 0
    n_rows = 0
    idle = 0
    for f in r.findings:
        if f.not_applicable:
            idle += 1
        elif f.measurements:
            attacks[f.attack] = None
            settings[f.setting] = None
            n_measured += 1
            n_drawn += f.drawn
            n_rows += f.rows
    if not n_measured:
        return []
    rest = f"; {idle} more did not apply" if idle else ""
    return [
        f"{_format_attacked_records(r, 'members')} and "
        f"{_format_attacked_records(r, 'nonmembers')} attacked, "
        f"{format_count(r.benchmark.known, 'auxiliary record')}; "
        f"{format_count(n_measured, 'configuration')} of model, access and attack "
        f"({', '.join(attacks)}; {' and '.join(settings)}){rest}; "
        f"{format_count(n_drawn, 'token')} drawn, {format_count(n_rows, 'forward row')}."
    ]
