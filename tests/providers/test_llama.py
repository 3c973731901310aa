"""GGUF files by llama.cpp in this process: the next-token distributions that transformers has for
the same weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from auditor.core.errors import AuditError
from auditor.core.plan_parts import LoadingOptions
from auditor.models.consistency import compute_largest_distance
from auditor.plugins.provider import RequestedModel
from auditor.providers.llama import LlamaCpp, LlamaModel
from auditor.testing import check_model

pytest.importorskip("llama_cpp", reason="needs llama-cpp-python: pip install 'audit-lm[llama]'")
gguf = pytest.importorskip("gguf", reason="needs gguf, which writes the file")

WIDE, HEADS, LAYERS = 64, 4, 2


def byte_words() -> list[str]:
    """The 256 bytes as GPT-2 spells them, one pair of them, and an end of text."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spelled = {byte: chr(byte) for byte in plain}
    more = (byte for byte in range(256) if byte not in spelled)
    spelled |= {byte: chr(256 + i) for i, byte in enumerate(more)}
    return [*(spelled[byte] for byte in range(256)), "ab", "<end>"]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of the llama architecture in float32, with a tokenizer of bytes."""
    path, noise = tmp_path_factory.mktemp("gguf") / "tiny.gguf", torch.Generator().manual_seed(0)
    words = byte_words()
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(96)
    writer.add_embedding_length(WIDE)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(2 * WIDE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(WIDE // HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(words))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(words)
    writer.add_token_types([1] * 257 + [3])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(257)
    writer.add_eos_token_id(257)

    def weights(name: str, *shape: int, scale: float = 0.2) -> None:
        writer.add_tensor(f"{name}.weight", (torch.randn(shape, generator=noise) * scale).numpy())

    weights("token_embd", len(words), WIDE, scale=1.0)
    weights("output", len(words), WIDE, scale=0.3)
    writer.add_tensor("output_norm.weight", torch.ones(WIDE).numpy())
    for layer in range(LAYERS):
        for norm in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{norm}.weight", torch.ones(WIDE).numpy())
        for part in ("attn_q", "attn_k", "attn_v", "attn_output"):
            weights(f"blk.{layer}.{part}", WIDE, WIDE)
        weights(f"blk.{layer}.ffn_gate", 2 * WIDE, WIDE)
        weights(f"blk.{layer}.ffn_up", 2 * WIDE, WIDE)
        weights(f"blk.{layer}.ffn_down", WIDE, 2 * WIDE)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def llama(file: Path) -> LlamaModel:
    return LlamaCpp(positions=64, threads=1).load(RequestedModel(str(file), LoadingOptions()))


def texts(vocab_size: int) -> Tensor:
    return torch.randint(vocab_size, (3, 20), generator=torch.Generator().manual_seed(2))


def test_its_distributions_are_those_of_the_same_weights_in_transformers(
    file: Path, llama: LlamaModel
) -> None:
    other = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    )
    asked = texts(llama.vocab_size)
    with torch.no_grad():
        truth = other(asked).logits.log_softmax(-1)
    found = llama.log_probs(asked, 20)
    apart = compute_largest_distance(found, truth)
    print(f"\nroot mean square difference: {apart:.2g} nats, of {float(truth.std()):.2g}")
    assert apart < 0.01 * float(truth.std())
    assert compute_largest_distance(found, truth.roll(1, 0)) > float(truth.std()) / 2


def test_it_keeps_the_contract_of_a_model(llama: LlamaModel) -> None:
    check_model(llama)
    assert (llama.vocab_size, llama.max_positions, llama.eos, llama.special_token_id("bos")) == (
        258,
        64,
        (257,),
        257,
    )


def test_a_text_has_the_same_bits_whatever_was_read_before(llama: LlamaModel) -> None:
    asked = texts(llama.vocab_size)
    together = llama.log_probs(asked, 5)
    llama.log_probs(asked[:, :3].flip(0), 1)
    for i in (2, 0, 1):
        assert torch.equal(llama.log_probs(asked[i : i + 1], 5)[0], together[i])
        assert torch.equal(llama.log_probs(asked[i : i + 1, :17], 2)[0], together[i, :2])


def test_what_cannot_be_loaded_is_refused(file: Path, tmp_path: Path) -> None:
    asked, provider = RequestedModel(str(tmp_path / "broken.gguf"), LoadingOptions()), LlamaCpp()
    with pytest.raises(AuditError, match="no such file"):
        provider.check(asked)
    (tmp_path / "broken.gguf").write_bytes(file.read_bytes()[:1000])
    with pytest.raises(AuditError, match="cannot load"):
        provider.load(asked)
    with pytest.raises(AuditError, match="positions >= 1"):
        LlamaCpp(positions=0)


def test_a_tokenizer_that_reads_texts_otherwise_is_refused(file: Path, tmp_path: Path) -> None:
    from tests.conftest import save_tiny

    save_tiny(tmp_path / "other")
    assert json.loads((tmp_path / "other" / "tokenizer.json").read_text())
    with pytest.raises(AuditError, match="expected a tokenizer that reads"):
        LlamaCpp(threads=1).load(
            RequestedModel(str(file), LoadingOptions(), tokenizer=str(tmp_path / "other"))
        )
