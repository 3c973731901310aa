"""Check for leaks that bypass the noisy gradient, such as batch effects, prints and seeds."""

from __future__ import annotations

import functools
import math

import numpy as np
import torch
from scipy import stats

from auditor.core.arrays import Floats
from auditor.crash.printed_output import find_differing_line
from auditor.crash.verdicts import (
    BROKEN,
    COUNTED,
    NO_FAULT,
    SHARE,
    UNKNOWN,
    LoopCheck,
    WatchedTrainings,
    WorstViolation,
    fail_crash_test,
    judge_certain_crash_test,
)
from auditor.crash.watch import ObservedStep

# seeds of torch's generator to try, and the count of first numbers to compare
_TRIED = 1 << 16
_READ = 16
_APART = 0.05  # relative to the logits' size; rounding in half precision is smaller


def check_noise_seed_guessable(runs: WatchedTrainings) -> LoopCheck:
    """Check that nobody can reproduce the noise by trying seeds.

    The noise must not come from a small seed. It must also depend on more than the lowest 32 bits
    of the seed, which are all that torch's CPU generator reads.
    """
    would = f"noise that begins as torch's generator does under a seed below {_TRIED:,}"
    seed, p, tensor = _find_likeliest_seed(runs)
    if p < SHARE:
        message = (
            f"the noise of {tensor} equals the output of torch's generator with the seed {seed}"
        )
        witness = WorstViolation(message, "a seed that nobody can try", 0, 0, tensor=tensor)
        return LoopCheck(BROKEN, message, would, p, math.inf, witness)
    other = runs.other_seed
    first = runs.first_training.steps[0]
    if other is None or not first.scale or other.noise.shape != first.noise.shape:
        return LoopCheck(UNKNOWN, "no noise to examine", would)
    if np.allclose(other.noise, first.noise, rtol=1e-3, atol=1e-3 * first.scale):
        message = (
            "seeds that share their lowest 32 bits give the same noise: an attacker who tries 2^32 "
            "of them, as many as torch's "
        )
        message += "generator on the processor has, can remove the noise; on a GPU it has 64 bits"
        return LoopCheck(UNKNOWN, message, would)
    return LoopCheck(
        NO_FAULT,
        "no small seed gives the noise, and more than 32 bits of a seed decide it",
        would,
    )


@functools.cache
def _list_guessable_normals() -> Floats:
    """Return the first 16 normal numbers that torch draws from each small seed, as (seeds, 16).

    Each row is scaled to length 1. Every tensor of at least 32 normal numbers begins with these 16.
    """
    generator = torch.Generator()
    normals = torch.empty(_TRIED, _READ)
    for seed, row in enumerate(normals):
        row.normal_(generator=generator.manual_seed(seed))
    directions: Floats = torch.nn.functional.normalize(normals, dim=1).numpy()
    return directions


def _find_likeliest_seed(runs: WatchedTrainings) -> tuple[int, float, str]:
    """Find the guessable integer seed that best reproduces the noise in some tensor.

    Only the first step of each training is searched, in all tensors. Return the seed, the p-value
    of the match, and the tensor's name; (0, 1.0, "") if no tensor is long enough or has noise.
    """
    # torch draws 16 normal numbers at a time, and draws the last 16 of a tensor again if its size
    # is not a multiple of 16.
    first = runs.first_training.steps[0]
    spans = [
        (name, at, to) for name, (at, to) in first.tensor_ranges.items() if to - at >= 4 * _READ
    ]
    steps = []
    for t in runs.traces:
        if t.steps[0].scale and t.steps[0].tensor_ranges == first.tensor_ranges:
            steps.append(t.steps[0])
    if not spans or not steps:
        return 0, 1.0, ""
    heads = np.stack([step.noise[at : at + _READ] for step in steps for _, at, _ in spans])
    likely = (
        np.abs(_list_guessable_normals() @ heads.T.astype(np.float32))
        .argmax(0)
        .reshape(len(steps), len(spans))
    )
    matches = []
    for step, seeds in zip(steps, likely, strict=True):
        for (name, at, to), seed in zip(spans, seeds, strict=True):
            # The first numbers only propose a seed; the p-value uses the full tensor.
            normals = torch.randn(
                to - at, generator=torch.Generator().manual_seed(int(seed))
            ).numpy()
            noise = step.noise[at:to]
            free = float((step.spread[at:to] ** 2).sum())
            size = float(np.linalg.norm(noise) * np.linalg.norm(normals))
            # Noise that is independent of `normals` has a cosine with it of about N(0, 1 / free).
            cosine = 0.0
            if size:
                cosine = abs(float(noise @ normals)) / size
            matches.append((float(stats.norm.sf(cosine * math.sqrt(free))), int(seed), name))
    p, seed, name = min(matches)  # Bonferroni over signs, seeds, tensors and trainings
    return seed, min(1.0, 2 * p * len(matches) * _TRIED), name


