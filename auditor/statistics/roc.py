"""Measure how well scores distinguish members from non-members.

The measures are AUC and true-positive rates, with intervals. Members should score higher.
`members`: (members,) scores, `others`: (non-members,) scores. Ties never raise a result: a tie
counts as half a win in an AUC, and a true-positive rate counts only members above the threshold.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from auditor.core.arrays import Bools, Floats
from auditor.core.result import Measurement
from auditor.statistics import bootstrap
from auditor.statistics.bounds import (
    BoundedNumber,
    bound_binomial_share,
    bound_part_share,
    bound_unseen_value,
    count_discordant_pairs,
    make_measurement,
    share_level,
)
from auditor.statistics.distributions import (
    compute_binomial_cdf,
    compute_binomial_sf,
    compute_normal_quantile,
    find_binomial_quantile,
    find_binomial_upper_quantile,
)
from auditor.statistics.intervals import Z, clopper_pearson
from auditor.statistics.one_run import find_largest_refuted_value

Sides = tuple[Floats, Floats]  # of the members, and of the non-members

AUC = "AUC"  # a unit: a probability that is not written in percent
# Fewest members, and non-members: with three of each, even a perfect order has probability 1/20 by
# chance.
LEAST = 4

_SIDE = (1 - bootstrap.CONFIDENCE) / 2
_ROUNDING = 1e-9
_PARTS = 5  # parts of the false-positive range of a partial AUC
# Share of the level for the position of the threshold, which a few non-members determine worst.
_OF_THRESHOLD = 0.8
_OF_SAME = 0.9  # share of the level for two AUCs of one direction, which is usual


# --- AUC ---


def compute_delong_placements(members: Floats, others: Floats) -> Sides:
    """Return DeLong's placements, of shapes (members,) and (non-members,) (DeLong et al. 1988).

    The first array holds the share of non-members below each member, the second the share of
    members above each non-member. Ties count half. The mean of either array is the AUC.
    """
    return _compute_share_below(members, others), 1 - _compute_share_below(others, members)


def _compute_share_below(scores: Floats, others: Floats) -> Floats:
    """Return the share of `others` below each score, of shape (scores,); ties count half."""
    if np.isnan(scores).any() or np.isnan(others).any():
        return np.full(len(scores), np.nan)
    ordered = np.sort(others)
    n_below = np.searchsorted(ordered, scores)
    is_tied = np.append(ordered, np.nan)[n_below] == scores
    n_upto = n_below.copy()
    n_upto[is_tied] = np.searchsorted(ordered, scores[is_tied], side="right")
    return (n_below + n_upto) / 2 / len(others)


def auc(members: Floats, others: Floats) -> float:
    """Return the probability that a member scores higher than a non-member."""
    return float(_compute_share_below(members, others).mean())


def estimate_auc(
    name: str, members: Floats, others: Floats, note: str = "", widen: float = 1.0
) -> Measurement:
    """Return the AUC with the 95% interval of `compute_auc_interval`.

    widen: factor on the standard deviation, for scores that are less independent than assumed.
    """
    placements = compute_delong_placements(members, others)
    value = float(placements[0].mean())
    n = len(members) + len(others)
    ends = compute_auc_interval(
        value, compute_delong_deviation(*placements), len(members), len(others), widen
    )
    return Measurement(name, value, *ends, n, AUC, note)


def compute_auc_interval(
    value: float, deviation: float, m: int, n: int, widen: float = 1.0
) -> tuple[float, float]:
    """Return the 95% interval of an AUC: each end is the outermost of three intervals' ends.

    DeLong's interval depends on the scores. Newcombe's has a width even at AUC 1. The third allows
    for records of the smaller group that the sample missed, all of them ranked on the wrong side.

    deviation: DeLong's standard deviation; m, n: the numbers of members and non-members; widen:
    factor on the standard deviation.
    """
    reach = Z * widen * deviation
    ends = compute_newcombe_interval(value, m, n, widen)
    missed = clopper_pearson(0, min(m, n))[1]
    low = max(0.0, min(ends[0], value - reach, value * (1 - missed)))
    high = min(1.0, max(ends[1], value + reach, 1 - (1 - value) * (1 - missed)))
    return low, high


def compute_delong_deviation(*placements: Floats) -> float:
    """Return the standard deviation of an AUC, from its `compute_delong_placements`."""
    return math.sqrt(sum(float(np.var(side, ddof=1)) / len(side) for side in placements))


def compute_newcombe_interval(
    value: float, m: int, n: int, widen: float = 1.0
) -> tuple[float, float]:
    """Return the interval of all AUCs that `value` does not refute (Newcombe 2006, method 5).

    m, n: the numbers of members and non-members; widen: factor on the standard deviation.
    """

    def compute_half_width(x: float) -> float:
        more = (m + n) / 2 - 1  # variance of Hanley and McNeil 1982, with the mean of both sizes
        growth = 1 + more * ((1 - x) / (2 - x) + x / (1 + x))
        return widen * Z * math.sqrt(x * (1 - x) * growth / (m * n))

    def find_low_end(auc_value: float) -> float:
        # At 0 and 1 the half-width is 0, so these would pass as ends.
        return find_largest_refuted_value(
            lambda x: x < auc_value - compute_half_width(x),
            min(auc_value, 1 - _ROUNDING),
            close=1e-12,
        )

    # The half-width is the same at x and at 1 - x.
    return find_low_end(value), 1 - find_low_end(1 - value)


def compute_auc_difference(new: Sides, base: Sides) -> BoundedNumber:
    """Return the AUC of `new` minus the AUC of `base`.

    new, base: (members' scores, non-members' scores), of the same records.
    """
    sides = zip(compute_delong_placements(*new), compute_delong_placements(*base), strict=True)
    return _bound_placement_mean([np.subtract(*placements) for placements in sides])


def _bound_placement_mean(sides: Sequence[Floats]) -> BoundedNumber:
    """Return the mean of paired differences, or sums, of two AUCs' placements.

    The bounds are of a normal distribution with DeLong's variance for correlated AUCs. If both AUCs
    are near 1, this variance is near 0 in most samples. So the bounds also allow for pairs of a
    member and a non-member that only one model ranks wrongly, and of which the sample has none.

    sides: (members,) and (non-members,) values, with equal means.
    """
    value = float(sides[0].mean())
    deviation = compute_delong_deviation(*sides)
    # Pairs without a record in common are independent. The order of one pair changes by at most 1.
    floor = bound_unseen_value(value, min(map(len, sides)), 1.0)
    return BoundedNumber(
        value,
        sum(map(len, sides)),
        lambda level: min(value + compute_normal_quantile(level) * deviation, floor.low(level)),
        lambda level: max(value - compute_normal_quantile(level) * deviation, floor.high(level)),
    )


def bound_auc_distance_change(new: Sides, base: Sides) -> BoundedNumber:
    """Return by how much max(AUC, 1 - AUC) is higher in `new` than in `base`.

    new, base: placements of members and of non-members, of the same records.
    """
    sides = list(zip(new, base, strict=True))
    difference = _bound_placement_mean([after - before for after, before in sides])
    mirror = _bound_placement_mean([after + before - 1 for after, before in sides])
    value = abs(float(new[0].mean()) - 0.5) - abs(float(base[0].mean()) - 0.5)
    return bound_distance_change(value, difference, mirror)


def bound_distance_change(
    value: float, difference: BoundedNumber, mirror: BoundedNumber
) -> BoundedNumber:
    """Bound by how much max(AUC, 1 - AUC) is higher for one AUC than for another.

    The scores themselves cannot choose the direction: a baseline at chance would seem to leak, and
    an error of both AUCs would mirror both. In the true direction of the first AUC, the change is
    at most the difference from either direction of the second. So the upper bound is the smaller of
    two, which share the level, and the larger one over the directions of the first. The lower bound
    is the same for the reversed change.

    Args:
        value: the change.
        difference: the first AUC minus the second.
        mirror: the first AUC minus (1 - the second).
    """

    def low(level: float) -> float:
        share = level * _OF_SAME
        remainder = level - share
        return min(
            max(difference.low(share), -mirror.high(remainder)),
            max(mirror.low(remainder), -difference.high(share)),
        )

    def high(level: float) -> float:
        share = level * _OF_SAME
        remainder = level - share
        return max(
            min(difference.high(share), mirror.high(remainder)),
            min(-difference.low(share), -mirror.low(remainder)),
        )

    return BoundedNumber(value, difference.n, low, high)


# --- true-positive rates ---


@dataclass(frozen=True)
class TprAtThreshold:
    """Numbers of members and non-members above a threshold.

    rate: largest expected share of all non-members above the threshold.
    threshold: the score of a non-member; only higher scores count.
    true_positives: number of members above the threshold.
    members, nonmembers: numbers of all members and of all non-members.
    false: number of non-members above the threshold.
    tied: the numbers of members and of non-members whose score equals the threshold. Such
        records do not count as above the threshold.
    """

    rate: float
    threshold: float
    true_positives: int
    members: int
    false: int
    nonmembers: int
    tied: tuple[int, int]

    @property
    def value(self) -> float:
        return self.true_positives / self.members


def count_allowed_false_positives(nonmembers: int, rate: float) -> int:
    """Return how many of n `nonmembers` may be above the threshold; -1 if n is too small.

    A new score exceeds the k-th highest of n exchangeable scores with probability at most k / (n +
    1). So the threshold is the k-th highest score with k = floor((n + 1) rate), and k - 1 scores
    are above it (conformal prediction: Vovk et al. 2005). One more score above it would give the
    rate (k + 1) / (n + 1), which for 100 non-members is twice the nominal 1%.
    """
    # A product that should be an integer may be rounded to just below it.
    return int((nonmembers + 1) * rate + _ROUNDING) - 1


def count_threshold_nonmembers(rate: float) -> int:
    """Return the smallest number of non-members that suffices for a threshold at this rate.

    The threshold is then their highest score. For a rate of 1% the number is 99.
    """
    return math.ceil(1 / rate - 1 - _ROUNDING)


def compute_conformal_threshold(others: Floats, rate: float) -> float:
    """Return the threshold that at most `count_allowed_false_positives` non-members exceed.

    A record that is exchangeable with the non-members exceeds it with probability at most `rate`
    (formulas.md A7). Return +inf if there are too few non-members.
    """
    may = count_allowed_false_positives(len(others), rate)
    if may >= 0:
        return float(np.sort(others)[::-1][may])
    return math.inf


def compute_conformal_p_values(scores: Floats, others: Floats) -> Floats:
    """Return the p-value (1 + #{non-member >= score}) / (n + 1) of each score."""
    n_below = np.searchsorted(np.sort(others), scores, side="left")
    result: Floats = (1 + len(others) - n_below) / (len(others) + 1)
    return result


def tpr_at_fpr(members: Floats, others: Floats, rate: float) -> TprAtThreshold:
    """Count members above the threshold that at most a share `rate` of non-members exceeds.

    If there are too few non-members for this rate, the count is 0.
    """
    threshold = compute_conformal_threshold(others, rate)
    n_found = int((members > threshold).sum())
    false = int((others > threshold).sum())
    tied = int((members == threshold).sum()), int((others == threshold).sum())
    return TprAtThreshold(rate, threshold, n_found, len(members), false, len(others), tied)


def estimate_tpr(
    name: str,
    members: Floats,
    others: Floats,
    rate: float,
    tried: int = 1,
    independent: Sides | None = None,
) -> Measurement | None:
    """Return the true-positive rate at a false-positive rate of at most `rate`, with an interval.

    Return None if there are too few non-members for this rate.

    name: name of the metric. tried: number of scores compared to select the best;
    Bonferroni's correction widens the interval. independent: the scores of one record of each
    person or document, if these have several; the interval contains that of these scores.
    """
    if len(others) < count_threshold_nonmembers(rate):
        return None
    note = describe_tpr_counts(tpr_at_fpr(members, others, rate))
    number = bound_tpr(members, others, rate)
    if independent is not None:
        number = _contain_bounds(number, bound_tpr(*independent, rate))
    return make_measurement(name, share_level(number, tried), note=note)


def _contain_bounds(number: BoundedNumber, independent: BoundedNumber) -> BoundedNumber:
    return replace(bound_part_share(number, independent), n=number.n)


def describe_tpr_counts(tpr: TprAtThreshold) -> str:
    """Describe the numbers of members and non-members above the threshold.

    The text also says what share of all non-members may be above it: the upper end of the interval.
    """
    worst = clopper_pearson(tpr.false, tpr.nonmembers)[1]
    at = f"{tpr.true_positives}/{tpr.members} above {tpr.threshold:.4g}"
    realised = f"of non-members {tpr.false}/{tpr.nonmembers}, which may be {worst:.1%} of others"
    members, others = tpr.tied
    few = ""
    if tpr.nonmembers < (least := count_bound_nonmembers(tpr.rate, _SIDE)):
        few = f"; a lower end above 0 takes {least:,} non-members"
    return (
        f"{at}; {realised}; at the threshold itself, not counted: {members} members, {others} "
        f"non-members{few}"
    )


def bound_tpr(members: Floats, others: Floats, rate: float) -> BoundedNumber:
    """Return the true-positive rate at a false-positive rate of exactly `rate`, with bounds.

    This is a point of the ROC: the share of all members above the threshold that exactly `rate` of
    all non-members exceed. If scores tie, it is the lowest threshold that at most `rate` exceed.

    The bounds cover the sampling of both groups and hold for any two distributions. They take two
    steps:

    - How many of the n non-members are above the true threshold is binomial. So two of their scores
      bound the threshold (Clopper and Pearson 1934). This takes most of the significance level.
    - Given these two scores, the number of members above each is binomial. This takes the rest of
      the level.

    With fewer than `count_bound_nonmembers` non-members, the lower bound is 0, because all their
    scores may be below the threshold.
    """
    n = len(members)

    def low(level: float) -> float:
        k, wrong = _find_surely_lower_rank(len(others), rate, level * _OF_THRESHOLD)
        n_above = int(_mark_members_above(members, others, k).sum())
        # wrong + (1 - wrong) x the remaining level = level
        return bound_binomial_share(n_above, n).low((level - wrong) / (1 - wrong))

    def high(level: float) -> float:
        k, wrong = _find_surely_higher_rank(len(others), rate, level * _OF_THRESHOLD)
        n_above = int(_mark_members_above(members, others, k).sum())
        return bound_binomial_share(n_above, n).high((level - wrong) / (1 - wrong))

    return BoundedNumber(tpr_at_fpr(members, others, rate).value, n, low, high)


def bound_partial_auc(members: Floats, others: Floats, max_fpr: float) -> BoundedNumber:
    """Bound the true-positive rate averaged over all false-positive rates up to `max_fpr`.

    This average is the partial AUC divided by `max_fpr`; for random scores it equals max_fpr / 2. A
    ROC never falls, so its mean lies between the means of the step functions below and above it.
    The steps are the bounds of `bound_tpr` at a grid of rates; each takes an equal part of the
    significance level. The bounds hold for any two distributions. A member tied with non-members
    counts as below them.
    """

    def bound_step(k: int) -> BoundedNumber:
        return bound_tpr(members, others, max_fpr * k / _PARTS)

    def low(level: float) -> float:
        # Each part has the height of its left end, the first 0; in `high`, that of its right end.
        share = level / (_PARTS - 1)
        return sum(bound_step(k).low(share) for k in range(1, _PARTS)) / _PARTS

    def high(level: float) -> float:
        return sum(bound_step(k).high(level / _PARTS) for k in range(1, _PARTS + 1)) / _PARTS

    fpr = 1 - np.searchsorted(np.sort(others), members, side="left") / len(others)
    value = float(np.clip(1 - fpr / max_fpr, 0, None).mean())
    return BoundedNumber(value, len(members), low, high)


def estimate_partial_auc(
    name: str,
    members: Floats,
    others: Floats,
    max_fpr: float,
    tried: int = 1,
    independent: Sides | None = None,
) -> Measurement | None:
    """Return the partial AUC with its interval.

    Return None if there are too few non-members for a threshold at `max_fpr`.
    tried: the number of scores tried before choosing this score. independent: as in
    `estimate_tpr`.
    """
    if len(others) < count_threshold_nonmembers(max_fpr):
        return None
    number = bound_partial_auc(members, others, max_fpr)
    if independent is not None:
        number = _contain_bounds(number, bound_partial_auc(*independent, max_fpr))
    return make_measurement(name, share_level(number, tried), note=f"{max_fpr / 2:.0%} by chance")


def count_bound_nonmembers(rate: float, level: float) -> int:
    """Return the fewest non-members with which a lower bound on the rate can be positive.

    For a two-sided 95% interval at a false-positive rate of 1%, the number is 390.
    """
    # (1 - rate)^n is the chance that none of n is above the true threshold.
    return math.ceil(math.log(level * _OF_THRESHOLD) / math.log1p(-rate))


# Cached, as every score with these non-members has the same rank.
@lru_cache(maxsize=4096)
def _find_surely_lower_rank(n: int, rate: float, share: float) -> tuple[int, float]:
    """Return the largest k with P[B < k] below `share`, and this probability.

    B is binomial: n draws of probability `rate`. The k-th highest of n non-member scores is below
    the true threshold if fewer than k scores exceed it, which happens with this probability.
    """
    k = int(find_binomial_quantile(share, n, rate))
    return k, float(compute_binomial_cdf(k - 1, n, rate))


@lru_cache(maxsize=4096)
def _find_surely_higher_rank(n: int, rate: float, share: float) -> tuple[int, float]:
    """Return the smallest k with P[B >= k] at most `share`, and this probability.

    B is binomial: n draws of probability `rate`. The k-th highest of n non-member scores is above
    the true threshold if k or more scores exceed it, which happens with this probability.
    """
    k = int(find_binomial_upper_quantile(share, n, rate)) + 1
    return k, float(compute_binomial_sf(k - 1, n, rate))


def _mark_members_above(members: Floats, others: Floats, k: int) -> Bools:
    """Return a mask of the members above the k-th highest of n others; all members for k > n."""
    if 0 < k <= len(others):
        return members > np.sort(others)[-k]
    return np.full(len(members), k > 0)


def bound_tpr_difference(new: Sides, base: Sides, rate: float) -> BoundedNumber:
    """Bound the difference of two true-positive rates (`bound_tpr`) on the same records.

    new, base: (members' scores, non-members' scores), paired by record. The non-members bound each
    of the two thresholds, at two fifths of the significance level each. Then the members above one
    bound are compared with those above the other, paired by record. If there are too few
    non-members for a lower bound, the interval contains 0.
    """

    def bound_lower_end(first: Sides, second: Sides, level: float) -> float:
        share = level * _OF_THRESHOLD / 2
        low_k, wrong = _find_surely_lower_rank(len(first[1]), rate, share)
        high_k, wrong_too = _find_surely_higher_rank(len(second[1]), rate, share)
        surely = _mark_members_above(*first, low_k)
        perhaps = _mark_members_above(*second, high_k)
        # A union bound, because the same non-members set both thresholds, which are therefore
        # dependent.
        return count_discordant_pairs(surely, perhaps).low(level - wrong - wrong_too)

    return BoundedNumber(
        tpr_at_fpr(*new, rate).value - tpr_at_fpr(*base, rate).value,
        len(new[0]),
        lambda level: bound_lower_end(new, base, level),
        lambda level: -bound_lower_end(base, new, level),
    )


def compute_roc_curve(members: Floats, others: Floats) -> list[tuple[float, float]]:
    """Return the ROC as points (false-positive rate, true-positive rate), up to (1, 1).

    Each point has the largest true-positive rate at its false-positive rate.
    """
    limits = np.unique(others)[::-1]  # a threshold between two of these only loses members
    false, tpr = (
        1 - np.searchsorted(np.sort(side), limits, side="right") / len(side)
        for side in (others, members)
    )
    return [*zip(false.tolist(), tpr.tolist(), strict=True), (1.0, 1.0)]
