"""Weights are those of the files, or there is no model: what is missing, what is too much, what is
another kind."""

from __future__ import annotations

import json
import os
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PrefixTuningConfig, PromptTuningConfig, VBLoRAConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForMaskedLM,
    BertForPreTraining,
    BertModel,
    ElectraConfig,
    ElectraForPreTraining,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaModel,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTModel,
)

from auditor.core.errors import AuditError
from auditor.core.plan_parts import LoadingOptions
from auditor.models.huggingface import HuggingFaceModel
from auditor.models.loading import choose_loaded_dtype, load_causal_lm
from auditor.models.lora import LoraEnsemble
from auditor.models.weights import read_weights, resolve_model_device
from tests.conftest import refuses

Tensors = dict[str, torch.Tensor]
SHAPE = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4}


def llama(kind: type = LlamaForCausalLM, **options: Any) -> Any:
    torch.manual_seed(0)
    return kind(LlamaConfig(**{**SHAPE, **HEADS, "num_key_value_heads": 2, **options}))


def bert(kind: type, config: type = BertConfig) -> Any:
    torch.manual_seed(0)
    return kind(config(**SHAPE, **HEADS, max_position_embeddings=64))


def save(model: Any, folder: Path, edit: Callable[[Tensors], Tensors] = dict) -> Path:
    """As its owner saves it, with the weights edited."""
    model.save_pretrained(folder)
    file = next(folder.glob("*.safetensors"))
    save_file(edit(load_file(file)), file, {"format": "pt"})
    return folder


def distribution(model: HuggingFaceModel) -> torch.Tensor:
    return model.log_probs(torch.tensor([[4, 5, 6]]), 1)


def without(part: str) -> Callable[[Tensors], Tensors]:
    return lambda weights: {key: value for key, value in weights.items() if part not in key}


def prefixed(prefix: str) -> Callable[[Tensors], Tensors]:
    return lambda weights: {prefix + key: value for key, value in weights.items()}


def one_layer_more(weights: Tensors) -> Tensors:
    more = {
        key.replace(".1.", ".2."): value.clone() for key, value in weights.items() if ".1." in key
    }
    return {**weights, **more}


def fewer_tokens(weights: Tensors) -> Tensors:
    return {key: value[:40].clone() if "embed" in key else value for key, value in weights.items()}


@pytest.mark.parametrize(
    ("model", "edit", "sentence"),
    [
        (lambda: llama(LlamaModel), dict, "lacks lm_head.weight"),
        (llama, without("layers.1."), "lacks model.layers.1.input_layernorm.weight, .* and 6 more"),
        (llama, one_layer_more, "has no place for model.layers.2.input_layernorm.weight"),
        (llama, fewer_tokens, "model.embed_tokens.weight is 40 x 32, not 50 x 32"),
        (
            llama,
            prefixed("teacher."),
            "lacks lm_head.weight.*; it has others, as teacher.lm_head.weight",
        ),
        (
            lambda: llama(LlamaForSequenceClassification),
            dict,
            "a classifier of texts .LlamaForSequenceClassification",
        ),
        (lambda: bert(BertForMaskedLM), dict, "a masked one"),
        (lambda: bert(ElectraForPreTraining, ElectraConfig), dict, "a discriminator"),
    ],
)
def test_weights_that_are_not_those_of_a_causal_lm_are_refused_by_name(
    tmp_path: Path, model: Callable[[], Any], edit: Callable[[Tensors], Tensors], sentence: str
) -> None:
    with pytest.raises(AuditError, match=sentence):
        load_causal_lm(str(save(model(), tmp_path, edit)))


@pytest.mark.parametrize("tied", [True, False])
def test_tied_weights_may_be_absent_from_the_files(tmp_path: Path, tied: bool) -> None:
    model = llama(tie_word_embeddings=tied)
    weights = load_file(save(model, tmp_path) / "model.safetensors")
    assert ("lm_head.weight" in weights) is not tied
    torch.testing.assert_close(
        distribution(load_causal_lm(str(tmp_path))), distribution(HuggingFaceModel(model))
    )


