"""Rows of caches that models make of their own; positions and prompts that no configuration names
as others do."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from peft import PromptEncoderConfig, PromptTuningConfig, get_peft_model
from transformers import MptConfig, MptForCausalLM

from auditor.core.errors import AuditError
from auditor.models.caches import NativeCache, find_cache_batch_dimensions
from auditor.models.huggingface import HuggingFaceModel
from tests.conftest import tiny


def made(rows: int) -> NativeCache:
    """A cache of objects, containers, rows in several dimensions, a shared tensor and one that is
    held twice."""
    state = torch.arange(rows)[:, None] * torch.ones(3)
    layer = SimpleNamespace(
        state={"fast": state}, same=state, pair=(state.T.clone(), 7), name="layer"
    )
    cache = NativeCache()
    cache.state = [layer, torch.arange(3)]  # as many positions as there are rows below
    layer.cache = cache.state  # a circle
    return cache


def test_each_tensor_is_selected_in_the_dimension_of_its_rows() -> None:
    cache = made(3)
    cache.select(torch.tensor([2, 2, 0, 1]), find_cache_batch_dimensions(made(2), made(3)))
    layer, positions = cache.state
    assert layer.state["fast"][:, 0].tolist() == [2, 2, 0, 1] and layer.same is layer.state["fast"]
    assert (
        layer.pair[0].shape == (3, 4)
        and layer.pair[0][0].tolist() == [2, 2, 0, 1]
        and layer.pair[1] == 7
    )
    assert positions.tolist() == [0, 1, 2]  # shared by the rows, though there are as many


@pytest.mark.parametrize("kind", [PromptTuningConfig, PromptEncoderConfig])
def test_tuned_prompts_stand_in_front_and_cost_positions(kind: type[PromptTuningConfig]) -> None:
    base = tiny(kind="gpt2")
    torch.manual_seed(0)
    config = kind(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model = HuggingFaceModel(get_peft_model(tiny(kind="gpt2").model, config), served="recompute")
    assert model.max_positions == 64 - 3
    tokens = torch.tensor([[5, 6, 7, 8], [9, 4, 3, 2]])
    prompt = model.model.get_prompt(batch_size=1)[0].detach()
    expected = base.log_probs(tokens, 2, prompt=prompt)
    torch.testing.assert_close(model.log_probs(tokens, 2), expected)
    rows = model.start(tokens[:, :3], 1)
    rows.advance(torch.tensor([1, 0]), tokens[[1, 0], 3])
    torch.testing.assert_close(rows.log_probs(), expected[[1, 0], -1])


def test_mpt_is_refused_past_its_length() -> None:
    """Its configuration has another name for its positions."""
    config = MptConfig(vocab_size=61, d_model=32, n_heads=2, n_layers=2, max_seq_len=16)
    with pytest.raises(AuditError, match=r"= 17 tokens, but mpt has 16 positions"):
        HuggingFaceModel(MptForCausalLM(config), name="mpt").start(
            torch.ones(1, 10, dtype=torch.long), 7
        )
