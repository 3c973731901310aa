"""Estimate how private a record is from a public model's perplexity (Wu et al. 2022, Eq. 3 and 4).

A record counts as private if it is rare under the public model, so harmless rare text also counts
as private.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import scipy

from auditor.core.arrays import Floats
from auditor.core.errors import AuditError
from auditor.core.nouns import Tokens
from auditor.models.base import LanguageModel, compute_text_nlls
from auditor.plugins.options import ShareOrAll
from auditor.plugins.trainer import TrainingJob
from auditor.privacy.promises import RARITY_CLIPPING
from auditor.training import loss_masks
from auditor.training.poisson import PoissonTraining, UnitTreatment

Normalisation = Literal["min-max", "rank"]


def compute_log_perplexities(
    model: LanguageModel,
    examples: Sequence[Tokens],
) -> Floats:
    """Return log P(s) of each example under the public model (Eq. 3), (n,).

    This is the mean negative log-likelihood per token, in nats, without the first token.
    """
    sequences = []
    for example in examples:
        sequences.append(loss_masks.remove_loss_mask(example))
    # (n, 2): summed nll, and the number of tokens in the sum
    nll = np.array(list(compute_text_nlls(model, sequences)), dtype=float)
    return np.asarray(nll[:, 0] / nll[:, 1])


def scale_perplexities_within_data(log_perplexity: Floats, normalisation: Normalisation) -> Floats:
    """Scale perplexities P to rho in [0, 1] (Eq. 4), (n,), relative to all records.

    `log_perplexity` (n,) is log P. `normalisation` is `min-max` or `rank`. `min-max` is (P - min P)
    / (max P - min P); a single outlier can push the rho of all other records towards 0. `rank` is
    the share of the other records with a smaller perplexity; tied records share their mean rank. If
    all perplexities are equal, rho is 1.
    """
    if len(log_perplexity) == 0:
        raise AuditError("expected records to judge, got none")
    if np.ptp(log_perplexity) == 0:
        return np.ones(len(log_perplexity))
    if normalisation == "rank":
        return np.asarray((scipy.stats.rankdata(log_perplexity) - 1) / (len(log_perplexity) - 1))
    # P over its maximum: nothing overflows.
    relative = np.exp(log_perplexity - log_perplexity.max())
    return np.asarray((relative - relative.min()) / (1 - relative.min()))


def scale_perplexities_within_bounds(
    log_perplexity: Floats, lowest: float, highest: float
) -> Floats:
    """Scale log-perplexities to rho in [0, 1] between two public bounds, (n,).

    Each value depends only on its own record. `lowest` and `highest` are bounds on the perplexity.
    Raise AuditError unless 1 <= lowest < highest.
    """
    if not 1 <= lowest < highest < math.inf:
        raise AuditError(
            f"expected perplexities 1 <= lowest < highest, got {lowest:g} and {highest:g}",
        )
    low = math.log(lowest)
    high = math.log(highest)
    return np.asarray(((log_perplexity - low) / (high - low)).clip(0, 1))


def compute_clipping_shares(
    public: LanguageModel,
    examples: Sequence[Tokens],
    kappa_least: float,
    lowest: float,
    highest: float,
) -> list[float]:
    """Return each example's share of the clipping norm, from 1 (common) to kappa_least (rare text).

    `lowest` and `highest` are bounds on the perplexity. If `lowest` is 0, the bound is 1. If
    `highest` is 0, the bound is the vocabulary's size.
    """
    log_perplexity = compute_log_perplexities(public, examples)
    upper = highest or float(public.vocab_size)
    rho = scale_perplexities_within_bounds(log_perplexity, lowest or 1.0, upper)
    return (1 - (1 - kappa_least) * rho).tolist()


@dataclass(frozen=True)
class RarityClipping(PoissonTraining):
    """Base class of trainings that clip the gradients of rare records hardest."""

    kappa_least: ShareOrAll = 0.1
    lowest_perplexity: float = 0.0
    highest_perplexity: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        # highest=0 means the vocabulary size, which is not known here: any large number passes.
        scale_perplexities_within_bounds(
            np.zeros(0), self.lowest_perplexity or 1, self.highest_perplexity or 1e9
        )

    def choose_unit_treatment(self, job: TrainingJob, examples: Sequence[Tokens]) -> UnitTreatment:
        # All records are clipped alike, so no public model is needed.
        if self.kappa_least == 1:
            return UnitTreatment()
        # No share is above 1, so no unit adds more than C: the noise of dp-sgd is enough (formulas
        # B4, variant B).
        shares = compute_clipping_shares(
            job.public,
            examples,
            self.kappa_least,
            self.lowest_perplexity,
            self.highest_perplexity,
        )
        return UnitTreatment(shares=shares)

    def collect_recipe_details(self) -> dict[str, float]:
        options = {name: getattr(self, name) for name in RARITY_CLIPPING}
        return {**super().collect_recipe_details(), **options}
