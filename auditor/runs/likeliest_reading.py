"""Choose the prefix token or text format that a model finds most likely.

A choice keeps the default unless another option is significantly more likely.
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
from scipy.special import stdtrit

from auditor import __version__
from auditor.core import disk
from auditor.core.arrays import Floats
from auditor.core.nouns import Pair
from auditor.models.base import LanguageModel
from auditor.plugins.view import WHITE_BOX, View
from auditor.records.aliases import load_alias_salt
from auditor.statistics.intervals import CONFIDENCE

Reading = TypeVar("Reading")


def compute_pair_nlls(model: LanguageModel, pairs: Sequence[Pair]) -> Floats:
    """Return the mean negative log-likelihood per suffix token of each pair, in nats, (pairs,).

    A pair is a prefix with its suffix. The values are cached on disk if the model has a cache
    folder (`choices_kept_in`).
    """
    texts = [(pair.prefix, pair.suffix) for pair in pairs]
    if model.choices_kept_in is None:
        cache_file = None
    else:
        cache_file = model.choices_kept_in / _name_choice(model, texts)
    if cache_file is not None and cache_file.is_file():
        return np.array(json.loads(cache_file.read_text()))
    values = View("likeliest", model, WHITE_BOX, seed=0).mean_nll(model, texts)
    if cache_file is not None:
        disk.replace_atomically(cache_file, json.dumps(values))
    return np.array(values)


def _name_choice(model: LanguageModel, texts: Sequence[object]) -> str:
    """Return the name of the file that caches values of these texts.

    It is a salted hash of weights, libraries, device and texts.
    """
    versions = []
    for name in ("torch", "transformers"):
        versions.append(importlib.metadata.version(name))
    subject = json.dumps([model.digest(), str(model.device), versions, __version__, texts])
    return (
        f"choice-{hmac.new(load_alias_salt(), subject.encode(), hashlib.sha256).hexdigest()}.json"
    )


def choose_likeliest_reading(
    usual: Reading, nll: Mapping[Reading, Floats], looks: int = 1
) -> Reading:
    """Return the usual reading unless another reading is significantly more likely.

    A reading is one way to present the same texts to the model: a prefix token, or a text format.
    The test is Student's paired interval, with a Bonferroni correction for the number of other
    readings and of looks.

    Args:
        usual: the default reading.
        nll: for each reading, the nats per token of the same texts, of shape (texts,).
        looks: number of times that this test is made while data arrive.
    """
    other_readings = [reading for reading in nll if reading != usual]
    likelier = [
        reading
        for reading in other_readings
        if bound_mean_gain(nll[usual] - nll[reading], looks * len(other_readings)) > 0
    ]
    return min(likelier, key=lambda reading: float(nll[reading].mean()), default=usual)


def is_choice_clear(
    best: Reading,
    nll: Mapping[Reading, Floats],
    margin: float,
    looks: int,
    hurried: bool = False,
) -> bool:
    """Test if no other reading can be better than `best` by `margin` nats per token.

    For each other reading, the upper end of the paired interval of its gain must be below `margin`.

    Args:
        best: the chosen reading: a prefix token or a text format.
        nll: for each reading, the nats per token of the same texts, of shape (texts,).
        margin: smallest gain that matters.
        looks: number of times that this test is made while data arrive.
        hurried: use one-sided 95% intervals without correction, which suffice to stop scoring
            texts.
    """
    other_readings = [reading for reading in nll if reading != best]
    if hurried:
        comparisons = 0.5
    else:
        comparisons = looks * len(other_readings)
    return all(
        bound_mean_gain(nll[alternative] - nll[best] + margin, comparisons) > 0
        for alternative in other_readings
    )


def bound_mean_gain(gain: Floats, comparisons: float) -> float:
    """Return the lower end of Student's two-sided 95% interval for the mean of `gain`.

    Return -inf for fewer than 2 pairs.

    Args:
        gain: paired differences, of shape (pairs,).
        comparisons: number of intervals that share the error probability (Bonferroni). With 0.5,
            the lower end is that of a one-sided interval.
    """
    n = len(gain)
    if n < 2:
        return -math.inf
    # Student's, two-sided, Bonferroni over the comparisons.
    quantile = stdtrit(n - 1, 1 - (1 - CONFIDENCE) / 2 / comparisons)
    return float(gain.mean() - quantile * gain.std(ddof=1) / math.sqrt(n))