@pytest.mark.parametrize(
    ("prefix", "said"),
    [
        ("_orig_mod.", "_orig_mod."),
        ("module.", "module."),
        ("module._orig_mod.", "module._orig_mod."),
        ("_orig_mod.module.", "_orig_mod.module."),
        ("_fsdp_wrapped_module._orig_mod.", "_fsdp_wrapped_module._orig_mod."),
    ],
)
def test_prefixes_of_what_wrapped_the_model_in_training_are_stripped_and_said(
    tmp_path: Path, prefix: str, said: str
) -> None:
    model = llama()
    loaded = load_causal_lm(str(save(model, tmp_path, prefixed(prefix))))
    torch.testing.assert_close(distribution(loaded), distribution(HuggingFaceModel(model)))
    assert [note for note in loaded.notes if f"({said}): read without" in note]


def test_wrappers_of_a_model_of_its_layers_and_of_their_parts_are_stripped(tmp_path: Path) -> None:
    def sharded(weights: Tensors) -> Tensors:
        parts = {
            "layers.0.": "_checkpoint_wrapped_module.",
            "self_attn.": "",
            "q_proj.": "_orig_mod.",
        }
        for part, wrapper in parts.items():
            weights = {
                key.replace(part, f"{part}_fsdp_wrapped_module.{wrapper}"): w
                for key, w in weights.items()
            }
        return prefixed("_fsdp_wrapped_module.")(weights)

    model = llama()
    torch.testing.assert_close(
        distribution(load_causal_lm(str(save(model, tmp_path, sharded)))),
        distribution(HuggingFaceModel(model)),
    )


