"""Provide controls for private training: without noise, and without noise and clipping."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from auditor.core.errors import AuditError
from auditor.core.nouns import Tokens
from auditor.plugins.options import ShareOrAll
from auditor.plugins.trainer import TrainingJob
from auditor.training.finetune import ClippingNorm
from auditor.training.poisson import NonPrivateControl, UnitTreatment
from auditor.training.rarity import check_perplexity_bounds, compute_clipping_shares


@dataclass(frozen=True)
class NoClipping(NonPrivateControl):
    """Fine-tune with the settings of a private training, but without noise or clipping.

    This control makes no privacy claim. Options are those of `dp-sgd`.
    """

    name = "no-clipping"
    title = "No clipping, no noise"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.gradient_canaries:
            raise AuditError(
                "expected gradient_canaries=0 for no-clipping, which has no clipping norm to plant "
                f"canaries with, got {self.gradient_canaries}"
            )


@dataclass(frozen=True)
class NoNoise(NonPrivateControl):
    """Fine-tune with the settings of a private training, but without noise; clip the gradients.

    This control makes no privacy claim.

    clip: C, the largest norm of a unit's gradient.
    kappa_least, lowest_perplexity, highest_perplexity: as in `adp-sound`; if kappa_least is 1, all
    records have the same clip. Other options are those of `dp-sgd`, `adp` and `adp-sound`.
    """

    name = "no-noise"
    title = "Clipped, no noise"
    clip: ClippingNorm = 1.0
    kappa_least: ShareOrAll = 1.0
    lowest_perplexity: float = 0.0
    highest_perplexity: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_perplexity_bounds(self.lowest_perplexity, self.highest_perplexity)

    @property
    def control_clipping_norm(self) -> float:
        return self.clip

    def choose_unit_treatment(self, job: TrainingJob, examples: Sequence[Tokens]) -> UnitTreatment:
        # All records are clipped alike, so no public model is needed.
        if self.kappa_least == 1:
            return UnitTreatment()
        shares = compute_clipping_shares(
            job.public,
            examples,
            self.kappa_least,
            self.lowest_perplexity,
            self.highest_perplexity,
        )
        return UnitTreatment(shares=shares)

    def collect_recipe_details(self) -> dict[str, float]:
        return {**super().collect_recipe_details(), "kappa_least": self.kappa_least}
