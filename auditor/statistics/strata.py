"""Estimate a share of a finite population if only a part of it is queried.

The population is all attackable records, divided into strata by copies. Records with many copies
are queried first, then a random sample. If a stratum is fully queried, its share is known; if it is
not queried at all, its share may be anything.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from auditor.statistics.bootstrap import CONFIDENCE
from auditor.statistics.distributions import compute_hypergeometric_cdf, compute_hypergeometric_sf


@dataclass(frozen=True)
class StratumCount:
    """Numbers of records and of hits in a stratum, of which a random sample was queried.

    population: the number of records in the stratum.
    n_queried: the number of queried records.
    hits: the number of hits among the queried records.
    """

    population: int
    n_queried: int
    hits: int

    def __post_init__(self) -> None:
        if not 0 <= self.hits <= self.n_queried <= self.population:
            raise ValueError(f"expected hits <= asked <= population, got {self}")


@lru_cache(maxsize=4096)
def compute_finite_population_interval(
    stratum: StratumCount, tail: float = (1 - CONFIDENCE) / 2
) -> tuple[int, int]:
    """Return the exact two-sided interval of the number of hits in a whole stratum.

    It contains the numbers that hypergeometric tests, at level `tail` in each direction, do not
    reject. These lie between the hits found and the population minus the misses found (Buonaccorsi
    1987, The American Statistician 41:215; Wright 1991). For a fully queried stratum it is the
    number of hits.
    """
    size = stratum.population
    n = stratum.n_queried
    hits = stratum.hits
    most = size - (n - hits)

    def exceeds_low(k: int) -> bool:
        # P(X >= hits | K) rises with K, and P(X <= hits | K) falls with it.
        return compute_hypergeometric_sf(hits - 1, size, k, n) > tail

    def exceeds_high(k: int) -> bool:
        return compute_hypergeometric_cdf(hits, size, k, n) <= tail

    low = hits + bisect_left(range(hits, most), True, key=exceeds_low)
    n_below = bisect_left(range(hits, most + 1), True, key=exceeds_high)
    return low, max(low, hits + n_below - 1)


def estimate_population_share(
    strata: Sequence[StratumCount], tail: float = (1 - CONFIDENCE) / 2
) -> tuple[float, float, float]:
    """Return (value, low, high) of the share of hits in all strata together.

    The value weights each stratum's share of hits among queried records by its population; it is
    NaN if a stratum was not queried. The interval adds up the strata's intervals, with an equal
    part of `tail` for each partly queried stratum (Bonferroni). It is exact if at most one stratum
    is partly queried, as happens if records with many copies are queried first. With more such
    strata, it is wider than the exact interval of Wendell and Schmee (1996, JASA 91:825), but valid
    for any sizes.
    """
    population = sum(stratum.population for stratum in strata)
    if not population:
        return math.nan, 0.0, 1.0
    in_part = sum(0 < stratum.n_queried < stratum.population for stratum in strata)
    hits = 0.0
    least = 0
    most = 0
    for stratum in strata:
        low, high = compute_finite_population_interval(stratum, tail / max(1, in_part))
        least += low
        most += high
        if stratum.n_queried:
            hits += stratum.population * stratum.hits / stratum.n_queried
        elif stratum.population:
            hits = math.nan
    return hits / population, least / population, most / population
