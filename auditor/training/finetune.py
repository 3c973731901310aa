"""Fine-tuning of causal LMs without privacy: packed blocks, AdamW, short warm-up, linear decay; and checkpoints.

Knows token sequences and one loss; knows nothing of privacy: the point of the models made here is that they leak.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from auditor.core.errors import AuditError
from auditor.core.nouns import Tokens
from auditor.plugins.trainer import TrainerCheckpoint
from auditor.training import loss_masks

LARGEST = 1e6  # learning rate, clip, noise multiplier: far beyond what trains anything

_MOST_EPOCHS = 100_000

Loss = Callable[[Any, Tensor], Tensor]  # (model, blocks (B, block)) -> mean nll, nats a token


def make_untrained_gpt_neox(
    *, vocab_size: int, layers: int, hidden: int, heads: int, positions: int, end: int, seed: int
) -> GPTNeoXForCausalLM:
    """A small GPT-NeoX with tied embeddings; rotary positions, so that none is untrained behind a soft prompt."""
    torch.manual_seed(seed)  # torch's own generator, of the whole process: what is drawn next follows from it too
    return GPTNeoXForCausalLM(
        GPTNeoXConfig(
            vocab_size=vocab_size,
            hidden_size=hidden,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            intermediate_size=4 * hidden,
            max_position_embeddings=positions,
            tie_word_embeddings=True,
            bos_token_id=end,
            eos_token_id=end,
        )
    )


def causal_loss(model: Any, blocks: Tensor) -> Tensor:
    """Mean nll over the tokens that have a loss: full softmax. Blocks in which none has: 0."""
    labels = loss_masks.labels_of_loss_masked_rows(blocks)
    if not bool((labels == loss_masks.IGNORED).any()):  # the model's own loss
        loss: Tensor = model(input_ids=blocks, labels=blocks).loss
        return loss
    nll = loss_masks.nlls_of_tokens_with_loss(
        model, labels, input_ids=loss_masks.token_id_rows_without_loss_mask(blocks), use_cache=False
    )
    return nll.mean() if len(nll) else nll.sum()


def make_causal_loss_with_autocast(half: torch.dtype | None) -> Loss:
    """`causal_loss` with matrix products in this precision (None: that of the weights), which stay as they are."""
    if half is None:
        return causal_loss

    def loss(model: Any, blocks: Tensor) -> Tensor:
        with torch.autocast(blocks.device.type, dtype=half):
            return causal_loss(model, blocks)

    return loss


def cast_frozen_linear_weights(model: Any, half: torch.dtype | None) -> None:
    """Casts frozen weights of linear layers once, as autocast would at every forward: the same products, sooner.

    half: None changes nothing. A head that shares the embedding's weight is left alone: autocast does not round that.
    """
    shared = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    for module in model.modules() if half is not None else ():
        if not isinstance(module, torch.nn.Linear):
            continue
        if not (module.weight.requires_grad or id(module.weight) in shared):
            module.weight.data = module.weight.data.to(half)


def pack_into_blocks(sequences: Sequence[Tokens], block: int, end: int, order: np.random.Generator) -> Tensor:
    """(blocks, block): the sequences in a new order, each ended, packed end to end; the last block wraps around."""
    tokens = [token for i in order.permutation(len(sequences)) for token in (*sequences[i], end)]
    missing = -len(tokens) % block
    tokens += (tokens * (missing // len(tokens) + 1))[:missing]
    return torch.tensor(tokens).view(-1, block)


def check_epochs_and_learning_rate(epochs: int, learning_rate: float) -> None:
    """Raises AuditError for what no training can be done with, or ever ended."""
    if not 1 <= epochs <= _MOST_EPOCHS:
        raise AuditError(f"expected epochs >= 1 and at most {_MOST_EPOCHS:,}, got {epochs:,}")
    if not 0 < learning_rate <= LARGEST:
        raise AuditError(f"expected learning_rate > 0 and at most {LARGEST:g}, got {learning_rate:g}")


def require_finite_weights(parameters: Iterable[torch.nn.Parameter], checkpoint: TrainerCheckpoint | None) -> None:
    """Raises AuditError for weights that are no numbers any more; the checkpoint, which leads there, is taken away."""
    # One number that is not finite makes the sum one, and a device is waited for once a parameter.
    if math.isfinite(sum(float(p.detach().sum()) for p in parameters)):
        return
    if checkpoint is not None:
        checkpoint.clear()
    raise AuditError("expected a training that converges, but its weights are not finite: lower learning_rate")


def trainable_parameters(model: Any) -> dict[str, torch.nn.Parameter]:
    """The parameters that ask for gradients, by name. Raises AuditError where there is none."""
    found = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not found:
        raise AuditError(
            f"expected a model with parameters to train, got a frozen one: none of its "
            f"{sum(1 for _ in model.parameters())} parameters asks for gradients"
        )
    return found


@dataclass(frozen=True)
class FineTuningRecipe:
    """How to fine-tune: epochs, peak learning rate, blocks a step, tokens a block, the token that ends a sequence."""

    epochs: int
    rate: float
    batch: int
    block: int
    end: int

    def step_count(self, sequences: Sequence[Tokens]) -> int:
        blocks = math.ceil(sum(len(one) + 1 for one in sequences) / self.block)
        return self.epochs * math.ceil(blocks / self.batch)


class StepwiseFineTuning:
    """A fine-tuning under way, a step at a time: batches in an order of its own, AdamW, warm-up, decay, clipping.

    Of no sequences it is done before it began.
    """

    def __init__(
        self,
        parameters: dict[str, torch.nn.Parameter],
        sequences: Sequence[Tokens],
        course: FineTuningRecipe,
        order: np.random.Generator,
    ) -> None:
        self.parameters, self.course = parameters, course
        self.epochs = self.steps = 0  # done: whole epochs, and steps of the next one
        self._sequences, self._order = sequences, order
        if not sequences:
            self.epochs = course.epochs
            return
        # This draws an order that no epoch uses; without it every training would come out otherwise than it did.
        # One more an epoch: its last batch may be short.
        steps = course.epochs * len(self._training_blocks_in_new_order()) // course.batch + course.epochs
        # one pass over each parameter: where torch has it, that is the fastest
        fused = all(p.device.type in ("cpu", "cuda") and p.is_floating_point() for p in parameters.values())
        self._optimizer = torch.optim.AdamW(
            parameters.values(),
            lr=course.rate,
            weight_decay=0.01,
            betas=(0.9, 0.95),
            fused=fused,
        )
        # Warm-up over a twentieth of the steps, then linear decay to 0: the lower of both lines.
        self._schedule = torch.optim.lr_scheduler.LambdaLR(
            self._optimizer, lambda step: min((step + 1) / max(1, steps // 20), max(0.0, 1 - step / steps))
        )
        self._batches = self._training_blocks_in_new_order().split(course.batch)

    @property
    def is_done_with_all_epochs(self) -> bool:
        return self.epochs == self.course.epochs

    @property
    def steps_per_epoch(self) -> int:
        return len(self._batches)

    def next_step_batch(self) -> Tensor:
        """(at most batch, block): what the next step's gradients are of."""
        return self._batches[self.steps]

    def step(self) -> None:
        """One step of the optimizer, by the gradients that the parameters hold."""
        torch.nn.utils.clip_grad_norm_(self.parameters.values(), 1.0)
        self._optimizer.step()
        self._schedule.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.steps += 1
        if self.steps == len(self._batches):
            self._next_epoch()

    def state(self) -> dict[str, Any]:
        """What `restore` goes on from, for a `TrainerCheckpoint`."""
        return {
            "epochs": self.epochs,
            "steps": self.steps,
            "optimizer": self._optimizer.state_dict(),
            "schedule": self._schedule.state_dict(),
            "parameters": {name: p.detach() for name, p in self.parameters.items()},
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Goes on where `state` was taken. For a fitting that has taken no step."""
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(state["parameters"][name])
        self._optimizer.load_state_dict(state["optimizer"])
        self._schedule.load_state_dict(state["schedule"])
        while self.epochs < state["epochs"]:
            self._next_epoch()  # the orders of finished epochs come first
        self.steps = state["steps"]

    def _next_epoch(self) -> None:
        self.epochs, self.steps = self.epochs + 1, 0
        if not self.is_done_with_all_epochs:
            self._batches = self._training_blocks_in_new_order().split(self.course.batch)

    def _training_blocks_in_new_order(self) -> Tensor:
        return pack_into_blocks(self._sequences, self.course.block, self.course.end, self._order)


def fine_tune_on_packed_blocks(
    model: Any,
    sequences: Sequence[Tokens],
    *,
    epochs: int,
    rate: float,
    batch: int,
    block: int,
    end: int,
    order: np.random.Generator,
    loss: Loss = causal_loss,
    progress: Callable[[int], None] = lambda epochs_done: None,
    checkpoint: TrainerCheckpoint | None = None,
) -> None:
    """Trains the parameters that ask for gradients, in place; goes on behind the last epoch of the checkpoint."""
    fitting = StepwiseFineTuning(
        trainable_parameters(model), sequences, FineTuningRecipe(epochs, rate, batch, block, end), order
    )
    if checkpoint is not None and (state := checkpoint.load()) is not None:
        fitting.restore(state)
    device = next(iter(fitting.parameters.values())).device
    model.train()
    while not fitting.is_done_with_all_epochs:
        loss(model, fitting.next_step_batch().to(device)).backward()
        fitting.step()
        if fitting.steps:
            continue
        require_finite_weights(fitting.parameters.values(), checkpoint)
        if checkpoint is not None:
            checkpoint.save(fitting.state())
        progress(fitting.epochs)
