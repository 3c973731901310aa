"""What any valid bound of epsilon from one run can reach, whoever computes it: no estimator's number lies beyond.

    python -m benchmarks.checks.trust.information_limit [--canaries 1000] [--epsilon 1 2 4]    (a minute)

Canaries of DP-SGD with a coordinate each: noise, sampling rate and steps of the small lab at epsilon 8. Beside it
stands a mechanism that shows the same scores, but of coins that no score makes more than e^epsilon times likelier one
way: it is (epsilon, 0)-DP. A bound that is valid for all mechanisms says more than epsilon of that one in at most 5% of
audits. So of DP-SGD it says so no oftener than the most powerful test at 5% tells the two apart (Neyman and Pearson),
which knows both and sees every score and coin. The last column is what our bound does.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import log_expit

from auditor.core.secret_randomness import keyed_random_generator
from auditor.statistics.audit_by_shape import canary_likelihood_ratio_distribution
from auditor.statistics.audited import LEVEL, audit_epsilon_bounds
from benchmarks.checks.harness import Page, run

NOISE, SAMPLING, DELTA = 0.74, (0.084, 48), 1e-5

Floats = NDArray[np.float64]


def held(ratio: Floats, mass: Floats, epsilon: float) -> Floats:
    """The log-odds of the coin, held to epsilon above and as far below as keeps coins fair."""

    def inside(below: float) -> float:
        return float(mass @ np.exp(log_expit(np.clip(ratio, -below, epsilon)))) - 0.5

    return np.clip(ratio, -brentq(inside, 0.0, epsilon), epsilon)


def reached(ratio: Floats, mass: Floats, epsilon: float, canaries: int, trials: int) -> float:
    """The power at 5%, randomised where the statistic has an atom: that the coins are DP-SGD's, not the held ones."""
    rng, odds = keyed_random_generator("information limit", epsilon), held(ratio, mass, epsilon)
    told = np.stack([log_expit(-ratio) - log_expit(-odds), log_expit(ratio) - log_expit(odds)])  # coin 0, coin 1
    held_sums, own_sums = (
        np.array([_sum(told, mass, np.exp(log_expit(of)), canaries, rng) for _ in range(trials)])
        for of in (odds, ratio)
    )
    least = np.quantile(held_sums, 1 - LEVEL, method="higher")
    above, at = (held_sums > least + 1e-12).mean(), (np.abs(held_sums - least) <= 1e-12).mean()
    share = min(1.0, (LEVEL - above) / at) if at else 0.0
    return float((own_sums > least + 1e-12).mean() + share * (np.abs(own_sums - least) <= 1e-12).mean())


def _sum(told: Floats, mass: Floats, inside: Floats, canaries: int, rng: np.random.Generator) -> float:
    seen = rng.choice(len(mass), canaries, p=mass)
    return float(told[(rng.random(canaries) < inside[seen]).astype(int), seen].sum())


def ours(ratio: Floats, mass: Floats, canaries: int, trials: int) -> Floats:
    """What our bound says of so many audits of DP-SGD itself."""
    bounds = []
    for trial in range(trials):
        rng = keyed_random_generator("information limit", "ours", trial)
        seen = rng.choice(len(mass), canaries, p=mass)
        coins = rng.random(canaries) < np.exp(log_expit(ratio[seen]))
        bounds.append(audit_epsilon_bounds(ratio[seen], coins, DELTA, sampling=SAMPLING)[0].epsilon)
    return np.array(bounds)


def main(
    epsilon: tuple[float, ...] = (1.0, 1.5, 2.0, 2.25, 2.5, 3.0, 4.0), canaries: int = 1000, trials: int = 2000
) -> None:
    own, page = canary_likelihood_ratio_distribution(NOISE, SAMPLING), Page()
    mass = (own.inside + own.out) / 2
    kept = mass > 0
    ratio, mass = own.at[kept], mass[kept] / mass[kept].sum()
    found = ours(ratio, mass, canaries, trials)
    page.head("ε", "any valid bound says more, at most", "ours says more")
    for one in epsilon:
        page.row(f"{one:g}", f"{reached(ratio, mass, one, canaries, trials):.1%}", f"{(found > one).mean():.1%}")
    print(f"\nours, median of {trials:,}: {np.median(found):.2f}")


if __name__ == "__main__":
    raise SystemExit(run(main))
