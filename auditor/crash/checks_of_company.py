"""Check that a record's gradient does not depend on the other texts of its batch.

If the loss is a mean over the tokens of a batch, a record is weighted by its share of the batch's
tokens. Such a mean also divides by the number of records, unless the training multiplies by this
number again ("undoes the mean"). Clipping hides both effects if gradients exceed the clipping norm.
If gradients are shorter, adding a text to the batch shortens all of them. The added record then
moves the sum by more than its own clipped gradient.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
from scipy import stats

from auditor.core.arrays import Floats
from auditor.crash.claim import LoopClaim
from auditor.crash.reaches import estimate_mean_reach, is_clipping_per_tensor
from auditor.crash.training_specimen import Record, make_company_specimen
from auditor.crash.verdicts import (
    SHARE,
    UNKNOWN,
    LoopCheck,
    WatchedTrainings,
    WorstViolation,
    count_detectable_errors,
    judge_crash_test_p_value,
)
from auditor.crash.watch import ObservedStep, TrainingTrace

_COLLINEAR = 1e-10  # relative to the largest eigenvalue of the normal equations: rounding
# clipping norms: longer gradients suggest a loop that expects a mean and does not undo it
_DIVIDED = 1.5


def check_company_dependence(runs: WatchedTrainings) -> LoopCheck:
    """Check that a record's clipped gradient does not depend on the other texts in its batch."""
    would = "a loss that is a mean over the tokens or the records of a batch"
    if not runs.company:
        message = "no clipping norm is claimed with which gradients could be compared"
        return LoopCheck(UNKNOWN, message, would)
    records = make_company_specimen(runs.claim.max_grad_norm).make_crash_test_records(
        runs.company[0].n
    )
    steps = list(itertools.chain.from_iterable(trace.measured_steps for trace in runs.company))
    # With clipping by tensor, a record's contribution is not a multiple of its gradient: its reach
    # along the gradient follows the batch's size.
    weights = list(_WEIGHTS)
    if is_clipping_per_tensor(steps, runs.whitened_shares or {}):
        weights = weights[:1]
    fits = {}
    for weight in weights:
        for company, by_pass in (("pass", True), ("step", False)):
            fit = _fit_company_weight(steps, records, runs.claim.max_grad_norm, weight, by_pass)
            if fit:
                fits[weight, company] = fit
    if not fits:
        return LoopCheck(UNKNOWN, "no record was read with texts of other lengths", would)
    weight, company = max(fits, key=lambda name: fits[name][0] / fits[name][1])
    slope, error = fits[weight, company]
    unit, among = runs.claim.noise_multiplier, len(_WEIGHTS) * 2
    most = max(_list_least_errors(steps, fits, runs.claim))
    needed = count_detectable_errors(among) * most * unit
    would += f" (1), or {needed:.2f} of that"
    if needed > 1 and slope / error < float(stats.norm.isf(SHARE / among)):
        message = (
            "gradients are too small next to the noise to show whether they depend on the other "
            "texts"
        )
        return LoopCheck(UNKNOWN, message, would)
    return judge_crash_test_p_value(
        min(1.0, among * float(stats.norm.sf(slope / error))),
        f"a record's gradient is {_WEIGHTS[weight]} the texts of its {company}: one record moves "
        "the others' gradients",
        "a record's gradient depends neither on the lengths nor on the number of the other texts "
        "of its batch",
        would,
        lambda: WorstViolation(
            f"{slope * unit:.2f} ± {1.96 * error * unit:.2f} of what such a mean does", "0"
        ),
    )


# Effect of a mean over a batch on a record's gradient.
_WEIGHTS = {
    "tokens, undone": "weighed by its tokens over those of",
    "tokens": "divided by the number of tokens of",
    "records": "divided by the number of",
}


def _list_least_errors(
    steps: Sequence[ObservedStep],
    fits: dict[tuple[str, str], tuple[float, float]],
    claim: LoopClaim,
) -> list[float]:
    """Return the smallest standard error of each kind of batch mean that the gradients can reveal.

    Gradients much longer than the clipping norm reveal a mean that the training does not undo.
    Shorter gradients reveal a mean that the training undoes.

    fits: (coefficient, standard error), keyed by (kind of mean, kind of batch).
    """
    norms = np.concatenate([step.norms for step in steps])
    is_divided = np.median(norms) > _DIVIDED * claim.max_grad_norm
    errors = dict[str, float]()
    for (weight, _), (_, error) in fits.items():
        if is_divided != (weight == "tokens, undone"):
            errors[weight] = min(error, errors.get(weight, math.inf))
    return list(errors.values()) or [min(error for _, error in fits.values())]


