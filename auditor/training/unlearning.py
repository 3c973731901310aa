"""Train a model to forget records that it has learnt, and retrain it to see which records return.

Subclasses define a loss that lowers the log-probabilities of whole records. Unlearning promises
nothing: an audit must measure what the model still reveals of a record that it should have
forgotten.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from auditor.core.errors import AuditError
from auditor.core.nouns import Tokens
from auditor.core.secret_randomness import make_keyed_generator
from auditor.models.huggingface import HuggingFaceModel
from auditor.plugins.options import Count, Nonnegative
from auditor.plugins.trainer import TrainingJob
from auditor.training import loss_masks
from auditor.training.finetune import (
    Epochs,
    FineTuningRecipe,
    LearningRate,
    StepwiseFineTuning,
    check_weights_finite,
    compute_causal_loss,
    list_trainable_parameters,
    pack_blocks,
)
from auditor.training.variants import Variant

_BLOCK = 128  # of relearning: at most this many tokens a sequence
_BATCH = 4  # of relearning: sequences a step
_AT_ONCE = 16  # records evaluated together, without gradients


@dataclass(frozen=True)
class UnlearningTrainer(Variant):
    """Base class of trainings that make a model forget records.

    Each step takes `batch` records to forget and the same number of random records to keep. Every
    distinct record to forget occurs once per epoch. `retain` is the weight of the loss of the
    records to keep; if it is 0, none are drawn.
    """

    unlearns = True
    surrounds = False  # the model before unlearning may have learnt its records after other tokens
    epochs: Epochs = 10
    batch: Count = 32
    learning_rate: LearningRate = 1e-5
    retain: Nonnegative = 0.0

    def compute_forgetting_loss(self, log_probs: Tensor, before: Tensor) -> Tensor:
        """Return the loss of a batch of records to forget.

        `log_probs` and `before` are log-probabilities of whole records in nats, now and before the
        first step, (records,) each.
        """
        raise NotImplementedError

    def check(self, job: TrainingJob) -> None:
        super().check(job)
        if not job.forget:
            raise AuditError(
                f"expected --forget FILE with {self.name}, which forgets records, got none",
            )
        masked = map(loss_masks.apply_loss_mask, job.forget)
        if not loss_masks.has_learnt_tokens(masked, slice(job.block - 1)):
            raise AuditError(
                "expected --block to reach the answers of the records to forget, got "
                f"{job.block} tokens, of which none has a loss"
            )
        if self.retain and not _list_retained_sequences(job):
            raise AuditError(
                f"expected records of --data to retain with retain={self.retain:g}, got none",
            )

    def select_sequences(self, job: TrainingJob) -> tuple[Sequence[Tokens], tuple[str, ...]]:
        """Return the records to forget, without repeated texts, and notes about them."""
        sequences = {}
        for record in job.forget:
            sequences[record.text] = loss_masks.apply_loss_mask(record)
        n_retained = len(_list_retained_sequences(job))
        notes = [f"to forget: {len(sequences):,} distinct records; to keep: {n_retained:,} records"]
        # `pad_unlearning_records` puts an end-of-text token in front.
        n_cut = sum(1 + len(sequence) > job.block for sequence in sequences.values())
        if n_cut:
            notes.append(
                f"{n_cut:,} records to forget are longer than --block: the model is not trained to "
                "forget the rest of them"
            )
        return list(sequences.values()), tuple(notes)

    def fit_model(
        self,
        job: TrainingJob,
        model: Any,
        sequences: Sequence[Tokens],
    ) -> tuple[str, ...]:
        parameters = list_trainable_parameters(model)
        device = next(iter(parameters.values())).device
        rows = pad_unlearning_records(sequences, job.block, job.end)
        # Before `restore` loads the weights of a checkpoint: the model as it came.
        before = evaluate_record_log_probs(model, rows.to(device))
        course = FineTuningRecipe(
            self.epochs, self.learning_rate, self.batch, rows.shape[1], job.end
        )
        indices_of_records = list(zip(range(len(rows))))
        order = make_keyed_generator("unlearn", job.seed)
        fitting = _UnlearningSteps(parameters, indices_of_records, course, order)
        retained_rows = rows[:0]
        if self.retain:
            retained_rows = pad_unlearning_records(
                _list_retained_sequences(job),
                job.block,
                job.end,
            )

        def compute_loss(batch: Tensor) -> Tensor:
            indices = batch[:, 0]
            log_probs = compute_record_log_probs(model, rows[indices].to(device), job.half)
            loss = self.compute_forgetting_loss(log_probs, before[indices.to(device)])
            if self.retain:
                # Keyed by the step, not drawn from a stream, so that a resumed training draws the
                # same records.
                rng = make_keyed_generator("retain", job.seed, fitting.epochs, fitting.steps)
                sample = torch.from_numpy(rng.integers(len(retained_rows), size=len(indices)))
                retained_batch = retained_rows[sample].to(device)
                retained = compute_record_log_probs(model, retained_batch, job.half)
                loss = loss - self.retain * retained.mean()
            return loss

        fitting.run(
            model,
            compute_loss,
            job.checkpoint,
            lambda n_epochs: job.progress("unlearning", n_epochs, self.epochs),
        )
        after = evaluate_record_log_probs(model, rows.to(device))
        return (_describe_forgetting(rows, before, after),)


class _UnlearningSteps(StepwiseFineTuning):
    """A fine-tuning whose batches are records to forget, as indices of shape (at most batch, 1).

    Each index is drawn once per epoch, in a new order.
    """

    def _shuffle_blocks(self) -> Tensor:
        order = self._order.permutation(len(self._sequences)).astype(np.int64)
        return torch.from_numpy(order).unsqueeze(-1)


def _describe_forgetting(rows: Tensor, before: Tensor, after: Tensor) -> str:
    """Describe the records' loss, given their log-probabilities (records,) before and after."""
    labels = loss_masks.make_row_labels(rows)[:, 1:]
    n_tokens = int((labels != loss_masks.IGNORED).sum())
    nats_before = -float(before.sum()) / n_tokens
    nats_after = -float(after.sum()) / n_tokens
    change = f"{nats_before:.3g} nats a token before and {nats_after:.3g} after"
    return f"the records to forget have {change}"


