"""Audit a model as it is deployed: with a merged adapter, pruned weights or rounded weights.

Each deployed form is audited with the secrets of the full-precision model, so that changes are
paired by secret. No form makes a privacy claim.
"""

from __future__ import annotations

import copy
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from operator import itemgetter
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.utils import prune
from transformers.pytorch_utils import Conv1D

from auditor.core.errors import AuditError, wrap_library_errors
from auditor.defenses import gguf_types
from auditor.models.base import LanguageModel
from auditor.models.configuration import get_quantisation_method
from auditor.models.consistency import SEED
from auditor.models.huggingface import HuggingFaceModel
from auditor.plugins.defense import Defense, Scenario
from auditor.plugins.options import Share

_GROUP = 64  # weights of a row that share a scale
_TEST_LENGTH = 16  # tokens of the texts on which merging is checked
# Of the spread of log-probabilities; an unrelated distribution is 1.4 or more away. Measured on a
# tiny model whose 4-bit weights were rounded again: 0.46; with codes of another layout read as
# weights: 2.0.
_MAX_MERGE_DISTANCE = 1.0


@dataclass(frozen=True)
class DeployedForm(Defense):
    """Define the base of deployed forms, which change a copy of the model with a merged adapter.

    Raise AuditError for a model behind an API.
    """

    claims = "none: a form in which the model is deployed"
    form = True
    # Forms that change weights need numbers, not the codes of quantised weights.
    changes_weights: ClassVar[bool] = True
    float32 = True  # bfloat16 would round 8-bit weights again

    def claim(self, scenario: Scenario, n_tokens: int) -> None:
        """Return None after checking that the model's weights are available.

        Raise AuditError if they are not.
        """
        self._require_transformers_model(scenario.target)

    def protect(self, scenario: Scenario) -> LanguageModel:
        target = self._require_transformers_model(scenario.target)
        with torch.no_grad():
            model = self.convert_model(merge_adapter_copy(target))
        return HuggingFaceModel(model.eval(), target.tokenizer, f"{target.name}, {self.name}")

    def _require_transformers_model(self, target: LanguageModel) -> HuggingFaceModel:
        """Return the model; raise AuditError if it is not a convertible transformers model."""
        if not isinstance(target, HuggingFaceModel):
            raise AuditError(
                f"expected a transformers model for {self.name}, whose weights it changes: got "
                f"{target.name}"
            )
        if target.activation:
            raise AuditError(
                f"expected an adapter that can be merged for {self.name}, got {target.name!r}, an "
                "activated LoRA: it changes only the tokens after its invocation"
            )
        from peft import PeftModel

        base_model = getattr(target.model, "base_model", None)
        if isinstance(target.model, PeftModel) and not hasattr(base_model, "merge_and_unload"):
            raise AuditError(
                f"expected an adapter that can be merged for {self.name}, got {target.name!r}, a "
                "tuned prompt, which is not in the weights"
            )
        method = get_quantisation_method(target.model)
        if self.changes_weights and method:
            raise AuditError(
                f"expected weights in full precision for {self.name}, got {target.name!r}, "
                f"quantised by {method}: its weights are codes, not numbers; audit it loaded "
                "without quantisation (--base MODEL, no --quantise)"
            )
        return target

    @abstractmethod
    def convert_model(self, model: Any) -> Any:
        """Return the converted model, which may be `model` changed in place or a new model.

        Raise AuditError if the model cannot be converted.
        """


@dataclass(frozen=True)
class MergedForm(DeployedForm):
    """Merge the adapter into its base model, which changes only the rounding.

    This form makes no privacy claim.
    """

    name = "merged"
    title = "Merged"
    changes_weights = False

    def convert_model(self, model: Any) -> Any:
        return model

    def remarks(self, scenario: Scenario) -> tuple[str, ...]:
        from peft import PeftModel

        if isinstance(getattr(scenario.target, "model", None), PeftModel):
            return ()
        return ("merged: the target is not an adapter, so these are its unchanged answers",)


@dataclass(frozen=True)
class PrunedForm(DeployedForm):
    """Set the smallest weights of every linear layer to 0 (magnitude pruning; Han et al. 2015).

    This form makes no privacy claim.

    share: the share of each layer's weights to remove.
    """

    name = "pruned"
    title = "Pruned"
    share: Share = 0.5

    def convert_model(self, model: Any) -> Any:
        # A float amount is a share of the weights; an integer would be their number.
        smallest = prune.L1Unstructured(self.share)
        return compress_linear_weights(model, lambda weight: smallest.prune(weight.contiguous()))


