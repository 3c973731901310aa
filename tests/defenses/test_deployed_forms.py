"""Forms in which a model is deployed: what each does to weights and answers."""

from __future__ import annotations

import copy
import hashlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model

from auditor.benchmarks.data.fixed_distributions import FixedDistribution
from auditor.core.errors import AuditError
from auditor.defenses.deployed_forms import (
    GgufForm,
    Int4,
    Int8,
    MergedForm,
    Nf4,
    PrunedForm,
    list_compressible_layers,
    quantise_bitsandbytes,
    round_weights,
)
from auditor.defenses.gguf_types import round_gguf_rows
from auditor.models.huggingface import HuggingFaceModel
from auditor.testing import make_tiny_scenario
from tests.conftest import refuses
from tests.zoo import families as zoo

TOKENS = torch.tensor([[3, 1, 4, 1, 5]])


def adapted(model: HuggingFaceModel) -> HuggingFaceModel:
    """With an adapter that changes what it says."""
    own = get_peft_model(copy.deepcopy(model.model), LoraConfig(target_modules="all-linear", r=2))
    for name, parameter in own.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return HuggingFaceModel(own.eval(), model.tokenizer, "adapted")


@torch.no_grad()
def test_merging_changes_nothing_but_rounding() -> None:
    held = make_tiny_scenario()
    tuned = adapted(held.target)  # type: ignore[arg-type]
    merged = MergedForm().protect(replace(held, target=tuned))
    assert torch.allclose(merged.log_probs(TOKENS, 3), tuned.log_probs(TOKENS, 3), atol=1e-5)
    assert not torch.allclose(
        merged.log_probs(TOKENS, 3), held.target.log_probs(TOKENS, 3), atol=1e-2
    )


@torch.no_grad()
def test_pruning_sets_the_share_to_0_and_leaves_the_target_alone() -> None:
    held = make_tiny_scenario()
    before = held.target.log_probs(TOKENS, 3)
    pruned = PrunedForm(0.25).protect(held)
    models: list[Any] = [pruned, held.target]
    for own, was in zip(*(list_compressible_layers(one.model) for one in models), strict=True):
        gone = own.weight == 0
        assert gone.float().mean() == pytest.approx(0.25, abs=0.01)
        assert was.weight[gone].abs().max() <= was.weight[~gone].abs().min()
    assert torch.equal(held.target.log_probs(TOKENS, 3), before)


@torch.no_grad()
def test_fewer_bits_are_farther_off() -> None:
    held = make_tiny_scenario()
    whole = held.target.log_probs(TOKENS, 3)
    eight, four = (
        (kind().protect(held).log_probs(TOKENS, 3) - whole).abs().max() for kind in (Int8, Int4)
    )
    assert 0 < eight < four / 4


@pytest.mark.parametrize("bits", [4, 8])
def test_each_group_of_weights_has_its_own_levels(bits: int) -> None:
    weight = torch.randn(3, 100) * torch.tensor([[1.0], [100.0], [0.0]])
    found, most = round_weights(weight, bits), 2 ** (bits - 1) - 1
    for row in range(3):
        for part in (slice(0, 64), slice(64, 100)):
            scale = float(weight[row, part].abs().max()) / most
            expected = [
                round(float(x) / scale) * scale if scale else 0.0 for x in weight[row, part]
            ]
            assert found[row, part].tolist() == pytest.approx(expected, rel=1e-4, abs=1e-6)


@torch.no_grad()
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_the_weights_of_experts_are_changed_too(family: str) -> None:
    """Experts' matrices are stacked, as (out, in) or as (in, out), outside of linear layers."""
    place, is_turned = "model.layers.1.mlp.experts.gate_up_proj", family == "gpt_oss"
    rounded = Int4().convert_model(zoo.tiny(family))
    pruned = PrunedForm(0.25).convert_model(zoo.tiny(family))
    for expert, own in enumerate(zoo.tiny(family).get_parameter(place)):
        expected = round_weights(own.mT if is_turned else own, 4)
        found = rounded.get_parameter(place)[expert]
        assert torch.equal(found.mT if is_turned else found, expected)
        gone = pruned.get_parameter(place)[expert] == 0
        assert gone.float().mean() == pytest.approx(0.25, abs=0.01)


