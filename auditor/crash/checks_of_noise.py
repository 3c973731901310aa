"""Checks of the noise: on every tensor, Gaussian, fresh, and of a size that follows nothing secret."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np
from scipy import stats

from auditor.crash.verdicts import (
    PLANTED,
    POWER,
    SHARE,
    UNKNOWN,
    Array,
    LoopCheck,
    WatchedTrainings,
    WorstViolation,
    broken_loop_check_without_chance,
    loop_check_from_p_value,
    loop_check_without_chance,
    standard_errors_a_loop_check_detects,
    unbounded_loop_epsilon,
)
from auditor.crash.watch import ObservedStep
from auditor.privacy.gaussian import epsilon_between_noise_scales

# Dimensions outside the span of a step's records: noise that is mere rounding in so many is missing, not small by
# chance. In a single dimension chance does that in one step of some thousand (seed 171 of the honest trainings).
_SURELY_SILENT = 3


def check_noise_every_tensor(runs: WatchedTrainings) -> LoopCheck:
    """Every tensor has as much noise as the others: what is released of one without noise is hidden by nothing."""
    name = "noise in every tensor"
    free = max(1, 8 * len(runs.steps))  # of a tensor of 16 numbers 8 are those that a batch's records leave to noise
    # As in `check_poisson_batch_sizes`, for one of 16 tensors; the root, as noise is told by its standard deviation.
    caught = math.sqrt(stats.chi2.ppf(SHARE / 16, free) / stats.chi2.ppf(POWER, free))
    would = f"a tensor of 16 numbers with {100 * (1 - caught):.0f}% less noise"
    if not runs.steps_with_noise:
        said = "no noise at all in any gradient that reached the optimizer"
        return broken_loop_check_without_chance(name, said, would, _zero_noise_violation(runs, runs.steps[0]), math.inf)
    names = {name for step in runs.steps_with_noise for name in step.shapes}
    silent = {
        name
        for step in runs.steps_with_noise
        for name, (one, free) in step.scales.items()
        if not one and free >= _SURELY_SILENT
    }
    if silent:
        said = f"no noise on {len(silent)} of {len(names)} tensors: {', '.join(sorted(silent)[:3])}"
        shown = _zero_noise_violation(runs, runs.steps_with_noise[0], min(silent))
        return broken_loop_check_without_chance(name, said, would, shown, math.inf)
    shares = {name: _relative_noise_variance_and_freedom(runs.steps_with_noise, name) for name in sorted(names)}
    # What all tensors have counts as known: it has far more degrees of freedom than one of them.
    ps = {name: float(stats.chi2.cdf(share * free, free)) for name, (share, free) in shares.items() if free}
    worst = min(ps, key=ps.__getitem__)
    least = math.sqrt(shares[worst][0])
    return loop_check_from_p_value(
        name, min(1.0, ps[worst] * len(ps)),
        f"{worst} has {least:.2f} times the noise of the others",
        f"every one of {len(ps)} tensors has its noise (least: {least:.2f} times the mean)", would,
        lambda: WorstViolation(f"{least:.3f} times the noise of all tensors", "1 times", tensor=worst),
    )  # fmt: skip


def check_released_gradients_finite(runs: WatchedTrainings) -> LoopCheck:
    """Every released number is finite: what overflows, in half precision say, shows through any noise."""
    found = [(i, *one) for i, trace in enumerate(runs.traces) for one in trace.overflowed]
    said = "every released number is finite"
    if found:
        said = f"{len(found)} released gradients hold infinite or undefined numbers: they overflowed"

    def witness() -> WorstViolation:
        training, step, tensor = found[0]
        return WorstViolation("infinite or undefined numbers", "finite ones", training, step, tensor=tensor)

    return loop_check_without_chance(
        "finite gradients", bool(found), said, "one such number", witness, unbounded_loop_epsilon
    )


def _zero_noise_violation(runs: WatchedTrainings, step: ObservedStep, tensor: str | None = None) -> WorstViolation:
    training, at = runs.training_and_step_index(step)
    expected = f"{step.scale:.3g}, as on the others" if tensor else "more than rounding"
    return WorstViolation("noise of standard deviation 0", expected, training, at, tensor=tensor)


def _relative_noise_variance_and_freedom(steps: Sequence[ObservedStep], name: str) -> tuple[float, int]:
    """A tensor's noise variance over that of all, and its degrees of freedom."""
    held = [(step.scales[name], step.scale) for step in steps if name in step.scales]
    free = sum(free for (_, free), _ in held)
    # Each step in units of its own noise, which a schedule may change; pooled by degrees of freedom.
    return (sum((one / scale) ** 2 * free for (one, free), scale in held) / free if free else 1.0), free


