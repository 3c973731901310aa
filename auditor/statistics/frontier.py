"""Find the models that leak least for their usefulness.

Each model is a point with two costs: leakage and perplexity. The functions return the convex
frontier of the points, and the models that may leak least. All points use the same resamples of
secrets, so the variation of secrets cancels in a difference of leakages. Perplexities likewise use
common resamples of held-out texts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from auditor.core.arrays import Bools, Floats
from auditor.core.result import Measurement
from auditor.statistics import bootstrap
from auditor.statistics.bootstrap import Draws, Values
from auditor.statistics.bounds import (
    LEVEL,
    BoundedNumber,
    bound_binomial_share,
    bound_resampled_number,
    bound_unseen_value,
    count_discordant_pairs,
    make_measurement,
)
from auditor.statistics.roc import (
    Sides,
    bound_distance_change,
    compute_conformal_threshold,
    count_allowed_false_positives,
    tpr_at_fpr,
)

# the level for a pair of thirty points is 0.09%: about seven resamples are beyond it
RESAMPLES = 8000
_COUNTS = 2**20  # entries of a block of counts


Points = Sequence[Sequence[Sides]]  # scores, by model and seed


# --- leakage ---


@dataclass(frozen=True)
class ModelLeakage:
    """The leakage of one model.

    parts: (secrets,) values whose mean is the leakage.
    draws: (resamples,) the leakage in each bootstrap resample.
    n_others: number of non-members of an AUC, whose `parts` compare each member with them; None for
        a share or a mean of members.

    A true-positive rate depends on a threshold. Each resample has its own threshold; `parts` use
    the threshold of the full sample.
    """

    draws: Values
    parts: Floats
    n_others: int | None = None

    @property
    def value(self) -> float:
        mean = float(self.parts.mean())
        return max(mean, 1 - mean) if self.n_others else mean

    def leakage_measurement(self, name: str, unit: str) -> Measurement:
        """Return the leakage with its 95% interval; the lower end is at least 0."""
        sides = (self.draws, self.parts)
        if self.n_others and self.parts.mean() < 0.5:  # which distinguishes members as well
            sides = (1 - self.draws, 1 - self.parts)
        number = _build_floored_bootstrap(self.value, sides[0], self.n_others, sides[1])
        measurement = make_measurement(name, number, unit)
        return replace(measurement, low=max(0.0, measurement.low))


def compare_paired_leakage(first: ModelLeakage, second: ModelLeakage) -> BoundedNumber:
    """Return the first leakage minus the second, paired by secret."""
    difference = _build_floored_bootstrap(
        float(first.parts.mean() - second.parts.mean()),
        first.draws - second.draws,
        first.n_others,
        first.parts,
        second.parts,
    )
    if first.n_others is None:
        return difference
    mirror = _build_floored_bootstrap(
        float(first.parts.mean() + second.parts.mean()) - 1,
        first.draws + second.draws - 1,
        first.n_others,
        first.parts,
        second.parts,
    )
    return bound_distance_change(first.value - second.value, difference, mirror)


def _build_floored_bootstrap(
    value: float, draws: Values, n_others: int | None, *parts: Floats
) -> BoundedNumber:
    """Return a number with bootstrap bounds that are not too narrow for this many secrets.

    For shares, the bounds are at least as wide as the exact interval. For other numbers, they allow
    for a rare member or non-member that the sample missed, with a value of 1 or of the largest
    value seen.

    n_others: as in `ModelLeakage`.
    parts: (secrets,) values of one model, or of two models paired by secret.
    """
    n = len(parts[0])
    hits = [part == 1 for part in parts]
    if len(hits) > 1:
        floor = count_discordant_pairs(*hits)
    else:
        floor = bound_binomial_share(int(hits[0].sum()), n)
    if n_others or not np.isin(parts, (0, 1)).all():
        n_unseen = min(n, n_others or n)
        floor = bound_unseen_value(value, n_unseen, max(1.0, float(np.abs(parts).max())))
    return bound_resampled_number(value, n, draws, floor)


def estimate_mean_leakages(values: Floats) -> list[ModelLeakage]:
    """Return each model's leakage, the mean of its values; values: (models, secrets)."""
    draws = bootstrap.compute_resampled_means(values, "frontier", RESAMPLES)
    return [
        ModelLeakage(model_draws, row) for model_draws, row in zip(draws.T, values, strict=True)
    ]


