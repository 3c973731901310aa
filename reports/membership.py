"""Report how well scores separate members from non-members, next to baselines without a model."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from auditor.conclusions.secret_details import SecretDetails
from auditor.core.nouns import UNDEFENDED
from auditor.core.result import AuditResult, Finding
from auditor.reports import phrases
from auditor.reports.blocks import (
    Block,
    Figure,
    Figures,
    Group,
    Paragraph,
    PlotPoint,
    Series,
    Table,
)
from auditor.reports.topics import CHECK, Topic, title_attack_row
from auditor.statistics import roc
from auditor.statistics.membership import BELOW, FALSE_POSITIVES, SCORES
from auditor.statistics.metrics import (
    ADJUSTED_AUC,
    CONTROLS,
    OF_TEXT,
    make_label,
    name_auc,
    name_partial_auc_metric,
    name_score_column,
    name_tpr_metric,
)

_SHOWN = 60  # steps of a curve in its table
# The threshold is formulas D1: the k-th highest of n non-members, k = floor((n + 1) rate).
_NOTE = (
    "AUC is the probability that a member is ranked above a non-member; ties count half, 0.5 is "
    "chance. The first line is the strongest score, the one whose interval is farthest from "
    "chance: membership_auc, which the verdict and gates read. The AUCs have intervals that hold "
    "for all scores and all groups of copies together (bootstrap of the maximum), so the best of "
    "many is not overstated. A rate is the share of members above a threshold that other "
    "non-members exceed at this rate in expectation, the k-th highest of n non-members, with k = "
    "(n + 1) times the rate, rounded down; a member that ties with it is not found. With too few "
    "non-members its interval has no lower end above 0. The blind baseline and the reference have "
    "not seen the model: if they are above 0.5, members differ from non-members in kind, and only "
    "the adjusted AUC decides. It weighs records by how unsure a classifier of the text is about "
    "their side; differences that tokens and lengths do not show are not adjusted for. Stacked and "
    "blind scores are cross-fitted: no label of a record, or of its near duplicates, is used for "
    "its own."
)
_OLD_NOTE = (
    " An older version made this run: the first line is a score named beforehand, and the "
    "intervals are not corrected. The verdict takes the strongest score and corrects its interval "
    "for their number."
)


def select_membership_rows(result: AuditResult) -> list[Finding]:
    """Return the attack results of membership probes."""
    return [
        finding for finding in phrases.sort_findings(result) if finding.measurement(name_auc(""))
    ]


def _build_membership_tables(result: AuditResult) -> list[Block]:
    rows = select_membership_rows(result)
    if not rows:
        return []
    rates = [f"{100 * rate:g}" for rate in FALSE_POSITIVES]
    rate_heads = (f"Found at {rate}% false positives" for rate in rates)
    head = (
        "Score",
        "AUC",
        *rate_heads,
        f"Mean up to {100 * BELOW:g}%",
        f"Counts for the {rates[0]}%",
    )
    groups = tuple(
        Group(title_attack_row(result, f), tuple(_build_membership_score_table_rows(f)))
        for f in rows
    )
    table = Table(
        "membership-table",
        "How well each score separates members from non-members",
        head,
        groups,
        frozenset({1, 2, 3, 4}),
    )
    if all(f.scores_tried for f in rows):
        note = _NOTE
    else:
        note = f"{_NOTE}{_OLD_NOTE}"
    return [
        table,
        *_build_reversed_score_blocks(result, rows),
        *_build_copies_auc_blocks(result, rows),
        Paragraph(note),
    ]


def _build_reversed_score_blocks(result: AuditResult, findings: list[Finding]) -> list[Block]:
    """Report membership probes in which members score lower than non-members.

    A defense that forbids training text can have this effect.
    """
    reversed_rows = [
        (title_attack_row(result, f), m)
        for f in findings
        if (m := f.measurement(name_auc(""))) is not None and m.high < 0.5
    ]
    parts = (
        f"{title}: members score lower than others, so read the other way "
        f"{phrases.format_number(1 - m.value)}"
        for title, m in reversed_rows
    )
    if reversed_rows:
        return [Paragraph(f"{'; '.join(parts)}. A gate reads an AUC either way.")]
    return []


def _build_membership_score_table_rows(finding: Finding) -> Iterator[tuple[str, ...]]:
    main = finding.measurement(name_auc(""))
    first = f"{'strongest' if finding.scores_tried else 'main'}: {main.note if main else ''}"
    adjusted = finding.measurement(ADJUSTED_AUC)
    if adjusted:
        cells = [phrases.NOTHING] * (len(FALSE_POSITIVES) + 2)
        title = f"adjusted: {adjusted.note}"
        yield title, phrases.format_measurement_value(adjusted), *cells
    for name, title in {"": first, **CONTROLS, **SCORES, **_list_plugin_scores(finding)}.items():
        auc = finding.measurement(name_auc(name))
        if auc is None:
            continue
        rates = []
        for rate in FALSE_POSITIVES:
            rates.append(finding.measurement(name_tpr_metric(name, rate)))
        partial = finding.measurement(name_partial_auc_metric(name))
        cells = []
        for m, rate in zip(rates, FALSE_POSITIVES, strict=True):
            cells.append(
                phrases.format_measurement_value(m)
                if m
                else f"needs {roc.count_threshold_nonmembers(rate):,} non-members"
            )
        cells.append(phrases.format_measurement_value(partial))
        yield (
            title,
            phrases.format_measurement_value(auc),
            *cells,
            rates[0].note if rates[0] else phrases.NOTHING,
        )


def _list_plugin_scores(finding: Finding) -> dict[str, str]:
    """Return the titles of scores that a plug-in added to this probe, by score name."""
    before = f"{name_auc('')}_"
    names = (m.name.removeprefix(before) for m in finding.measurements if m.name.startswith(before))
    return {
        name: f"{make_label(name)} (of the plug-in)"
        for name in names
        if name not in SCORES and name not in OF_TEXT
    }


def _build_copies_auc_blocks(result: AuditResult, findings: list[Finding]) -> list[Block]:
    def rows(f: Finding) -> Iterator[tuple[str, ...]]:
        for count, m in phrases.sort_repeats(f.by_repeats):
            yield count, *phrases.format_measurement_cells(m), m.note

    groups = tuple(
        Group(title_attack_row(result, f), tuple(rows(f))) for f in findings if f.by_repeats
    )
    caption = "The strongest score, by copies of members in the data; each against all non-members"
    head = ("Repetitions", "AUC", "95% interval", "n", "Score")
    if groups:
        return [Table("membership-repeats", caption, head, groups, frozenset({1, 2, 3}))]
    return []


# --- the curves
# -----------------------------------------------------------------------------------------------


def _build_roc_curve_blocks(result: AuditResult, details: SecretDetails) -> list[Block]:
    curves = []
    for f in select_membership_rows(result):
        for name, points in _list_roc_curves(details, f):
            curves.append((f, name, points))
    if not curves:
        return []
    series = tuple(
        Series(
            phrases.title_row(result, f),
            tuple(PlotPoint(x, y) for x, y in points),
            _title_membership_score(f, name),
        )
        for f, name, points in curves
    )
    groups = tuple(
        Group(
            f"{title_attack_row(result, f)} · {_title_membership_score(f, name)}",
            tuple(_build_roc_step_table_rows(points)),
        )
        for f, name, points in curves
    )
    title = "Members found by non-members mistaken for them"
    text = (
        "Both axes logarithmic, because the range of few false positives matters most; a curve "
        "begins at the fewest that these non-members can show. On the diagonal a score is no "
        "better than chance; a blind baseline above it needs no model to get there."
    )
    head = ("False positives", "Members found")
    axes = ("Non-members taken for members", "Members found")
    return [
        Figures((Figure("roc-plot", "roc", title, text, head, groups, series=series, axes=axes),))
    ]


def _list_roc_curves(
    details: SecretDetails, finding: Finding
) -> Iterator[tuple[str, list[tuple[float, float]]]]:
    """Yield the ROC curves of the strongest score, the blind score and the stacked score, by name.

    The blind score uses no model. The stacked score combines all scores; it is included only for
    the undefended model.
    """
    row = details.rows.get(finding.cell_key)
    names = ("", "blind", *(("stacked",) if finding.target == UNDEFENDED else ()))
    if row is None:
        return
    member = row.member
    no_scores = np.empty(0)
    for name in names:
        scores = row.values.get(name_score_column(name), no_scores)
        # A curve needs a score of every secret, and both members and non-members.
        if (
            len(scores)
            and len(scores) == len(member)
            and 0 < member.sum() < len(member)
            and not np.isnan(scores).any()
        ):
            yield name, roc.compute_roc_curve(scores[member], scores[~member])


def _title_membership_score(finding: Finding, name: str) -> str:
    main = finding.measurement(name_auc(""))
    return {**CONTROLS, **SCORES}.get(name) or (main.note if main else "")


def _build_roc_step_table_rows(points: list[tuple[float, float]]) -> Iterator[tuple[str, ...]]:
    """Yield table rows for a selection of the ROC curve's points.

    Points at low false-positive rates are selected densely, because they matter most.
    """
    if points:
        at = sorted({round(x) for x in np.geomspace(1, len(points), _SHOWN)})
    else:
        at = []
    for i in at:
        x, y = points[i - 1]
        yield f"{phrases.format_percent(x)}%", f"{phrases.format_percent(y)}%"


TOPICS = (
    Topic(
        "membership", "Membership", lambda m: _build_membership_tables(m.result), CHECK, 7, turn=7
    ),
    Topic(
        "roc",
        "Membership by false positives",
        lambda m: _build_roc_curve_blocks(m.result, m.details),
        CHECK,
        8,
    ),
)
