"""The private loop: per-sample gradients against single backward passes, clipping and noise against
a naive twin."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from auditor.core.errors import AuditError
from auditor.core.secret_randomness import make_keyed_generator
from auditor.plugins.trainer import TrainerCheckpoint
from auditor.training import per_sample
from auditor.training.dp_loop import PoissonSampler, PrivateRecipe, fit_privately
from auditor.training.finetune import list_trainable_parameters, make_untrained_gpt_neox
from tests.conftest import tiny
from tests.training.naive_noise import NaiveNoise

EXAMPLES = [
    tuple(make_keyed_generator("private", i).integers(1, 60, 4 + i % 7).tolist()) for i in range(12)
]


def gpt2() -> Any:
    return tiny(kind="gpt2").model.requires_grad_(True)


def neox() -> Any:
    """Tied embeddings, as the lab's."""
    return make_untrained_gpt_neox(
        vocab_size=61, layers=2, hidden=16, heads=2, positions=64, end=0, seed=0
    )


def neox_untied() -> Any:
    return tiny().model.requires_grad_(True)


def gpt2_untied() -> Any:
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 61,
        "n_embd": 16,
        "n_layer": 1,
        "n_head": 2,
        "n_positions": 64,
        "bos_token_id": 0,
    }
    return GPT2LMHeadModel(GPT2Config(**sizes, eos_token_id=0, tie_word_embeddings=False))


def llama() -> Any:
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 24,
    }
    return LlamaForCausalLM(LlamaConfig(vocab_size=61, max_position_embeddings=64, **sizes))


def llama_padding() -> Any:
    """End of text as `padding_idx`, whose row torch gives no gradient."""
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 24,
    }
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=61, max_position_embeddings=64, pad_token_id=3, **sizes)
    )


def gemma() -> Any:
    """Its embedding has a buffer: the constant that it is scaled by."""
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 24,
    }
    more = {
        "num_key_value_heads": 1,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "pad_token_id": 3,
    }
    return Gemma3ForCausalLM(
        Gemma3TextConfig(vocab_size=61, tie_word_embeddings=False, **sizes, **more)
    )


def longrope(original: int) -> Any:
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 24,
    }
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "original_max_position_embeddings": original,
    }
    rope |= {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "factor": 4.0}
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=61, max_position_embeddings=64, rope_parameters=rope, **sizes)
    )


def gpt2_lora() -> Any:
    return adapted(tiny(kind="gpt2").model, True)


def neox_lora() -> Any:
    return adapted(neox().requires_grad_(False), False)


def adapted(model: Any, transposed: bool) -> Any:
    torch.manual_seed(1)
    config = LoraConfig(
        r=2, target_modules="all-linear", fan_in_fan_out=transposed, init_lora_weights=False
    )
    return get_peft_model(model, config)


MODELS = {
    f.__name__: f
    for f in (
        neox,
        neox_untied,
        gpt2,
        gpt2_untied,
        llama,
        llama_padding,
        gemma,
        gpt2_lora,
        neox_lora,
    )
}
LOSSES = (-1, 1, 2.5)


def single_gradients(model: Any, examples: list[tuple[int, ...]]) -> list[dict[str, Tensor]]:
    """By one backward pass each, with the model's own loss: the naive twin."""
    found = []
    for example in examples:
        model.zero_grad(set_to_none=True)
        tokens = torch.tensor([example])
        model(input_ids=tokens, labels=tokens).loss.backward()
        found.append(
            {
                name: p.grad.clone()
                for name, p in list_trainable_parameters(model).items()
                if p.grad is not None
            }
        )
    model.zero_grad(set_to_none=True)
    return found


@pytest.mark.filterwarnings("ignore:Full backward hook")
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("ghost", [False, True])
def test_per_sample_gradients_are_those_of_single_records(make: Any, ghost: bool) -> None:
    model = make()
    per_sample._disable_dropout(model)
    expected = single_gradients(model.train(), EXAMPLES[:5])
    wrapped = per_sample.wrap_opacus(model, ghost)
    per_sample.compute_padded_record_nlls(
        wrapped, *per_sample.pad_examples(EXAMPLES[:5], 0, device="cpu")
    ).sum().backward()
    named = list_trainable_parameters(model)
    assert set(expected[0]) == set(named)
    # A small entry is a sum of large ones: its rounding is that of the largest, not its own.
    largest = {
        name: max(gradients[name].abs().max().item() for gradients in expected) for name in named
    }
    for i, gradients in enumerate(expected):
        if ghost:
            wrapped.compute_record_gradient(i)
        for name, gradient in gradients.items():
            found = named[name].grad_sample[0 if ghost else i]
            allowed = 1e-6 * max(1, largest[name])
            torch.testing.assert_close(
                found, gradient, atol=allowed, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
            )


