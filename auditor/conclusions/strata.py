"""Summarise a finding by number of copies: the weighted share of all data, and the worst stratum.

A stratum holds the records with the same number of copies in the training data.
"""

from __future__ import annotations

from auditor.core.result import Finding, Measurement, Stratum
from auditor.statistics.bootstrap import CONFIDENCE
from auditor.statistics.intervals import clopper_pearson
from auditor.statistics.metrics import RECALL
from auditor.statistics.strata import StratumCount, estimate_population_share

_TAIL = 0.025


def has_unattacked_records(finding: Finding) -> bool:
    """Test if a limit or lack of time left some attackable records unattacked."""
    return any(stratum.extracted.n < stratum.population for stratum in finding.strata)


def measure_weighted_share(finding: Finding, tail: float = _TAIL) -> Measurement | None:
    """Return the extracted share of all attackable records, weighted by stratum.

    A stratum holds the records with the same number of copies. Return None if no strata exist. The
    measurement's `n` is the number of attackable records.

    Args:
        finding: finding of an attack.
        tail: error rate on each side of the interval.
    """
    if not finding.strata:
        return None
    counts = []
    population = 0
    for s in finding.strata:
        counts.append(StratumCount(s.population, s.extracted.n, s.extracted.hits))
        population += s.population
    value, low, high = estimate_population_share(counts, tail)
    return Measurement(RECALL, value, low, high, population)


def find_worst_stratum(finding: Finding) -> Stratum | None:
    """Return the stratum of copied records with the largest extracted share.

    A stratum holds the records with the same number of copies. Return None if all shares are 0.
    Records that occur only once are not considered.
    """
    copied = []
    for s in finding.strata:
        if (s.copies or 1) > 1 and s.extracted.hits:
            copied.append(s)
    return max(
        copied, key=lambda s: (s.extracted.value, s.copies or 0, s.extracted.n), default=None
    )


def find_worst_group(finding: Finding) -> tuple[str, Measurement] | None:
    """Return the name and extracted share of the group whose share has the highest lower bound.

    Return None if no group's bound is above the share of all records. The bounds share the level
    (Bonferroni): of 20 equal groups, one seems to leak most in a third of the runs otherwise.
    """
    shares = finding.by_group
    n_all = 0
    n_hits = 0
    bounds = {}
    for group, m in shares.items():
        n_all += m.n
        n_hits += m.hits
        bounds[group] = clopper_pearson(m.hits, m.n, 1 - (1 - CONFIDENCE) / len(shares))[0]
    name = max(shares, key=lambda group: (bounds[group], shares[group].value), default="")
    if not n_hits or bounds[name] <= n_hits / n_all:
        return None
    return name, shares[name]
