"""Rows behind prefixes of several lengths, advanced together: the samples of each prefix alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from auditor.core.nouns import Tokens
from auditor.core.secret_randomness import draw_secret_uniforms
from auditor.generation.sample import (
    SuffixCandidates,
    batch_lengths,
    sample_mixed_length_batch,
)
from auditor.models import self_check
from auditor.models.decoding import Decoding
from auditor.models.huggingface import HuggingFaceModel, traffic
from auditor.models.slot_cache import PaddedCache
from auditor.runs.prefix_token import PrefixedModel
from tests.zoo.families import tiny

JOINING = ("gpt2", "gpt_neox", "llama", "qwen2", "mistral", "gemma2", "opt", "falcon", "phi")
DECODING = Decoding(0.8, top_p=0.9)
PREFIXES: Sequence[Tokens] = (
    (5, 6),
    (7, 8, 9, 10, 11, 12, 13),
    (5,),
    (5, 6, 7),
    (9, 8, 7, 6, 5, 4, 3),
    (3, 3),
)
LENGTHS = (4, 6, 2, 1, 5, 4)


def tiny_model(family: str, reach: int = 20) -> HuggingFaceModel:
    torch.manual_seed(0)
    model = HuggingFaceModel(tiny(family), name=family)
    self_check.configure_serving(model)
    self_check.configure_serving(model, reach)
    return model


def noise(samples: int = 12) -> list[np.ndarray]:
    return [draw_secret_uniforms(samples, length, i) for i, length in enumerate(LENGTHS)]


def alone(
    model: HuggingFaceModel | PrefixedModel, prompt: torch.Tensor | None = None
) -> list[SuffixCandidates]:
    each = zip(PREFIXES, noise(), strict=True)
    return [
        sample_mixed_length_batch(model, [prefix], DECODING, [own], prompt=prompt)[0]
        for prefix, own in each
    ]


def same(found: Sequence[SuffixCandidates], truth: Sequence[SuffixCandidates]) -> None:
    for one, other in zip(found, truth, strict=True):
        assert not other.near_boundary  # no draw that rounding decides
        assert torch.equal(one.suffixes, other.suffixes)
        assert torch.equal(one.counts, other.counts)
        assert one.token_log_probs is not None and other.token_log_probs is not None
        torch.testing.assert_close(one.token_log_probs, other.token_log_probs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", JOINING)
def test_samples_are_those_of_each_prefix_alone(family: str) -> None:
    model = tiny_model(family)
    assert model.can_join_rows
    same(sample_mixed_length_batch(model, PREFIXES, DECODING, noise()), alone(model))


def test_behind_a_prefix_token_and_a_soft_prompt() -> None:
    model = tiny_model("llama")
    prefixed = PrefixedModel(model, (2, 4))
    prompt = model.embedding_rows(3) * 1.01
    for asked, rows in ((prefixed, None), (prefixed, prompt), (model, prompt)):
        assert asked.can_join_rows
        found = sample_mixed_length_batch(asked, PREFIXES, DECODING, noise(), prompt=rows)
        same(found, alone(asked, rows))


def test_a_row_is_read_once_a_token_and_ends_with_its_suffix() -> None:
    model = tiny_model("llama")
    before = traffic.tokens
    found = sample_mixed_length_batch(
        model, PREFIXES, Decoding(0), [own[:1] for own in noise()], distribution=False
    )
    assert [candidates.suffixes.shape for candidates in found] == [
        (1, length) for length in LENGTHS
    ]
    assert traffic.tokens - before == sum(map(len, PREFIXES)) + sum(
        length - 1 for length in LENGTHS
    )


def test_a_prefix_has_room_for_its_own_suffix_whatever_others_take() -> None:
    model = tiny_model("llama")
    assert model.max_positions is not None
    long = tuple([5] * (model.max_positions - 2))
    noise = [draw_secret_uniforms(3, length, i) for i, length in enumerate((2, 9))]
    found = sample_mixed_length_batch(model, [long, (5, 6)], DECODING, noise)
    assert [candidates.suffixes.shape[1] for candidates in found] == [2, 9]
    same(
        found,
        [
            sample_mixed_length_batch(model, [p], DECODING, [own])[0]
            for p, own in zip([long, (5, 6)], noise, strict=True)
        ],
    )


def test_shapes_that_are_rare_are_drawn_together() -> None:
    model = tiny_model("llama")
    # eight prefixes, and eight samples of each: 64 rows
    shapes = [
        (5, 3),
        *[(4, 2)] * 8,
        (2, 3),
        (5, 1),
    ]
    assert [*batch_lengths(model, shapes, 8)] == [[*range(1, 9)], [9, 10, 0]]
    assert [*batch_lengths(model, shapes, 7)] == [[9, *range(1, 9), 10, 0]]
    model.can_join_rows = False
    assert [*batch_lengths(model, shapes)] == [[0], [*range(1, 9)], [9], [10]]


@pytest.mark.parametrize(
    "family", ["roberta", "mamba"]
)  # positions of padding's own; no keys to leave out
def test_others_complete_prefixes_of_each_length_alone(family: str) -> None:
    assert not tiny_model(family).can_join_rows


def test_the_self_check_finds_a_model_that_reads_what_is_masked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(PaddedCache, "mask_and_positions", lambda cache, length: {})
    assert not tiny_model("llama").can_join_rows
