"""Score texts by the change of weights from a reference model to a model trained from it.

DP-SGD moves the weights along minus the clipped gradients of its records, so the change has a part
along minus the gradient of each included text (gradient canaries of Nasr et al. 2023 and Steinke et
al. 2023, Section 6, with the finished weights in place of each step's release). Gradients of texts
also share directions, along which every included text moves the weights. Ridge regression of the
change on the gradients of all n texts removes the shared part:

    (K + lambda (I - 11^T / n)) alpha = b,    b_i = <theta - theta_0, -g_i> / ||g_i||,
    K_ij = <g_i, g_j> / (||g_i|| ||g_j||),    g_i = d loss(text i; theta_0) / d theta,

with the mean of the scores alpha not shrunk. The scores see what the loss sees to first order, but
no curvature, and weigh each text as clipping does. b is exact. K is exact if n gradients fit in
1 GiB; otherwise it consists of inner products of CountSketches (Charikar et al. 2002) that fit, so
memory does not grow with n times the number of parameters.

Only trained parameters count. A LoRA layer adds s B A to a weight, with B = 0 before training; its
parameter is B, and A is the trained one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from auditor.core.arrays import Floats
from auditor.core.errors import NotApplicable
from auditor.core.nouns import Tokens
from auditor.core.secret_randomness import make_keyed_generator
from auditor.models.base import LanguageModel
from auditor.models.configuration import get_quantisation_method, unwrap_peft
from auditor.models.huggingface import HuggingFaceModel
from auditor.models.wrapping import WrappingModel

_NEEDS = "needs the weights of the model and of its reference for score=gradient"
_SKETCH_BYTES = 2**30  # for the sketches of all texts together
_RIDGE = 2.0  # lambda; each unit gradient adds 1 to the trace of K


@dataclass(frozen=True)
class _TrainedWeight:
    """A weight of the reference model, of shape (out, in), that training changed.

    The trained parameter is the weight itself, or the factor B of a LoRA update s B A.

    Attributes:
        change: trained value minus initial value of the parameter: (out, in), or (out, r) for B.
        factor: s A of a LoRA update, (r, in); otherwise None.
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

    def score_texts(
        self,
        texts: Sequence[tuple[Tokens, Tokens]],
        seed: int,
        progress: Callable[[int], None] = lambda n_done: None,
    ) -> Floats:
        """Return a membership score for each text, (n,).

        The score of a text is high if the weights changed along minus the text's gradient, as they
        do if the text was trained on.

        Args:
            texts: prefix and suffix of each text.
            seed: the seed of the sketches, which compress gradients.
            progress: callback(texts done).
        """

        def yield_gradients() -> Iterator[Sequence[Tensor]]:
            for i, (prefix, suffix) in enumerate(texts):
                progress(i)
                yield self._compute_gradients(prefix, suffix)
            progress(len(texts))

        steps = [change.change for change in self._changes.values()]
        return regress_weight_change(steps, yield_gradients, len(texts), seed)

    def _compute_gradients(self, prefix: Tokens, suffix: Tokens) -> Sequence[Tensor]:
        """Return the gradient of the suffix's loss by each trained parameter."""
        steps = [
            torch.zeros_like(change.change, requires_grad=True) for change in self._changes.values()
        ]
        with torch.enable_grad():
            weights = {}
            for (name, change), step in zip(self._changes.items(), steps, strict=True):
                weights[name] = change.add_step(self._weights[name].detach(), step)
            loss = self._compute_nll(weights, (*self._prefix_token, *prefix), suffix)
            return torch.autograd.grad(loss, steps)

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


