"""Membership scores: published vectors, numbers worked out by hand, and naive twins written token
by token."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import multivariate_normal, norm
from sklearn.covariance import ledoit_wolf

from auditor.core.secret_randomness import make_keyed_generator
from auditor.statistics import membership, roc
from auditor.statistics.membership import WINDOWS

Wrong = list[bool]


def floats(*values: float) -> np.ndarray:
    return np.array(values, dtype=float)


@pytest.mark.parametrize(
    ("delta", "wrong", "ratio"),
    # formulas.md C2, of EZ-MIA (2601.12104): P / N, and 3 as log 1.0986122887, share of positives
    # .75
    [
        ([0, 2, -1, 9, 1], [False, True, True, False, True], 3.0),
        ([0, 0.5, -1.5, -0.5, 0], [False, True, True, True, True], 0.25),
    ],
)
def test_error_zone_is_the_published_ratio_as_a_share(
    delta: list[float], wrong: Wrong, ratio: float
) -> None:
    share = membership.score_error_zone(floats(*delta), np.array(wrong))
    assert share == pytest.approx(ratio / (1 + ratio)) and share / (1 - share) == pytest.approx(
        ratio
    )
    if ratio == 3:
        assert share == 0.75 and math.log(share / (1 - share)) == pytest.approx(1.0986122887)


def test_error_zone_of_texts_without_an_end() -> None:
    """On top where nothing is wrong or nothing lost, at the bottom where nothing is gained; NaN
    where nobody knows."""
    none = np.array([False, False])
    every = ~none
    assert membership.score_error_zone(floats(-1, -2), none) == 2.0
    assert (
        membership.score_error_zone(floats(1, 3), every) == 1.8
        and membership.score_error_zone(floats(0, 0), every) == 1.0
    )
    assert membership.score_error_zone(floats(-1, 0), every) == 0.0
    assert membership.score_error_zone(floats(math.inf, -2), every) == 1.0
    assert membership.score_error_zone(floats(math.inf, 2), every) == 2.0
    assert membership.score_error_zone(floats(-math.inf, 2), every) == 0.0
    assert math.isnan(membership.score_error_zone(floats(math.inf, -math.inf), every))
    assert math.isnan(membership.score_error_zone(floats(math.nan, 1), every))


def test_error_zone_orders_as_the_ratio_with_a_little_added_to_its_denominator() -> None:
    """P / (N + e) for a small e, wherever something is wrong: ties of P / N at infinity are
    none."""
    noise = make_keyed_generator("zone")
    found, naive = [], []
    for i in range(200):
        delta = noise.normal(0.5, 1, 6) if i % 2 else noise.uniform(0, 1, 6)
        found.append(membership.score_error_zone(delta, np.ones(6, dtype=bool)))
        naive.append(delta[delta > 0].sum() / (-delta[delta < 0].sum() + 1e-9))
    assert (np.argsort(found) == np.argsort(naive)).all() and len(set(found)) == 200


def test_window_comparison_by_the_published_vectors() -> None:
    """formulas.md C2, of WBC (2601.02751)."""
    assert membership.score_windows(floats(2, -1, 0, 2), (2,)) == pytest.approx(2 / 3)
    texts = ([1, 1, -5], [-1, 2], [0.7])
    assert [membership.score_windows(floats(*text), (2, 3)) for text in texts] == [0.25, 1.0, 1.0]


def test_the_windows_are_those_of_the_formula() -> None:
    """Ten lengths from 2 to 40 in equal ratios."""
    assert tuple(round(2 * 20 ** (i / 9)) for i in range(10)) == WINDOWS


def test_window_comparison_against_a_naive_twin() -> None:
    noise = make_keyed_generator("windows")
    for length in (1, 3, 17, 60):
        delta = noise.normal(size=length)
        shares = []
        for window in WINDOWS:
            w = min(window, length)
            sums = [sum(delta[i : i + w]) for i in range(length - w + 1)]
            shares.append(sum(s > 0 for s in sums) / len(sums))
        assert membership.score_windows(delta) == pytest.approx(sum(shares) / len(shares))


def test_min_k_takes_the_lowest_share_and_at_least_one() -> None:
    values = floats(-1, -5, -3, -2, -4)
    assert membership.average_lowest(values, 0.4) == -4.5
    assert membership.average_lowest(values, 0.1) == -5
    assert membership.average_lowest(values, 1.0) == -3


def test_min_k_plus_standardises_by_the_distribution_itself() -> None:
    """A distribution of 3/4 and 1/4: mean and deviation of log p by hand; a distribution without
    deviation says 0, not 0/0."""
    p = floats(0.75, 0.25)
    mean = float(p @ np.log(p))
    deviation = math.sqrt(float(p @ (np.log(p) - mean) ** 2))
    found = membership.standardise_log_probs(
        np.log(p), floats(mean, mean), floats(deviation, deviation)
    )
    assert found == pytest.approx([math.sqrt(1 / 3), -math.sqrt(3)])
    flat = membership.standardise_log_probs(floats(-1, -math.inf), floats(-1, -1), floats(0, 0))
    assert flat.tolist() == [0.0, -math.inf]


def test_confidence_is_the_logit_and_stays_finite_where_a_model_is_sure() -> None:
    p = floats(0.2, 0.5, 0.9)
    assert membership.compute_logit_confidence(np.log(p)) == pytest.approx(np.log(p / (1 - p)))
    assert np.isfinite(membership.compute_logit_confidence(floats(0.0))).all()
    assert (
        membership.compute_logit_confidence(floats(0.0))[0]
        > membership.compute_logit_confidence(floats(-1e-4))[0]
    )


SAW = np.array([[True, True, False, False], [False, True, True, False], [True, False, False, True]])


def test_lira_against_a_naive_twin() -> None:
    """Below 64 models one deviation of all records for each kind, each record about its own
    mean."""
    noise = make_keyed_generator("lira")
    target, references = noise.normal(size=3), noise.normal(size=(3, 4))
    means, square, free = {}, {True: 0.0, False: 0.0}, {True: 0, False: 0}
    for kind in (True, False):
        for i in range(3):
            chosen = [references[i, j] for j in range(4) if SAW[i, j] == kind]
            means[kind, i] = sum(chosen) / len(chosen)
            square[kind] += sum((x - means[kind, i]) ** 2 for x in chosen)
            free[kind] += len(chosen) - 1
    spread = {kind: math.sqrt(square[kind] / free[kind]) for kind in (True, False)}
    expected = [
        norm.logpdf(target[i], means[True, i], spread[True])
        - norm.logpdf(target[i], means[False, i], spread[False])
        for i in range(3)
    ]
    assert membership.compute_lira_ratio(target, references, SAW) == pytest.approx(expected)


def test_lira_is_offline_for_all_where_one_record_was_seen_by_nobody() -> None:
    """Else members alone would have models that saw them, and having some would tell who is one."""
    saw = SAW.copy()
    saw[1] = False
    assert membership.has_both_model_kinds(SAW) and not membership.has_both_model_kinds(saw)
    noise = make_keyed_generator("lira offline")
    target, references = noise.normal(size=3), noise.normal(size=(3, 4))
    found = membership.compute_lira_ratio(target, references, saw)
    rows = [[references[i, j] for j in range(4) if not saw[i, j]] for i in range(3)]
    free = sum(len(row) - 1 for row in rows)
    spread = math.sqrt(sum(sum((x - np.mean(row)) ** 2 for x in row) for row in rows) / free)
    assert found == pytest.approx(
        [norm.logcdf(target[i], np.mean(rows[i]), spread) for i in range(3)]
    )


def test_lira_says_nothing_where_no_deviation_can_be_told() -> None:
    one = np.array([[True, False], [False, True]])
    assert np.isnan(membership.compute_lira_ratio(floats(1, 2), np.ones((2, 2)), one)).all()


def test_lira_takes_one_record_of_two_models_for_a_deviation() -> None:
    """That of all records together: the other record's only model of the kind says nothing of
    it."""
    saw = np.array([[False, False, True], [True, True, False]])
    found = membership.compute_lira_ratio(
        floats(1, 2), np.array([[0.0, 2.0, 5.0], [5.0, 6.0, 1.0]]), saw
    )
    square = {"out": 2.0, "in": 0.5}  # about each record's own mean, with one degree of freedom
    expected = [
        norm.logpdf(1, 5, square["in"] ** 0.5) - norm.logpdf(1, 1, square["out"] ** 0.5),
        norm.logpdf(2, 5.5, square["in"] ** 0.5) - norm.logpdf(2, 1, square["out"] ** 0.5),
    ]
    assert found == pytest.approx(expected)


def test_lira_has_a_deviation_a_record_from_64_models_on() -> None:
    noise = make_keyed_generator("many")
    saw = np.array([[True] * 32 + [False] * 32] * 2)
    references = noise.normal(size=(2, 64)) * np.array([[1.0], [5.0]])
    found = membership.compute_lira_ratio(floats(0, 0), references, saw)
    own = [
        norm.logpdf(0, row[:32].mean(), row[:32].std(ddof=1))
        - norm.logpdf(0, row[32:].mean(), row[32:].std(ddof=1))
        for row in references
    ]
    assert found == pytest.approx(own)


def test_lira_by_tokens_is_the_ratio_of_two_normal_densities() -> None:
    noise = make_keyed_generator("token lira")
    saw = np.array([True] * 5 + [False] * 4)
    references, target = noise.normal(size=(9, 3)), noise.normal(size=3)
    # differences to the mean of the models before: independent, and of the same covariance
    residuals = []
    for kind in (False, True):
        scores = references[saw == kind]
        for i in range(1, len(scores)):
            residuals.append((scores[i] - scores[:i].mean(0)) / math.sqrt(1 + 1 / i))
    shrunk = ledoit_wolf(np.array(residuals), assume_centered=True)[0]
    inside, outside = references[saw].mean(0), references[~saw].mean(0)
    expected = multivariate_normal.logpdf(target, inside, shrunk)
    expected -= multivariate_normal.logpdf(target, outside, shrunk)
    found = membership.compute_token_lira_ratio(target, references, saw)
    assert found == pytest.approx(expected)


def test_lira_by_one_token_is_the_ratio_of_two_normals() -> None:
    """Nothing is shrunk in one dimension, so a value solved by hand is what comes out."""
    references = np.array([[0.0], [2.0], [5.0], [7.0]])
    saw = np.array([False, False, True, True])
    # means 1 and 6; squares 1 + 1 + 1 + 1 over 4 - 2 degrees of freedom
    deviation = math.sqrt(2)
    expected = norm.logpdf(4, 6, deviation) - norm.logpdf(4, 1, deviation)
    found = membership.compute_token_lira_ratio(floats(4), references, saw)
    assert found == pytest.approx(expected)
    few = np.array([[0.0], [2.0], [1.0]])  # a mean of 1, a variance of 2 / 2
    nobody = np.zeros(3, dtype=bool)
    offline = membership.compute_token_lira_ratio(floats(4), few, nobody)
    assert offline == pytest.approx(norm.logcdf(4, 1, 1))
    for count in (1, 2):  # no two residuals to estimate a covariance from
        alone = membership.compute_token_lira_ratio(floats(4), few[:count], nobody[:count])
        assert math.isnan(alone)
    alike = membership.compute_token_lira_ratio(floats(4), np.ones((3, 1)), nobody)
    assert math.isnan(alike)


def test_lira_by_tokens_finds_what_the_mean_hides() -> None:
    """Members raise one token in twelve, among tokens whose noise is shared."""
    noise = make_keyed_generator("one token")
    saw = np.array([True, False] * 8)
    ranks = []
    for member in (True, False) * 150:
        common = noise.normal(size=17)[:, None] * 3
        scores = common + noise.normal(size=(17, 12)) / 2
        scores[:16, 4] += 2.0 * saw
        scores[16, 4] += 2.0 * member
        by_tokens = membership.compute_token_lira_ratio(scores[16], scores[:16], saw)
        means = scores.mean(1)
        by_mean = membership.compute_lira_ratio(means[16:], means[None, :16], saw[None])[0]
        ranks.append((member, by_tokens, by_mean))
    member, by_tokens, by_mean = np.array(ranks).T
    inside = member == 1
    assert roc.auc(by_tokens[inside], by_tokens[~inside]) > 0.9
    assert roc.auc(by_mean[inside], by_mean[~inside]) < 0.7


def test_rmia_takes_the_mean_over_both_kinds_or_tells_one_from_the_other() -> None:
    """formulas.md A9: online (in + out) / 2; offline (1 + a)/2 out + (1 - a)/2 with a = 0.3."""
    p = np.array([[0.5, 0.3, 0.2, 0.1]] * 3)
    target = np.log(floats(0.4, 0.4, 0.4))
    online = [
        (0.5 + 0.3 + 0.2 + 0.1) / 4,
        ((0.3 + 0.2) / 2 + (0.5 + 0.1) / 2) / 2,
        ((0.5 + 0.1) / 2 + 0.25) / 2,
    ]
    found = membership.compute_rmia_log_ratio(target, np.log(p), SAW)
    assert np.exp(found) == pytest.approx([0.4 / x for x in online])
    offline = membership.compute_rmia_log_ratio(target, np.log(p), np.zeros_like(SAW))
    assert np.exp(offline) == pytest.approx([0.4 / (0.65 * 0.275 + 0.35)] * 3)


def test_rmia_holds_a_record_against_all_others_of_the_population_and_never_itself() -> None:
    ratio = floats(3, 1, 2, 2, 5)
    population = np.array([False, True, True, True, False])
    group = np.array([0, 1, 2, 2, 1])  # the last record nearly repeats the second
    found = membership.compute_rmia_share(ratio, population, group)
    naive = []
    for i in range(5):
        z = [ratio[j] for j in range(5) if population[j] and group[j] != group[i]]
        naive.append(sum(x < ratio[i] for x in z) / len(z))
    assert found.tolist() == naive == [1.0, 0.0, 1.0, 1.0, 1.0]
    assert np.isnan(membership.compute_rmia_share(ratio[:1], population[1:2], group[:1])).all()