@dataclass(frozen=True)
class RoundedForm(DeployedForm):
    """Define the base of forms that round linear weights to 2^bits - 1 levels.

    Every 64 weights share a scale. The outputs are those of weight-only quantisation, but the model
    is not faster. No privacy claim is made.
    """

    bits: ClassVar[int]

    def convert_model(self, model: Any) -> Any:
        return compress_linear_weights(
            model,
            lambda weight: round_weights(weight, self.bits),
        )


@dataclass(frozen=True)
class Int8(RoundedForm):
    """Round linear weights to 8 bits, symmetrically, with a scale for every 64 weights.

    This form makes no privacy claim.
    """

    name = "int8"
    title = "8 bits"
    bits = 8


@dataclass(frozen=True)
class Int4(RoundedForm):
    """Round linear weights to 4 bits, symmetrically, with a scale for every 64 weights.

    This form makes no privacy claim.
    """

    name = "int4"
    title = "4 bits"
    bits = 4


@dataclass(frozen=True)
class LoadedIn4Bit(DeployedForm):
    """Define the base of forms that quantise linear layers like bitsandbytes' `load_in_4bit`.

    A block has 64 weights and a scale, which is quantised too (`bnb_4bit_use_double_quant`). No
    privacy claim is made.
    """

    def __post_init__(self) -> None:
        if find_spec("bitsandbytes") is None:
            raise AuditError(
                f"--forms {self.name} needs the package bitsandbytes: pip install bitsandbytes",
            )

    def convert_model(self, model: Any) -> Any:
        return compress_linear_weights(
            model,
            lambda weight: quantise_bitsandbytes(weight, self.name),
            experts=False,  # transformers 5.23 loads them in full precision
        )


@dataclass(frozen=True)
class Nf4(LoadedIn4Bit):
    """Quantise linear layers to bitsandbytes' NormalFloat, the type of QLoRA (arXiv 2305.14314).

    This form makes no privacy claim.
    """

    name = "nf4"
    title = "bitsandbytes nf4"


@dataclass(frozen=True)
class Fp4(LoadedIn4Bit):
    """Quantise linear layers to bitsandbytes' 4-bit floats, the default of `load_in_4bit`.

    This form makes no privacy claim.
    """

    name = "fp4"
    title = "bitsandbytes fp4"


@dataclass(frozen=True)
class GgufForm(DeployedForm):
    """Quantise all weight matrices, embeddings included, as in a GGUF file.

    This form makes no privacy claim. Activations remain in full precision here, whereas llama.cpp
    also rounds them. To audit a file with llama.cpp, use --forms llama:FILE.gguf.

    type: q8_0, q6_k, q5_k, q4_k, q3_k, q5_k_m, q4_k_m, q5_1, q5_0, q4_1, q4_0, bf16 or f16. Types
    with a k need llama-cpp-python. If a matrix row is not a whole number of blocks, the matrix gets
    a different type, as in llama.cpp.
    """

    name = "gguf"
    title = "GGUF"
    type: str = "q8_0"

    def __post_init__(self) -> None:
        gguf_types.check_writable_gguf_type(self.type)

    def convert_model(self, model: Any) -> Any:
        matrices = gguf_types.list_matrix_types(model, self.type)
        _check_most_weights_change(model, list(map(itemgetter(1), matrices)))
        gguf_types.quantise_model_weights(model, self.type)
        return model


def merge_adapter_copy(target: HuggingFaceModel) -> Any:
    """Return a copy of the model with its adapter merged; the copy's weights may be overwritten.

    A quantised model is loaded again instead of copied. bitsandbytes 0.50.2 may change the layout
    of 4-bit weights at the first forward pass (on AVX512-BF16), and PEFT 0.21.2 does not notice
    this.

    Raise AuditError if merging changes the model's distribution.
    """
    from peft import PeftModel

    if not isinstance(target.model, PeftModel):
        return copy.deepcopy(target.model)
    is_quantised = bool(get_quantisation_method(target.model))
    if is_quantised and target.load_again is not None:
        adapted = target.load_again()
    else:
        adapted = copy.deepcopy(target.model)
    action = f"cannot merge the adapter of {target.name!r} into its base"
    with warnings.catch_warnings(), wrap_library_errors(action):
        # PEFT warns of rounding, which this form measures.
        warnings.filterwarnings("ignore", message="Merge lora module to")
        merged = adapted.merge_and_unload()
    rng = torch.Generator().manual_seed(SEED)
    length = min(_TEST_LENGTH, target.max_positions or _TEST_LENGTH)
    texts = torch.randint(target.vocab_size, (2, length), generator=rng)
    before = target.log_probs(texts, length)
    merged_model = HuggingFaceModel(merged.eval(), name=f"{target.name}, merged")
    after = merged_model.log_probs(texts, length)
    # Equal values have distance 0, two -inf included.
    difference = torch.where(after == before, 0.0, after - before)
    distance = float(difference.square().mean(-1).sqrt().mean())
    spread = float(before[torch.isfinite(before)].std())
    if distance > _MAX_MERGE_DISTANCE * spread:
        advice = ""
        if is_quantised and target.load_again is None:
            advice = "; give the model as a folder, which is loaded again"
        raise AuditError(
            f"expected the adapter of {target.name!r} merged into its base to give the same "
            f"distribution except for rounding, got one that is {distance:.2g} nats away (its "
            f"spread is {spread:.2g}){advice}"
        )
    return merged