def test_encoder_decoders_and_what_predicts_no_token_are_refused_in_plain_words(
    tmp_path: Path,
) -> None:
    sizes = {
        "encoder_layers": 1,
        "decoder_layers": 1,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
    }
    widths = {"vocab_size": 50, "d_model": 32, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    BartForConditionalGeneration(BartConfig(**sizes, **widths)).save_pretrained(tmp_path / "bart")
    t5 = T5Config(vocab_size=50, d_model=32, d_ff=32, num_layers=1, num_heads=2, d_kv=16)
    T5ForConditionalGeneration(t5).save_pretrained(tmp_path / "t5")
    ViTModel(
        ViTConfig(**HEADS, hidden_size=32, intermediate_size=32, num_hidden_layers=1)
    ).save_pretrained(tmp_path / "vit")
    embeds = save(llama(), tmp_path / "embeds")
    (embeds / "modules.json").write_text("[]")
    for name, words in (
        ("bart", r"expected a causal LM, got '.*bart', an encoder-decoder \(bart\)"),
        ("t5", r"an encoder-decoder \(t5\)"),
        ("vit", "a model of type 'vit', of which transformers has no causal LM"),
        ("embeds", "an embedding model"),
    ):
        with pytest.raises(AuditError, match=words):
            load_causal_lm(str(tmp_path / name))


def test_masked_lms_have_all_their_weights_too(tmp_path: Path) -> None:
    def read(folder: Path) -> Any:
        return read_weights("masked", str(folder), LoadingOptions())[0]

    tokens = torch.tensor([[4, 5, 6]])
    for kind in (
        BertForMaskedLM,
        BertForPreTraining,
    ):  # the second has a pooler, and a head for pairs of sentences
        model = bert(kind).eval()
        wanted = model(tokens)[0] if kind is BertForMaskedLM else model(tokens).prediction_logits
        torch.testing.assert_close(
            read(save(model, tmp_path / kind.__name__))(tokens).logits, wanted
        )
    for index, (model, words) in enumerate(
        (
            (bert(BertModel), r"which its configuration does not call one \(BertModel\)"),
            (
                bert(ElectraForPreTraining, ElectraConfig),
                "expected a masked LM, got .* a discriminator",
            ),
            (llama(), "a model of type 'llama', of which transformers has no masked LM"),
        )
    ):
        with pytest.raises(AuditError, match=words):
            read(save(model, tmp_path / str(index)))


# --- adapters ---


def adapter(
    base: Path, folder: Path, edit: Callable[[Tensors], Tensors] = dict, **options: Any
) -> Path:
    torch.manual_seed(1)
    lora = LoraConfig(
        r=2, target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights=False, **options
    )
    model = get_peft_model(LlamaForCausalLM.from_pretrained(base), lora)
    model.save_pretrained(folder)
    file = folder / "adapter_model.safetensors"
    save_file(edit(load_file(file)), file)
    return folder


def renamed(old: str, new: str) -> Callable[[Tensors], Tensors]:
    return lambda weights: {key.replace(old, new): value for key, value in weights.items()}


def test_an_adapter_must_be_of_its_base(tmp_path: Path) -> None:
    base = save(llama(), tmp_path / "base")
    whole = distribution(load_causal_lm(str(adapter(base, tmp_path / "right"))))
    assert float((whole - distribution(load_causal_lm(str(base)))).abs().max()) > 1e-3
    for name, edit, words in (
        (
            "other",
            renamed("model.layers", "transformer.h"),
            "lacks base_model.model.model.layers.0.*transformer.h.0",
        ),
        (
            "less",
            without("layers.1."),
            "lacks base_model.model.model.layers.1.self_attn.q_proj.lora_A",
        ),
        ("more", one_layer_more, "has no place for base_model.model.model.layers.2"),
    ):
        with pytest.raises(AuditError, match=words):
            load_causal_lm(str(adapter(base, tmp_path / name, edit)))
    compiled = adapter(
        base, tmp_path / "compiled", renamed("base_model.model.", "base_model.model._orig_mod.")
    )
    torch.testing.assert_close(distribution(load_causal_lm(str(compiled))), whole)


@pytest.mark.parametrize("kept", [["embed_tokens", "lm_head"], None])
def test_an_adapter_with_tokens_of_its_own_brings_their_rows(
    tmp_path: Path, kept: list[str] | None
) -> None:
    base = save(llama(), tmp_path / "base")
    grown = LlamaForCausalLM.from_pretrained(base)
    grown.resize_token_embeddings(53, mean_resizing=False)
    torch.manual_seed(2)
    lora = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM", modules_to_save=kept)
    trained = get_peft_model(grown, lora)
    trained.save_pretrained(tmp_path / "adapter", save_embedding_layers=kept is None)
    loaded = load_causal_lm(str(tmp_path / "adapter"))
    assert loaded.vocab_size == 53
    torch.testing.assert_close(distribution(loaded), distribution(HuggingFaceModel(trained)))


NEW_ROWS = {"init_lora_weights": False, "r": 2, "task_type": "CAUSAL_LM"}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    ("rows", "more", "saved"),
    [
        (
            53,
            {"target_modules": ["q_proj"], "trainable_token_indices": {"embed_tokens": [50, 52]}},
            "auto",
        ),
        (
            56,
            {"target_modules": ["q_proj"], "trainable_token_indices": {"embed_tokens": [50, 52]}},
            "auto",
        ),
        (53, {"target_modules": ["q_proj"], "trainable_token_indices": [50, 51, 52]}, False),
        (53, {"target_modules": ["q_proj", "embed_tokens"]}, True),
        (53, {"target_modules": ["q_proj", "embed_tokens", "lm_head"]}, True),
        (53, {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]}, False),
    ],
    ids=["trl", "trl-padded", "rows-only", "lora-embedding", "lora-both", "saved-whole"],
)
def test_an_adapter_loads_with_the_rows_of_its_tokens(
    tmp_path: Path, tied: bool, rows: int, more: dict[str, Any], saved: Any
) -> None:
    """As TRL's `chat_template_path` makes them: tokens are added, their rows trained, the matrices
    resized."""
    base = save(llama(tie_word_embeddings=tied), tmp_path / "base")
    grown = LlamaForCausalLM.from_pretrained(base)
    grown.resize_token_embeddings(rows, mean_resizing=False)
    if "trainable_token_indices" in more and not tied:
        more = {**more, "modules_to_save": ["lm_head"]}  # TRL trains the untied head whole
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT's, of tied weights and of saving them unasked
        trained = get_peft_model(grown, LoraConfig(**NEW_ROWS, **more))
        with torch.no_grad():
            for name, weight in trained.named_parameters():
                if "trainable_tokens_delta" in name or "modules_to_save" in name:
                    weight.normal_()
        trained.save_pretrained(tmp_path / "adapter", save_embedding_layers=saved)
        if more.get("target_modules") == ["q_proj", "embed_tokens"] and not tied:
            with refuses(
                "3", "lm_head"
            ):  # PEFT 0.21.2 does not save the rows of the output matrix then
                load_causal_lm(str(tmp_path / "adapter"))
            return
        loaded = load_causal_lm(str(tmp_path / "adapter"))
    assert loaded.vocab_size == rows
    texts = torch.tensor([[3, 50, 7, 52]])
    torch.testing.assert_close(
        loaded.log_probs(texts, 4),
        HuggingFaceModel(trained).log_probs(texts, 4),
        atol=1e-5,
        rtol=1e-5,
    )


