"""Unlearn records by gradient ascent or by negative preference optimization (Zhang et al. 2024)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import logsigmoid

from auditor.plugins.options import Positive
from auditor.training.finetune import Epochs
from auditor.training.unlearning import UnlearningTrainer


@dataclass(frozen=True)
class GradientAscent(UnlearningTrainer):
    """Unlearn records by gradient ascent on their loss (Zhang et al. 2024, Eq. 1).

    This training makes no privacy claim. The loss is unbounded, so ascent continues after a record
    is forgotten, until the model is useless. To prevent this, take few steps or use `retain`.
    """

    name = "gradient-ascent"
    title = "Gradient ascent"
    epochs: Epochs = 3

    def compute_forgetting_loss(self, log_probs: Tensor, before: Tensor) -> Tensor:
        return log_probs.mean()  # minimising it raises the loss of these records


@dataclass(frozen=True)
class NPO(UnlearningTrainer):
    """Unlearn records by negative preference optimization (Zhang et al. 2024).

    This training makes no privacy claim. The reference is the model before unlearning. A record's
    log-probability is summed over all its tokens.

    beta: the larger beta is, the sooner the loss stops pushing down a record that has become less
    likely. As beta goes to 0, this becomes gradient ascent.
    """

    name = "npo"
    title = "NPO"
    beta: Positive = 0.1

    def compute_forgetting_loss(self, log_probs: Tensor, before: Tensor) -> Tensor:
        # Eq. 3: -2/beta E log sigmoid(-beta log(p / p_before)).
        return -2 / self.beta * logsigmoid(-self.beta * (log_probs - before)).mean()
