"""Define what all checks share: watched trainings, verdicts and the significance level.

Every p-value is one-sided against the claim. Bonferroni's rule divides the significance level among
the checks. This bounds the probability that an honest training is called broken. Estimates are
approximately normal, because they are sums over thousands of noise elements.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from scipy import stats

from auditor.core.arrays import Ints
from auditor.crash.claim import LoopClaim
from auditor.crash.watch import ObservedStep, TrainingTrace
from auditor.statistics.intervals import clopper_pearson

LEVEL = 0.05  # probability that any check calls an honest training broken
SHARE = LEVEL / 15  # level of each check; checks that count faults need none
POWER = 0.8
BROKEN = "broken"
NO_FAULT = "no fault seen"
UNKNOWN = "cannot tell"
STATISTIC = "by its statistic"
COUNTED = "counted, without chance"
PLANTED = "by a planted fault"


@dataclass(frozen=True)
class WatchedTrainings:
    """Hold the observed trainings of a crash test, with several seeds and all specimens.

    traces: the trainings for most checks.
    fewer: a replay of the first training's steps without its last record. If the number of records
        is public, the last record is replaced instead.
    repeated_training: a replay of the first training, if `fewer` prints a different text.
    small_training: a training with so few records (one more than a mean batch) that some batches
        are empty.
    few_claimed: the number of steps that `small_training` claims.
    few_error: the message of the exception that `small_training` raised, or "".
    other_seed: the first step, trained again with a seed that has the same lowest 32 bits.
    company: trainings with gradients shorter than the clipping norm, on texts of unequal lengths.
    whitened_shares: the noise by which each tensor was divided, keyed by tensor; None if undivided.
    """

    claim: LoopClaim
    traces: tuple[TrainingTrace, ...]
    fewer: TrainingTrace
    repeated_training: TrainingTrace | None = None
    small_training: TrainingTrace | None = None
    few_claimed: int | None = None
    few_error: str = ""
    other_seed: ObservedStep | None = None
    company: tuple[TrainingTrace, ...] = ()
    whitened_shares: dict[str, float] | None = None

    @property
    def first_training(self) -> TrainingTrace:
        return self.traces[0]

    @property
    def steps(self) -> list[ObservedStep]:
        return [step for trace in self.traces for step in trace.steps]

    @property
    def steps_but_first_of_each_training(self) -> list[ObservedStep]:
        """All steps except the first step of each training.

        Before its first step, a training may read records just to try out the model.
        """
        return [step for trace in self.traces for step in trace.steps[1:]]

    @property
    def steps_with_noise(self) -> list[ObservedStep]:
        return [step for step in self.steps if step.scale]

    @property
    def small_steps(self) -> list[ObservedStep]:
        """The steps of `small_training`; [] if there is none."""
        if self.small_training is None:
            return []
        return self.small_training.steps

    @property
    def noise_shares(self) -> dict[str, float]:
        """Each tensor's noise, divided by the noise of all tensors.

        The ratio is averaged over steps, weighted by degrees of freedom.
        """
        if self.whitened_shares is not None:
            return self.whitened_shares
        squares = defaultdict[str, float](float)
        freedoms = defaultdict[str, int](int)
        shares: dict[str, float] = {}
        for step in self.steps_with_noise:
            shares |= dict.fromkeys(step.tensor_ranges, 1.0)
            for name, (scale, free) in step.scales.items():
                # Each step is measured in units of its noise, which a schedule may change.
                squares[name] += (scale / step.scale) ** 2 * free
                freedoms[name] += free
        for name, square in squares.items():
            if square:
                shares[name] = math.sqrt(square / freedoms[name])
        return dict(sorted(shares.items()))

    def count_record_reads(self) -> Ints:
        """Count, for each record, the steps that read it, (records,).

        The first step of each training is not counted.
        """
        counts = np.zeros(self.first_training.n, dtype=np.int64)
        for step in self.steps_but_first_of_each_training:
            counts[step.distinct_records] += 1
        return counts

    @property
    def observed_sampling_rate(self) -> float:
        """The share of steps in which a record is read, averaged over records."""
        # Allocation reads each record equally often only over whole trainings: a missing first step
        # would leave incomplete passes.
        steps = self.steps_but_first_of_each_training
        if self.claim.sampling == "allocation":
            steps = self.steps
        n_reads = sum(len(step.records) for step in steps)
        return min(1.0, max(n_reads / max(1, self.first_training.n * len(steps)), 1e-9))

    @property
    def sampling_rate_interval(self) -> tuple[float, float]:
        """Clopper and Pearson's exact 95% interval for the sampling rate.

        Its two ends are equal if batches are not drawn at random.
        """
        rate = self.observed_sampling_rate
        if self.claim.sampling != "poisson" or rate >= 1:
            return rate, rate
        n_draws = self.first_training.n * len(self.steps_but_first_of_each_training)
        low, high = clopper_pearson(round(rate * n_draws), n_draws)
        return max(low, 1e-9), high

    def compute_noise_epsilon(
        self, noise: float, quick: bool = False, **more: int | float | str
    ) -> float:
        """Return the epsilon at this noise multiplier and the observed sampling rate and steps.

        more: fields of the claim that replace the observed values.
        """
        observed: dict[str, Any] = {
            "sample_rate": self.observed_sampling_rate,
            "steps": len(self.first_training.steps),
            **more,
        }
        claim = replace(self.claim, noise_multiplier=noise, epsilon=None, **observed)
        return claim.compute_implied_epsilon(quick)

    def locate_step(self, step: ObservedStep) -> tuple[int, int]:
        """Return the indices, from 0, of the step's training and of the step in it."""
        return next(
            (i, j)
            for i, t in enumerate(self.traces)
            for j, candidate in enumerate(t.steps)
            if candidate is step
        )


