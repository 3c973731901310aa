"""For whoever checks the method: every row's numbers, and whether scores, canaries and costs bear them out."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from auditor.core.nouns import UNDEFENDED, Claim
from auditor.core.result import AuditResult, Chain, ChainStep, Finding, Measurement, TargetRecord
from auditor.records import secret_details as detailed
from auditor.records.disagreements import EXACT
from auditor.records.secret_details import Details, Reliability
from auditor.reports import figures, phrases
from auditor.reports.blocks import Block, FactList, Figure, Figures, Group, Paragraph, PlotPoint, Series, Table
from auditor.reports.topics import CHECK, Topic, group_rows_by_target
from auditor.reports.verdict import strongest_attack_row, verdict_by_question
from auditor.statistics.extraction import any_sample_probability
from auditor.statistics.roc import AUC


def _results_section_blocks(result: AuditResult) -> list[Block]:
    note = (
        "Every share is written with its count and two-sided 95% interval. Non-members are records that were never "
        "trained on: what an attack completes of them is guessing, and the baseline for members if the two are alike "
        "otherwise. Excess is members minus non-members. PPL is perplexity on held-out text: lower is more useful."
    )
    if any(finding.main and finding.main.unit == "probability" for finding in result.findings):
        note += (
            " Rows with a mean p are the auditor's own: computed from the model's distribution and the "
            "answers, not drawn; p is the probability that one sample gives the secret away."
        )
    if any(finding.main and finding.main.unit == "bits" for finding in result.findings):
        note += (
            " Rows with an exposure are about canaries, random texts that were inserted on purpose: of the texts that "
            "a canary could have been, 1 in 2^exposure is at least as likely as it. One that was never inserted has "
            "1.4 bits on average. Many copies of one canary are a group: its exposure says nothing of one record's ε."
        )
    if any(finding.main and finding.main.unit == AUC for finding in result.findings):
        note += (
            " Rows with an AUC tell members from non-members: the probability that a member is ranked above a "
            "non-member, of which 0.5 is chance."
        )
    if not result.findings:
        return [Paragraph("The run has no rows.")]
    return [_results_table(result), *effect_causes_blocks(result), Paragraph(note)]


def effect_causes_blocks(result: AuditResult) -> list[Block]:
    """What each defense's effect is due to: every chain of every row, step by step."""
    chained = [finding for finding in phrases.findings_undefended_first(result) if finding.chain]
    read = [target for target in result.targets if target.likelihood]
    if not chained and not read:
        return []
    groups = (
        *(
            Group(
                f"{phrases.row_title(result, f)} · {f.attack}{_above_nonmembers_label(f)}",
                tuple(_chain_rows(result, f.target, f.chain)),
            )
            for f in chained
        ),
        *(Group(f"{t.title} · {phrases.MORE_LIKELY}", tuple(_chain_rows(result, t.name, t.likelihood))) for t in read),
    )
    head = ("Step", "From", "To", "What changes", "Difference", "95% interval", "n", "Shown")
    caption = "What the effect of each defense is due to: the step from one control row to the next, paired by secret"
    return [Table("causes-table", caption, head, groups, frozenset({4, 5, 6}))]


def _above_nonmembers_label(finding: Finding) -> str:
    return phrases.note_above_nonmembers(finding.chain.whole) if finding.chain else ""


def _chain_rows(result: AuditResult, target: str, chain: Chain | None) -> Iterator[tuple[str, ...]]:
    assert chain is not None  # `effect_causes_blocks` has seen to it
    for step in phrases.steps_between_targets(phrases.steps_to_target(chain, target)):
        yield _step_row(result, step)
    whole = ("all of these", *_titles_before_and_after(result, UNDEFENDED, target), "")
    yield (*whole, *_difference_cells(chain.whole), "")
    for step in phrases.steps_to_target(chain, target, beyond=True):
        yield _step_row(result, step)


def _step_row(result: AuditResult, step: ChainStep) -> tuple[str, ...]:
    row = (
        phrases.join_step_causes(step),
        *_titles_before_and_after(result, step.before, step.after),
        "; ".join(step.causes.values()),
    )
    if step.difference is None:
        return (*row, f"no step: {step.note}")
    return (
        *row,
        *_difference_cells(step.difference),
        ("yes" if phrases.is_step_significant(step) else "not significant") + _step_note_label(step),
    )