def test_an_adapter_may_hold_modules_twice(tmp_path: Path) -> None:
    """As PEFT saves it unasked where the tokens of the base have become more or fewer."""
    grown = LlamaForCausalLM.from_pretrained(save(llama(), tmp_path / "base"))
    grown.resize_token_embeddings(53, mean_resizing=False)
    trained = get_peft_model(
        grown,
        LoraConfig(
            r=2, target_modules=["q_proj"], task_type="CAUSAL_LM", modules_to_save=["lm_head"]
        ),
    )
    trained.save_pretrained(tmp_path / "adapter", save_embedding_layers=True)
    twice = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert {f"base_model.model.lm_head.{part}weight" for part in ("", "modules_to_save.")} <= set(
        twice
    )
    torch.testing.assert_close(
        distribution(load_causal_lm(str(tmp_path / "adapter"))),
        distribution(HuggingFaceModel(trained)),
    )


def test_an_adapter_may_share_weights_among_its_layers(tmp_path: Path) -> None:
    base = save(llama(), tmp_path / "base")
    torch.manual_seed(1)
    shared = VBLoRAConfig(
        r=2, num_vectors=10, vector_length=16, target_modules=["q_proj"], task_type="CAUSAL_LM"
    )
    trained = get_peft_model(LlamaForCausalLM.from_pretrained(base), shared)
    torch.nn.init.normal_(trained.base_model.vblora_vector_bank["default"])
    trained.save_pretrained(tmp_path / "adapter")
    torch.testing.assert_close(
        distribution(load_causal_lm(str(tmp_path / "adapter"))),
        distribution(HuggingFaceModel(trained)),
    )


@pytest.mark.parametrize("kind", [PromptTuningConfig, PrefixTuningConfig])
def test_a_tuned_prompt_is_of_its_base_alone(tmp_path: Path, kind: type) -> None:
    base = save(llama(), tmp_path / "base")
    tuned = get_peft_model(
        LlamaForCausalLM.from_pretrained(base), kind(num_virtual_tokens=3, task_type="CAUSAL_LM")
    )
    tuned.save_pretrained(tmp_path / "adapter")
    load_causal_lm(str(tmp_path / "adapter"))
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    save_file({**load_file(file), "base_model.model.lm_head.weight": torch.zeros(50, 32)}, file)
    with pytest.raises(AuditError, match=r"has no place for base_model\.model\.lm_head\.weight"):
        load_causal_lm(str(tmp_path / "adapter"))
    save(llama(num_hidden_layers=1), base)
    with pytest.raises(
        AuditError, match=r"expected the base of .*adapter' to have 2 layers, got .*base' with 1"
    ):
        load_causal_lm(str(tmp_path / "adapter"))


def test_an_adapter_on_another_adapter_is_refused(tmp_path: Path) -> None:
    below = adapter(save(llama(), tmp_path / "base"), tmp_path / "below")
    folder = adapter(tmp_path / "base", tmp_path / "above")
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(
        json.dumps({**config, "base_model_name_or_path": str(below)})
    )
    with pytest.raises(
        AuditError,
        match=r"expected an adapter of a whole model, got .*above', an adapter of another adapter",
    ):
        load_causal_lm(str(folder))


def test_adapters_of_classifiers_or_of_nothing_are_refused(tmp_path: Path) -> None:
    folder = adapter(save(llama(), tmp_path / "base"), tmp_path / "adapter")
    config = json.loads((folder / "adapter_config.json").read_text())
    for change, words in (
        ({"task_type": "SEQ_CLS"}, "expected an adapter of a causal LM, got .* one for SEQ_CLS"),
        ({"base_model_name_or_path": None}, "names none"),
        (
            {"base_model_name_or_path": "/nowhere"},
            "base of the adapter .* in '/nowhere', .* no such folder: give .* as --base",
        ),
    ):
        (folder / "adapter_config.json").write_text(json.dumps({**config, **change}))
        with pytest.raises(AuditError, match=words):
            load_causal_lm(str(folder))


