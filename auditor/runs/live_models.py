"""Models in memory that an audit is given: those of a training script, or a `LanguageModel` of
one's own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import combinations
from pathlib import Path
from typing import Any

import torch

from auditor.core.errors import AuditError
from auditor.models import consistency, self_check
from auditor.models.base import LanguageModel
from auditor.models.huggingface import HuggingFaceModel


def is_live_model(kind: str, given: Any) -> bool:
    """Whether a model is given, not a folder, a hub id or None. Raises AuditError for anything
    else."""
    if given is None or isinstance(given, (str, Path)):
        return False
    if not isinstance(given, LanguageModel) and not hasattr(given, "get_input_embeddings"):
        got = type(given).__name__
        raise AuditError(
            f"expected {kind} as a folder, a hub id, a transformers model or a LanguageModel, got "
            f"{got}"
        )
    return True


def check_no_shared_weights(given: Mapping[str, Any]) -> None:
    """Refuses two models that share weights: an adapter changes its base in place, which is then no
    other model.

    One model may be both `public` and `reference`.
    """
    for (role, model), (other, one) in combinations(given.items(), 2):
        if one is model and role != "model":
            continue
        if one is model or _parameter_ids(model) & _parameter_ids(one):
            raise AuditError(
                f"expected {other} as a model of its own, got one that shares weights with {role}: "
                "an adapter changes its base in place; load the other anew"
            )


def _parameter_ids(model: Any) -> set[int]:
    return (
        {id(parameter) for parameter in model.parameters()}
        if isinstance(model, torch.nn.Module)
        else set()
    )


def live_model_name(model: Any) -> str:
    """`GPT2LMHeadModel in memory`: no folder and no name on a hub."""
    return f"{type(model).__name__} in memory"


def wrap_live_model(model: Any, tokenizer: Any) -> LanguageModel:
    """A live causal LM, checked as one that is loaded; a `LanguageModel` brings its own tokenizer.

    Raises AuditError for distributions that do not agree.
    """
    if isinstance(model, LanguageModel):
        consistency.check_distribution_consistency(model)
        return model
    found = HuggingFaceModel(model, tokenizer, name=live_model_name(model))
    self_check.check_and_configure_serving(found)
    return found


@contextmanager
def training_state_restored_at_exit(*models: Any) -> Iterator[None]:
    """Let an audit use models that are being trained; afterwards restore what the audit changes.

    Restored: which modules were in training mode, and which weights had gradients. Inside, a model
    answers in the precision of its weights: under mixed precision accelerate replaces `forward` by
    one in autocast (TRL's trainers ask for bfloat16 by default), whose rounding differs from one
    batch shape to another.
    """
    models = tuple(model for model in models if isinstance(model, torch.nn.Module))
    # Module by module: frozen dropout or batch norms inside a training model are to stay as they
    # were.
    modes = [(module, module.training) for model in models for module in model.modules()]
    grads = [
        (parameter, parameter.requires_grad) for model in models for parameter in model.parameters()
    ]
    in_autocast = [
        model for model in models if {"forward", "_original_forward"} <= set(vars(model))
    ]
    forwards = [model.forward for model in in_autocast]
    for model in in_autocast:
        model.forward = model._original_forward
    try:
        yield
    finally:
        for model, forward in zip(in_autocast, forwards, strict=True):
            model.forward = forward
        for module, training in modes:
            module.training = training
        for parameter, wanted in grads:
            parameter.requires_grad_(wanted)
