"""Fine-tune causal LMs without privacy: packed blocks, AdamW, warm-up, linear decay, checkpoints.

Models trained by this module are meant to leak.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from auditor.core.errors import AuditError
from auditor.core.nouns import Tokens
from auditor.plugins.options import Limits
from auditor.plugins.trainer import TrainerCheckpoint
from auditor.training import loss_masks

# Types of models whose own loss is that of the tokens they have just read, not of the next ones.
_UNSHIFTED = ("trocr", "xlm")
LARGEST = 1e6  # learning rate, clip, noise multiplier: far beyond any useful value
# Other values would train nothing or never finish.
Epochs = Annotated[int, Limits(1, 100_000, "[]")]
LearningRate = Annotated[float, Limits(0, LARGEST, "(]")]
ClippingNorm = Annotated[float, Limits(0, LARGEST, "(]")]

Loss = Callable[[Any, Tensor], Tensor]  # (model, blocks (B, block)) -> mean nll, nats a token


def make_untrained_gpt_neox(
    *, vocab_size: int, layers: int, hidden: int, heads: int, positions: int, end: int, seed: int
) -> GPTNeoXForCausalLM:
    """Make a small GPT-NeoX with tied embeddings and random weights.

    Rotary positions need no training, so a soft prompt may move a text to positions that were never
    trained.
    """
    # This seeds torch's process-wide generator, so later draws follow from the seed too.
    torch.manual_seed(seed)
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


def compute_causal_loss(model: Any, blocks: Tensor) -> Tensor:
    """Return the mean negative log-likelihood (nats) of the tokens in the loss; 0 if none."""
    labels = loss_masks.make_row_labels(blocks)
    is_shifted = model.config.model_type not in _UNSHIFTED
    if is_shifted and not bool((labels == loss_masks.IGNORED).any()):
        loss: Tensor = model(input_ids=blocks, labels=blocks).loss  # the model's own loss
        return loss
    input_ids = loss_masks.remove_row_loss_masks(blocks)
    nll = loss_masks.compute_learnt_token_nlls(model, labels, input_ids=input_ids, use_cache=False)
    return nll.mean() if len(nll) else nll.sum()


def make_autocast_loss(half: torch.dtype | None) -> Loss:
    """Return `compute_causal_loss` with matrix products in the precision `half`.

    The weights keep their precision. If `half` is None, products have the weights' precision, too.
    """
    if half is None:
        return compute_causal_loss

    def compute_loss(model: Any, blocks: Tensor) -> Tensor:
        with torch.autocast(blocks.device.type, dtype=half):
            return compute_causal_loss(model, blocks)

    return compute_loss


def cast_frozen_linear_weights(model: Any, half: torch.dtype | None) -> None:
    """Cast frozen weights of linear layers once, instead of in every forward pass as autocast does.

    This is faster and gives the same results. A head that shares the embedding's weight is not
    cast, because autocast does not round the embedding. If `half` is None, change nothing.
    """
    if half is None:
        return
    shared = set()
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding):
            shared.add(id(module.weight))
    for module in model.modules():
        if not isinstance(module, torch.nn.Linear):
            continue
        if not (module.weight.requires_grad or id(module.weight) in shared):
            module.weight.data = module.weight.data.to(half)


def pack_blocks(
    sequences: Sequence[Tokens],
    block: int,
    end: int,
    order: np.random.Generator,
) -> Tensor:
    """Concatenate the sequences, with `end` after each, and cut them into blocks.

    `order` draws the order of the sequences. Return token ids (blocks, block); the last block is
    filled up with the first tokens.
    """
    tokens = list[int]()
    for i in order.permutation(len(sequences)):
        tokens += (*sequences[i], end)
    n_missing = -len(tokens) % block
    tokens += (tokens * (n_missing // len(tokens) + 1))[:n_missing]
    return torch.tensor(tokens).view(-1, block)


def refuse_trained_model(name: str, model: str) -> None:
    """Raise AuditError if a trainer gets the option `model`, which is for `audit run` only."""
    if model:
        raise AuditError(
            f"-D model= names a trained {name} model for audit run: audit train makes it"
        )


def check_weights_finite(
    parameters: Iterable[torch.nn.Parameter],
    checkpoint: TrainerCheckpoint | None,
) -> None:
    """Raise AuditError if any weight is not finite.

    The checkpoint is cleared first, because a training continued from it would fail again.
    """
    # A single non-finite value makes the sum non-finite, and costs one device sync a parameter.
    if math.isfinite(sum(float(p.detach().sum()) for p in parameters)):
        return
    if checkpoint is not None:
        checkpoint.clear()
    raise AuditError(
        "expected a training that converges, but its weights are not finite: lower learning_rate",
    )


def list_trainable_parameters(model: Any) -> dict[str, torch.nn.Parameter]:
    """Return the parameters that require gradients, by name; raise AuditError if there are none."""
    parameters = dict(model.named_parameters())
    trainable = {}
    for name, p in parameters.items():
        if p.requires_grad:
            trainable[name] = p
    if not trainable:
        raise AuditError(
            "expected a model with parameters to train, got a frozen model: none of its "
            f"{len(parameters)} parameters requires gradients"
        )
    return trainable


@dataclass(frozen=True)
class FineTuningRecipe:
    """Settings of a fine-tuning.

    Attributes:
        rate: peak learning rate.
        batch: number of blocks in a step.
        block: number of tokens in a block.
        end: token that follows each sequence.
    """

    epochs: int
    rate: float
    batch: int
    block: int
    end: int

    def count_steps(self, sequences: Sequence[Tokens]) -> int:
        n_tokens = sum(len(sequence) + 1 for sequence in sequences)
        n_blocks = math.ceil(n_tokens / self.block)
        return self.epochs * math.ceil(n_blocks / self.batch)


class StepwiseFineTuning:
    """A fine-tuning that runs one step at a time: AdamW with warm-up, decay and clipping.

    Batches are in random order. Without sequences, the fine-tuning has zero steps.
    """

    def __init__(
        self,
        parameters: dict[str, torch.nn.Parameter],
        sequences: Sequence[Tokens],
        course: FineTuningRecipe,
        order: np.random.Generator,
    ) -> None:
        self.parameters = parameters
        self.course = course
        self.epochs = 0  # whole epochs done
        self.steps = 0  # steps of the current epoch done
        self._sequences = sequences
        self._order = order
        if not sequences:
            self.epochs = course.epochs
            return
        # This draws an order that no epoch uses; dropping the draw would change every training.
        n_blocks = course.epochs * len(self._shuffle_blocks())
        # The last batch of an epoch may be short: at most a step more for each epoch.
        n_steps = n_blocks // course.batch + course.epochs
        # The fused optimizer, a single pass over each parameter, is the fastest if torch has it.
        weights = parameters.values()
        fused = all(p.device.type in ("cpu", "cuda") and p.is_floating_point() for p in weights)
        self._optimizer = torch.optim.AdamW(
            weights,
            lr=course.rate,
            weight_decay=0.01,
            betas=(0.9, 0.95),
            fused=fused,
        )

        def scale_rate(step: int) -> float:
            """Return the factor on the learning rate at a step.

            The factor rises over a twentieth of the steps, then decays linearly to 0.
            """
            return min((step + 1) / max(1, n_steps // 20), max(0.0, 1 - step / n_steps))

        self._schedule = torch.optim.lr_scheduler.LambdaLR(self._optimizer, scale_rate)
        self._batches = self._shuffle_blocks().split(course.batch)

    @property
    def is_finished(self) -> bool:
        return self.epochs == self.course.epochs

    @property
    def steps_per_epoch(self) -> int:
        return len(self._batches)

    def get_next_batch(self) -> Tensor:
        """Return the blocks of the next step, (at most batch, block)."""
        return self._batches[self.steps]

    def step(self) -> None:
        """Take one optimizer step with the current gradients of the parameters."""
        torch.nn.utils.clip_grad_norm_(self.parameters.values(), 1.0)
        self._optimizer.step()
        self._schedule.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.steps += 1
        if self.steps == len(self._batches):
            self._start_next_epoch()

    def state(self) -> dict[str, Any]:
        """Return a state for a `TrainerCheckpoint`, from which `restore` continues."""
        return {
            "epochs": self.epochs,
            "steps": self.steps,
            "optimizer": self._optimizer.state_dict(),
            "schedule": self._schedule.state_dict(),
            "parameters": {name: p.detach() for name, p in self.parameters.items()},
            "random": [generator.get_state() for generator in self._list_random_generators()],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from `state`; call this only before the first step.

        Raise AuditError if another version of this program saved it with fewer entries.
        """
        if missing := sorted(self.state().keys() - state.keys()):
            raise AuditError(
                "expected a checkpoint of this version of audit, got one of another, without "
                f"{', '.join(missing)}: delete checkpoint.pt in the folder of -o to train from the "
                "start"
            )
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(state["parameters"][name])
        self._optimizer.load_state_dict(state["optimizer"])
        self._schedule.load_state_dict(state["schedule"])
        while self.epochs < state["epochs"]:
            self._start_next_epoch()  # draws the orders of finished epochs first
        self.steps = state["steps"]
        # Another device than before has another generator.
        generators = self._list_random_generators()
        for generator, position in zip(generators, state["random"], strict=False):
            generator.set_state(position)

    def run(
        self,
        model: Any,
        compute_loss: Callable[[Tensor], Tensor],
        checkpoint: TrainerCheckpoint | None,
        progress: Callable[[int], None],
    ) -> None:
        """Take all steps, continuing after the last epoch of the checkpoint.

        `compute_loss` returns the loss of a batch; `progress` gets the number of finished epochs.
        """
        if checkpoint is not None and (state := checkpoint.load()) is not None:
            self.restore(state)
        model.train()
        while not self.is_finished:
            compute_loss(self.get_next_batch()).backward()
            self.step()
            if self.steps:
                continue
            check_weights_finite(self.parameters.values(), checkpoint)
            if checkpoint is not None:
                checkpoint.save(self.state())
            progress(self.epochs)

    def _list_random_generators(self) -> list[torch.Generator]:
        """Return torch's generators from which dropout is drawn."""
        device = next(iter(self.parameters.values())).device
        generators = [torch.default_generator]
        if device.type == "cuda":
            generators.append(torch.cuda.default_generators[device.index])
        return generators

    def _start_next_epoch(self) -> None:
        self.epochs += 1
        self.steps = 0
        if not self.is_finished:
            self._batches = self._shuffle_blocks().split(self.course.batch)

    def _shuffle_blocks(self) -> Tensor:
        """Return the training blocks in a new order."""
        return pack_blocks(self._sequences, self.course.block, self.course.end, self._order)


def train_packed_blocks(
    model: Any,
    sequences: Sequence[Tokens],
    *,
    epochs: int,
    rate: float,
    batch: int,
    block: int,
    end: int,
    order: np.random.Generator,
    loss: Loss = compute_causal_loss,
    progress: Callable[[int], None] = lambda epochs_done: None,
    checkpoint: TrainerCheckpoint | None = None,
) -> None:
    """Train the parameters that require gradients, in place, on packed blocks.

    For `rate`, `batch`, `block` and `end`, see `FineTuningRecipe`. `order` draws the order of the
    sequences. Training continues after the last epoch of the checkpoint.
    """
    recipe = FineTuningRecipe(epochs, rate, batch, block, end)
    fitting = StepwiseFineTuning(list_trainable_parameters(model), sequences, recipe, order)
    device = next(iter(fitting.parameters.values())).device
    fitting.run(model, lambda blocks: loss(model, blocks.to(device)), checkpoint, progress)