# --- options, and what libraries raise ---


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"torch_dtype": "bfloat16"},
            "expected --dtype in place of --model-arg torch_dtype=bfloat16",
        ),
        ({"dtype": "bfloat16"}, "expected --dtype in place of"),
        ({"ignore_mismatched_sizes": "true"}, "cannot be given: other flags"),
        ({"quantization_config": "4"}, "a JSON object, got 4"),
        ({"load_in_8bit": "true", "quantization_config": "{}"}, "got both"),
    ],
)
def test_model_args_that_would_be_ignored_are_refused(
    tmp_path: Path, given: dict[str, str], words: str
) -> None:
    llama().save_pretrained(tmp_path)
    with pytest.raises(AuditError, match=words):
        load_causal_lm(str(tmp_path), LoadingOptions(model_args=given))


def test_quantisation_says_what_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llama().save_pretrained(tmp_path)
    monkeypatch.setattr("auditor.models.weights.is_bitsandbytes_available", lambda: False)
    for given in ({"load_in_8bit": "true"}, {"quantization_config": '{"load_in_4bit": true}'}):
        with pytest.raises(
            AuditError, match=r"needs bitsandbytes: pip install 'audit-lm\[quantised\]'"
        ):
            load_causal_lm(str(tmp_path), LoadingOptions(model_args=given))
    off = LoadingOptions(model_args={"load_in_8bit": "false", "attn_implementation": "eager"})
    assert load_causal_lm(str(tmp_path), off).vocab_size == 50


def test_a_model_that_is_spread_by_its_library_stays_where_it_was_put(tmp_path: Path) -> None:
    model = llama()
    model.save_pretrained(tmp_path)
    torch.testing.assert_close(
        distribution(
            load_causal_lm(str(tmp_path), LoadingOptions(model_args={"device_map": "auto"}))
        ),
        distribution(HuggingFaceModel(model)),
    )


EVERYWHERE = {
    "model.embed_tokens": "disk",
    "model.layers.0": "cpu",
    "model.layers.1": "disk",
} | dict.fromkeys(("model.rotary_emb", "model.norm", "lm_head"), "cpu")


@pytest.mark.parametrize("places", ["auto", '{"": "disk"}', json.dumps(EVERYWHERE)])
def test_a_model_spread_over_memory_and_disk_is_the_same_model(tmp_path: Path, places: str) -> None:
    """Its distribution, its gradients, and its rows, which split: the self-check walks them."""
    llama().save_pretrained(tmp_path)
    whole, parts = (
        load_causal_lm(str(tmp_path)),
        load_causal_lm(str(tmp_path), LoadingOptions(device_map=places)),
    )
    assert (parts.device, parts.served, parts.notes) == (torch.device("cpu"), "slots", ())
    torch.testing.assert_close(distribution(parts), distribution(whole))
    slopes = []
    for model in (whole, parts):
        prompt = model.embedding_rows(2).requires_grad_(True)
        model.log_probs(torch.tensor([[4, 5, 6]]), 1, prompt=prompt)[0, 0, 7].backward()
        slopes.append(prompt.grad)
    torch.testing.assert_close(*slopes)


def test_members_of_an_ensemble_are_not_put_beside_a_model_that_is_spread(tmp_path: Path) -> None:
    base = llama()
    base.save_pretrained(tmp_path / "base")
    member = adapter(tmp_path / "base", tmp_path / "member")
    public = load_causal_lm(
        str(tmp_path / "base"), LoadingOptions(device_map=json.dumps(EVERYWHERE))
    )
    with pytest.raises(
        AuditError,
        match="expected the public model of an ensemble on one device, got one that --device",
    ):
        LoraEnsemble(public, [member])


def test_the_best_device_is_found_and_what_is_not_there_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert resolve_model_device("auto") == torch.device("cpu")
    with pytest.raises(
        AuditError, match="expected cuda to be available for --device cuda, got a machine with none"
    ):
        resolve_model_device("cuda")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    assert resolve_model_device("auto") == torch.device("cuda") and resolve_model_device(
        "cuda:1"
    ) == torch.device("cuda:1")
    with pytest.raises(
        AuditError,
        match="expected cuda:2 to be available for --device cuda:2, got a machine with 2 of cuda",
    ):
        resolve_model_device("cuda:2")
    with pytest.raises(AuditError, match="expected mps to be available"):
        resolve_model_device("mps")


