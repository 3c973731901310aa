"""Check each record's reach: how far it moves a gradient, in units of the noise."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

from auditor.core.arrays import Bools, Floats
from auditor.crash.reaches import (
    ChooseRecords,
    Estimate,
    estimate_mean_reach,
    estimate_tensor_reaches,
    is_clipping_per_tensor,
    rank_training_norms,
    weigh_reached_records,
)
from auditor.crash.training_specimen import RECORDS, SPECIMENS
from auditor.crash.verdicts import (
    UNKNOWN,
    LoopCheck,
    WatchedTrainings,
    WorstViolation,
    count_detectable_errors,
    get_unbounded_epsilon,
    judge_crash_test_p_value,
)
from auditor.crash.watch import ObservedStep

_SINGULAR = 1e10  # the condition number of a fit that determines nothing
_Chosen = Callable[[int, ObservedStep], bool]


def check_record_sensitivity(runs: WatchedTrainings) -> LoopCheck:
    """Check that a record moves the gradient by at most the claimed clipping norm.

    The check covers each specimen model separately and all models together. In units of the noise,
    the bound is 1 / noise multiplier.
    """
    promised = 1 / runs.claim.noise_multiplier
    kinds = len(SPECIMENS)
    # Trainings take the models by turns (`build_training_specimen`): the steps of each model.
    turns = []
    for turn in range(kinds):
        turns.append([step for trace in runs.traces[turn::kinds] for step in trace.steps])
    samples = [runs.steps, *turns]
    estimates = list(map(estimate_mean_reach, samples))
    # Equal noise has no shares: those from a few degrees of freedom would add their own errors.
    estimates += estimate_tensor_reaches(turns, runs.whitened_shares or {})
    estimates.append(_estimate_longest_reach(runs))
    fits = list(filter(None, estimates))
    if not fits:
        return LoopCheck(UNKNOWN, "no noise to compare it with", "")
    mean, error = max(fits, key=lambda fit: (fit[0] - promised) / fit[1])
    ratio = mean / promised
    least = max(reach + count_detectable_errors() * error for reach, error in fits) / promised
    would = f"a reach of {1 + count_detectable_errors(len(fits)) * fits[0][1] / promised:.2f} times"
    if least < 1:  # a different rule of clipping, whose bound no estimate reaches
        message = (
            f"records move the gradient by {ratio:.2f} times what the noise is calibrated for: no "
            "bound was found"
        )
        return LoopCheck(UNKNOWN, message, would)
    return judge_crash_test_p_value(
        min(1.0, len(fits) * float(stats.norm.sf((mean - promised) / error))),
        f"a record moves the gradient by {ratio:.2f} times what the noise is calibrated for",
        f"a record moves the gradient by {ratio:.2f} ± {1.96 * error / promised:.2f} times what "
        "the noise is calibrated for",
        would,
        lambda: _find_worst_violation(runs, ratio),
        lambda: runs.compute_noise_epsilon(1 / mean),
    )


def estimate_noise_multiplier_interval(runs: WatchedTrainings) -> tuple[float, float, float] | None:
    """Return the observed noise multiplier and its 95% interval; None if the data do not bound it.

    A record's reach is the length of its contribution to the gradient, in units of the noise. If b
    is the largest possible reach, the multiplier is 1 / b. The mean reach would underestimate b,
    because short gradients are not clipped. So the fit assumes that the reach rises with the
    gradient's norm up to an unknown clipping norm, and equals b above it.

    Return None if the reach may still rise at the longest gradient.
    """
    steps = [step for step in runs.steps_with_noise if step.norms.any()]
    if not steps:
        return None
    norms = np.concatenate([step.norms[step.norms > 0] for step in steps])
    weighted = []
    for step in steps:
        weighted.append(
            (step, *weigh_reached_records(step.gram, np.ones(len(step.gram), np.bool_)))
        )
    grid = np.unique(np.quantile(norms, _CLIPPING_QUANTILES))
    fits = _fit_bounds_above_clipping_norms(weighted, grid)
    unclipped = fits[-1]
    if len(grid) > 2:
        best = min(max(1, int(fits[:, 2].argmax())), len(grid) - 2)
        finer = np.geomspace(grid[best - 1], grid[best + 1], _FINER)
        fits = np.concatenate([fits, _fit_bounds_above_clipping_norms(weighted, finer)])
    most = fits[:, 2].max()
    if unclipped[2] > most - _CONTRADICTED:
        return None
    mean = float(fits[fits[:, 2].argmax(), 0])
    means, errors, explained = fits[fits[:, 2] > most - _OUTSIDE].T
    margins = errors * np.sqrt(explained - most + _OUTSIDE)
    low = float((means - margins).min())
    high = float((means + margins).max())
    wider = (high - mean) / math.sqrt(_OUTSIDE) * count_detectable_errors()
    if low <= 0 or mean + wider < 1 / runs.claim.noise_multiplier:
        return None
    return 1 / mean, 1 / high, 1 / low


# quantiles of the gradients' norms
_CLIPPING_QUANTILES = (0.0, *np.linspace(0.1, 0.9, 9), 0.95, 1.0)
_FINER = 20  # clipping norms next to the likeliest quantile
# Critical drops of twice the log likelihood from its maximum: for one number, and for bound and
# clipping norm together. The bound varies more if the clipping norm is estimated than if it is
# known.
_CONTRADICTED = float(stats.chi2.isf(0.05, 1))
_OUTSIDE = float(stats.chi2.isf(0.05, 2))


def _fit_bounds_above_clipping_norms(
    weighted: Sequence[tuple[ObservedStep, Floats, float]], clipping_norms: Floats
) -> Floats:
    """Fit the bound on reaches, assuming that they rise with the norm up to each clipping norm.

    Return rows of the bound, its standard error, and the squared length of the fitted
    contributions, in units of the noise. The best clipping norm has the largest such length.

    weighted: (step, weights for its mean reach, standard deviation of this mean).
    """
    share_sum, square, product = np.zeros((3, len(clipping_norms)))
    reach_sum = 0.0
    for step, weights, deviation in weighted:
        shares = np.minimum(step.norms / clipping_norms[:, None], 1.0)  # (clipping norms, records)
        projected = shares @ step.gram
        share_sum += shares @ weights / deviation
        reach_sum += float(weights @ step.reaches) / deviation
        square += np.vecdot(projected, shares)
        product += projected @ step.reaches
    errors = math.sqrt(len(weighted)) / share_sum
    return np.stack([reach_sum / share_sum, errors, product**2 / square], axis=1)


def _estimate_longest_reach(runs: WatchedTrainings) -> Estimate | None:
    """Return the mean reach of the records with the largest gradients, and its standard error.

    A record's reach is the norm of its contribution to the summed gradient, in units of the noise.
    Its gradient is large if the norm is in the top quarter of the training so far.
    """
    ranks = rank_training_norms(runs.traces)
    return estimate_mean_reach(runs.steps, lambda step: ranks[id(step)] >= 0.75)


def check_kind_sensitivity(runs: WatchedTrainings) -> LoopCheck:
    """Check that no kind of record moves the gradient further than the claim permits.

    The kinds are the longest and the shortest records, the first and the last record of the data or
    of a batch, and a record that has a batch to itself.
    """
    promised = 1 / runs.claim.noise_multiplier
    steps = [*runs.steps, *runs.small_steps]
    fits = {
        kind: pair
        for kind, chosen in _KINDS.items()
        if (pair := estimate_mean_reach(steps, _make_record_kind_choice(chosen)))
    }
    if not fits:
        return LoopCheck(UNKNOWN, "no noise to compare them with", "")
    worst = max(fits, key=lambda kind: (fits[kind][0] - promised) / fits[kind][1])
    mean, error = fits[worst]
    most = 1 + count_detectable_errors(len(fits)) * max(e for _, e in fits.values()) / promised
    return judge_crash_test_p_value(
        min(1.0, len(fits) * float(stats.norm.sf((mean - promised) / error))),
        f"{worst} records reach {mean / promised:.2f} times as far as they may",
        f"none of {', '.join(fits)} records moves the gradient too far (most: {worst}, "
        f"{mean / promised:.2f} times)",
        f"a reach of {most:.1f} times, for the rarest kind",
        lambda: _find_worst_violation(runs, mean / promised, _KINDS[worst]),
        lambda: runs.compute_noise_epsilon(1 / mean),
    )


# `training_specimen._LENGTHS` repeat every four records, the longest first.
_KINDS: dict[str, _Chosen] = {
    "first": lambda record, step: record == 0,
    "last": lambda record, step: record >= RECORDS - 2,
    "longest": lambda record, step: record % 4 == 0,
    "shortest": lambda record, step: record % 4 == 1,
    "alone": lambda record, step: len(step.records) == 1,
    "first of a batch": lambda record, step: record == step.records[0],
    "last of a batch": lambda record, step: record == step.records[-1],
}


def _find_worst_violation(
    runs: WatchedTrainings, mean: float, chosen: _Chosen = lambda record, step: True
) -> WorstViolation:
    """Return the record whose contribution exceeds the bound by the most standard errors.

    mean: the mean contribution over the bound; only the message uses it.
    chosen: a function that returns whether to consider a record of a step.
    """
    violations = []
    for step in (*runs.steps, *runs.small_steps):
        if not step.scale:
            continue
        # The reaches' covariance is the inverse Gram matrix, which is singular if records have the
        # same gradient.
        deviations = np.sqrt(np.diag(np.linalg.pinv(step.gram, hermitian=True)))
        for record, reach, dev in zip(step.distinct_records, step.reaches, deviations, strict=True):
            if chosen(record, step) and dev > 0:
                violations.append((float(reach), float(dev), record, step))
    reach, dev, record, step = max(
        violations,
        key=lambda violation: (violation[0] - 1 / runs.claim.noise_multiplier) / violation[1],
    )
    unit = runs.claim.noise_multiplier
    message = (
        f"moves the gradient by {reach * unit:.2f} ± {1.96 * dev * unit:.2f} clipping norms; mean "
        f"{mean:.2f}"
    )
    if runs.small_training and any(dev is step for dev in runs.small_training.steps):
        return WorstViolation(
            f"{message}, in a training on {runs.small_training.n} records",
            "at most 1",
            record=record,
        )
    return WorstViolation(message, "at most 1", *runs.locate_step(step), record)


def check_per_record_clipping(runs: WatchedTrainings) -> LoopCheck:
    """Check that a record's contribution depends on neither its gradient's norm nor its batch.

    A contribution within the bound may rise with the norm, because clipping leaves short gradients
    unchanged.
    """
    promised = 1 / runs.claim.noise_multiplier
    # With clipping by tensor, a record's part is neither a multiple of its gradient nor a share of
    # the batch's.
    by_tensors = is_clipping_per_tensor(runs.steps, runs.whitened_shares or {})
    fits = {_NORM: _fit_norm_rise(runs, promised)}
    for predictor, parts in _COMPANY.items():
        fits[predictor] = None if by_tensors else _fit_share_rise(runs.steps, parts)
    estimates = {predictor: fit for predictor, fit in fits.items() if fit}
    if not estimates:
        return LoopCheck(UNKNOWN, "no noise to compare it with", "")
    worst = max(estimates, key=lambda key: estimates[key][0] / estimates[key][1])
    slope, error = estimates[worst]
    among = len(fits)  # shares that gave no estimate were tested too
    least = count_detectable_errors(among) * max(e for _, e in estimates.values()) / promised

    def witness() -> WorstViolation:
        rise = f"{slope / promised:.2f} ± {1.96 * error / promised:.2f} clipping norms"
        if worst == _NORM:
            message = f"the largest reach {rise} too far"
        else:
            message = f"reach rises by {rise} with {worst}"
        largest = max(
            (step for step in runs.steps_with_noise if step.records),
            key=lambda step: float(step.norms.max()),
        )
        record = largest.distinct_records[int(largest.norms.argmax())]
        return WorstViolation(message, "0", *runs.locate_step(largest), record)

    # A reach that follows the gradient's norm has no bound. A sum that is clipped as a sum can move
    # by two clipping norms, from C to -C: half the noise multiplier.
    return judge_crash_test_p_value(
        min(1.0, among * float(stats.norm.sf(slope / error))),
        f"how far a record moves the gradient depends on {worst}: its gradient is not clipped by "
        "itself",
        f"how far a record reaches follows neither {' nor '.join(estimates)}",
        f"a sensitivity that rises by {least:.2f} times the bound with either",
        witness,
        get_unbounded_epsilon
        if worst == _NORM
        else lambda: runs.compute_noise_epsilon(runs.claim.noise_multiplier / 2),
    )


def _fit_norm_rise(runs: WatchedTrainings, promised: float) -> Estimate | None:
    """Estimate whether contributions both rise with the gradient's norm and exceed `promised`.

    One estimate is the slope, the other the excess of the mean contribution over `promised` for the
    longest gradients. It is a fault only if both are positive. So return the less significant
    estimate, with its standard error.
    """
    line = _fit_line(runs.steps, _compute_log_norms)
    top = _estimate_longest_reach(runs)
    if line is None or top is None:
        return None
    return min(line.slope, (top[0] - promised, top[1]), key=lambda fit: fit[0] / fit[1])


def _compute_log_norms(step: ObservedStep) -> Floats:
    log_norms: Floats = np.log(np.maximum(step.norms, 1e-300))
    return log_norms


_NORM = "the logarithm of its gradient's norm"
_COMPANY: dict[str, Callable[[ObservedStep], Sequence[Sequence[int]]]] = {
    "its share of the batch's gradient": lambda step: [step.records],
    "its share of its pass's gradient": lambda step: step.passes,
}


def _fit_share_rise(
    steps: Sequence[ObservedStep], parts: Callable[[ObservedStep], Sequence[Sequence[int]]]
) -> Estimate | None:
    """Estimate whether the training clips sums of gradients instead of each record's gradient.

    Clipping a sum makes a record's contribution rise with the record's share of the sum. Return the
    slope and its standard error. Return None if something else may explain the slope: a large
    constant part, the records' gradient norms, or equal shares in all sums.

    parts: a function that returns the records of each sum.
    """
    line = _fit_line(steps, lambda step: _compute_record_shares(step, parts(step)))
    if line is None:
        return None
    for column in (lambda step: step.norms, _compute_log_norms):
        norm_line = _fit_line(steps, column)
        if norm_line and norm_line.explained >= line.explained:
            return None
    if line.slope[0] > 3 * abs(line.constant):
        return line.slope
    return None


class _Line(NamedTuple):
    """Describe a straight line through contributions, as a function of one column.

    slope: the coefficient of the column, and its standard error.
    explained: the squared length of the fitted values, in units of the noise.
    """

    slope: tuple[float, float]
    constant: float
    explained: float


def _compute_record_shares(step: ObservedStep, parts: Sequence[Sequence[int]]) -> Floats:
    """Divide each gradient's norm by the norm of the sum that contains the gradient, (records,).

    parts: the records of each sum.
    """
    shares = np.ones(len(step.norms))
    # (records, records) inner products before clipping: a part's block adds up to the squared norm
    # of its summed gradient.
    inner = step.gram * np.outer(step.norms, step.norms)
    for part in parts:
        rows = list(map(step.distinct_records.index, sorted(set(part))))
        shares[rows] = step.norms[rows] / math.sqrt(max(inner[np.ix_(rows, rows)].sum(), 1e-300))
    return shares


def _make_record_kind_choice(chosen: _Chosen) -> ChooseRecords:
    def choose(step: ObservedStep) -> Bools:
        return np.array([chosen(record, step) for record in step.distinct_records], dtype=np.bool_)

    return choose


def _fit_line(
    steps: Sequence[ObservedStep], column: Callable[[ObservedStep], Floats]
) -> _Line | None:
    """Fit a straight line through the contributions of all steps; None if it is undetermined.

    column: returns the x values of a step, of shape (records,). The fit is generalised least
    squares, because the contributions of one step are correlated: their covariance is the inverse
    Gram matrix of the records' unit gradients.
    """
    # Normal equations, each step weighted by its Gram matrix.
    a = np.zeros((2, 2))
    b = np.zeros(2)
    for step in steps:
        if step.scale and step.records:
            x = np.stack([column(step), np.ones(len(step.norms))], 1)
            a = a + x.T @ step.gram @ x
            b = b + x.T @ step.gram @ step.reaches
    if not a[0, 0] > 0 or np.linalg.cond(a) > _SINGULAR:
        return None
    covariance = np.linalg.inv(a)
    coefficients = covariance @ b
    slope = float(coefficients[0]), float(covariance[0, 0] ** 0.5)
    # The inverse covariance is X' G X: this is the squared length of the fitted values.
    explained = float(coefficients @ np.linalg.solve(covariance, coefficients))
    return _Line(slope, float(coefficients[1]), explained)
