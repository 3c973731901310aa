"""The forms in which a model is deployed: its adapter merged, its weights pruned or rounded to so many bits.

Each is a configuration beside the full-precision one, asked for the same secrets: what changes is paired by secret.
Nothing is promised of any.
"""

from __future__ import annotations

import copy
import warnings
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, ClassVar

import torch
from peft import PeftModel
from torch import Tensor
from torch.nn.utils import prune
from transformers.pytorch_utils import Conv1D

from auditor.core.errors import AuditError, wrap_library_errors
from auditor.defenses import gguf_types
from auditor.models.base import LanguageModel
from auditor.models.configuration import quantisation_method
from auditor.models.consistency import SEED
from auditor.models.huggingface import HuggingFaceModel
from auditor.plugins.defense import Defense, Scenario

_GROUP = 64  # weights of a row that share a scale
_TRIED = 16  # tokens of the texts on which merging is checked
# Of the spread of log-probabilities, in which an unrelated distribution is 1.4 or more away. Measured on a tiny model
# whose 4-bit weights were rounded again: 0.46; with the codes of another layout read as weights: 2.0.
_MERGED_APART = 1.0


@dataclass(frozen=True)
class DeployedForm(Defense):
    """Base: a copy of the target, its adapter merged, changed. Raises AuditError for a model behind an API."""

    claims: ClassVar[str] = "none: a form in which the model is deployed"
    form: ClassVar[bool] = True
    changes_weights: ClassVar[bool] = True  # so that weights in few bits, which are codes, cannot take it
    float32: ClassVar[bool] = True  # bfloat16 would round what a form of 8 bits has rounded

    def claim(self, scenario: Scenario, spent: int) -> None:
        """None. Asked before anything else: AuditError for a model without weights here, before hours are spent."""
        self._require_transformers_model(scenario.target)

    def protect(self, scenario: Scenario) -> LanguageModel:
        target = self._require_transformers_model(scenario.target)
        with torch.no_grad():
            own = self.convert_to_deployed_form(copy_with_adapter_merged(target))
        return HuggingFaceModel(own.eval(), target.tokenizer, f"{target.name}, {self.name}")

    def _require_transformers_model(self, target: LanguageModel) -> HuggingFaceModel:
        """Return the target if this form can be made of it. Raises AuditError."""
        if not isinstance(target, HuggingFaceModel):
            raise AuditError(
                f"expected a transformers model for {self.name}, whose weights it changes: got {target.name}"
            )
        if target.activation:
            raise AuditError(
                f"expected an adapter that can be merged for {self.name}, got {target.name!r}, an activated LoRA: it "
                "changes only the tokens after its invocation"
            )
        if isinstance(target.model, PeftModel) and not hasattr(target.model.base_model, "merge_and_unload"):
            raise AuditError(
                f"expected an adapter that can be merged for {self.name}, got {target.name!r}, a tuned prompt, which "
                "is not in the weights"
            )
        if self.changes_weights and (method := quantisation_method(target.model)):
            raise AuditError(
                f"expected weights in full precision for {self.name}, got {target.name!r}, quantised by {method}: its "
                "weights are codes, not numbers; audit it loaded without quantisation (--base MODEL, no --quantise)"
            )
        return target

    @abstractmethod
    def convert_to_deployed_form(self, model: Any) -> Any:
        """The model in this form: the one given, changed in place, or another. AuditError where it cannot take it."""


@dataclass(frozen=True)
class MergedForm(DeployedForm):
    """Serve the adapter merged into its base: nothing but rounding may change. No claim."""

    name: ClassVar[str] = "merged"
    title: ClassVar[str] = "Merged"
    changes_weights: ClassVar[bool] = False

    def convert_to_deployed_form(self, model: Any) -> Any:
        return model

    def remarks(self, scenario: Scenario) -> tuple[str, ...]:
        if isinstance(getattr(scenario.target, "model", None), PeftModel):
            return ()
        return ("merged: the target is no adapter, so that nothing was merged: these are its own answers",)


