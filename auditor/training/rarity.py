"""How likely a record is to be private, judged by a public model's perplexity (Wu et al. 2022, Eq. 3 and 4).

Knows log-likelihoods; knows nothing of training. What it calls private is what is rare to the public model, harmless
rare text included.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt
from scipy.stats import rankdata

from auditor.core.errors import AuditError
from auditor.core.nouns import Tokens
from auditor.models.base import LanguageModel, model_nll_and_token_counts
from auditor.training import loss_masks

Normalisation = Literal["min-max", "rank"]


def log_perplexities_by_public_model(model: LanguageModel, examples: Sequence[Tokens]) -> npt.NDArray[np.float64]:
    """(n,) log P(s) = mean nll in nats a token (Eq. 3) under the public model, the first token given."""
    # (n, 2): summed nll, tokens that it is of
    nll = np.array(
        list(model_nll_and_token_counts(model, list(map(loss_masks.tokens_without_loss_mask, examples)))), dtype=float
    )
    return np.asarray(nll[:, 0] / nll[:, 1])


def normalise_perplexities_among_records(
    log_perplexity: npt.NDArray[np.float64], how: Normalisation
) -> npt.NDArray[np.float64]:
    """(n,) rho in [0, 1] (Eq. 4), rising with perplexity. Either way each depends on all of the records.

    min-max: (P - min P) / (max P - min P), so that one odd record makes all others look public. rank: share of the
    records with a smaller perplexity, ties in the middle. Where all are alike, 1: nothing tells them apart.
    """
    if len(log_perplexity) == 0:
        raise AuditError("expected records to judge, got none")
    if np.ptp(log_perplexity) == 0:
        return np.ones(len(log_perplexity))
    if how == "rank":
        return np.asarray((rankdata(log_perplexity) - 1) / (len(log_perplexity) - 1))
    scaled = np.exp(log_perplexity - log_perplexity.max())  # P over its maximum: nothing overflows
    return np.asarray((scaled - scaled.min()) / (1 - scaled.min()))


def normalise_perplexities_by_fixed_bounds(
    log_perplexity: npt.NDArray[np.float64], lowest: float, highest: float
) -> npt.NDArray[np.float64]:
    """(n,) rho in [0, 1]: where log P lies between those of two public perplexities. Each depends on its record alone.

    Raises AuditError unless 1 <= lowest < highest.
    """
    if not 1 <= lowest < highest < math.inf:
        raise AuditError(f"expected perplexities 1 <= lowest < highest, got {lowest:g} and {highest:g}")
    low, high = math.log(lowest), math.log(highest)
    return np.asarray(((log_perplexity - low) / (high - low)).clip(0, 1))


def check_clipping_share_options(kappa_least: float, lowest: float, highest: float) -> None:
    """Raises AuditError for what no clipping norm can be scaled by (`clipping_share_of_each_example`)."""
    if not 0 < kappa_least <= 1:
        raise AuditError(f"expected kappa_least in (0, 1], got {kappa_least}")
    # highest 0 is the vocabulary's size, which no option says: any large number passes
    normalise_perplexities_by_fixed_bounds(np.zeros(0), lowest or 1, highest or 1e9)


def clipping_share_of_each_example(
    public: LanguageModel, examples: Sequence[Tokens], kappa_least: float, lowest: float, highest: float
) -> list[float]:
    """Each example's share of the clipping norm: from 1 down to kappa_least as the public model finds it rarer.

    lowest, highest: bounds of the perplexity; 0 stands for 1, and for the size of the vocabulary.
    """
    log_perplexity = log_perplexities_by_public_model(public, examples)
    rho = normalise_perplexities_by_fixed_bounds(log_perplexity, lowest or 1.0, highest or float(public.vocab_size))
    return (1 - (1 - kappa_least) * rho).tolist()