def quantise_bitsandbytes(weight: Tensor, type: str) -> Tensor:
    """Quantise (out, in) weights to `nf4` or `fp4`, and return them dequantised.

    A quantised layer computes with the dequantised weights.
    """
    # An optional package; `LoadedIn4Bit` checks that it is installed.
    import bitsandbytes.functional as quantisers

    packed, state = quantisers.quantize_4bit(
        weight.contiguous(), blocksize=64, compress_statistics=True, quant_type=type
    )
    dequantised: Tensor = quantisers.dequantize_4bit(packed, state)
    return dequantised


def round_weights(weight: Tensor, bits: int) -> Tensor:
    """Round (out, in) weights to `bits` bits, with a scale for each group of weights in a row.

    A group's weights become multiples of its largest absolute value / (2^(bits - 1) - 1).
    """
    max_level = 2 ** (bits - 1) - 1
    parts = []
    # The last group of a row may be shorter.
    for part in weight.float().split(_GROUP, dim=1):
        scale = part.abs().amax(1, keepdim=True) / max_level
        # A group of zeros has no scale: 0/0 would be NaN.
        parts.append(torch.where(scale > 0, (part / scale).round() * scale, part))
    return torch.cat(parts, 1).to(weight.dtype)


def compress_linear_weights(
    model: Any, change: Callable[[Tensor], Tensor], experts: bool = True
) -> Any:
    """Replace each linear weight (out, in) by the result of `change`, and return the model.

    Weights that share a scale must be in the same matrix row. `experts` says whether those of a
    mixture's experts are replaced, too. Raise AuditError if then most weights are of another kind.
    """
    weights = list(map(_orient_linear_weight, list_compressible_layers(model)))
    if experts:
        weights += _list_expert_weights(model)
        _check_most_weights_change(model, weights)
    for weight in weights:
        weight.copy_(change(weight))
    return model


def _orient_linear_weight(layer: Any) -> Tensor:
    """Return a linear layer's weights as (out, in)."""
    weight: Tensor = layer.weight.data
    if isinstance(layer, Conv1D):  # stores (in, out)
        return weight.T
    return weight


def _list_expert_weights(model: Any) -> list[Tensor]:
    """Return the weights (out, in) of each expert that transformers stacks with the others."""
    weights = list[Tensor]()
    for module in model.modules():
        is_transposed = getattr(module, "is_transposed", None)
        if is_transposed is None:
            continue
        for stack in module.parameters(recurse=False):
            if stack.ndim != 3:
                continue
            matrices = stack.data
            if is_transposed:
                matrices = matrices.mT
            weights += matrices
    return weights


def _check_most_weights_change(model: Any, changed: Sequence[Tensor]) -> None:
    """Raise AuditError unless these weights are most of those outside the embeddings."""
    head = model.get_output_embeddings()
    embedded = dict[int, Tensor]()
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding) or module is head:
            embedded |= {weight.data_ptr(): weight for weight in module.parameters()}

    def count(weights: Iterable[Tensor]) -> int:
        return sum(weight.numel() for weight in weights if weight.data_ptr() not in embedded)

    n_changed = count(changed)
    n_weights = count(model.parameters())
    if 2 * n_changed < n_weights:
        raise AuditError(
            f"expected most weights of {model.config.model_type} in matrices that this form "
            f"changes, got {n_changed:,} of {n_weights:,}: the others are experts or another kind"
        )


def list_compressible_layers(model: Any) -> list[Any]:
    """Return all linear layers except the output layer, which quantisers and pruners skip.

    Raise AuditError if there are none.
    """
    output_layer = model.get_output_embeddings()
    layers = []
    for module in model.modules():
        if isinstance(module, torch.nn.Linear | Conv1D) and module is not output_layer:
            layers.append(module)
    if not layers:
        raise AuditError("expected a model with linear layers to change the weights of, got none")
    return layers
