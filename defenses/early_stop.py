"""Stop training early: keep the model of the training step with the lowest held-out loss."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from auditor.core.errors import AuditError
from auditor.core.nouns import Tokens
from auditor.core.secret_randomness import make_keyed_generator
from auditor.plugins.options import Count, CountOrZero, Share
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
    """Fine-tune, and keep the step with the lowest held-out loss. No claim.

    This training makes no privacy claim.

    looks: how often the held-out loss is evaluated in each epoch.
    patience: end the training after this many evaluations without a lower loss (0: train for all
    epochs, then take the best step).
    heldout: the share of `--data` to hold out if no `--heldout` file is given. Whole users are
    chosen, by hash, and no copy of a held-out record remains in the training data.
    """

    name = "early-stop"
    title = "Early stopping"
    chooses = True
    looks: Count = 4
    patience: CountOrZero = 4
    heldout: Share = 0.1

    def check(self, job: TrainingJob) -> None:
        super().check(job)
        if job.heldout:
            return
        n_units = len(set(name_inseparable_units(job.records)))
        if n_units < 2:
            raise AuditError(
                f"expected records of two users or texts at least to leave one out, got {n_units}: "
                "give --heldout"
            )

    def split_heldout_records(
        self,
        job: TrainingJob,
    ) -> tuple[list[TrainingRecord], list[TrainingRecord]]:
        """Return the records to train on, and the held-out records."""
        if job.heldout:
            return list(job.records), list(job.heldout)
        units = name_inseparable_units(job.records)
        # By hash, not by a draw: whether a unit is held out hardly depends on the others.
        by_hash = sorted(set(units), key=lambda unit: hashlib.sha256(unit.encode()).digest())
        # At least one unit remains to train on.
        n_heldout = min(math.ceil(self.heldout * len(by_hash)), len(by_hash) - 1)
        heldout_units = set(by_hash[:n_heldout])
        training_records = list[TrainingRecord]()
        heldout_records = list[TrainingRecord]()
        for unit, record in zip(units, job.records, strict=True):
            if unit in heldout_units:
                heldout_records.append(record)
            else:
                training_records.append(record)
        return training_records, heldout_records

    def select_sequences(self, job: TrainingJob) -> tuple[Sequence[Tokens], tuple[str, ...]]:
        records, heldout = self.split_heldout_records(job)
        source = f"left out of the {len(job.records):,} of the data by a hash of text or user"
        if job.heldout:
            source = "from a separate file"
        note = f"held out to choose the step, not trained on: {len(heldout):,} records, {source}"
        return list(map(loss_masks.apply_loss_mask, records)), (note,)

    def fit_model(
        self,
        job: TrainingJob,
        model: Any,
        sequences: Sequence[Tokens],
    ) -> tuple[str, ...]:
        parameters = list_trainable_parameters(model)
        course = FineTuningRecipe(self.epochs, self.learning_rate, self.batch, job.block, job.end)
        order = make_keyed_generator("train", job.seed)
        fitting = StepwiseFineTuning(parameters, sequences, course, order)
        compute_loss = make_autocast_loss(job.half)
        heldout = list(map(loss_masks.apply_loss_mask, self.split_heldout_records(job)[1]))
        evaluate_heldout = _make_heldout_loss(model, heldout, job, self.batch)
        steps = fitting.steps_per_epoch
        # The held-out loss is evaluated after these steps of an epoch; if there are more looks than
        # steps, several looks fall on the same step.
        look_steps = {-(-steps * (i + 1) // self.looks) for i in range(self.looks)}
        losses = list[float]()  # at each look
        best: dict[str, Any] = {"loss": math.inf}
        if (state := job.checkpoint.load()) is not None:
            fitting.restore(state)
            losses = state["losses"]
            best = state["best"]
        device = next(iter(parameters.values())).device
        model.train()
        while not fitting.is_finished and not self._is_out_of_patience(losses):
            compute_loss(model, fitting.get_next_batch().to(device)).backward()
            fitting.step()
            # `step` resets the step count to 0 at the end of an epoch.
            if (fitting.steps or steps) not in look_steps:
                continue
            check_weights_finite(parameters.values(), job.checkpoint)
            losses.append(evaluate_heldout())
            if losses[-1] < best["loss"]:
                weights = {name: p.detach().clone() for name, p in parameters.items()}
                step = fitting.epochs * steps + fitting.steps
                best = {"loss": losses[-1], "step": step, "of": weights}
            if not fitting.steps:
                job.checkpoint.save({**fitting.state(), "losses": losses, "best": best})
            n_looks = self.epochs * len(look_steps)
            job.progress(f"training, held-out loss {losses[-1]:.3f}", len(losses), n_looks)
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(best["of"][name])
        return (
            f"stopped at step {best['step']:,} of {self.epochs * steps:,} (epoch "
            f"{best['step'] / steps:.2f} of {self.epochs}), which had the lowest held-out loss of "
            f"{len(losses)} looks: {best['loss']:.4g} nats a token, {losses[-1]:.4g} at the last "
            "look",
        )

    def _is_out_of_patience(self, losses: Sequence[float]) -> bool:
        if not self.patience or not losses:
            return False
        return len(losses) - 1 - losses.index(min(losses)) >= self.patience


def _make_heldout_loss(
    model: Any, sequences: Sequence[Tokens], job: TrainingJob, batch: int
) -> Callable[[], float]:
    """Return a function that evaluates the model's mean held-out loss, in nats per token."""
    compute_loss = make_autocast_loss(job.half)
    order = make_keyed_generator("held out", job.seed)
    batches = pack_blocks(sequences, job.block, job.end, order).split(batch)
    weights = list[int]()
    for blocks in batches:
        # The first token of a block is not predicted.
        labels = loss_masks.make_row_labels(blocks)[:, 1:]
        weights.append(int((labels != loss_masks.IGNORED).sum()))
    if not sum(weights):
        raise AuditError("expected held-out records with tokens that have a loss, got none")

    @torch.no_grad()
    def evaluate() -> float:
        model.eval()
        total = 0.0
        for blocks, weight in zip(batches, weights, strict=True):
            # Batches differ in their number of tokens with a loss: the mean is over tokens.
            total += float(compute_loss(model, blocks.to(model.device))) * weight
        model.train()
        mean = total / sum(weights)
        if not math.isfinite(mean):
            raise AuditError(
                "expected a training that converges, got no finite held-out loss: lower "
                "learning_rate",
            )
        return mean

    return evaluate