def learns(model: HuggingFaceModel) -> bool:
    """Whether transformers and torch alone give this model's loss a gradient in its input
    embeddings."""
    given = model.embedding(torch.tensor([[1, 2, 3]])).detach().requires_grad_()
    model.model(inputs_embeds=given).logits.square().sum().backward()
    return given.grad is not None and bool(given.grad.any())


@pytest.mark.parametrize("bits", ["8bit", "4bit"])
def test_what_fewer_bits_can_be_asked_for(tmp_path: Path, bits: str) -> None:
    """The distribution stands. Four bits have no gradient on some processors: no soft prompts
    there."""
    pytest.importorskip("bitsandbytes")
    llama(hidden_size=64, intermediate_size=64).save_pretrained(tmp_path)
    whole, few = (
        load_causal_lm(str(tmp_path)),
        load_causal_lm(str(tmp_path), LoadingOptions(quantise=bits)),
    )
    assert {type(module).__name__ for module in few.model.modules()} & {
        "Linear8bitLt",
        "Linear4bit",
    }
    assert 0 < (distribution(few).exp() - distribution(whole).exp()).abs().max() < 0.01
    assert ("embeddings" in few.capabilities) == learns(few)


def damaged(folder: Path, name: str) -> str:
    """A model folder with one fault; returns what is said of it."""
    weights, config = folder / "model.safetensors", folder / "config.json"
    told = json.loads(config.read_text())
    match name:
        case "safetensors":
            weights.write_bytes(b"garbage")
            return "header"
        case "short":
            weights.write_bytes(weights.read_bytes()[:-100])
            return "incomplete|header|length"
        case "pickle":
            weights.unlink()
            (folder / "pytorch_model.bin").write_bytes(
                pickle.dumps({"lm_head.weight": os.system}, protocol=2)
            )
            return "Weights only load failed"
        case "type":
            config.write_text(json.dumps({**told, "num_attention_heads": "four"}))
            return "num_attention_heads.* expected int, got str"
        case "zero":
            config.write_text(json.dumps({**told, "num_attention_heads": 0}))
            return "ZeroDivisionError"
        case _:
            config.write_text("[]")
            return "."


def test_a_tokenizer_that_cannot_be_read_is_not_taken_for_none(tmp_path: Path) -> None:
    save(llama(), tmp_path)
    assert load_causal_lm(str(tmp_path)).tokenizer is None
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0", "model":')
    with refuses(str(tmp_path)):
        load_causal_lm(str(tmp_path))


def test_a_tokenizer_on_the_hub_is_none_only_if_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers invents an empty tokenizer, and a broken one is not a missing one."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    repository = tmp_path / "models--some--model"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("c0ffee")
    llama().save_pretrained(repository / "snapshots" / "c0ffee")
    assert load_causal_lm("some/model").tokenizer is None
    (repository / "snapshots" / "c0ffee" / "tokenizer.json").write_text("{")
    with refuses("cannot load the tokenizer in 'some/model'"):
        load_causal_lm("some/model")


@pytest.mark.parametrize("name", ["safetensors", "short", "pickle", "type", "zero", "list"])
def test_whatever_a_library_raises_is_one_sentence(tmp_path: Path, name: str) -> None:
    llama().save_pretrained(tmp_path)
    words = damaged(tmp_path, name)
    with pytest.raises(
        AuditError, match=rf"cannot load .* as a Hugging Face causal LM on cpu: .*({words})"
    ) as refused:
        load_causal_lm(str(tmp_path))
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 600


def test_every_end_of_text_counts(tmp_path: Path) -> None:
    model = llama(eos_token_id=2)
    model.generation_config.eos_token_id = [2, 7]
    model.save_pretrained(tmp_path)
    assert load_causal_lm(str(tmp_path)).eos == (2, 7)


