"""A model gives one distribution however it is asked, or is asked the way that is right, or is
refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PrefixTuningConfig, get_peft_model
from peft.tuners.lora import Linear as LoraLinear
from transformers import (
    BertConfig,
    BertLMHeadModel,
    Gemma3nForCausalLM,
    Gemma3nTextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    OpenAIGPTConfig,
    OpenAIGPTLMHeadModel,
    Phi3Config,
    Phi3ForCausalLM,
    RecurrentGemmaConfig,
    RecurrentGemmaForCausalLM,
    ReformerConfig,
    ReformerModelWithLMHead,
    XLMConfig,
    XLMWithLMHeadModel,
    XLNetConfig,
    XLNetLMHeadModel,
)

from auditor.core.errors import AuditError, NotApplicable
from auditor.core.plan_parts import LoadingOptions
from auditor.models import self_check
from auditor.models.consistency import compute_largest_distance
from auditor.models.huggingface import HuggingFaceModel, traffic
from auditor.models.loading import load_causal_lm
from tests.conftest import tiny

SHAPE = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
GROUPED = {**SHAPE, "num_key_value_heads": 2}
GPT = {"vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}
STRETCHED = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [4.0] * 4,
    "original_max_position_embeddings": 24,
}


def peaked(model: Any, scale: float = 3.0) -> Any:
    """A random model whose distributions differ enough from one text to the next."""
    head = model.get_output_embeddings().weight
    with torch.no_grad():
        head.mul_(scale / head.norm(dim=1, keepdim=True).clamp_min(1e-3))
    return model.eval()


def recurrent_gemma() -> Any:
    heads = {
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "lru_width": 32,
        "attention_window_size": 8,
    }
    sizes = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 96, "num_hidden_layers": 3}
    return RecurrentGemmaForCausalLM(RecurrentGemmaConfig(**sizes, **heads))


def reformer() -> Any:
    sizes = {
        "vocab_size": 61,
        "hidden_size": 32,
        "feed_forward_size": 64,
        "attention_head_size": 16,
    }
    places = {
        "axial_pos_shape": [8, 8],
        "axial_pos_embds_dim": [16, 16],
        "max_position_embeddings": 64,
    }
    layers = {
        "attn_layers": ["local", "local"],
        "local_attn_chunk_length": 8,
        "num_attention_heads": 2,
    }
    return ReformerModelWithLMHead(ReformerConfig(**sizes, **places, **layers, is_decoder=True))


def xlm(causal: bool) -> Any:
    sizes = {
        "vocab_size": 61,
        "emb_dim": 32,
        "n_layers": 2,
        "n_heads": 2,
        "max_position_embeddings": 64,
    }
    return XLMWithLMHeadModel(XLMConfig(**sizes, causal=causal))


def gemma3n() -> Any:
    layers = {
        "num_hidden_layers": 5,
        "activation_sparsity_pattern": [0.0] * 5,
        "num_kv_shared_layers": 0,
    }
    each = {
        "vocab_size_per_layer_input": 61,
        "hidden_size_per_layer_input": 8,
        "laurel_rank": 4,
        "head_dim": 8,
    }
    model = Gemma3nForCausalLM(Gemma3nTextConfig(**{**GROUPED, **layers, **each}))
    for name, parameter in model.named_parameters():
        if name.endswith(
            "correct_output_scale"
        ):  # zeros before training: the embeddings of the layers say nothing yet
            torch.nn.init.ones_(parameter)
    return model


def phi3() -> Any:
    return Phi3ForCausalLM(
        Phi3Config(
            **GROUPED,
            pad_token_id=0,
            max_position_embeddings=64,
            original_max_position_embeddings=24,
            rope_parameters=STRETCHED,
        )
    )


def own_distribution(model: Any, tokens: list[int]) -> torch.Tensor:
    """As transformers gives it, whole context by whole context."""
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=torch.tensor([tokens])).logits[0, -1]
    return logits.float().log_softmax(-1)


@pytest.mark.parametrize(
    "made",
    [
        lambda: OpenAIGPTLMHeadModel(OpenAIGPTConfig(**GPT)),
        recurrent_gemma,
        reformer,
        lambda: xlm(causal=True),
    ],
    ids=["openai-gpt", "recurrent-gemma", "reformer", "xlm"],
)
def test_models_whose_past_no_cache_holds_read_each_text_again(made: Callable[[], Any]) -> None:
    model = HuggingFaceModel(peaked(made()), name="forgetful")
    self_check.configure_serving(model)
    assert model.served == "recompute"
    assert [
        note
        for note in model.notes
        if note.startswith("forgetful: its cache changes the distribution")
    ]
    rows = model.start(torch.tensor([[3, 4, 5], [6, 7, 8]]), 2)
    rows.advance(torch.tensor([1, 0, 1]), torch.tensor([9, 10, 11]))
    wanted = torch.stack(
        [
            own_distribution(model.model, text)
            for text in ([6, 7, 8, 9], [3, 4, 5, 10], [6, 7, 8, 11])
        ]
    )
    torch.testing.assert_close(rows.log_probs(), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "made",
    [
        lambda: BertLMHeadModel(BertConfig(**SHAPE, max_position_embeddings=64)),
        lambda: xlm(causal=False),
        lambda: XLNetLMHeadModel(
            XLNetConfig(vocab_size=61, d_model=32, n_layer=2, n_head=2, d_inner=64)
        ),
    ],
    ids=["bert", "xlm", "xlnet"],
)
def test_models_that_see_the_future_are_refused(made: Callable[[], Any], tmp_path: Path) -> None:
    peaked(made()).save_pretrained(tmp_path)
    with pytest.raises(
        AuditError,
        match=r"expected a causal LM, got .* changes by .* nats with the tokens after it",
    ):
        load_causal_lm(str(tmp_path))


def test_a_model_that_embeddings_do_not_tell_all_reads_token_ids(tmp_path: Path) -> None:
    made = peaked(gemma3n())
    made.save_pretrained(tmp_path)
    model = load_causal_lm(str(tmp_path))
    assert model.capabilities == {"draw", "distribution"}
    assert [note for note in model.notes if "soft prompts cannot be used" in note]
    text = [3, 4, 5, 6]
    torch.testing.assert_close(
        model.log_probs(torch.tensor([text]), 1)[0, 0],
        own_distribution(made, text),
        atol=1e-5,
        rtol=1e-5,
    )
    with pytest.raises(NotApplicable):
        model.log_probs(torch.tensor([text]), 1, prompt=torch.zeros(2, 32))


def test_prefix_tuning_is_served_as_peft_answers(tmp_path: Path) -> None:
    base = peaked(LlamaForCausalLM(LlamaConfig(**GROUPED)))
    base.save_pretrained(tmp_path / "base")
    tuned = get_peft_model(
        LlamaForCausalLM.from_pretrained(tmp_path / "base"),
        PrefixTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"),
    )
    torch.nn.init.normal_(tuned.prompt_encoder["default"].embedding.weight)
    tuned.save_pretrained(tmp_path / "adapter")
    model = load_causal_lm(str(tmp_path / "adapter"))
    rows = model.start(torch.tensor([[3, 4, 5]]), 2)
    rows.advance(torch.tensor([0, 0]), torch.tensor([9, 10]))
    wanted = torch.stack([own_distribution(tuned.eval(), [3, 4, 5, token]) for token in (9, 10)])
    torch.testing.assert_close(rows.log_probs(), wanted, atol=1e-5, rtol=1e-5)
    assert float((wanted[0] - own_distribution(base, [3, 4, 5, 9])).abs().max()) > 0.1


def test_positions_that_stretch_with_the_text_end_it() -> None:
    model = HuggingFaceModel(peaked(phi3()), name="stretched")
    # shorter texts are read as they were trained
    assert self_check.configure_serving(model) == ()
    assert self_check.configure_serving(model, 24) == ()
    with pytest.raises(
        AuditError,
        match="expected texts of at most 24 tokens for 'stretched', got 30: more than 24 tokens "
        "change",
    ):
        self_check.configure_serving(model, 30)
    short = peaked(phi3())
    short.config.original_max_position_embeddings = 8
    short.model.rotary_emb.original_max_position_embeddings = 8
    short.config.rope_parameters = {**STRETCHED, "original_max_position_embeddings": 8}
    ended = HuggingFaceModel(short, name="short")
    assert any("more than 8 tokens" in note for note in self_check.configure_serving(ended))
    assert ended.max_positions == 8


def test_windows_are_passed_and_what_was_tried_is_not_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = HuggingFaceModel(peaked(MistralForCausalLM(MistralConfig(**GROUPED, sliding_window=6))))
    passed: list[int] = []
    agree = self_check._SelfCheckTrial._rows_agree_after
    monkeypatch.setattr(
        self_check._SelfCheckTrial,
        "_rows_agree_after",
        lambda self, n, soft=False: (passed.append(n), agree(self, n, soft))[1],
    )
    self_check.configure_serving(model)
    assert passed == [2, 5, 13, 2] and model.served == "slots" and model.notes == ()
    for reach in (None, 10, 16):
        assert self_check.configure_serving(model, reach) == ()
    assert len(passed) == 4
    self_check.configure_serving(model, 40)
    assert passed[4:] == [37]


def test_a_run_checks_a_loaded_model_on_few_short_texts() -> None:
    model = HuggingFaceModel(peaked(LlamaForCausalLM(LlamaConfig(**GROUPED, eos_token_id=60))))
    self_check.configure_serving(model)
    records = [(tuple(range(3, 3 + n)), (4, 5, 6)) for n in range(20, 50)]
    records.append(((60, 7, 8), (4, 5, 6)))
    before = traffic.tokens
    self_check.configure_serving(model, 52, records)
    assert model.can_join_rows and model.begins is not None
    longest, special, short_texts = 2 * 51 + 2, 2 * 5 + 2, 150
    assert traffic.tokens - before < longest + special + short_texts


def test_a_distribution_that_depends_on_no_text_is_refused() -> None:
    model = LlamaForCausalLM(LlamaConfig(**GROUPED))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    with pytest.raises(
        AuditError,
        match=r"expected a distribution that depends on the text, .* the weights are zero or broken",  # noqa: E501
    ):
        self_check.configure_serving(HuggingFaceModel(model))


def test_distributions_that_are_no_numbers_are_refused() -> None:
    made = peaked(LlamaForCausalLM(LlamaConfig(**GROUPED)))
    made.lm_head.weight.data[7] = float("nan")
    with pytest.raises(AuditError, match="expected finite logits, but broken returned NaN"):
        self_check.configure_serving(HuggingFaceModel(made, name="broken"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_passes_and_another_distribution_does_not(dtype: torch.dtype) -> None:
    """The allowed distance is several times what a dtype's rounding does, and far below that of
    another text's distribution."""
    model = HuggingFaceModel(peaked(LlamaForCausalLM(LlamaConfig(**GROUPED))).to(dtype))
    texts = torch.randint(1, 61, (2, 12), generator=torch.Generator().manual_seed(0))
    logits = model.model(input_ids=texts).logits.float()
    allowed = self_check.compute_rounding_tolerance(model.model, logits)
    exact = HuggingFaceModel(LlamaForCausalLM(model.model.config))
    exact.model.load_state_dict(model.model.state_dict())
    rounded = compute_largest_distance(logits.log_softmax(-1), exact.log_probs(texts, 12))
    other = compute_largest_distance(logits[0].log_softmax(-1), logits[1].log_softmax(-1))
    assert 2 * rounded < allowed < other / 3