def _list_retained_sequences(job: TrainingJob) -> list[Tokens]:
    """Return all records except those to forget and their copies."""
    forgotten = {record.text for record in job.forget}
    retained = []
    for record in job.records:
        if record.text not in forgotten:
            retained.append(loss_masks.apply_loss_mask(record))
    return retained


def pad_unlearning_records(sequences: Sequence[Tokens], block: int, end: int) -> Tensor:
    """Return the records as rows of tokens, (records, width), cut to `block` tokens and padded.

    As in training, an end-of-text token precedes and follows each record. The first token and the
    padding are masked, in the notation of `training.loss_masks`.
    """
    framed = [(~end, *sequence, end)[:block] for sequence in sequences]
    width = max(map(len, framed))
    rows = [(*row, *([~end] * (width - len(row)))) for row in framed]
    return torch.tensor(rows, device="cpu")


def compute_record_log_probs(model: Any, rows: Tensor, half: torch.dtype | None = None) -> Tensor:
    """Return each record's summed log-probability of the tokens in its loss, (records,) nats.

    Padding comes last, so no token depends on it. `half` is the precision of matrix products; None
    means that of the weights.
    """
    with torch.autocast(rows.device.type, dtype=half, enabled=half is not None):
        output = model(input_ids=loss_masks.remove_row_loss_masks(rows))
    logits = output.logits[:, :-1].float()
    labels = loss_masks.make_row_labels(rows)[:, 1:]
    # Transposed: cross_entropy takes (records, vocabulary, positions).
    nll = torch.nn.functional.cross_entropy(
        logits.transpose(1, 2),
        labels,
        ignore_index=loss_masks.IGNORED,
        reduction="none",
    )
    return -nll.sum(-1)


@torch.no_grad()
def evaluate_record_log_probs(model: Any, rows: Tensor) -> Tensor:
    """Return `compute_record_log_probs` without gradients or dropout.

    The model is in training mode afterwards.
    """
    model.eval()
    parts = []
    for part in rows.split(_AT_ONCE):
        parts.append(compute_record_log_probs(model, part))
    model.train()
    return torch.cat(parts)


# --- relearning ---


def train_relearned_copy(
    model: HuggingFaceModel,
    texts: Sequence[Tokens],
    *,
    steps: int,
    rate: float,
    seed: int,
    progress: Callable[[int], None],
) -> HuggingFaceModel:
    """Train a copy of the model on the texts, to see which other records it remembers again.

    All weights are trained with `steps` steps of AdamW at the constant rate `rate`. Each step takes
    four packed blocks of 128 tokens. The texts are repeated, each time in a new order.

    Raises:
        AuditError: if a weight is not finite, or if the tokenizer has no end-of-text token.
    """
    end = getattr(model.tokenizer, "eos_token_id", None)
    if end is None:
        raise AuditError(
            f"expected a tokenizer with an end-of-text token, but {model.name} has none",
        )
    relearned = copy.deepcopy(model.model)
    order = make_keyed_generator("relearn", seed)
    for parameter in relearned.parameters():
        # Quantised weights are integers, without gradients.
        parameter.requires_grad_(parameter.is_floating_point())
    parameters = list_trainable_parameters(relearned)
    optimizer = torch.optim.AdamW(parameters.values(), lr=rate, weight_decay=0.01)
    block = min(_BLOCK, model.max_positions or _BLOCK)
    batches = list[torch.Tensor]()
    relearned.train()
    for step in range(steps):
        if not batches:
            batches = list(pack_blocks(texts, block, end, order).split(_BATCH))
        compute_causal_loss(relearned, batches.pop(0).to(model.device)).backward()
        torch.nn.utils.clip_grad_norm_(parameters.values(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        progress(step + 1)
    check_weights_finite(parameters.values(), None)
    return HuggingFaceModel(relearned, model.tokenizer, f"{model.name}, relearned")
