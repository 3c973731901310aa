"""Checks of ways past a step: other records of the batch, what is given back or printed, seeds to
be guessed."""

from __future__ import annotations

import functools
import math

import numpy as np
import torch
from scipy import stats

from auditor.crash.printed_output import first_printed_line_with_other_numbers
from auditor.crash.verdicts import (
    BROKEN,
    COUNTED,
    NO_FAULT,
    SHARE,
    UNKNOWN,
    Array,
    LoopCheck,
    WatchedTrainings,
    WorstViolation,
    broken_loop_check_without_chance,
    loop_check_without_chance,
)
from auditor.crash.watch import ObservedStep

# seeds of torch's generator, and how many of its first numbers are looked at
_TRIED, _READ = (
    1 << 16,
    16,
)
_APART = 0.05  # of the logits' size: rounding in half precision is below


def check_noise_seed_guessable(runs: WatchedTrainings) -> LoopCheck:
    """Nobody finds the noise by trying seeds: no small seed gives it, and more than 32 bits of a
    seed decide it.

    torch's generator on the processor reads the lowest 32 bits of its seed, whatever it is given.
    """
    name, would = (
        "secret noise",
        f"noise that begins as torch's generator does under a seed below {_TRIED:,}",
    )
    seed, p, tensor = _most_likely_noise_seed(runs)
    if p < SHARE:
        said = f"the noise of {tensor} is what torch's generator gives under the seed {seed}"
        shown = WorstViolation(said, "a seed that nobody can try", 0, 0, tensor=tensor)
        return LoopCheck(name, BROKEN, said, would, p, math.inf, shown)
    other, first = runs.other_seed, runs.first_training.steps[0]
    if other is None or not first.scale or other.noise.shape != first.noise.shape:
        return LoopCheck(name, UNKNOWN, "no noise that could be looked at", would)
    if np.allclose(other.noise, first.noise, rtol=1e-3, atol=1e-3 * first.scale):
        said = (
            "seeds that share their lowest 32 bits give the same noise: who tries 2^32 of them, as "
            "torch's "
        )
        said += "generator on the processor has, can take it off; on a GPU it has 64 bits"
        return LoopCheck(name, UNKNOWN, said, would)
    return LoopCheck(
        name,
        NO_FAULT,
        "no small seed gives the noise, and more than 32 bits of a seed decide it",
        would,
    )


@functools.cache
def _first_normals_of_guessable_seeds() -> Array:
    """(seeds, 16) the first normal numbers of each, of unit length; those of any tensor of 32 or
    more begin so."""
    generator = torch.Generator()
    held = torch.empty(_TRIED, _READ)
    for seed, row in enumerate(held):
        row.normal_(generator=generator.manual_seed(seed))
    found: Array = torch.nn.functional.normalize(held, dim=1).numpy()
    return found


def _most_likely_noise_seed(runs: WatchedTrainings) -> tuple[int, float, str]:
    """The seed whose numbers are most like a tensor's noise in a training's first step, its
    p-value, and the tensor."""
    # torch draws 16 normal numbers at a time, and the last 16 of a tensor anew where its size is no
    # multiple of that.
    first = runs.first_training.steps[0]
    spans = [(name, at, to) for name, (at, to) in first.shapes.items() if to - at >= 4 * _READ]
    steps = [
        t.steps[0] for t in runs.traces if t.steps[0].scale and t.steps[0].shapes == first.shapes
    ]
    if not spans or not steps:
        return 0, 1.0, ""
    heads = np.stack([step.noise[at : at + _READ] for step in steps for _, at, _ in spans])
    likely = (
        np.abs(_first_normals_of_guessable_seeds() @ heads.T.astype(np.float32))
        .argmax(0)
        .reshape(len(steps), len(spans))
    )
    found = []
    for step, seeds in zip(steps, likely, strict=True):
        for (name, at, to), seed in zip(spans, seeds, strict=True):
            # The first numbers only nominate a seed: the p-value is of the whole tensor.
            given = torch.randn(to - at, generator=torch.Generator().manual_seed(int(seed))).numpy()
            own, free = step.noise[at:to], float((step.spread[at:to] ** 2).sum())
            size = float(np.linalg.norm(own) * np.linalg.norm(given))
            # Noise that is independent of `given` has a cosine of about N(0, 1 / free) with it.
            alike = abs(float(own @ given)) / size if size else 0.0
            found.append((float(stats.norm.sf(alike * math.sqrt(free))), int(seed), name))
    p, seed, name = min(found)  # Bonferroni: of either sign, among all seeds, tensors and trainings
    return seed, min(1.0, 2 * p * len(found) * _TRIED), name