def _step_note_label(step: ChainStep) -> str:
    return f" ({step.note})" if step.note else ""


def _titles_before_and_after(result: AuditResult, before: str, after: str) -> tuple[str, str]:
    return phrases.target_title(result, before), phrases.target_title(result, after) or phrases.NOTHING


def _difference_cells(m: Measurement) -> tuple[str, str, str]:
    return phrases.difference_in_points(m), phrases.format_interval(m), f"{m.n:,}"


def _results_table(result: AuditResult) -> Table:
    head = ("Target", "Attack", "Verbatim recall", "Non-members", "Excess", "PPL", "Decoding", "Claim applies")
    groups = group_rows_by_target(result, lambda finding: [_result_row(result, finding)])
    return Table("results-table", "Recall of each target, setting and attack", head, groups, frozenset({2, 3, 4, 5}))


def _result_row(result: AuditResult, finding: Finding) -> tuple[str, ...]:
    title = phrases.row_title(result, finding)
    if finding.not_applicable:
        return (title, finding.attack, f"not applicable: {finding.not_applicable}")
    return (
        title,
        finding.attack,
        *phrases.main_number_and_baseline(finding),
        phrases.target_perplexity_text(result, finding.target),
        finding.decoding,
        phrases.claim_applies_phrase(finding),
    )


def _ranking_figure_blocks(result: AuditResult) -> list[Block]:
    drawn = [figure for figure in figures.all_figures(result) if figure.plot in figures.RESEARCH]
    return [Figures(tuple(drawn))] if drawn else []


def _calibration_blocks(result: AuditResult, details: Details) -> list[Block]:
    shown = [
        (f, name, r)
        for f in phrases.findings_undefended_first(result)
        for name, r in _score_reliabilities(result, details, f)
    ]
    if not shown:
        return []
    plain = [one for one in shown if one[0].target == UNDEFENDED] or shown  # of all targets too many lines
    series = tuple(Series(name, _reliability_points(r), f.setting) for f, name, r in plain)
    groups = tuple(
        Group(f"{name} · {f.setting}: {_calibration_quality_label(r)}", _reliability_bin_rows(r))
        for f, name, r in shown
    )
    title = "What a score foretells, and what came true"
    text = (
        "Members' first guesses in ten bins of their score, where it is a probability; below the diagonal it boasts. "
        "Of the extraction probability: the chance that any of an attack's samples is the secret, and whether one was."
    )
    head = ("Mean score", "Right", "95% interval")
    axes = ("Score", "Share right")
    return [
        Figures((Figure("calibration-plot", "calibration", title, text, head, groups, series=series, axes=axes),)),
        _calibration_error_table(shown),
    ]


def _reliability_points(r: Reliability) -> tuple[PlotPoint, ...]:
    return tuple(PlotPoint(b.score, b.right.value, b.right.low, b.right.high) for b in r.bins)


def _calibration_error_table(shown: Sequence[tuple[Finding, str, Reliability]]) -> Table:
    rows = tuple(
        (name, f.setting, f"{r.n:,}", f"{phrases.format_percent(r.error)}%", phrases.format_number(r.brier))
        for f, name, r in shown
    )
    head = ("Score", "Setting", "Guesses", "Calibration error", "Brier score")
    caption = "How far scores are from what came true (expected calibration error over ten bins)"
    return Table("reliability-table", caption, head, (Group("", rows),), frozenset({2, 3, 4}))


def _calibration_quality_label(r: Reliability) -> str:
    return (
        f"calibration error {phrases.format_percent(r.error)}%, "
        f"Brier score {phrases.format_number(r.brier)}, n = {r.n:,}"
    )


def _reliability_bin_rows(r: Reliability) -> tuple[tuple[str, ...], ...]:
    return tuple(
        (
            f"{phrases.format_percent(b.score)}%",
            phrases.format_share_without_interval(b.right),
            phrases.format_interval(b.right),
        )
        for b in r.bins
    )