def check_gaussian_noise(runs: WatchedTrainings) -> LoopCheck:
    """The noise is Gaussian: the accounting holds for no other."""
    # Without elements that lie mostly in the records' span: what is left of their noise follows from the others'.
    parts = [
        step.noise[kept] / step.spread[kept] / step.scale
        for step in runs.steps_with_noise
        if (kept := step.spread > 0.5).any()
    ]
    if not parts:
        return LoopCheck("Gaussian noise", UNKNOWN, "no noise that could be looked at", "")
    held = np.concatenate(parts)
    found = stats.kstest(held, "norm")
    # Kolmogorov's critical value, and the spread of the empirical function where it is off: at most a half.
    least = (math.sqrt(-math.log(SHARE / 2) / 2) + stats.norm.ppf(POWER) / 2) / math.sqrt(len(held))
    return loop_check_from_p_value(
        "Gaussian noise", float(found.pvalue), f"not normal: off by {found.statistic:.3f}", "normal",
        f"a distribution function that is off by {least:.3f} anywhere",
        lambda: WorstViolation(f"off by {found.statistic:.4f} at {found.statistic_location:.2f} standard deviations",
                        f"less than {least:.4f}"),
    )  # fmt: skip


def check_noise_independence(runs: WatchedTrainings) -> LoopCheck:
    """Independent between any two steps of any training, and between tensors; each training has another seed."""
    name, noisy = "fresh noise", runs.steps_with_noise
    if len(noisy) < 2:
        return LoopCheck(name, UNKNOWN, "no noise that could be looked at", "")
    noises, size = _stack_noise_of_shared_tensors(noisy)
    follow = [_shared_tensor_noise(a, b) for trace in runs.traces for a, b in itertools.pairwise(trace.steps)]
    most, of_pairs, pair = _largest_noise_correlation_and_p_value(noises, size)
    found = {
        "in any two steps": (most, of_pairs),
        "from step to step": _pooled_noise_correlation_and_p_value(follow),
        "in tensors of one size": _pooled_noise_correlation_and_p_value(
            [pair for step in runs.steps for pair in _same_size_noise_pairs(step)]
        ),
    }
    where = min(found, key=lambda key: found[key][1])
    value, p = found[where]
    pairs = len(noisy) * (len(noisy) - 1)  # of two signs each
    # In standard errors, each 1 / sqrt(size): to what is significant among all pairs, and on to a power of 80%.
    least = (stats.norm.isf(SHARE / len(found) / pairs) + stats.norm.ppf(POWER)) / math.sqrt(max(size, 1))

    def witness() -> WorstViolation:
        expected = f"0 ± {1 / math.sqrt(max(size, 1)):.3f}"
        if found["in any two steps"][1] > SHARE / len(found):
            return WorstViolation(f"correlation {value:.3f} {where}", expected)
        (one, at), (other, again) = (runs.training_and_step_index(noisy[i]) for i in pair)
        return WorstViolation(f"correlation {most:.3f} with training {other + 1}, step {again + 1}", expected, one, at)

    return loop_check_from_p_value(
        name, min(1.0, len(found) * p), f"the noise repeats {where}: correlation {value:.2f}",
        "no two steps, trainings or tensors share their noise",
        f"a correlation of {least:.2f} between any two steps", witness, unbounded_loop_epsilon,
    )  # fmt: skip