def test_shards_beside_one_file_are_refused_for_one_of_them_is_stale(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    index = "model.safetensors.index.json"
    folder = save(llama(), tmp_path / "model")
    for file in (tmp_path / "shards").glob("model*"):
        (folder / file.name).write_bytes(file.read_bytes())
    with pytest.raises(
        AuditError, match=f"expected one set of weights .*model.safetensors and {index}"
    ):
        load_causal_lm(str(folder))


def test_two_formats_are_said(tmp_path: Path) -> None:
    model = llama()
    folder = save(model, tmp_path)
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    (note,) = load_causal_lm(str(folder)).notes
    assert "two formats, model.safetensors and pytorch_model.bin" in note


def test_an_adapter_beside_a_whole_model_is_refused(tmp_path: Path) -> None:
    """It was taken for the adapter, however far the distribution beside it was from its own."""
    folder = adapter(save(llama(), tmp_path / "base"), tmp_path / "both")
    save(llama(), folder)
    with pytest.raises(
        AuditError, match=r"either an adapter or a whole model .* and model\.safetensors"
    ):
        load_causal_lm(str(folder))
    (folder / "model.safetensors").unlink()
    load_causal_lm(str(folder))  # a configuration alone is no model


def test_an_adapter_whose_base_moved_takes_another_place(tmp_path: Path) -> None:
    folder = adapter(save(llama(), tmp_path / "base"), tmp_path / "adapter")
    wanted = distribution(load_causal_lm(str(folder)))
    moved = str((tmp_path / "base").rename(tmp_path / "elsewhere"))
    with pytest.raises(
        AuditError,
        match=r"base of the adapter .*/base', which it was trained on; no such folder.*--base",
    ):
        load_causal_lm(str(folder))
    found = load_causal_lm(str(folder), LoadingOptions(base=moved))
    torch.testing.assert_close(distribution(found), wanted)
    assert any("its base is" in note and moved in note for note in found.notes)
    assert "may hide what it has learnt" in found.doubts()[0].sentence
    again = Path(moved).rename(tmp_path / "base")
    assert not load_causal_lm(str(folder), LoadingOptions(base=f"{tmp_path}/./base")).doubts()
    again.rename(moved)
    with pytest.raises(
        AuditError, match=r"expected --base only with an adapter, got it with .*, which is not one"
    ):
        load_causal_lm(moved, LoadingOptions(base=moved))


@pytest.mark.parametrize("name", ["./nope", "/tmp/nope/nope", "../nope/", "~/nope"])
def test_a_folder_that_is_not_there_is_said_to_be_none(name: str) -> None:
    with pytest.raises(AuditError, match=f"expected a causal LM in '{name}': no such folder"):
        load_causal_lm(name)


def test_a_masked_architecture_that_decodes_is_causal_and_said(tmp_path: Path) -> None:
    save(bert(BertForMaskedLM), tmp_path)
    read_weights("masked", str(tmp_path), LoadingOptions())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "is_decoder": True}))
    with pytest.raises(AuditError, match="which its configuration does not call one"):
        read_weights("masked", str(tmp_path), LoadingOptions())
    assert "BertForMaskedLM with is_decoder=true: asked as a causal LM" in "".join(
        load_causal_lm(str(tmp_path)).notes
    )


def test_weights_that_run_in_another_precision_than_they_were_saved_in_are_said(
    tmp_path: Path,
) -> None:
    save(llama().to(torch.bfloat16), tmp_path)
    (note,) = load_causal_lm(str(tmp_path), LoadingOptions(dtype="float32")).notes
    assert "saved in bfloat16 and run in float32" in note
    assert load_causal_lm(str(tmp_path), LoadingOptions(dtype="bfloat16")).notes == ()


@pytest.mark.parametrize("machine", [True, False])
@pytest.mark.parametrize("saved", [torch.float32, torch.bfloat16, torch.float16])
def test_a_model_runs_in_bfloat16_where_it_was_saved_so_and_the_machine_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, machine: bool, saved: torch.dtype
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": machine})
    save(llama().to(saved), tmp_path)
    found = load_causal_lm(str(tmp_path))
    wanted = torch.bfloat16 if machine and saved == torch.bfloat16 else torch.float32
    assert found.model.dtype == wanted
    assert bool(found.notes) == (saved != wanted)  # another precision than it was saved in is said
    assert (
        load_causal_lm(str(tmp_path), LoadingOptions().resolve_auto_dtype()).model.dtype
        == torch.float32
    )
    get_peft_model(llama().to(saved), LoraConfig(task_type="CAUSAL_LM")).save_pretrained(
        tmp_path / "adapter"
    )
    adapter = LoadingOptions(base=str(tmp_path))
    of = [
        choose_loaded_dtype(str(tmp_path), LoadingOptions()),
        choose_loaded_dtype(str(tmp_path / "adapter"), adapter),
    ]
    assert of == [str(wanted).removeprefix("torch.")] * 2
    assert load_causal_lm(str(tmp_path / "adapter"), adapter).model.dtype == wanted
