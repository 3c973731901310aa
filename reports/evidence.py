"""Present the numbers of every attack and probe, with the scores, canaries and costs behind
them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
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
    make_table,
)
from auditor.reports.topics import (
    CHECK,
    ReportMaterial,
    Topic,
    group_table_rows,
    name_attack,
    title_attack_row,
)
from auditor.reports.verdict import list_strongest_rows
from auditor.statistics.documents import LONGEST
from auditor.statistics.extraction import compute_any_sample_probability
from auditor.statistics.roc import AUC

_PROBED = " · extraction probability"
_UNIT_GLOSSARY = {  # by the unit of an attack's main number
    "probability": (
        "Chance per sample",
        "the exact probability that one sample is the secret, computed from the model's "
        "distribution and the answers, not drawn",
    ),
    # A rank U, uniform in (0, 1], has exposure -log2 U: 1 / ln 2 = 1.44 bits on average.
    "bits": (
        "Exposure",
        "among the texts that a canary (a random text inserted on purpose) could have been, 1 in "
        "2^exposure is at least as likely; a canary that was never inserted has 1.4 bits on "
        "average. Many copies of one canary are a group: their exposure says nothing about one "
        "record's ε",
    ),
    AUC: (
        "AUC",
        "the probability that a member is ranked above a non-member; chance is 0.5",
    ),
}


def list_glossary_terms(result: AuditResult) -> Facts:
    """Return the words and measures that the report uses, with their meanings."""
    units = {f.main.unit for f in result.findings if f.main}
    terms = [*severity.GLOSSARY, *signals.GLOSSARY]
    for unit, term in _UNIT_GLOSSARY.items():
        if unit in units:
            terms.append(term)
    return tuple(terms)


def _build_results_section_blocks(material: ReportMaterial) -> Iterator[Block]:
    result = material.result
    if not result.findings:
        yield Paragraph("Nothing was measured.")
    head = ("Target", "Attack", "Measured", "Baseline", "Excess")
    groups = group_table_rows(result, partial(_build_result_table_row, result))
    caption = "Verbatim recall, unless a row names another measure"
    yield Table("results-table", caption, head, groups, {2, 3, 4})
    yield _build_effect_causes_table(result)
    yield _build_plugin_measurement_table(result)


def _build_effect_causes_table(result: AuditResult) -> Table:
    """Return a table that attributes each defense's effect to its causes."""
    chains = []
    for f in phrases.sort_findings(result):
        if f.chain:
            baseline = phrases.format_baseline_excess(f.chain.whole)
            chains.append((f"{title_attack_row(result, f)}{baseline}", f.target, f.chain))
    for t in result.targets:
        if t.likelihood:
            chains.append((f"{t.title} · {phrases.MORE_LIKELY}", t.name, t.likelihood))
    explained: set[str] = set()
    groups = []
    for title, target, chain in chains:
        rows = tuple(_build_control_chain_table_rows(result, target, chain, explained))
        groups.append(Group(title, rows))
    head = ("Change", "Target", "Difference", "n", "Result")
    caption = "The effect of each change, from one control to the next, paired by secret"
    return Table("causes-table", caption, head, groups, {2, 3})


def _build_control_chain_table_rows(
    result: AuditResult, target: str, chain: Chain, explained: set[str]
) -> Iterator[tuple[str, ...]]:
    for step in phrases.list_defense_chain_steps(chain, target):
        if step.before != step.after:
            yield _build_control_step_table_row(result, step, explained)
    title = phrases.title_target(result, target)
    yield ("total", title, phrases.format_difference(chain.whole), f"{chain.whole.n:,}", "")
    for step in phrases.list_defense_chain_steps(chain, target, beyond=True):
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
        status = "significant"
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


def _build_calibration_blocks(material: ReportMaterial) -> Iterator[Block]:
    result = material.result
    calibrations: list[tuple[Finding, str, Reliability]] = []
    for f in phrases.sort_findings(result):
        calibrations += _list_titled_calibrations(result, material.details, f)
    undefended = UNDEFENDED in {f.target for f, *_ in calibrations}
    series = []
    groups = []
    errors = []
    text = (
        "Members' first guesses in ten bins of their score; below the diagonal the score is too "
        "high."
    )
    for f, name, r in calibrations:
        row = f"{name} · {f.setting}"
        errors.append((row, f"{phrases.format_percent(r.error)}%", phrases.format_number(r.brier)))
        if undefended and f.target != UNDEFENDED:  # all targets would be too many lines
            continue
        points = []
        cells = []
        for b in r.bins:
            points.append(PlotPoint(b.score, b.right.value, b.right.low, b.right.high))
            cells.append((f"{phrases.format_percent(b.score)}%", phrases.format_share(b.right)))
        series.append(Series(name, points, f.setting))
        groups.append(Group(row, cells))
    if _PROBED in " ".join(line.label for line in series):
        text += (
            " For the extraction probability: the chance that any sample of an attack is the "
            "secret, and the share of secrets for which one was."
        )
    title = "Scores and shares of right guesses"
    head = ("Score", "Recall")
    axes = ("Score", "Share right")
    figure = Figure(
        "calibration-plot", "calibration", title, text, head, groups, series=series, axes=axes
    )
    yield Figures([figure] if series else ())
    columns = ("Target", "Calibration error", "Brier score")
    caption = "Expected calibration error over ten bins"
    yield make_table("reliability-table", caption, columns, errors, {1, 2})