def _largest_noise_correlation_and_p_value(noises: Array, free: float) -> tuple[float, float, tuple[int, int]]:
    """Return the largest correlation of any two rows of noise, its p-value among all pairs, and which two.

    Of one noise given the other, the direction is uniform in its own dimensions (at least `free`), so the correlation
    is at most that of a uniform direction in them with a fixed one.
    """
    if free <= 1:  # no tensor is trained in every step
        return 0.0, 1.0, (0, 0)
    held = noises / np.linalg.norm(noises, axis=1, keepdims=True)
    alike = np.abs(np.triu(held @ held.T, 1))
    pairs = len(noises) * (len(noises) - 1) / 2
    most = float(alike.max())
    one, other = (int(i) for i in np.unravel_index(alike.argmax(), alike.shape))
    # Of a uniform direction in f dimensions r sqrt((f - 1) / (1 - r^2)) is Student's t with f - 1 degrees of freedom.
    t = most * math.sqrt((free - 1) / max(1 - most**2, 1e-12))
    return most, min(1.0, 2 * pairs * float(stats.t.sf(t, free - 1))), (one, other)


def _noise_degrees_of_freedom(step: ObservedStep, of: slice = slice(None)) -> float:
    """Dimensions of a step's noise, or of these elements: those outside its records' span."""
    return float((step.spread[of] ** 2).sum())


def _stack_noise_of_shared_tensors(steps: Sequence[ObservedStep]) -> tuple[Array, float]:
    """Return (steps, d) the noise of the tensors that every step trains, and the fewest degrees of freedom of a row."""
    shared = [name for name in steps[0].shapes if all(name in step.shapes for step in steps)]
    spans = [[slice(*step.shapes[name]) for name in shared] for step in steps]
    rows = [
        np.concatenate([np.zeros(0), *(step.noise[at] for at in own)]) for step, own in zip(steps, spans, strict=True)
    ]
    free = [sum(_noise_degrees_of_freedom(step, at) for at in own) for step, own in zip(steps, spans, strict=True)]
    return np.stack(rows), min(free)


_Pair = tuple[Array, Array, float]  # noise, noise, and the first one's dimensions


def _shared_tensor_noise(step: ObservedStep, other: ObservedStep) -> _Pair:
    """Return both steps' noise on the tensors that both train, and the first one's degrees of freedom there."""
    shared = [name for name in step.shapes if name in other.shapes]
    own = [slice(*step.shapes[name]) for name in shared]
    theirs = [slice(*other.shapes[name]) for name in shared]
    nothing = np.zeros(0)
    return (
        np.concatenate([nothing, *(step.noise[at] for at in own)]),
        np.concatenate([nothing, *(other.noise[at] for at in theirs)]),
        sum(_noise_degrees_of_freedom(step, at) for at in own),
    )


def _same_size_noise_pairs(step: ObservedStep) -> Iterator[_Pair]:
    """Pairs of tensors of one size, of which noise from one generator seeded anew would be equal."""
    spans = sorted(step.shapes.values(), key=lambda span: span[1] - span[0])
    for (a, b), (c, d) in itertools.pairwise(spans):
        if b - a == d - c:
            yield step.noise[a:b], step.noise[c:d], _noise_degrees_of_freedom(step, slice(a, b))


def _pooled_noise_correlation_and_p_value(pairs: Sequence[_Pair]) -> tuple[float, float]:
    """Of all pairs at once -> (correlation, p-value); (0, 1) of none.

    Given b, the variance of a @ b is at most b @ b times that of an element of a, which is a @ a over a's dimensions:
    not over its length, as two tensors whose gradients are alike have lost the same directions.
    """
    # A tensor whose records span all of its dimensions shows no noise to correlate.
    pairs = [pair for pair in pairs if pair[2] > 0.5]
    both = sum(float(a @ b) for a, b, _ in pairs)
    size = sum(math.sqrt(float(a @ a) * float(b @ b)) for a, b, _ in pairs)
    spread = math.sqrt(sum(float(a @ a) * float(b @ b) / free for a, b, free in pairs))
    return (both / size, 2 * float(stats.norm.sf(abs(both) / spread))) if spread else (0.0, 1.0)


