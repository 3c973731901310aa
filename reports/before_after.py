"""Render the report of a mitigation for terminal, Markdown and HTML.

The report compares the mitigated model with the original: paired measurements before and after, the
prediction, the promise and the cost.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from auditor.conclusions.signals import assess_leak_signals
from auditor.core.nouns import UNDEFENDED, CellKey
from auditor.core.result import AuditResult, Measurement
from auditor.gate.compare import Comparison, ComparisonRow
from auditor.reports import changes, phrases, severity
from auditor.reports import comparison as side_by_side
from auditor.reports.blocks import (
    Bullets,
    Document,
    FactList,
    Facts,
    Paragraph,
    Section,
    Table,
    make_table,
)
from auditor.reports.escaping import make_printable_line

_MOST = 12  # attacks on the screen; the page lists all
_NOT_PREDICTED = (
    "nothing: it takes a mitigation by copies, and whole records that an attack recites"
)


@dataclass(frozen=True)
class BeforeAfter:
    """The runs before and after a mitigation, such as retraining without copies.

    compared: the comparison of both runs.
    predicted: an attack result's key, and the recall predicted for it beforehand, or None.
    perplexity: change of the perplexity on the same held-out texts, or None.
    training_remarks: remarks that the training printed.
    """

    method: str
    compared: Comparison
    result_before: AuditResult
    result_after: AuditResult
    predicted: tuple[CellKey, Measurement] | None
    perplexity: Measurement | None
    training_remarks: tuple[str, ...]
    seconds: float

    @property
    def undefended_comparison(self) -> Comparison:
        """Return the comparison of the undefended model only, because the later run has no
        defenses.
        """
        lines = tuple(line for line in self.compared.lines if line.cell.target == UNDEFENDED)
        return Comparison(("before", "after"), self.compared.secrets, lines)


def format_mitigation_lines(change: BeforeAfter) -> Iterator[str]:
    """Yield at most 25 lines that summarise the mitigation."""
    yield (
        f"BEFORE AND AFTER {make_printable_line(change.method)}, trained in "
        f"{phrases.format_duration(change.seconds)}"
    )
    rows = []
    for line in change.undefended_comparison.lines:
        rows.append(_build_metric_change_row(line))
    lines = [
        ("", "before", "after", "difference"),
        *rows[:_MOST],
        *_build_perplexity_change_row(change),
    ]
    widths = []
    for column in zip(*lines, strict=True):
        widths.append(max(map(len, column)))
    for row in lines:
        yield "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
    if len(rows) > _MOST:
        yield f"{len(rows) - _MOST} more in the page"
    for name, text in _build_comparison_facts(change):
        yield f"{name + ':':11} {text}"


def _build_metric_change_row(line: ComparisonRow) -> tuple[str, ...]:
    name = (
        f"{phrases.format_metric(line.metric)} ({make_printable_line(line.cell.attack)}, "
        f"{line.cell.setting})"
    )
    return (name, *changes.format_change_cells(line))


def _build_perplexity_change_row(change: BeforeAfter) -> Sequence[tuple[str, ...]]:
    before = change.result_before.target(UNDEFENDED).perplexity
    after = change.result_after.target(UNDEFENDED).perplexity
    if before is None or after is None:
        return ()
    delta = "not paired"
    if change.perplexity:
        delta = phrases.format_difference(change.perplexity)
    before_text, after_text = map(phrases.format_measurement_value, (before, after))
    return [("Held-out perplexity", before_text, after_text, delta)]


def _build_comparison_facts(change: BeforeAfter) -> Facts:
    before = _rate_undefended(change.result_before)
    after = _rate_undefended(change.result_after)
    return (
        ("severity", f"{before} before, {after} after"),
        ("predicted", _describe_predicted_recall(change)),
        ("promised", _describe_promised_epsilon(change.result_after)),
    )


def _rate_undefended(result: AuditResult) -> str:
    return severity.rate_severity(assess_leak_signals(result), UNDEFENDED).word


def _describe_predicted_recall(change: BeforeAfter) -> str:
    """Describe the predicted recall, and whether the measured recall is lower, higher or equal."""
    if change.predicted is None:
        return _NOT_PREDICTED
    row, expected = change.predicted
    prediction = (
        f"recall {phrases.format_measurement_value(expected)} ({make_printable_line(row.title)})"
    )
    recall = None
    for finding in change.result_after.select_findings(*row):
        recall = finding.measurement("recall")
    if recall is None:
        return f"{prediction}; not measured after"
    # The interval is the prediction's: compare only the measured value with it.
    if recall.value < expected.low:
        lies = "less than"
    elif recall.value > expected.high:
        lies = "more than"
    else:
        lies = "as"
    return f"{prediction}; measured {phrases.format_measurement_value(recall)}, {lies} predicted"


def _describe_promised_epsilon(result: AuditResult) -> str:
    target = result.target(UNDEFENDED)
    claim = target.claim
    if claim is not None and (epsilon := claim.epsilon.get(claim.relation)) is not None:
        # Group privacy: ε covers one record, and k copies are k records (Dwork and Roth 2014,
        # Theorem 2.2).
        copies = ""
        if claim.unit == "record":
            copies = " (k copies of a text are k of them)"
        return (
            f"ε {epsilon:.3g} at δ {claim.delta:g} for one {claim.unit}{copies}, "
            f"{claim.relation}: {claim.status}"
        )
    if target.nominal_epsilon is not None:
        return f"nothing: ε {target.nominal_epsilon:.3g} is nominal"
    return "nothing: measured on these secrets by these attacks, and no more"


def build_mitigation_document(comparison: BeforeAfter) -> Document:
    undefended = comparison.undefended_comparison
    rows = (
        side_by_side.build_paired_table(undefended)
        if undefended.lines
        else Paragraph("No configuration was measured.")
    )
    names = ("", "Before", "After", "Difference")
    cost: Table | Paragraph = Paragraph(
        "Held-out perplexity was not measured: the run has no non-members."
    )
    if perplexity := _build_perplexity_change_row(comparison):
        cost = make_table(
            "utility",
            "On text that neither model was trained on",
            names,
            perplexity,
        )
    remarks = (
        f"trained in {phrases.format_duration(comparison.seconds)}",
        *map(make_printable_line, comparison.training_remarks),
    )
    expected = FactList("", _build_comparison_facts(comparison))
    deltas = []
    for line in undefended.lines:
        if line.comparands[1].delta is not None:
            deltas.append(line.comparands[1].delta)
    # Each change has a separate 95% interval: of twenty unchanged attacks, expect one to count.
    less = sum(change.high < 0 for change in deltas)
    more = sum(change.low > 0 for change in deltas)
    significant = f"Significantly lower: {less} of {len(deltas)}; higher: {more}"
    return Document(
        title=f"Before and after {make_printable_line(comparison.method)}",
        facts=(
            ("Secrets", make_printable_line(comparison.compared.secrets)),
            ("Before", make_printable_line(comparison.compared.runs[0])),
            ("After", make_printable_line(comparison.compared.runs[1])),
        ),
        headline=f"{significant}; the others do not differ significantly.",
        verdict=side_by_side.NOTE,
        sections=(
            Section("rows", "Leakage", (rows,)),
            Section("utility", "Utility", (cost,)),
            Section("expected", "Severity, prediction and promise", (expected,)),
            Section("training", "What was done", (Bullets(remarks),)),
        ),
        kind="A mitigated model",
        lead="Summary",
        source="Rendered only from the runs' records",
    )
