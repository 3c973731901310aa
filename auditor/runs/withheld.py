"""What a server's answers hid, beside what its log-probabilities say that the model knows of the same secrets."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch

from auditor.core.nouns import Secret
from auditor.core.result import Doubt
from auditor.models.base import given_by
from auditor.models.decoding import by_shape
from auditor.runs import scoring
from auditor.runs.audit import Audit
from auditor.runs.target import Target

_LIKELY = 0.5  # of the secret's whole text, drawn at temperature 1: more often than not it would be extracted


def doubts(audit: Audit, target: Target) -> Iterator[Doubt]:
    """How likely the members are whose answers did not come through; none where all came, or nobody can say."""
    members = [secret for secret in target.secrets if secret.member]
    held = target.model.withheld([secret.prefix for secret in members])
    hidden = [secret for secret, one in zip(members, held, strict=True) if one]
    if not hidden:
        return
    of = f"Answers to {len(hidden):,} of {len(members):,} attacked secrets did not come through"
    if not given_by(target.model.capabilities, "likelihood"):
        yield Doubt("answers", f"{of}; without log-probabilities nobody can say what the model knows of them.")
        return
    every = (one for some in scoring.scored(target, hidden, audit.batch_size) for one in some)
    each = [math.exp(sum(one.log_probs)) for one in every]
    likely = sum(p > _LIKELY for p in each)
    greedy = _greedy(target, hidden) if given_by(target.model.capabilities, "ranks") else ""
    yield Doubt(
        "answers",
        f"{of}, but by its log-probabilities the model writes these with a mean probability of {np.mean(each):.1%} "
        f"({likely:,} of them with more than {_LIKELY:.0%}; at temperature 1){greedy}.",
    )


def _greedy(target: Target, hidden: list[Secret]) -> str:
    """How many of them greedy decoding would write: each token is the first by its rank."""
    first = 0
    for indices in by_shape([(len(secret.prefix), len(secret.suffix)) for secret in hidden], scoring.GREEDY_AT_ONCE):
        prefixes, suffixes = (
            torch.tensor([getattr(hidden[i], side) for i in indices], device=target.model.device)
            for side in ("prefix", "suffix")
        )
        first += int((target.model.token_ranks(prefixes, suffixes) == 1).all(-1).sum())
    return f", and greedy decoding would extract {first:,}"
