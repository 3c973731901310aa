"""The adjusted membership AUC: equal weights are the usual AUC, a difference in kind is no leak,
and a leak on top of it stays one."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from auditor.core.arrays import Bools, Floats
from auditor.core.result import Finding, Measurement
from auditor.core.secret_randomness import make_keyed_generator
from auditor.gate.policy import parse_gate_limits
from auditor.gate.rule_scope import select_strongest_group
from auditor.statistics import adjusted_auc, blind_classifier, roc
from auditor.statistics.metrics import ADJUSTED_AUC

N = 200


def draw_records(shift: float, leak: float, seed: int = 0) -> tuple[Floats, Bools, Floats]:
    """Draw features of texts, (N, 4), the members, and a score that goes by the first feature."""
    noise = make_keyed_generator("unlike sides", seed)
    member = np.arange(N) < N // 2
    features = noise.standard_normal((N, 4))
    features[:, 0] += shift * member
    return features, member, features[:, 0] + noise.standard_normal(N) + leak * member


def adjust(shift: float, leak: float, seed: int = 0) -> tuple[Measurement, Measurement]:
    """Return the AUC as it is and the adjusted AUC."""
    features, member, scores = draw_records(shift, leak, seed)
    group = np.arange(N)
    blind = blind_classifier.predict_membership(features, member, group)
    weights = adjusted_auc.weigh_scored_records(
        {"loss": scores}, {"blind": blind}, features, member, group
    )["loss"]
    adjusted, parts = adjusted_auc.estimate_adjusted_auc(
        "adjusted", scores, member, weights.weights, widen=weights.widen, note=""
    )
    if adjusted.n:
        for side in (member, ~member):
            assert parts[side].mean() == pytest.approx(adjusted.value)
    return roc.estimate_auc("raw", scores[member], scores[~member]), adjusted


def test_equal_weights_give_the_usual_auc_and_its_interval() -> None:
    _, member, scores = draw_records(0.5, 0.0)
    scores = scores.round(1)  # ties count half in both
    weights = np.full(N, 2 / N)
    usual = roc.estimate_auc("x", scores[member], scores[~member])
    weighted, _ = adjusted_auc.estimate_adjusted_auc(
        "x", scores, member, weights, note="", widen=1.0
    )
    assert weighted.value == pytest.approx(usual.value)
    assert (weighted.low, weighted.high) == pytest.approx((usual.low, usual.high), abs=1e-3)


def test_weights_give_both_sides_the_same_means() -> None:
    features, member, _ = draw_records(1.0, 0.0)
    weights = adjusted_auc.compute_overlap_weights(
        member, blind_classifier.standardise_columns(features)
    )
    means = [weights[side] @ features[side] for side in (member, ~member)]
    assert abs(features[member, 0].mean() - features[~member, 0].mean()) > 0.8
    assert np.abs(means[0] - means[1]).max() < 0.01


def test_a_difference_in_kind_is_no_leak_and_a_leak_on_top_of_it_is_one() -> None:
    raw, adjusted = adjust(1.0, 0.0)
    assert raw.low > 0.5 and adjusted.low <= 0.5 <= adjusted.high
    raw, adjusted = adjust(1.0, 1.5)
    assert raw.value > adjusted.value > adjusted.low > 0.5


def test_sides_with_hardly_a_text_in_common_give_no_number() -> None:
    raw, adjusted = adjust(6.0, 0.0)
    assert raw.value > 0.95 and math.isnan(adjusted.value) and adjusted.n == 0
    assert "worth" in adjusted.note


def test_a_limit_on_membership_is_one_on_the_adjusted_auc_if_the_sides_differ() -> None:
    measured = (
        Measurement("membership_auc", 0.9, 0.85, 0.95, 200, roc.AUC),
        Measurement(ADJUSTED_AUC, 0.5, 0.4, 0.6, 100, roc.AUC),
    )
    finding = Finding("undefended", "white-box", "membership", {}, (), "", None, "", measured)
    (limit,) = parse_gate_limits(["membership_auc=0.6"])
    assert select_strongest_group(finding, limit) == limit
    blind = Measurement("blind_auc", 0.8, 0.7, 0.9, 200, roc.AUC)
    unlike = replace(finding, measurements=(*measured, blind))
    assert select_strongest_group(unlike, limit).metric == ADJUSTED_AUC
    assert (
        select_strongest_group(replace(unlike, measurements=(measured[0], blind)), limit) == limit
    )


def test_without_a_blind_baseline_nothing_is_weighed() -> None:
    features, member, scores = draw_records(0.0, 0.0)
    assert not adjusted_auc.weigh_scored_records(
        {"loss": scores}, {"reference_alone": scores}, features, member, np.arange(N)
    )


def test_few_records_cannot_hide_a_difference_among_many_features() -> None:
    """One of 40 features differs and explains the score of a model that saw neither side."""
    differences = []
    recovered = []
    for seed in range(6):
        noise = make_keyed_generator("unlike sides of many features", seed)
        member = np.arange(100) < 50
        features = noise.standard_normal((100, 40))
        features[:, 0] += 1.25 * member
        scores = features[:, 0] + 0.5 * noise.standard_normal(100)
        group = np.arange(100)
        expected = blind_classifier.predict_scores_from_texts(
            features, scores[:, None], member, group
        )
        recovered.append([np.corrcoef(part[:, 0], features[:, 0])[0, 1] for part in expected])
        blind = blind_classifier.predict_membership(features, member, group)
        overlap = adjusted_auc.weigh_scored_records(
            {"loss": scores}, {"blind": blind}, features, member, group
        )["loss"]
        sides = [overlap.weights[side] @ features[side, 0] for side in (member, ~member)]
        differences.append(sides[0] - sides[1])
    by_all, by_few = np.mean(recovered, axis=0)
    assert by_all < 0.9 < by_few
    assert abs(np.mean(differences)) < 0.3


def test_the_few_features_of_many_records_are_all_features_fitted_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    features, member, scores = draw_records(1.0, 1.0)
    monkeypatch.delattr(blind_classifier, "_screen_features")
    by_all, by_few = blind_classifier.predict_scores_from_texts(
        features, scores[:, None], member, np.arange(N)
    )
    assert np.isfinite(by_all).all() and (by_all == by_few).all()
