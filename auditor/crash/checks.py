"""Check the steps of a training against its privacy claim; each check looks for one fault.

A check returns the measured number and the smallest violation that it could detect. The checks in
this file are on the records that steps read and on the claim's accounting; the others are in
`checks_of_*`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from scipy import stats

from auditor.crash.checks_of_bypasses import (
    check_batch_dependence,
    check_empty_batch_noise,
    check_noise_seed_guessable,
    check_printed_output_leaks,
    check_rows_are_records,
    check_weights_follow_steps,
)
from auditor.crash.checks_of_company import check_company_dependence
from auditor.crash.checks_of_noise import (
    check_gaussian_noise,
    check_noise_every_tensor,
    check_noise_independence,
    check_noise_reveals_batch_size,
    check_noise_size_public,
    check_released_gradients_finite,
    check_training_reveals_record_count,
    whiten_unequal_noise,
)
from auditor.crash.checks_of_sensitivity import (
    check_kind_sensitivity,
    check_per_record_clipping,
    check_record_sensitivity,
)
from auditor.crash.verdicts import (
    COUNTED,
    NO_FAULT,
    POWER,
    SHARE,
    UNKNOWN,
    LoopCheck,
    WatchedTrainings,
    WorstViolation,
    count_detectable_errors,
    fail_crash_test,
    judge_certain_crash_test,
    judge_crash_test_p_value,
)


def run_all_crash_test_checks(runs: WatchedTrainings) -> list[LoopCheck]:
    """Run every check on these trainings, and return the results in the order of the report."""
    whitened = whiten_unequal_noise(runs)
    return [replace(check(whitened), name=name) for name, check in CHECKS.items()]


def check_repeated_reads(runs: WatchedTrainings) -> LoopCheck:
    """Check that no step reads a record twice."""
    repeats = []
    for step in runs.steps_but_first_of_each_training:
        if step.records:
            repeats.append((max(Counter(step.records).values()), step))
    most, worst = max(
        repeats, key=lambda repeat: repeat[0], default=(0, runs.first_training.steps[0])
    )

    def witness() -> WorstViolation:
        record = Counter(worst.records).most_common(1)[0][0]
        return WorstViolation(
            f"read {most} times", "at most once", *runs.locate_step(worst), record
        )

    # A record that is read k times moves the sum by up to k clipping norms. This has the same
    # effect as 1 / k of the noise.
    noise = runs.claim.noise_multiplier / max(most, 1)
    return judge_certain_crash_test(
        most > 1,
        f"a record was read {most} times in {sum(count > 1 for count, _ in repeats)} of "
        f"{len(repeats)} steps",
        f"no record twice in any of {len(repeats)} steps",
        "one such step",
        witness,
        lambda: runs.compute_noise_epsilon(noise),
    )


def check_sampling_rate(runs: WatchedTrainings) -> LoopCheck:
    """Check that steps read each record as often as the claimed sampling rate implies."""
    draws = runs.first_training.n * len(runs.steps_but_first_of_each_training)
    times_read = int(runs.count_record_reads().sum())
    q = runs.claim.sample_rate
    # Standard error of the share under the claim. Below, scipy's sf(times_read - 1) is P[X >=
    # times_read].
    error = math.sqrt(max(q * (1 - q), 1e-12) / draws)
    return judge_crash_test_p_value(
        float(stats.binom.sf(times_read - 1, draws, q)) if q < 1 else 1.0,
        f"a record is read in {times_read / draws:.3f} of the steps, but the claim says {q:.3f}",
        f"a record is read in {times_read / draws:.3f} of the steps (claimed {q:.3f})",
        f"{1 + count_detectable_errors() * error / q:.2f} times the rate",
        lambda: WorstViolation(
            f"{times_read:,} reads in {len(runs.steps_but_first_of_each_training)} steps of "
            f"{runs.first_training.n} records",
            f"{draws * q:,.0f} ± {1.96 * draws * error:,.0f}",
        ),
        lambda: runs.compute_noise_epsilon(
            runs.claim.noise_multiplier, sample_rate=min(1.0, times_read / draws)
        ),
    )


def check_poisson_batch_sizes(runs: WatchedTrainings) -> LoopCheck:
    """Check that batch sizes vary as in Poisson sampling.

    Shuffled batches all have the same size. They give less privacy than the claim, which assumes
    Poisson sampling.
    """
    q, n = runs.claim.sample_rate, runs.first_training.n
    sizes = np.array([len(step.records) for step in runs.steps_but_first_of_each_training])
    if runs.claim.sampling == "shuffled" or q >= 1:
        return LoopCheck(UNKNOWN, f"the claim is {runs.claim.sampling} sampling", "")
    # Deviations from the claimed mean, which is not estimated. Their squares have the variance 2 +
    # the excess kurtosis of a binomial; for small batches this is far from the 2 of chi-squared, so
    # the degrees of freedom are those of the chi-squared law with the same variance.
    varies = float(((sizes - n * q) ** 2).sum() / (n * q * (1 - q)))
    law = {"poisson": "Poisson", "allocation": "random allocation"}[runs.claim.sampling]
    freedom = 2 * len(sizes) / (2 + (1 - 6 * q * (1 - q)) / (n * q * (1 - q)))
    if runs.claim.sampling == "allocation":
        # Batch sizes of allocation vary as much, but those of a pass add up to its records.
        freedom *= 1 - q
    # At least the probability that all batches have the size nearest to the mean.
    p = max(
        float(stats.chi2.cdf(varies * freedom / len(sizes), freedom)),
        float(stats.binom.pmf(round(n * q), n, q)) ** len(sizes),
    )
    # r times Poisson's variance gives r chi-squared. This r puts it below the critical value with
    # probability POWER.
    least = stats.chi2.ppf(SHARE, freedom) / stats.chi2.ppf(POWER, freedom)
    # Each pass reads each record once, with the claimed noise: a bound for any order.
    noise = runs.claim.noise_multiplier
    shuffled = runs.compute_noise_epsilon(noise, quick=True, sampling="shuffled")
    return judge_crash_test_p_value(
        p,
        f"batches of {sizes.min()} to {sizes.max()} records vary less than {law} sampling's: "
        "epsilon was accounted for another kind of sampling; for batches in random order it is "
        f"at most {shuffled:.2f}",
        f"batches of {sizes.min()} to {sizes.max()} records, as {law} sampling draws them",
        f"batches whose size has {100 * least:.0f}% of Poisson sampling's variance",
        lambda: WorstViolation(
            f"batch sizes of variance {varies * n * q * (1 - q) / len(sizes):.2f}",
            f"{n * q * (1 - q):.2f}",
        ),
    )


def check_equal_record_frequency(runs: WatchedTrainings) -> LoopCheck:
    """Check that steps read all records about equally often."""
    t = len(runs.steps_but_first_of_each_training)
    # The higher of the claimed and the observed rate: `check_sampling_rate` reports a rate that is
    # too high for all records.
    q = max(runs.claim.sample_rate, min(runs.observed_sampling_rate, 1 - 1e-9))
    counts = runs.count_record_reads()
    most = int(counts.argmax())
    # Bonferroni: this count is the largest of n records.
    p = min(1.0, runs.first_training.n * float(stats.binom.sf(counts[most] - 1, t, q)))
    # P[Bin(t, r) >= k] is the distribution function of Beta(k, t - k + 1) at r; solve for r at 80%.
    needed = int(stats.binom.isf(SHARE / runs.first_training.n, t, q)) + 1
    least = 1.0
    if needed <= t:
        least = float(stats.beta.ppf(POWER, needed, t - needed + 1))
    return judge_crash_test_p_value(
        p,
        f"record {most} was read in {counts[most]} of {t} steps, {t * q:.1f} were expected",
        f"no record was read more often than by chance ({counts.min()} to {counts.max()} of {t} "
        "steps)",
        f"a record that is read in {least:.2f} of the steps",
        lambda: WorstViolation(f"read in {counts[most]} of {t} steps", f"{t * q:.1f}", record=most),
        lambda: runs.compute_noise_epsilon(
            runs.claim.noise_multiplier, sample_rate=float(counts[most] / t)
        ),
    )


def check_step_count(runs: WatchedTrainings) -> LoopCheck:
    """Check that the training takes no more steps than the claim accounts for."""
    trace_lengths = [len(trace.steps) for trace in runs.traces]
    step_count, claimed = max(trace_lengths), runs.claim.steps
    counts = f"{step_count} steps were taken, {claimed} are claimed"
    return judge_certain_crash_test(
        step_count > claimed,
        counts,
        counts,
        "one step more",
        lambda: WorstViolation(
            f"{step_count} steps", str(claimed), trace_lengths.index(step_count), claimed
        ),
        lambda: runs.compute_noise_epsilon(
            runs.claim.noise_multiplier, sample_rate=runs.claim.sample_rate, steps=step_count
        ),
    )


def check_claimed_epsilon(runs: WatchedTrainings) -> LoopCheck:
    """Check that the claimed epsilon follows from the claimed noise, sampling rate and steps."""
    value, derived = runs.claim.epsilon, runs.claim.compute_implied_epsilon()
    if value is None:
        return LoopCheck(UNKNOWN, f"no epsilon is claimed; the rest gives {derived:.2f}", "")
    is_exceeded = derived > value * 1.02
    if is_exceeded and runs.claim.sampling == "allocation":
        message = (
            f"the claim is epsilon {value:g}; the rest gives at most {derived:.2f}, and what "
            "random allocation hides of that "
        )
        return LoopCheck(UNKNOWN, message + "was not counted here", "2% of epsilon", source=COUNTED)
    return judge_certain_crash_test(
        is_exceeded,
        f"the claim is epsilon {value:g}; its own noise, {runs.claim.sampling} batches and steps "
        f"give {derived:.2f}",
        f"the claim is epsilon {value:g}, as the rest gives ({derived:.2f})",
        "2% of epsilon",
        lambda: WorstViolation(f"epsilon {value:g}", f"{derived:.2f}"),
        lambda: derived,
    )


def check_step_choice(runs: WatchedTrainings) -> LoopCheck:
    """Check that the returned weights are those after the last step.

    The claim does not cover choosing weights by their loss on private records.
    """
    would = "weights of a step before the last, returned by a training that evaluates"
    evaluation = max(runs.traces, key=lambda trace: len(trace.evaluated))
    if not evaluation.evaluated:
        return LoopCheck(NO_FAULT, "none was read without a gradient", would, source=COUNTED)
    # None: the returned weights belong to no step (an average, for example) and show no choice.
    chosen = []
    for i, t in enumerate(runs.traces):
        if t.returned not in (None, len(t.steps) - 1):
            chosen.append((i, t))
    message = f"{len(evaluation.evaluated)} private records were read without a gradient"
    if not chosen:
        message += ": anything printed from that, or chosen by it, is outside the claim"
        return LoopCheck(UNKNOWN, message, would)
    at, trace = chosen[0]
    step = (trace.returned or 0) + 1
    n_steps = len(trace.steps)
    message += f", and the returned model is that of step {step} of {n_steps}, which they chose"
    witness = WorstViolation(
        f"the weights of step {step}", f"those of step {n_steps}", at, step - 1
    )
    return fail_crash_test(message, would, witness)


OWN_GRADIENT = "own gradient"
# keyed by name, in the order of the report
CHECKS: dict[str, Callable[[WatchedTrainings], LoopCheck]] = {
    "one record's reach": check_record_sensitivity,
    OWN_GRADIENT: check_company_dependence,
    "clipped by record": check_per_record_clipping,
    "every kind of record": check_kind_sensitivity,
    "noise in every tensor": check_noise_every_tensor,
    "Gaussian noise": check_gaussian_noise,
    "fresh noise": check_noise_independence,
    "finite gradients": check_released_gradients_finite,
    "sampling rate": check_sampling_rate,
    "Poisson sampling": check_poisson_batch_sizes,
    "no record favoured": check_equal_record_frequency,
    "once a step": check_repeated_reads,
    "steps": check_step_count,
    "accounting": check_claimed_epsilon,
    "number of records": check_training_reveals_record_count,
    "noise by a schedule": check_noise_size_public,
    "batch size stays secret": check_noise_reveals_batch_size,
    "secret noise": check_noise_seed_guessable,
    "empty batches": check_empty_batch_noise,
    "rows are records": check_rows_are_records,
    "each record by itself": check_batch_dependence,
    "weights follow the steps": check_weights_follow_steps,
    "evaluation on private records": check_step_choice,
    "printed text": check_printed_output_leaks,
}
