"""Decoding rows against contexts run from scratch; loading; refusals."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from auditor.attacks.extraction_probability import ExtractionProbability
from auditor.core.errors import AuditError, NotApplicable
from auditor.core.nouns import Secret
from auditor.core.plan_parts import LoadingOptions
from auditor.core.secret_randomness import make_keyed_generator
from auditor.defenses.uniform_mixing import UniformMixingModel
from auditor.models.base import compute_text_nlls
from auditor.models.huggingface import HuggingFaceModel
from auditor.models.loading import load_causal_lm
from auditor.models.slot_cache import assign_cache_slots
from auditor.plugins.view import WHITE_BOX, View
from auditor.runs.scoring import measure_repeat_recall
from auditor.training.finetune import train_packed_blocks
from tests.rounding import assert_same

MakeTiny = Callable[..., HuggingFaceModel]


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_first_children_stay_and_slots_stay_dense(data: st.DataObject) -> None:
    rows = data.draw(st.integers(1, 8))
    slots = torch.tensor(data.draw(st.permutations(range(rows))))
    parents = torch.tensor(data.draw(st.lists(st.integers(0, rows - 1), min_size=1, max_size=12)))
    new, source, destination = assign_cache_slots(parents, slots)
    assert sorted(new.tolist()) == list(range(len(parents)))  # dense, no two rows in one slot
    for child, parent in enumerate(parents.tolist()):
        first = parents.tolist().index(parent) == child
        if first and slots[parent] < len(parents):
            assert new[child] == slots[parent]  # not copied
    moved = {int(d): int(s) for s, d in zip(source, destination, strict=True)}
    for child, parent in enumerate(parents.tolist()):
        assert moved.get(int(new[child]), int(new[child])) == int(slots[parent])


def test_an_end_of_text_beyond_the_vocabulary_is_none() -> None:
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 16, "n_positions": 16}
    own = GPT2LMHeadModel(GPT2Config(vocab_size=61, eos_token_id=[7, 50256], **sizes))
    assert HuggingFaceModel(own).eos == (7,)
    default = HuggingFaceModel(GPT2LMHeadModel(GPT2Config(vocab_size=61, **sizes)))
    assert default.eos == ()
    view = View("target", default, WHITE_BOX, seed=0)
    with pytest.raises(AuditError, match="a model with an end of text for eos=masked, got model"):
        view.decoding_in_this_setting(ExtractionProbability(eos="masked").sampling())


def check_rows(model: HuggingFaceModel, prompt: torch.Tensor | None = None) -> None:
    """Splits, deaths and growth: after every advance each row's distribution is that of its whole
    context."""
    g = torch.Generator().manual_seed(0)
    contexts = torch.randint(1, model.vocab_size, (3, 5), generator=g)
    rows = model.start(contexts, 6, prompt=prompt)
    for parents in ([0, 0, 1, 2, 2, 2], [5, 1, 1, 0], [3], [0, 0, 0, 0, 0, 0, 0, 0, 0], [8, 0, 4]):
        at = torch.tensor(parents)
        tokens = torch.randint(1, model.vocab_size, (len(parents),), generator=g)
        rows.advance(at, tokens)
        contexts = torch.cat([contexts[at], tokens[:, None]], dim=1)
        expected = model.log_probs(contexts, 1, prompt=prompt)[:, 0]
        # Distributions of -30 nats and more: what two orders of summing differ by grows with what
        # is summed.
        torch.testing.assert_close(rows.log_probs(), expected, atol=1e-5, rtol=1e-5)
        assert len(rows) == len(parents)


@pytest.mark.parametrize("kind", ["neox", "gpt2"])
def test_rows_agree_with_whole_contexts(make_tiny: MakeTiny, kind: str) -> None:
    check_rows(make_tiny(kind=kind))


def test_rows_agree_with_whole_contexts_for_grouped_queries_and_sliding_windows() -> None:
    torch.manual_seed(0)
    shape = {
        "vocab_size": 50,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    check_rows(HuggingFaceModel(LlamaForCausalLM(LlamaConfig(**shape))))
    check_rows(HuggingFaceModel(MistralForCausalLM(MistralConfig(**shape, sliding_window=4))))


def test_a_soft_prompt_stands_in_front_and_gets_gradients(neox: HuggingFaceModel) -> None:
    prompt = torch.randn(4, 32)
    check_rows(neox, prompt)
    tokens = torch.tensor([[5, 6, 7]])
    as_rows = neox.embedding_rows(8)[[2, 3]]
    plain = neox.log_probs(torch.tensor([[2, 3, 5, 6, 7]]), 2)
    assert_same(neox.log_probs(tokens, 2, prompt=as_rows), plain)
    prompt.requires_grad_(True)
    neox.log_probs(tokens, 1, prompt=prompt).sum().backward()
    assert prompt.grad is not None and float(prompt.grad.abs().sum()) > 0


def test_rows_without_a_cache_agree_with_whole_contexts(neox: HuggingFaceModel) -> None:
    recomputed = HuggingFaceModel(neox.model, served="recompute")
    assert recomputed.row_bytes(100) < neox.row_bytes(100)
    check_rows(recomputed)
    check_rows(recomputed, torch.randn(4, 32, generator=torch.Generator().manual_seed(0)))


def test_a_model_without_embeddings_takes_no_soft_prompt(neox: HuggingFaceModel) -> None:
    plain = HuggingFaceModel(neox.model, name="plain", embeddings=False)
    check_rows(plain)
    assert plain.capabilities == {"draw", "distribution"}
    assert UniformMixingModel(plain, 0.5).capabilities == {"draw", "distribution"}
    for ask in (plain.start, plain.log_probs):
        with pytest.raises(
            NotApplicable, match="needs a soft prompt; plain is exact only with token ids"
        ):
            ask(torch.tensor([[1, 2]]), 1, prompt=torch.zeros(2, 32))


def test_scores_agree_with_hugging_face_loss(neox: HuggingFaceModel) -> None:
    tokens = torch.randint(1, 61, (5, 12), generator=torch.Generator().manual_seed(1))
    scores = neox.token_log_probs(tokens[:, :4], tokens[:, 4:])
    labels = tokens.clone()
    labels[:, :4] = -100
    loss = neox.model(input_ids=tokens, labels=labels).loss
    assert_same(-scores.mean(), loss)
    nll, count = next(iter(compute_text_nlls(neox, [tuple(tokens[0].tolist())])))
    assert count == 11
    assert nll == pytest.approx(
        float(neox.model(input_ids=tokens[:1], labels=tokens[:1]).loss) * 11, abs=1e-4
    )


def test_too_long_a_sequence_is_refused_with_the_numbers(make_tiny: MakeTiny) -> None:
    with pytest.raises(
        AuditError, match=r"prefix \(60\) \+ suffix \(10\) .* = 70 tokens, but tiny gpt2 has 64"
    ):
        make_tiny(kind="gpt2").start(torch.ones(1, 60, dtype=torch.long), 10)


def test_nan_logits_are_refused(make_tiny: MakeTiny) -> None:
    model = make_tiny(seed=9)
    model.model.get_output_embeddings().weight.data[3] = float("nan")
    with pytest.raises(AuditError, match="returned NaN"):
        model.log_probs(torch.tensor([[1, 2]]), 1)


def test_local_folders_load_with_dtype(make_tiny: MakeTiny, tmp_path: Path) -> None:
    model = make_tiny(seed=3)
    model.model.save_pretrained(tmp_path)
    again = load_causal_lm(str(tmp_path))
    context = torch.tensor([[4, 5, 6]])
    torch.testing.assert_close(again.log_probs(context, 1), model.log_probs(context, 1))
    assert again.tokenizer is None
    half = load_causal_lm(str(tmp_path), LoadingOptions(dtype="bfloat16"))
    # distributions are single precision whatever the weights are
    assert half.log_probs(context, 1).dtype == torch.float32
    torch.testing.assert_close(
        half.log_probs(context, 1), model.log_probs(context, 1), atol=0.2, rtol=0
    )


def test_peft_adapter_folders_load_on_their_base(make_tiny: MakeTiny, tmp_path: Path) -> None:
    base = make_tiny(seed=5)
    base.model.save_pretrained(tmp_path / "base")
    peft = get_peft_model(
        load_causal_lm(str(tmp_path / "base")).model,
        LoraConfig(
            r=2, target_modules=["query_key_value"], task_type="CAUSAL_LM", init_lora_weights=False
        ),
    )
    peft.save_pretrained(tmp_path / "adapter")
    adapted = load_causal_lm(str(tmp_path / "adapter"))
    context = torch.tensor([[4, 5, 6]])
    difference = (adapted.log_probs(context, 1) - base.log_probs(context, 1)).abs().max()
    assert float(difference) > 1e-3
    check_rows(adapted)


@pytest.mark.parametrize(
    ("name", "why"), [("/no/such/folder", "no such folder"), (".", "cannot load")]
)
def test_what_is_no_model_is_refused_in_one_sentence(
    name: str, why: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(AuditError, match=why) as refusal:
        load_causal_lm(name)
    assert "\n" not in str(refusal.value)


def test_unknown_dtypes_and_devices_are_refused(tmp_path: Path) -> None:
    with pytest.raises(AuditError, match="expected dtype in"):
        load_causal_lm(str(tmp_path), LoadingOptions(dtype="int3"))
    with pytest.raises(AuditError, match="expected --device as auto, cpu"):
        load_causal_lm(str(tmp_path), LoadingOptions(device="teapot"))


def test_recall_does_not_move_in_bfloat16(tmp_path: Path) -> None:
    """A model that has learnt its text by heart gives it away in half the bits too."""
    torch.manual_seed(0)
    texts = torch.randint(1, 61, (12, 16))
    learnt = GPTNeoXForCausalLM(
        GPTNeoXConfig(
            vocab_size=61,
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=128,
            max_position_embeddings=32,
        )
    )
    train_packed_blocks(
        learnt,
        [tuple(text) for text in texts.tolist()],
        epochs=150,
        rate=5e-3,
        batch=12,
        block=17,
        end=0,
        order=make_keyed_generator("by heart"),
    )
    learnt.save_pretrained(tmp_path)
    secrets = [
        Secret(str(i), tuple(text[:6]), tuple(text[6:])) for i, text in enumerate(texts.tolist())
    ]
    recall = {
        dtype: measure_repeat_recall(
            load_causal_lm(str(tmp_path), LoadingOptions(dtype=dtype)), secrets
        )["all"].value
        for dtype in ("float32", "bfloat16")
    }
    assert recall["float32"] > 0.8
    assert recall["bfloat16"] == recall["float32"]