def _score_reliabilities(result: AuditResult, details: Details, finding: Finding) -> list[tuple[str, Reliability]]:
    """Of an attack whose score is a probability; of a sampling attack also what the exact probability foretold."""
    seen = details.rows.get(finding.key)
    if seen is None or seen.outcome is None:
        return []
    title, o, found = phrases.target_title(result, finding.target), seen.outcome.only(seen.outcome.member), []
    if seen.score_is_probability and len(o.ids):
        found.append((f"{title} · {finding.attack}", detailed.score_calibration(o.score.clip(max=1.0), o.hit)))
    p = _exact_chance_in_samples(result, details, finding)
    known = np.array([id in p for id in o.ids], dtype=bool)
    if known.any():
        foretold = np.array([p[id] for id in o.ids if id in p])
        name = f"{title} · extraction probability"
        found.append((name, detailed.score_calibration(foretold, o.any_hit[known])))
    return found


def _exact_chance_in_samples(result: AuditResult, details: Details, finding: Finding) -> Mapping[str, float]:
    """The exact chance of each secret to be among the attack's samples, where only its prefix stands before them.

    Of attacks that share their samples, once.
    """

    def asked(f: Finding) -> tuple[str, str, str]:
        return f.target, f.setting, f.decoding

    alike = [f for f in result.findings if asked(f) == asked(finding)]
    probe = next((seen for f in alike if (seen := details.rows.get(f.key)) and EXACT in seen.values), None)
    first = next((f for f in alike if f.samples == finding.samples), None)
    if probe is None or not finding.samples or first is not finding:
        return {}
    with np.errstate(divide="ignore"):
        chances = any_sample_probability(np.log(probe.values[EXACT]), finding.samples)
    return dict(zip(probe.ids, chances.clip(0.0, 1.0).tolist(), strict=True))


def _privacy_utility_blocks(result: AuditResult) -> list[Block]:
    points = []
    for target in result.targets:
        for setting in phrases.SETTINGS:
            finding = strongest_attack_row(result, target.name, setting)
            if finding and target.perplexity and math.isfinite(target.perplexity.value):
                points.append((target, finding))
    if len({target.name for target, _ in points}) < 2:
        return []  # nothing to trade
    series = tuple(Series(_title_and_epsilon_label(t), (_perplexity_recall_point(t, f),), f.setting) for t, f in points)
    rows = tuple(
        (
            phrases.row_title(result, f),
            _epsilon_or_no_claim(t.claim),
            phrases.value_with_interval(t.perplexity),
            phrases.format_share_with_interval(f.measurement("recall")),
        )
        for t, f in points
    )
    title = "What protection costs, and what it leaves"
    text = (
        "The strongest attack on each target. To the left more useful, downwards less leaks; ε is what is promised of "
        "its unit."
    )
    head = ("Target", "ε promised", "Perplexity", "Recall")
    axes, groups = ("Perplexity on held-out text", "Recall"), (Group("", rows),)
    return [
        Figures(
            (Figure("tradeoff-plot", "tradeoff", title, text, head, groups, (), series, frozenset({0}), axes=axes),)
        )
    ]


def _perplexity_recall_point(target: TargetRecord, finding: Finding) -> PlotPoint:
    recall, perplexity = finding.measurement("recall"), target.perplexity
    assert recall is not None and perplexity is not None  # `_privacy_utility_blocks` has seen to it
    return PlotPoint(perplexity.value, recall.value, recall.low, recall.high)


def _title_and_epsilon_label(target: TargetRecord) -> str:
    return f"{target.title} · ε {phrases.promised(target.claim)}" if target.claim else f"{target.title} · no claim"


def _epsilon_or_no_claim(claim: Claim | None) -> str:
    return "no claim" if claim is None else phrases.promised(claim)


TOPICS = (
    Topic("answers", "The verdict in full", lambda m: (FactList("", verdict_by_question(m.result)),), CHECK, 1),
    Topic("results", "Results", lambda m: _results_section_blocks(m.result), CHECK, 2, turn=3),
    Topic("ranking", "Ranking and samples", lambda m: _ranking_figure_blocks(m.result), CHECK, 3),
    Topic("calibration", "Calibration of confidence", lambda m: _calibration_blocks(m.result, m.details), CHECK, 4),
    Topic("tradeoff", "Privacy, utility, leakage", lambda m: _privacy_utility_blocks(m.result), CHECK, 6),
)