_counted_check = functools.partial(LoopCheck, source=COUNTED)


def check_training_logits_depend_on_batch(runs: WatchedTrainings) -> LoopCheck:
    """A record's logits do not depend on the others in its batch: if they do, no clipping bounds
    the record's reach.

    Batch norm, padding that is attended to, or experts of a fixed capacity make them depend.
    """
    name, would = "each record by itself", f"logits that change by {_APART:.0%}"
    found = [(trace.apart, i) for i, trace in enumerate(runs.traces) if trace.apart is not None]
    if not found:
        return _counted_check(
            name, UNKNOWN, "no two records were read together that could be read again", would
        )
    most, at = max(found)
    said = f"a record's logits change by {most:.1%} with whom it is read"
    if most > _APART:
        said += ": so does its gradient, and one record moves all of its batch's"
    shown = WorstViolation(f"logits {most:.1%} off", "those of the record alone", at)
    return loop_check_without_chance(name, most > _APART, said, would, lambda: shown)


def check_weights_follow_steps(runs: WatchedTrainings) -> LoopCheck:
    """What is given back follows from the steps alone: the same steps, on a record fewer, end in
    the same model."""
    name, would = "weights follow the steps", "any other change by the record that was left out"
    one, other = runs.first_training, runs.fewer
    if one.state and len(one.steps) == len(other.steps) and one.state.keys() == other.state.keys():
        off = [
            key
            for key, value in one.state.items()
            if not _is_weight_equal_ignoring_nan(value, other.state[key])
        ]
        if not off:
            return _counted_check(
                name,
                NO_FAULT,
                "the same steps on neighbouring records end in the same model",
                would,
            )
        said = (
            f"{len(off)} of {len(one.state)} weights and buffers follow the records past the "
            "steps: "
        )
        largest = float((one.state[off[0]].double() - other.state[off[0]].double()).abs().max())
        shown = WorstViolation(f"{largest:.2g} apart after the same steps", "0", 0, tensor=off[0])
        return broken_loop_check_without_chance(name, said + ", ".join(off[:2]), would, shown)
    at = next(
        ((i, t.elsewhere) for i, t in enumerate(runs.traces) if t.elsewhere is not None), None
    )
    if at:
        said = (
            f"something that is no step changed them before step {at[1] + 1} of training "
            f"{at[0] + 1}"
        )
        return _counted_check(name, UNKNOWN, f"{said}: it was not looked at", would)
    if any(trace.returned is None for trace in runs.traces):
        said = "those given back are of no step: how they were made was not looked at"
        return _counted_check(name, UNKNOWN, said, would)
    return _counted_check(name, NO_FAULT, "the weights are those that the steps leave", would)


def _is_weight_equal_ignoring_nan(one: torch.Tensor, other: torch.Tensor) -> bool:
    # torch.equal: a NaN equals nothing, itself included.
    return one.shape == other.shape and torch.equal(one.nan_to_num(), other.nan_to_num())


