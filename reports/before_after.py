"""A mitigated model beside the one before it: terminal, Markdown and HTML. Compares nothing itself.

What was measured before and after, paired; what was predicted, what is promised, and what it costs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from auditor.core.nouns import UNDEFENDED, CellKey
from auditor.core.result import AuditResult, Measurement, TargetRecord
from auditor.gate.compare import Comparison, ComparisonRow
from auditor.records.signals import assess_signals
from auditor.reports import comparison as side_by_side
from auditor.reports import escaping, html, phrases, severity
from auditor.reports import markdown as marked
from auditor.reports.blocks import Bullets, Document, FactList, Paragraph, Section, Table

_MOST = 12  # rows on screen; the page has all
_NOT_PREDICTED = "no prediction: it takes an attack that extracts records word for word, and groups by copies"


@dataclass(frozen=True)
class BeforeAfter:
    """compared: the run before, and the one after. predicted: of which configuration, and what recall; None: nothing.

    perplexity: after minus before, over the same held-out texts; None: not measured. told: by the training.
    """

    by: str
    compared: Comparison
    before: AuditResult
    after: AuditResult
    predicted: tuple[CellKey, Measurement] | None
    perplexity: Measurement | None
    told: tuple[str, ...]
    seconds: float

    @property
    def undefended_comparison(self) -> Comparison:
        """Of the model without defenses alone: the second run has no others."""
        own = tuple(line for line in self.compared.lines if line.row.target == UNDEFENDED)
        return Comparison(("before", "after"), self.compared.secrets, own)


def terminal_summary_lines(found: BeforeAfter) -> Iterator[str]:
    """At most 25 lines."""
    yield (
        f"BEFORE AND AFTER {escaping.to_printable_line(found.by)}, trained in {phrases.format_duration(found.seconds)}"
    )
    rows = [_metric_change_row(line) for line in found.undefended_comparison.lines]
    shown = [("", "before", "after", "difference"), *rows[:_MOST], *_perplexity_change_row(found)]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    for row in shown:
        yield "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
    if len(rows) > _MOST:
        yield f"{len(rows) - _MOST} more in the page"
    for name, said in _severity_and_promise_facts(found):
        yield f"{name + ':':11} {said}"


def markdown(found: BeforeAfter) -> str:
    return marked.render_markdown_document(_build_mitigation_document(found))


def render_mitigation_page(found: BeforeAfter) -> str:
    """One HTML page that loads nothing."""
    return html.render_html_document(_build_mitigation_document(found))


def _metric_change_row(line: ComparisonRow) -> tuple[str, str, str, str]:
    before, after = line.cells
    name = f"{phrases.label(line.metric)} ({escaping.to_printable_line(line.row.attack)}, {line.row.setting})"
    delta = phrases.points(after.delta) if after.delta else escaping.to_printable_line(after.why)
    return (
        name,
        phrases.value_with_interval(before.measured),
        phrases.value_with_interval(after.measured),
        delta,
    )


def _perplexity_change_row(found: BeforeAfter) -> Sequence[tuple[str, str, str, str]]:
    before, after = _undefended_target(found.before).perplexity, _undefended_target(found.after).perplexity
    if before is None or after is None:
        return ()
    delta = phrases.points(found.perplexity) if found.perplexity else "not paired"
    return (
        (
            "Held-out perplexity",
            phrases.value_with_interval(before),
            phrases.value_with_interval(after),
            delta,
        ),
    )


def _undefended_target(result: AuditResult) -> TargetRecord:
    return result.target(UNDEFENDED)


def _severity_and_promise_facts(found: BeforeAfter) -> tuple[tuple[str, str], ...]:
    return (
        ("severity", f"{_severity_word(found.before)} before, {_severity_word(found.after)} after"),
        ("predicted", _prediction_sentence(found)),
        ("promised", _promise_sentence(found.after)),
    )


def _severity_word(result: AuditResult) -> str:
    return severity.severity_of_target(assess_signals(result), UNDEFENDED).word


def _prediction_sentence(found: BeforeAfter) -> str:
    """The prediction, and how what was measured lies to it."""
    if found.predicted is None:
        return _NOT_PREDICTED
    row, expected = found.predicted
    said = f"recall {phrases.value_with_interval(expected)} ({escaping.to_printable_line(row.title)})"
    measured = next((f for f in found.after.findings if f.key == row), None)
    recall = None if measured is None else measured.measurement("recall")
    if recall is None:
        return f"{said}; not measured after"
    lies = "less" if recall.value < expected.low else "more" if recall.value > expected.high else "as predicted"
    how = lies if lies == "as predicted" else f"{lies} than predicted"
    return f"{said}; measured {phrases.value_with_interval(recall)}, {how}"


def _promise_sentence(result: AuditResult) -> str:
    target = _undefended_target(result)
    if target.claim is not None:
        epsilon = target.claim.epsilon.get(target.claim.relation)
        if epsilon is not None:
            copies = " (k copies of a text are k of them)" if target.claim.unit == "record" else ""
            whose = f"one {target.claim.unit}{copies}, {target.claim.relation}"
            return f"ε {epsilon:.3g} at δ {target.claim.delta:g} for {whose}: {target.claim.status}"
    if target.nominal_epsilon is not None:
        return f"nothing: ε {target.nominal_epsilon:.3g} is nominal"
    return "nothing: measured on these secrets by these attacks, and no more"


def _build_mitigation_document(found: BeforeAfter) -> Document:
    rows = (
        side_by_side.side_by_side_table(found.undefended_comparison)
        if found.undefended_comparison.lines
        else Paragraph("No configuration was measured.")
    )
    names = ("", "Before", "After", "Difference")
    cost: Table | Paragraph = Paragraph("Held-out perplexity was not measured: the run has no non-members.")
    if perplexity := _perplexity_change_row(found):
        cost = Table(
            "utility", "On text that neither model was trained on", names, (side_by_side.Group("", tuple(perplexity)),)
        )
    told = Bullets(
        (f"trained in {phrases.format_duration(found.seconds)}", *map(escaping.to_printable_line, found.told))
    )
    return Document(
        title=f"Before and after {escaping.to_printable_line(found.by)}",
        facts=(
            ("Secrets", escaping.to_printable_line(found.compared.secrets)),
            ("Before", escaping.to_printable_line(found.compared.runs[0])),
            ("After", escaping.to_printable_line(found.compared.runs[1])),
        ),
        headline=_significant_changes_headline(found),
        verdict=side_by_side.NOTE,
        sections=(
            Section("rows", "Leakage", (rows,)),
            Section("utility", "Utility", (cost,)),
            Section(
                "expected", "Severity, prediction and promise", (FactList("", _severity_and_promise_facts(found)),)
            ),
            Section("training", "What was done", (told,)),
        ),
        kind="A mitigated model",
        lead="Summary",
        source="Rendered from the runs' records alone",
    )


def _significant_changes_headline(found: BeforeAfter) -> str:
    deltas = [line.cells[1].delta for line in found.undefended_comparison.lines if line.cells[1].delta is not None]
    less, more = (sum(one.high < 0 for one in deltas), sum(one.low > 0 for one in deltas))
    return f"Significantly lower: {less} of {len(deltas)}; higher: {more}; the others do not differ significantly."
