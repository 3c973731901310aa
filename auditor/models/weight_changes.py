"""Score texts by the change of weights from a reference model to a model trained from it.

The score of a text is the inner product of the weight change and the negative gradient of the
text's loss at the reference's weights, divided by the norm of the gradient:

    score = <theta - theta_0, -g> / ||g||,    g = d loss(text; theta_0) / d theta.

DP-SGD moves the weights along the negative clipped gradients of its records, so the score is higher
for included texts. These are the gradient canaries of Nasr et al. 2023 and Steinke et al. 2023,
Section 6, with the finished weights instead of each step's release. The score sees, to first order,
what the loss sees, but no curvature, and it weighs each text as clipping does.

Only trained parameters count. A LoRA layer adds s B A to a weight, with B = 0 before training; its
parameter is B, and A is the trained one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from auditor.core.errors import NotApplicable
from auditor.core.nouns import Tokens
from auditor.models.base import LanguageModel
from auditor.models.configuration import get_quantisation_method, unwrap_peft
from auditor.models.huggingface import HuggingFaceModel
from auditor.models.wrapping import WrappingModel

_NEEDS = "needs the weights of the model and of its reference for score=gradient"


@dataclass(frozen=True)
class _TrainedWeight:
    """A trained parameter of the reference model.

    Attributes:
        change: trained value minus the value before training, (out, in); for LoRA, of B (out, r).
        factor: for LoRA, s A (r, in); otherwise None.
        is_transposed: whether the weight is stored as (in, out), as in GPT-2's linear layers.
    """

    change: Tensor
    factor: Tensor | None = None
    is_transposed: bool = False

    def add_step(self, weight: Tensor, step: Tensor) -> Tensor:
        """Return the weight after adding a step to the trained parameter."""
        update = step
        if self.factor is not None:
            update = step @ self.factor
        if self.is_transposed:
            update = update.T
        return (weight + update).to(weight.dtype)


class WeightChange:
    """The change of weights from the reference to the target.

    Raise NotApplicable if the weights of a model are not available here, if weights differ in name
    or shape, if the adapter is not a plain LoRA, or if no weight changed.
    """

    def __init__(self, target: LanguageModel, reference: LanguageModel) -> None:
        self._model = _get_weights_model(reference).model
        self._prefix_token = target.prefix_token
        trained = _get_weights_model(target).model
        if unwrap_peft(self._model) is not self._model:
            raise NotApplicable(f"{_NEEDS}, and a reference without an adapter")
        self._weights = dict(self._model.named_parameters(remove_duplicate=False))
        self._is_adapter = unwrap_peft(trained) is not trained
        if self._is_adapter:
            changes = _list_adapter_changes(trained, self._weights)
        else:
            changes = _list_whole_changes(trained, self._weights)
        self._changes = {}
        for name, change in changes.items():
            if bool(change.change.any()):
                self._changes[name] = change
        if not self._changes:
            raise NotApplicable(f"{_NEEDS}, which differ, and got equal weights")

    def score_text(self, prefix: Tokens, suffix: Tokens) -> float:
        """Return the score of the suffix given the prefix; 0 if the gradient is 0."""
        steps = [
            torch.zeros_like(change.change, requires_grad=True) for change in self._changes.values()
        ]
        with torch.enable_grad():
            weights = {}
            for (name, change), step in zip(self._changes.items(), steps, strict=True):
                weights[name] = change.add_step(self._weights[name].detach(), step)
            loss = self._compute_nll(weights, (*self._prefix_token, *prefix), suffix)
            gradients = torch.autograd.grad(loss, steps)
        product = squares = 0.0
        for change, gradient in zip(self._changes.values(), gradients, strict=True):
            product -= float((gradient * change.change).sum(dtype=torch.float64))
            squares += float(gradient.square().sum(dtype=torch.float64))
        if squares == 0:
            return 0.0
        return product / squares**0.5

    def _compute_nll(self, weights: dict[str, Tensor], prefix: Tokens, suffix: Tokens) -> Tensor:
        """Return the mean negative log-likelihood of the suffix, in nats per token."""
        device = next(iter(weights.values())).device
        text = torch.tensor([[*prefix, *suffix]], device=device)
        # An adapter changes one of two tied matrices; a whole training changes both.
        output = functional_call(
            self._model,
            weights,
            kwargs={"input_ids": text, "use_cache": False},
            tie_weights=not self._is_adapter,
        )
        logits = output.logits[0, len(prefix) - 1 : -1].float()
        return nn.functional.cross_entropy(logits, text[0, len(prefix) :])


def _get_weights_model(model: LanguageModel) -> HuggingFaceModel:
    """Return the model that has the weights, without the wrapper that may add a prefix token."""
    inner = model
    if isinstance(model, WrappingModel) and model.prefix_token != model.model.prefix_token:
        inner = model.model
    if not isinstance(inner, HuggingFaceModel):
        raise NotApplicable(f"{_NEEDS}; {model.name} gives none")
    if get_quantisation_method(inner.model):
        raise NotApplicable(f"{_NEEDS}; those of {model.name} are quantised")
    return inner


def _list_whole_changes(trained: Any, weights: dict[str, Tensor]) -> dict[str, _TrainedWeight]:
    """Return the parameter changes of a whole model; tied parameters count only once."""
    trained_weights = dict(trained.named_parameters())
    unlike = set(trained_weights) - set(weights)
    for name in trained_weights.keys() & weights.keys():
        if trained_weights[name].shape != weights[name].shape:
            unlike.add(name)
    if unlike:
        raise NotApplicable(f"{_NEEDS}, of equal shapes; they differ in {min(unlike)}")
    changes = {}
    for name, weight in trained_weights.items():
        before = weights[name].detach()
        changes[name] = _TrainedWeight(weight.detach().to(before.device).float() - before.float())
    return changes


def _list_adapter_changes(trained: Any, weights: dict[str, Tensor]) -> dict[str, _TrainedWeight]:
    """Return the changes of layers with a plain LoRA adapter, keyed by the base's weight names."""
    changes = {}
    covered = set()
    for path, layer in trained.base_model.model.named_modules():
        if not hasattr(layer, "lora_B") or not len(layer.lora_B):
            continue
        adapter = layer.active_adapters[0]
        output_weight = layer.lora_B[adapter].weight
        input_weight = layer.lora_A[adapter].weight
        is_transposed = bool(getattr(layer, "fan_in_fan_out", False))
        name = f"{path}.weight"
        shape = [len(output_weight), input_weight.shape[1]]
        if is_transposed:
            shape.reverse()
        if name not in weights or list(weights[name].shape) != shape:
            raise NotApplicable(f"{_NEEDS}, of equal shapes; they differ in {name}")
        device = weights[name].device
        changes[name] = _TrainedWeight(
            output_weight.detach().to(device).float(),
            layer.scaling[adapter] * input_weight.detach().to(device).float(),
            is_transposed,
        )
        covered |= {id(output_weight), id(input_weight)}
    for name, parameter in trained.named_parameters():
        if ".base_layer." not in name and id(parameter) not in covered:
            plain = name.removeprefix("base_model.model.")
            if plain not in weights:
                raise NotApplicable(f"{_NEEDS}, with an adapter of plain LoRA only; got {plain}")
    return changes
