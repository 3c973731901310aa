"""Sequences of which a part is read and not learnt, as a conversation's user turns are: such a token is written ~token.

That is below 0, so that one row of numbers goes through packing, cutting and batches, and none of them knows of masks.
Whoever asks a model calls `unmask_rows` and `loss_labels`.
"""

from __future__ import annotations

from torch import Tensor

from auditor.core.nouns import Tokens
from auditor.plugins.trainer import TrainingRecord

IGNORED = -100  # a label that losses leave out


def tokens_with_loss_mask(record: TrainingRecord) -> Tokens:
    """The record's tokens, what has no loss as ~token."""
    if record.learnt is None:
        return record.tokens
    return tuple(token if learnt else ~token for token, learnt in zip(record.tokens, record.learnt, strict=True))


def unmask_tokens(tokens: Tokens) -> Tokens:
    """What the model reads of a sequence: all of it."""
    return tuple(~token if token < 0 else token for token in tokens)


def unmask_rows(rows: Tensor) -> Tensor:
    """The token ids of rows of such sequences, of any shape."""
    return rows.where(rows >= 0, ~rows)


def loss_labels(rows: Tensor) -> Tensor:
    """The token ids that have a loss, IGNORED in the place of the others."""
    return rows.masked_fill(rows < 0, IGNORED)
