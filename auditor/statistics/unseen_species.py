"""Estimate the number of species that no draw has shown yet, from counts of the species seen.

Here a draw is a generation and a species is a training record. A draw shows any number of species
(incidence data). The estimates use the numbers of species seen in exactly one (Q1) and in exactly
two (Q2) of T draws. They assume nothing about the probability of each species.
"""

from __future__ import annotations

import math

import numpy as np

from auditor.core.arrays import Ints
from auditor.core.result import Measurement
from auditor.statistics.intervals import Z

Counts = Ints  # (species seen,): the number of draws that contain each species


def estimate_new_species(name: str, counts: Counts, draws: int, per: int) -> Measurement:
    """Estimate how many unseen species `per` further draws show.

    All of them are assumed to find new species at the rate of the next draw, which is Q1/T (Good
    1953, Eq. 9). T draws were made, and Qi species were seen exactly i times. The mean squared
    error of the rate is (Q1 + 2 Q2)/T^2: each species adds the error of its own count (after
    Robbins 1968; for draws of a single species, Esty 1983 gives the same). The upper end inverts
    the score test, as for a Poisson count: few species that were seen once may be far from their
    mean. counts: (species,) the number of draws with each species.
    """
    once = _count_species_seen(counts, 1)
    twice = _count_species_seen(counts, 2)
    value = once / draws
    deviation = math.sqrt(once + 2 * twice)
    low = max(0.0, value - Z * deviation / draws)
    high = value + (Z**2 / 2 + Z * math.hypot(deviation, Z / 2)) / draws
    return Measurement(name, per * value, per * low, per * high, draws, f"per {per:,}")


def estimate_species_richness(name: str, counts: Counts, draws: int, most: int) -> Measurement:
    """Estimate the number of species, seen and unseen; at least one was seen.

    The estimate is at most `most`, the number of species that can exist. It is Chao 1987
    (incidence), unbiased form: S + A Q1 (Q1 - 1) / (2 (Q2 + 1)), where A = (T - 1)/T. T draws were
    made, S species were seen, and Qi of them exactly i times. The estimate is usually below the
    true number, and close to it if unseen species are about as likely as species seen once.

    The interval is log-normal in the number of unseen species (Chao 1987), in whole species. If the
    estimate is S, the interval follows from the probability of missing a species as frequent as
    those seen. counts: (species,) the number of draws with each species.
    """
    once = _count_species_seen(counts, 1)
    twice = _count_species_seen(counts, 2)
    share = (draws - 1) / draws
    unseen = share * once * (once - 1) / (2 * (twice + 1))
    if unseen > 0:
        # The variance of Chao2's bias-corrected form (EstimateS, Appendix B).
        spread = (
            unseen
            + share**2 * once * (2 * once - 1) ** 2 / (4 * (twice + 1) ** 2)
            + share**2 * once**2 * twice * (once - 1) ** 2 / (4 * (twice + 1) ** 4)
        )
        factor = math.exp(Z * math.sqrt(math.log(1 + spread / unseen**2)))
        low = len(counts) + unseen / factor
        high = len(counts) + unseen * factor
    else:
        # Poisson: a species seen i times is missed with probability e^-i.
        missed = float(np.exp(-counts.astype(float)).mean())
        spread = len(counts) * missed * (1 - missed)
        low = len(counts)
        high = (len(counts) + Z * math.sqrt(spread)) / (1 - missed)
    value = min(len(counts) + unseen, most)
    low = math.floor(min(low, value))
    high = max(value, min(math.ceil(high), most))
    return Measurement(name, value, low, high, draws, "records")


def _count_species_seen(counts: Counts, times: int) -> int:
    return int((counts == times).sum())