@torch.no_grad()
@pytest.mark.parametrize("form", [Int8(), PrunedForm(0.5), GgufForm()], ids=lambda form: form.name)
def test_a_model_that_would_stay_as_it_is_is_refused(form: Any) -> None:
    with pytest.raises(AuditError, match="expected most weights of llama4_text in matrices"):
        form.convert_model(zoo.tiny("llama4_text"))


def test_a_share_that_is_none_is_refused() -> None:
    with pytest.raises(AuditError, match=r"expected share in \(0, 1\), got 1"):
        PrunedForm(1.0)


def test_gguf_blocks_are_what_the_format_says() -> None:
    """q8_0: 32 weights share a scale in half precision, max / 127; a row that blocks do not fill is
    in f16."""
    pytest.importorskip("gguf", reason="needs gguf")
    weight = torch.randn(3, 64, generator=torch.Generator().manual_seed(0)).numpy()
    found = round_gguf_rows(weight, "q8_0")
    for row, own in zip(weight, found, strict=True):
        for at in (0, 32):
            scale = np.float32(abs(row[at : at + 32]).max()) / np.float32(127)
            expected = np.float32(np.float16(scale)) * np.rint(row[at : at + 32] / scale)
            assert np.allclose(own[at : at + 32], expected, atol=1e-7)
    assert np.array_equal(
        round_gguf_rows(weight[:, :20], "q4_0"),
        weight[:, :20].astype(np.float16).astype(np.float32),
    )


@torch.no_grad()
def test_a_gguf_form_changes_a_copy_and_fewer_bits_are_farther_off() -> None:
    pytest.importorskip("gguf", reason="needs gguf")
    held = make_tiny_scenario()
    whole = held.target.log_probs(TOKENS, 3)
    off = [
        float((GgufForm(type).protect(held).log_probs(TOKENS, 3) - whole).abs().max())
        for type in ("q8_0", "q4_0")
    ]
    assert 0 < off[0] < off[1] / 4 and torch.equal(held.target.log_probs(TOKENS, 3), whole)


@pytest.mark.parametrize("type", ["nf4", "fp4"])
@torch.no_grad()
def test_a_bitsandbytes_form_multiplies_by_what_that_librarys_own_layer_does(type: str) -> None:
    layers = pytest.importorskip("bitsandbytes", reason="needs bitsandbytes").nn
    weight = torch.randn(48, 128, generator=torch.Generator().manual_seed(0))
    own = layers.Linear4bit(128, 48, bias=False, compute_dtype=torch.float32, quant_type=type)
    own.weight = layers.Params4bit(weight.clone(), requires_grad=False, quant_type=type)
    unit = torch.eye(128)
    assert torch.allclose(
        own.to("cpu")(unit), unit @ quantise_bitsandbytes(weight, type).T, atol=1e-5
    )


@torch.no_grad()
def test_a_bitsandbytes_form_changes_a_copy() -> None:
    pytest.importorskip("bitsandbytes", reason="needs bitsandbytes")
    held = make_tiny_scenario()
    whole = held.target.log_probs(TOKENS, 3)
    off = float((Nf4().protect(held).log_probs(TOKENS, 3) - whole).abs().max())
    assert off > 0 and torch.equal(held.target.log_probs(TOKENS, 3), whole)


def test_a_model_without_weights_here_is_refused_before_it_is_asked() -> None:
    with pytest.raises(
        AuditError, match="expected a transformers model for int8, whose weights it changes: got"
    ):
        Int8().claim(replace(make_tiny_scenario(), target=FixedDistribution([0.5, 0.5])), 0)


