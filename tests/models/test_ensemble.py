"""Mixed-adapter batches against PEFT with one adapter at a time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model

from auditor.core.errors import AuditError
from auditor.models import lora
from auditor.models.ensemble import EnsembleMemberRows, ModelEnsemble
from auditor.models.huggingface import HuggingFaceModel, Served, traffic
from auditor.models.lora import LoraEnsemble, load_adapter_model, load_lora_ensemble
from auditor.models.shards import find_control_adapter
from tests.rounding import assert_same
from tests.zoo import families as zoo

MakeTiny = Callable[..., HuggingFaceModel]
TARGETS = {"neox": ["query_key_value", "dense_h_to_4h"], "gpt2": ["c_attn"]}


def save_members(
    make_tiny: MakeTiny, folder: Path, count: int, kind: str = "neox", **more: Any
) -> list[Path]:
    paths = []
    for index in range(count):
        torch.manual_seed(100 + index)
        settings: dict[str, Any] = {
            "target_modules": TARGETS[kind],
            "init_lora_weights": False,
            "fan_in_fan_out": kind == "gpt2",
        }
        config = LoraConfig(r=2, lora_alpha=16, task_type="CAUSAL_LM", **settings | more)
        adapted = get_peft_model(make_tiny(kind=kind).model, config)
        with torch.no_grad():  # biases begin as the base has them
            for name, parameter in adapted.named_parameters():
                if parameter.requires_grad and name.endswith("bias"):
                    parameter.normal_()
        adapted.save_pretrained(folder / f"member-{index}")
        paths.append(folder / f"member-{index}")
    return paths


@pytest.mark.parametrize("kind", ["neox", "gpt2"])
def test_mixed_batches_equal_one_adapter_at_a_time(
    make_tiny: MakeTiny, tmp_path: Path, kind: str
) -> None:
    paths = save_members(make_tiny, tmp_path, 3, kind)
    public = make_tiny(kind=kind)
    ensemble = LoraEnsemble(public, paths)
    singles = [make_tiny(kind=kind)] + [
        HuggingFaceModel(PeftModel.from_pretrained(make_tiny(kind=kind).model, str(path)))
        for path in paths
    ]
    contexts = torch.randint(1, 61, (7, 6), generator=torch.Generator().manual_seed(0))
    part = torch.tensor([2, 0, 3, 3, 1, 0, 2])
    prompt = torch.randn(3, 32)
    for soft in (None, prompt):
        expected = torch.cat(
            [
                singles[p].log_probs(c[None], 2, prompt=soft)
                for p, c in zip(part, contexts, strict=True)
            ]
        )
        assert_same(ensemble.log_probs(contexts, part, 2, prompt=soft), expected)
        order = part.argsort()  # in few runs, which are multiplied one by one
        in_runs = ensemble.log_probs(contexts[order], part[order], 2, prompt=soft)
        assert_same(in_runs, expected[order])
    # The general ensemble of whole models says the same.
    general = ModelEnsemble(singles[0], singles[1:])
    assert_same(general.log_probs(contexts, part, 2), ensemble.log_probs(contexts, part, 2))


def save_all_linear_members(family: str, folder: Path) -> list[Path]:
    for index in range(2):
        torch.manual_seed(index)
        config = LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
        get_peft_model(zoo.tiny(family), config).save_pretrained(folder / str(index))
    return [folder / "0", folder / "1"]


@torch.no_grad()
@pytest.mark.parametrize("family", ["opt", "qwen2_moe"])
def test_layers_that_read_all_rows_as_one_answer_by_part(family: str, tmp_path: Path) -> None:
    paths = save_all_linear_members(family, tmp_path)
    ensemble = LoraEnsemble(HuggingFaceModel(zoo.tiny(family)), paths)
    text = torch.randint(3, zoo.VOCABULARY, (3, 9), generator=torch.Generator().manual_seed(0))
    expected = [zoo.tiny(family)(input_ids=text).logits.log_softmax(-1)]
    for path in paths:
        member = PeftModel.from_pretrained(zoo.tiny(family), str(path)).eval()
        expected.append(member(input_ids=text).logits.log_softmax(-1))
    assert_same(ensemble.distributions(text, torch.arange(3), 9), torch.stack(expected, dim=2))
    of_rows = ensemble.log_probs(text, torch.tensor([2, 0, 1]), 4)
    assert_same(of_rows, torch.stack([expected[p][row, -4:] for row, p in enumerate((2, 0, 1))]))
    rows = ensemble.start(text[:, :6], 3).log_probs()
    assert_same(rows, torch.stack([whole[:, 5] for whole in expected], dim=1))


def test_a_base_that_reads_the_weights_of_its_layers_is_refused(tmp_path: Path) -> None:
    paths = save_all_linear_members("jamba", tmp_path)
    with pytest.raises(AuditError, match=r"read each row of a batch by itself, got model \(jamba"):
        LoraEnsemble(HuggingFaceModel(zoo.tiny("jamba"), served="cache"), paths)


# What trains or replaces more than a linear layer's two matrices.
MORE = {
    "biases of layers": {"bias": "all"},
    "biases of updates": {"lora_bias": True},
    "embeddings": {"target_modules": ["query_key_value", "embed_in"]},
    "the head": {"target_modules": ["query_key_value", "lm_head"]},
    "single tokens": {"trainable_token_indices": [5]},
    "what is left of the base": {"init_lora_weights": "pissa"},
    "what is left after QR": {"init_lora_weights": "olora"},
}


@pytest.mark.filterwarnings("ignore::UserWarning")  # PEFT on tied heads, and on biases as shards
@pytest.mark.parametrize("more", MORE.values(), ids=MORE)
def test_members_that_are_more_than_plain_lora_are_refused(
    make_tiny: MakeTiny, tmp_path: Path, more: dict[str, Any]
) -> None:
    """They would change the public model and each other."""
    paths = save_members(make_tiny, tmp_path, 2, **more)
    with pytest.raises(AuditError, match=r"plain (LoRA|linear)"):
        LoraEnsemble(make_tiny(), paths)


@pytest.mark.filterwarnings("ignore::UserWarning")  # PEFT on tied heads, and on biases as shards
@pytest.mark.parametrize("more", MORE.values(), ids=MORE)
def test_an_adapter_on_the_public_model_leaves_it_as_it_was(
    make_tiny: MakeTiny, tmp_path: Path, more: dict[str, Any]
) -> None:
    (path,) = save_members(make_tiny, tmp_path, 1, **more)
    public, text = make_tiny(), torch.arange(2, 14)[None]
    before = public.log_probs(text, 12)
    expected = PeftModel.from_pretrained(make_tiny().model, str(path)).eval()(input_ids=text)
    adapted = load_adapter_model(public, path)
    assert_same(adapted.log_probs(text, 12), expected.logits.log_softmax(-1).detach())
    assert torch.equal(public.log_probs(text, 12), before)


@pytest.mark.parametrize("memory", [2**28, 0])
@pytest.mark.parametrize("kind", ["neox", "gpt2"])
def test_parts_asked_together_say_what_each_says_alone(
    make_tiny: MakeTiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, memory: int
) -> None:
    """With memory for the weights of all, and without."""
    monkeypatch.setattr("auditor.models.mixed_lora._MERGED_BYTES", memory)
    ensemble = LoraEnsemble(make_tiny(kind=kind), save_members(make_tiny, tmp_path, 3, kind))
    contexts = torch.randint(1, 61, (4, 6), generator=torch.Generator().manual_seed(0))
    prompt = torch.randn(3, 32, generator=torch.Generator().manual_seed(1))

    def query_parts(together: bool, parts: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        soft, some = prompt.clone().requires_grad_(), torch.tensor(parts)
        distributions = (ensemble if together else super(LoraEnsemble, ensemble)).distributions(
            contexts, some, 2, prompt=soft
        )
        distributions[..., 5].sum().backward()
        assert distributions.shape == (4, 2, len(parts), 61) and soft.grad is not None
        return distributions.detach(), soft.grad

    for parts in ([0, 1, 2, 3], [3, 0], [2]):
        (together, slope), (alone, expected) = query_parts(True, parts), query_parts(False, parts)
        assert_same(together, alone)
        assert_same(slope, expected, terms=4 * 2 * len(parts))
    rows = ensemble.start(contexts, 1, prompt=prompt).log_probs()
    assert_same(rows, query_parts(True, [0, 1, 2, 3])[0][:, -1])


@pytest.mark.parametrize("memory", [2**28, 0])
def test_a_text_is_read_once_for_all_models_of_an_ensemble(
    make_tiny: MakeTiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory: int
) -> None:
    """If memory holds its states: then single parts and shorter ends of it too."""
    monkeypatch.setattr("auditor.models.lora._STATE_BYTES", memory)
    ensemble = LoraEnsemble(make_tiny(), save_members(make_tiny, tmp_path, 3))
    contexts = torch.randint(1, 61, (4, 6), generator=torch.Generator().manual_seed(0))
    parts = torch.arange(4)
    first = ensemble.distributions(contexts, parts, 3)
    n_read = traffic.tokens
    assert_same(ensemble.distributions(contexts, parts, 3), first)
    assert_same(ensemble.distributions(contexts[1:3], parts[[2, 0]], 2), first[1:3, 1:, [2, 0]])
    assert (traffic.tokens == n_read) == bool(memory)
    others = contexts.flip(1)
    expected = super(LoraEnsemble, ensemble).distributions(others, parts, 6)
    n_read = traffic.tokens
    assert_same(ensemble.distributions(others, parts, 6), expected)
    assert_same(ensemble.distributions(others[:, :-1], parts, 1)[:, 0], expected[:, -2])
    assert traffic.tokens == n_read + 4 * 4 * (6 + 5)  # a text and its beginning are two


@pytest.mark.parametrize("kind", ["neox", "gpt2"])
def test_members_of_a_base_in_half_precision(
    make_tiny: MakeTiny, tmp_path: Path, kind: str
) -> None:
    """Adapters stay in single precision beside it, as PEFT keeps them."""
    paths = save_members(make_tiny, tmp_path, 2, kind)

    def half() -> Any:
        return make_tiny(kind=kind).model.to(torch.bfloat16)

    ensemble = LoraEnsemble(HuggingFaceModel(half()), paths)
    context = torch.tensor([[3, 4, 5, 6]])
    rows = ensemble.start(context, 1).log_probs()[0]
    for part, path in enumerate(paths, start=1):
        single = HuggingFaceModel(PeftModel.from_pretrained(half(), str(path))).log_probs(
            context, 1
        )
        for distribution in (ensemble.log_probs(context, torch.tensor([part]), 1), rows[part]):
            # bfloat16: eight bits
            torch.testing.assert_close(distribution.flatten(), single.flatten(), atol=0.05, rtol=0)
        assert float((single.flatten() - rows[0]).abs().max()) > 0.5


def test_the_control_beside_the_members_is_no_member(make_tiny: MakeTiny, tmp_path: Path) -> None:
    paths = save_members(make_tiny, tmp_path, 3)
    assert find_control_adapter(tmp_path) is None
    paths[2].rename(tmp_path / "whole")
    assert find_control_adapter(tmp_path) == tmp_path / "whole"
    assert load_lora_ensemble(tmp_path, make_tiny()).size == 2


@pytest.mark.parametrize(
    "served, shared", [("slots", False), ("slots", True), ("recompute", False)]
)
def test_rows_of_all_parts_split_together(
    make_tiny: MakeTiny, tmp_path: Path, served: Served, shared: bool
) -> None:
    public = HuggingFaceModel(make_tiny().model, served=served)
    public.can_share_slots = shared  # until the first prefix has no row left
    ensemble = LoraEnsemble(public, save_members(make_tiny, tmp_path, 2))
    general = ModelEnsemble(
        make_tiny(),
        [
            HuggingFaceModel(
                PeftModel.from_pretrained(make_tiny().model, str(tmp_path / f"member-{i}"))
            )
            for i in range(2)
        ],
    )
    contexts = torch.randint(1, 61, (2, 5), generator=torch.Generator().manual_seed(0))
    rows, others = ensemble.start(contexts, 4), general.start(contexts, 4)
    for parents in ([0, 1, 1, 0], [3, 2, 2], [1]):
        at, tokens = torch.tensor(parents), torch.arange(1, 1 + len(parents))
        rows.advance(at, tokens)
        others.advance(at, tokens)
        contexts = torch.cat([contexts[at], tokens[:, None]], dim=1)
        assert rows.log_probs().shape == (len(parents), 3, 61)
        assert_same(rows.log_probs(), others.log_probs())
        for p in range(3):
            expected = ensemble.log_probs(contexts, torch.full((len(parents),), p), 1)[:, 0]
            assert_same(rows.log_probs()[:, p], expected)


@pytest.mark.parametrize("memory", [2**28, 40_000, 0])
@pytest.mark.parametrize("soft", [False, True])
def test_members_that_catch_up_say_what_members_say_that_read_anew(
    make_tiny: MakeTiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, soft: bool, memory: int
) -> None:
    """Rows split, members are asked at random, most of them late; with memory for all, for a few,
    and for none."""
    monkeypatch.setattr("auditor.models.lora._CACHE_BYTES", memory)
    monkeypatch.setattr("auditor.models.lora._TOKENS_AT_ONCE", 20)
    ensemble = LoraEnsemble(make_tiny(), save_members(make_tiny, tmp_path, 4))
    noise = torch.Generator().manual_seed(1)
    prefixes = torch.randint(1, 61, (3, 5), generator=noise)
    prompt = torch.randn(2, 32, generator=noise) if soft else None
    lazy, anew = (
        ensemble.start_member_rows(prefixes, 9, prompt=prompt),
        EnsembleMemberRows(ensemble, prefixes, prompt),
    )
    rows = 3
    for step in range(9):
        row = torch.randint(rows, (6,), generator=noise)
        part = 1 + torch.randint(4 if step % 3 else 1, (6,), generator=noise)
        torch.testing.assert_close(
            lazy.distributions(row, part), anew.distributions(row, part), atol=5e-5, rtol=0
        )
        parents = torch.randint(rows, (min(8, rows + 2),), generator=noise)
        rows, tokens = len(parents), torch.randint(1, 61, (len(parents),), generator=noise)
        lazy.advance(parents, tokens)
        anew.advance(parents, tokens)
    held = sum(x.nbytes for layer in lazy.pool for x in (layer.keys, layer.values))  # type: ignore[attr-defined]
    assert held <= memory


def test_each_layer_multiplies_the_rows_of_a_member_once(
    make_tiny: MakeTiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ensemble = LoraEnsemble(make_tiny(), save_members(make_tiny, tmp_path, 2))
    multiplied = []
    original = lora.MixedLora._merged_output_by_run

    def counting(layer: lora.MixedLora, x: torch.Tensor, runs: Any) -> torch.Tensor:
        multiplied.append(list(runs))
        return original(layer, x, runs)

    monkeypatch.setattr(lora.MixedLora, "_merged_output_by_run", counting)
    members = ensemble.start_member_rows(torch.randint(1, 61, (3, 5)), 1)
    members.distributions(torch.tensor([0, 1, 2, 0, 1]), torch.tensor([1, 2, 1, 2, 1]))
    assert multiplied
    assert all(runs == [(1, 3), (2, 2)] for runs in multiplied)


def test_a_member_asked_again_reads_only_what_is_new(
    make_tiny: MakeTiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ensemble = LoraEnsemble(make_tiny(), save_members(make_tiny, tmp_path, 2))
    read: list[tuple[int, ...]] = []
    original = ensemble.member_next_log_probs

    def counting(embeds: torch.Tensor, *more: Any) -> torch.Tensor:
        read.append(tuple(embeds.shape[:2]))
        return original(embeds, *more)

    monkeypatch.setattr(ensemble, "member_next_log_probs", counting)
    members = ensemble.start_member_rows(torch.tensor([[3, 4, 5, 6, 7]]), 4)

    def ask(*pairs):
        return members.distributions(*(torch.tensor(side) for side in zip(*pairs, strict=True)))

    ask((0, 1), (0, 1), (0, 1))  # three draws of one row by one member are one reading
    members.advance(torch.tensor([0, 0]), torch.tensor([8, 9]))
    ask((0, 1), (1, 1))
    members.advance(torch.tensor([0, 1]), torch.tensor([2, 2]))
    members.advance(torch.tensor([0, 1]), torch.tensor([3, 3]))
    ask((1, 1))
    ask((0, 2))
    members.advance(torch.tensor([0, 1]), torch.tensor([4, 4]))
    ask((1, 2))  # the other row's member 2 read the prefix: what follows it is read here
    assert read == [(1, 5), (2, 1), (1, 2), (1, 8), (1, 4)]


def test_the_public_model_stays_as_it_was(make_tiny: MakeTiny, tmp_path: Path) -> None:
    public, fresh = make_tiny(), make_tiny()
    ensemble = LoraEnsemble(public, save_members(make_tiny, tmp_path, 2))
    context = torch.tensor([[3, 4, 5]])
    ensemble.log_probs(context, torch.tensor([1]), 1)
    assert torch.equal(public.log_probs(context, 1), fresh.log_probs(context, 1))
    assert not any("lora" in name for name, _ in public.model.named_modules())


def test_prompts_get_the_gradient_of_the_member_that_answers(
    make_tiny: MakeTiny, tmp_path: Path
) -> None:
    paths = save_members(make_tiny, tmp_path, 2)
    ensemble = LoraEnsemble(make_tiny(), paths)
    single = HuggingFaceModel(PeftModel.from_pretrained(make_tiny().model, str(paths[1])))
    context, grads = torch.tensor([[3, 4, 5]]), []
    for distribution in (
        lambda p: ensemble.log_probs(context, torch.tensor([2]), 1, prompt=p),
        lambda p: single.log_probs(context, 1, prompt=p),
    ):
        prompt = torch.ones(2, 32, requires_grad=True)
        distribution(prompt)[0, 0, 7].backward()
        grads.append(prompt.grad)
    torch.testing.assert_close(grads[0], grads[1], atol=1e-6, rtol=1e-4)


def test_refusals(make_tiny: MakeTiny, tmp_path: Path) -> None:
    with pytest.raises(AuditError, match="is no folder"):
        load_lora_ensemble(tmp_path / "none", make_tiny())
    with pytest.raises(AuditError, match="found none"):
        load_lora_ensemble(tmp_path, make_tiny())
    with pytest.raises(AuditError, match="vocabulary of 61, but tiny neox has 50"):
        ModelEnsemble(make_tiny(), [make_tiny(vocab_size=50)])
    save_members(make_tiny, tmp_path, 1)
    with pytest.raises(AuditError, match="cannot load the ensemble"):
        load_lora_ensemble(tmp_path, make_tiny(kind="gpt2"))


def test_a_member_may_be_asked_twice_before_its_row_grows(
    make_tiny: MakeTiny, tmp_path: Path
) -> None:
    ensemble = LoraEnsemble(make_tiny(), save_members(make_tiny, tmp_path, 2))
    members = ensemble.start_member_rows(torch.tensor([[1, 2, 3]]), 2)
    row, part = torch.tensor([0, 0]), torch.tensor([1, 2])
    first = members.distributions(row, part)
    assert_same(members.distributions(row, part), first)
    members.advance(torch.tensor([0]), torch.tensor([4]))
    once = members.distributions(row, part)
    assert_same(members.distributions(row, part), once)
    assert_same(once, ensemble.log_probs(torch.tensor([[1, 2, 3, 4]] * 2), part, 1)[:, 0])


def test_no_member_is_loaded_beside_many_others(
    make_tiny: MakeTiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PEFT walks all that it holds for each adapter more: with all of them there, time grew with
    their square."""
    beside, load = list[int](), lora.attach_adapter

    def counted(*given: Any, onto: Any = None) -> Any:
        beside.append(0 if onto is None else len(onto.peft_config))
        return load(*given, onto=onto)

    monkeypatch.setattr(lora, "attach_adapter", counted)
    assert LoraEnsemble(make_tiny(), save_members(make_tiny, tmp_path, 5)).size == 5
    assert beside == [0, 1, 1, 1, 1]