@dataclass(frozen=True)
class PrunedForm(DeployedForm):
    """Set the smallest weights of every linear layer to 0 (magnitude pruning; Han et al. 2015). No claim.

    share: of each layer's weights that go.
    """

    name: ClassVar[str] = "pruned"
    title: ClassVar[str] = "Pruned"
    share: float = 0.5

    def __post_init__(self) -> None:
        if not 0 < self.share < 1:
            raise AuditError(f"expected share between 0 and 1, got {self.share:g}")

    def convert_to_deployed_form(self, model: Any) -> Any:
        for layer in linear_layers_to_compress(model):
            # A float amount is a share of this layer; a whole number would be one of weights.
            prune.l1_unstructured(layer, "weight", amount=self.share)
            # Without this a hook would mask the weights anew at every forward pass, and `weight` be no parameter.
            prune.remove(layer, "weight")
        return model


@dataclass(frozen=True)
class RoundedForm(DeployedForm):
    """Base: every linear layer's weights to the nearest of 2^bits - 1 levels, a scale each 64 weights. No claim.

    What a weight-only quantisation makes of answers, without its speed.
    """

    bits: ClassVar[int]

    def convert_to_deployed_form(self, model: Any) -> Any:
        return compress_linear_weights(model, lambda weight: round_weights_to_bits(weight, self.bits))


@dataclass(frozen=True)
class Int8(RoundedForm):
    """Round every linear layer's weights to 8 bits, symmetric, a scale each 64 weights. No claim."""

    name: ClassVar[str] = "int8"
    title: ClassVar[str] = "8 bits"
    bits: ClassVar[int] = 8


@dataclass(frozen=True)
class Int4(RoundedForm):
    """Round every linear layer's weights to 4 bits, symmetric, a scale each 64 weights. No claim."""

    name: ClassVar[str] = "int4"
    title: ClassVar[str] = "4 bits"
    bits: ClassVar[int] = 4


@dataclass(frozen=True)
class LoadedIn4Bit(DeployedForm):
    """Base: every linear layer in 4 bits by bitsandbytes, as `load_in_4bit` holds it, read back. No claim.

    Blocks of 64 weights, whose scales are quantised too, as with `bnb_4bit_use_double_quant`.
    """

    def __post_init__(self) -> None:
        if find_spec("bitsandbytes") is None:
            raise AuditError(f"--forms {self.name} needs the package bitsandbytes: pip install bitsandbytes")

    def convert_to_deployed_form(self, model: Any) -> Any:
        return compress_linear_weights(model, lambda weight: bitsandbytes_round_trip(weight, self.name))


@dataclass(frozen=True)
class Nf4(LoadedIn4Bit):
    """Quantise every linear layer to bitsandbytes' NormalFloat, QLoRA's type (arXiv 2305.14314). No claim."""

    name: ClassVar[str] = "nf4"
    title: ClassVar[str] = "bitsandbytes nf4"


@dataclass(frozen=True)
class Fp4(LoadedIn4Bit):
    """Quantise every linear layer to bitsandbytes' 4-bit floats, the default of `load_in_4bit`. No claim."""

    name: ClassVar[str] = "fp4"
    title: ClassVar[str] = "bitsandbytes fp4"


@dataclass(frozen=True)
class GgufForm(DeployedForm):
    """Write every weight matrix, embeddings too, as a GGUF file of one type holds it, and read it back. No claim.

    type: q8_0, q6_k, q5_k, q4_k, q3_k, q5_k_m, q4_k_m, q5_1, q5_0, q4_1, q4_0, bf16 or f16; those with a k need
    llama-cpp-python. A row that its blocks do not fill goes to another type, as in llama.cpp. Asked in full precision:
    llama.cpp also rounds what goes through the layers; --forms llama:FILE.gguf asks a file as it does.
    """

    name: ClassVar[str] = "gguf"
    title: ClassVar[str] = "GGUF"
    type: str = "q8_0"

    def __post_init__(self) -> None:
        gguf_types.check_writable_gguf_type(self.type)

    def convert_to_deployed_form(self, model: Any) -> Any:
        gguf_types.round_trip_model_weights_by_gguf(model, self.type)
        return model


