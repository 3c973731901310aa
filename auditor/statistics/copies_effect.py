"""Measure the effect of copies in the training data on leakage.

The functions find the repeat counts with the most leakage, and predict leakage if records had fewer
copies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from auditor.core.arrays import Bools
from auditor.core.result import Measurement
from auditor.statistics.distributions import compute_hypergeometric_sf
from auditor.statistics.intervals import combine_independent_intervals, measure_share

PREDICTED = "recall_predicted"


def predict_recall(
    repeats: Sequence[int], hit: Bools, copies_left: Sequence[int], never: Bools | None = None
) -> Measurement:
    """Predict the recall if some copies of the secrets were removed from the training data.

    The prediction is sum_c w_c r_c over counts c. w_c is the share of secrets with c copies left,
    and r_c is the recall measured on secrets that have c copies now. The interval combines the
    exact intervals of all r_c (MOVER, Zou and Donner 2008).

    The prediction was tested on one training, in which all other secrets kept their copies
    (docs/evidence/results.md). Raise ValueError if recall was not measured at a count c.

    Args:
        repeats: (secrets,) each secret's number of copies in training.
        hit: (secrets,) whether each secret was extracted.
        copies_left: (secrets,) each secret's number of copies after the removal.
        never: (untrained secrets,) whether each was extracted; their share is r_0, the recall at 0
            copies.
    """
    times = np.asarray(repeats)
    after = np.asarray(copies_left)
    parts = []
    for count in np.unique(after):
        hits_at_count = hit[times == count]
        if not count and never is not None:
            hits_at_count = never
        if not len(hits_at_count):
            raise ValueError(f"expected a count that was measured, got {count}")
        # The rates of different counts come from different secrets, so the terms are independent.
        share = float((after == count).mean())
        parts.append((share, measure_share(PREDICTED, hits_at_count)))
    value, low, high = combine_independent_intervals(parts)
    return Measurement(PREDICTED, value, max(0.0, low), min(1.0, high), len(times))


@dataclass(frozen=True)
class ConcentratedLeakage:
    """Describe a part of the members that has more than its share of the extracted secrets.

    hits, of_hits: the numbers of extracted secrets in the part and in total; members, of_members:
    the numbers of members.
    p: Fisher's exact p-value, corrected for the number of parts.
    """

    part: str
    hits: int
    of_hits: int
    members: int
    of_members: int
    p: float


def find_most_concentrated_part(
    parts: Mapping[str, Bools], hit: Bools, level: float
) -> ConcentratedLeakage | None:
    """Return the overrepresented part with the most extracted members; None if there is none.

    parts: (members,) masks keyed by part name; hit: (members,) True if extracted. A part is
    overrepresented if its members are extracted significantly more often than other members. The
    test is Fisher's, at `level` with Bonferroni correction.
    """
    concentrated = []
    for name, inside in parts.items():
        counts = (int((inside & hit).sum()), int(hit.sum()), int(inside.sum()), len(hit))
        hits, of_hits, members, of_members = counts
        p_value = compute_hypergeometric_sf(hits - 1, of_members, of_hits, members)
        p = min(1.0, len(parts) * p_value)
        if p <= level:
            concentrated.append(ConcentratedLeakage(name, *counts, p))
    return max(concentrated, key=lambda part: (part.hits, -part.members), default=None)
