"""Mask the loss of tokens that the model reads but does not learn, such as a user's turns.

A masked token is written as ~token, a negative number. So one row of numbers passes through
packing, cutting and batching, which need no code for masks. Callers of a model get its inputs from
`remove_row_loss_masks` and its labels from `make_row_labels`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from auditor.core.nouns import Tokens
from auditor.plugins.trainer import TrainingRecord

IGNORED = -100  # a label that losses ignore


def apply_loss_mask(record: TrainingRecord) -> Tokens:
    """Return the record's tokens, with tokens that are excluded from the loss written as ~token."""
    if record.learnt is None:
        return record.tokens
    pairs = zip(record.tokens, record.learnt, strict=True)
    return tuple(token if has_loss else ~token for token, has_loss in pairs)


def has_learnt_tokens(sequences: Iterable[Tokens], window: slice) -> bool:
    """Return whether the loss includes a token in this window of any of the sequences."""
    parts = map(itemgetter(window), sequences)
    return max(chain.from_iterable(parts), default=-1) >= 0


def remove_loss_mask(tokens: Tokens) -> Tokens:
    """Return the token ids of a sequence, replacing each masked token ~t with t."""
    return tuple(~token if token < 0 else token for token in tokens)


def remove_row_loss_masks(rows: Tensor) -> Tensor:
    """Return the token ids of rows, replacing each masked token ~t with t.

    `rows` is an integer tensor of any shape.
    """
    return rows.where(rows >= 0, ~rows)


def make_row_labels(rows: Tensor) -> Tensor:
    """Return the ids of tokens that count toward the loss, and IGNORED for all others.

    In `rows`, a token that is excluded from the loss is written as ~token.
    """
    return rows.masked_fill(rows < 0, IGNORED)


# --- logits of learnt positions only: the head of a large vocabulary is expensive ---


def compute_learnt_token_nlls(model: Any, labels: Tensor, **inputs: Any) -> Tensor:
    """Return the negative log-likelihoods of the k tokens in the loss, row by row, (k,) nats.

    `labels` (b, n) are the tokens, with `IGNORED` for tokens excluded from the loss; `inputs` are
    passed to the model.
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
    """Return each row's mean of `compute_learnt_token_nlls`, (b,); 0 if no token counts."""
    nlls = compute_learnt_token_nlls(model, labels, **inputs)
    has_loss = labels[:, 1:] != IGNORED
    # nonzero() goes row by row, like `nlls`: its first column is the row of each token.
    row_of_token = has_loss.nonzero()[:, 0]
    sums = nlls.new_zeros(len(labels)).index_add(0, row_of_token, nlls)
    return sums / has_loss.sum(1).clamp(min=1)


@contextmanager
def _restrict_head(model: Any, has_loss: Tensor) -> Iterator[None]:
    """Let the model's head skip positions that are excluded from the loss, during the block.

    `has_loss` is a mask of the positions to keep. A head with trained parameters skips nothing,
    because per-sample gradients need all positions.
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
