"""Rows after one prefix share a slot: distributions and samples of rows in slots of their own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from auditor.core.secret_randomness import draw_secret_uniforms
from auditor.generation.sample import (
    SuffixCandidates,
    sample_candidates,
    sample_mixed_length_batch,
)
from auditor.models import self_check
from auditor.models.cached_rows import SlotRows
from auditor.models.consistency import STEPS, collect_row_log_probs
from auditor.models.decoding import Decoding
from auditor.models.huggingface import HuggingFaceModel
from auditor.models.slot_cache import SlotLayer, TreeCache
from tests.models.test_joined import PREFIXES, same, tiny_model
from tests.zoo import families as zoo

SHARING = ("gpt2", "gpt_neox", "llama", "qwen2", "opt", "phi", "falcon")
DECODING = Decoding(0.8, top_p=0.9)


def draw_in_own_slots(
    model: HuggingFaceModel, *arguments: Any, draw: Any = sample_candidates
) -> list[SuffixCandidates]:
    model.can_share_slots = False
    candidates: list[SuffixCandidates] = draw(model, *arguments)
    return candidates


@pytest.mark.parametrize("family", SHARING)
@pytest.mark.parametrize("samples", [3, 40])  # few rows stay together, many separate
def test_samples_are_those_of_rows_in_their_own_slots(family: str, samples: int) -> None:
    model = tiny_model(family)
    assert model.can_share_slots
    prefixes = torch.tensor([[5, 6, 7, 8], [9, 8, 7, 6], [3, 3, 4, 5]])
    noise = np.stack([draw_secret_uniforms(samples, 5, i) for i in (7, 8, 9)])
    arguments = (prefixes, 5, DECODING, noise)
    same(sample_candidates(model, *arguments), draw_in_own_slots(model, *arguments))


def test_prefixes_of_several_lengths_share_until_a_suffix_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny_model("llama")
    grown = []
    grow = SlotRows._grow_trees
    monkeypatch.setattr(SlotRows, "_grow_trees", lambda *given: (grown.append(1), grow(*given)))
    lengths = (6, 6, 4, 6, 6, 6)
    noise = [draw_secret_uniforms(3, length, i) for i, length in enumerate(lengths)]
    arguments = (PREFIXES, DECODING, noise)
    found = sample_mixed_length_batch(model, *arguments)
    assert len(grown) == 3  # until the suffix of 4 tokens ends
    same(found, draw_in_own_slots(model, *arguments, draw=sample_mixed_length_batch))


def test_rows_that_share_a_slot_copy_no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("gpt_neox")

    def refuse(*given: object) -> None:
        raise AssertionError("copied")

    monkeypatch.setattr(SlotLayer, "copy_slots", refuse)
    monkeypatch.setattr(SlotLayer, "select_positions", refuse)
    texts = torch.tensor([[5, 6, 7, 8, 9, 10, 11, 12], [9, 8, 7, 6, 5, 4, 3, 2]])
    rows = model.start(texts[:, :4], len(STEPS))
    found, contexts = collect_row_log_probs(rows, texts, 4, STEPS)
    assert isinstance(rows, SlotRows) and isinstance(rows.cache, TreeCache)
    expected = model.log_probs(contexts, len(STEPS) + 1)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def test_a_window_of_attention_keeps_rows_in_their_own_slots() -> None:
    model = tiny_model("mistral")
    assert model.can_join_rows and not model.can_share_slots


def test_the_self_check_finds_a_model_that_reads_other_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(TreeCache, "mask_and_positions", lambda cache, length: {})
    model = tiny_model("llama")
    assert model.can_join_rows and not model.can_share_slots


def test_a_model_without_position_ids_shares_no_slots_in_any_precision() -> None:
    """MPT's bias counts the places of a slot; in bfloat16 a short text does not show it."""
    for dtype in (torch.float32, torch.bfloat16):
        model = HuggingFaceModel(zoo.tiny("mpt").to(dtype), name="mpt")
        self_check.configure_serving(model, 40)
        assert model.can_join_rows and not model.can_share_slots
