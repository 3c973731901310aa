"""What copies do: where among repeat counts the leakage sits, and what would be left were there fewer copies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.stats import fisher_exact

from auditor.core.result import Measurement
from auditor.statistics.intervals import combined, share

PREDICTED = "recall_predicted"


def predicted(repeats: Sequence[int], hit: NDArray[np.bool_], most: int) -> Measurement:
    """Recall were none of these secrets trained on more than `most` times: the rest would leak as those of `most` do.

    sum_c w_c r_c over the counts c <= most, where w_most holds the weight of all above it. Interval: MOVER (Zou and
    Donner 2008) of the counts' exact ones. It is a prediction from one training: fewer copies are fewer steps, too.
    Raises ValueError where nobody was trained on so often.
    """
    times = np.asarray(repeats)
    if not (times == most).any():
        raise ValueError(f"expected a count that was measured, got {most}")
    value, low, high = combined(
        (float(((times >= count) if count == most else (times == count)).mean()), share(PREDICTED, hit[times == count]))
        for count in np.unique(times[times <= most])
    )
    return Measurement(PREDICTED, value, max(0.0, low), min(1.0, high), len(times))


@dataclass(frozen=True)
class Concentrated:
    """A part of the members that holds more of what came out than its size says. p: Fisher's exact, corrected."""

    part: str
    hits: int
    of_hits: int
    members: int
    of_members: int
    p: float


def concentrated(parts: Mapping[str, NDArray[np.bool_]], hit: NDArray[np.bool_], level: float) -> Concentrated | None:
    """Of the parts (name -> who belongs to it) that prefix token at this level, Bonferroni-corrected, the one with most
    hits.

    None where no part is told from the others.
    """
    found = []
    for name, inside in parts.items():
        table = [[int(np.sum(own & came)) for came in (hit, ~hit)] for own in (inside, ~inside)]
        p = min(1.0, len(parts) * float(fisher_exact(table, alternative="greater").pvalue))
        if p <= level:
            found.append(Concentrated(name, table[0][0], int(hit.sum()), int(inside.sum()), len(hit), p))
    return max(found, key=lambda one: (one.hits, -one.members), default=None)
