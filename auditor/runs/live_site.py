"""Models in memory as the place of an audit: those of a training script, or a `LanguageModel` of one's own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from itertools import combinations
from pathlib import Path
from typing import Any

import torch

from auditor.core.errors import AuditError
from auditor.core.plan import Plan
from auditor.core.plan_parts import LoadingOptions
from auditor.models import agreement, self_check
from auditor.models.base import LanguageModel
from auditor.models.huggingface import HuggingFaceModel
from auditor.privacy.gradient_canaries import GradientCanaries
from auditor.privacy.promises import PrivacyRecord
from auditor.runs.own_site import OwnSite
from auditor.runs.reporter import Reporter
from auditor.runs.shared import Shared


class LiveSite(OwnSite):
    """A model of the user's own that is in memory, in the roles that `live` names: model, public, reference.

    The plan names them as `name_of` does. Nothing beside them is believed of what lies in the folder that a live model
    was once loaded from, as its weights may have moved since: no promise of privacy is read, and the digest is that of
    the weights in memory, where the model tells one.
    """

    def __init__(self, plan: Plan, reporter: Reporter, shared: Shared, live: Mapping[str, LanguageModel]) -> None:
        super().__init__(plan, reporter, shared)
        self.live = live

    @property
    def privacy(self) -> PrivacyRecord | None:
        return None if "model" in self.live else super().privacy

    @property
    def canaries(self) -> GradientCanaries | None:
        return None if "model" in self.live else super().canaries

    def weights(self) -> dict[str, str]:
        return {**super().weights(), **self._in_memory}

    @cached_property
    def _in_memory(self) -> dict[str, str]:
        """Read once: a run asks twice, as a hub may send files in between, which memory does not."""
        return {f"{role}/in memory": digest for role, live in self.live.items() if (digest := live.digest())}

    def check_model(self) -> None:
        if "model" not in self.live:
            super().check_model()

    @property
    def distribution(self) -> bool:
        return "distribution" in self.live["model"].capabilities if "model" in self.live else super().distribution

    def _load(self, kind: str, name: str, options: LoadingOptions | None = None) -> LanguageModel:
        return self.live[kind] if kind in self.live else super()._load(kind, name, options)


def is_live(kind: str, given: Any) -> bool:
    """Whether it is a model, rather than a folder, a hub id or None. Raises AuditError for anything else."""
    if given is None or isinstance(given, (str, Path)):
        return False
    if not isinstance(given, LanguageModel) and not hasattr(given, "get_input_embeddings"):
        got = type(given).__name__
        raise AuditError(f"expected {kind} as a folder, a hub id, a transformers model or a LanguageModel, got {got}")
    return True


def check_apart(given: Mapping[str, Any]) -> None:
    """Refuses two models that share weights: an adapter changes its base in place, which is then no other model.

    One model may be both `public` and `reference`.
    """
    for (role, model), (other, one) in combinations(given.items(), 2):
        if one is model and role != "model":
            continue
        if one is model or _parameters(model) & _parameters(one):
            raise AuditError(
                f"expected {other} as a model of its own, got one that shares weights with {role}: "
                "an adapter changes its base in place; load the other anew"
            )


def _parameters(model: Any) -> set[int]:
    return {id(parameter) for parameter in model.parameters()} if isinstance(model, torch.nn.Module) else set()


def name_of(model: Any) -> str:
    """`GPT2LMHeadModel in memory`: no folder and no name on a hub."""
    return f"{type(model).__name__} in memory"


def wrapped(model: Any, tokenizer: Any) -> LanguageModel:
    """A live causal LM, checked as one that is loaded; a `LanguageModel` brings its own tokenizer.

    Raises AuditError for distributions that do not agree.
    """
    if isinstance(model, LanguageModel):
        agreement.check(model)
        return model
    found = HuggingFaceModel(model, tokenizer, name=name_of(model))
    self_check.check(found)
    return found


@contextmanager
def left_as_it_was(*models: Any) -> Iterator[None]:
    """An audit sets models to evaluation and asks for no gradients of their weights; training goes on afterwards."""
    models = tuple(model for model in models if isinstance(model, torch.nn.Module))
    modes = [(module, module.training) for model in models for module in model.modules()]
    grads = [(parameter, parameter.requires_grad) for model in models for parameter in model.parameters()]
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
        for parameter, wanted in grads:
            parameter.requires_grad_(wanted)
