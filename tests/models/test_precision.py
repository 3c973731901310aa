"""What fewer bits change is measured against the same weights in float32, and attention of one
query stays fast."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from auditor.core.plan_parts import LoadingOptions
from auditor.core.secret_randomness import draw_secret_uniforms
from auditor.models import precision
from auditor.models.decoding import ANCESTRAL
from auditor.models.huggingface import HuggingFaceModel
from tests.models.test_self_check import GPT, GROUPED, peaked

FAMILIES = {
    "grouped heads": lambda: LlamaForCausalLM(LlamaConfig(**GROUPED)),
    "a head each": lambda: GPT2LMHeadModel(GPT2Config(**GPT)),
}


def half(family: str = "grouped heads") -> HuggingFaceModel:
    torch.manual_seed(0)
    return HuggingFaceModel(peaked(FAMILIES[family]()).to(torch.bfloat16))


@torch.no_grad()
def test_its_cost_is_that_of_a_naive_loop_over_tokens() -> None:
    model = half()
    texts = [((5, 6, 7), (8, 9)), ((10, 11), (12, 13, 14))]
    exact = copy.deepcopy(model.model).float()
    apart, nll, same = [], [], []
    for prefix, suffix in texts:
        for i, token in enumerate(suffix):
            read = torch.tensor([[*prefix, *suffix[:i]]])
            few, full = (
                one(input_ids=read).logits[0, -1].float().log_softmax(-1)
                for one in (model.model, exact)
            )
            apart.append(abs(float(few[token] - full[token])))
            nll.append(float(full[token] - few[token]))
            same.append(int(few.argmax()) == int(full.argmax()))
    told = precision.dtype_effect_sentence(model, texts)
    wanted = (
        f"{sum(apart) / 5:.4f} nats a token apart, the negative log-likelihood {sum(nll) / 5:+.4f}"
    )
    assert wanted in told and f"agrees on {sum(same) / 5:.1%}" in told and "on 5 tokens" in told
    assert max(apart) > 0  # else it would say nothing


def test_nothing_is_said_of_float32_and_what_has_no_room_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    texts = [((5, 6), (7, 8))]
    assert (
        precision.dtype_effect_sentence(HuggingFaceModel(FAMILIES["grouped heads"]()), texts) == ""
    )
    monkeypatch.setattr(precision, "measure_free_device_memory", lambda device: 10)
    assert "was not measured" in precision.dtype_effect_sentence(half(), texts)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_one_query_a_row_attends_as_in_float32(family: str) -> None:
    query, key = torch.randn(2, 4, 1, 8).bfloat16(), torch.randn(2, 4, 5, 8).bfloat16()
    wanted = torch.nn.functional.scaled_dot_product_attention(
        query.float(), key.float(), key.float()
    )
    with precision.Float32SingleQueryAttention():
        found = torch.nn.functional.scaled_dot_product_attention(query, key, value=key)
        longer: Any = torch.nn.functional.scaled_dot_product_attention(key, key, key)
    assert found.dtype == torch.bfloat16 and torch.equal(found, wanted.bfloat16())
    assert torch.equal(longer, torch.nn.functional.scaled_dot_product_attention(key, key, key))
    model, tokens = half(family), torch.randint(1, 60, (3, 9))
    rows = model.start_served_rows(tokens[:, :5], 4, None)
    for i in range(5, 8):
        rows.advance(torch.arange(3), tokens[:, i])
    torch.testing.assert_close(
        rows.log_probs(), model.log_probs(tokens[:, :8], 1)[:, 0], atol=0.1, rtol=0
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_samples_of_one_precision_are_the_same_alone_and_together(family: str) -> None:
    """On processors whose products of bfloat16 add up in the same order for any number of rows."""
    model = half(family)
    prefixes = torch.randint(1, 60, (7, 5), generator=torch.Generator().manual_seed(1))
    noise = torch.stack([torch.as_tensor(draw_secret_uniforms(4, 6, i)) for i in range(7)])
    together = model.completions(prefixes, 6, ANCESTRAL, noise)
    alone = [
        model.completions(prefixes[i : i + 1], 6, ANCESTRAL, noise[i : i + 1]) for i in range(7)
    ]
    assert (
        float((together.tokens == torch.cat([one.tokens for one in alone])).double().mean()) > 0.95
    )


def test_what_is_right_in_float32_alone_keeps_to_it_unless_asked_otherwise() -> None:
    assert LoadingOptions().resolve_auto_dtype().dtype == "float32"
    assert LoadingOptions(dtype="bfloat16").resolve_auto_dtype().dtype == "bfloat16"
