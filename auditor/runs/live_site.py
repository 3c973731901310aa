"""Live transformers objects as the place of an audit: what a notebook or a training script holds in memory."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from itertools import combinations
from pathlib import Path
from typing import Any, ClassVar

import torch

from auditor.core.errors import AuditError
from auditor.core.plan import Plan
from auditor.models.huggingface import HuggingFaceModel
from auditor.models.loading import LoadingOptions
from auditor.models.self_check import check
from auditor.privacy.gradient_canaries import GradientCanaries
from auditor.privacy.promises import PrivacyRecord
from auditor.runs.own_site import OwnSite
from auditor.runs.reporter import Reporter
from auditor.runs.shelf import Shelf


class LiveSite(OwnSite):
    """A model of the user's own that is in memory, in the roles that `live` names: model, public, reference.

    The plan names them as `name_of` does. Nothing beside them is believed of what lies in the folder that a live model
    was once loaded from, as its weights may have moved since: no promise of privacy is read, and the digest is that of
    the weights in memory.
    """

    in_plan: ClassVar[bool] = False

    def __init__(self, plan: Plan, reporter: Reporter, shelf: Shelf, live: Mapping[str, HuggingFaceModel]) -> None:
        super().__init__(plan, reporter, shelf)
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
        return {f"{role}/in memory": _digest(live) for role, live in self.live.items()}

    def _load(self, kind: str, name: str, options: LoadingOptions | None = None) -> HuggingFaceModel:
        return self.live[kind] if kind in self.live else super()._load(kind, name, options)


def is_live(kind: str, given: Any) -> bool:
    """Whether it is a model, rather than a folder, a hub id or None. Raises AuditError for anything else."""
    if given is None or isinstance(given, (str, Path)):
        return False
    if not isinstance(given, torch.nn.Module) or not hasattr(given, "get_input_embeddings"):
        raise AuditError(f"expected {kind} as a folder, a hub id or a transformers model, got {type(given).__name__}")
    return True


def check_apart(given: Mapping[str, Any]) -> None:
    """Refuses two models that share weights: an adapter changes its base in place, which is then no other model.

    One model may be both `public` and `reference`.
    """
    for (role, model), (other, one) in combinations(given.items(), 2):
        if one is model and role != "model":
            continue
        if {id(parameter) for parameter in model.parameters()} & {id(parameter) for parameter in one.parameters()}:
            raise AuditError(
                f"expected {other} as a model of its own, got one that shares weights with {role}: "
                "an adapter changes its base in place; load the other anew"
            )


def name_of(model: Any) -> str:
    """`GPT2LMHeadModel in memory`: no folder and no name on a hub."""
    return f"{type(model).__name__} in memory"


def wrapped(model: Any, tokenizer: Any) -> HuggingFaceModel:
    """A live causal LM, checked as one that is loaded. Raises AuditError for laws that do not agree (`self_check`)."""
    found = HuggingFaceModel(model, tokenizer, name=name_of(model))
    check(found)
    return found


@contextmanager
def left_as_it_was(*models: Any) -> Iterator[None]:
    """An audit sets models to evaluation and asks for no gradients of their weights; training goes on afterwards."""
    modes = [(module, module.training) for model in models for module in model.modules()]
    grads = [(parameter, parameter.requires_grad) for model in models for parameter in model.parameters()]
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
        for parameter, wanted in grads:
            parameter.requires_grad_(wanted)


def _digest(live: HuggingFaceModel) -> str:
    """SHA-256 of names, shapes and bytes of the weights, in hex."""
    digest = hashlib.sha256()
    for name, tensor in live.model.state_dict().items():
        digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