@dataclass(frozen=True)
class WorstViolation:
    """Describe the largest violation, and locate it in the trainings.

    measured, expected: the observed and the permitted value, in words. training, step, record:
    indices from 0; None if the violation concerns the entire training.
    """

    measured: str
    expected: str
    training: int | None = None
    step: int | None = None
    record: int | None = None
    tensor: str | None = None


@dataclass(frozen=True)
class LoopCheck:
    """Hold the result of one check.

    name: the check's key in `CHECKS`.
    verdict: BROKEN, NO_FAULT or UNKNOWN; said: the observation in words.
    would_see: the smallest violation that the check detects with 80% probability; source: how this
        is known.
    epsilon: the real epsilon that a violation implies; inf if unbounded.
    witness: the worst violation, if the check is broken.
    """

    name: str = field(default="", kw_only=True)
    verdict: str
    said: str
    would_see: str
    p: float = 1.0
    epsilon: float | None = None
    witness: WorstViolation | None = None
    source: str = STATISTIC


def judge_crash_test_p_value(
    p: float,
    fault: str,
    fine: str,
    would_see: str,
    witness: Callable[[], WorstViolation],
    epsilon: Callable[[], float] | None = None,
    source: str = STATISTIC,
) -> LoopCheck:
    """Judge a check as broken if p is below the check's share of the significance level.

    fault, fine: the observation to report if the check is broken and if it is not. would_see: see
        `LoopCheck`.
    witness, epsilon: called only for a broken check, because accounting takes a second.
    """
    if p < SHARE:
        return LoopCheck(BROKEN, fault, would_see, p, epsilon and epsilon(), witness(), source)
    return LoopCheck(NO_FAULT, fine, would_see, p, source=source)


def judge_certain_crash_test(
    is_broken: bool,
    fault: str,
    fine: str,
    would_see: str,
    witness: Callable[[], WorstViolation],
    epsilon: Callable[[], float] | None = None,
) -> LoopCheck:
    """Return the result of a check that is certain: broken, or no fault seen.

    is_broken: whether the fault was seen. fault, fine: the sentences for a broken loop and for a
    loop without this fault. would_see: the smallest fault that the check sees. witness: returns an
    example of the fault. epsilon: returns the epsilon it costs.
    """
    p = float(not is_broken)
    return judge_crash_test_p_value(p, fault, fine, would_see, witness, epsilon, COUNTED)


def fail_crash_test(
    sentence: str, would_see: str, witness: WorstViolation, epsilon: float | None = None
) -> LoopCheck:
    """Return a broken check that involves no chance. sentence: the observation."""
    return LoopCheck(BROKEN, sentence, would_see, 0.0, epsilon, witness, COUNTED)


def get_unbounded_epsilon() -> float:
    return math.inf


def count_detectable_errors(among: int = 1) -> float:
    """Return how many standard errors a violation must have to be detected with 80% probability.

    among: number of tests that share the check's significance level.
    """
    # From 0 to the critical value, plus the margin that puts POWER of the estimates beyond it.
    return float(stats.norm.isf(SHARE / among) + stats.norm.ppf(POWER))
