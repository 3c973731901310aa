"""Run the crash test of a private training: about eight trainings on tiny models, then all
checks.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from auditor.core.errors import AuditError, refuse_unknown_names
from auditor.crash import checks_of_sensitivity, trainers, training_specimen
from auditor.crash.checks import (
    CHECKS,
    OWN_GRADIENT,
    run_all_crash_test_checks,
)
from auditor.crash.checks_of_company import measure_reach_share
from auditor.crash.checks_of_noise import whiten_unequal_noise
from auditor.crash.claim import LoopClaim
from auditor.crash.verdicts import BROKEN, NO_FAULT, UNKNOWN, LoopCheck, WatchedTrainings
from auditor.crash.watch import (
    ObservedStep,
    Train,
    TrainingTrace,
    require_read_records,
    run_watched_training,
)
from auditor.statistics.audit_power import estimate_median_epsilon
from auditor.statistics.audited import LEVEL, audit_epsilon_bounds

# Number of trainings that test whether other records change a record's gradient. The larger number
# is for gradients that are much too short, which suggests a mean over the batch.
_IN_COMPANY = 2
_IN_DIVIDED_COMPANY = 8
_COMPANY_TRIALS = 4  # most trials of weights that give gradients of the desired length
_NORM_TO_SCALE = -1 / 1.6  # norms rise with the first to the second power of the weights' scale
# gradients of single records to observe; trainings
_ENOUGH = 1200
_MOST = 12
# If one of these is inconclusive, so is the whole test.
_NEEDED = (
    "one record's reach",
    "weights follow the steps",
    "rows are records",
    "noise by a schedule",
)
# If one of these is inconclusive, no epsilon was observed.
_OF_EPSILON = ("one record's reach", "rows are records")
Watch = Callable[..., tuple[TrainingTrace, Any]]  # `run_watched_training` of the tested training
_LEAST = len(training_specimen.SPECIMENS)  # trainings, if there is time


@dataclass(frozen=True)
class ObservedLoop:
    """Hold the observed noise, sampling rate and steps of a training loop.

    epsilon: our accountant's result for the observed noise, rate and steps; inf if unbounded.
    low, high: the 95% interval of epsilon, from the intervals of noise multiplier and sampling
        rate.

    noise_multiplier and epsilon are None if no record's contribution was observed.
    """

    noise_multiplier: float | None
    sample_rate: float
    steps: int
    epsilon: float | None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class OneRun:
    """Hold a lower bound on epsilon with 95% confidence, from guesses about one training.

    A coin decided for each record whether it was in the training.
    best: the bound that would follow if every guess were right.
    claimed: the epsilon that this training claims.
    ceiling: the bound that follows in half of all cases if the loop is as it claims and the guesses
        see all that the sum of its steps shows; None if batches are not drawn by Poisson sampling.
    canaries, guesses, right: number of records, of guesses and of right guesses.
    """

    epsilon: float
    best: float
    claimed: float
    canaries: int
    guesses: int
    right: int
    ceiling: float | None = None


@dataclass(frozen=True)
class CrashTest:
    """Hold the results of the crash test of a private training.

    checks: result of each check; loop: the observed training loop.
    seconds: duration of the test; seed: its seed.
    one_run: a lower bound on epsilon from one training; None if time ran out.
    epsilon: a lower bound on the real epsilon; None if there is no evidence against the claim.
    """

    claim: LoopClaim
    checks: tuple[LoopCheck, ...]
    remarks: tuple[str, ...]
    seconds: float
    loop: ObservedLoop
    seed: int = 0
    one_run: OneRun | None = None

    def keep_named_checks(self, names: Sequence[str]) -> CrashTest:
        """Return the test with only these checks, or with all checks if no name is given.

        Raise AuditError for an unknown name.
        """
        refuse_unknown_names("check", names, CHECKS)
        checks = tuple(check for check in self.checks if check.name in names or not names)
        return replace(self, checks=checks)

    @property
    def broken_checks(self) -> list[LoopCheck]:
        return [check for check in self.checks if check.verdict == BROKEN]

    @property
    def verdict(self) -> str:
        """Return `broken`, `no fault seen`, or `cannot tell`.

        `cannot tell` means that no record's contribution was observed. No test can prove that a
        training is private.
        """
        if self.broken_checks:
            return BROKEN
        needed = [check.verdict for check in self.checks if check.name in _NEEDED]
        return UNKNOWN if UNKNOWN in (needed or [self.checks[0].verdict]) else NO_FAULT

    @property
    def exceeds_claim_without_fault(self) -> bool:
        """True if the interval for epsilon lies above the claim although no check is broken."""
        return (
            not self.broken_checks
            and self.loop.low is not None
            and self.loop.low > self.claim.compute_implied_epsilon()
        )

    @property
    def epsilon(self) -> float | None:
        epsilons = [check.epsilon for check in self.broken_checks if check.epsilon is not None]
        return max(epsilons, default=None)


def crash_test(
    train: Train,
    claim: object = None,
    minutes: float = 2.0,
    seed: int = 0,
    tell: Callable[[int, int], None] = lambda n_done, all: None,
) -> CrashTest:
    """Run `train(model, records)` on tiny models and records, and check the training's claim.

    train: trains the model in place with a torch.optim optimizer, or is a transformers Trainer,
        which is copied for each training. Its records are a list of {"input_ids": [token, ...]}.
    claim: a `LoopClaim` or a mapping of its fields; None if `train` returns (model, claim).
    minutes: time limit; tell: called with the number of finished trainings and the total.

    The test repeats trainings until it has about a thousand gradients. Raise AuditError if the
    training ignores its model or its records, states no claim, or exceeds the time limit.
    """
    start = time.monotonic()
    until = start + 60 * minutes
    if trainers.is_crash_test_trainer(train):
        train = trainers.wrap_crash_test_trainer(train, None)
    tell(0, _LEAST + 2)
    own_seed = derive_training_seed(seed, 0)
    watch: Watch = partial(run_watched_training, train, until=until)
    first, returned = watch(own_seed)
    require_read_records(first)
    if len(first.steps) < 2:
        raise AuditError(
            "expected a training of at least 2 steps, because what it reads before the first may "
            "be a trial of the model, got 1: train for longer"
        )
    stated = LoopClaim.from_stated_claim(returned if claim is None else claim)
    if not stated.noise_multiplier:
        raise AuditError(
            "expected a claim with noise, got noise_multiplier 0: no epsilon follows from it"
        )
    # First: a training that differs under its seed can be neither replayed nor reproduced.
    other_seed = _replay_shifted_seed(watch, first, own_seed)
    fewer, again = _replay_shortened_training(watch, stated, first, own_seed)
    # The seeds of this training and of the bound below follow those of the other trainings.
    few, few_claimed, few_error = _train_few_records(
        watch, claim, first, derive_training_seed(seed, _MOST + 1), until
    )
    company = _train_companies(watch, stated, seed)
    traces = _watch_further_trainings(watch, first, seed, start, until, tell)
    runs = WatchedTrainings(
        stated, tuple(traces), fewer, again, few, few_claimed, few_error, other_seed, company
    )
    checks = tuple(run_all_crash_test_checks(runs))
    bound = None
    if _has_time_left(start, until):
        bound = bound_loop_epsilon(watch, claim, derive_training_seed(seed, _MOST))
    return CrashTest(
        claim=stated,
        checks=checks,
        remarks=(),
        seconds=time.monotonic() - start,
        loop=summarise_observed_loop(whiten_unequal_noise(runs), checks),
        seed=seed,
        one_run=bound,
    )


def _watch_further_trainings(
    watch: Watch,
    first: TrainingTrace,
    seed: int,
    start: float,
    until: float,
    tell: Callable[[int, int], None],
) -> list[TrainingTrace]:
    """Watch trainings with new seeds until there are enough gradients; return all traces.

    start, until: times at which the test starts and must end. tell: see `crash_test`.
    """
    traces = [first]
    # The number of trainings depends on how much was observed, not on the results, so the level
    # stays valid. At least two, because reused noise also shows between trainings.
    while len(traces) < 2 or (
        _count_planned(traces) > len(traces) and _has_time_left(start, until)
    ):
        at = len(traces)
        tell(at + 1, _count_planned(traces) + 2)
        traces.append(watch(derive_training_seed(seed, at), training=at)[0])
    return traces


def _replay_shifted_seed(watch: Watch, first: TrainingTrace, seed: int) -> ObservedStep:
    """Replay the training's first step with seed + 2^32, and return the step.

    Raise AuditError if the unchanged seed does not repeat the first step.
    """
    original = first.steps[0]
    again = watch(seed, most=1)[0].steps[0]
    same = original.records == again.records and original.noise.shape == again.noise.shape
    if not same or not np.allclose(
        original.noise, again.noise, rtol=1e-3, atol=1e-3 * original.scale
    ):
        raise AuditError(
            "the training does not repeat under the same seed: draw batches and noise from "
            "torch's or numpy's generator, or from one seeded by torch.initial_seed()"
        )
    # On the CPU torch's generator reads only the lowest 32 bits, and numpy's gets no more.
    return watch(seed + 2**32, most=1)[0].steps[0]


def _replay_shortened_training(
    watch: Watch, claim: LoopClaim, first: TrainingTrace, seed: int
) -> tuple[TrainingTrace, TrainingTrace | None]:
    """Replay the steps of the first training without its last record, and return the trace.

    If the number of records is public, the last record is replaced instead of removed. If the
    replay prints a different text, also return a replay on the original records; otherwise None.
    """
    replay = partial(watch, seed, replayed=first.released)
    n = training_specimen.RECORDS - (not claim.public_size)
    fewer, _ = replay(n, other_last=claim.public_size)
    if (fewer.printed.text, fewer.printed.early) == (first.printed.text, first.printed.early):
        return fewer, None
    return fewer, replay()[0]


def _train_companies(watch: Watch, claim: LoopClaim, seed: int) -> tuple[TrainingTrace, ...]:
    """Run trainings on a long text among short texts; return their traces.

    The texts' gradients are shorter than the claimed clipping norm, so correct clipping leaves them
    unchanged.
    """
    if not claim.max_grad_norm:
        return ()
    seeds = []
    for at in range(_IN_DIVIDED_COMPANY):
        seeds.append(derive_training_seed(seed, _MOST + 2 + at))

    def run_company(specimen: training_specimen.Specimen, seed: int) -> TrainingTrace:
        return watch(seed, specimen=specimen)[0]

    specimen = training_specimen.make_company_specimen(claim.max_grad_norm)
    first = run_company(specimen, seeds[0])
    # The gradients are those of the tensors that the loop trains, for example an adapter's.
    for _ in range(_COMPANY_TRIALS):
        share = _measure_company_share(first, claim.max_grad_norm)
        if 2 / 3 < share < 3 / 2:
            break
        specimen = specimen.scale_weights(share**_NORM_TO_SCALE)
        first = run_company(specimen, seeds[0])
    # A mean over the batch shortens the gradients again if nothing undoes it.
    share = measure_reach_share(first, claim)
    if share < 0.5:
        specimen = specimen.scale_weights(share**_NORM_TO_SCALE)
        return tuple(map(partial(run_company, specimen), seeds))
    return (first, *map(partial(run_company, specimen), seeds[1:_IN_COMPANY]))


def _measure_company_share(trace: TrainingTrace, clipping_norm: float) -> float:
    """Compare the gradients of a company training with those for which its specimen was made.

    Return the first step's median gradient norm over the intended median, which is `COMPANY_SHARE`
    times the clipping norm. Return 1 if there are no gradients.
    """
    norms = next((step.norms for step in trace.steps if step.norms.any()), None)
    if norms is None:
        return 1.0
    return float(np.median(norms)) / (training_specimen.COMPANY_SHARE * clipping_norm)


def _train_few_records(
    watch: Watch, stated: object, first: TrainingTrace, seed: int, until: float
) -> tuple[TrainingTrace | None, int | None, str]:
    """Train on one more record than a batch holds on average, so that some batches are empty.

    Many loops raise an exception on an empty batch. Return the trace, the claimed steps, and "".
    After an exception, return None for both and a message.
    """
    n = 1 + round(_count_records_read([first]) / len(first.steps))
    if n > training_specimen.RECORDS // 2:
        return None, None, ""
    try:
        few, returned = watch(seed, n, empty_draws=True)
        claimed = None
        if stated is None:
            claimed = LoopClaim.from_stated_claim(returned, with_epsilon=False).steps
        return few, claimed, ""
    except Exception as error:
        if time.monotonic() > until:
            raise
        raised = f"{type(error).__name__}: {error}"
        return None, None, f"with {n} records, as on an empty batch, it raises {raised}"


def bound_loop_epsilon(watch: Watch, claim: object, seed: int) -> OneRun:
    """Bound epsilon by guessing which records a training read (`statistics/one_run.py`).

    A fair coin decides whether each record is included. The guess is "included" for the records
    that contribute most. claim: the claim about all trainings; None if this training returns its
    claim.
    """
    coins = np.random.default_rng(seed).random(training_specimen.RECORDS) < 0.5
    trace, returned = watch(seed, chosen=np.flatnonzero(coins).tolist())
    stated = LoopClaim.from_stated_claim(returned if claim is None else claim, with_epsilon=False)
    # (records,): `chosen` makes the watch measure the reach of excluded records as well.
    scores = np.sum([step.reaches for step in trace.steps], axis=0)
    bound = audit_epsilon_bounds(scores, coins, stated.delta)[0]
    ceiling = None
    if stated.sampling == "poisson":
        # The guesses are by sums of reaches over all steps, which show a record as a finished
        # model does.
        mechanism = stated.noise_multiplier, (stated.sample_rate, int(stated.steps))
        ceiling = estimate_median_epsilon(bound.canaries, *mechanism, stated.delta, LEVEL)
    return OneRun(
        bound.epsilon,
        bound.best,
        stated.compute_implied_epsilon(),
        bound.canaries,
        bound.guesses,
        bound.right,
        ceiling,
    )


def derive_training_seed(seed: int, training: int) -> int:
    """Return a 32-bit seed for a training (numbered from 0) of a test.

    seed: the seed of the test. Each test has its own seeds, which no person would choose.
    """
    # An odd factor makes the map injective.
    return (seed * (_MOST + 2 + _IN_DIVIDED_COMPANY) + training + 1) * 2654435769 % 2**32


def summarise_observed_loop(runs: WatchedTrainings, checks: tuple[LoopCheck, ...]) -> ObservedLoop:
    """Return the loop's observed noise multiplier, sampling rate and steps, and their epsilon.

    If a failed check shows a larger epsilon for some record or kind of record, return that epsilon
    instead.
    """
    broken_checks = {check.name: check for check in checks if check.verdict == BROKEN}
    steps = max(len(trace.steps) for trace in runs.traces)
    noise: tuple[float, float, float] | None = (0.0, 0.0, 0.0)
    if runs.steps_with_noise:
        noise = checks_of_sensitivity.estimate_noise_multiplier_interval(runs)
    is_unseen = any(check.verdict == UNKNOWN for check in checks if check.name in _OF_EPSILON)
    if runs.steps_with_noise and (is_unseen or OWN_GRADIENT in broken_checks):
        # The noise gives no epsilon if a part of the bound was not observed, or if a record changes
        # the gradients of others.
        noise = None
    epsilons = [check.epsilon for check in broken_checks.values() if check.epsilon is not None]
    worst = max(epsilons, default=0.0)
    if worst == math.inf:
        return ObservedLoop(
            noise and noise[0], runs.observed_sampling_rate, steps, math.inf, math.inf, math.inf
        )
    if noise is None:
        return ObservedLoop(None, runs.observed_sampling_rate, steps, None)
    observed: dict[str, Any] = {"steps": steps}
    if "Poisson sampling" in broken_checks:
        observed["sampling"] = "shuffled"
    epsilon = runs.compute_noise_epsilon(noise[0], **observed)
    low, high = _bound_observed_epsilon(runs, noise, epsilon, observed)
    bounds = map(partial(max, worst), (epsilon, low, high))
    return ObservedLoop(noise[0], runs.observed_sampling_rate, steps, *bounds)


def _bound_observed_epsilon(
    runs: WatchedTrainings, noise: tuple[float, float, float], epsilon: float, more: dict[str, Any]
) -> tuple[float, float]:
    """Return the 95% interval for epsilon that follows from the noise multiplier and sampling rate.

    The two have independent errors. A fast, approximate accountant computes the effect of each
    error on epsilon.

    Args:
        runs: the observed trainings.
        noise: the observed noise multiplier, with the lower and upper end of its interval.
        epsilon: epsilon of the observed values.
        more: remaining arguments of the accountant, for example steps.
    """

    middle = runs.compute_noise_epsilon(noise[0], quick=True, **more)
    if not 0 < middle < math.inf:
        return epsilon, epsilon

    def compute_deviation(multiplier: float, rate: float) -> float:
        other = runs.compute_noise_epsilon(multiplier, quick=True, sample_rate=rate, **more)
        return epsilon * other / middle - epsilon

    rate = runs.observed_sampling_rate
    low_rate, high_rate = runs.sampling_rate_interval
    # Less noise and a higher rate raise epsilon; independent errors add in squares.
    high = math.hypot(compute_deviation(noise[1], rate), compute_deviation(noise[0], high_rate))
    low = math.hypot(compute_deviation(noise[2], rate), compute_deviation(noise[0], low_rate))
    return max(0.0, epsilon - low), epsilon + high


def _count_records_read(traces: list[TrainingTrace]) -> int:
    return sum(len(step.records) for trace in traces for step in trace.steps)


def _count_planned(traces: list[TrainingTrace]) -> int:
    """Return how many trainings give `_ENOUGH` gradients, but at least one per specimen."""
    n_enough = math.ceil(_ENOUGH * len(traces) / _count_records_read(traces))
    return min(_MOST, max(_LEAST, n_enough))


def _has_time_left(begun: float, until: float) -> bool:
    """Return whether at least half of the time limit is left."""
    return time.monotonic() - begun < (until - begun) / 2
