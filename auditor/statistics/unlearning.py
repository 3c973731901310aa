"""Measure how much a model still reveals about records that it was supposed to forget.

Related models are compared by one value per secret, such as recall.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from auditor.core.arrays import Floats
from auditor.core.result import GroupRecall, Measurement
from auditor.statistics import bootstrap, compare, intervals
from auditor.statistics.bounds import make_measurement
from auditor.statistics.metrics import find_metric

BEFORE = "before"
AFTER = "after"
RELEARNED = "relearned"
RETRAINED = "retrained"
RETRAINED_RELEARNED = "retrained_relearned"
FORGOTTEN = "forgotten"
RETAINED = "retained"
NONMEMBERS = "nonmembers"
_FEWEST = 10  # fewest secrets for a resampled share
_CHANGES = {
    "unlearned": (AFTER, BEFORE),
    "left": (AFTER, RETRAINED),
    "relearned": (RELEARNED, AFTER),
}


def measure_unlearning_group(
    attack: str, name: str, group: str, columns: Mapping[str, Floats]
) -> GroupRecall:
    """Return the mean of a group of secrets in each model, and the changes between models.

    columns: keyed by model, (secrets,), finite, for the same secrets in the same order.
    """
    unit = find_metric(name).unit or "number"
    changes = {}
    for change, (new, old) in _CHANGES.items():
        if new in columns and old in columns:
            changes[change] = compare.measure_mean_difference(
                change, unit, columns[new], columns[old]
            )
    if {AFTER, RELEARNED, RETRAINED, RETRAINED_RELEARNED} <= set(columns):
        # gain of a model that never saw the secrets
        control_gain = columns[RETRAINED_RELEARNED] - columns[RETRAINED]
        back = columns[RELEARNED] - columns[AFTER]
        changes["came_back"] = make_measurement(
            "came_back", compare.resample_paired_means(back, control_gain), unit
        )
    if {BEFORE, AFTER, RELEARNED} <= set(columns):
        share = _estimate_relearned_share(columns[BEFORE], columns[AFTER], columns[RELEARNED])
        if share is not None:
            changes["share_back"] = share
    means = {}
    for model, values in columns.items():
        means[model] = intervals.estimate_mean(name, values, unit)
    return GroupRecall(attack, name, group, means, changes)


def _estimate_relearned_share(before: Floats, after: Floats, again: Floats) -> Measurement | None:
    """Return the share of unlearning's effect that relearning reversed.

    The share is negative if relearning removed even more. before, after, again: (secrets,) values
    before unlearning, after it, and after relearning. Return None if a bootstrap cannot estimate
    the error: if there are few secrets, if nothing was restored, or if nothing is forgotten in some
    resample.
    """
    forgotten = before - after
    back = again - after
    if len(forgotten) < _FEWEST or forgotten.sum() <= 0 or not back.any():
        return None
    # (resamples, 2): both sums use the same resample, so that their ratio is over the same secrets.
    sums = bootstrap.compute_resampled_statistic(
        len(forgotten), lambda draws: np.stack([draws @ back, draws @ forgotten], -1), "share back"
    )
    if (sums[:, 1] <= 0).any():
        return None
    ends = bootstrap.compute_percentile_interval(sums[:, 0] / sums[:, 1])
    return Measurement("share_back", float(back.sum() / forgotten.sum()), *ends, len(forgotten))
