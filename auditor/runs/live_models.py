"""Accept models in memory as inputs of an audit.

Such models come from a training script, or are objects of a user's `LanguageModel` class.
"""

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


def is_live_model(kind: str, value: Any) -> bool:
    """Return True for a model in memory, False for a folder, a hub id or None.

    Raise AuditError for other values.

    Args:
        kind: role of the model in the message.
        value: a model, or its folder or hub id.
    """
    if value is None or isinstance(value, (str, Path)):
        return False
    if not isinstance(value, LanguageModel) and not hasattr(value, "get_input_embeddings"):
        got = type(value).__name__
        raise AuditError(
            f"expected {kind} as a folder, a hub id, a transformers model or a LanguageModel, got "
            f"{got}"
        )
    return True


def check_no_shared_weights(models: Mapping[str, Any]) -> None:
    """Raise AuditError if two models share weights. Only `public` and `reference` may share.

    An adapter changes its base model in place, so an adapter and its base would answer the same.
    """
    for (role, model), (other, other_model) in combinations(models.items(), 2):
        if other_model is model and role != "model":
            continue
        if other_model is model or _list_parameter_ids(model) & _list_parameter_ids(other_model):
            raise AuditError(
                f"expected {other} as a separate model, got one that shares weights with {role}: "
                "an adapter changes its base in place; load the other again"
            )


def _list_parameter_ids(model: Any) -> set[int]:
    if isinstance(model, torch.nn.Module):
        return {id(parameter) for parameter in model.parameters()}
    return set()


def name_live_model(model: Any) -> str:
    """Return a name for a model in memory, like `GPT2LMHeadModel in memory`."""
    return f"{type(model).__name__} in memory"


def wrap_live_model(model: Any, tokenizer: Any) -> LanguageModel:
    """Wrap a causal language model in memory as a `LanguageModel`.

    A `LanguageModel` is returned unchanged. In both cases, the model is checked like a model from
    files: raise AuditError if its distributions differ between kinds of query.
    """
    if isinstance(model, LanguageModel):
        consistency.check_distribution_consistency(model)
        return model
    wrapped = HuggingFaceModel(model, tokenizer, name=name_live_model(model))
    self_check.configure_serving(wrapped)
    return wrapped


@contextmanager
def restore_training_state(*models: Any) -> Iterator[None]:
    """Return a context in which an audit may use models that are in training.

    At the end of the context, training mode and the weights' `requires_grad` are restored.

    In the context, autocast is off, so a model computes in the precision of its weights. In
    mixed-precision training, accelerate wraps `forward` in autocast (bfloat16 by default in TRL's
    trainers). Its rounding depends on the batch shape, which would change an audit's results.
    """
    models = tuple(model for model in models if isinstance(model, torch.nn.Module))
    # Module by module: frozen dropout or batch norms inside a training model keep their mode.
    modes = []
    grads = []
    forwards = []
    for model in models:
        for module in model.modules():
            modes.append((module, module.training))
        for parameter in model.parameters():
            grads.append((parameter, parameter.requires_grad))
        if {"forward", "_original_forward"} <= set(vars(model)):
            forwards.append((model, model.forward))
    for model, _ in forwards:
        model.forward = model._original_forward
    try:
        yield
    finally:
        for model, forward in forwards:
            model.forward = forward
        for module, training in modes:
            module.training = training
        for parameter, requires_grad in grads:
            parameter.requires_grad_(requires_grad)
