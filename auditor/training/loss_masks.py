"""Mask the loss of tokens that the model reads but does not learn, such as a user's turns.

Such a token is written as ~token, a negative number. One row of numbers thus passes through
packing, cutting and batching, which need no code for masks. Callers of a model get its inputs from
`remove_row_loss_masks` and its labels from `make_row_labels`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from auditor.core.nouns import Tokens
from auditor.plugins.trainer import TrainingRecord

IGNORED = -100  # a label that losses ignore


def apply_loss_mask(record: TrainingRecord) -> Tokens:
    """Return the record's tokens, with ~token for tokens without a loss."""
    if record.learnt is None:
        return record.tokens
    pairs = zip(record.tokens, record.learnt, strict=True)
    return tuple(token if has_loss else ~token for token, has_loss in pairs)


def remove_loss_mask(tokens: Tokens) -> Tokens:
    """Return the token ids of a sequence, with each masked token ~t as t."""
    return tuple(~token if token < 0 else token for token in tokens)


def remove_row_loss_masks(rows: Tensor) -> Tensor:
    """Return the token ids of sequences that write a masked token as ~token.

    rows: an integer tensor of any shape.
    """
    return rows.where(rows >= 0, ~rows)


def make_row_labels(rows: Tensor) -> Tensor:
    """Return the ids of tokens that have a loss, and IGNORED for all others.

    rows: sequences that write a token without a loss as ~token.
    """
    return rows.masked_fill(rows < 0, IGNORED)


# --- logits of learnt positions only: the head of a large vocabulary is expensive ----------------


def compute_learnt_token_nlls(model: Any, labels: Tensor, **inputs: Any) -> Tensor:
    """Return the negative log-likelihoods of the k tokens that have a loss, row by row, (k,) nats.

    labels: (b, n) the tokens, `IGNORED` for tokens without a loss; inputs: passed to the model.
    """
    # Shifting the labels instead of the logits copies no logits.
    targets = nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)
    has_loss = targets != IGNORED
    with _restrict_head(model, has_loss):
        logits: Tensor = model(**inputs).logits
    # The head may have read only the learnt positions, as one row (1, k, V).
    if logits.shape[:2] == has_loss.shape:
        logits = logits[has_loss]
    else:
        logits = logits[0]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return nn.functional.cross_entropy(logits, targets[has_loss], reduction="none")


def compute_mean_learnt_nlls(model: Any, labels: Tensor, **inputs: Any) -> Tensor:
    """Return each row's mean of `compute_learnt_token_nlls`, (b,); 0 if no token has a loss."""
    nlls = compute_learnt_token_nlls(model, labels, **inputs)
    has_loss = labels[:, 1:] != IGNORED
    # nonzero() goes row by row, like `nlls`: its first column is the row of each token.
    row_of_token = has_loss.nonzero()[:, 0]
    sums = nlls.new_zeros(len(labels)).index_add(0, row_of_token, nlls)
    return sums / has_loss.sum(1).clamp(min=1)


@contextmanager
def _restrict_head(model: Any, has_loss: Tensor) -> Iterator[None]:
    """Let the model's head skip positions without a loss inside this context.

    has_loss: mask of positions with a loss. A head with trained parameters skips nothing, because
    per-sample gradients need all positions.
    """
    inner = getattr(model, "_module", model)  # unwraps a model that Opacus has wrapped
    head = None
    if hasattr(inner, "get_output_embeddings"):
        head = inner.get_output_embeddings()
    if head is None or bool(has_loss.all()) or any(p.requires_grad for p in head.parameters()):
        yield
        return

    def gather_learnt(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        hidden, *others = inputs
        if hidden.shape[:2] != has_loss.shape:
            return inputs
        return (hidden[has_loss].unsqueeze(0), *others)

    handle = head.register_forward_pre_hook(gather_learnt)
    try:
        yield
    finally:
        handle.remove()