def check_printed_output_leaks(runs: WatchedTrainings) -> LoopCheck:
    """What is printed follows from the steps alone, as the loss of private records does not."""
    name, would = (
        "printed text",
        "a number, of standard output or a log, that follows the record that was left out",
    )
    if len(runs.first_training.steps) != len(runs.fewer.steps):
        return _counted_check(name, UNKNOWN, "another number of steps", would)
    if runs.again is None:
        return _counted_check(name, NO_FAULT, "the same on neighbouring records", would)
    one, other, again = runs.first_training.printed, runs.fewer.printed, runs.again.printed
    if found := first_printed_line_with_other_numbers(one.text, other.text, again.text):
        said = f"what is printed follows the records past the steps: {found[0]!r}"
        shown = WorstViolation(repr(found[0]), f"{found[1]!r}, as on a record fewer")
        return broken_loop_check_without_chance(name, said, would, shown)
    if found := first_printed_line_with_other_numbers(one.early, other.early, again.early):
        said = f"{found[0]!r} on a record fewer is {found[1]!r}"
        said += "; printed before its step, it may be of what that releases"
        return _counted_check(name, UNKNOWN, said, would)
    return _counted_check(name, NO_FAULT, "the same on neighbouring records, but for times", would)


def _steps_mixing_foreign_rows(runs: WatchedTrainings) -> list[ObservedStep]:
    """Return the steps that read rows that are no record together with records; a training's first
    is a trial."""
    return [step for step in runs.steps_but_first_of_each_training if step.foreign and step.records]


def check_rows_are_records(runs: WatchedTrainings) -> LoopCheck:
    """Every row that a step reads is one of the given records: a part of a record is clipped and
    sampled by itself."""
    name, would = "rows are records", "one row that is none of the given records"
    mixed = _steps_mixing_foreign_rows(runs)
    if not mixed:
        return _counted_check(name, NO_FAULT, "every row is one of the given records", would)
    rows = sum(step.foreign for step in mixed)
    said = (
        f"{rows:,} rows in {len(mixed)} steps were none of the given records: if they are parts of "
        "records, a record moves the sum by more than one clipping norm"
    )
    return _counted_check(name, UNKNOWN, said, would)


def check_empty_batch_noise(runs: WatchedTrainings) -> LoopCheck:
    """A batch that Poisson sampling leaves empty is a step with noise, as any other."""
    name, would = (
        "empty batches",
        "one that is left out, is filled with a made-up row, or has no noise",
    )
    if runs.few_error:
        return _counted_check(
            name, UNKNOWN, f"the training fails on few records: {runs.few_error}", would
        )
    if runs.few is None or runs.claim.sampling != "poisson":
        return _counted_check(
            name, UNKNOWN, "no training on so few records that a batch might be empty", would
        )
    few, claimed = runs.few, runs.few_claimed
    # Without the first step: what is read before it may be a trial of the model.
    without = [step for step in few.steps[1:] if not step.records]
    silent = sum(not step.scale for step in without)
    if silent:
        said = f"{silent} of {len(without)} steps without a record had no noise"
        return broken_loop_check_without_chance(
            name, said, would, WorstViolation("no noise", "the others'"), math.inf
        )
    filled = [] if _steps_mixing_foreign_rows(runs) else [step for step in without if step.foreign]
    if filled:
        said = (
            f"{len(filled)} of {len(without)} steps without a record used the gradient of a "
            "made-up row"
        )
        # With one record more its gradient takes that row's place: the sum moves by up to two
        # clipping norms.
        epsilon = runs.epsilon_with_noise_multiplier(runs.claim.noise_multiplier / 2)
        shown = WorstViolation("a made-up row in place of an empty batch", "noise and nothing else")
        return broken_loop_check_without_chance(name, said, would, shown, epsilon)
    if claimed and len(few.steps) < claimed and len(runs.first_training.steps) >= runs.claim.steps:
        said = (
            f"with {few.n} records, {len(few.steps)} of {claimed} claimed steps were taken: empty "
            "batches show"
        )
        return broken_loop_check_without_chance(
            name, said, would, WorstViolation(f"{len(few.steps)} steps", str(claimed)), math.inf
        )
    if not without:
        return _counted_check(name, UNKNOWN, f"no batch of {few.n} records was empty", would)
    return _counted_check(
        name, NO_FAULT, f"{len(without)} steps without a record have noise", would
    )
