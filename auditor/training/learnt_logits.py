"""Logits of the positions that are learnt, and of no others: where most of a text is only read, the head of a large
vocabulary and its softmax are a good part of a step.

Knows heads that read each position by itself; nothing of what is done with the logits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from auditor.training import loss_masks


def labelled_token_nlls(model: Any, labels: Tensor, **inputs: Any) -> Tensor:
    """(k,) nats, of the k tokens that have a loss given those before them, row by row.

    labels: (b, n) the tokens, `loss_masks.IGNORED` where none is learnt; inputs: of the model.
    """
    wanted = nn.functional.pad(labels[:, 1:], (0, 1), value=loss_masks.IGNORED)  # shifted, no logits are copied
    learnt = wanted != loss_masks.IGNORED
    with _restrict_head_to_learnt(model, learnt):
        found: Tensor = model(**inputs).logits
    found = found[learnt] if found.shape[:2] == learnt.shape else found[0]
    found = found.to(torch.promote_types(found.dtype, torch.float32))
    return nn.functional.cross_entropy(found, wanted[learnt], reduction="none")


def mean_nll_per_row(model: Any, labels: Tensor, **inputs: Any) -> Tensor:
    """(b,) mean of `labelled_token_nlls` in each row; 0 where none has a loss."""
    found, learnt = labelled_token_nlls(model, labels, **inputs), labels[:, 1:] != loss_masks.IGNORED
    return found.new_zeros(len(labels)).index_add(0, learnt.nonzero()[:, 0], found) / learnt.sum(1).clamp(min=1)


@contextmanager
def _restrict_head_to_learnt(model: Any, learnt: Tensor) -> Iterator[None]:
    """The head reads these positions alone; one that is trained reads all: per-sample gradients need its rows."""
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
