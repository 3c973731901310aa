"""Compare all attacks and probes on one model with the first attack.

Differences are paired by record: `paired_difference` for recall, DeLong's variance for AUC.
"""

from __future__ import annotations

from dataclasses import dataclass

from auditor.conclusions.disagreements import is_measured
from auditor.conclusions.outcomes import (
    measure_paired_change,
)
from auditor.conclusions.secret_details import SecretDetails
from auditor.conclusions.signals import SETTINGS
from auditor.core.counts import format_count
from auditor.core.result import AuditResult, Finding, Measurement
from auditor.reports import phrases
from auditor.reports.blocks import Block, Forest, Group, Paragraph, Table
from auditor.reports.topics import CHECK, ReportMaterial, Topic, build_forest_span
from auditor.statistics import documents, roc
from auditor.statistics.metrics import RECALL, SHARES, find_metric, name_auc

_NOTE = (
    "Each requested attack, in the order given. A difference is between an attack's number and the "
    "same number of the first attack that has it, on the same records, with its 95% interval; "
    "these intervals are not corrected for the number of attacks. The bar spans the interval of a "
    "share or an AUC."
)


@dataclass(frozen=True)
class AttackRow:
    """An attack on a model, compared with the first attack on this model.

    main: the attack's main number; None if the attack did not run.
    difference: the main number minus that of the first attack.
    base: the name of the first attack.
    title: the attack's title: `perplexity`, or `tail-loss (yours)` for a plug-in.
    """

    finding: Finding
    main: Measurement | None
    difference: Measurement | None = None
    base: str = ""
    title: str = ""

    @property
    def number_text(self) -> str:
        """Return the attack's main number with its interval, or why it has no number.

        `29/96 (30% [21–40]) recall` or `AUC 0.789 [0.669–0.903] (loss, best of 11 scores)`,
        the latter also for the records with most copies.
        """
        m = self.main
        if m is None:
            return f"did not run: {self.finding.not_applicable or 'nothing was measured'}"
        if m.name in (RECALL, documents.RECALL):
            share = phrases.format_share(m)
            parts = self.finding.measurement(RECALL)
            if m.name == RECALL or parts is None:
                return f"{share} recited word for word"
            return f"{share} recited, at least in part (parts: {phrases.format_hit_count(parts)})"
        is_named = m.note not in ("", self.finding.attack)
        notes = []
        if m.name == name_auc(""):
            notes = [m.note if is_named else "", _format_most_copied_auc(self.finding, m.note)]
        note = "; ".join(filter(None, notes))
        if note:
            note = f" ({note})"
        title = find_metric(m.name).short or phrases.lower_first(phrases.format_metric(m.name))
        return (
            f"{title} {phrases.format_measurement_value(m)}{note}{phrases.format_suffix_lengths(m)}"
        )

    @property
    def difference_text(self) -> str:
        """Return the paired difference from the first attack: `−2.1 points [−7.3 to 3.1] from
        perplexity`.
        """
        if self.difference is None:
            return phrases.NOTHING
        m = self.difference
        number = phrases.format_value(m)
        if m.unit in SHARES:
            number = phrases.format_point_difference(m)
        return f"{number} {phrases.format_interval(m)} from {self.base}"


def compare_attacks(
    result: AuditResult, details: SecretDetails, target: str, setting: str
) -> list[AttackRow]:
    """Return a row for each attack on one model, in the order of the plan.

    target: the model's name; setting: the attacker's access, text-only or white-box.
    """
    plan_order = list(dict.fromkeys(result.plan.get("attack", ())))
    findings = result.select_findings(target, setting)
    findings.sort(
        key=lambda f: plan_order.index(f.attack) if f.attack in plan_order else len(plan_order)
    )
    first: dict[str, Finding] = {}
    rows = []
    for finding in findings:
        main = _find_main_number(finding)
        base = first.setdefault(main.name, finding) if main else None
        difference = None
        # Early stopping depends on the results, so no fixed-size interval is valid.
        if main and base and base is not finding and not finding.stopped and not base.stopped:
            new = details.values_by_cell.get(finding.cell_key)
            other = details.values_by_cell.get(base.cell_key)
            change = measure_paired_change(main.name, main.unit, new, other)
            difference = None if isinstance(change, str) else change
        title = finding.attack
        if title in result.own_methods:
            title += " (yours)"
        rows.append(AttackRow(finding, main, difference, base.attack if base else "", title))
    return rows


