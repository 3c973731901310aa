"""Recompute measurements from a run's stored per-secret values, so that a gate can check them."""

from __future__ import annotations

import math

import numpy as np

from auditor.core.arrays import Floats
from auditor.core.result import Measurement
from auditor.statistics import roc
from auditor.statistics.intervals import (
    estimate_bounded_mean,
    estimate_mean,
    subtract_nonmember_mean,
)
from auditor.statistics.judging import SCORE
from auditor.statistics.metrics import (
    CONTROLS,
    DRAWN,
    EXCESS,
    RECALL,
    SHARES,
    Columns,
    Metric,
    find_metric,
    name_auc,
    name_nonmember_metric,
    name_score_column,
)
from auditor.statistics.ranking import rank_guesses
from auditor.statistics.strongest_score import (
    CandidateScore,
    ScoredRecords,
    bound_strongest_auc,
    compute_simultaneous_widening,
)


def recompute_metric(metric: Metric, members: Columns, others: Columns) -> tuple[float, int] | None:
    """Recompute the metric and its n from stored columns; return None if columns are missing.

    members, others: (secrets,) columns of members and of non-members, keyed by name.
    """
    columns = members if metric.members else others
    if metric.scores:
        return _recompute_membership_metric(metric, members, others)
    if metric.signed and metric.values is not None:
        column = metric.per_secret_column_name.removeprefix(EXCESS)
        if column not in members:
            return None
        means = compute_mean(members[column]), compute_mean(others[column])
        return means[0] - means[1], len(members[column]) + len(others[column])
    if metric.name == SCORE or any(column not in columns for column in metric.columns_to_recompute):
        return None
    if metric.errors is not None:
        n = len(columns[RECALL])
        hit, before = rank_guesses(columns[RECALL] == 1, columns[SCORE])
        return compute_mean((hit & (before < metric.compute_wrong_guess_limit(n))).astype(float)), n
    if (
        not metric.members and metric.per_secret_column_name == DRAWN
    ):  # its baseline counts n-grams of held-out text, not texts
        return None
    values = columns[metric.per_secret_column_name]
    if np.isfinite(values).all():
        return (compute_mean(values), len(values))
    return None


def repeat_measurement(metric: Metric, members: Columns, others: Columns) -> Measurement | None:
    """Recompute the measurement and its interval from a probe's stored columns.

    Return None if the columns do not suffice.
    """
    if metric.signed and metric.name.startswith(EXCESS):
        base = metric.name.removeprefix(EXCESS)
        member_mean, floor = (
            repeat_measurement(find_metric(name), members, others)
            for name in (base, name_nonmember_metric(base))
        )
        if member_mean is None or floor is None:
            return None
        return subtract_nonmember_mean(metric.name, member_mean, floor)
    if (
        metric.errors is not None
        or (recomputed := recompute_metric(metric, members, others)) is None
        or not recomputed[1]
    ):
        return None
    if metric.scores:
        sides = members[metric.scores], others[metric.scores]
        if metric.rate:
            return roc.estimate_tpr(metric.name, *sides, metric.rate)
        if metric.below:
            return roc.estimate_partial_auc(metric.name, *sides, metric.below)
        if metric.name == name_auc(""):
            return _repeat_strongest_auc(members, others)
        return roc.estimate_auc(metric.name, *sides)
    values = (members if metric.members else others)[metric.per_secret_column_name]
    # A share that is not a count of 0s and 1s has no exact interval.
    if metric.unit == "share" and not np.isin(values, (0, 1)).all():
        return None
    if metric.unit not in SHARES and values.min() >= 0:
        # The largest possible value is not stored. Only the recorded interval allows for it.
        most = max(values.max(), np.finfo(float).tiny)
        return estimate_bounded_mean(metric.name, values, most, metric.unit, metric.note)
    return estimate_mean(metric.name, values, metric.unit, metric.note)


def _repeat_strongest_auc(members: Columns, others: Columns) -> Measurement:
    """Recompute the AUC of the strongest stored score, corrected for the number of scores."""
    scores = {}
    for c in list_strongest_score_columns(members):
        scores[c] = CandidateScore(np.concatenate([members[c], others[c]]), c)
    member = np.arange(len(members[c]) + len(others[c])) < len(members[c])
    usable = {c: s for c, s in scores.items() if not np.isnan(s.values).any()} or scores
    widening = compute_simultaneous_widening(list(usable.values()), ScoredRecords(member, {}))
    return bound_strongest_auc(usable, member, ~member, widening)


def list_strongest_score_columns(columns: Columns) -> list[str]:
    """Return the score columns from which `membership_auc` takes the strongest score.

    These are the columns of all named scores except controls. The unnamed column is added unless it
    repeats a named column.
    """
    main = name_score_column("")
    controls = set(map(name_score_column, CONTROLS))
    names = [name for name in columns if name.startswith(f"{main}_") and name not in controls]
    # The unnamed column repeats a named one, except in released text.
    if any(np.array_equal(columns[name], columns[main]) for name in names):
        return names
    return [main, *names]


def _recompute_membership_metric(
    metric: Metric, members: Columns, others: Columns
) -> tuple[float, int] | None:
    if any(metric.scores not in side or not len(side[metric.scores]) for side in (members, others)):
        return None
    sides = members[metric.scores], others[metric.scores]
    if metric.rate:
        return roc.tpr_at_fpr(*sides, metric.rate).value, len(sides[0])
    if metric.below:
        return roc.bound_partial_auc(*sides, metric.below).value, len(sides[0])
    return roc.auc(*sides), sum(map(len, sides))


def compute_mean(values: Floats) -> float:
    """Return the mean; NaN for no values."""
    return float(values.mean()) if len(values) else math.nan
