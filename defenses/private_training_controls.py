"""Provide controls for private training: without noise, and without noise and clipping."""

from __future__ import annotations

from dataclasses import dataclass

from auditor.core.errors import AuditError
from auditor.plugins.options import ShareOrAll
from auditor.training.finetune import ClippingNorm
from auditor.training.poisson import NonPrivateControl
from auditor.training.rarity import RarityClipping


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
class NoNoise(RarityClipping, NonPrivateControl):
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

    @property
    def control_clipping_norm(self) -> float:
        return self.clip
