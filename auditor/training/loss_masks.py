"""Sequences of which a part is read and not learnt, as a conversation's user turns are: such a token is written ~token.

That is below 0, so that one row of numbers goes through packing, cutting and batches, and none of them knows of masks.
Whoever asks a model calls `token_id_rows_without_loss_mask` and `labels_of_loss_masked_rows`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from auditor.core.nouns import Tokens
from auditor.plugins.trainer import TrainingRecord

IGNORED = -100  # a label that losses leave out


def tokens_with_loss_mask(record: TrainingRecord) -> Tokens:
    """The record's tokens, what has no loss as ~token."""
    if record.learnt is None:
        return record.tokens
    return tuple(token if learnt else ~token for token, learnt in zip(record.tokens, record.learnt, strict=True))


def tokens_without_loss_mask(tokens: Tokens) -> Tokens:
    """What the model reads of a sequence: all of it."""
    return tuple(~token if token < 0 else token for token in tokens)


def token_id_rows_without_loss_mask(rows: Tensor) -> Tensor:
    """The token ids of rows of such sequences, of any shape."""
    return rows.where(rows >= 0, ~rows)


def labels_of_loss_masked_rows(rows: Tensor) -> Tensor:
    """The token ids that have a loss, IGNORED in the place of the others."""
    return rows.masked_fill(rows < 0, IGNORED)


# --- logits of what is learnt alone: in a text mostly read, the head of a large vocabulary is much of a step ---


def nlls_of_tokens_with_loss(model: Any, labels: Tensor, **inputs: Any) -> Tensor:
    """(k,) nats, of the k tokens that have a loss given those before them, row by row.

    labels: (b, n) the tokens, `IGNORED` where none is learnt; inputs: of the model.
    """
    wanted = nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)  # shifted, no logits are copied
    learnt = wanted != IGNORED
    with _restrict_head_to_learnt_context(model, learnt):
        found: Tensor = model(**inputs).logits
    # The head may have read the learnt positions alone, as one row (1, k, V).
    found = found[learnt] if found.shape[:2] == learnt.shape else found[0]
    found = found.to(torch.promote_types(found.dtype, torch.float32))
    return nn.functional.cross_entropy(found, wanted[learnt], reduction="none")


def mean_nll_of_tokens_with_loss_per_row(model: Any, labels: Tensor, **inputs: Any) -> Tensor:
    """(b,) mean of `nlls_of_tokens_with_loss` in each row; 0 where none has a loss."""
    found, learnt = nlls_of_tokens_with_loss(model, labels, **inputs), labels[:, 1:] != IGNORED
    # nonzero() goes row by row, as `found` does: its first column is the row that each token is of.
    return found.new_zeros(len(labels)).index_add(0, learnt.nonzero()[:, 0], found) / learnt.sum(1).clamp(min=1)


@contextmanager
def _restrict_head_to_learnt_context(model: Any, learnt: Tensor) -> Iterator[None]:
    """A context: the head reads these positions alone. A trained head reads all: per-sample gradients need its rows."""
    inner = getattr(model, "_module", model)  # of a model that Opacus has wrapped
    head = inner.get_output_embeddings() if hasattr(inner, "get_output_embeddings") else None
    if head is None or bool(learnt.all()) or any(p.requires_grad for p in head.parameters()):
        yield
        return

    def gather(module: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        hidden, *others = given
        return (hidden[learnt].unsqueeze(0), *others) if hidden.shape[:2] == learnt.shape else given

    handle = head.register_forward_pre_hook(gather)
    try:
        yield
    finally:
        handle.remove()
