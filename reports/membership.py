"""Report how well scores separate members from non-members, next to baselines without a model."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import starmap

import numpy as np

from auditor.conclusions.secret_details import SecretDetails
from auditor.core.nouns import UNDEFENDED
from auditor.core.result import Finding
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
from auditor.reports.topics import CHECK, ReportMaterial, Topic, title_attack_row
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
    "chance. The strongest score is the one whose interval is farthest from chance: "
    "membership_auc, which the verdict and gates read. The AUCs have intervals that hold "
    "for all scores and all groups of copies together (bootstrap of the maximum), so the best of "
    "many is not overstated. TPR at an FPR is the share of members above a threshold, the k-th "
    "highest of n non-members, with k = (n + 1) times the FPR, rounded down: other non-members "
    "exceed it at this rate in expectation. A member that ties with it does not count. With too "
    "few non-members the interval has no lower end above 0. The blind baseline and the reference "
    "have not seen the model: if they are above 0.5, members differ from non-members in kind, and "
    "only the adjusted AUC decides. It gives more weight to records whose side a classifier of the "
    "text cannot tell, and does not adjust for differences that tokens and lengths do not show. "
    "Stacked and blind scores are cross-fitted: a record's score uses no label of the record or "
    "of its near-duplicates."
)
_OLD_NOTE = (
    " An older version made this run: the first line is a score named beforehand, and the "
    "intervals are not corrected. The verdict takes the strongest score and corrects its interval "
    "for the number of scores."
)


def _build_membership_tables(material: ReportMaterial) -> Iterator[Block]:
    result = material.result
    rows = phrases.list_measured_findings(result, name_auc(""))
    if not rows:
        return
    columns = ["Score", "AUC"]
    for rate in FALSE_POSITIVES:
        columns.append(f"TPR at {100 * rate:g}% FPR")
    columns.append(f"Mean TPR up to {100 * BELOW:g}% FPR")
    columns.append(f"Counts at {100 * FALSE_POSITIVES[0]:g}% FPR")
    groups = []
    by_copies = []
    reversed_scores = []
    for f in rows:
        title = title_attack_row(result, f)
        groups.append(Group(title, tuple(_build_membership_score_table_rows(f))))
        copies = []
        for count, m in phrases.sort_repeats(f.by_repeats):
            copies.append((count, *phrases.format_measurement_cells(m), m.note))
        if copies:
            by_copies.append(Group(title, copies))
        main = f.measurement(name_auc(""))
        if main is not None and main.high < 0.5:
            reversed_scores.append(
                f"{title}: members score lower than non-members; reversed, the AUC is "
                f"{phrases.format_number(1 - main.value)}"
            )
    caption = "How well each score separates members from non-members"
    yield Table("membership-table", caption, tuple(columns), groups, {1, 2, 3, 4})
    if reversed_scores:
        yield Paragraph(f"{'; '.join(reversed_scores)}. A gate reads an AUC either way.")
    caption = "The strongest score, by copies of members in the data; each against all non-members"
    head = ("Copies", "AUC", "95% interval", "n", "Score")
    yield Table("membership-repeats", caption, head, by_copies, {1, 2, 3})
    yield Paragraph(_NOTE if all(f.scores_tried for f in rows) else f"{_NOTE}{_OLD_NOTE}")


def _build_membership_score_table_rows(finding: Finding) -> Iterator[tuple[str, ...]]:
    main = finding.measurement(name_auc(""))
    first = f"{'strongest' if finding.scores_tried else 'main'}: {main.note if main else ''}"
    adjusted = finding.measurement(ADJUSTED_AUC)
    if adjusted:
        cells = []
        for rate in FALSE_POSITIVES:
            # Without a number in any row, all cells are equal, and the caption has the reason.
            is_measured = finding.measurement(name_tpr_metric("", rate))
            cells.append(phrases.NOTHING if is_measured else _format_needed_nonmembers(rate))
        cells += [phrases.NOTHING] * 2
        title = f"adjusted: {adjusted.note}"
        yield title, phrases.format_measurement_value(adjusted), *cells
    for name, title in {"": first, **CONTROLS, **SCORES, **_list_plugin_scores(finding)}.items():
        auc = finding.measurement(name_auc(name))
        if auc is None:
            continue
        cells = []
        for rate in FALSE_POSITIVES:
            cells.append(_format_needed_nonmembers(rate))
            if m := finding.measurement(name_tpr_metric(name, rate)):
                cells[-1] = phrases.format_measurement_value(m)
        partial = finding.measurement(name_partial_auc_metric(name))
        counts = finding.measurement(name_tpr_metric(name, FALSE_POSITIVES[0]))
        yield (
            title,
            phrases.format_measurement_value(auc),
            *cells,
            phrases.format_measurement_value(partial),
            counts.note if counts else phrases.NOTHING,
        )


def _format_needed_nonmembers(rate: float) -> str:
    return f"needs {roc.count_threshold_nonmembers(rate):,} non-members"


def _list_plugin_scores(finding: Finding) -> dict[str, str]:
    """Return the titles of scores that a plug-in added to this probe, by score name."""
    scores = {}
    for m in finding.measurements:
        name = m.name.removeprefix(f"{name_auc('')}_")
        if name != m.name and name not in SCORES and name not in OF_TEXT:
            scores[name] = f"{make_label(name)} (of the plug-in)"
    return scores


# --- the curves ---


def _build_roc_curve_blocks(material: ReportMaterial) -> list[Block]:
    result = material.result
    series = []
    groups = []
    for f in phrases.list_measured_findings(result, name_auc("")):
        main = f.measurement(name_auc(""))
        for name, points in _list_roc_curves(material.details, f):
            score = {**CONTROLS, **SCORES}.get(name) or (main.note if main else "")
            curve = list(starmap(PlotPoint, points))
            series.append(Series(phrases.title_row(result, f), curve, score))
            rows = []
            # Points at low false-positive rates are dense, because they matter most.
            for i in np.unique(np.geomspace(1, len(points), _SHOWN).round().astype(int)):
                rows.append(tuple(f"{phrases.format_percent(rate)}%" for rate in points[i - 1]))
            groups.append(Group(f"{title_attack_row(result, f)} · {score}", rows))
    if not series:
        return []
    title = "Members found, by share of false positives"
    text = (
        "Both axes logarithmic, because the range of few false positives matters most; a curve "
        "begins at the fewest that these non-members can show. On the diagonal a score is no "
        "better than chance; a blind baseline above it needs no model to get there."
    )
    head = ("False positives", "Members found")
    axes = ("Non-members taken for members", "Members found")
    figure = Figure("roc-plot", "roc", title, text, head, groups, series=series, axes=axes)
    return [Figures([figure])]


def _list_roc_curves(
    details: SecretDetails, finding: Finding
) -> Iterator[tuple[str, list[tuple[float, float]]]]:
    """Yield (name, ROC curve) of the strongest score, the blind score and the stacked score.

    The blind score uses no model. The stacked score combines all scores, and is included only for
    the undefended model.
    """
    row = details.values_by_cell.get(finding.cell_key)
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


TOPICS = (
    Topic("membership", "Membership", _build_membership_tables, CHECK, 7, turn=7),
    Topic(
        "roc",
        "Membership by false positives",
        _build_roc_curve_blocks,
        CHECK,
        8,
    ),
)
