"""Measure how often each estimator of epsilon exceeds the truth, on mechanisms of known epsilon.

    python -m validation.trust.coverage [--audits 1000] [--canaries 100 300 ...] [-o FOLDER]    (some minutes)

Each audit draws its coins, plays the mechanism once and estimates epsilon as all audits do
(`audit_epsilon_bounds`, or counts of separate trials). A bound may exceed the truth in at most 5%
of audits; the share has a Clopper-Pearson interval. Exits with 1 if this interval is above 5% for
a bound that is valid for the mechanism. The last mechanism reveals all coins or none, by a coin of
its own. A bound that assumes a shape is also shown for other shapes.
"""  # noqa: E501

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from auditor.core.secret_randomness import make_keyed_generator
from auditor.statistics.audit_by_shape import (
    GAUSSIAN,
    Sampling,
    compute_likelihood_ratio_distribution,
)
from auditor.statistics.audited import LEVEL, audit_epsilon_bounds
from auditor.statistics.games import epsilon_clopper_pearson
from auditor.statistics.intervals import clopper_pearson
from auditor.statistics.one_run import compute_gaussian_epsilon, find_largest_refuted_value
from validation.harness import Page, run, save_svg

CANARIES = (100, 300, 1000, 3000, 10_000)
DELTA = 1e-5
# Probabilities of a mechanism that is 1-GDP but not a set of independent channels.
_TELLS_ALL, _TOLD_RIGHT = (
    0.1,
    0.9,
)

Scores = NDArray[np.float64]  # (canaries,); a higher score means surer that the canary was included
Coins = NDArray[np.bool_]
Play = Callable[[Coins, np.random.Generator], Scores]


@dataclass(frozen=True)
class KnownMechanism:
    """A mechanism of known epsilon. play: returns an attacker's scores for given coins."""

    name: str
    play: Play
    delta: float
    truth: dict[str, float]  # true value at delta, by estimator that bounds it
    # Reference values, by estimator that does not bound the true value.
    beside: dict[str, float] = field(default_factory=dict)
    threshold: float = 0.0  # a trial with at least this score is guessed to include the record
    sampling: Sampling = GAUSSIAN  # sampling of the assumed shape


@dataclass(frozen=True)
class EstimatorCoverage:
    """The results of one estimator on one mechanism with this many canaries or independent
    trials.
    """

    mechanism: str
    estimator: str
    canaries: int
    truth: float
    audits: int
    exceeds: int  # number of audits that exceed the truth
    median: float  # median of their bounds
    stated: bool  # whether this estimator is about this mechanism

    @property
    def interval(self) -> tuple[float, float]:
        return clopper_pearson(self.exceeds, self.audits)

    @property
    def failed(self) -> bool:
        return self.stated and self.interval[0] > LEVEL


def randomised_response(epsilon: float, delta: float) -> KnownMechanism:
    """Return randomised response, which reports each coin correctly with probability e^eps / (1 +
    e^eps).

    With probability delta, a coin is revealed with certainty.
    """

    def play(coins: Coins, rng: np.random.Generator) -> Scores:
        right = rng.random(len(coins)) < 1 / (1 + math.exp(-epsilon))
        told = rng.random(len(coins)) < delta
        said = np.where(told, np.where(coins, 2.0, -2.0), np.where(coins == right, 1.0, -1.0))
        return said + rng.random(len(coins)) / 10  # breaks ties at random

    shape = {"shape": epsilon} if delta else {}
    name = f"randomised response, ε {epsilon:g}" + (f", δ {delta:g}" if delta else "")
    return KnownMechanism(
        name, play, delta, dict.fromkeys(("one_run", "clopper_pearson"), epsilon), shape
    )


def gaussian(mu: float) -> KnownMechanism:
    def play(coins: Coins, rng: np.random.Generator) -> Scores:
        return mu * coins + rng.normal(size=len(coins))

    truth = compute_gaussian_epsilon(mu, DELTA)
    about = dict.fromkeys(("one_run", "fdp", "shape", "clopper_pearson"), truth)
    name = f"Gaussian, μ {mu:g} (ε {truth:.3g} at δ {DELTA:g})"
    return KnownMechanism(name, play, DELTA, about, threshold=mu / 2)


def dp_sgd(noise: float, sampling: Sampling) -> KnownMechanism:
    """Return DP-SGD: subsampled Gaussian steps with one coordinate per canary.

    A score is the log-likelihood ratio of inclusion.
    """
    own = compute_likelihood_ratio_distribution(noise, sampling)

    def play(coins: Coins, rng: np.random.Generator) -> Scores:
        drawn = rng.random(len(coins))
        inside, out = (
            own.log_ratios[np.searchsorted(np.cumsum(mass[:-1]), drawn)]
            for mass in (own.inside, own.out)
        )
        return np.where(coins, inside, out)

    truth = find_largest_refuted_value(
        lambda epsilon: own.delta(epsilon) > DELTA, float(own.log_ratios[-1])
    )
    q, steps = sampling
    about = dict.fromkeys(("one_run", "shape", "clopper_pearson"), truth)
    name = f"DP-SGD, σ {noise:g}, q {q:g}, T {steps:g} (ε {truth:.3g} at δ {DELTA:g})"
    return KnownMechanism(name, play, DELTA, about, sampling=sampling)


