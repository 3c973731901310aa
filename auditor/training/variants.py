"""Fine-tune without privacy, and in variants: the same data and recipe with one change.

Training uses packed blocks and AdamW, and each variant states its change. No variant promises
anything: an audit must measure what such a model reveals of a record.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from auditor.core.errors import AuditError
from auditor.core.nouns import Tokens
from auditor.core.secret_randomness import make_keyed_generator
from auditor.models.base import LanguageModel
from auditor.plugins.defense import Defense, Scenario
from auditor.plugins.options import Count
from auditor.plugins.trainer import Trainer, TrainingJob
from auditor.training import loss_masks
from auditor.training.finetune import (
    Epochs,
    LearningRate,
    cast_frozen_linear_weights,
    make_autocast_loss,
    refuse_trained_model,
    train_packed_blocks,
)

NOTHING_PROMISED = "nothing is promised: the model may reveal all that it learnt of a record"


@dataclass(frozen=True)
class FineTuning(Trainer):
    """Base class of fine-tunings on packed blocks with AdamW.

    `batch` is the number of blocks in a step. `learning_rate` is the peak rate, which decays
    linearly to 0. A subclass changes the sequences to train on (`select_sequences`), the trained
    parameters (`prepare_model`), or the training itself (`fit_model`). Each of these methods also
    returns sentences that tell the user about its changes.
    """

    surrounds = True
    epochs: Epochs = 3
    batch: Count = 16
    learning_rate: LearningRate = 1e-4

    def select_sequences(self, job: TrainingJob) -> tuple[Sequence[Tokens], tuple[str, ...]]:
        """Return the sequences to train on, with loss masks applied, and sentences for the user."""
        return list(map(loss_masks.apply_loss_mask, job.records)), ()

    def prepare_model(self, job: TrainingJob) -> tuple[Any, tuple[str, ...]]:
        """Return the model, ready for training, and sentences for the user.

        The parameters to train require gradients.
        """
        return job.load(), ()

    def fit_model(
        self,
        job: TrainingJob,
        model: Any,
        sequences: Sequence[Tokens],
    ) -> tuple[str, ...]:
        """Train the model in place, continuing from the checkpoint.

        Return sentences for the user.
        """
        train_packed_blocks(
            model,
            sequences,
            epochs=self.epochs,
            rate=self.learning_rate,
            batch=self.batch,
            block=job.block,
            end=job.end,
            order=make_keyed_generator("train", job.seed),
            loss=make_autocast_loss(job.half),
            progress=lambda n_epochs: job.progress("training", n_epochs, self.epochs),
            checkpoint=job.checkpoint,
        )
        return ()

    def train(self, job: TrainingJob) -> tuple[str, ...]:
        sequences, data_notes = self.select_sequences(job)
        torch.manual_seed(job.seed)  # determines an adapter's random half, and dropout
        model, model_notes = self.prepare_model(job)
        # After `prepare_model`, which decides which weights are frozen.
        cast_frozen_linear_weights(model, job.half)
        fit_notes = self.fit_model(job, model, sequences)
        model.save_pretrained(job.out)
        job.tokenizer.save_pretrained(job.out)
        return (*data_notes, *model_notes, *fit_notes, NOTHING_PROMISED)


@dataclass(frozen=True)
class Variant(Defense, FineTuning):
    """Base class of the variants of fine-tuning; each is a trainer and a defense.

    The lab trains a variant on demand, with the recipe of the attacked model. `model` is a folder
    with a model trained this way, for `audit run` outside the lab.
    """

    needs = ("trained",)
    claims = "none"
    model: str = ""

    def check(self, job: TrainingJob) -> None:
        refuse_trained_model(self.name, self.model)

    def protect(self, scenario: Scenario) -> LanguageModel:
        assert scenario.trained is not None  # the run checks `needs`
        return scenario.trained.model


@dataclass(frozen=True)
class DataVariant(Variant):
    """Base class of the variants that drop records and train on the remaining ones."""

    def choose_records(self, texts: Sequence[str]) -> tuple[list[int], str]:
        """Return the indices of the records to keep, in order.

        Also return a sentence about the dropped records.
        """
        raise NotImplementedError

    def count_remaining_copies(self, copies: int) -> int | None:
        """Return how many copies of a record remain after dropping records.

        `copies` is the number before. Return None if it does not determine the result.
        """
        return None

    def select_sequences(self, job: TrainingJob) -> tuple[Sequence[Tokens], tuple[str, ...]]:
        indices, note = self.choose_records([record.text for record in job.records])
        if not indices:
            raise AuditError(
                f"expected {self.name} to keep records to train on, got 0 of {len(job.records):,}",
            )
        return [loss_masks.apply_loss_mask(job.records[i]) for i in indices], (note,)
