"""How tight the audit by gradient canaries is: a real training beside a perfect run of the mechanism that it claims.

    python benchmarks/trust/white_box.py [--epsilon 1 8] [--canaries 1000 4000] [--trials 40]    (some 5 CPU minutes)

A small lab's model is trained by DP-SGD, with per-sample gradients and by ghost clipping. Beside its bounds stand the
median and the middle four fifths of those of simulated trainings, in which each canary's coordinate is exactly the
subsampled Gaussian mechanism's: no audit of one run by these canaries and rules can expect more.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from planted_faults import USUAL
from rich.console import Console
from rich.table import Table

from auditor.benchmarks.lab import Lab
from auditor.core import threads
from auditor.core.streams import generator
from auditor.defenses.dp_sgd import DpSgd
from auditor.privacy.gradient_canaries import GradientCanaries
from auditor.statistics.audited import audited
from auditor.training.gradient_canaries import log_likelihood_ratio


def trained(lab: Lab, epsilon: float, canaries: int, ghost: bool) -> tuple[GradientCanaries, float]:
    """What a training kept, and the epsilon that it claims."""
    recipe = {"epochs": USUAL.epochs, "batch": USUAL.batch, "learning_rate": 2e-3}
    trainer = DpSgd(**recipe, epsilon=epsilon, gradient_canaries=canaries, ghost=ghost)  # type: ignore[arg-type]
    with tempfile.TemporaryDirectory() as folder:
        job = lab.job(trainer, Path(folder))
        trainer.check(job)
        trainer.train(job)
        made = lab.training.loaded(trainer, Path(folder))
    assert made.canaries is not None and made.privacy is not None and made.privacy.epsilon is not None
    return made.canaries, made.privacy.epsilon


def simulated(kept: GradientCanaries, trial: int) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Scores and coins of as many canaries in as many steps of the mechanism itself."""
    rng, count = generator("white box", trial), len(kept.included)
    included, scores = rng.random(count) < 0.5, np.zeros(count)
    for _ in range(kept.steps):
        part = included & (rng.random(count) < kept.sampling_rate)
        x = part + kept.noise_multiplier * rng.standard_normal(count)
        scores += log_likelihood_ratio(x, kept.noise_multiplier, kept.sampling_rate)
    return scores, included


def bounds(scores: NDArray[np.float64], included: NDArray[np.bool_], delta: float) -> list[float]:
    return [audit.epsilon for audit in audited(scores, included, delta)]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epsilon", type=float, nargs="+", default=[1.0, 8.0])
    parser.add_argument("--canaries", type=int, nargs="+", default=[1000, 4000])
    parser.add_argument("--trials", type=int, default=40)
    asked = parser.parse_args(arguments)
    threads.settle()
    lab, table = (
        Lab(USUAL.recipe),
        Table("Claimed ε", "Canaries", "σ, q, T", "Clipping", "(ε, δ)", "f-DP", "GDP", "Best"),
    )
    for epsilon in asked.epsilon:
        for canaries in asked.canaries:
            for ghost in (False, True):
                kept, claimed = trained(lab, epsilon, canaries, ghost)
                audits = audited(np.array(kept.scores), np.array(kept.included), kept.delta)
                mechanism = f"{kept.noise_multiplier:.2f}, {kept.sampling_rate:.3f}, {kept.steps}"
                found = [f"{audit.epsilon:.2f}" for audit in audits]
                how = "ghost" if ghost else "per sample"
                table.add_row(f"{claimed:.2f}", f"{canaries:,}", mechanism, how, *found, f"{audits[0].best:.2f}")
            perfect = np.array([bounds(*simulated(kept, trial), kept.delta) for trial in range(asked.trials)])
            low, middle, high = np.quantile(perfect, [0.1, 0.5, 0.9], axis=0)
            spread = [f"{m:.2f} [{a:.2f}, {b:.2f}]" for m, a, b in zip(middle, low, high, strict=True)]
            table.add_row("", "", "", f"simulated, {asked.trials} times", *spread, "")
    Console(width=150).print(table)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