_counted_check = functools.partial(LoopCheck, source=COUNTED)


def check_batch_dependence(runs: WatchedTrainings) -> LoopCheck:
    """Check that a record's logits do not depend on the other records in its batch.

    If they do, clipping cannot bound the record's effect on a gradient. Causes are batch norm,
    attention to padding, and experts of fixed capacity.
    """
    would = f"logits that change by {_APART:.0%}"
    changes = []
    for i, trace in enumerate(runs.traces):
        if trace.batch_effect is not None:
            changes.append((trace.batch_effect, i))
    if not changes:
        return _counted_check(UNKNOWN, "no batch could be read again to compare its records", would)
    most, at = max(changes)
    message = f"a record's logits change by {most:.1%} with the other records of its batch"
    return judge_certain_crash_test(
        most > _APART,
        f"{message}: its gradient changes too, so one record moves the gradients of its whole "
        "batch",
        message,
        would,
        lambda: WorstViolation(f"logits {most:.1%} off", "those of the record by itself", at),
    )


def check_weights_follow_steps(runs: WatchedTrainings) -> LoopCheck:
    """Check that records affect the returned weights only through the steps.

    A replay of the same steps without the last record must return the same model.
    """
    would = "any other effect of the left-out record"
    first = runs.first_training
    other = runs.fewer
    if (
        first.state
        and len(first.steps) == len(other.steps)
        and first.state.keys() == other.state.keys()
    ):
        changed = []
        for key, value in first.state.items():
            if not _is_weight_equal_ignoring_nan(value, other.state[key]):
                changed.append(key)
        if not changed:
            return _counted_check(
                NO_FAULT,
                "the same steps on neighbouring records end in the same model",
                would,
            )
        message = (
            f"{len(changed)} of {len(first.state)} weights and buffers depend on the records other "
            "than through the steps: "
        )
        largest = float(
            (first.state[changed[0]].double() - other.state[changed[0]].double()).abs().max()
        )
        witness = WorstViolation(
            f"{largest:.2g} apart after the same steps", "0", 0, tensor=changed[0]
        )
        return fail_crash_test(message + ", ".join(changed[:2]), would, witness)
    for i, trace in enumerate(runs.traces):
        if trace.elsewhere is not None:
            message = (
                f"something that is no step changed them before step {trace.elsewhere + 1} of "
                f"training {i + 1}"
            )
            return _counted_check(UNKNOWN, f"{message}: it was not examined", would)
    if any(trace.returned is None for trace in runs.traces):
        message = "the returned weights are not those after any step: their origin was not examined"
        return _counted_check(UNKNOWN, message, would)
    return _counted_check(NO_FAULT, "the weights are those after the steps", would)


def _is_weight_equal_ignoring_nan(weight: torch.Tensor, other: torch.Tensor) -> bool:
    # torch.equal treats NaN as unequal to itself.
    return weight.shape == other.shape and torch.equal(weight.nan_to_num(), other.nan_to_num())


