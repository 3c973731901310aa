"""Test exactly, by ranks, whether a value is more likely than alternatives of the same format.

If the model never saw the true value, the value and its R alternatives are exchangeable. The
value's rank is then uniform in 1..R + 1, and rank / (R + 1) is a p-value.
"""

from __future__ import annotations

import math

import numpy as np
import scipy

from auditor.core.arrays import Floats
from auditor.core.result import Measurement
from auditor.statistics.intervals import estimate_bounded_mean

LEAST_CONTROLS = 20  # fewest ranks for a test of their uniformity


def count_alternatives_above(
    nll: float, tie_limit: float, alternative_nlls: Floats
) -> tuple[int, int]:
    """Return how many alternatives are more likely than a value, and how many equally likely.

    nll: the value's nll in nats; tie_limit: the largest nll that counts as equal; alternative_nlls:
    (R,).
    """
    # Symmetric about the value: an alternative that rounding put just before the value is a tie
    # too.
    margin = tie_limit - nll
    n_above = int((alternative_nlls < nll - margin).sum())
    tied = int((alternative_nlls <= tie_limit).sum()) - n_above
    return n_above, tied


def compute_rank_p_values(n_above: Floats, tied: Floats, alternatives: Floats) -> Floats:
    """Return rank / (R + 1) of each value, of shape (values,).

    The true value ranks last among equally likely values. n_above, tied: (values,) the numbers of
    more likely and of equally likely alternatives; alternatives: (values,) the numbers R.
    """
    p_values: Floats = (n_above + tied + 1) / (alternatives + 1)
    return p_values


def estimate_rank_bits(p_values: Floats, alternatives: Floats, note: str = "") -> Measurement:
    """Return the mean of log2(R + 1) - log2 rank in bits, `identifier_bits`.

    p_values: (values,), of `compute_rank_p_values`; alternatives: (values,) the numbers R.
    """
    most = math.log2(alternatives.max(initial=1.0) + 1)
    return estimate_bounded_mean("identifier_bits", -np.log2(p_values), most, "bits", note)


def adjust_false_discovery(p_values: Floats) -> Floats:
    """Return, for each value, the smallest false-discovery rate at which it is a discovery.

    See Benjamini and Hochberg 1995.
    """
    if not len(p_values):
        return p_values
    adjusted: Floats = scipy.stats.false_discovery_control(p_values, method="bh")
    return adjusted


def compute_uniformity_p_value(
    n_above: Floats, tied: Floats, alternatives: Floats, noise: Floats
) -> float:
    """Return the p-value for the hypothesis of uniform ranks (Kolmogorov and Smirnov).

    noise: (values,) uniform numbers in [0, 1), which break ties and make ranks continuous. The
    other parameters are as in `compute_rank_p_values`. Return NaN if there are too few ranks.
    """
    if len(n_above) < LEAST_CONTROLS:
        return math.nan
    places = (n_above + noise * (tied + 1)) / (alternatives + 1)
    return float(scipy.stats.kstest(places, "uniform").pvalue)
