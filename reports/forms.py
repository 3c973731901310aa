"""Compare the leakage of each deployed form of a model with that of the audited model.

A deployed form is, for example, a quantised model. Comparisons are paired by secret.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from auditor.conclusions import outcomes
from auditor.conclusions.leak_kinds import widen_leak_measurement
from auditor.conclusions.secret_details import SecretDetails
from auditor.core.nouns import UNDEFENDED
from auditor.core.plan_parts import name_deployed_form
from auditor.core.result import Finding, Measurement
from auditor.reports import phrases
from auditor.reports.blocks import Block, Forest, Group, Paragraph, Table
from auditor.reports.topics import DECIDE, ReportMaterial, Topic, build_forest_span
from auditor.statistics.frontier import estimate_perplexity_ratios
from auditor.statistics.metrics import SHARES
from auditor.statistics.roc import AUC

_NOT_ASKED = "cannot be asked"
_NOTE = (
    "Changes are form minus full, of the same secrets, with 95% intervals; more or less is stated "
    "at 95% over all of them together. Forms made here round or prune the weights and then run in "
    "full precision; a served or GGUF model is queried as it is."
)


def _build_deployed_form_blocks(material: ReportMaterial) -> list[Block]:
    result = material.result
    details = material.details
    names = [*map(name_deployed_form, result.plan.get("forms", ()))]
    groups = []
    spans = []
    changes = []
    for f in phrases.sort_findings(result):
        if f.target != UNDEFENDED or f.main is None:
            continue
        rows = []
        for name in names:
            change = _measure_leak_change(details, f, name)
            title = phrases.title_target(result, name)
            delta = phrases.NOTHING
            span = None
            if change:
                delta = phrases.format_difference(change)
                changes.append((name, change, f"{title} ({f.attack}, {f.setting}: {delta})"))
                if change.unit in (*SHARES, AUC):
                    span = build_forest_span(change)
            full = phrases.format_measurement_value(f.main)
            number = _NOT_ASKED
            for form in result.select_findings(name, f.setting, f.attack):
                if m := form.measurement(f.main.name):
                    number = phrases.format_measurement_value(m)
            rows.append((title, full, number, delta))
            spans.append(span)
        title = f"{phrases.format_metric(f.main.name)} · {f.attack} ({f.setting})"
        groups.append(Group(title, rows))
    if not names or not groups:
        return []
    costs = []
    for name in names:
        cells = ("", _NOT_ASKED, phrases.NOTHING)
        if m := _find_perplexity_ratio(details, name):
            cells = ("", "", f"× {phrases.format_measurement_value(m)}")
        costs.append((phrases.title_target(result, name), *cells))
        spans.append(None)
    groups.append(Group("Held-out perplexity", costs))
    head = ("Form", "Full", "Form's", "Change")
    caption = "Deployed forms against the audited model"
    table = Table("forms-table", caption, head, groups, {1, 2, 3})
    changes.sort(key=lambda change: names.index(change[0]))
    return [
        Paragraph(f"{_describe_deployed_form_leak(changes)} {_NOTE}"),
        Forest.of_differences(table, spans),
    ]


def _measure_leak_change(details: SecretDetails, full: Finding, name: str) -> Measurement | None:
    assert full.main is not None
    form_values = details.values_by_cell.get(full.cell_key._replace(target=name))
    base = details.values_by_cell.get(full.cell_key)
    # Changes are paired by secret: attacks on different secrets have no change.
    if form_values is None or base is None or set(form_values.ids) != set(base.ids):
        return None
    change = outcomes.measure_paired_change(full.main.name, full.main.unit, form_values, base)
    return None if isinstance(change, str) else change


def _find_perplexity_ratio(details: SecretDetails, name: str) -> Measurement | None:
    full = details.heldout.get(UNDEFENDED)
    form_texts = details.heldout.get(name)
    if full is None or form_texts is None or not np.isfinite(form_texts["perplexity"]).all():
        return None
    tokens, base, nll = np.array(
        [[full["tokens"]], [full["perplexity"]], [form_texts["perplexity"]]]
    )
    return estimate_perplexity_ratios(nll[None], tokens, base)[0]


def _describe_deployed_form_leak(changes: Sequence[tuple[str, Measurement, str]]) -> str:
    """Name the deployed forms that leak significantly more, and those that leak less.

    changes: (name, change, label) of each form. All changes share the significance level.
    """
    more = []
    less = []
    for _, change, label in changes:
        wide = widen_leak_measurement(change, len(changes))
        if wide.low > 0:
            more.append(label)
        if wide.high < 0:
            less.append(label)
    return (
        f"Leaks more than the audited model: {', '.join(more) or 'none shown'}. "
        f"Leaks less than the audited model: {', '.join(less) or 'none shown'}."
    )


TOPICS = (
    Topic(
        "forms",
        "Deployed forms",
        _build_deployed_form_blocks,
        DECIDE,
        7,
        turn=5,
    ),
)
