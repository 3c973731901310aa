"""The fit and the folds of the blind baseline, against scikit-learn's."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedGroupKFold

from auditor.statistics.logistic_regression import assign_stratified_folds, fit_logistic_regression


@pytest.mark.parametrize(("n", "columns"), [(72, 3), (60, 150)])
def test_the_fit_is_the_optimum_of_scikit_learns_loss(n: int, columns: int) -> None:
    noise = np.random.default_rng(n)
    features = noise.normal(size=(n, columns))
    labels = noise.random(n) < 0.3
    weights, intercept = fit_logistic_regression(features, labels)
    twin = LogisticRegression(class_weight="balanced", max_iter=10_000, tol=1e-10)
    expected = twin.fit(features, labels).decision_function(features)
    assert features @ weights + intercept == pytest.approx(expected, abs=1e-5)


def test_classes_that_columns_separate_are_fitted_too() -> None:
    labels = np.arange(40) < 20
    features = np.where(labels, 1e4, -1e4)[:, None]
    weights, _ = fit_logistic_regression(features, labels)
    assert weights[0] > 0
    assert np.isfinite(weights).all()


@pytest.mark.parametrize(("n", "groups", "folds"), [(300, 120, 5), (72, 72, 5), (40, 4, 3)])
def test_folds_are_those_of_scikit_learn(n: int, groups: int, folds: int) -> None:
    noise = np.random.default_rng(groups)
    labels = noise.random(n) < 0.4
    group = noise.integers(0, groups, n)
    fold_of_record = assign_stratified_folds(labels, group, folds)
    twin = StratifiedGroupKFold(folds, shuffle=True, random_state=0)
    for fold, (_, expected) in enumerate(twin.split(np.zeros(n), labels, group)):
        assert np.flatnonzero(fold_of_record == fold).tolist() == expected.tolist()