def copy_with_adapter_merged(target: HuggingFaceModel) -> Any:
    """Return a copy of the model, its adapter merged into its base: merging and rounding write over weights.

    Raises AuditError if the merged weights give another distribution: then they are not what the adapter was
    trained to. bitsandbytes 0.50.2 lays 4-bit weights out anew at the first forward on processors with AVX512-BF16, and
    PEFT 0.21.2 merges into what it takes for the old layout: so a quantised model is loaded again.
    """
    if not isinstance(target.model, PeftModel):
        return copy.deepcopy(target.model)
    is_quantised = bool(quantisation_method(target.model))
    is_reloaded = is_quantised and target.load_again is not None
    adapted = target.load_again() if is_reloaded and target.load_again else copy.deepcopy(target.model)
    with warnings.catch_warnings(), wrap_library_errors(f"cannot merge the adapter of {target.name!r} into its base"):
        warnings.filterwarnings("ignore", message="Merge lora module to")  # the rounding is what is measured
        merged = adapted.merge_and_unload()
    noise = torch.Generator().manual_seed(SEED)
    length = min(_TRIED, target.max_positions or _TRIED)
    texts = torch.randint(target.vocab_size, (2, length), generator=noise)
    before = target.log_probs(texts, length)
    after = HuggingFaceModel(merged.eval(), name=f"{target.name}, merged").log_probs(texts, length)
    difference = torch.where(after == before, 0.0, after - before)  # -inf is -inf
    apart = float(difference.square().mean(-1).sqrt().mean())
    spread = float(before[torch.isfinite(before)].std())
    if apart > _MERGED_APART * spread:
        advice = "" if is_reloaded or not is_quantised else "; give the model as a folder, which is loaded again"
        raise AuditError(
            f"expected the adapter of {target.name!r} merged into its base to give the same distribution but for "
            f"rounding, got one that is {apart:.2g} nats away (its spread is {spread:.2g}){advice}"
        )
    return merged


def bitsandbytes_round_trip(weight: Tensor, type: str) -> Tensor:
    """(out, in), quantised to `nf4` or `fp4` and read back: what a layer of that library multiplies with."""
    # An optional package: `LoadedIn4Bit` has seen to it that it is there.
    import bitsandbytes.functional as quantisers

    packed, state = quantisers.quantize_4bit(
        weight.contiguous(), blocksize=64, compress_statistics=True, quant_type=type
    )
    found: Tensor = quantisers.dequantize_4bit(packed, state)
    return found


def round_weights_to_bits(weight: Tensor, bits: int) -> Tensor:
    """(out, in): each group of a row to the nearest multiple of its largest size / (2^(bits - 1) - 1)."""
    most = 2 ** (bits - 1) - 1
    parts = []
    # The last group of a row may be shorter.
    for part in weight.float().split(_GROUP, dim=1):
        scale = part.abs().amax(1, keepdim=True) / most
        # A group of zeros has no scale: 0/0 would be NaN.
        parts.append(torch.where(scale > 0, (part / scale).round() * scale, part))
    return torch.cat(parts, 1).to(weight.dtype)


def compress_linear_weights(model: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Puts `change` of each linear weight, (out, in), in its place: weights that share a scale lie in one row."""
    for layer in linear_layers_to_compress(model):
        weight = layer.weight.data
        turned = isinstance(layer, Conv1D)  # Conv1D keeps (in, out)
        own = change(weight.T if turned else weight)
        weight.copy_(own.T if turned else own)
    return model


def linear_layers_to_compress(model: Any) -> list[Any]:
    """All but the output layer, which quantisers and pruners leave as it is. Raises AuditError where there is none."""
    kept = {id(layer) for layer in (model.get_output_embeddings(),) if layer is not None}
    found = [m for m in model.modules() if isinstance(m, torch.nn.Linear | Conv1D) and id(m) not in kept]
    if not found:
        raise AuditError("expected a model with linear layers to change the weights of, got none")
    return found