def estimate_tpr_leakages(scores: Points, rate: float) -> list[ModelLeakage]:
    """Return each model's leakage: the share of members found at a false-positive rate.

    The share is averaged over seeds, with a bootstrap interval. scores: by model and seed,
    (members' scores, non-members' scores) of the same records in the same order. rate: the
    false-positive rate. Each seed and resample has its own threshold. The scores of a model
    are negated if that finds more members: a defense that makes members less likely than
    non-members also reveals them. All its seeds and resamples have one direction, because the mean
    of the larger rates would exceed `rate` even at chance.
    """

    def sum_rates(seeds: Sequence[Sides]) -> float:
        return sum(tpr_at_fpr(*sides, rate).value for sides in seeds)

    directed = []
    for point in scores:
        negated = [(-members, -others) for members, others in point]
        directed.append(max(point, negated, key=sum_rates))
    return _resample_leakages(
        directed,
        directed,
        partial(_resample_tpr, rate),
        lambda sides: sides[0] > compute_conformal_threshold(sides[1], rate),
    )


def estimate_auc_leakages(scores: Points) -> list[ModelLeakage]:
    """Return each model's leakage: the AUC of members against non-members, averaged over seeds.

    scores: as in `estimate_tpr_leakages`. The leakage is the larger of the AUC and 1 - AUC. Its
    draws and parts are those of the AUC, because a direction chosen by scores would give AUCs above
    1/2 even at chance.
    """
    # A resampled AUC is (counts of members) x (matrix of which member is ahead of which non-member)
    # x (counts of non-members), over the number of pairs.
    pair_matrices = [[_compare_all_pairs(*matrix) for matrix in point] for point in scores]
    leakages = _resample_leakages(
        scores,
        pair_matrices,
        lambda matrix, members, others: ((members @ matrix) * others).sum(1) / matrix.size,
        lambda matrix: matrix.mean(1),
    )
    return [replace(leakage, n_others=len(scores[0][0][1])) for leakage in leakages]


def _resample_leakages(
    scores: Points,
    points: Sequence[Sequence[Any]],
    resample: Callable[..., Values],
    measure: Callable[[Any], Floats | Bools],
) -> list[ModelLeakage]:
    """Return each model's leakage, averaged over seeds.

    Args:
        scores: as in `estimate_tpr_leakages`.
        points: what `resample` and `measure` need of the scores, by model and seed.
        resample: maps a point and the resample counts of members and of non-members to the leakage
            in every resample, (resamples,).
        measure: maps a point to values, (members,), whose mean is the leakage.
    """
    blocks = []
    for draws in _draw_paired_resample_blocks(scores):
        blocks.append([np.mean([resample(x, *draws) for x in point], axis=0) for point in points])
    leakages = []
    for values, point in zip(np.concatenate(blocks, axis=1), points, strict=True):
        leakages.append(ModelLeakage(values, np.mean([*map(measure, point)], axis=0)))
    return leakages


