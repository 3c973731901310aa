"""Implement CP-Δ (Vyas, Kakade and Barak 2023): sample texts that two models both find likely.

The models are trained on two halves of the data. For a work that is in only one half, the source
claims near access-freeness (Theorem 3.1), relative to the model q that never saw the work. With
`max`, every text is at most exp(k) times as likely as under q, with k = -log(1 - TV(q1, q2)) nats.
With `kl`, only the mean over the model's own texts is bounded: KL(p || q) <= k = 2 log 1/(1 -
H^2(q1, q2)). A single text may be more likely than under q by any factor. For example, with q1 =
(1/2, 1/2) and q2 = (1 - 1e-9, 1e-9), the factor is exp(10.36) although k is 0.693. TV and H compare
the two distributions at the given prompt.

This module makes no claim, because the bound is not differential privacy. k is as large as the
distance between the two models, which depends on the private data and cannot be bounded in advance.
k differs for each prompt and grows with each token. Records in both halves are not covered.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from auditor.core.errors import AuditError
from auditor.defenses.pmixed_model import EnsembleModel
from auditor.models.base import LanguageModel
from auditor.models.ensemble import Ensemble, ModelEnsemble
from auditor.plugins.defense import Defense, Scenario

_HALVES = (1, 2)  # parts of the ensemble; part 0, the public model, is not used here
Distance = Literal["max", "kl"]


@dataclass(frozen=True)
class CpDelta(Defense):
    """Sample texts that models of two data halves both find likely (CP-Δ, Vyas et al. 2023).

    This is Algorithm 3 of the source, whose claim concerns a work in only one of the halves. That
    is not privacy, so the defense makes no privacy claim (see defenses/cp_delta.py).

    distance: `max` mixes the two next-token distributions to min(q1, q2)/Z, `kl` to sqrt(q1 q2)/Z.
    `kl` bounds only on average how much more likely a text becomes.
    ensemble: the folder of the two models, which `audit train pmixed -D members=2` makes; a
    built-in lab trains its own.
    """

    name = "cp-delta"
    title = "CP-Δ"
    needs = ("public", "ensemble")
    claims = (
        "none: the paper's is about works in one half of the data, and its bound depends on the "
        "data"
    )
    distance: Distance = "max"
    ensemble: str = ""

    @property
    def required_member_count(self) -> int:
        return len(_HALVES)

    def protect(self, scenario: Scenario) -> LanguageModel:
        ensemble: Ensemble = scenario.ensemble
        if ensemble.size != len(_HALVES):
            raise AuditError(
                f"expected an ensemble of {len(_HALVES)} members for cp-delta, got "
                f"{ensemble.size}: audit train pmixed -D members={len(_HALVES)} makes one"
            )
        return CpDeltaModel(ensemble, self.distance, _HALVES)


@dataclass(frozen=True)
class PublicCommon(Defense):
    """Sample texts that both the model and the public model find likely. No claim.

    A text may be more likely than under the public model, by a factor that grows with each token.
    The factor depends on private data and cannot be bounded in advance, so this defense makes no
    privacy claim.

    distance: `max` mixes the two next-token distributions to min(q, p)/Z, `kl` to sqrt(q p)/Z.
    """

    name = "public-common"
    title = "Common with the public model"
    needs = ("public",)
    claims = "none: how much more likely a text is than under the public model depends on the data"
    distance: Distance = "max"

    def protect(self, scenario: Scenario) -> LanguageModel:
        assert scenario.public is not None  # the run checks `needs`
        ensemble = ModelEnsemble(scenario.public, [scenario.target])
        return CpDeltaModel(ensemble, self.distance, (0, 1))


class CpDeltaModel(EnsembleModel):
    """Sample, by CP-Δ, texts that two members of an ensemble both find likely."""

    def __init__(self, ensemble: Ensemble, distance: Distance, pair: tuple[int, int]) -> None:
        super().__init__(ensemble, f"CP-Δ's rule over {ensemble.public.name}")
        self.distance = distance
        self.pair = pair

    def released_token_distribution(self, distributions: Tensor) -> Tensor:
        return self.mix_pair(distributions[..., list(self.pair), :])

    def log_probs(self, contexts: Tensor, last: int, *, prompt: Tensor | None = None) -> Tensor:
        parts = torch.tensor(self.pair, device=self.device)
        # (B, last, 2, V)
        distributions = self.ensemble.distributions(contexts, parts, last, prompt=prompt)
        return self.mix_pair(distributions)

    def mix_pair(self, distributions: Tensor) -> Tensor:
        """Mix each pair of distributions, (..., 2, V) in nats, into one distribution, (..., V).

        A token is likely in the mixture if both distributions find it likely.
        """
        # In logs, a mean is sqrt(q1 q2), and the softmax divides by Z.
        if self.distance == "max":
            mixed = distributions.amin(-2)
        else:
            mixed = distributions.mean(-2)
        return mixed.log_softmax(-1)
