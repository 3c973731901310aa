"""Trainings by which a model that has learnt records is to forget some of them, and what a few plain steps bring back.

Knows whole records and their log-probabilities; a subclass says which loss pushes them down. Nothing is promised: what
the model still tells of a record that it was to forget is for an audit to measure.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from auditor.core.errors import AuditError
from auditor.core.nouns import Tokens
from auditor.core.secret_randomness import keyed_random_generator
from auditor.models.huggingface import HuggingFaceModel
from auditor.plugins.trainer import TrainingJob
from auditor.training import loss_masks
from auditor.training.finetune import (
    FineTuningRecipe,
    StepwiseFineTuning,
    causal_loss,
    pack_into_blocks,
    require_finite_weights,
    trainable_parameters,
)
from auditor.training.variants import Variant

_BLOCK, _BATCH = 128, 4  # of relearning: tokens of a sequence, at most, and sequences a step
_AT_ONCE = 16  # records whose log-probabilities are read together, without gradients


@dataclass(frozen=True)
class UnlearningTrainer(Variant):
    """Base of trainings on records to forget. Every step takes `batch` of them, each distinct record once an epoch.

    retain: weight of the loss of as many records that are to be kept, drawn at random from the others; 0: none.
    """

    unlearns: ClassVar[bool] = True
    epochs: int = 10
    batch: int = 32
    learning_rate: float = 1e-5
    retain: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (math.isfinite(self.retain) and self.retain >= 0):
            raise AuditError(f"expected retain >= 0, got {self.retain:g}")

    def forgetting_loss(self, log_probs: Tensor, before: Tensor) -> Tensor:
        """The loss of a batch. (records,) each: nats of whole records, now and before the first step."""
        raise NotImplementedError

    def check(self, job: TrainingJob) -> None:
        super().check(job)
        if not job.forget:
            raise AuditError(f"expected --forget FILE with {self.name}, which forgets records, got none")
        if self.retain and not _sequences_not_forgotten(job):
            raise AuditError(
                f"expected records of --data that are not to be forgotten with retain={self.retain:g}, got none"
            )

    def sequences_to_train_on(self, job: TrainingJob) -> tuple[Sequence[Tokens], tuple[str, ...]]:
        """What is to be forgotten, each text once."""
        texts = {record.text: loss_masks.tokens_with_loss_mask(record) for record in job.forget}
        told = f"to forget: {len(texts):,} distinct records; to keep: "
        told += f"{len(_sequences_not_forgotten(job)):,} records, copies included"
        return list(texts.values()), (told,)

    def fit_model_to_sequences(self, job: TrainingJob, model: Any, sequences: Sequence[Tokens]) -> tuple[str, ...]:
        device = next(iter(trainable_parameters(model).values())).device
        rows = pad_and_cut_unlearning_records(sequences, job.block, job.end)
        # Before `restore` puts in the weights of a checkpoint: these are the numbers of the model as it came.
        before = log_probs_without_gradient(model, rows.to(device))
        course = FineTuningRecipe(self.epochs, self.learning_rate, self.batch, rows.shape[1], job.end)
        fitting = _UnlearningSteps(model, rows, course, job)
        kept = (
            pad_and_cut_unlearning_records(_sequences_not_forgotten(job), job.block, job.end)
            if self.retain
            else rows[:0]
        )
        if (state := job.checkpoint.load()) is not None:
            fitting.restore(state)
        model.train()
        while not fitting.is_done_with_all_epochs:
            at = fitting.next_step_batch()[:, 0]
            loss = self.forgetting_loss(
                log_probs_of_whole_records(model, rows[at].to(device), job.half), before[at.to(device)]
            )
            if self.retain:
                # by the place and not from a stream, so that a resumed training draws the same records
                rng = keyed_random_generator("retain", job.seed, fitting.epochs, fitting.steps)
                drawn = rng.integers(len(kept), size=len(at))
                retained = log_probs_of_whole_records(model, kept[torch.from_numpy(drawn)].to(device), job.half)
                loss = loss - self.retain * retained.mean()
            loss.backward()
            fitting.step()
            # 0 again: the step ended an epoch.
            if not fitting.steps:
                require_finite_weights(fitting.parameters.values(), job.checkpoint)
                job.checkpoint.save(fitting.state())
                job.progress("unlearning", fitting.epochs, self.epochs)
        tokens = int((loss_masks.labels_of_loss_masked_rows(rows)[:, 1:] != loss_masks.IGNORED).sum())
        now = float(log_probs_without_gradient(model, rows.to(device)).sum())
        return (
            f"the records to forget had {-float(before.sum()) / tokens:.3g} nats a token before, and have "
            f"{-now / tokens:.3g} after",
        )


class _UnlearningSteps(StepwiseFineTuning):
    """A fitting whose batches are places of rows, (at most batch, 1): each row once an epoch, in a new order."""

    def __init__(self, model: Any, rows: Tensor, course: FineTuningRecipe, job: TrainingJob) -> None:
        places = [(place,) for place in range(len(rows))]
        super().__init__(trainable_parameters(model), places, course, keyed_random_generator("unlearn", job.seed))

    def _training_blocks_in_new_order(self) -> Tensor:
        return torch.from_numpy(self._order.permutation(len(self._sequences)).astype(np.int64)).unsqueeze(-1)


def _sequences_not_forgotten(job: TrainingJob) -> list[Tokens]:
    """All records but those that are to be forgotten, as often as they occur."""
    forgotten = {record.text for record in job.forget}
    return [loss_masks.tokens_with_loss_mask(record) for record in job.records if record.text not in forgotten]


def pad_and_cut_unlearning_records(sequences: Sequence[Tokens], block: int, end: int) -> Tensor:
    """(records, width): each behind an end-of-text token and ended by one, as in training; cut at the block.

    What has no loss, the first token and what fills up, is written as `training.loss_masks` does.
    """
    whole = [(~end, *sequence, end)[:block] for sequence in sequences]
    width = max(map(len, whole))
    return torch.tensor([[*row, *([~end] * (width - len(row)))] for row in whole], device="cpu")


def log_probs_of_whole_records(model: Any, rows: Tensor, half: torch.dtype | None = None) -> Tensor:
    """(records,): nats of all tokens that have a loss, summed. What fills up stands behind them: nothing reads it.

    half: what matrices are multiplied in; None: as the weights are.
    """
    with torch.autocast(rows.device.type, dtype=half, enabled=half is not None):
        logits = model(input_ids=loss_masks.token_id_rows_without_loss_mask(rows)).logits[:, :-1].float()
    wanted = loss_masks.labels_of_loss_masked_rows(rows)[:, 1:]
    # transposed: it takes (records, vocabulary, positions)
    nll = torch.nn.functional.cross_entropy(
        logits.transpose(1, 2), wanted, ignore_index=loss_masks.IGNORED, reduction="none"
    )
    return -nll.sum(-1)


@torch.no_grad()
def log_probs_without_gradient(model: Any, rows: Tensor) -> Tensor:
    """`log_probs_of_whole_records` without gradients or dropout; leaves the model in training mode."""
    model.eval()
    found = torch.cat([log_probs_of_whole_records(model, some) for some in rows.split(_AT_ONCE)])
    model.train()
    return found


# --- what comes back ---


def fine_tune_copy_to_relearn(
    model: HuggingFaceModel,
    texts: Sequence[Tokens],
    *,
    steps: int,
    rate: float,
    seed: int,
    progress: Callable[[int], None] = lambda done: None,
) -> HuggingFaceModel:
    """A copy of the model, all its weights trained on the texts for so many steps of AdamW at a constant rate.

    To see what comes back of records that are not among the texts. Each step takes four packed blocks of 128 tokens;
    the texts come in new orders, over and over. Raises AuditError for weights that are no numbers any more, and for a
    tokenizer that names no end of text.
    """
    end = getattr(model.tokenizer, "eos_token_id", None)
    if end is None:
        raise AuditError(
            f"expected a tokenizer with an end-of-text token to relearn with, but that of {model.name} has none"
        )
    own, order = copy.deepcopy(model.model), keyed_random_generator("relearn", seed)
    for parameter in own.parameters():
        parameter.requires_grad_(parameter.is_floating_point())  # quantised weights are integers, without gradients
    parameters = trainable_parameters(own)
    optimizer = torch.optim.AdamW(parameters.values(), lr=rate, weight_decay=0.01)
    block, batches = min(_BLOCK, model.max_positions or _BLOCK), list[torch.Tensor]()
    own.train()
    for step in range(steps):
        batches = batches or list(pack_into_blocks(texts, block, end, order).split(_BATCH))
        causal_loss(own, batches.pop(0).to(model.device)).backward()
        torch.nn.utils.clip_grad_norm_(parameters.values(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        progress(step + 1)
    require_finite_weights(parameters.values(), None)
    return HuggingFaceModel(own, model.tokenizer, f"{model.name}, relearned")
