"""What texts begin with is read once, and nobody can tell by the answers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from auditor.models import self_check
from auditor.models.decoding import Decoding
from auditor.models.huggingface import HuggingFaceModel, traffic
from auditor.models.shared_prefix import LEAST, shared_prefix_length
from tests.zoo.families import tiny

# of logits, by the largest of them: products of other shapes add up in another order
ROUNDING = 7e-7
SHARED, OWN, LENGTH = 24, 6, 5
FAMILIES = ("llama", "gpt_neox")


def tiny_model(family: str) -> HuggingFaceModel:
    torch.manual_seed(0)
    return HuggingFaceModel(tiny(family), name=family)


def texts(rows: int, seed: int = 0, shared: int = SHARED) -> torch.Tensor:
    """Whose first tokens are the same."""
    noise = torch.Generator().manual_seed(seed)
    begin = torch.randint(3, 60, (1, shared), generator=torch.Generator().manual_seed(9))
    return torch.cat(
        [begin.expand(rows, -1), torch.randint(3, 60, (rows, OWN), generator=noise)], dim=1
    )


def both(family: str) -> tuple[HuggingFaceModel, HuggingFaceModel]:
    """One model that reads whole texts, and one that does not."""
    plain, sharing = tiny_model(family), tiny_model(family)
    sharing.enable_shared_prefix_cache()
    return plain, sharing


def near(found: torch.Tensor, truth: torch.Tensor) -> bool:
    return bool((found - truth).abs().max() <= 4 * ROUNDING * truth.abs().max())


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_are_those_of_whole_texts_batch_after_batch(family: str) -> None:
    plain, sharing = both(family)
    other = torch.randint(3, 60, (3, SHARED + OWN), generator=torch.Generator().manual_seed(7))
    part = texts(2, 5)
    part[:, 20:] = 5  # goes another way within what is held
    for batch in (
        texts(4),
        texts(1, 1),
        texts(1, 2),
        other,
        texts(3, 3)[:, :-2],
        part,
        texts(1, 4),
    ):
        assert near(sharing.log_probs(batch, 3), plain.log_probs(batch, 3))


@pytest.mark.parametrize("family", FAMILIES)
def test_samples_are_the_same_tokens_behind_a_soft_prompt_too(family: str) -> None:
    plain, sharing = both(family)
    noise = torch.from_numpy(np.random.default_rng(0).random((3, 8, LENGTH, 2)))
    for prompt in (None, plain.embedding_rows(4) * 1.01):
        for seed in (0, 1):
            found, truth = (
                model.completions(
                    texts(3, seed), LENGTH, Decoding(0.8, top_p=0.9), noise, prompt=prompt
                )
                for model in (sharing, plain)
            )
            assert torch.equal(found.tokens, truth.tokens)
            assert near(found.log_probs, truth.log_probs)  # type: ignore[arg-type]


def test_what_is_shared_is_read_once_by_all_batches() -> None:
    sharing = tiny_model("llama")
    sharing.enable_shared_prefix_cache()
    before = traffic.tokens
    for seed in range(3):
        sharing.log_probs(texts(4, seed), 3)
    assert traffic.tokens - before == SHARED + 3 * 4 * OWN


def test_single_texts_share_with_the_one_before_them() -> None:
    sharing = tiny_model("llama")
    sharing.enable_shared_prefix_cache()
    before = traffic.tokens
    for seed in range(3):
        sharing.log_probs(texts(1, seed), 3)
    assert traffic.tokens - before == (SHARED + OWN) + (SHARED + OWN) + OWN


def test_too_little_is_not_shared() -> None:
    sharing = tiny_model("llama")
    sharing.enable_shared_prefix_cache()
    before = traffic.tokens
    sharing.log_probs(texts(4, shared=LEAST - 1), 3)
    assert traffic.tokens - before == 4 * (LEAST - 1 + OWN)


def test_weights_that_change_are_not_asked_by_what_others_read() -> None:
    plain, sharing = both("llama")
    sharing.log_probs(texts(2), 3)
    for model in (plain, sharing):
        with torch.no_grad():
            next(model.model.parameters()).mul_(1.5)
    assert near(sharing.log_probs(texts(2), 3), plain.log_probs(texts(2), 3))


def test_a_prompt_that_learns_gets_its_gradients() -> None:
    plain, sharing = both("llama")
    slopes = []
    for model in (plain, sharing):
        prompt = model.embedding_rows(20).requires_grad_(True)
        model.log_probs(texts(2), 3, prompt=prompt)[..., 5].sum().backward()
        slopes.append(prompt.grad)
    assert torch.equal(*slopes)


def test_hidden_states_are_held_of_what_was_read_behind_a_beginning() -> None:
    plain, sharing = both("llama")
    sharing.enable_hidden_state_cache()
    sharing.log_probs(texts(3), 2)
    before = traffic.tokens
    assert near(sharing.log_probs(texts(3), 2), plain.log_probs(texts(3), 2))
    assert traffic.tokens - before == 3 * (SHARED + OWN)  # of the plain one
    assert near(sharing.log_probs(texts(3), 12), plain.log_probs(texts(3), 12))  # more than is held


@pytest.mark.parametrize("family", FAMILIES)
def test_the_self_check_lets_a_family_share_that_goes_on_from_its_cache(family: str) -> None:
    model = tiny_model(family)
    self_check.configure_serving(model)
    assert model.begins is None  # nobody has said yet what it will be asked
    assert self_check.configure_serving(model, 40) == ()
    assert model.begins is not None


def test_the_self_check_says_that_others_read_each_text_whole() -> None:
    model = tiny_model("mamba")
    self_check.configure_serving(model)
    assert any("read again for each" in note for note in self_check.configure_serving(model, 40))
    assert model.begins is None


@pytest.mark.parametrize("remembers", [False, True])
def test_the_self_check_finds_a_model_that_is_wrong_behind_a_cache(
    monkeypatch: pytest.MonkeyPatch, remembers: bool
) -> None:
    model = tiny_model("llama")
    if remembers:
        model.enable_hidden_state_cache()
    own = model.transformers_logits

    def forgets(read: torch.Tensor, last: int, cache: Any) -> torch.Tensor:
        return own(read, last, cache if len(read) == 1 or read.shape[1] == 1 else None)

    # which would find it, too
    monkeypatch.setattr(self_check._SelfCheckTrial, "choose_row_serving", lambda trial: None)
    monkeypatch.setattr(model, "transformers_logits", forgets)
    self_check.configure_serving(model, 40)
    assert model.begins is None
    assert any("read again for each" in note for note in model.notes)


def test_common() -> None:
    rows = torch.tensor([[1, 2, 3, 4], [1, 2, 9, 4]])
    assert [
        shared_prefix_length(rows, torch.tensor(text))
        for text in ([1, 2, 3], [1], [2, 2], [1, 2, 3, 4, 5])
    ] == [
        2,
        1,
        0,
        2,
    ]
    assert (
        shared_prefix_length(rows.unsqueeze(-1).float(), torch.tensor([[1.0], [2.0], [3.0]])) == 2
    )
    assert shared_prefix_length(rows, torch.zeros(3, 8)) == 0