def regress_weight_change(
    change: Sequence[Tensor],
    read_gradients: Callable[[], Iterable[Sequence[Tensor]]],
    n_texts: int,
    seed: int,
) -> Floats:
    """Return the score of each text: its coefficient in a ridge regression.

    The regression explains the change of weights by the texts' gradients, scaled to unit length.
    The module's docstring has the formula; the score is alpha. Scores do not depend on the order of
    the texts, and equal gradients have equal scores.

    Args:
        change: the change of each trained parameter.
        read_gradients: returns each text's gradients, in the shapes of the change. Called a second
            time if gradients are compressed.
        n_texts: the number of texts, n.
        seed: the seed of the sketches, which compress gradients.

    Returns:
        Scores (n,), in units of the change. A positive score means a change along minus the
            gradient.
    """
    n_parameters = sum(part.numel() for part in change)
    width = min(n_parameters, max(2, _SKETCH_BYTES // (4 * n_texts)))
    compress = _flatten_gradients
    if width < n_parameters:
        # The error of a sketch is a share of the common part of the gradients, so this part is kept
        # exactly.
        common = _find_common_direction(change, read_gradients())
        compress = _GradientSketch(common, width, seed).compress
    projections = np.zeros(n_texts)
    rows = torch.empty(n_texts, width)
    for i, gradients in enumerate(read_gradients()):
        norm = _compute_norm(gradients)
        projections[i] = -_multiply(change, gradients) / norm
        rows[i] = compress(gradients) / norm
    return _solve_ridge((rows @ rows.T).double().numpy(), projections)


def _multiply(first: Sequence[Tensor], second: Sequence[Tensor]) -> float:
    """Return the inner product of two lists of tensors of equal shapes."""
    product = 0.0
    for part, factor in zip(first, second, strict=True):
        product += float((part * factor).sum(dtype=torch.float64))
    return product


def _compute_norm(gradients: Sequence[Tensor]) -> float:
    """Return the Euclidean norm of the gradients, or 1 if all of them are 0.

    It is used as a divisor. A text whose gradients are 0 then gets the mean of all scores.
    """
    return _multiply(gradients, gradients) ** 0.5 or 1.0


def _flatten_gradients(gradients: Sequence[Tensor]) -> Tensor:
    """Return the gradients as one vector, float32 on the CPU."""
    return torch.cat([gradient.flatten().float().cpu() for gradient in gradients])


def _find_common_direction(
    change: Sequence[Tensor], gradients: Iterable[Sequence[Tensor]]
) -> list[Tensor]:
    """Return the unit vector along the sum of the unit gradients, in the shapes of the change."""
    total = list(map(torch.zeros_like, change))
    for text_gradients in gradients:
        norm = _compute_norm(text_gradients)
        for part, gradient in zip(total, text_gradients, strict=True):
            part += gradient / norm
    norm = _compute_norm(total)
    for part in total:
        part /= norm
    return total


class _GradientSketch:
    """A linear map of gradients to `width` numbers that keeps inner products on average.

    The last number is the part along `common`, a unit vector; the others are a CountSketch of the
    rest.
    """

    def __init__(self, common: Sequence[Tensor], width: int, seed: int) -> None:
        n_parameters = sum(part.numel() for part in common)
        self._n_bins = width - 1
        # A bin and a sign for each parameter: the second half of the bins is subtracted.
        rng = make_keyed_generator("gradient sketch", seed, width)
        bins = rng.integers(2 * self._n_bins, size=n_parameters, dtype=np.int32)
        self._bins = torch.from_numpy(bins)
        self._common = common
        self._common_sums = self._sum_bins(common)

    def compress(self, gradients: Sequence[Tensor]) -> Tensor:
        """Return the sketch of a text's gradients, (width,) float32 on the CPU."""
        share = _multiply(self._common, gradients)
        rest = self._sum_bins(gradients) - share * self._common_sums
        return torch.cat([rest, torch.tensor([share])])

    def _sum_bins(self, gradients: Sequence[Tensor]) -> Tensor:
        sums = torch.zeros(2 * self._n_bins)
        sums.index_add_(0, self._bins, _flatten_gradients(gradients))
        return sums[: self._n_bins] - sums[self._n_bins :]


def _solve_ridge(cosines: Floats, projections: Floats) -> Floats:
    """Return the solution alpha (n,) of (K + lambda (I - 11^T / n)) alpha = b.

    `cosines` is K (n, n), and `projections` is b (n,).
    """
    n = len(projections)
    # A millionth on the mean makes the matrix invertible, whatever K is.
    penalty = np.eye(n) - (1 - 1e-6) / n
    return np.asarray(np.linalg.solve(cosines + _RIDGE * penalty, projections))


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
    """Return each parameter of a full model (not an adapter) minus its value in `weights`.

    Tied parameters are listed once.
    """
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
