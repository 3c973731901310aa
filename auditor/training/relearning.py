"""A few steps of plain fine-tuning on a copy of a model: what comes back of records that are not among the texts."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch

from auditor.core.errors import AuditError
from auditor.core.nouns import Tokens
from auditor.core.secret_randomness import keyed_random_generator
from auditor.models.huggingface import HuggingFaceModel
from auditor.training.finetune import causal_loss, pack_into_blocks, require_finite_weights, trainable_parameters

_BLOCK, _BATCH = 128, 4  # tokens of a sequence, at most, and sequences a step


def relearn(
    model: HuggingFaceModel,
    texts: Sequence[Tokens],
    *,
    steps: int,
    rate: float,
    seed: int,
    progress: Callable[[int], None] = lambda done: None,
) -> HuggingFaceModel:
    """A copy of the model, all its weights trained on the texts for so many steps of AdamW at a constant rate.

    Each step takes four packed blocks of 128 tokens; the texts come in new orders, over and over. Raises AuditError for
    weights that are no numbers any more, and for a tokenizer that names no end of text.
    """
    end = getattr(model.tokenizer, "eos_token_id", None)
    if end is None:
        raise AuditError(
            f"expected a tokenizer with an end-of-text token to relearn with, but that of {model.name} has none"
        )
    own, order = copy.deepcopy(model.model), keyed_random_generator("relearn", seed)
    for parameter in own.parameters():
        parameter.requires_grad_(parameter.is_floating_point())
    parameters = trainable_parameters(own)
    optimizer = torch.optim.AdamW(parameters.values(), lr=rate, weight_decay=0.01)
    block, batches = min(_BLOCK, model.max_positions or _BLOCK), list[torch.Tensor]()
    own.train()
    for step in range(steps):
        batches = batches or list(pack_into_blocks(texts, block, end, order).split(_BATCH))
        causal_loss(own, batches.pop(0).to(model.device)).backward()
        torch.nn.utils.clip_grad_norm_(parameters.values(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        progress(step + 1)
    require_finite_weights(parameters.values(), None)
    return HuggingFaceModel(own, model.tokenizer, f"{model.name}, relearned")
