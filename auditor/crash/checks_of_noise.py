"""Check that every tensor has fresh Gaussian noise whose size reveals no secret."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np
from scipy import stats

from auditor.core.arrays import Floats
from auditor.crash.reaches import whiten_step
from auditor.crash.verdicts import (
    COUNTED,
    NO_FAULT,
    PLANTED,
    POWER,
    SHARE,
    UNKNOWN,
    LoopCheck,
    WatchedTrainings,
    WorstViolation,
    count_detectable_errors,
    fail_crash_test,
    get_unbounded_epsilon,
    judge_certain_crash_test,
    judge_crash_test_p_value,
)
from auditor.crash.watch import ObservedStep, TrainingTrace
from auditor.privacy.gaussian import compute_noise_scale_epsilon

# Dimensions outside the span of a step's records. If noise at the level of rounding fills this
# many, it is missing, not small by chance. In one dimension, chance makes it so small in one of
# some thousand steps (seed 171 of the honest trainings).
_SURELY_SILENT = 3


def check_noise_every_tensor(runs: WatchedTrainings) -> LoopCheck:
    """Check that every tensor has noise, of any size.

    Other checks use this noise as the unit for records' contributions.
    """
    would = "a tensor without noise"
    if not runs.steps_with_noise:
        message = "no noise at all in any gradient that reached the optimizer"
        return fail_crash_test(message, would, _find_zero_noise(runs, runs.steps[0]), math.inf)
    names = {name for step in runs.steps_with_noise for name in step.tensor_ranges}
    silent = _find_tensors_without_noise(runs)
    if silent:
        message = (
            f"no noise on {len(silent)} of {len(names)} tensors: {', '.join(sorted(silent)[:3])}"
        )
        witness = _find_zero_noise(runs, runs.steps_with_noise[0], min(silent))
        return fail_crash_test(message, would, witness, math.inf)
    shares = runs.noise_shares
    least = min(shares, key=shares.__getitem__)
    most = max(shares.values())
    message = (
        f"every one of {len(names)} tensors has noise (least: {least}, {shares[least]:.2f} times "
        "that of all)"
    )
    if runs.whitened_shares is not None:
        message = (
            f"tensors have {shares[least]:.2f} to {most:.2f} times the noise of all: sensitivities "
            "are in units of each tensor's noise"
        )
    return LoopCheck(NO_FAULT, message, would, source=COUNTED)


def _find_tensors_without_noise(runs: WatchedTrainings) -> set[str]:
    """Find the tensors without noise.

    These have no noise in any step, or none in a single step with enough elements to exclude
    chance.
    """
    silent = set()
    largest: dict[str, float] = {}
    freedoms: dict[str, int] = {}
    for step in runs.steps_with_noise:
        for name, (scale, free) in step.scales.items():
            largest[name] = max(scale, largest.get(name, 0.0))
            freedoms[name] = freedoms.get(name, 0) + free
            if not scale and free >= _SURELY_SILENT:
                silent.add(name)
    return silent | {
        name for name, scale in largest.items() if not scale and freedoms[name] >= _SURELY_SILENT
    }


def whiten_unequal_noise(runs: WatchedTrainings) -> WatchedTrainings:
    """If tensors have unequal noise, divide each tensor by its own noise.

    If the noise is equal, return the trainings unchanged, because estimated divisors would add
    errors.
    """
    shares = runs.noise_shares
    if not _has_unequal_noise(runs, shares):
        return runs

    def whiten(trace: TrainingTrace) -> TrainingTrace:
        return replace(trace, steps=[whiten_step(step, shares) for step in trace.steps])

    traces = tuple(map(whiten, runs.traces))
    few = runs.small_training and whiten(runs.small_training)
    return replace(
        runs, traces=traces, fewer=whiten(runs.fewer), small_training=few, whitened_shares=shares
    )


def _has_unequal_noise(runs: WatchedTrainings, shares: dict[str, float]) -> bool:
    """Test whether some tensor has significantly less noise than all tensors together.

    shares: each tensor's noise over that of all tensors.
    """
    if _find_tensors_without_noise(runs):  # a fault that leaves no unit of measurement
        return False
    freedoms = Counter[str]()
    for step in runs.steps_with_noise:
        for name, (_, free) in step.scales.items():
            freedoms[name] += free
    # The noise of all tensors counts as known: it has far more degrees of freedom than one tensor.
    ps = []
    for name, free in freedoms.items():
        if free:
            ps.append(float(stats.chi2.cdf(shares[name] ** 2 * free, free)))
    return bool(ps) and min(ps) * len(ps) < SHARE


def check_released_gradients_finite(runs: WatchedTrainings) -> LoopCheck:
    """Check that every released number is finite; noise does not hide an overflow."""
    faults = []
    for i, trace in enumerate(runs.traces):
        for fault in trace.overflowed:
            faults.append((i, *fault))

    def witness() -> WorstViolation:
        training, step, tensor = faults[0]
        return WorstViolation(
            "infinite or undefined numbers", "finite ones", training, step, tensor=tensor
        )

    return judge_certain_crash_test(
        bool(faults),
        f"{len(faults)} released gradients contain infinite or undefined numbers: they overflowed",
        "every released number is finite",
        "one such number",
        witness,
        get_unbounded_epsilon,
    )


def _find_zero_noise(
    runs: WatchedTrainings, step: ObservedStep, tensor: str | None = None
) -> WorstViolation:
    training, at = runs.locate_step(step)
    if tensor:
        expected = f"{step.scale:.3g}, as on the others"
    else:
        expected = "more than rounding"
    return WorstViolation("noise of standard deviation 0", expected, training, at, tensor=tensor)


def check_gaussian_noise(runs: WatchedTrainings) -> LoopCheck:
    """Check that the noise is Gaussian, as the accounting assumes."""
    # Leave out elements that are mostly in the records' span: the rest of their noise follows from
    # other elements'.
    parts = [
        step.noise[free] / step.spread[free] / step.scale
        for step in runs.steps_with_noise
        if (free := step.spread > 0.5).any()
    ]
    if not parts:
        return LoopCheck(UNKNOWN, "no noise to examine", "")
    noise = np.concatenate(parts)
    fit = stats.kstest(noise, "norm")
    # Kolmogorov's critical value, plus the spread of the empirical function at the deviation: at
    # most a half.
    least = (math.sqrt(-math.log(SHARE / 2) / 2) + stats.norm.ppf(POWER) / 2) / math.sqrt(
        len(noise)
    )
    return judge_crash_test_p_value(
        float(fit.pvalue),
        f"not normal: off by {fit.statistic:.3f}",
        "normal",
        f"a distribution function that is off by {least:.3f} anywhere",
        lambda: WorstViolation(
            f"off by {fit.statistic:.4f} at {fit.statistic_location:.2f} standard deviations",
            f"less than {least:.4f}",
        ),
    )


def check_noise_independence(runs: WatchedTrainings) -> LoopCheck:
    """Check that tensors, steps and trainings have independent noise.

    Every training has its own seed, so trainings must not share noise.
    """
    noisy = runs.steps_with_noise
    if len(noisy) < 2:
        return LoopCheck(UNKNOWN, "no noise to examine", "")
    noises, freedoms = _stack_shared_noise(noisy)
    size = min(freedoms)
    most, of_pairs, indices = _find_largest_correlation(noises, size)
    pair = noisy[indices[0]], noisy[indices[1]]
    by_scope = {
        "in any two steps": (most, of_pairs),
        "from step to step": _pool_noise_correlations(_pair_successive_noises(runs)),
        "in tensors of one size": _pool_noise_correlations(
            itertools.chain.from_iterable(map(_pair_noises, runs.steps))
        ),
    }
    variant = min(by_scope, key=lambda key: by_scope[key][1])
    strength, p = by_scope[variant]
    pairs = len(noisy) * (len(noisy) - 1)  # each pair has two signs
    # In standard errors of 1 / sqrt(size) each: the critical value among all pairs, plus the margin
    # for a power of 80%.
    least = (stats.norm.isf(SHARE / len(by_scope) / pairs) + stats.norm.ppf(POWER)) / math.sqrt(
        max(size, 1)
    )

    def witness() -> WorstViolation:
        expected = f"0 ± {1 / math.sqrt(max(size, 1)):.3f}"
        if by_scope["in any two steps"][1] > SHARE / len(by_scope):
            return WorstViolation(f"correlation {strength:.3f} {variant}", expected)
        (training, at), (other, again) = map(runs.locate_step, pair)
        return WorstViolation(
            f"correlation {most:.3f} with training {other + 1}, step {again + 1}",
            expected,
            training,
            at,
        )

    return judge_crash_test_p_value(
        min(1.0, len(by_scope) * p),
        f"the noise repeats {variant}: correlation {strength:.2f}",
        "no two steps, trainings or tensors share their noise",
        f"a correlation of {least:.2f} between any two steps",
        witness,
        get_unbounded_epsilon,
    )


def _find_largest_correlation(noises: Floats, free: float) -> tuple[float, float, tuple[int, int]]:
    """Find the largest correlation between two rows of noise.

    Return the correlation, its p-value corrected for the number of pairs, and the indices of the
    two rows.

    noises: (rows, d).
    free: degrees of freedom of a row. Given the other rows, its direction is uniform in this many
        dimensions if the noise is independent.
    """
    if free <= 1:  # no tensor is trained in every step
        return 0.0, 1.0, (0, 0)
    directions = noises / np.linalg.norm(noises, axis=1, keepdims=True)
    cosines = np.abs(np.triu(directions @ directions.T, 1))
    pairs = len(noises) * (len(noises) - 1) / 2
    most = float(cosines.max())
    first, other = map(int, np.unravel_index(cosines.argmax(), cosines.shape))
    # For a uniform direction in f dimensions, r sqrt((f - 1) / (1 - r^2)) is Student's t with f - 1
    # degrees of freedom.
    t = most * math.sqrt((free - 1) / max(1 - most**2, 1e-12))
    return most, min(1.0, 2 * pairs * float(stats.t.sf(t, free - 1))), (first, other)


def _count_noise_freedoms(step: ObservedStep, of: slice = slice(None)) -> float:
    """Count the dimensions of a step's noise outside the span of the records' gradients.

    of: the elements of the noise to consider.
    """
    return float((step.spread[of] ** 2).sum())


def _stack_shared_noise(steps: Sequence[ObservedStep]) -> tuple[Floats, list[float]]:
    """Return the noise in the tensors that all steps share, of shape (steps, d).

    Also return the degrees of freedom of each step's noise.
    """
    shared = list(steps[0].tensor_ranges)
    for step in steps:
        shared = list(filter(step.tensor_ranges.__contains__, shared))
    rows = []
    freedoms = []
    for step in steps:
        parts = [np.zeros(0)]
        freedom = 0.0
        for name in shared:
            elements = slice(*step.tensor_ranges[name])
            parts.append(step.noise[elements])
            freedom += _count_noise_freedoms(step, elements)
        rows.append(np.concatenate(parts))
        freedoms.append(freedom)
    return np.stack(rows), freedoms


_Pair = tuple[Floats, Floats, float]  # noise, noise, and the first one's dimensions


def _pair_noises(step: ObservedStep) -> Iterator[_Pair]:
    """Yield the noises of any two tensors of the same size, with the first's degrees of freedom.

    The two noises are the same if the training reseeds the generator for each tensor.
    """
    spans = sorted(step.tensor_ranges.values(), key=lambda span: span[1] - span[0])
    for (a, b), (c, d) in itertools.pairwise(spans):
        if b - a == d - c:
            yield step.noise[a:b], step.noise[c:d], _count_noise_freedoms(step, slice(a, b))


def _pair_successive_noises(runs: WatchedTrainings) -> Iterator[_Pair]:
    for trace in runs.traces:
        for pair_of_steps in itertools.pairwise(trace.steps):
            (a, b), (free, _) = _stack_shared_noise(pair_of_steps)
            yield a, b, free


def _pool_noise_correlations(pairs: Iterable[_Pair]) -> tuple[float, float]:
    """Return the correlation over all pairs of noise vectors, and its p-value.

    Return (0, 1) if there are no pairs. pairs: (a, b, degrees of freedom of a).

    Given b, the variance of a @ b is at most (a @ a)(b @ b) / (degrees of freedom of a). Dividing
    by the number of elements of a would give too small a variance: similar gradients remove the
    same directions from both a and b.
    """
    product = size = variance = 0.0
    for a, b, free in pairs:
        if free > 0.5:  # else the records span all dimensions, and no noise is left to correlate
            product += float(a @ b)
            squares = float(a @ a) * float(b @ b)
            size += math.sqrt(squares)
            variance += squares / free
    if not variance:
        return 0.0, 1.0
    return product / size, 2 * float(stats.norm.sf(abs(product) / math.sqrt(variance)))


# --- one record fewer, and other batches ---


def check_training_reveals_record_count(runs: WatchedTrainings) -> LoopCheck:
    """Check that steps, learning rates and noise size do not reveal the number of records."""
    a, b = runs.first_training, runs.fewer
    if runs.claim.public_size:
        return LoopCheck(UNKNOWN, "the claim says that it is public", "")
    # Standard error of the mean log ratio of two scales over steps: each log has the variance 1 /
    # (2 degrees of freedom).
    frees = list(map(_count_noise_freedoms, a.steps))
    error = math.sqrt(sum(1 / free for free in frees if free)) / len(frees)
    would = f"noise whose size differs by {100 * count_detectable_errors(2) * error:.1f}%"
    if len(a.steps) != len(b.steps):
        message = f"{len(a.steps)} steps with {a.n} records, {len(b.steps)} with {b.n}"
        return fail_crash_test(
            message, would, WorstViolation(str(len(b.steps)), str(len(a.steps))), math.inf
        )
    ratios = []
    for at, (x, y) in enumerate(zip(a.steps, b.steps, strict=True)):
        if x.rate != y.rate:
            message = f"other learning rates with {b.n} records than {a.n}"
            witness = WorstViolation(f"learning rate {y.rate:g}", f"{x.rate:g}", 0, at)
            return fail_crash_test(message, would, witness, math.inf)
        if x.scale and y.scale:
            ratios.append(math.log(y.scale / x.scale))
    if not ratios:
        return LoopCheck(UNKNOWN, "no noise whose size could be compared", would)
    if not _is_noise_size_public(runs):
        return LoopCheck(
            UNKNOWN, "the size of the noise follows no public schedule: see that check", would
        )
    ratio = math.exp(math.fsum(ratios) / len(ratios))
    p = 2 * float(stats.norm.sf(abs(math.log(ratio)) / error))
    return judge_crash_test_p_value(
        p,
        f"the noise is {ratio:.3f} times as large with {b.n} records as with {a.n}: its size "
        "reveals how many there are",
        f"noise, steps and rates are the same with {a.n} and {b.n} records",
        would,
        lambda: WorstViolation(
            f"noise of {ratio:.4g} times with {b.n} records", f"a ratio of 1 ± {1.96 * error:.4f}"
        ),
        lambda: compute_noise_scale_epsilon(round(sum(frees)), 1.0, ratio, runs.claim.delta),
    )


def check_noise_size_public(runs: WatchedTrainings) -> LoopCheck:
    """Check that the noise's size follows a public schedule.

    Trainings on the same number of records must have equal noise at each step. Otherwise the size
    depends on chance, as in adaptive clipping, or on the records; this check cannot tell which.
    """
    would = "noise whose size differs between trainings"
    if len(runs.traces) < 2 or not runs.steps_with_noise:
        return LoopCheck(
            UNKNOWN if runs.steps_with_noise else NO_FAULT,
            "no two trainings with noise",
            would,
        )
    if _is_noise_size_public(runs):
        return LoopCheck(NO_FAULT, "at each step the noise has one size in all trainings", would)
    ratio = 1.0
    for steps in _group_steps(runs):
        scales = [step.scale for step in steps]
        ratio = max(ratio, max(scales) / min(scales))
    message = (
        f"at one step the noise is up to {ratio:.2f} times as large in one training "
        "as in another on as many records: it follows chance, as adaptive clipping's does, or the "
        "records; this test cannot say which"
    )
    return LoopCheck(UNKNOWN, message, would)


def _group_steps(runs: WatchedTrainings) -> list[list[ObservedStep]]:
    """Group the steps that have noise by their index in the training.

    An index that occurs in only one training is omitted.
    """
    by_place = itertools.zip_longest(*(trace.steps for trace in runs.traces))
    places = []
    for steps in by_place:
        noisy = [step for step in steps if step is not None and step.scale]
        if len(noisy) > 1:
            places.append(noisy)
    return places


def _is_noise_size_public(runs: WatchedTrainings) -> bool:
    """Return whether all trainings have the same noise size at each step, up to estimation error.

    The log of an estimated size has variance 1 / (2 degrees of freedom).
    """
    total = 0.0
    freedom = 0
    for steps in _group_steps(runs):
        weights = np.array([2 * _count_noise_freedoms(step) for step in steps])
        logs = np.log([step.scale for step in steps])
        if not weights.sum():
            continue
        total += float(weights @ (logs - np.average(logs, weights=weights)) ** 2)
        freedom += len(steps) - 1
    return not freedom or float(stats.chi2.sf(total, freedom)) >= SHARE


def check_noise_reveals_batch_size(runs: WatchedTrainings) -> LoopCheck:
    """Check that the noise's size does not reveal the batch size, which is secret."""
    pairs = []
    for step in runs.steps_with_noise:
        if step.records:
            pairs.append((len(step.records), step.scale))
    # The last batch of few records holds a single record.
    if runs.small_training and len(dict(pairs)) < 2:
        pairs = []
        for step in runs.small_training.measured_steps:
            pairs.append((len(step.records), step.scale))
    sizes, scales = np.array(pairs, dtype=float).reshape(-1, 2).T
    would = "noise divided by the size of its batch"
    if len(set(sizes)) < 2:
        return LoopCheck(UNKNOWN, "all batches had one size", would, source=PLANTED)
    # Noise divided by the batch's size has slope -1, multiplied noise slope 1; other slopes count
    # as chance.
    fit = stats.linregress(np.log(sizes), np.log(scales))
    p = 1.0
    if abs(abs(fit.slope) - 1) < 0.1:
        p = float(fit.pvalue)
    return judge_crash_test_p_value(
        p,
        "the noise is divided by the actual number of records in the batch",
        "the size of the noise does not depend on the batch size",
        would,
        lambda: WorstViolation(
            f"the noise scales with the batch size to the power {fit.slope:.2f}", "0"
        ),
        get_unbounded_epsilon,
        PLANTED,
    )