def check_printed_output_leaks(runs: WatchedTrainings) -> LoopCheck:
    """Check that records affect the printed text only through the steps.

    For example, a training that prints the loss of a private record fails this check.
    """
    would = "a number in standard output or a log that depends on the left-out record"
    if len(runs.first_training.steps) != len(runs.fewer.steps):
        return _counted_check(UNKNOWN, "another number of steps", would)
    if runs.repeated_training is None:
        return _counted_check(NO_FAULT, "the same on neighbouring records", would)
    first = runs.first_training.printed
    other = runs.fewer.printed
    again = runs.repeated_training.printed
    if lines := find_differing_line(first.text, other.text, again.text):
        message = f"what is printed depends on the records beyond the steps: {lines[0]!r}"
        witness = WorstViolation(repr(lines[0]), f"{lines[1]!r}, as with one record fewer")
        return fail_crash_test(message, would, witness)
    if lines := find_differing_line(first.early, other.early, again.early):
        message = f"{lines[0]!r} is, with one record fewer, {lines[1]!r}"
        message += "; printed before its step, it may show what that step releases"
        return _counted_check(UNKNOWN, message, would)
    return _counted_check(NO_FAULT, "the same on neighbouring records, except for times", would)


def _list_mixed_steps(runs: WatchedTrainings) -> list[ObservedStep]:
    """Return the steps whose batches contain both given records and texts of unknown origin.

    The first step of each training is omitted.
    """
    return [step for step in runs.steps_but_first_of_each_training if step.foreign and step.records]


def check_rows_are_records(runs: WatchedTrainings) -> LoopCheck:
    """Check that every row of a batch is one of the given records.

    A training that splits records into rows clips and samples each part separately.
    """
    would = "one row that is none of the given records"
    mixed = _list_mixed_steps(runs)
    if not mixed:
        return _counted_check(NO_FAULT, "every row is one of the given records", would)
    rows = sum(step.foreign for step in mixed)
    message = (
        f"{rows:,} rows in {len(mixed)} steps were none of the given records: if they are parts of "
        "records, a record moves the sum by more than one clipping norm"
    )
    return _counted_check(UNKNOWN, message, would)


def check_empty_batch_noise(runs: WatchedTrainings) -> LoopCheck:
    """Check that a step adds the usual noise if Poisson sampling gave it an empty batch."""
    would = "one that is left out, is filled with a made-up row, or has no noise"
    if runs.few_error:
        return _counted_check(
            UNKNOWN, f"the training fails on few records: {runs.few_error}", would
        )
    if runs.small_training is None or runs.claim.sampling != "poisson":
        return _counted_check(
            UNKNOWN, "no training on so few records that a batch might be empty", would
        )
    few = runs.small_training
    claimed = runs.few_claimed
    # Leave out the first step: reads before it may be a trial of the model.
    empty = [step for step in few.steps[1:] if not step.records]
    silent = sum(not step.scale for step in empty)
    if silent:
        message = f"{silent} of {len(empty)} steps without a record had no noise"
        return fail_crash_test(message, would, WorstViolation("no noise", "the others'"), math.inf)
    filled = [step for step in empty if step.foreign]
    if filled and not _list_mixed_steps(runs):
        message = (
            f"{len(filled)} of {len(empty)} steps without a record used the gradient of a "
            "made-up row"
        )
        # With one more record, its gradient replaces that row's: the sum moves by up to two
        # clipping norms.
        epsilon = runs.compute_noise_epsilon(runs.claim.noise_multiplier / 2)
        witness = WorstViolation(
            "a made-up row in place of an empty batch", "noise and nothing else"
        )
        return fail_crash_test(message, would, witness, epsilon)
    if claimed and len(few.steps) < claimed and len(runs.first_training.steps) >= runs.claim.steps:
        message = (
            f"with {few.n} records, {len(few.steps)} of {claimed} claimed steps were taken: empty "
            "batches show"
        )
        return fail_crash_test(
            message, would, WorstViolation(f"{len(few.steps)} steps", str(claimed)), math.inf
        )
    if not empty:
        return _counted_check(UNKNOWN, f"no batch of {few.n} records was empty", would)
    return _counted_check(NO_FAULT, f"{len(empty)} steps without a record have noise", would)
