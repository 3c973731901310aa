"""Plain causal-LM training of the small models that we attack: packed blocks, AdamW, short warm-up, linear decay.

Knows token sequences and one loss; knows nothing of privacy: the point of these models is that they leak.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from auditor.types import Tokens

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
) -> None:
    """Trains the parameters that ask for gradients, in place."""
    trained = [p for p in model.parameters() if p.requires_grad]
    steps = epochs * len(pack(sequences, block, end, order)) // batch + epochs
    optimizer = torch.optim.AdamW(trained, lr=rate, weight_decay=0.01, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / max(1, steps // 20), max(0.0, 1 - step / steps))
    )
    model.train()
    for epoch in range(epochs):
        blocks = pack(sequences, block, end, order)
        for start in range(0, len(blocks), batch):
            loss(model, blocks[start : start + batch]).backward()
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad(set_to_none=True)
        progress(epoch + 1)