# --- one record fewer, and other batches ------------------------------------------------------------------------------


def check_training_reveals_record_count(runs: WatchedTrainings) -> LoopCheck:
    """One record fewer shows in nothing but its gradient: not in steps, learning rates, or the size of the noise."""
    name, a, b = "number of records", runs.first_training, runs.fewer
    if runs.claim.public_size:
        return LoopCheck(name, UNKNOWN, "the claim says that it is public", "")
    free = round(sum(map(_noise_degrees_of_freedom, a.steps)))
    error = math.sqrt(1 / free) * 1.25  # of the logarithm of two medians' ratio: each errs sqrt(pi / 2) times a mean
    would = f"noise whose size differs by {100 * standard_errors_a_loop_check_detects(2) * error:.1f}%"
    if len(a.steps) != len(b.steps):
        said = f"{len(a.steps)} steps with {a.n} records, {len(b.steps)} with {b.n}"
        return broken_loop_check_without_chance(
            name, said, would, WorstViolation(str(len(b.steps)), str(len(a.steps))), math.inf
        )
    rates = [(i, x.rate, y.rate) for i, (x, y) in enumerate(zip(a.steps, b.steps, strict=True)) if x.rate != y.rate]
    if rates:
        at, x, y = rates[0]
        said = f"other learning rates with {b.n} records than {a.n}"
        return broken_loop_check_without_chance(
            name, said, would, WorstViolation(f"learning rate {y:g}", f"{x:g}", 0, at), math.inf
        )
    one, other = (float(np.median([step.scale for step in trace.steps])) for trace in (a, b))
    if not one or not other:
        return LoopCheck(name, UNKNOWN, "no noise whose size could be compared", would)
    p = 2 * float(stats.norm.sf(abs(math.log(one / other)) / error))
    return loop_check_from_p_value(
        name, p,
        f"the noise is {other / one:.3f} times as large with {b.n} records as with {a.n}: it tells how many there are",
        f"noise, steps and rates are the same with {a.n} and {b.n} records", would,
        lambda: WorstViolation(f"noise of {other:.4g} with {b.n} records, {one:.4g} with {a.n}",
                        f"a ratio of 1 ± {1.96 * error:.4f}"),
        lambda: epsilon_between_noise_scales(free, one, other, runs.claim.delta),
    )  # fmt: skip


def check_noise_reveals_batch_size(runs: WatchedTrainings) -> LoopCheck:
    """The size of a batch, which is secret, does not show in the size of the noise."""
    held = [(len(step.records), step.scale) for step in runs.steps_with_noise if step.records]
    if runs.few and len({size for size, _ in held}) < 2:  # the last batch of few records holds one alone
        held = [(len(step.records), step.scale) for step in runs.few.steps if step.records and step.scale]
    sizes, scales = np.array(held, dtype=float).reshape(-1, 2).T
    name, would = "batch size stays secret", "noise divided by the size of its batch"
    if len(set(sizes)) < 2:
        return LoopCheck(name, UNKNOWN, "all batches had one size", would, source=PLANTED)
    # Divided by the batch's size the noise goes with its power -1, multiplied with 1: other slopes count as chance.
    x, y = np.log(sizes), np.log(scales)
    found = stats.linregress(x, y)
    p = float(found.pvalue) if abs(abs(found.slope) - 1) < 0.1 else 1.0
    return loop_check_from_p_value(
        name, p, "the noise is divided by the number of records that a batch happens to have",
        "the size of the noise does not follow that of the batch", would,
        lambda: WorstViolation(f"noise goes with the batch's size " f"to the power {found.slope:.2f}", "0"),
        unbounded_loop_epsilon, PLANTED, )  # fmt: skip
