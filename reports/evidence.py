"""Present the numbers of every attack and probe, with the scores, canaries and costs behind
them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import numpy as np

from auditor.conclusions import secret_details as detailed
from auditor.conclusions.disagreements import EXACT
from auditor.conclusions.secret_details import Reliability, SecretDetails
from auditor.core.nouns import UNDEFENDED
from auditor.core.result import AuditResult, Chain, ChainStep, Finding
from auditor.reports import figures, phrases, severity, signals
from auditor.reports.blocks import (
    Block,
    Facts,
    Figure,
    Figures,
    Group,
    Paragraph,
    PlotPoint,
    Series,
    Table,
)
from auditor.reports.topics import (
    CHECK,
    Topic,
    build_figures_blocks,
    group_table_rows,
    title_attack_row,
)
from auditor.reports.verdict import find_strongest_attack_row
from auditor.statistics.documents import LONGEST
from auditor.statistics.extraction import compute_any_sample_probability
from auditor.statistics.roc import AUC

_PROBED = " · extraction probability"
_UNIT_GLOSSARY = {  # by the unit of a row's main number
    "probability": (
        "Mean p",
        "the exact probability that one sample is the secret, computed from the model's "
        "distribution and the answers, not drawn",
    ),
    # A rank U, uniform in (0, 1], has exposure -log2 U: 1 / ln 2 = 1.44 bits on average.
    "bits": (
        "Exposure",
        "among the texts that a canary (a random text inserted on purpose) could have been, 1 in "
        "2^exposure is at least as likely; one never inserted has 1.4 bits on average. Many "
        "copies of one canary are a group: its exposure says nothing about one record's ε",
    ),
    AUC: (
        "AUC",
        "the probability that a member is ranked above a non-member; chance is 0.5",
    ),
}


def list_glossary_terms(result: AuditResult) -> Facts:
    """Return the words and measures that the report uses, with their meanings."""
    units = set()
    for f in result.findings:
        if f.main:
            units.add(f.main.unit)
    measures = []
    for unit, term in _UNIT_GLOSSARY.items():
        if unit in units:
            measures.append(term)
    return (*severity.GLOSSARY, *signals.GLOSSARY, *measures)


def _build_results_section_blocks(result: AuditResult) -> list[Block]:
    if not result.findings:
        return [Paragraph("The run has no rows.")]
    head = ("Target", "Attack", "Measured", "Baseline", "Excess")
    groups = group_table_rows(result, partial(_build_result_table_row, result))
    caption = "Verbatim recall, unless a row names another measure"
    return [
        Table("results-table", caption, head, groups, frozenset({2, 3, 4})),
        *_build_effect_causes_tables(result),
        *_build_plugin_measurement_table(result),
    ]


def _build_effect_causes_tables(result: AuditResult) -> list[Block]:
    """Return tables that attribute each defense's effect to its causes.

    Each defense has a chain of control models that differ in one thing; a table row shows a step.
    """
    chains = []
    for f in phrases.sort_findings(result):
        if f.chain:
            chains.append(
                (
                    f"{title_attack_row(result, f)}{phrases.format_baseline_excess(f.chain.whole)}",
                    f.target,
                    f.chain,
                )
            )
    chains += [
        (f"{t.title} · {phrases.MORE_LIKELY}", t.name, t.likelihood)
        for t in result.targets
        if t.likelihood
    ]
    # A cause is explained in the first chain that has it.
    explained: set[str] = set()
    groups = tuple(
        Group(title, tuple(_build_control_chain_table_rows(result, target, chain, explained)))
        for title, target, chain in chains
    )
    head = ("Change", "Target", "Difference", "n", "Result")
    caption = "The effect of each change, from one control row to the next, paired by secret"
    if groups:
        return [Table("causes-table", caption, head, groups, frozenset({2, 3}))]
    return []


def _build_control_chain_table_rows(
    result: AuditResult, target: str, chain: Chain, explained: set[str]
) -> Iterator[tuple[str, ...]]:
    for step in phrases.select_chain_steps(phrases.list_chain_steps(chain, target)):
        yield _build_control_step_table_row(result, step, explained)
    title = phrases.title_target(result, target)
    yield ("all of these", title, phrases.format_difference(chain.whole), f"{chain.whole.n:,}", "")
    for step in phrases.list_chain_steps(chain, target, beyond=True):
        yield _build_control_step_table_row(result, step, explained)


def _build_control_step_table_row(
    result: AuditResult, step: ChainStep, explained: set[str]
) -> tuple[str, ...]:
    title = phrases.format_chain_step_causes(step)
    causes = "; ".join(step.causes.values())
    if causes and title not in explained:
        explained.add(title)
        title = f"{title}: {causes}"
    row = (title, phrases.title_target(result, step.after) or phrases.NOTHING)
    if step.difference is None:
        return (*row, f"no step: {step.note}")
    if phrases.is_chain_step_significant(step):
        status = "shown"
    else:
        status = "not significant"
    return (
        *row,
        phrases.format_difference(step.difference),
        f"{step.difference.n:,}",
        status + (f" ({step.note})" if step.note else ""),
    )


def _build_result_table_row(result: AuditResult, finding: Finding) -> tuple[str, ...]:
    title = phrases.title_row(result, finding)
    if finding.not_applicable:
        return (title, finding.attack, f"not applicable: {finding.not_applicable}")
    return (
        title,
        finding.attack,
        *phrases.format_baseline_excess_cells(finding),
    )


def _build_ranking_figure_blocks(result: AuditResult) -> list[Block]:
    return build_figures_blocks(
        figure for figure in figures.draw_all_figures(result) if figure.plot in figures.RESEARCH
    )


def _build_calibration_blocks(result: AuditResult, details: SecretDetails) -> list[Block]:
    calibrations = []
    for f in phrases.sort_findings(result):
        for name, r in _list_titled_calibrations(result, details, f):
            calibrations.append((f, name, r))
    if not calibrations:
        return []
    plain = [
        calibration for calibration in calibrations if calibration[0].target == UNDEFENDED
    ] or calibrations  # all targets would be too many lines
    series = tuple(
        Series(
            name,
            tuple(PlotPoint(b.score, b.right.value, b.right.low, b.right.high) for b in r.bins),
            f.setting,
        )
        for f, name, r in plain
    )
    groups = tuple(_reliability_bin_row_group(f"{name} · {f.setting}", r) for f, name, r in plain)
    title = "Scores and shares of right guesses"
    text = (
        "Members' first guesses in ten bins of their score; below the diagonal the score is too "
        "high."
    )
    if any(name.endswith(_PROBED) for _, name, _ in plain):
        text += (
            " For the extraction probability: the chance that any sample of an attack is the "
            "secret, and the share of secrets for which one was."
        )
    head = ("Score", "Recall")
    axes = ("Score", "Share right")
    figure = Figure(
        "calibration-plot", "calibration", title, text, head, groups, series=series, axes=axes
    )
    return [Figures((figure,)), _build_calibration_error_table(calibrations)]


def _build_calibration_error_table(
    reliabilities: Sequence[tuple[Finding, str, Reliability]],
) -> Table:
    rows = tuple(
        (
            f"{name} · {f.setting}",
            f"{phrases.format_percent(r.error)}%",
            phrases.format_number(r.brier),
        )
        for f, name, r in reliabilities
    )
    head = ("Target", "Calibration error", "Brier score")
    caption = "Expected calibration error over ten bins"
    return Table("reliability-table", caption, head, (Group("", rows),), frozenset({1, 2}))


def _reliability_bin_row_group(title: str, r: Reliability) -> Group:
    rows = tuple(
        (f"{phrases.format_percent(b.score)}%", phrases.format_share(b.right)) for b in r.bins
    )
    return Group(title, rows)


def _list_titled_calibrations(
    result: AuditResult, details: SecretDetails, finding: Finding
) -> list[tuple[str, Reliability]]:
    """Return each calibration of predicted probabilities, with its title.

    There are two kinds of prediction: guess scores that are probabilities, and exact sampling
    probabilities.
    """
    values = details.rows.get(finding.cell_key)
    if values is None or values.outcome is None:
        return []
    title, o, calibrations = (
        phrases.title_target(result, finding.target),
        values.outcome.select_secrets(values.outcome.member),
        [],
    )
    if values.score_is_probability and len(o.ids):
        # Rounding may push a sum of probabilities above 1.
        calibrations.append(
            (
                title
                if len({f.attack for f in result.findings}) == 1
                else f"{title} · {finding.attack}",
                detailed.calibrate_guess_scores(o.score.clip(max=1.0), o.hit),
            )
        )
    p = _list_calibration_chances(result, details, finding)
    # `dtype`: an empty array defaults to floats, which cannot select.
    known = np.array([id in p for id in o.ids], dtype=bool)
    if known.any():
        # (known secrets,), in the order of o.any_hit[known].
        foretold = np.array([p[id] for id in o.ids if id in p])
        name = f"{title}{_PROBED}"
        calibrations.append((name, detailed.calibrate_guess_scores(foretold, o.any_hit[known])))
    return calibrations


def _list_calibration_chances(
    result: AuditResult, details: SecretDetails, finding: Finding
) -> Mapping[str, float]:
    """Return each secret's exact probability of being sampled from its prefix alone, by secret id.

    If several attacks share samples, only the first attack has values.
    """

    access_key = (finding.target, finding.setting, finding.decoding)
    rows = []
    for f in result.findings:
        if (f.target, f.setting, f.decoding) == access_key:
            rows.append(f)
    # The probe of exact probabilities at the same target, access and decoding.
    probe = next(
        (row for f in rows if (row := details.rows.get(f.cell_key)) and EXACT in row.values),
        None,
    )
    first = next((f for f in rows if f.samples == finding.samples), None)
    if probe is None or not finding.samples or first is not finding:
        return {}
    with np.errstate(divide="ignore"):  # log 0: never drawn
        chances = compute_any_sample_probability(np.log(probe.values[EXACT]), finding.samples)
    return dict(zip(probe.ids, chances.clip(0.0, 1.0).tolist(), strict=True))


def _build_privacy_utility_blocks(result: AuditResult) -> list[Block]:
    points = []
    for target in result.targets:
        for setting in phrases.SETTINGS:
            finding = find_strongest_attack_row(result, target.name, setting)
            recall, cost = finding.measurement("recall") if finding else None, target.perplexity
            if finding and recall and cost and math.isfinite(cost.value):
                points.append((target, finding, recall, cost))
    if len({target.name for target, *_ in points}) < 2:
        return []  # nothing to trade
    series = tuple(
        Series(
            f"{t.title} · "
            f"{f'ε {phrases.format_promised_epsilon(t.claim)}' if t.claim else 'no claim'}",
            (PlotPoint(cost.value, recall.value, recall.low, recall.high),),
            f.setting,
        )
        for t, f, recall, cost in points
    )
    text = (
        "The strongest attack on each target; left is more useful, down leaks less. Numbers: "
        "Results and Targets."
    )
    axes = ("Perplexity on held-out text", "Recall")
    figure = Figure(
        "tradeoff-plot",
        "tradeoff",
        "Cost of a defense and remaining leakage",
        text,
        series=series,
        axes=axes,
    )
    return [Figures((figure,))]


def _build_plugin_measurement_table(result: AuditResult) -> list[Block]:
    """Return a table of numbers that no other section shows.

    These are numbers of plug-ins, and lengths of the longest extracted blocks of documents.
    """
    groups = []
    for finding in phrases.sort_findings(result):
        groups.append(
            Group(
                f"{phrases.title_row(result, finding)} · {finding.attack}",
                tuple(
                    (phrases.format_metric(m.name), *phrases.format_measurement_cells(m))
                    for m in finding.measurements
                    if m.name in result.metrics or m.name == LONGEST
                ),
            )
        )
    groups = [group for group in groups if group.rows]
    head = ("Measurement", "Value", "95% interval", "n")
    if groups:
        return [Table("plugin-table", "Further numbers", head, tuple(groups), frozenset({1, 2, 3}))]
    return []


TOPICS = (
    Topic(
        "results", "Results", lambda m: _build_results_section_blocks(m.result), CHECK, 1, turn=3
    ),
    Topic(
        "ranking", "Ranking and samples", lambda m: _build_ranking_figure_blocks(m.result), CHECK, 2
    ),
    Topic(
        "calibration",
        "Calibration of confidence",
        lambda m: _build_calibration_blocks(m.result, m.details),
        CHECK,
        3,
    ),
    Topic(
        "tradeoff",
        "Privacy, utility, leakage",
        lambda m: _build_privacy_utility_blocks(m.result),
        CHECK,
        5,
    ),
)
