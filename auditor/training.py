"""Fine-tuning of causal LMs without privacy: packed blocks, AdamW, short warm-up, linear decay; and checkpoints.

Knows token sequences and one loss; knows nothing of privacy: the point of the models made here is that they leak.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from auditor import disk
from auditor.errors import AuditError
from auditor.types import Tokens

LARGEST = 1e6  # learning rate, clip, noise multiplier: far beyond what trains anything
_MOST_EPOCHS = 100_000
Loss = Callable[[Any, Tensor], Tensor]  # (model, blocks (B, block)) -> mean nll, nats a token


def untrained(
    *, vocab_size: int, layers: int, hidden: int, heads: int, positions: int, end: int, seed: int
) -> GPTNeoXForCausalLM:
    """A small GPT-NeoX with tied embeddings; rotary positions, so that none is untrained behind a soft prompt."""
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


def causal_loss(model: Any, blocks: Tensor) -> Tensor:
    """The model's own loss: full softmax."""
    loss: Tensor = model(input_ids=blocks, labels=blocks).loss
    return loss


def pack(sequences: Sequence[Tokens], block: int, end: int, order: np.random.Generator) -> Tensor:
    """(blocks, block): the sequences in a new order, each ended, packed end to end; the last block wraps around."""
    tokens = [token for i in order.permutation(len(sequences)) for token in (*sequences[i], end)]
    missing = -len(tokens) % block
    tokens += (tokens * (missing // len(tokens) + 1))[:missing]
    return torch.tensor(tokens).view(-1, block)


class Checkpoint:
    """Where an interrupted training goes on: one file, replaced as a whole, readable by its owner only.

    Saved is on disk: a key that noise is drawn from must not be lost, or the records would be used with another one.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def save(self, state: dict[str, Any]) -> None:
        """Tensors, numbers and text, and containers of them."""
        with disk.replacing(self.path, sync=True) as scratch:
            torch.save(state, scratch)

    def load(self) -> dict[str, Any] | None:
        """What was saved last; None where nothing was. Raises AuditError for a file that cannot be read."""
        if not self.path.is_file():
            return None
        try:
            state: dict[str, Any] = torch.load(self.path, weights_only=True, map_location="cpu")
        except Exception as error:  # torch raises a dozen kinds, all of them about the file
            raise AuditError(f"cannot read the checkpoint {str(self.path)!r}: {type(error).__name__}") from None
        return state

    def clear(self) -> None:
        """Removes it: the training is done, and it holds private data."""
        self.path.unlink(missing_ok=True)


def check_schedule(epochs: int, learning_rate: float) -> None:
    """Raises AuditError for what no training can be done with, or ever ended."""
    if not 1 <= epochs <= _MOST_EPOCHS:
        raise AuditError(f"expected epochs >= 1 and at most {_MOST_EPOCHS:,}, got {epochs:,}")
    if not 0 < learning_rate <= LARGEST:
        raise AuditError(f"expected learning_rate > 0 and at most {LARGEST:g}, got {learning_rate:g}")


def require_finite(parameters: Iterable[torch.nn.Parameter], checkpoint: Checkpoint | None) -> None:
    """Raises AuditError for weights that are no numbers any more; the checkpoint, which leads there, is taken away."""
    if math.isfinite(sum(float(p.detach().sum()) for p in parameters)):
        return
    if checkpoint is not None:
        checkpoint.clear()
    raise AuditError("expected a training that converges, but its weights are not finite: lower learning_rate")


def trained_parameters(model: Any) -> dict[str, torch.nn.Parameter]:
    """The parameters that ask for gradients, by name. Raises AuditError where there is none."""
    found = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not found:
        raise AuditError(
            f"expected a model with parameters to train, got a frozen one: none of its "
            f"{sum(1 for _ in model.parameters())} parameters asks for gradients"
        )
    return found


def fit(
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
    checkpoint: Checkpoint | None = None,
) -> None:
    """Trains the parameters that ask for gradients, in place; goes on behind the last epoch of the checkpoint."""
    trained = trained_parameters(model)
    parameters = list(trained.values())
    steps = epochs * len(pack(sequences, block, end, order)) // batch + epochs
    optimizer = torch.optim.AdamW(parameters, lr=rate, weight_decay=0.01, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / max(1, steps // 20), max(0.0, 1 - step / steps))
    )
    done = 0
    if checkpoint is not None and (state := checkpoint.load()) is not None:
        done = state["epochs"]
        with torch.no_grad():
            for name, parameter in trained.items():
                parameter.copy_(state["parameters"][name])
        optimizer.load_state_dict(state["optimizer"])
        schedule.load_state_dict(state["schedule"])
    model.train()
    for epoch in range(epochs):
        blocks = pack(sequences, block, end, order)  # of finished epochs too: their orders come first
        if epoch < done:
            continue
        for start in range(0, len(blocks), batch):
            loss(model, blocks[start : start + batch].to(parameters[0].device)).backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad(set_to_none=True)
        require_finite(parameters, checkpoint)
        if checkpoint is not None:
            state = {"epochs": epoch + 1, "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}
            checkpoint.save({**state, "parameters": {name: p.detach() for name, p in trained.items()}})
        progress(epoch + 1)