def _draw_paired_resample_blocks(scores: Points) -> Iterator[tuple[Draws, ...]]:
    """Yield blocks of resample counts, (rows, m) for members and (rows, n) for non-members."""
    sizes = [len(side) for side in scores[0][0]]
    streams = (bootstrap.MEMBERS, bootstrap.NONMEMBERS)
    at_once = max(1, _COUNTS // max(sizes))
    sides = (
        bootstrap.draw_resample_blocks(n, name, RESAMPLES, at_once)
        for n, name in zip(sizes, streams, strict=True)
    )
    return zip(*sides, strict=True)


def _compare_all_pairs(members: Floats, others: Floats) -> Floats:
    """Return a (members, non-members) matrix: 1 if the member scores higher, 1/2 if tied, or 0."""
    ahead: Floats = (members[:, None] > others) + 0.5 * (members[:, None] == others)
    return ahead


def _resample_tpr(rate: float, scores: Sides, members: Draws, nonmembers: Draws) -> Values:
    """Return `roc.tpr_at_fpr` of every resample, of shape (resamples,).

    members, nonmembers: (resamples, m) and (resamples, n), how often each resample draws each one.
    """
    member_scores, others = scores
    surest = np.argsort(-others)
    passed = np.cumsum(nonmembers[:, surest], axis=1) <= count_allowed_false_positives(
        len(others), rate
    )
    # A resample draws n non-members and fewer than n may pass, so at least one never passes.
    limits = others[surest][passed.sum(axis=1)]  # the surest non-member that may not pass
    rising = np.argsort(member_scores)
    # Count the drawn members that are not above the limit: cumulative counts, read at the limit.
    not_above = np.searchsorted(member_scores[rising], limits, side="right")
    cumulative_draws = np.cumsum(members[:, rising], axis=1)
    lost = np.where(
        not_above > 0, cumulative_draws[np.arange(len(cumulative_draws)), not_above - 1], 0
    )
    tpr: Values = 1 - lost / len(member_scores)
    return tpr


# --- usefulness ---


def estimate_perplexity_ratios(nll: Floats, tokens: Floats, base: Floats) -> list[Measurement]:
    """Return the ratio of each model's held-out perplexity to the base model's, paired by text.

    nll: (models, seeds, texts), in nats, summed over each text; base: (seeds, texts), likewise, by
    the base model. tokens: (seeds, texts), the numbers of predicted tokens. The ratio is the
    geometric mean over seeds; it is infinite if a text has probability 0.
    """

    def seed_mean(rates: Floats) -> tuple[Floats, Floats]:
        # The mean of logs: its exp is the geometric mean.
        return rates.mean(1), np.full(rates.shape, 1 / rates.shape[1])

    n = tokens.shape[1]
    measurements = []
    for point_nll in nll:
        log_ratio_sums = np.where(np.isfinite(point_nll), point_nll - base, np.inf)
        ends = bootstrap.estimate_rate_statistic(
            log_ratio_sums, tokens, seed_mean, "frontier texts", RESAMPLES
        )
        value, low, high = np.exp(ends).tolist()
        measurements.append(Measurement("perplexity_ratio", value, low, high, n, "times"))
    return measurements


# --- who leaks least ---


def select_possibly_least_leaking(
    count: int, difference: Callable[[int, int], BoundedNumber], level: float = LEVEL
) -> list[bool]:
    """Return, for each model, whether it may leak least.

    This is subset selection (Gupta 1965; Hsu 1984): a model is ruled out if it leaks significantly
    more than some other model. difference(i, j): the leakage of model i minus that of model j, with
    bounds.

    Each direction of each pair is tested at level / (2 (count - 1)) (Bonferroni). All pairs are
    tested, so the result does not depend on which model happens to look best. The model that truly
    leaks least is ruled out with probability at most level / 2. If several models tie for the
    least, all but one of these are ruled out with probability at most level (Markov).
    """
    if count < 2:
        return [True] * count
    side = level / (2 * (count - 1))

    def is_ruled_out(i: int) -> bool:
        others = (difference(i, j) for j in range(count) if j != i)
        return any(other.value > 0 and other.low(side) > 0 for other in others)

    return [not is_ruled_out(i) for i in range(count)]


# --- the frontier ---


def find_convex_frontier(points: Sequence[tuple[float, float]]) -> list[int]:
    """Return the indices of the lower-left corners of the points' convex hull, from left to right.

    No point lies below the lines between corners. From each corner to the next, one cost rises and
    the other falls. If points are equal, only the first is returned. Points must be finite.
    """
    corners: list[int] = []
    for i in sorted(range(len(points)), key=lambda i: (points[i], i)):
        if corners and points[i][1] >= points[corners[-1]][1]:
            continue  # it leaks at least as much as a cheaper point
        while (
            len(corners) > 1
            and _compute_left_turn_area(points[corners[-2]], points[corners[-1]], points[i]) <= 0
        ):
            corners.pop()
        corners.append(i)
    return corners


def _compute_left_turn_area(
    a: tuple[float, float], b: tuple[float, float], c: tuple[float, float]
) -> float:
    """Return a number that is positive if the path from a through b to c turns left."""
    return (b[0] - a[0]) * (c[1] - a[1]) - (b[1] - a[1]) * (c[0] - a[0])
