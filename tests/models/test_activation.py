"""An activated LoRA is asked as PEFT serves it: on from its last invocation, however the text is
cut or cached."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from auditor.models import self_check
from auditor.models.activation import ActivatedTexts, find_last_invocation_starts
from auditor.models.base import WholeTextRows
from auditor.models.consistency import find_inconsistencies
from auditor.models.huggingface import HuggingFaceModel
from tests.models.test_self_check import peaked
from tests.rounding import assert_same

INVOCATION = (11, 12, 13)
OTHER = (21, 22)
SIZES = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}


def adapter(invocation: tuple[int, ...]) -> LoraConfig:
    return LoraConfig(
        task_type="CAUSAL_LM",
        r=4,
        init_lora_weights=False,
        target_modules=["q_proj", "v_proj", "down_proj"],
        alora_invocation_tokens=list(invocation),
    )


@pytest.fixture(scope="module")
def adapted() -> PeftModel:
    """A Llama with an activated LoRA whose weights are not zero, and a second one of another
    invocation."""
    base = peaked(
        LlamaForCausalLM(LlamaConfig(**SIZES, num_attention_heads=4, max_position_embeddings=64))
    )
    model = get_peft_model(base, adapter(INVOCATION))
    model.add_adapter("second", adapter(OTHER))
    return model.eval()


def serve_adapted(adapted: PeftModel) -> HuggingFaceModel:
    model = HuggingFaceModel(adapted, name="activated")
    self_check.configure_serving(model, 24)
    return model


def whole(adapted: Any, texts: list[list[int]]) -> Tensor:
    """As PEFT answers each text by itself."""
    with torch.no_grad():
        logits = [adapted(input_ids=torch.tensor([text])).logits[:, -1] for text in texts]
    return torch.cat(logits).float().log_softmax(-1)


# Prefixes of one batch: with the invocation at two places, twice, in part, and without it.
PREFIXES = [
    [1, *INVOCATION, 2, 3, 4, 5],
    [1, 2, 3, 4, 5, *INVOCATION],
    [*INVOCATION, 5, 6, *INVOCATION],
    [1, 2, 3, 4, 5, 6, 11, 12],
    [1, 2, 3, 4, 5, 6, 7, 8],
]


@pytest.mark.parametrize("served", ["slots", "recompute"])
def test_rows_are_switched_on_as_peft_switches_whole_contexts(
    adapted: PeftModel, served: Any
) -> None:
    model = serve_adapted(adapted)
    model.served = served
    rows = model.start(torch.tensor(PREFIXES), 5)
    contexts = PREFIXES
    assert_same(rows.log_probs(), whole(adapted, contexts))
    # The fourth prefix ends its invocation, rows split and die, and a later invocation comes token
    # by token.
    steps = (
        ([0, 1, 2, 3, 4], [7, 8, 9, 13, 13]),
        ([3, 0, 1, 3, 2], [9, 8, 11, 9, 5]),
        ([0, 1, 2, 2, 4], [11, 7, 12, 7, 7]),
        ([2, 1, 0], [13, 12, 12]),
        ([0, 2], [6, 13]),
    )
    for parents, tokens in steps:
        rows.advance(torch.tensor(parents), torch.tensor(tokens))
        contexts = [
            [*contexts[parent], token] for parent, token in zip(parents, tokens, strict=True)
        ]
        assert_same(rows.log_probs(), whole(adapted, contexts))


def test_teacher_forcing_gives_each_position_its_own_last_invocation(adapted: PeftModel) -> None:
    texts = [
        [1, 2, *INVOCATION, 3, 4, *INVOCATION, 5, 6],
        [7, *INVOCATION, 8, 9, 2, 3, 4, 5, *INVOCATION[:2]],
    ]
    found = serve_adapted(adapted).log_probs(torch.tensor(texts), 11)
    for place in range(11):
        assert_same(found[:, place], whole(adapted, [text[: place + 2] for text in texts]))


def test_greedy_decoding_is_that_of_generate(adapted: PeftModel) -> None:
    model = serve_adapted(adapted)
    off = copy.deepcopy(model)
    off.activation.invocation = ()
    differ = 0
    for prefix in PREFIXES:
        generated = adapted.generate(
            input_ids=torch.tensor([prefix]),
            max_new_tokens=6,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
        )[0, len(prefix) :].tolist()
        greedy = [decode_greedily(one, prefix, 6) for one in (model, off)]
        assert greedy[0] == generated
        differ += greedy[0] != greedy[1]
    assert differ  # without what is tested here the adapter is off


def decode_greedily(model: HuggingFaceModel, prefix: list[int], length: int) -> list[int]:
    rows, tokens = model.start(torch.tensor([prefix]), length), list[int]()
    for _ in range(length):
        tokens.append(int(rows.log_probs().argmax(-1)))
        rows.advance(torch.zeros(1, dtype=torch.long), torch.tensor(tokens[-1:]))
    return tokens


def test_soft_prompts_go_in_front_of_an_adapter_that_is_on(adapted: PeftModel) -> None:
    model = serve_adapted(adapted)
    assert "embeddings" in model.capabilities
    texts = torch.tensor(PREFIXES)
    by_ids = model.log_probs(
        torch.cat([torch.tensor([[5, 6]]).expand(len(texts), -1), texts], 1), 3
    )
    soft = model.embedding_rows(7)[5:]
    assert_same(model.log_probs(texts, 3, prompt=soft), by_ids)
    rows = model.start(texts[:, :-2], 2, prompt=soft)
    for place in (-2, -1):
        assert_same(rows.log_probs(), by_ids[:, place - 1])
        rows.advance(torch.arange(len(texts)), texts[:, place])
    assert_same(rows.log_probs(), by_ids[:, -1])


def test_the_active_adapter_of_several_tells_the_invocation(adapted: PeftModel) -> None:
    texts = [[1, 2, *OTHER, 5], [1, *INVOCATION, 5]]
    first = serve_adapted(adapted).log_probs(torch.tensor(texts), 1)[:, 0]
    adapted.set_adapter("second")
    try:
        assert_same(
            serve_adapted(adapted).log_probs(torch.tensor(texts), 1)[:, 0], whole(adapted, texts)
        )
    finally:
        adapted.set_adapter("default")
    assert_same(first, whole(adapted, texts))


def test_an_activated_model_keeps_what_is_promised_of_every_model(adapted: PeftModel) -> None:
    model = serve_adapted(adapted)
    assert (model.served, model.can_join_rows, model.begins, model.notes) == (
        "slots",
        False,
        None,
        (),
    )
    assert list(find_inconsistencies(model)) == []
    model.enable_hidden_state_cache()
    model.read_ahead([(1, *INVOCATION, 2), (1, 2, 3, 4)], [2, 2])
    assert_same(
        model.log_probs(torch.tensor([[1, *INVOCATION, 2]]), 1)[0],
        whole(adapted, [[1, *INVOCATION, 2]]),
    )


def test_the_self_check_sees_rows_that_do_not_switch_the_adapter_on(
    adapted: PeftModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    # PEFT then looks for the invocation in the one token of each call.
    monkeypatch.setattr(ActivatedTexts, "compute_slot_offsets", lambda texts, slots: None)
    model = serve_adapted(adapted)
    assert model.served == "recompute" and isinstance(
        model.start(torch.tensor([[1, 2]]), 1), WholeTextRows
    )


class OnAfterTrigger(LlamaForCausalLM):
    """What no configuration tells: a call that holds token 60 answers otherwise."""

    def forward(self, input_ids: Tensor, past_key_values: Any = None, **kwargs: Any) -> Any:
        output = super().forward(input_ids=input_ids, past_key_values=past_key_values, **kwargs)
        has_trigger = (input_ids == 60).any(1)
        output.logits = torch.where(has_trigger[:, None, None], -output.logits, output.logits)
        return output


def test_records_of_the_run_are_read_step_by_step_and_whole() -> None:
    config = LlamaConfig(
        **SIZES, num_attention_heads=4, max_position_embeddings=64, bos_token_id=60
    )
    model = HuggingFaceModel(peaked(OnAfterTrigger(config)), name="triggered", embeddings=False)
    self_check.configure_serving(model, 24)
    assert model.served == "slots"  # random tokens do not tell: a special token is none of them
    notes = self_check.configure_serving(
        model, 24, [((60, 2, 3), (4, 5, 6)), ((60, 3, 3), (4, 5, 6))]
    )
    assert model.served == "recompute" and [
        "each decoded token reads the whole text again" in note for note in notes
    ]
    rows = model.start(torch.tensor([[60, 2]]), 1)
    rows.advance(torch.tensor([0]), torch.tensor([5]))
    assert_same(rows.log_probs(), model.log_probs(torch.tensor([[60, 2, 5]]), 1)[0])
    assert self_check.configure_serving(model, 24, [((60, 2, 3), (4, 5, 6))]) == ()


def test_the_last_whole_invocation_that_was_read() -> None:
    texts = torch.tensor([[1, 2, 1, 2, 1], [2, 1, 1, 1, 2]])
    assert find_last_invocation_starts(texts, (1, 2)).tolist() == [
        [-1, 0, 0, 2, 2],
        [-1, -1, -1, -1, 3],
    ]
    assert find_last_invocation_starts(texts[:, :1], (1, 2)).tolist() == [[-1], [-1]]