@pytest.mark.parametrize("ghost", [False, True])
@pytest.mark.parametrize("make", [llama_padding, gemma])
def test_what_is_no_obstacle_is_trained(make: Any, ghost: bool) -> None:
    """Rows without a gradient, and buffers that are constants."""
    assert any(3 in example for example in EXAMPLES)
    trained = fit_privately(
        make(), EXAMPLES, PoissonSampler(12, 0.4, "l"), recipe(steps=1, ghost=ghost), pad=0
    )
    assert trained.moved


@pytest.mark.parametrize("ghost", [False, True])
def test_gradients_that_were_left_are_no_records(ghost: bool) -> None:
    """Of a backward pass before: they change neither what is refused nor what is learnt."""
    weights = []
    for left in (False, True):
        model = llama_padding()
        if left:
            model(
                input_ids=torch.tensor([EXAMPLES[0]]), labels=torch.tensor([EXAMPLES[0]])
            ).loss.backward()
        fit_privately(
            model, EXAMPLES, PoissonSampler(12, 0.4, "left"), recipe(steps=1, ghost=ghost), pad=0
        )
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.equal(*weights)


@pytest.mark.parametrize(("original", "block"), [(4, 10), (9, 10), (64, 10), (3, 10)])
def test_a_record_that_depends_on_the_length_of_its_batch_is_found(
    original: int, block: int
) -> None:
    """Rotary embeddings that change past their original length, wherever that lies between the
    records' lengths."""
    examples = [example[:block] for example in EXAMPLES]
    model, sampler = longrope(original), PoissonSampler(12, 0.4, "m")
    if original in (3, 64):  # all of the records lie on one side
        assert fit_privately(model, examples, sampler, recipe(steps=1), pad=0).moved
        return
    with pytest.raises(
        AuditError,
        match=r"rotary_emb \(LlamaRotaryEmbedding\) keeps statistics of inputs or lengths",
    ):
        fit_privately(model, examples, sampler, recipe(steps=1), pad=0)


