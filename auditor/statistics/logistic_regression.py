"""Fit a balanced logistic regression and divide related records into stratified folds.

Both do what scikit-learn's `LogisticRegression(class_weight="balanced")` and
`StratifiedGroupKFold(shuffle=True, random_state=0)` do, which take a second to import and, for a
hundred thousand groups, half a minute to divide. The fit goes to the optimum, where scikit-learn
stops within its tolerance.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy.special import expit

from auditor.core.arrays import Bools, Floats, Ints

_STEPS = 100  # Newton steps, at most
_PRODUCTS = 500  # with the Hessian, of a step, at most
_CLOSE = 1e-9  # of the gradient's norm, relative to the first


def fit_logistic_regression(features: Any, labels: Bools) -> tuple[Floats, float]:
    """Return the (k,) weights and the intercept that minimise the balanced loss plus |w|^2 / 2.

    features: (n, k), an array or a sparse matrix. Balanced: both classes weigh n / 2. By Newton's
    method, each step with conjugate gradients: no (k, k) matrix is made.
    """
    n, k = features.shape
    weights = np.where(labels, n / (2 * labels.sum()), n / (2 * (~labels).sum()))
    signs = np.where(labels, 1.0, -1.0)
    transposed = features.T
    point = np.zeros(k + 1)  # the last entry is the intercept, which has no penalty

    def compute_margins(at: Floats) -> Floats:
        return features @ at[:-1] + at[-1]

    def compute_loss(at: Floats) -> float:
        losses = np.logaddexp(0.0, -signs * compute_margins(at))
        return float(weights @ losses + at[:-1] @ at[:-1] / 2)

    def add_penalty(per_record: Floats, at: Floats) -> Floats:
        return np.append(transposed @ per_record + at[:-1], per_record.sum())

    first_norm = 0.0
    for _ in range(_STEPS):
        odds = expit(-signs * compute_margins(point))
        gradient = add_penalty(-weights * signs * odds, point)
        norm = float(np.linalg.norm(gradient))
        first_norm = first_norm or norm
        if norm <= _CLOSE * max(first_norm, 1.0):
            break
        curvature = weights * odds * (1 - odds)
        step = _solve_positive_definite(
            lambda v, curvature=curvature: add_penalty(curvature * compute_margins(v), v),
            -gradient,
        )
        size = 1.0
        loss = compute_loss(point)
        slope = float(gradient @ step)
        # The loss is convex: a step that is short enough lowers it, down to rounding.
        while size > 1e-6 and compute_loss(point + size * step) > loss + 1e-4 * size * slope:
            size /= 2
        point = point + size * step
    return point[:-1], float(point[-1])


def _solve_positive_definite(multiply: Any, target: Floats) -> Floats:
    """Return x with A x = target for a positive definite A, given by its product with a vector."""
    x = np.zeros_like(target)
    residual = target.copy()
    direction = residual
    start = float(residual @ residual)
    square = start
    for _ in range(_PRODUCTS):
        if square <= 1e-20 * start:
            break
        product = multiply(direction)
        size = square / float(direction @ product)
        x = x + size * direction
        residual = residual - size * product
        previous = square
        square = float(residual @ residual)
        direction = residual + square / previous * direction
    return x


def assign_stratified_folds(labels: Bools, group: Ints, folds: int) -> Ints:
    """Return the (n,) fold of each record: whole groups, and the classes' shares alike in all."""
    _, group_indices = np.unique(group, return_inverse=True)
    n_groups = int(group_indices.max()) + 1
    counts = np.stack(
        [np.bincount(group_indices[labels == side], minlength=n_groups) for side in (False, True)],
        axis=1,
    ).astype(float)
    order = np.arange(n_groups)
    np.random.RandomState(0).shuffle(order)
    # Unequal groups first; a stable sort keeps equal ones in their shuffled order.
    order = order[np.argsort(-counts[order].std(axis=1), kind="stable")]
    group_folds = np.empty(n_groups, dtype=np.int64)
    fold_counts = np.zeros((folds, 2))
    totals = counts.sum(0)
    each_fold = np.eye(folds)[:, :, None]
    for index in order.tolist():
        # (folds, folds, 2): the counts of all folds if the group went to each of them
        proposed = fold_counts + each_fold * counts[index]
        unevenness = (proposed / totals).std(axis=1).mean(axis=1).tolist()
        best = 0
        for fold in range(1, folds):
            lead = unevenness[best] - unevenness[fold]
            is_close = abs(lead) <= 1e-8 + 1e-5 * unevenness[best]
            if lead > 0 or (is_close and fold_counts[fold].sum() < fold_counts[best].sum()):
                best = fold
        group_folds[index] = best
        fold_counts[best] += counts[index]
    return group_folds[group_indices]
