"""The whole crash test: a training is run some eight times on what we make, and every check is
asked."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from auditor.core.errors import AuditError
from auditor.crash import checks_of_sensitivity, trainers, training_specimen
from auditor.crash.checks import run_all_crash_test_checks
from auditor.crash.checks_of_company import OWN_GRADIENT, measure_share_of_expected_reach
from auditor.crash.checks_of_noise import whiten_unequal_noise
from auditor.crash.claim import LoopClaim
from auditor.crash.verdicts import BROKEN, NO_FAULT, UNKNOWN, LoopCheck, WatchedTrainings
from auditor.crash.watch import ObservedStep, Train, TrainingTrace, run_watched_training
from auditor.statistics.audited import audit_epsilon_bounds

_IN_COMPANY = 2  # trainings that look for what other records do to a record's gradient
_COMPANY_TRIALS = 4  # of weights, until gradients are about as long as wanted there
_NORM_TO_SCALE = -1 / 1.6  # norms rise with the first to the second power of the weights' scale
_ENOUGH, _MOST = 1200, 12  # gradients of single records that are looked at; trainings
# if one of these cannot tell, the whole test cannot
_NEEDED = (
    "one record's reach",
    "weights follow the steps",
    "rows are records",
    "noise by a schedule",
)
# if one of these cannot tell, no epsilon was observed
_OF_EPSILON = (
    "one record's reach",
    "rows are records",
)
_LEAST = len(training_specimen.SPECIMENS)  # trainings, where there is time for them


@dataclass(frozen=True)
class ObservedLoop:
    """What the loop really did. epsilon: by our accountant, of this noise, rate and steps; inf:
    unbounded.

    noise_multiplier and epsilon are None where no record's reach was seen; low, high: the 95%
    interval of epsilon that those of the noise multiplier and the sampling rate give.
    """

    noise_multiplier: float | None
    sample_rate: float
    steps: int
    epsilon: float | None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class OneRun:
    """With 95% confidence epsilon is at least `epsilon`. best: what every guess right would have
    shown.

    claimed: what the training's claim gives, on the half of the records that it got.
    """

    epsilon: float
    best: float
    claimed: float
    canaries: int
    guesses: int
    right: int


@dataclass(frozen=True)
class CrashTest:
    """The verdict on a private training. epsilon: what it really has, at least; None: nothing
    against its claim."""

    claim: LoopClaim
    checks: tuple[LoopCheck, ...]
    remarks: tuple[str, ...]
    seconds: float
    seen: ObservedLoop
    seed: int = 0
    one_run: OneRun | None = None  # None: there was no time for it

    def keep_named_checks(self, names: Sequence[str]) -> CrashTest:
        """These checks alone; all where none is named. Raises AuditError for a name that no check
        has."""
        known = [check.name for check in self.checks]
        if unknown := [name for name in names if name not in known]:
            raise AuditError(f"there is no check {unknown[0]!r}; the checks are {', '.join(known)}")
        kept = tuple(check for check in self.checks if check.name in names or not names)
        return replace(self, checks=kept)

    @property
    def broken_checks(self) -> list[LoopCheck]:
        return [check for check in self.checks if check.verdict == BROKEN]

    @property
    def verdict(self) -> str:
        """`broken`, `no fault seen` or `cannot tell`, where no record's reach was seen: never that
        it is private."""
        if self.broken_checks:
            return BROKEN
        by_name = {check.name: check.verdict for check in self.checks}
        needed = [by_name[name] for name in _NEEDED if name in by_name] or list(by_name.values())[
            :1
        ]
        return UNKNOWN if UNKNOWN in needed else NO_FAULT

    @property
    def exceeds_claim_without_fault(self) -> bool:
        """Whether what was seen gives more than is claimed, by its own interval, while no check is
        sure of a fault."""
        return (
            not self.broken_checks
            and self.seen.low is not None
            and self.seen.low > self.claim.implied_epsilon()
        )

    @property
    def epsilon(self) -> float | None:
        found = [check.epsilon for check in self.broken_checks if check.epsilon is not None]
        return max(found) if found else None


def crash_test(
    train: Train,
    claim: object = None,
    minutes: float = 2.0,
    seed: int = 0,
    tell: Callable[[int, int], None] = lambda done, all: None,
) -> CrashTest:
    """Run `train(model, records)` on tiny models and records that we make, and hold it against its
    claim.

    train: trains the model in place by a torch.optim optimizer; records: a list of {"input_ids":
    [token, ...]}. It returns (model, claim), or its claim is given here (`LoopClaim`, or a mapping
    of its fields). Or a Trainer of transformers, of which another is made for each training. It is
    run until some thousand gradients were seen, on each of our models where half of the time is
    enough; tell: gets how many trainings are done, and of how many. Raises AuditError where the
    training ignores its model or its records, states no claim, or takes longer than so many
    minutes.
    """
    begun = time.monotonic()
    until = begun + 60 * minutes
    if trainers.is_transformers_trainer(train):
        train = trainers.make_train_function_from_trainer(train, None)
    tell(0, _LEAST + 2)
    own = seed_of_watched_training(seed, 0)
    first, returned = run_watched_training(train, own, training_specimen.RECORDS, until)
    read = LoopClaim.from_stated_claim(returned if claim is None else claim)
    if not read.noise_multiplier:
        raise AuditError(
            "expected a claim with noise, got noise_multiplier 0: no epsilon follows from it"
        )
    # First: what is not the same again under its seed can be neither replayed nor reproduced.
    other_seed = _first_step_of_seed_plus_two_to_32(train, first, own, until)
    fewer, again = _replay_training_without_last_record(train, read, first, own, until)
    # Its seed, and below that of the bound, lie past those of the trainings.
    few, few_claimed, few_error = _training_on_few_records(
        train, claim, first, seed_of_watched_training(seed, _MOST + 1), until
    )
    company = _train_in_company(train, read, seed, until)
    traces = [first]
    # How often depends on how much is read, not on what is found: the level holds.
    # At least two: whether noise is fresh shows between trainings as well.
    while len(traces) < 2 or (
        _is_another_watched_training_needed(traces) and _has_time_for_another_training(begun, until)
    ):
        at = len(traces)
        # As many as reach _ENOUGH gradients at the pace so far, and at least one a model.
        planned = min(
            _MOST, max(_LEAST, math.ceil(_ENOUGH * at / _count_records_read_in_traces(traces)))
        )
        tell(at + 1, planned + 2)
        traces.append(
            run_watched_training(
                train, seed_of_watched_training(seed, at), training_specimen.RECORDS, until, at
            )[0]
        )
    runs = WatchedTrainings(
        read, tuple(traces), fewer, again, few, few_claimed, few_error, other_seed, company
    )
    checks = tuple(run_all_crash_test_checks(runs))
    bound = None
    if _has_time_for_another_training(begun, until):
        bound = bound_loop_epsilon_by_membership_guesses(
            train, claim, seed_of_watched_training(seed, _MOST), until
        )
    return CrashTest(
        claim=read,
        checks=checks,
        remarks=(),
        seconds=time.monotonic() - begun,
        seen=observed_loop_of_watched_trainings(whiten_unequal_noise(runs), checks),
        seed=seed,
        one_run=bound,
    )


def _first_step_of_seed_plus_two_to_32(
    train: Train, first: TrainingTrace, seed: int, until: float
) -> ObservedStep:
    """The first step under seed + 2^32. Raises AuditError where the seed itself does not give its
    first step again."""
    one = first.steps[0]
    again = run_watched_training(train, seed, training_specimen.RECORDS, until, most=1)[0].steps[0]
    same = one.records == again.records and one.noise.shape == again.noise.shape
    if not same or not np.allclose(one.noise, again.noise, rtol=1e-3, atol=1e-3 * one.scale):
        raise AuditError(
            "the training is not the same again under the same seed: draw batches and noise from "
            "torch's or numpy's generator, or from one seeded by torch.initial_seed()"
        )
    # torch's generator on a processor reads the lowest 32 bits alone, and numpy's is given no more.
    return run_watched_training(train, seed + 2**32, training_specimen.RECORDS, until, most=1)[
        0
    ].steps[0]


def _replay_training_without_last_record(
    train: Train, claim: LoopClaim, first: TrainingTrace, seed: int, until: float
) -> tuple[TrainingTrace, TrainingTrace | None]:
    """The first training, its released steps replayed: without its last record (another one, if n
    is public).

    Beside it, where that prints something else, the first one replayed on its own records.
    """
    n = training_specimen.RECORDS - (not claim.public_size)
    fewer, _ = run_watched_training(
        train, seed, n, until, replayed=first.released, other_last=claim.public_size
    )
    if (fewer.printed.text, fewer.printed.early) == (first.printed.text, first.printed.early):
        return fewer, None
    return fewer, run_watched_training(
        train, seed, training_specimen.RECORDS, until, replayed=first.released
    )[0]


def _train_in_company(
    train: Train, claim: LoopClaim, seed: int, until: float
) -> tuple[TrainingTrace, ...]:
    """Train on gradients that are shorter than the claimed clipping norm, one long text among short
    ones."""
    if not claim.max_grad_norm:
        return ()
    seeds = [seed_of_watched_training(seed, _MOST + 2 + at) for at in range(_IN_COMPANY)]

    def train_on(specimen: training_specimen.Specimen, seed: int) -> TrainingTrace:
        return run_watched_training(
            train, seed, training_specimen.RECORDS, until, specimen=specimen
        )[0]

    specimen = training_specimen.make_company_specimen(claim.max_grad_norm)
    first = train_on(specimen, seeds[0])
    # The gradients are those of the tensors that the loop trains, which may be an adapter's.
    for _ in range(_COMPANY_TRIALS):
        share = _measure_share_of_company_norm(first, claim.max_grad_norm)
        if 2 / 3 < share < 3 / 2:
            break
        specimen = specimen.scale_weights(share**_NORM_TO_SCALE)
        first = train_on(specimen, seeds[0])
    # A mean over a batch that nothing undoes makes them shorter once more.
    share = measure_share_of_expected_reach(first, claim)
    if share < 0.5:
        specimen = specimen.scale_weights(share**_NORM_TO_SCALE)
        first = train_on(specimen, seeds[0])
    return (first, *(train_on(specimen, each) for each in seeds[1:]))


def _measure_share_of_company_norm(trace: TrainingTrace, clipping_norm: float) -> float:
    """Return the median norm of the first gradients over the one wanted where company is looked at;
    1 if none was seen."""
    norms = next((step.norms for step in trace.steps if step.norms.any()), None)
    if norms is None:
        return 1.0
    return float(np.median(norms)) / (training_specimen.COMPANY_SHARE * clipping_norm)


def _training_on_few_records(
    train: Train, stated: object, first: TrainingTrace, seed: int, until: float
) -> tuple[TrainingTrace | None, int | None, str]:
    """Run a training on as many records as a batch holds and one more -> its trace, the steps it
    claims, its error.

    At the claimed rate its batches then hold one record or none. The trace is None and the error
    says why if the training raises an exception, as many loops do on an empty batch.
    """
    n = 1 + round(sum(len(step.records) for step in first.steps) / len(first.steps))
    if n > training_specimen.RECORDS // 2:
        return None, None, ""
    try:
        few, returned = run_watched_training(train, seed, n, until, empty_draws=True)
        claimed = (
            None
            if stated is not None
            else LoopClaim.from_stated_claim(returned, with_epsilon=False).steps
        )
        return few, claimed, ""
    except Exception as error:
        if time.monotonic() > until:
            raise
        return (
            None,
            None,
            f"with {n} records, as on an empty batch, it raises {type(error).__name__}: {error}",
        )


def bound_loop_epsilon_by_membership_guesses(
    train: Train, claim: object, seed: int, until: float
) -> OneRun:
    """Each of our records is in by a fair coin; guessed "in" are those that moved the released
    gradients farthest.

    claim: as it was stated for all trainings; None: this one's own is read. The bound:
    `statistics/one_run.py`.
    """
    coins = np.random.default_rng(seed).random(training_specimen.RECORDS) < 0.5
    chosen = [int(i) for i in np.flatnonzero(coins)]
    trace, returned = run_watched_training(
        train, seed, training_specimen.RECORDS, until, chosen=chosen
    )
    read = LoopClaim.from_stated_claim(returned if claim is None else claim, with_epsilon=False)
    # (records,): `chosen` makes the watch measure the reach of those left out as well.
    scores = np.sum([step.reaches for step in trace.steps], axis=0)
    found = audit_epsilon_bounds(scores, coins, read.delta)[0]
    return OneRun(
        found.epsilon,
        found.best,
        read.implied_epsilon(),
        found.canaries,
        found.guesses,
        found.right,
    )


def seed_of_watched_training(seed: int, training: int) -> int:
    """Of one of a test's trainings, from 0: 32 bits that nobody would choose.

    No two tests share one: another seed is another draw of all of them.
    """
    # an odd factor: one to one
    return (seed * (_MOST + 2 + _IN_COMPANY) + training + 1) * 2654435769 % 2**32


def observed_loop_of_watched_trainings(
    runs: WatchedTrainings, checks: tuple[LoopCheck, ...]
) -> ObservedLoop:
    """The loop's own numbers: unbounded where a check says so, else what its noise, rate, sampling
    and steps give.

    Where one kind of record, or one record, is worse off than all together, its epsilon is the
    loop's.
    """
    broken = {check.name: check for check in checks if check.verdict == BROKEN}
    steps = max(len(trace.steps) for trace in runs.traces)
    noise = (
        checks_of_sensitivity.estimate_noise_multiplier_interval(runs)
        if runs.steps_with_noise
        else (0.0, 0.0, 0.0)
    )
    unseen = any(check.verdict == UNKNOWN for check in checks if check.name in _OF_EPSILON)
    if runs.steps_with_noise and (unseen or OWN_GRADIENT in broken):
        # No epsilon follows of a bound that is not seen, of parts of records, and of a record that
        # moves the others'.
        noise = None
    if any(check.epsilon == math.inf for check in broken.values()):
        return ObservedLoop(
            noise and noise[0], runs.observed_sampling_rate, steps, math.inf, math.inf, math.inf
        )
    if noise is None:
        return ObservedLoop(None, runs.observed_sampling_rate, steps, None)
    drawn: dict[str, Any] = {"sampling": "shuffled"} if "Poisson sampling" in broken else {}
    epsilon = runs.epsilon_with_noise_multiplier(noise[0], steps=steps, **drawn)
    low, high = _observed_loop_epsilon_interval(runs, noise, epsilon, {"steps": steps, **drawn})
    worst = max(
        (check.epsilon for check in broken.values() if check.epsilon is not None), default=0.0
    )
    return ObservedLoop(
        noise[0],
        runs.observed_sampling_rate,
        steps,
        *(max(one, worst) for one in (epsilon, low, high)),
    )


def _observed_loop_epsilon_interval(
    runs: WatchedTrainings, noise: tuple[float, float, float], epsilon: float, more: dict[str, Any]
) -> tuple[float, float]:
    """The 95% interval of epsilon: the errors of the noise multiplier and of the sampling rate,
    which are independent.

    Each one's part is a ratio of two epsilons of the quick accountant.
    """

    def part(one: float, rate: float) -> float:
        return (
            epsilon
            * runs.epsilon_with_noise_multiplier(
                one, quick=True, sample_rate=min(rate, 1.0), **more
            )
            / middle
            - epsilon
        )

    middle, error = (
        runs.epsilon_with_noise_multiplier(noise[0], quick=True, **more),
        1.96 * runs.sampling_rate_standard_error,
    )
    if not 0 < middle < math.inf:
        return epsilon, epsilon
    # Less noise and a higher rate raise epsilon; independent errors add in squares.
    high = math.hypot(
        part(noise[1], runs.observed_sampling_rate),
        part(noise[0], runs.observed_sampling_rate + error),
    )
    low = math.hypot(
        part(noise[2], runs.observed_sampling_rate),
        part(noise[0], max(runs.observed_sampling_rate - error, 1e-9)),
    )
    return max(0.0, epsilon - low), epsilon + high


def _count_records_read_in_traces(traces: list[TrainingTrace]) -> int:
    return sum(len(step.records) for trace in traces for step in trace.steps)


def _is_another_watched_training_needed(traces: list[TrainingTrace]) -> bool:
    return len(traces) < _LEAST or (
        _count_records_read_in_traces(traces) < _ENOUGH and len(traces) < _MOST
    )


def _has_time_for_another_training(begun: float, until: float) -> bool:
    """Whether half of the time is left: one more training then fits."""
    return time.monotonic() - begun < (until - begun) / 2
