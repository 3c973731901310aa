"""Define interval cases for perplexities and model comparisons: ratios, differences, the least of
many.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from auditor.conclusions import contrasts
from auditor.conclusions.replicates import Replicates
from auditor.statistics import frontier, intervals
from auditor.statistics.bounds import BoundedNumber, count_discordant_pairs
from auditor.statistics.compare import resample_paired_means
from validation.trust.interval_case import Ends, Floats, IntervalCase, Rng, ends, lower, of
from validation.trust.interval_extraction import rare
from validation.trust.interval_membership import shifted


def of_models() -> Iterator[IntervalCase]:
    for n in (60, 100, 240):
        for distribution, (draw, mean) in NATS.items():
            yield IntervalCase("perplexity", distribution, f"{n} texts", *perplexity(n, draw, mean))
            yield IntervalCase(
                "perplexity ratio",
                f"5% more; {distribution}",
                f"{n} texts",
                1.05,
                ratio(n, draw, mean),
            )
    yield IntervalCase(
        "difference of perplexities", "paired; exponential", "100 texts", *perplexities_apart(100)
    )
    yield IntervalCase("difference of recall", "10% each, paired", "300", 0.0, shares_apart, 0.05)
    yield IntervalCase("difference of probabilities", "rare, paired", "300", 0.0, means_apart, 0.1)
    named = "frontier: a least one named among 3 alike"
    yield IntervalCase(named, "probabilities", "300", 0.5, least_of_means, 0.05)
    yield IntervalCase(named, "AUCs", "300/100", 0.5, least_of_aucs, 0.05)


NATS: dict[
    str, tuple[Callable[[Rng, int], Floats], float]
] = {  # nll a token of a text, and its mean
    "log-normal nll, σ 0.4": (
        lambda rng, n: rng.lognormal(math.log(2), 0.4, n),
        2 * math.exp(0.4**2 / 2),
    ),
    "exponential nll": (lambda rng, n: rng.exponential(2, n), 2.0),
    "log-normal nll, σ 1": (lambda rng, n: rng.lognormal(0, 1, n), math.exp(0.5)),
}


def perplexity(
    n: int, draw: Callable[[Rng, int], Floats], mean: float
) -> tuple[float, Callable[[Rng], Ends]]:
    def audit(rng: Rng) -> Ends:
        tokens = rng.integers(20, 100, n)
        nll = tokens * draw(rng, n)
        return of(
            intervals.estimate_perplexity(list(zip(nll.tolist(), tokens.tolist(), strict=True)))
        )

    return math.exp(mean), audit


def ratio(n: int, draw: Callable[[Rng, int], Floats], mean: float) -> Callable[[Rng], Ends]:
    """Return an audit of perplexity ratios: each text's nll rises by a random share."""

    def audit(rng: Rng) -> Ends:
        tokens = rng.integers(20, 100, (1, n)).astype(float)
        base = tokens * rng.lognormal(math.log(2), 0.4, (1, n))
        nll = np.array([base, base + tokens * draw(rng, n) * math.log(1.05) / mean])
        return of(frontier.estimate_perplexity_ratios(nll, tokens, base)[1])

    return audit


def perplexities_apart(n: int) -> tuple[float, Callable[[Rng], Ends]]:
    """Return the truth and the audit of a difference of perplexities, as in sweeps and studies of
    runs.
    """

    def cell(nll: Floats, tokens: Floats) -> Replicates:
        held = {"tokens": tokens.tolist(), "perplexity": nll.tolist()}
        return Replicates("t", "white-box", "a", measured={0: {}}, heldout={0: held})

    def audit(rng: Rng) -> Ends:
        tokens = rng.integers(20, 100, n).astype(float)
        base, more = tokens * rng.lognormal(math.log(2), 0.4, n), tokens * rng.exponential(0.2, n)
        signed = ((1, base + more), (-1, base))
        parts = [
            contrasts.WeightedMetric(sign, "perplexity", cell(nll, tokens)) for sign, nll in signed
        ]
        return of(contrasts.measure_seed_contrast("d", parts))

    mean = 2 * math.exp(0.4**2 / 2)
    return math.exp(mean + 0.2) - math.exp(mean), audit


def shares_apart(rng: Rng) -> Ends:
    return ends(count_discordant_pairs(rng.random(300) < 0.1, rng.random(300) < 0.1))


def means_apart(rng: Rng) -> Ends:
    return ends(resample_paired_means(rare(rng, 300), rare(rng, 300)))


def least_of_means(rng: Rng) -> Ends:
    return least_named(
        frontier.estimate_mean_leakages(np.array([rare(rng, 300) for _ in range(3)]))
    )


def least_of_aucs(rng: Rng) -> Ends:
    return least_named(
        frontier.estimate_auc_leakages([[shifted(1.0)(rng, 300, 100)] for _ in range(3)])
    )


def least_named(found: Sequence[frontier.ModelLeakage]) -> Ends:
    """Return 1 as the lower end if exactly one model may be named as leaking least, else 0."""

    def apart(i: int, j: int) -> BoundedNumber:
        return frontier.compare_paired_leakage(found[i], found[j])

    return lower(float(sum(frontier.select_possibly_least_leaking(len(found), apart)) == 1))
