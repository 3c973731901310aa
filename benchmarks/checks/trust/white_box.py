"""How tight the audit by gradient canaries is: a real training beside a perfect run of the mechanism that it claims.

    python -m benchmarks.checks.trust.white_box [--epsilon 1 8] [--canaries 1000 4000] [--trials 40]  (5 CPU minutes)

A small lab's model is trained by DP-SGD, with per-sample gradients and by ghost clipping. Beside its bounds stand the
median and the middle four fifths of those of simulated trainings, in which each canary's coordinate is exactly the
subsampled Gaussian mechanism's: no audit of one run by these canaries and rules can expect more.
"""

from __future__ import annotations

import itertools

import numpy as np
from numpy.typing import NDArray

from auditor.benchmarks.lab import Lab
from auditor.core import threads
from auditor.core.streams import generator
from auditor.defenses.dp_sgd import DpSgd
from auditor.privacy.gradient_canaries import GradientCanaries
from auditor.statistics.audited import audited
from auditor.statistics.shapes import Sampling
from auditor.training.gradient_canaries import log_likelihood_ratio
from benchmarks.checks.harness import Page, run
from benchmarks.checks.trust.planted_faults import USUAL, trained


def kept(lab: Lab, epsilon: float, canaries: int, ghost: bool) -> tuple[GradientCanaries, float]:
    """What a training kept, and the epsilon that it claims."""
    recipe = {"epochs": USUAL.epochs, "batch": USUAL.batch, "learning_rate": 2e-3}
    made = trained(DpSgd(**recipe, epsilon=epsilon, gradient_canaries=canaries, ghost=ghost), lab)  # type: ignore[arg-type]
    assert made.canaries is not None and made.privacy is not None and made.privacy.epsilon is not None
    return made.canaries, made.privacy.epsilon


def simulated(own: GradientCanaries, trial: int) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Scores and coins of as many canaries in as many steps of the mechanism itself."""
    rng, count = generator("white box", trial), len(own.included)
    included, scores = rng.random(count) < 0.5, np.zeros(count)
    for _ in range(own.steps):
        part = included & (rng.random(count) < own.sampling_rate)
        x = part + own.noise_multiplier * rng.standard_normal(count)
        scores += log_likelihood_ratio(x, own.noise_multiplier, own.sampling_rate)
    return scores, included


def bounds(scores: NDArray[np.float64], included: NDArray[np.bool_], delta: float, sampling: Sampling) -> list[float]:
    return [audit.epsilon for audit in audited(scores, included, delta, sampling=sampling)]


def main(epsilon: tuple[float, ...] = (1.0, 8.0), canaries: tuple[int, ...] = (1000, 4000), trials: int = 40) -> None:
    threads.set_thread_count()
    lab, page = Lab(USUAL.recipe), Page()
    page.head("claimed ε", "canaries", "σ, q, T", "clipping", "(ε, δ)", "f-DP", "shape", "best")
    for claim, count in itertools.product(epsilon, canaries):
        for ghost in (False, True):
            own, claimed = kept(lab, claim, count, ghost)
            sampling = own.sampling_rate, own.steps
            audits = audited(np.array(own.scores), np.array(own.included), own.delta, sampling=sampling)
            mechanism = f"{own.noise_multiplier:.2f}, {own.sampling_rate:.3f}, {own.steps}"
            found = [f"{audit.epsilon:.2f}" for audit in audits]
            how = "ghost" if ghost else "per sample"
            page.row(f"{claimed:.2f}", f"{count:,}", mechanism, how, *found, f"{audits[0].best:.2f}")
        perfect = np.array([bounds(*simulated(own, trial), own.delta, sampling) for trial in range(trials)])
        low, middle, high = np.quantile(perfect, [0.1, 0.5, 0.9], axis=0)
        spread = [f"{m:.2f} [{a:.2f}, {b:.2f}]" for m, a, b in zip(middle, low, high, strict=True)]
        page.row("", "", "", f"simulated, {trials} times", *spread, "")


if __name__ == "__main__":
    raise SystemExit(run(main))
