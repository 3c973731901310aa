"""Gradient ascent: the loss of the records to forget, upwards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from auditor.training.unlearning import UnlearningTrainer


@dataclass(frozen=True)
class GradientAscent(UnlearningTrainer):
    """Unlearn records by gradient ascent on their loss (Zhang et al. 2024, Eq. 1); no claim.

    Nothing bounds it: it goes on where a record is forgotten long since, until the model is of no use; few steps, or
    `retain`, keep it from that.
    """

    name: ClassVar[str] = "gradient-ascent"
    title: ClassVar[str] = "Gradient ascent"
    epochs: int = 3

    def forgetting(self, log_probs: Tensor, before: Tensor) -> Tensor:
        return log_probs.mean()