class _Scaled(nn.Module):
    """Depends on how long the batch is, and no buffer shows it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * (2.0 if x.shape[1] > 6 else 1.0)


def test_short_records_are_tried_beside_long_ones() -> None:
    model = neox()
    layer = model.gpt_neox.layers[1]
    layer.mlp.dense_4h_to_h = _Scaled(layer.mlp.dense_4h_to_h)
    with pytest.raises(
        AuditError,
        match=r"record of 10 tokens, the gradients of .* differ from those of single records",
    ):
        fit_privately(model, EXAMPLES, PoissonSampler(12, 0.4, "n"), recipe(), pad=0)
    pairs = per_sample.pick_gradient_check_pairs([(1,) * n for n in (3, 9, 12, 100, 5, 100, 70, 2)])
    assert [tuple(map(len, pair)) for pair in pairs] == [
        (2, 100),
        (5, 100),
        (9, 100),
        (70, 100),
        (100, 100),
    ]


def test_an_adapter_is_not_advised_to_those_who_have_one() -> None:
    model = adapted(spoilt("mixing").requires_grad_(False), False)
    with pytest.raises(
        AuditError, match="from those of single records; freeze or replace that layer"
    ) as error:
        fit_privately(model, EXAMPLES, PoissonSampler(12, 0.4, "o"), recipe(), pad=0)
    assert "--lora" not in str(error.value)


def recipe(**more: Any) -> PrivateRecipe:
    given: dict[str, Any] = {
        "noise_multiplier": 0.5,
        "clip": 0.3,
        "steps": 3,
        "expected_batch": 4.0,
    }
    return PrivateRecipe(
        **{**given, "learning_rate": 0.1, "optimizer": "sgd", "physical_batch": 2, **more}
    )


def naive_step(
    model: Any,
    units: list[int],
    shares: list[float],
    scale: float,
    how: PrivateRecipe,
    key: str,
    step: int,
) -> None:
    """min(1, C s_i / |g_i|) g_i summed, + scale sigma C z, over L; plain SGD."""
    named = list_trainable_parameters(model)
    summed = {name: torch.zeros_like(p) for name, p in named.items()}
    for unit, gradients in zip(
        units, single_gradients(model, [EXAMPLES[u] for u in units]), strict=True
    ):
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in gradients.values()))
        for name, g in gradients.items():
            summed[name] += min(1.0, how.clip * shares[unit] / norm) * g
    noise = NaiveNoise(key, step, sum(p.numel() + 1 for p in named.values()))
    with torch.no_grad():
        for name, p in named.items():
            z = (
                scale
                * how.noise_multiplier
                * how.clip
                * torch.from_numpy(noise.normal(p.numel())).view(p.shape)
            )
            p -= how.learning_rate * (summed[name] + z) / how.expected_batch


@pytest.mark.parametrize("ghost", [False, True])
@pytest.mark.parametrize("physical_batch", [1, 5])
def test_steps_are_those_of_a_naive_twin(ghost: bool, physical_batch: int) -> None:
    """Shares of the clip, scales of the noise, physical batches, an empty batch: all in one."""
    shares = [1.0 if i % 2 else 0.25 for i in range(12)]

    def scale(units: Any) -> float:
        return 0.1 + 0.05 * len(units)

    sampler = PoissonSampler(12, 0.12, "k")
    batches = [sampler.draw_batch_units(step).tolist() for step in range(4)]
    assert [] in batches and max(map(len, batches)) > 1
    how = recipe(steps=4, ghost=ghost, physical_batch=physical_batch)
    model, twin = neox_untied().train(), neox_untied().train()
    trained = fit_privately(model, EXAMPLES, sampler, how, pad=0, shares=shares, noise_scale=scale)
    for step, units in enumerate(batches):
        naive_step(twin, units, shares, scale(units), how, "k", step)
    for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, other, atol=1e-5, rtol=1e-4)
    assert trained.steps == 4 and trained.moved
    assert trained.noise_scales == [scale(units) for units in batches]


@pytest.mark.parametrize("ghost", [False, True])
def test_without_noise_and_clipping_it_is_plain_training_on_the_same_batches(ghost: bool) -> None:
    """The control of a private training: the same loop, and nothing of it private."""
    sampler = PoissonSampler(12, 0.3, "k")
    plain, twin = neox_untied().train(), neox_untied().train()
    fit_privately(
        plain, EXAMPLES, sampler, recipe(noise_multiplier=0.0, clip=math.inf, ghost=ghost), pad=0
    )
    for step in range(3):
        naive_step(
            twin,
            sampler.draw_batch_units(step).tolist(),
            [1.0] * 12,
            1.0,
            recipe(noise_multiplier=0.0, clip=1e9),
            "k",
            step,
        )
    for mine, other in zip(plain.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, other, atol=1e-5, rtol=1e-4)


def test_no_unit_moves_the_sum_by_more_than_the_clip() -> None:
    """The sensitivity, where the mechanism has it: sums with and without one unit, at no noise."""
    how = recipe(noise_multiplier=1e-9, steps=1, clip=0.05, learning_rate=1.0, expected_batch=1.0)
    everyone = PoissonSampler(12, 1.0, "b")
    without = PoissonSampler(11, 1.0, "b")
    whole, less = neox(), neox()
    fit_privately(whole, EXAMPLES, everyone, how, pad=0)
    fit_privately(less, EXAMPLES[:11], without, how, pad=0)
    pairs = zip(whole.parameters(), less.parameters(), strict=True)
    moved = math.sqrt(sum(float((a - b).detach().square().sum()) for a, b in pairs))
    assert 0.04 < moved <= 0.05 * (1 + 1e-3)


def test_batches_are_poisson() -> None:
    sampler = PoissonSampler(40, 0.3, "c")
    drawn = np.zeros((2000, 40))
    for step in range(2000):
        drawn[step, sampler.draw_batch_units(step)] = 1
    assert drawn.mean() == pytest.approx(0.3, abs=0.01)
    # a shuffled loader has 0
    assert drawn.sum(1).std() == pytest.approx(math.sqrt(40 * 0.3 * 0.7), rel=0.06)
    between = np.corrcoef(drawn.T)[np.triu_indices(40, 1)]
    assert abs(between.mean()) < 0.01
    assert np.array_equal(
        sampler.draw_batch_units(7), PoissonSampler(40, 0.3, "c").draw_batch_units(7)
    )
    assert not np.array_equal(
        sampler.draw_batch_units(7), PoissonSampler(40, 0.3, "d").draw_batch_units(7)
    )


class _Killed(Exception):
    pass


@pytest.mark.parametrize("killed_at", [1, 3, 5])
def test_killed_and_resumed_is_the_same_training(tmp_path: Path, killed_at: int) -> None:
    """Also where the last checkpoint is older than the kill: steps are taken again, none is left
    out of the count."""
    how = recipe(steps=6, optimizer="adam", learning_rate=1e-2)
    sampler = PoissonSampler(12, 0.4, "e")
    whole = neox()
    expected = fit_privately(whole, EXAMPLES, sampler, how, pad=0)
    checkpoint, seen = TrainerCheckpoint(tmp_path / "checkpoint.pt"), []

    def kill(done: int, loss: float) -> None:
        seen.append(done)
        if done == killed_at:
            raise _Killed

    every = 0.0 if killed_at != 5 else 1e9  # the last: nothing but the very first checkpoint
    with pytest.raises(_Killed):
        more: Any = {"pad": 0, "checkpoint": checkpoint, "seconds_between": every}
        fit_privately(neox(), EXAMPLES, sampler, how, progress=kill, **more)
    again = neox()
    trained = fit_privately(
        again, EXAMPLES, sampler, how, progress=lambda done, loss: seen.append(done), **more
    )
    assert trained == expected and trained.steps == 6
    assert seen == (
        [*range(1, killed_at + 1), *range(killed_at + 1, 7)]
        if every == 0
        else [*range(1, 6), *range(1, 7)]
    )
    for mine, other in zip(again.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(mine, other, atol=1e-5, rtol=1e-4)


def test_a_checkpoint_with_another_key_is_refused(tmp_path: Path) -> None:
    more: Any = {"pad": 0, "checkpoint": TrainerCheckpoint(tmp_path / "checkpoint.pt")}
    fit_privately(neox(), EXAMPLES, PoissonSampler(12, 0.4, "e"), recipe(), **more)
    with pytest.raises(AuditError, match="another key"):
        fit_privately(neox(), EXAMPLES, PoissonSampler(12, 0.4, "f"), recipe(), **more)


def test_nothing_moves_where_no_step_is_large_enough() -> None:
    assert not fit_privately(
        neox(), EXAMPLES, PoissonSampler(12, 0.4, "g"), recipe(learning_rate=1e-60), pad=0
    ).moved


def test_the_noise_is_gaussian_of_the_stated_size() -> None:
    """A step of an empty batch, at learning rate and batch 1, is the noise itself."""
    model = neox()
    before = torch.cat([p.detach().flatten().clone() for p in model.parameters()])
    how = recipe(noise_multiplier=2.0, clip=0.5, learning_rate=1.0, expected_batch=1.0, steps=1)
    fit_privately(model, EXAMPLES, PoissonSampler(12, 1e-9, "h"), how, pad=0)
    noise = torch.cat([p.detach().flatten() for p in model.parameters()]) - before
    n = len(noise)
    assert float(noise.std()) == pytest.approx(1.0, abs=4 / math.sqrt(2 * n))
    assert float(noise.mean()) == pytest.approx(0.0, abs=4 / math.sqrt(n))
    assert float((noise.abs() < 0.6745).float().mean()) == pytest.approx(
        0.5, abs=4 / math.sqrt(4 * n)
    )


# --- what is refused ---


class _Mixing(nn.Module):
    """Centres the batch: every record's output depends on the others, and no hook sees it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x - x.mean(0, keepdim=True))