def all_or_none() -> KnownMechanism:
    """Return a mechanism that reveals the coins of all canaries together, or none.

    Each canary's channel is 1-GDP given the others (tests/statistics/test_one_run.py).
    """

    def play(coins: Coins, rng: np.random.Generator) -> Scores:
        if rng.random() >= _TELLS_ALL:
            return rng.random(len(coins))
        right = rng.random(len(coins)) < _TOLD_RIGHT
        return np.where(coins == right, 1.0, -1.0) + rng.random(len(coins)) / 10

    pure = math.log((_TOLD_RIGHT - DELTA / _TELLS_ALL) / (1 - _TOLD_RIGHT))
    about = {
        "one_run": pure,
        **dict.fromkeys(("fdp", "shape"), compute_gaussian_epsilon(1.0, DELTA)),
    }
    return KnownMechanism("tells all coins or none; 1-GDP", play, DELTA, about)


def mechanisms() -> tuple[KnownMechanism, ...]:
    return (
        *(randomised_response(epsilon, delta) for epsilon in (1.0, 4.0) for delta in (0.0, DELTA)),
        randomised_response(1.0, 10 * DELTA),
        gaussian(0.5),
        gaussian(2.0),
        dp_sgd(0.74, (0.084, 48)),
        all_or_none(),
    )


def study(
    mechanism: KnownMechanism, canaries: int, audits: int, seed: int
) -> Iterator[EstimatorCoverage]:
    """Yield the results of all estimators on the same audits of a mechanism."""
    said: dict[str, list[float]] = {}
    for audit in range(audits):
        rng = make_keyed_generator("coverage", mechanism.name, canaries, audit, seed)
        coins = rng.random(canaries) < 0.5
        scores = mechanism.play(coins, rng)
        for one in audit_epsilon_bounds(
            scores, coins, mechanism.delta, sampling=mechanism.sampling
        ):
            said.setdefault(one.estimator, []).append(one.epsilon)
        # As separate trials: half with the record, half without, and a threshold fixed beforehand.
        half = np.arange(canaries) < canaries // 2
        taken = mechanism.play(half, rng) >= mechanism.threshold
        counts = [
            int(x.sum()) for x in (taken & half, ~taken & half, taken & ~half, ~taken & ~half)
        ]
        said.setdefault("clopper_pearson", []).append(
            epsilon_clopper_pearson(*counts, mechanism.delta)
        )
    for estimator, truth in (mechanism.truth | mechanism.beside).items():
        bounds = np.array(said[estimator])
        exceeds = int((bounds > truth).sum())
        median, stated = float(np.median(bounds)), estimator in mechanism.truth
        yield EstimatorCoverage(
            mechanism.name, estimator, canaries, truth, audits, exceeds, median, stated
        )


def tell(rows: Sequence[EstimatorCoverage], page: Page) -> None:
    """Print a table with `median / truth (share above)` by estimator and number of canaries."""
    sizes = sorted({row.canaries for row in rows})
    page.head(
        "mechanism", "estimator", *(f"{size:,}" for size in sizes), "worst share above the truth"
    )
    for key in dict.fromkeys((row.mechanism, row.estimator) for row in rows):
        own = [row for row in rows if (row.mechanism, row.estimator) == key]
        worst = max(own, key=lambda row: row.exceeds)
        low, high = worst.interval
        about = "" if worst.stated else "; not what it is about"
        page.row(
            *key,
            *(f"{row.median / row.truth:.2f} ({row.exceeds / row.audits:.1%})" for row in own),
            f"{worst.exceeds} of {worst.audits:,}, [{low:.1%}, {high:.1%}]{about}",
        )


def drawn(rows: Sequence[EstimatorCoverage]) -> Figure:
    """Draw the median bound / truth over the number of canaries, in one panel per mechanism."""
    names = list(dict.fromkeys(row.mechanism for row in rows))
    figure = Figure(figsize=(4 * math.ceil(len(names) / 2), 7), layout="constrained")
    for axes, name in zip(
        figure.subplots(2, math.ceil(len(names) / 2), squeeze=False).flat, names, strict=False
    ):
        for k, estimator in enumerate(dict.fromkeys(row.estimator for row in rows)):
            own = [row for row in rows if (row.mechanism, row.estimator) == (name, estimator)]
            if own:
                points = [row.canaries for row in own], [row.median / row.truth for row in own]
                axes.plot(*points, marker="osD^v"[k], color=f"C{k}", label=estimator)
        axes.axhline(1.0, color="0.5", linewidth=0.8)
        axes.set(
            xscale="log",
            ylim=(0, 1.15),
            title=name,
            xlabel="canaries",
            ylabel="median bound / truth",
        )
        axes.title.set_fontsize(9)
        axes.legend(fontsize=8)
    return figure


def main(
    audits: Annotated[int, "of each mechanism and number of canaries"] = 1000,
    canaries: tuple[int, ...] = CANARIES,
    seed: int = 0,
    out: Annotated[Path | None, "folder for coverage.md and coverage.svg"] = None,
) -> int:
    rows = [
        row
        for mechanism in mechanisms()
        for count in canaries
        for row in study(mechanism, count, audits, seed)
    ]
    tell(rows, Page(out and out / "coverage.md"))
    if out:
        save_svg(drawn(rows), out / "coverage.svg")
    return int(any(row.failed for row in rows))


if __name__ == "__main__":
    raise SystemExit(run(main))
