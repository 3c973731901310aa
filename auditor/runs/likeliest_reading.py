"""Which of several readings of the same texts a model finds most likely: what stands before them,
how they are written.

One rule for all such choices: the usual reading stays unless another is more likely beyond chance.
"""

from __future__ import annotations

import hashlib
import hmac
import importlib.metadata
import json
import math
from collections.abc import Mapping, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from scipy.stats import t as student

from auditor import __version__
from auditor.core import disk
from auditor.core.nouns import Pair
from auditor.models.base import LanguageModel
from auditor.plugins.view import WHITE_BOX, View
from auditor.records.aliases import load_alias_salt
from auditor.statistics.intervals import CONFIDENCE

Reading = TypeVar("Reading")


def mean_suffix_nll_of_each_pair(
    model: LanguageModel, pairs: Sequence[Pair]
) -> NDArray[np.float64]:
    """(pairs,) nats a token of the suffix; kept by a model that keeps what choices found."""
    texts = [(pair.prefix, pair.suffix) for pair in pairs]
    kept = (
        None
        if model.choices_kept_in is None
        else model.choices_kept_in / _name_of_kept_choice(model, texts)
    )
    if kept is not None and kept.is_file():
        return np.array(json.loads(kept.read_text()))
    values = View("likeliest", model, WHITE_BOX, seed=0).mean_nll(model, texts)
    if kept is not None:
        disk.replace_atomically(kept, json.dumps(values))
    return np.array(values)


def _name_of_kept_choice(model: LanguageModel, texts: Sequence[object]) -> str:
    """Return the file name that stands for weights, libraries, device and texts; salted, as the
    texts are private."""
    versions = [importlib.metadata.version(name) for name in ("torch", "transformers")]
    subject = json.dumps([model.digest(), str(model.device), versions, __version__, texts])
    return (
        f"choice-{hmac.new(load_alias_salt(), subject.encode(), hashlib.sha256).hexdigest()}.json"
    )


def choose_likeliest_reading(
    usual: Reading, nll: Mapping[Reading, NDArray[np.float64]], looks: int = 1
) -> Reading:
    """nll: (texts,) nats a token of the same texts in each reading. The usual one stays unless
    another is more likely: paired by text, Student's interval, corrected for the number of others
    and of looks at the numbers.
    """
    others = [reading for reading in nll if reading != usual]
    better = [
        reading
        for reading in others
        if lower_bound_of_mean_nll_gain(nll[usual] - nll[reading], looks * len(others)) > 0
    ]
    return min(better, key=lambda reading: float(nll[reading].mean()), default=usual)


def is_choice_clear(
    best: Reading,
    nll: Mapping[Reading, NDArray[np.float64]],
    margin: float,
    looks: int,
    hurried: bool = False,
) -> bool:
    """Return whether no other reading is more likely by `margin` nats a token or more: intervals as
    for the choice.

    hurried: each at one-sided 95%: it chooses no reading, and only says that more texts would show
    no such difference.
    """
    others = [reading for reading in nll if reading != best]
    comparisons = 0.5 if hurried else looks * len(others)
    return all(
        lower_bound_of_mean_nll_gain(nll[other] - nll[best] + margin, comparisons) > 0
        for other in others
    )


def lower_bound_of_mean_nll_gain(gain: NDArray[np.float64], comparisons: float) -> float:
    """The lower end of the interval of the mean of paired differences; -inf for fewer than two.

    comparisons: that the level is divided by; 0.5 for a one-sided interval of a single one.
    """
    n = len(gain)
    if n < 2:
        return -math.inf
    # Student's, two-sided, Bonferroni over the comparisons.
    reach = (
        student.ppf(1 - (1 - CONFIDENCE) / 2 / comparisons, n - 1) * gain.std(ddof=1) / math.sqrt(n)
    )
    return float(gain.mean() - reach)