def measure_reach_share(trace: TrainingTrace, claim: LoopClaim) -> float:
    """Return the length of the records' contributions over the length that the claim implies.

    Return 1 unless this ratio is clearly (by two standard errors) below 1/2. Return at least 1 /
    mean batch size, which is the ratio if a loop averages a batch's gradients.
    """
    steps = trace.measured_steps
    estimate = estimate_mean_reach(steps)
    if estimate is None or is_clipping_per_tensor(steps, {}):
        return 1.0
    norms = np.concatenate([step.norms for step in steps])
    expected = float(np.minimum(norms / claim.max_grad_norm, 1.0).mean()) / claim.noise_multiplier
    mean, error = estimate
    if mean + 2 * error > expected / 2:
        return 1.0
    return max(mean / expected, len(steps) / len(norms))


def _fit_company_weight(
    steps: Sequence[ObservedStep],
    records: Sequence[Record],
    clipping_norm: float,
    weight: str,
    by_pass: bool,
) -> tuple[float, float] | None:
    """Estimate how strongly a record's contribution depends on a mean over its batch.

    Return the coefficient and its standard error, in units of the noise; None if all batches are
    equal. The fit also has columns for the record's gradient norm and length, and for a constant
    divisor. So these do not affect the coefficient.

    weight: kind of mean, a key of `_WEIGHTS`.
    by_pass: True if a batch is one forward pass, False if it is one step.
    """
    n_tokens = np.array([len(record["input_ids"]) - 1 for record in records], dtype=float)
    sizes = []
    for step in steps:
        for part in step.passes if by_pass else [step.records]:
            sizes.append(len(part))
    if not any(sizes):  # no step has noise as a unit of reach
        return None
    constant = 1.0
    if weight == "records":
        constant = sum(map(bool, sizes)) / sum(sizes)
    normal = np.zeros(())
    products = np.zeros(())
    for step in steps:
        parts = step.passes if by_pass else [step.records]
        weights = _weigh_company(parts, step.distinct_records, n_tokens, weight)
        if weights is None:
            continue
        factors = np.stack(np.broadcast_arrays(1.0, constant, weights))
        clipped, divided, weighed = np.minimum(factors * step.norms, clipping_norm) / clipping_norm
        of_kind = np.equal.outer(n_tokens[step.distinct_records], np.unique(n_tokens)).astype(float)
        explained = [of_kind, of_kind * clipped[:, None]]
        if constant != 1:
            explained.append(of_kind * divided[:, None])
        columns = np.column_stack([weighed - divided, *explained])
        normal = normal + columns.T @ step.gram @ columns
        products = products + columns.T @ step.gram @ step.reaches
    return _solve_first_coefficient(normal, products)


def _solve_first_coefficient(normal: Floats, products: Floats) -> tuple[float, float] | None:
    """Return a fit's first coefficient and its standard error; None if it is undetermined.

    normal, products: (columns, columns) and (columns,), the two sides of the normal equations; both
    () if there is no equation.
    """
    if not normal.ndim or not normal[0, 0] > 0:
        return None
    # Frisch and Waugh: the part of the first column that the others do not explain.
    inverse = np.linalg.pinv(normal[1:, 1:], rcond=_COLLINEAR, hermitian=True)
    projection = normal[0, 1:] @ inverse
    residual = float(normal[0, 0] - projection @ normal[1:, 0])
    if residual < 1e-6 * normal[0, 0]:
        return None
    return float(products[0] - projection @ products[1:]) / residual, 1 / math.sqrt(residual)


def _weigh_company(
    parts: Sequence[Sequence[int]], records: Sequence[int], n_tokens: Floats, weight: str
) -> Floats | None:
    """Return the factor that a batch mean applies to each record's gradient, of shape (records,).

    parts: the records of each batch; weight: kind of mean, from `_WEIGHTS`. Return None if a record
    was read twice.
    """
    weights = dict[int, float]()
    for part in parts:
        total = float(n_tokens[list(part)].sum())
        for record in part:
            if record in weights:
                return None
            share = float(n_tokens[record]) / total
            weights[record] = {
                "tokens, undone": share * len(part),
                "tokens": share,
                "records": 1 / len(part),
            }[weight]
    if set(weights) == set(records):
        return np.array([weights[record] for record in records])
    return None