class _Statistics(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


class _Switch(nn.Module):
    """Which weight it uses depends on the values: no rule of Opacus's, and none that vmap could
    make."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.randn(2, 16, 16))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weights[int(x.sum() > 0)]


def spoilt(kind: str) -> Any:
    model = neox()
    layer = model.gpt_neox.layers[1]
    if kind == "mixing":
        layer.mlp.dense_4h_to_h = _Mixing(layer.mlp.dense_4h_to_h)
    elif kind == "statistics":
        layer.input_layernorm = _Statistics()
    elif kind == "switch":
        layer.input_layernorm = _Switch()
    return model


def refusals() -> Iterator[tuple[str, Any, dict[str, Any], str]]:
    yield (
        "a layer that mixes records",
        spoilt("mixing"),
        {},
        r"differ from those of single records.*--lora",
    )
    yield (
        "statistics",
        spoilt("statistics"),
        {},
        r"layers.1.input_layernorm.norm \(BatchNorm1d\) keeps statistics",
    )
    yield "no rule", spoilt("switch"), {}, r"no rule for: _Switch; train a LoRA adapter"
    yield "frozen", neox().requires_grad_(False), {}, "got a frozen model: none of its"


@pytest.mark.parametrize(
    ("model", "more", "sentence"), [r[1:] for r in refusals()], ids=[r[0] for r in refusals()]
)
def test_what_opacus_cannot_handle_is_refused_by_name(
    model: Any, more: dict[str, Any], sentence: str
) -> None:
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(AuditError, match=sentence) as error:
        fit_privately(model, EXAMPLES, PoissonSampler(12, 0.4, "i"), recipe(**more), pad=0)
    assert "\n" not in str(error.value)
    assert all(
        torch.equal(before[name], tensor)
        for name, tensor in model.state_dict().items()
        if "norm" not in name
    )


def test_batches_that_are_not_poisson_are_refused() -> None:
    shuffled: Any = torch.utils.data.DataLoader(EXAMPLES, batch_size=4, shuffle=True)  # type: ignore[arg-type]
    with pytest.raises(
        AuditError,
        match="expected Poisson batches, got DataLoader: epsilon is accounted for Poisson",
    ):
        fit_privately(neox(), EXAMPLES, shuffled, recipe(), pad=0)
    with pytest.raises(AuditError, match="a sampler of the 12 examples, got one of 5"):
        fit_privately(neox(), EXAMPLES, PoissonSampler(5, 0.4, "j"), recipe(), pad=0)
