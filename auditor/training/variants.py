"""Fine-tuning without privacy, and its variants: the same data by the same recipe, one thing changed.

Knows packed blocks, AdamW and who is told what; each variant says itself what it changes. None of them promises
anything: what a model so trained still tells of a record is for an audit to measure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from auditor.core.errors import AuditError
from auditor.core.nouns import Tokens
from auditor.core.secret_randomness import keyed_random_generator
from auditor.models.base import LanguageModel
from auditor.plugins.defense import Defense, Scenario
from auditor.plugins.trainer import Trainer, TrainingJob
from auditor.training import loss_masks
from auditor.training.finetune import (
    cast_frozen_linear_weights,
    check_epochs_and_learning_rate,
    fine_tune_on_packed_blocks,
    make_causal_loss_with_autocast,
)

NOTHING_PROMISED = "nothing is promised: what this model learnt of a record, it may tell"


@dataclass(frozen=True)
class FineTuning(Trainer):
    """Base of fine-tunings on packed blocks with AdamW. learning_rate decays linearly to 0.

    A subclass changes which sequences are learnt (`sequences_to_train_on`), which parameters are trained
    (`model_with_parameters_to_train`), or how they are fitted (`fit_model_to_sequences`); each may tell what it did:
    sentences.
    """

    epochs: int = 3
    batch: int = 16
    learning_rate: float = 1e-4

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise AuditError(f"expected batch >= 1, got {self.batch}")
        check_epochs_and_learning_rate(self.epochs, self.learning_rate)

    def sequences_to_train_on(self, job: TrainingJob) -> tuple[Sequence[Tokens], tuple[str, ...]]:
        """What is trained on, tokens without a loss as `training.loss_masks` writes them."""
        return [loss_masks.tokens_with_loss_mask(record) for record in job.records], ()

    def model_with_parameters_to_train(self, job: TrainingJob) -> tuple[Any, tuple[str, ...]]:
        """The model, those of its parameters that are trained asking for gradients."""
        return job.load(), ()

    def fit_model_to_sequences(self, job: TrainingJob, model: Any, sequences: Sequence[Tokens]) -> tuple[str, ...]:
        """Trains the model in place; goes on behind the checkpoint."""
        fine_tune_on_packed_blocks(
            model,
            sequences,
            epochs=self.epochs,
            rate=self.learning_rate,
            batch=self.batch,
            block=job.block,
            end=job.end,
            order=keyed_random_generator("train", job.seed),
            loss=make_causal_loss_with_autocast(job.half),
            progress=lambda done: job.progress("training", done, self.epochs),
            checkpoint=job.checkpoint,
        )
        return ()

    def train(self, job: TrainingJob) -> tuple[str, ...]:
        sequences, of_data = self.sequences_to_train_on(job)
        torch.manual_seed(job.seed)  # of an adapter's random half, and of dropout
        model, of_model = self.model_with_parameters_to_train(job)
        # Behind `to_train`, which decides what is frozen.
        cast_frozen_linear_weights(model, job.half)
        of_fit = self.fit_model_to_sequences(job, model, sequences)
        model.save_pretrained(job.out)
        job.tokenizer.save_pretrained(job.out)
        return (*of_data, *of_model, *of_fit, NOTHING_PROMISED)


@dataclass(frozen=True)
class Variant(Defense, FineTuning):
    """Base of the variants, each of which is a defense too: in the lab it is trained on demand, by the target's recipe.

    model: a folder that was trained so, for `audit run` outside the lab.
    """

    needs: ClassVar[tuple[str, ...]] = ("trained",)
    claims: ClassVar[str] = "none"
    model: str = ""

    def check(self, job: TrainingJob) -> None:
        if self.model:
            raise AuditError(f"-D model= names a model trained by {self.name}, for audit run: audit train makes one")

    def protect(self, scenario: Scenario) -> LanguageModel:
        assert scenario.trained is not None  # the run has seen to what is needed
        return scenario.trained.model


@dataclass(frozen=True)
class DataVariant(Variant):
    """Base of the variants that leave records out, and train as before on those that stay."""

    def choose_records_to_keep(self, texts: Sequence[str]) -> tuple[list[int], str]:
        """Which of the records stay, by their index, in order; and what was left out: a sentence."""
        raise NotImplementedError

    def copies_left_of_record(self, copies: int) -> int | None:
        """How many of a record's copies stay, where that follows from their number; None: it does not."""
        return None

    def sequences_to_train_on(self, job: TrainingJob) -> tuple[Sequence[Tokens], tuple[str, ...]]:
        kept, told = self.choose_records_to_keep([record.text for record in job.records])
        if not kept:
            raise AuditError(f"expected {self.name} to leave records to train on, got none of {len(job.records):,}")
        return [loss_masks.tokens_with_loss_mask(job.records[i]) for i in kept], (told,)