class RepackedLinear(torch.nn.Linear):
    """Lays its weights out anew at the first forward, as bitsandbytes 0.50.2 does on processors
    with AVX512-BF16.

    `state_dict` puts them back with other bytes, as that library's does.
    """

    packed = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.packed:
            self.weight.data, self.packed = self.weight.data.flip(0), True
        return torch.nn.functional.linear(x, self.weight.flip(0), self.bias)

    def _save_to_state_dict(self, *arguments: Any, **named: Any) -> None:
        self.weight.data.mul_(1.5)
        super()._save_to_state_dict(*arguments, **named)


def repacking(model: Any) -> Any:
    """The model with such layers, called quantised."""
    for name, layer in list(model.named_modules()):
        if type(layer) is torch.nn.Linear and "layers" in name:
            own = RepackedLinear(layer.in_features, layer.out_features, layer.bias is not None)
            own.weight.data = layer.weight.data.clone()
            if layer.bias is not None:
                own.bias.data = layer.bias.data.clone()
            model.set_submodule(name, own)
    model.config.quantization_config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    return model


@torch.no_grad()
def test_an_adapter_on_weights_that_were_laid_out_anew_is_merged_into_fresh_ones() -> None:
    held = make_tiny_scenario()
    base = repacking(copy.deepcopy(held.target.model))  # type: ignore[attr-defined]
    tuned = adapted(HuggingFaceModel(base, name="base"))
    untouched = copy.deepcopy(tuned.model)
    before = tuned.log_probs(TOKENS, 3)
    with refuses("adapted", "folder"):
        MergedForm().protect(replace(held, target=tuned))
    tuned.load_again = lambda: untouched
    merged = MergedForm().protect(replace(held, target=tuned))
    assert torch.allclose(merged.log_probs(TOKENS, 3), before, atol=1e-4)
    assert torch.equal(tuned.log_probs(TOKENS, 3), before)


@torch.no_grad()
def test_a_digest_only_reads_the_weights() -> None:
    model = HuggingFaceModel(repacking(copy.deepcopy(make_tiny_scenario().target.model)))  # type: ignore[attr-defined]
    answers = model.log_probs(TOKENS, 3)
    weights = [weight.clone() for weight in model.model.parameters()]
    digest = model.digest()
    assert torch.equal(model.log_probs(TOKENS, 3), answers) and model.digest() == digest
    assert all(map(torch.equal, weights, model.model.parameters()))
    next(model.model.parameters()).data.add_(1)
    assert model.digest() != digest


def test_a_digest_of_plain_weights_is_that_of_their_state_dict() -> None:
    model: Any = make_tiny_scenario().target
    digest = hashlib.sha256()
    for name, tensor in model.model.state_dict().items():
        digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        digest.update(tensor.contiguous().numpy().tobytes())
    assert model.digest() == digest.hexdigest()


@pytest.mark.parametrize("form", [Int8(), Int4(), PrunedForm(0.5), GgufForm("q8_0")])
def test_forms_of_full_precision_are_refused_for_quantised_weights(form: Any) -> None:
    held = make_tiny_scenario()
    quantised = repacking(copy.deepcopy(held.target.model))  # type: ignore[attr-defined]
    for model in (quantised, adapted(HuggingFaceModel(quantised)).model):
        with refuses(form.name, "bitsandbytes"):
            form.claim(replace(held, target=HuggingFaceModel(model, name="small")), 0)
    MergedForm().claim(replace(held, target=HuggingFaceModel(quantised, name="small")), 0)
    form.claim(held, 0)


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (
            LoraConfig(
                target_modules="all-linear", task_type="CAUSAL_LM", alora_invocation_tokens=[3]
            ),
            "activated LoRA",
        ),
        (PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"), "tuned prompt"),
    ],
)
def test_adapters_that_are_not_in_the_weights_have_no_merged_form(config: Any, kind: str) -> None:
    held = make_tiny_scenario()
    tuned = get_peft_model(copy.deepcopy(held.target.model), config)  # type: ignore[attr-defined]
    for form in (MergedForm(), Int8()):
        with refuses(form.name, kind):
            form.claim(replace(held, target=HuggingFaceModel(tuned, name="tuned")), 0)
