"""Greedy recall: the first number of a run, before any attack. Knows a model and the secrets."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from auditor.core.nouns import Secret
from auditor.core.result import Measurement
from auditor.core.streams import CHANNELS
from auditor.generation.sample import sample
from auditor.models.base import LanguageModel
from auditor.models.decoding import GREEDY, by_shape
from auditor.statistics import intervals


def greedy_recall(model: LanguageModel, secrets: Sequence[Secret]) -> dict[str, Measurement]:
    """Verbatim recall of greedy decoding by repeat count ("all" where none is known); members only."""
    members = [secret for secret in secrets if secret.member]
    hits = np.zeros(len(members), dtype=bool)
    for batch in by_shape([(len(s.prefix), len(s.suffix)) for s in members], 256):
        length = len(members[batch[0]].suffix)
        prefixes = torch.tensor([members[i].prefix for i in batch], device=model.device)
        found = sample(model, prefixes, length, GREEDY, np.zeros((len(batch), 1, length, CHANNELS)), law=False)
        for i, candidates in zip(batch, found, strict=True):
            hits[i] = tuple(candidates.suffixes[0].tolist()) == members[i].suffix
    groups = sorted({s.repeats for s in members}, key=lambda r: -1 if r is None else r)
    return {
        "all" if r is None else str(r): intervals.share("greedy", hits[[s.repeats == r for s in members]])
        for r in groups
    }
