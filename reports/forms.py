"""Compare the leakage of each deployed version of a model with the audited model.

A deployed form is, for example, a quantised model. Comparisons are paired by secret.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import compress

import numpy as np

from auditor.conclusions import outcomes
from auditor.conclusions.leak_kinds import widen_leak_measurement
from auditor.conclusions.secret_details import SecretDetails
from auditor.core.nouns import UNDEFENDED
from auditor.core.plan_parts import name_deployed_form
from auditor.core.result import AuditResult, Finding, Measurement
from auditor.reports import phrases
from auditor.reports.blocks import Block, Forest, ForestSpan, Group, Paragraph, Table
from auditor.reports.topics import DECIDE, Topic, build_forest_span
from auditor.statistics import bounds
from auditor.statistics.frontier import estimate_perplexity_ratios
from auditor.statistics.metrics import SHARES
from auditor.statistics.roc import AUC

_NOT_ASKED = "cannot be asked"
_NOTE = (
    "Changes are form minus full, of the same secrets, with 95% intervals; more or less is stated "
    "at 95% over all of them together. Forms made here round or prune the weights and then run in "
    "full precision; a served or GGUF model is queried as it is."
)


def _build_deployed_form_blocks(result: AuditResult, details: SecretDetails) -> list[Block]:
    names = []
    for form in result.plan.get("forms", ()):
        names.append(name_deployed_form(form))
    groups = list[Group]()
    spans = list[ForestSpan | None]()
    for finding in phrases.sort_findings(result):
        if finding.target != UNDEFENDED or finding.main is None:
            continue
        rows = []
        for name in names:
            change = _measure_leak_change(details, finding, name)
            if change:
                delta = phrases.format_difference(change)
            else:
                delta = phrases.NOTHING
            rows.append(
                (*_build_deployed_form_table_cells(result, finding, finding.main, name), delta)
            )
            spans.append(
                build_forest_span(change) if change and change.unit in (*SHARES, AUC) else None
            )
        title = f"{phrases.format_metric(finding.main.name)} · {finding.attack} ({finding.setting})"
        groups.append(Group(title, tuple(rows)))
    if not names or not groups:
        return []
    costs = []
    for name in names:
        m = _find_perplexity_ratio(result, details, name)
        if m:
            cells = ("", "", f"× {phrases.format_measurement_value(m)}")
        else:
            cells = ("", _NOT_ASKED, phrases.NOTHING)
        costs.append((phrases.title_target(result, name), *cells))
    groups.append(Group("Held-out perplexity", tuple(costs)))
    head = ("Form", "Full", "Form's", "Change")
    table = Table(
        "forms-table",
        "Deployed forms against the audited model",
        head,
        tuple(groups),
        frozenset({1, 2, 3}),
    )
    forest = Forest.of_differences(table, (*spans, *(None for _ in costs)))
    return [
        Paragraph(" ".join((*_describe_deployed_form_leak(result, details, names), _NOTE))),
        forest,
    ]


def _build_deployed_form_table_cells(
    result: AuditResult, full: Finding, main: Measurement, name: str
) -> tuple[str, str, str]:
    """Return three cells: the deployed form's title, the full model's number, and the form's
    number.

    full, main: the full model's attack result and its main number; name: the deployed form's name.
    """
    rows = []
    for f in result.findings:
        if f.cell_key == full.cell_key._replace(target=name):
            rows.append(f)
    if rows and not rows[0].not_applicable:
        measurement = rows[0].measurement(main.name)
    else:
        measurement = None
    if measurement:
        number = phrases.format_measurement_value(measurement)
    else:
        number = _NOT_ASKED
    return phrases.title_target(result, name), phrases.format_measurement_value(main), number


def _measure_leak_change(details: SecretDetails, full: Finding, name: str) -> Measurement | None:
    assert full.main is not None
    form_values = details.rows.get(full.cell_key._replace(target=name))
    base = details.rows.get(full.cell_key)
    # Changes are paired by secret: rows about different secrets have no change.
    if form_values is None or base is None or set(form_values.ids) != set(base.ids):
        return None
    difference = outcomes.compare_paired_rows(full.main.name, None, form_values, base)
    if isinstance(difference, str):
        return None
    return bounds.make_measurement(f"{full.main.name}_difference", difference, full.main.unit)


def _find_perplexity_ratio(
    result: AuditResult, details: SecretDetails, name: str
) -> Measurement | None:
    full = details.heldout.get(UNDEFENDED)
    form_texts = details.heldout.get(name)
    if full is None or form_texts is None or not np.isfinite(form_texts["perplexity"]).all():
        return None
    # "perplexity" holds summed nats a text (`Details.heldout`), not perplexities.
    tokens, base, nll = (
        np.array([values])
        for values in (full["tokens"], full["perplexity"], form_texts["perplexity"])
    )
    # nll: (1 form, 1 seed, texts); tokens and base: (1 seed, texts).
    return estimate_perplexity_ratios(nll[None], tokens, base)[0]


def _describe_deployed_form_leak(
    result: AuditResult, details: SecretDetails, names: Sequence[str]
) -> Iterator[str]:
    """Yield sentences on the deployed forms that significantly leak more, or less.

    The confidence level of 95% covers all compared changes together.
    """
    rows = []
    for f in phrases.sort_findings(result):
        if f.target == UNDEFENDED and f.main is not None:
            rows.append(f)
    changes = [
        (name, f, change)
        for name in names
        for f in rows
        if (change := _measure_leak_change(details, f, name)) is not None
    ]
    # Bonferroni over all changes, so that "leaks more" is wrong in at most 5% of runs.
    wide = [widen_leak_measurement(change, len(changes)) for *_, change in changes]
    labels = []
    for n, f, c in changes:
        labels.append(
            f"{phrases.title_target(result, n)} ({f.attack}, {f.setting}: "
            f"{phrases.format_difference(c)})"
        )
    for direction, significant in (
        ("more", [m.low > 0 for m in wide]),
        ("less", [m.high < 0 for m in wide]),
    ):
        forms = list(compress(labels, significant))
        yield f"Leaks {direction} than the audited model: {', '.join(forms) or 'none is shown to'}."


TOPICS = (
    Topic(
        "forms",
        "Deployed forms",
        lambda m: _build_deployed_form_blocks(m.result, m.details),
        DECIDE,
        7,
        turn=5,
    ),
)
