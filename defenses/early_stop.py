"""Early stopping: the model of the step at which held-out records are predicted best."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from auditor.core.errors import AuditError
from auditor.core.nouns import Tokens
from auditor.core.secret_randomness import keyed_random_generator
from auditor.plugins.options import require_options_at_least
from auditor.plugins.trainer import TrainingJob, TrainingRecord
from auditor.training import loss_masks
from auditor.training.finetune import (
    FineTuningRecipe,
    StepwiseFineTuning,
    check_weights_finite,
    list_trainable_parameters,
    make_autocast_loss,
    pack_blocks,
)
from auditor.training.members import name_inseparable_units
from auditor.training.variants import Variant


@dataclass(frozen=True)
class EarlyStop(Variant):
    """Fine-tune and keep the step of the lowest held-out loss; no claim.

    looks: how often an epoch the held-out loss is taken; patience: after so many looks without a lower one the training
    ends (0: it runs through all epochs, then takes the best step). heldout: the share of `--data` that is left out to
    look at where no `--heldout` file is named: those whose hash is lowest, whole users, and no copy of what is trained
    on.
    """

    name: ClassVar[str] = "early-stop"
    title: ClassVar[str] = "Early stopping"
    chooses: ClassVar[bool] = True
    looks: int = 4
    patience: int = 4
    heldout: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        require_options_at_least(self, 1, "looks")
        if self.patience < 0:
            raise AuditError(f"expected patience >= 0 (0: all epochs), got {self.patience}")
        if not 0 < self.heldout < 1:
            raise AuditError(f"expected heldout in (0, 1), got {self.heldout}")

    def check(self, job: TrainingJob) -> None:
        super().check(job)
        if not job.heldout and len(units := set(name_inseparable_units(job.records))) < 2:
            raise AuditError(
                f"expected records of two users or texts at least to leave one out, got {len(units)}: give --heldout"
            )

    def split_learnt_and_heldout(self, job: TrainingJob) -> tuple[list[TrainingRecord], list[TrainingRecord]]:
        """(learnt, held out)."""
        if job.heldout:
            return list(job.records), list(job.heldout)
        units = name_inseparable_units(job.records)
        # By hash, not by a draw: whether a unit is held out hardly depends on the others.
        by_hash = sorted(set(units), key=lambda unit: hashlib.sha256(unit.encode()).digest())
        # At least one unit is left to learn.
        out = set(by_hash[: min(math.ceil(self.heldout * len(by_hash)), len(by_hash) - 1)])
        pairs = list(zip(units, job.records, strict=True))
        return [r for unit, r in pairs if unit not in out], [r for unit, r in pairs if unit in out]

    def select_sequences(self, job: TrainingJob) -> tuple[Sequence[Tokens], tuple[str, ...]]:
        learnt, heldout = self.split_learnt_and_heldout(job)
        left_out = f"left out of the {len(job.records):,} of the data by the hash of their text or user"
        whose = "of a file of their own" if job.heldout else left_out
        told = f"held out to choose by, and not trained on: {len(heldout):,} records, {whose}"
        return [loss_masks.apply_loss_mask(record) for record in learnt], (told,)

    def fit_model(self, job: TrainingJob, model: Any, sequences: Sequence[Tokens]) -> tuple[str, ...]:
        parameters = list_trainable_parameters(model)
        course = FineTuningRecipe(self.epochs, self.learning_rate, self.batch, job.block, job.end)
        fitting = StepwiseFineTuning(parameters, sequences, course, keyed_random_generator("train", job.seed))
        loss = make_autocast_loss(job.half)
        heldout = [loss_masks.apply_loss_mask(record) for record in self.split_learnt_and_heldout(job)[1]]
        look = _HeldoutLoss(model, heldout, job, self.batch)
        steps = fitting.steps_per_epoch
        # A set: with more looks than steps several fall on one step.
        at = {-(-steps * (i + 1) // self.looks) for i in range(self.looks)}  # steps of an epoch behind which it looks
        losses = list[float]()  # at each look
        best: dict[str, Any] = {"loss": math.inf}
        if (state := job.checkpoint.load()) is not None:
            fitting.restore(state)
            losses, best = state["losses"], state["best"]
        device = next(iter(parameters.values())).device
        model.train()
        while not fitting.is_finished and not self._is_out_of_patience(losses):
            loss(model, fitting.get_next_batch().to(device)).backward()
            fitting.step()
            if (fitting.steps or steps) not in at:  # `step` sets steps back to 0 at the end of an epoch
                continue
            check_weights_finite(parameters.values(), job.checkpoint)
            losses.append(look.loss())
            if losses[-1] < best["loss"]:
                step = fitting.epochs * steps + fitting.steps
                best = {"loss": losses[-1], "step": step, "of": {n: p.detach().clone() for n, p in parameters.items()}}
            if not fitting.steps:
                job.checkpoint.save({**fitting.state(), "losses": losses, "best": best})
            job.progress(f"training, held-out loss {losses[-1]:.3f}", len(losses), self.epochs * len(at))
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(best["of"][name])
        return (
            f"stopped at step {best['step']:,} of {self.epochs * steps:,} (epoch {best['step'] / steps:.2f} of "
            f"{self.epochs}), where the held-out loss was lowest of {len(losses)} looks: {best['loss']:.4g} nats a "
            f"token, {losses[-1]:.4g} at the last look",
        )

    def _is_out_of_patience(self, losses: Sequence[float]) -> bool:
        return bool(self.patience and losses) and len(losses) - 1 - losses.index(min(losses)) >= self.patience


class _HeldoutLoss:
    """The mean held-out loss, nats a token, of the model as it stands."""

    def __init__(self, model: Any, sequences: Sequence[Tokens], job: TrainingJob, batch: int) -> None:
        self.model, self.of = model, make_autocast_loss(job.half)
        blocks = pack_blocks(sequences, job.block, job.end, keyed_random_generator("held out", job.seed))
        self.batches = blocks.split(batch)
        # A block's first token is predicted by nothing.
        labels = [loss_masks.make_row_labels(batch)[:, 1:] for batch in self.batches]
        self.weights = [int((predicted != loss_masks.IGNORED).sum()) for predicted in labels]
        if not sum(self.weights):
            raise AuditError("expected held-out records with tokens that have a loss, got none")

    @torch.no_grad()
    def loss(self) -> float:
        """Raises AuditError for one that is no number."""
        self.model.eval()
        found = [float(self.of(self.model, batch.to(self.model.device))) for batch in self.batches]
        self.model.train()
        # Batches differ in how many tokens have a loss: the mean is over tokens.
        mean = sum(x * n for x, n in zip(found, self.weights, strict=True)) / sum(self.weights)
        if not math.isfinite(mean):
            raise AuditError("expected a training that converges, got no finite held-out loss: lower learning_rate")
        return mean