def test_a_model_whose_gradient_is_always_zero_takes_no_soft_prompt() -> None:
    """As layers in four bits on a processor: torch warns, and gives zeros."""

    class Flat(LlamaForCausalLM):
        def forward(self, input_ids: Any = None, inputs_embeds: Any = None, **more: Any) -> Any:
            if inputs_embeds is not None:
                inputs_embeds = inputs_embeds.detach() + 0 * inputs_embeds
            return super().forward(input_ids=input_ids, inputs_embeds=inputs_embeds, **more)

    torch.manual_seed(0)
    model = HuggingFaceModel(peaked(Flat(LlamaConfig(**GROUPED))))
    notes = self_check.configure_serving(model, 20)
    assert "embeddings" not in model.capabilities
    assert "soft prompts cannot be used with it" in notes[0]


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("out of memory"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("could not create a primitive"),  # oneDNN's word for it
    ],
)
def test_want_of_memory_takes_no_capability_from_a_model(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, whole = tiny(), HuggingFaceModel.log_probs

    def full(self: HuggingFaceModel, contexts: Any, last: int, *, prompt: Any = None) -> Any:
        if prompt is not None:
            raise error
        return whole(self, contexts, last)

    monkeypatch.setattr(HuggingFaceModel, "log_probs", full)
    with pytest.raises((RuntimeError, AuditError), match=r"memory|primitive"):
        self_check.configure_serving(model, 20)
    assert "embeddings" in model.capabilities


def test_what_a_check_found_is_kept_by_the_digest_of_the_weights(tmp_path: Path) -> None:
    first, same, other = tiny(40), tiny(40), tiny(48)
    for model in (first, same, other):
        self_check.configure_serving(model)
    self_check.configure_serving(first, 40, cache=tmp_path)
    assert len([*tmp_path.iterdir()]) == 1 and first.can_join_rows and first.begins is not None
    asked = traffic.tokens
    self_check.configure_serving(same, 40, cache=tmp_path)
    assert traffic.tokens == asked and same.can_join_rows and same.begins is not None
    self_check.configure_serving(other, 40, cache=tmp_path)
    assert traffic.tokens > asked and len([*tmp_path.iterdir()]) == 2


def test_the_base_of_a_checked_adapter_is_served_as_the_adapter_without_trying_it_again() -> None:
    made = peaked(LlamaForCausalLM(LlamaConfig(**GROUPED)))
    adapter = HuggingFaceModel(
        get_peft_model(copy.deepcopy(made), LoraConfig(target_modules=["q_proj"]))
    )
    adapter.model.peft_config["default"].base_model_name_or_path = "base"  # type: ignore[union-attr]
    records = [((5, 6, 7, 8, 9), (4, 5, 6))]

    def count_tokens_of_check(model: HuggingFaceModel, *reaches: int | None) -> int:
        before = traffic.tokens
        for reach in reaches:
            self_check.configure_serving(model, reach, () if reach is None else records)
        return traffic.tokens - before

    first = count_tokens_of_check(adapter, None, 20)
    model = HuggingFaceModel(copy.deepcopy(made), name="base")
    # its causality, which depends on its weights
    assert count_tokens_of_check(model, None, 20) <= 24 < first / 4
    assert model.served == "slots" and model.can_join_rows and model.begins is not None
    assert count_tokens_of_check(model, 40) > 40  # longer than the adapter was checked for
    stretched = LlamaConfig(**GROUPED, max_position_embeddings=1024)
    for unlike in (
        HuggingFaceModel(copy.deepcopy(made), name="else"),
        HuggingFaceModel(peaked(LlamaForCausalLM(stretched)), name="base"),
    ):
        assert count_tokens_of_check(unlike, None, 20) > first / 2


def test_texts_longer_than_the_records_are_checked_too(monkeypatch: pytest.MonkeyPatch) -> None:
    passed: list[int] = []
    agree = self_check._SelfCheckTrial._rows_agree_after
    monkeypatch.setattr(
        self_check._SelfCheckTrial,
        "_rows_agree_after",
        lambda self, n, soft=False: (passed.append(n), agree(self, n, soft))[1],
    )
    records = [((5, 6, 7, 8, 9), (4, 5, 6))]
    for reach, expected in ((8, []), (40, [37])):
        model = HuggingFaceModel(peaked(LlamaForCausalLM(LlamaConfig(**GROUPED))))
        self_check.configure_serving(model)
        passed.clear()
        self_check.configure_serving(model, reach, records)
        assert passed == expected


def test_a_model_that_was_checked_before_is_loaded_without_trying_it_again(tmp_path: Path) -> None:
    peaked(LlamaForCausalLM(LlamaConfig(**GROUPED))).save_pretrained(tmp_path / "model")
    read = list[int]()
    for _ in range(2):
        before = traffic.tokens
        with self_check.keep_self_checks(tmp_path / "kept"):
            model = load_causal_lm(str(tmp_path / "model"))
        read.append(traffic.tokens - before)
        assert model.served == "slots"
    assert read[0] > 0 and read[1] == 0
    self_check.configure_serving(model, 20, [((5, 6, 7), (4, 5))], tmp_path / "kept")
    assert model in self_check._compared_on_records


def test_a_model_of_a_check_is_tried_on_five_tokens_and_can_do_what_it_can_in_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    peaked(LlamaForCausalLM(LlamaConfig(**GROUPED))).save_pretrained(tmp_path / "model")
    passed: list[tuple[int, bool]] = []
    agree = self_check._SelfCheckTrial._rows_agree_after

    def noted(self: self_check._SelfCheckTrial, begin: int, soft: bool = False) -> bool:
        passed.append((self.room, soft))
        return agree(self, begin, soft)

    monkeypatch.setattr(self_check._SelfCheckTrial, "_rows_agree_after", noted)
    with self_check.keep_self_checks(tmp_path / "kept"):
        checked = load_causal_lm(str(tmp_path / "model"))
    assert passed == [(5, False), (5, True)]  # a soft prompt has no room in five tokens
    # Otherwise a check and a run could not be compared.
    assert checked.capabilities == load_causal_lm(str(tmp_path / "model")).capabilities


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_adapter_of_a_check_is_merged_unless_weights_would_be_rounded(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    base = LlamaForCausalLM(LlamaConfig(**GROUPED))
    base.save_pretrained(tmp_path / "base")
    torch.manual_seed(1)
    base.name_or_path = str(tmp_path / "base")
    lora = LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    get_peft_model(base, lora).save_pretrained(tmp_path / "adapter")
    options = LoadingOptions(dtype=str(dtype).removeprefix("torch."))

    def load() -> HuggingFaceModel:
        return load_causal_lm(str(tmp_path / "adapter"), options)

    text = torch.arange(5, 25)[None]
    plain = load()
    expected = plain.log_probs(text, 20)
    assert not plain.is_merged  # a defense may change weights
    for _ in range(2):
        with self_check.keep_self_checks(tmp_path / "kept"):
            model = load()
        assert model.is_merged is (dtype is torch.float32)
        torch.testing.assert_close(model.log_probs(text, 20), expected, atol=1e-5, rtol=1e-5)
        self_check.configure_serving(model, 20, [((5, 6, 7), (4, 5))], tmp_path / "kept")
        assert model.is_merged is (dtype is torch.float32)


@pytest.mark.parametrize(
    "fault", ["another distribution", "a bias that the layer has no place for"]
)
@pytest.mark.filterwarnings("ignore::UserWarning")  # PEFT on biases
def test_an_adapter_that_cannot_be_merged_is_left_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    base = peaked(LlamaForCausalLM(LlamaConfig(**GROUPED)))
    base.save_pretrained(tmp_path / "base")
    base.name_or_path = str(tmp_path / "base")
    lora = LoraConfig(
        target_modules=["q_proj"],
        init_lora_weights=False,
        lora_bias=fault != "another distribution",
        task_type="CAUSAL_LM",
    )
    get_peft_model(base, lora).save_pretrained(tmp_path / "adapter")
    text = torch.arange(5, 25)[None]
    expected = load_causal_lm(str(tmp_path / "adapter")).log_probs(text, 20)
    if fault == "another distribution":
        merge = LoraLinear.get_delta_weight
        monkeypatch.setattr(
            LoraLinear, "get_delta_weight", lambda self, name: 2 * merge(self, name)
        )
    with self_check.keep_self_checks(tmp_path / "kept"):
        model = load_causal_lm(str(tmp_path / "adapter"))
    assert not model.is_merged
    assert torch.equal(model.log_probs(text, 20), expected)
