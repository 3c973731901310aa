"""Which of several readings of the same texts a model finds most likely: what stands before them, how they are written.

One rule for all such choices: the usual reading stays unless another is more likely beyond chance.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from scipy.stats import t as student

from auditor.core.nouns import Pair
from auditor.models.base import LanguageModel
from auditor.plugins.view import WHITE_BOX, View
from auditor.statistics.intervals import CONFIDENCE

Reading = TypeVar("Reading")


def mean_suffix_nll_of_each_pair(model: LanguageModel, pairs: Sequence[Pair]) -> NDArray[np.float64]:
    """(pairs,) nats a token of the suffix."""
    view = View("likeliest", model, WHITE_BOX, seed=0)
    return np.array(view.mean_nll(model, [(pair.prefix, pair.suffix) for pair in pairs]))


def choose_likeliest_reading(usual: Reading, nll: Mapping[Reading, NDArray[np.float64]]) -> Reading:
    """nll: (texts,) nats a token of the same texts in each reading. The usual one stays unless another is more likely:
    paired by text, Student's interval, corrected for the number of others.
    """
    others = [reading for reading in nll if reading != usual]
    better = [reading for reading in others if lower_bound_of_mean_nll_gain(nll[usual] - nll[reading], len(others)) > 0]
    return min(better, key=lambda reading: float(nll[reading].mean()), default=usual)


def lower_bound_of_mean_nll_gain(gain: NDArray[np.float64], comparisons: int) -> float:
    """The lower end of the interval of the mean of paired differences; -inf for fewer than two."""
    n = len(gain)
    if n < 2:
        return -math.inf
    # Student's, two-sided, Bonferroni over the comparisons.
    reach = student.ppf(1 - (1 - CONFIDENCE) / 2 / comparisons, n - 1) * gain.std(ddof=1) / math.sqrt(n)
    return float(gain.mean() - reach)
