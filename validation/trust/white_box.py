"""Measure the tightness of the gradient-canary audit: real trainings against the ideal mechanism.

    python -m validation.trust.white_box [--epsilon 1 8] [--canaries 1000 4000] [--trials 40]  (5 CPU minutes)
    python -m validation.trust.white_box --epsilon 4 --canaries 500 --rate 0.045 --steps 66  (trains nothing)

DP-SGD trains a small lab's model, with per-sample gradients and with ghost clipping. Next to its
bounds are the median and the middle 80% of bounds from simulated trainings, in which each canary's
coordinate is exactly a subsampled Gaussian mechanism; no one-run audit with these canaries and
rules can expect more. With `--rate` and `--steps`, only the described training is simulated.
"""  # noqa: E501

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from auditor.benchmarks.lab.lab import Lab
from auditor.core import threads
from auditor.core.result import Audited
from auditor.core.secret_randomness import make_keyed_generator
from auditor.defenses.private_training import DpSgd
from auditor.privacy.gaussian import find_noise_multiplier
from auditor.privacy.gradient_canaries import GradientCanaries
from auditor.statistics.audited import audit_epsilon_bounds
from auditor.training.gradient_canaries import compute_inclusion_log_ratio
from validation.harness import Page, refuse, run
from validation.trust.planted_faults import USUAL, trained


def kept(lab: Lab, epsilon: float, canaries: int, ghost: bool) -> tuple[GradientCanaries, float]:
    """Train with DP-SGD; return the gradient canaries and the claimed epsilon."""
    recipe = {"epochs": USUAL.epochs, "batch": USUAL.batch, "learning_rate": 2e-3}
    made = trained(DpSgd(**recipe, epsilon=epsilon, gradient_canaries=canaries, ghost=ghost), lab)  # type: ignore[arg-type]
    assert (
        made.canaries is not None and made.privacy is not None and made.privacy.epsilon is not None
    )
    return made.canaries, made.privacy.epsilon


@dataclass(frozen=True)
class DescribedTraining:
    """The parameters of a DP-SGD training that affect a canary; used for simulation."""

    noise_multiplier: float
    sampling_rate: float
    steps: int
    delta: float = 1e-5

    @classmethod
    def claiming(cls, epsilon: float, rate: float, steps: int) -> DescribedTraining:
        return cls(find_noise_multiplier(epsilon, cls.delta, rate, steps), rate, steps)

    def __str__(self) -> str:
        return f"{self.noise_multiplier:.2f}, {self.sampling_rate:.3f}, {self.steps}"


def simulated(
    own: DescribedTraining, count: int, trial: int
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Return the scores and coins of `count` canaries after all steps of the mechanism itself."""
    rng = make_keyed_generator("white box", trial)
    included, scores = rng.random(count) < 0.5, np.zeros(count)
    for _ in range(own.steps):
        part = included & (rng.random(count) < own.sampling_rate)
        x = part + own.noise_multiplier * rng.standard_normal(count)
        scores += compute_inclusion_log_ratio(x, own.noise_multiplier, own.sampling_rate)
    return scores, included


def bounds(
    scores: NDArray[np.float64], included: NDArray[np.bool_], of: DescribedTraining
) -> tuple[Audited, ...]:
    return audit_epsilon_bounds(scores, included, of.delta, sampling=(of.sampling_rate, of.steps))


def spread(of: DescribedTraining, count: int, trials: int) -> Iterator[str]:
    """Yield the median and the middle 80% of each bound over simulated trainings."""
    found = [
        [one.epsilon for one in bounds(*simulated(of, count, trial), of)] for trial in range(trials)
    ]
    for low, middle, high in np.quantile(np.array(found), [0.1, 0.5, 0.9], axis=0).T:
        yield f"{middle:.2f} [{low:.2f}, {high:.2f}]"


def rows(lab: Lab, claim: float, count: int, trials: int) -> Iterator[tuple[object, ...]]:
    """Yield table rows of two trainings and of the mechanism that both claim to be."""
    for ghost in (False, True):
        own, claimed = kept(lab, claim, count, ghost)
        mechanism = DescribedTraining(own.noise_multiplier, own.sampling_rate, own.steps, own.delta)
        audits = bounds(np.array(own.scores), np.array(own.included), mechanism)
        how = "ghost" if ghost else "per sample"
        found = (f"{audit.epsilon:.2f}" for audit in audits)
        yield f"{claimed:.2f}", f"{count:,}", mechanism, how, *found, f"{audits[0].best:.2f}"
    yield "", "", "", f"simulated, {trials} times", *spread(mechanism, count, trials), ""


def main(
    epsilon: tuple[float, ...] = (1.0, 8.0),
    canaries: tuple[int, ...] = (1000, 4000),
    trials: int = 40,
    rate: float | None = None,
    steps: int | None = None,
) -> None:
    """Print the table. rate, steps: parameters of a training to simulate alone; give both or
    neither.
    """
    if (rate is None) != (steps is None):
        refuse(f"expected --rate with --steps, got {rate} and {steps}")
    threads.set_thread_count()
    page = Page()
    page.head("claimed ε", "canaries", "σ, q, T", "clipping", "(ε, δ)", "f-DP", "shape", "best")
    for claim, count in itertools.product(epsilon, canaries):
        if rate is not None and steps is not None:
            mechanism = DescribedTraining.claiming(claim, rate, steps)
            how = f"simulated, {trials} times"
            page.row(
                f"{claim:.2f}", f"{count:,}", mechanism, how, *spread(mechanism, count, trials), ""
            )
            continue
        for row in rows(Lab(USUAL.recipe), claim, count, trials):
            page.row(*row)


if __name__ == "__main__":
    raise SystemExit(run(main))
