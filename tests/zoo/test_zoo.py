"""Each family of the table against transformers itself: distributions, greedy tokens, split rows,
soft prompts, gaps."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from auditor.core.errors import AuditError, NotApplicable
from auditor.models.huggingface import HuggingFaceModel
from auditor.models.loading import load_causal_lm
from auditor.models.masked import load_masked
from auditor.models.self_check import configure_serving
from tests.zoo.families import (
    ENCODER_DECODERS,
    FAMILIES,
    MASKED,
    REFUSED,
    VOCABULARY,
    config_of,
    save,
    tiny,
)
from tests.zoo.page import PAGE, page

# `generate` counts their positions from 0; the models themselves, in training too, from behind the
# padding id.
COUNTED_OTHERWISE = (
    *(
        "camembert",
        "data2vec-text",
        "roberta",
        "roberta-prelayernorm",
        "xlm-roberta",
        "xlm-roberta-xl",
        "xmod",
    ),
)
# Moshi's own cache forgets what is past the window; its mask, in training too, does not. XLM's
# `generate` asks for a masked token behind the text, which no model of next tokens was trained on.
GENERATED_OTHERWISE = ("moshi", "xlm")
# each way of serving
LOADED = (
    "mamba2",
    "jamba",
    "gemma2",
    "openai-gpt",
    "gemma4_text",
    "reformer",
    "roberta",
    "rwkv",
    "xlm",
)


def close(got: Tensor, expected: Tensor) -> None:
    """To what single precision leaves after a few hundred sums of numbers of this size."""
    size = float(expected.detach().abs().max())
    torch.testing.assert_close(
        got, expected, atol=200 * torch.finfo(torch.float32).eps * max(1.0, size), rtol=0
    )


@functools.cache
def load_family(family: str) -> HuggingFaceModel:
    row = FAMILIES[family]
    return HuggingFaceModel(tiny(family), name=family, served=row.served, embeddings=row.embeddings)


@pytest.fixture(params=sorted(FAMILIES))
def model(request: pytest.FixtureRequest) -> HuggingFaceModel:
    return load_family(request.param)


@torch.no_grad()
def test_a_family_is_served_as_its_row_says(model: HuggingFaceModel) -> None:
    g = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, VOCABULARY, (3, 10), generator=g)
    # transformers' own
    distribution = torch.log_softmax(model.model(input_ids=tokens).logits, dim=-1)
    close(model.log_probs(tokens, 10), distribution)
    # nothing that comes later is seen
    close(model.log_probs(tokens[:, :6], 1)[:, 0], distribution[:, 5])
    rows, contexts = model.start(tokens, 3), tokens
    close(rows.log_probs(), distribution[:, -1])
    for parents in ([2, 0, 2, 1, 2], [4, 1], [1, 0]):  # splits, deaths, another order
        at = torch.tensor(parents)
        drawn = torch.randint(3, VOCABULARY, (len(parents),), generator=g)
        drawn[-1] = 0  # padding, as any other token
        rows.advance(at, drawn)
        contexts = torch.cat([contexts[at], drawn[:, None]], dim=1)
    close(rows.log_probs(), model.log_probs(contexts, 1)[:, 0])


@torch.no_grad()
@pytest.mark.parametrize(
    "model", sorted(set(FAMILIES) - set(COUNTED_OTHERWISE + GENERATED_OTHERWISE)), indirect=True
)
def test_greedy_tokens_are_those_of_generate(model: HuggingFaceModel) -> None:
    tokens = torch.randint(3, VOCABULARY, (2, 6), generator=torch.Generator().manual_seed(1))
    settings = model.model.generation_config
    settings.eos_token_id = settings.forced_eos_token_id = None
    theirs = model.model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        max_new_tokens=4,
        do_sample=False,
        pad_token_id=0,
        use_cache=model.served != "recompute",  # where transformers' own cache is wrong too
    )
    rows, ours = model.start(tokens, 4), tokens
    for _ in range(4):
        best = rows.log_probs().argmax(-1)
        ours = torch.cat([ours, best[:, None]], dim=1)
        rows.advance(torch.arange(2), best)
    assert torch.equal(ours, theirs)


def test_a_soft_prompt_of_token_embeddings_is_those_tokens(model: HuggingFaceModel) -> None:
    tokens = torch.randint(3, VOCABULARY, (2, 6), generator=torch.Generator().manual_seed(2))
    if "embeddings" not in model.capabilities:
        with pytest.raises(NotApplicable, match="only with token ids"):
            model.log_probs(tokens, 2, prompt=torch.zeros(2, 32))
        return
    prompt = model.embedding_rows(9)[[7, 4]].requires_grad_(True)
    distribution = model.log_probs(tokens, 2, prompt=prompt)
    close(distribution, model.log_probs(torch.cat([torch.tensor([[7, 4]] * 2), tokens], dim=1), 2))
    close(model.start(tokens, 2, prompt=prompt.detach()).log_probs(), distribution[:, -1])
    # a tuned prompt is no token's embedding
    near = model.log_probs(tokens, 2, prompt=prompt.detach() * 1.0001)
    torch.testing.assert_close(near, distribution.detach(), atol=0.05, rtol=0)
    distribution.sum().backward()  # type: ignore[no-untyped-call]
    assert prompt.grad is not None and float(prompt.grad.abs().sum()) > 0


@pytest.mark.parametrize("family", LOADED)
def test_loading_finds_what_the_row_says(family: str, tmp_path: Path) -> None:
    save(tmp_path, family)
    model, row = load_causal_lm(str(tmp_path)), FAMILIES[family]
    assert (model.served, "embeddings" in model.capabilities) == (row.served, row.embeddings)


def test_a_family_that_is_refused_in_few_bits_is_listed_so() -> None:
    """transformers' own parallel form, which it takes from 64 tokens on, mixes float32 with
    bfloat16."""
    assert [name for name, row in FAMILIES.items() if row.but] == ["xlstm"]
    model = HuggingFaceModel(tiny("xlstm").to(torch.bfloat16), name="xlstm")
    configure_serving(model, 63)
    with pytest.raises(AuditError, match="same dtype"):
        configure_serving(model, 64)


@pytest.mark.parametrize("family", sorted(REFUSED))
def test_a_family_is_refused_by_what_is_wrong_with_it(family: str, tmp_path: Path) -> None:
    save(tmp_path, family)
    with pytest.raises(AuditError, match=REFUSED[family].refused):
        load_causal_lm(str(tmp_path))


@pytest.mark.parametrize("family", ENCODER_DECODERS)
def test_an_encoder_decoder_is_refused(family: str, tmp_path: Path) -> None:
    config_of(family, {}).save_pretrained(tmp_path)
    for ask in (load_causal_lm, load_masked):
        with pytest.raises(AuditError, match="an encoder-decoder"):
            ask(str(tmp_path))


@pytest.mark.parametrize(("ask", "own"), [(load_causal_lm, {"causal": True}), (load_masked, {})])
def test_a_model_of_several_languages_must_be_told_which(
    ask: Any, own: dict[str, Any], tmp_path: Path
) -> None:
    config_of("xlm", {"n_langs": 2, **own}).save_pretrained(tmp_path)
    with pytest.raises(AuditError, match="the language of each token, one of 2"):
        ask(str(tmp_path))


@torch.no_grad()
@pytest.mark.parametrize("family", sorted(MASKED))
def test_a_masked_family_fills_gaps_as_transformers_does(family: str, tmp_path: Path) -> None:
    theirs = save(tmp_path, family, "masked")
    if MASKED[family].refused:
        with pytest.raises(AuditError, match=MASKED[family].refused):
            load_masked(str(tmp_path))
        return
    model, g = load_masked(str(tmp_path)), torch.Generator().manual_seed(0)
    for length, gaps in ((6, [[1], [4], [2]]), (21, [[0, 7], [20, 3], [8, 6]])):
        tokens, at = torch.randint(3, 200, (3, length), generator=g), torch.tensor(gaps)
        tokens[:, 5] = 0  # a padding token that the text spells out
        hidden = tokens.scatter(1, at, model.mask)
        ones = {} if family == "fnet" else {"attention_mask": torch.ones_like(hidden)}
        distribution = theirs(input_ids=hidden, **ones).logits.log_softmax(-1)
        wanted = distribution.gather(1, at[..., None].expand(-1, -1, distribution.shape[-1]))
        close(model.log_probs(tokens, at), wanted)
        close(model.log_probs(tokens[1:2], at[1:2]), wanted[1:2])  # whatever it is asked beside
        close(
            model.token_log_probs(tokens, at),
            wanted.gather(-1, tokens.gather(1, at)[..., None])[..., 0],
        )


def test_the_page_is_printed_from_the_table() -> None:
    assert PAGE.read_text(encoding="utf-8") == page()