def _list_titled_calibrations(
    result: AuditResult, details: SecretDetails, finding: Finding
) -> Iterator[tuple[Finding, str, Reliability]]:
    """Yield (finding, title, calibration) for each kind of predicted probability.

    The two kinds are guess scores that are probabilities, and exact sampling probabilities.
    """
    values = details.values_by_cell.get(finding.cell_key)
    if values is None or not values.is_judged:
        return
    title = phrases.title_target(result, finding.target)
    o = values.select_secrets(values.member)
    if values.score_is_probability and len(o.ids):
        name = name_attack(result, finding, title)
        # Rounding may push a sum of probabilities above 1.
        yield finding, name, detailed.calibrate_guess_scores(o.score.clip(max=1.0), o.hit)
    chances = _map_any_sample_probabilities(result, details, finding)
    # (members,), NaN if unknown
    foretold = np.array(list(map(chances.get, o.ids)), dtype=float)
    known = ~np.isnan(foretold)
    if known.any():
        yield (
            finding,
            f"{title}{_PROBED}",
            detailed.calibrate_guess_scores(foretold[known], o.any_hit[known]),
        )


def _map_any_sample_probabilities(
    result: AuditResult, details: SecretDetails, finding: Finding
) -> Mapping[str, float]:
    """Map each secret's id to the exact probability that at least one of the samples is the secret.

    The samples are those of the attack in `finding`. If several attacks share the same samples,
    return {} for all but the first of these attacks.
    """
    access_key = (finding.target, finding.setting, finding.decoding)
    rows = [f for f in result.findings if (f.target, f.setting, f.decoding) == access_key]
    first = next(f for f in rows if f.samples == finding.samples)
    if not finding.samples or first is not finding:
        return {}
    for f in rows:
        # the probe of exact probabilities at the same target, access and decoding
        probe = details.values_by_cell.get(f.cell_key)
        if probe is not None and EXACT in probe.values:
            with np.errstate(divide="ignore"):  # log 0: never drawn
                log_p = np.log(probe.values[EXACT])
            chances = compute_any_sample_probability(log_p, finding.samples).clip(0.0, 1.0)
            return dict(zip(probe.ids, chances.tolist(), strict=True))
    return {}


def _build_privacy_utility_blocks(material: ReportMaterial) -> list[Block]:
    result = material.result
    series = []
    names = set()
    for target in result.targets:
        cost = target.perplexity
        if cost is None or not math.isfinite(cost.value):
            continue
        promised = "no claim"
        if target.claim:
            promised = f"ε {phrases.format_promised_epsilon(target.claim)}"
        for finding in list_strongest_rows(result, target.name):
            recall = finding.measurement("recall")
            assert recall is not None  # the attacks are ranked by it
            point = PlotPoint(cost.value, recall.value, recall.low, recall.high)
            series.append(Series(f"{target.title} · {promised}", [point], finding.setting))
            names.add(target.name)
    if len(names) < 2:
        return []  # nothing to trade
    text = (
        "The strongest attack on each target; left is more useful, down leaks less. Numbers: "
        "Results and Targets."
    )
    title = "Cost of a defense and remaining leakage"
    axes = ("Perplexity on held-out text", "Recall")
    figure = Figure("tradeoff-plot", "tradeoff", title, text, series=series, axes=axes)
    return [Figures([figure])]


def _build_plugin_measurement_table(result: AuditResult) -> Table:
    """Return a table of numbers that no other section shows.

    These are numbers of plug-ins, and the length of each document's longest extracted block.
    """
    groups = []
    for finding in phrases.sort_findings(result):
        rows = []
        for m in finding.measurements:
            if m.name in result.metrics or m.name == LONGEST:
                rows.append((phrases.format_metric(m.name), *phrases.format_measurement_cells(m)))
        if rows:
            title = f"{phrases.title_row(result, finding)} · {finding.attack}"
            groups.append(Group(title, rows))
    head = ("Measurement", "Value", "95% interval", "n")
    return Table("plugin-table", "Further numbers", head, groups, {1, 2, 3})


TOPICS = (
    Topic("results", "Results", _build_results_section_blocks, CHECK, 1, turn=3),
    Topic(
        "ranking",
        "Ranking and samples",
        lambda m: [Figures(figures.draw_all_figures(m.result, research=True))],
        CHECK,
        2,
    ),
    Topic(
        "calibration",
        "Calibration of confidence",
        _build_calibration_blocks,
        CHECK,
        3,
    ),
    Topic(
        "tradeoff",
        "Privacy, utility, leakage",
        _build_privacy_utility_blocks,
        CHECK,
        5,
    ),
)