def _format_most_copied_auc(finding: Finding, note: str) -> str:
    """Return a phrase about the records with most copies: `0.994 [0.91–1.00] at 8 copies`.

    note: the note of the AUC of all records. If another score is the strongest for the records with
    most copies, the phrase also names it.
    """
    by_copies = []
    for count, m in phrases.sort_repeats(finding.by_repeats):
        if m.name == name_auc("") and is_measured(m):
            by_copies.append((count, m))
    if len(by_copies) < 2:
        return ""
    most_copies, auc = by_copies[-1]
    score = auc.note.partition(", best of ")[0]
    by = "" if score in ("", note.partition(", best of ")[0]) else f" by {score}"
    return f"{phrases.format_measurement_value(auc)} at {most_copies} copies{by}"


def _find_main_number(finding: Finding) -> Measurement | None:
    if finding.not_applicable:
        return None
    shares = (finding.measurement(documents.RECALL), finding.measurement(RECALL), finding.main)
    return next(filter(is_measured, shares), None)


def _attack_table_blocks(material: ReportMaterial) -> list[Block]:
    result = material.result
    groups = []
    spans = []
    for target in dict.fromkeys(f.target for f in phrases.sort_findings(result)):
        for setting in SETTINGS:
            compared = compare_attacks(result, material.details, target, setting)
            if len(compared) < 2:
                continue
            rows = []
            for row in compared:
                rows.append((row.title, row.number_text, row.difference_text))
                m = row.main
                span = None
                if m is not None and m.unit in (*SHARES, roc.AUC):
                    span = build_forest_span(m, 0.5 if m.unit == roc.AUC else None)
                spans.append(span)
            groups.append(Group(f"{phrases.title_target(result, target)}, {setting}", rows))
    head = ("Attack", "Result", "Difference, paired")
    caption = "All attacks side by side, each compared with the first that has the same number"
    table = Table("attacks-table", caption, head, groups)
    return [Forest(table, spans), Paragraph(_NOTE if groups else "")]


def format_attack_lines(result: AuditResult, details: SecretDetails, most: int) -> list[str]:
    """Return a heading, and one line for each attack on the model with the most attacks.

    most: maximum number of lines. Return [] if there are fewer than two attacks to compare, or if
    `most` leaves room for fewer than two lines below the heading.
    """
    cells = dict.fromkeys((f.target, f.setting) for f in phrases.sort_findings(result))
    tables = [compare_attacks(result, details, *cell) for cell in cells]
    compared = max(tables, key=lambda table: sum(row.main is not None for row in table), default=[])
    if len(compared) < 1 + all(row.main is not None for row in compared) or most < 3:
        return []
    rows_shown = compared
    if len(compared) >= most:
        rows_shown = compared[: most - 2]
    names = max(len(row.title) for row in rows_shown)
    first = rows_shown[0].finding
    bases = {row.base for row in rows_shown if row.difference is not None}
    of_all = f" from {min(bases)}" if len(bases) == 1 else ""  # stated once, above
    paired = ""
    if bases:
        paired = f"; differences{of_all or ' are'}{',' if of_all else ''} paired by record"
    lines = [f"{phrases.title_target(result, first.target)}, {first.setting}{paired}"]
    for row in rows_shown:
        differs = ""
        if row.difference is not None:
            differs = f"; {row.difference_text.removesuffix(of_all)}"
        lines.append(f"{row.title:<{names}}  {row.number_text}{differs}")
    n_left = len(compared) - len(rows_shown)
    if n_left:
        lines.append(f"and {format_count(n_left, 'more attack')} in the report")
    return lines


TOPICS = (Topic("attacks", "All attacks", _attack_table_blocks, CHECK, 14, turn=18),)
