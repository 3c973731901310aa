"""Choose the membership score that distinguishes members best, with a valid interval.

The best score's ordinary interval would be too narrow, because the score was chosen as the best of
several. So one factor, from a bootstrap of the maximum, widens all intervals of a family of scores.
Members and non-members are resampled separately. All scores and groups of copies use the same
resamples, so scores that agree count as a single score. Related records (of one person or one
document) are drawn together. The strongest score is the one whose corrected interval is farthest
from chance.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from auditor.core.arrays import Bools, Floats, Ints
from auditor.core.result import Measurement
from auditor.core.secret_randomness import make_keyed_generator
from auditor.statistics import bootstrap, roc
from auditor.statistics.adjusted_auc import OverlapWeights, estimate_adjusted_auc
from auditor.statistics.distributions import compute_normal_quantile
from auditor.statistics.intervals import Z
from auditor.statistics.membership import BELOW, FALSE_POSITIVES
from auditor.statistics.metrics import (
    ADJUSTED_AUC,
    name_auc,
    name_partial_auc_metric,
    name_tpr_metric,
)

_ALL = ""  # the group of all members


@dataclass(frozen=True)
class CandidateScore:
    """Hold a score of every record; members should score higher.

    values: (records,) the scores; title: the score's name in reports.
    widen: factor on the standard deviation of the AUC, if scores are less independent than assumed.
    overlap: weights for the adjusted AUC; None without a blind baseline.
    """

    values: Floats
    title: str
    widen: float = 1.0
    overlap: OverlapWeights | None = None


Candidates = Mapping[str, CandidateScore]  # by name


@dataclass(frozen=True)
class ScoredRecords:
    """Hold the groups of scored records as masks (records,).

    member: the members; copies: the members with each number of copies.
    unit: (records,) code of each record's person or document, which is resampled as a whole; if
    None, each record is resampled by itself.
    """

    member: Bools
    copies: Mapping[str, Bools]
    unit: Ints | None = None

    @property
    def groups(self) -> dict[str, Bools]:
        """Return masks of all members and of each group with one copy count, if large enough."""
        large = {}
        for name, members in self.copies.items():
            if members.sum() >= roc.LEAST:
                large[name] = members
        return {_ALL: self.member} | {
            name: members for name, members in large.items() if members.sum() < self.member.sum()
        }

    def draw_one_per_unit(self) -> Bools:
        """Return a mask (records,) of one random member, or non-member, of each unit."""
        assert self.unit is not None  # callers check it
        noise = make_keyed_generator("one record of each unit", len(self.unit))
        order = noise.permutation(len(self.unit))
        sides = np.column_stack([self.unit, self.member])[order]
        chosen = np.zeros(len(self.unit), dtype=bool)
        chosen[order[np.unique(sides, axis=0, return_index=True)[1]]] = True
        return chosen


def compute_simultaneous_widening(
    scores: Sequence[CandidateScore], records: ScoredRecords
) -> float:
    """Return the factor (at least 1) that widens all intervals so that they jointly hold at 95%.

    The factor is the 95% quantile of the maximum over scores and groups of |AUC* - AUC| /
    deviation, divided by the normal quantile of one interval. AUC* is a resample's AUC. It is
    approximated by a mean over the resampled records' DeLong placements (Hajek's projection). An
    AUC of 0 or 1 has deviation 0; its term is drawn as an independent normal number.
    """
    own_parts = []
    other_parts = []
    deviations = []
    others = ~records.member
    for score in scores:
        for members in records.groups.values():
            placements = roc.compute_delong_placements(score.values[members], score.values[others])
            deviations.append(score.widen * roc.compute_delong_deviation(*placements))
            own_parts.append(_compute_placement_parts(placements[0], members, records.unit))
            other_parts.append(_compute_placement_parts(placements[1], others, records.unit))
    # (entries, members' units) and (entries, non-members' units).
    moved = _compute_resampled_sums(own_parts, records.member, records.unit, bootstrap.MEMBERS)
    moved += _compute_resampled_sums(other_parts, others, records.unit, bootstrap.NONMEMBERS)
    deviation = np.array(deviations)
    sure = deviation <= 0
    noise = make_keyed_generator("bootstrap", "membership certain", int(sure.sum()))
    moved[:, sure] = noise.standard_normal((len(moved), int(sure.sum())))
    moved[:, ~sure] /= deviation[~sure]
    reach = float(np.quantile(np.abs(moved).max(1), bootstrap.CONFIDENCE))
    if records.unit is None:
        # With few records the resamples of an AUC near 1 have long tails: Bonferroni's bound is
        # then tighter.
        tail = (1 - bootstrap.CONFIDENCE) / 2 / len(deviations)
        reach = min(reach, -compute_normal_quantile(tail))
    return max(1.0, reach / Z)


def _compute_placement_parts(placed: Floats, side: Bools, unit: Ints | None) -> Floats:
    """Return how much AUC* - AUC changes each time that a record is drawn, of shape (records,).

    AUC* is the AUC of a resample.

    Args:
        placed: DeLong's placements of the members, or those of the non-members.
        side: (records,) True for the records that have these placements; all others get 0.
        unit: as in `ScoredRecords`.
    """
    units = len(placed)
    if unit is not None:
        units = len(np.unique(unit[side]))
    # The variance of a resample of n records is (n - 1) / n of that of n records.
    scale = 1.0
    if units > 1:
        scale = math.sqrt(units / (units - 1))
    parts = np.zeros(len(side))
    parts[side] = scale * (placed - placed.mean()) / len(placed)
    return parts


def _compute_resampled_sums(
    parts: Sequence[Floats], side: Bools, unit: Ints | None, stream: str
) -> Floats:
    """Return the sum of each array in `parts` over every resample of records.

    Args:
        parts: from `_compute_placement_parts`, (records,) each.
        side: (records,) True for the records to resample: the members or the non-members.
        unit: as in `ScoredRecords`.
        stream: a name that seeds the resamples.

    Returns:
        The sums, of shape (resamples, len(parts)).
    """
    columns = np.array(parts)[:, side]
    if unit is not None:
        units, of = np.unique(unit[side], return_inverse=True)
        unit_sums = np.zeros((len(columns), len(units)))
        np.add.at(unit_sums.T, of, columns.T)
        columns = unit_sums
    # The mean over n draws times n is their sum.
    sums: Floats = columns.shape[1] * bootstrap.compute_resampled_means(columns, stream)
    return sums


def select_strongest_auc(
    scores: Candidates, members: Bools, others: Bools, widening: float
) -> tuple[str, Measurement]:
    """Return the strongest score's name, and its AUC with an interval that allows for the choice.

    The strongest score is the one whose interval is farthest from chance, in either direction.
    members, others: masks (records,) of the groups to compare. widening: from
    `compute_simultaneous_widening`.
    """
    return _choose_strongest_auc(_estimate_corrected_aucs(scores, members, others, widening))


def _choose_strongest_auc(corrected: Mapping[str, Measurement]) -> tuple[str, Measurement]:
    strongest = max(
        corrected,
        key=lambda key: (
            max(corrected[key].low, 1 - corrected[key].high),
            abs(corrected[key].value - 0.5),
        ),
    )
    tried = ""
    if len(corrected) > 1:
        tried = f", best of {len(corrected)} scores"
    return strongest, replace(corrected[strongest], note=f"{corrected[strongest].note}{tried}")


def bound_strongest_auc(
    scores: Candidates, members: Bools, others: Bools, widening: float
) -> Measurement:
    """Return the strongest score's AUC, with an upper bound that holds for every score.

    The truly strongest score may differ from the strongest on these records, so the interval
    extends as far as the interval of any score.
    """
    corrected = _estimate_corrected_aucs(scores, members, others, widening)
    reach = max(max(m.high, 1 - m.low) for m in corrected.values())
    _, best = _choose_strongest_auc(corrected)
    if best.value >= 0.5:
        return replace(best, high=reach)
    return replace(best, low=1 - reach)


def _estimate_corrected_aucs(
    scores: Candidates, members: Bools, others: Bools, widening: float
) -> dict[str, Measurement]:
    aucs = {}
    for key, score in scores.items():
        sides = score.values[members], score.values[others]
        aucs[key] = roc.estimate_auc(name_auc(""), *sides, score.title, score.widen * widening)
    return aucs


@dataclass(frozen=True)
class StrongestScore:
    """The strongest score of a membership probe on one model.

    values: (records,) the score.
    measurements: its measurements.
    by_copies: its AUC by number of copies.
    corrected: the AUCs of all the probe's scores, with intervals that jointly hold.
    adjusted: the strongest adjusted AUC, and each record's contribution to it, (records,); None
        without a blind baseline.
    """

    values: Floats
    measurements: tuple[Measurement, ...]
    by_copies: dict[str, Measurement]
    corrected: tuple[Measurement, ...]
    adjusted: tuple[Measurement, Floats] | None


def choose_strongest_score(
    scores: Candidates, records: ScoredRecords, widening: float, tried: int
) -> StrongestScore:
    """Return the strongest of a probe's scores.

    All membership scores of a run share one correction for multiple testing. widening: its factor,
    from `compute_simultaneous_widening`. tried: the number of these scores.
    """
    member = records.member
    key, best = select_strongest_auc(scores, member, ~member, widening)
    values = scores[key].values
    independent = None
    if records.unit is not None:
        chosen = records.draw_one_per_unit()
        independent = values[chosen & member], values[chosen & ~member]
    by_copies = {}
    for name, group in records.copies.items():
        if group.sum() >= roc.LEAST:
            _, by_copies[name] = select_strongest_auc(scores, group, ~member, widening)
    corrected = []
    for name, m in _estimate_corrected_aucs(scores, member, ~member, widening).items():
        corrected.append(replace(m, name=name_auc(name), note=""))
    rates = measure_membership_rates("", values[member], values[~member], tried, independent)
    return StrongestScore(
        values,
        (best, *rates),
        by_copies,
        tuple(corrected),
        _select_strongest_adjusted_auc(scores, member, widening),
    )


def _select_strongest_adjusted_auc(
    scores: Candidates, member: Bools, widening: float
) -> tuple[Measurement, Floats] | None:
    """Return the adjusted AUC whose interval is farthest from chance, and its (records,) parts.

    Return None if no score has weights.
    """
    adjusted = []
    for score in scores.values():
        if score.overlap is not None:
            unadjusted = roc.auc(score.values[member], score.values[~member])
            note = f"{score.title}; {unadjusted:.3f} if not adjusted"
            widen = score.overlap.widen * widening
            weights = score.overlap.weights
            adjusted.append(
                estimate_adjusted_auc(ADJUSTED_AUC, score.values, member, weights, note, widen)
            )
    measured = [pair for pair in adjusted if pair[0].n]
    return max(
        measured or adjusted[:1], key=lambda pair: max(pair[0].low, 1 - pair[0].high), default=None
    )


def measure_membership_rates(
    name: str,
    members: Floats,
    others: Floats,
    tried: int = 1,
    independent: roc.Sides | None = None,
) -> list[Measurement]:
    """Return a score's TPRs and partial AUC, if there are enough non-members.

    tried: the number of scores tried before choosing this score. independent: as in
    `roc.estimate_tpr`.
    """
    rates = []
    for rate in FALSE_POSITIVES:
        metric = name_tpr_metric(name, rate)
        rates.append(roc.estimate_tpr(metric, members, others, rate, tried, independent))
    partial = name_partial_auc_metric(name)
    rates.append(roc.estimate_partial_auc(partial, members, others, BELOW, tried, independent))
    return [m for m in rates if m is not None]


def measure_membership_score(
    name: str, scores: Floats, member: Bools, widen: float = 1.0, note: str = ""
) -> list[Measurement]:
    """Return a score's AUC, and its TPRs and partial AUC if there are enough non-members.

    widen: a factor on the standard deviation; note: the note of the AUC.
    """
    sides = scores[member], scores[~member]
    auc = roc.estimate_auc(name_auc(name), *sides, note, widen)
    return [auc, *measure_membership_rates(name, *sides)]
