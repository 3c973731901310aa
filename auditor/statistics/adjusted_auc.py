"""Estimate the AUC of a membership score adjusted for how members differ from non-members.

If members and non-members are different kinds of text, even the scores of a model that saw neither
distinguish them. A logistic regression gives each record its propensity e, the probability of being
a member. The covariates depend on texts alone: the blind baseline, and two predictions of the score
itself, one from all features of the text and one from a few. Members have weight 1 - e and
non-members weight e (overlap weights: Li, Morgan and Zaslavsky 2018). Members and non-members then
have equal weighted means of each covariate. Zero-run auditing (arXiv 2605.14591) also corrects
audits by propensities. Differences that the covariates do not measure remain.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from auditor.core.arrays import Bools, Floats, Ints
from auditor.core.result import Measurement
from auditor.statistics.blind_classifier import (
    compute_cross_fit_deviation_factor,
    predict_scores_from_texts,
    standardise_columns,
)
from auditor.statistics.roc import AUC, compute_auc_interval, estimate_auc

# least effective number of records on each side: the number of equally weighted records
FEWEST = 20.0
_NO_PENALTY = 1e4
_ITERATIONS = 1000


@dataclass(frozen=True)
class OverlapWeights:
    """Weights of the records in the adjusted AUC of one score.

    The adjusted AUC compares members with non-members whose texts are similar, so that a difference
    of texts does not count as leakage.

    weights: (records,), with sum 1 over members and sum 1 over non-members.
    widen: factor on the standard deviation of the adjusted AUC.
    """

    weights: Floats
    widen: float


def weigh_scored_records(
    scores: Mapping[str, Floats],
    controls: Mapping[str, Floats],
    features: Any,
    member: Bools,
    group: Ints,
) -> dict[str, OverlapWeights]:
    """Return the weights of the records for each score, keyed by name.

    Return {} if `controls` has no score "blind".

    If a control score distinguishes members from non-members, the weights depend on fitted
    classifiers. In this case, `widen` is the factor of a cross-fitted AUC; otherwise it is 1.

    Args:
        scores: scores of the audited model, (records,) each, keyed by name.
        controls: scores that do not use the audited model, (records,) each, keyed by name.
        features: from `build_text_features`.
        member: (records,) True for members.
        group: (records,) a code that related records share.
    """
    if "blind" not in controls:
        return {}
    factor = compute_cross_fit_deviation_factor(member, group)
    is_above_chance = any(
        estimate_auc("", values[member], values[~member], widen=factor).low > 0.5
        for values in controls.values()
    )
    if not is_above_chance:
        factor = 1.0
    columns = np.column_stack(list(scores.values()))
    expected = predict_scores_from_texts(features, columns, member, group)
    weights = {}
    for i, name in enumerate(scores):
        covariates = standardise_columns(np.column_stack([*controls.values(), *expected[:, :, i]]))
        weights[name] = OverlapWeights(compute_overlap_weights(member, covariates), factor)
    return weights


def compute_overlap_weights(member: Bools, covariates: Floats) -> Floats:
    """Return (records,) overlap weights, which sum to 1 over members and to 1 over non-members.

    covariates: (records, k), each with mean 0 and standard deviation 1.
    """
    from sklearn.linear_model import LogisticRegression

    fitted = LogisticRegression(C=_NO_PENALTY, max_iter=_ITERATIONS).fit(covariates, member)
    propensity = fitted.predict_proba(covariates)[:, 1]
    weights: Floats = np.where(member, 1 - propensity, propensity)
    for side in (member, ~member):
        weights[side] /= max(weights[side].sum(), np.finfo(float).tiny)
    return weights


def estimate_adjusted_auc(
    name: str, scores: Floats, member: Bools, weights: Floats, note: str, widen: float
) -> tuple[Measurement, Floats]:
    """Return the weighted AUC and each record's contribution to it, of shape (records,).

    The contributions of the members average to the AUC, and so do those of the non-members. The AUC
    is NaN if the effective number of members or non-members is below `FEWEST`.
    widen: factor on the standard deviation.
    """
    member_weights = weights[member]
    other_weights = weights[~member]
    n_worth = []
    for side in (member_weights, other_weights):
        # effective number of records, 1 / (sum of squared weights) (Kish 1965)
        n_worth.append(side.any() / max(np.sum(side**2), np.finfo(float).tiny))
    worth = f"worth {n_worth[0]:.0f} members and {n_worth[1]:.0f} non-members"
    described = "; ".join(filter(None, (note, worth)))
    placements = _sum_weight_below(scores[member], scores[~member], other_weights)
    other_placements = 1 - _sum_weight_below(scores[~member], scores[member], member_weights)
    value = float(member_weights @ placements)
    parts = np.empty(len(scores))
    parts[member] = member_weights * placements * member.sum()
    parts[~member] = other_weights * other_placements * (~member).sum()
    n = int(member.sum())
    if min(n_worth) < FEWEST:
        described += f", fewer than the {FEWEST} of each that an AUC takes"
        return Measurement(name, math.nan, math.nan, math.nan, 0, AUC, described), parts
    # DeLong's variance, weighted: of two means by the influence of each record
    variance = np.sum((member_weights * (placements - value)) ** 2)
    variance += np.sum((other_weights * (other_placements - value)) ** 2)
    ends = compute_auc_interval(value, math.sqrt(variance), int(n_worth[0]), int(n_worth[1]), widen)
    return Measurement(name, value, *ends, n, AUC, described), parts


def _sum_weight_below(scores: Floats, others: Floats, weights: Floats) -> Floats:
    """Return, for each score, the total weight of the `others` below it; ties count half.

    others, weights: the other scores and their weights, (others,) each.
    """
    order = np.argsort(others, kind="stable")
    sums = np.concatenate([[0.0], np.cumsum(weights[order])])
    ordered = others[order]
    low = sums[np.searchsorted(ordered, scores)]
    result: Floats = (low + sums[np.searchsorted(ordered, scores, side="right")]) / 2
    return result
