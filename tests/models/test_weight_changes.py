"""Scores of texts by the change of weights: against plain gradients, and in audits of epsilon."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from auditor.attacks.epsilon_audit import EpsilonAudit
from auditor.core.errors import NotApplicable
from auditor.core.nouns import Canary, Secret, Tokens
from auditor.models.huggingface import HuggingFaceModel
from auditor.models.weight_changes import WeightChange
from auditor.plugins.probe import observe_all_secrets
from auditor.plugins.view import WHITE_BOX, View
from auditor.runs.prefix_token import wrap_prefixed_model
from auditor.statistics.audit_power import estimate_median_epsilon
from auditor.training.finetune import make_untrained_gpt_neox
from tests.conftest import refuses

# PEFT's advice for an adapter on one of two tied matrices
pytestmark = pytest.mark.filterwarnings("ignore:Model (has|with) `tie_word_embeddings")

N_CANARIES = 200
PREFIX = (3, 5)


def make_model(vocab_size: int = 407, seed: int = 0) -> Any:
    return make_untrained_gpt_neox(
        vocab_size=vocab_size, layers=1, hidden=32, heads=2, positions=16, end=0, seed=seed
    ).eval()


def wrap(model: Any) -> HuggingFaceModel:
    """Wrap a copy, because the wrapper freezes weights."""
    return HuggingFaceModel(copy.deepcopy(model), None, "model")


def compute_loss(model: Any, prefix: Tokens, suffix: Tokens) -> Tensor:
    text = torch.tensor([[*prefix, *suffix]])
    logits = model(input_ids=text).logits[0, len(prefix) - 1 : -1]
    return nn.functional.cross_entropy(logits, text[0, len(prefix) :])


def move_randomly(parameters: list[nn.Parameter], size: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in parameters:
            p += size * torch.randn(p.shape, generator=generator)


def test_the_score_of_a_whole_model_is_the_derivative_of_the_loss_over_the_gradient_norm() -> None:
    reference, target = make_model(), make_model()
    move_randomly(list(target.parameters()), 0.01, 1)
    score = WeightChange(wrap(target), wrap(reference)).score_text(PREFIX, (7, 9))

    compute_loss(reference, PREFIX, (7, 9)).backward()
    squares = sum(float(p.grad.square().sum()) for p in reference.parameters())
    step = 1e-3
    losses = []
    for sign in (1, -1):
        moved = copy.deepcopy(reference).double()
        with torch.no_grad():
            for p, before, after in zip(
                moved.parameters(), reference.parameters(), target.parameters(), strict=True
            ):
                p += sign * step * (after - before).double()
        losses.append(float(compute_loss(moved, PREFIX, (7, 9)).detach()))
    derivative = (losses[0] - losses[1]) / (2 * step)
    assert score == pytest.approx(-derivative / squares**0.5, rel=1e-3)


@pytest.mark.parametrize("is_merged", [False, True])
def test_the_score_of_an_adapter_is_that_of_its_own_parameters(is_merged: bool) -> None:
    config = LoraConfig(r=2, lora_alpha=6, target_modules=["query_key_value", "lm_head"])
    target = get_peft_model(make_model(), config).eval()
    trained = [p for name, p in target.named_parameters() if "lora_B" in name]
    move_randomly(trained, 0.1, 1)
    twin = copy.deepcopy(target)
    if is_merged:
        target.merge_adapter()
    score = WeightChange(wrap(target), wrap(make_model())).score_text(PREFIX, (7, 9))

    changes = [p.detach().clone() for p in trained]
    twin_parameters = [p for name, p in twin.named_parameters() if "lora_B" in name]
    with torch.no_grad():
        for p in twin_parameters:
            p.zero_()
    gradients = torch.autograd.grad(compute_loss(twin, PREFIX, (7, 9)), twin_parameters)
    product = sum(float((-g * c).sum()) for g, c in zip(gradients, changes, strict=True))
    norm = sum(float(g.square().sum()) for g in gradients) ** 0.5
    assert score == pytest.approx(product / norm, rel=1e-4)


def test_a_prefix_token_is_read_before_the_text() -> None:
    reference, target = make_model(), make_model()
    move_randomly(list(target.parameters()), 0.01, 1)
    plain = WeightChange(wrap(target), wrap(reference))
    prefixed = WeightChange(
        wrap_prefixed_model(wrap(target), (0,)), wrap_prefixed_model(wrap(reference), (0,))
    )
    assert prefixed.score_text(PREFIX, (7,)) == plain.score_text((0, *PREFIX), (7,))


def make_secrets() -> tuple[Secret, ...]:
    coins = np.random.default_rng(0).random(N_CANARIES) < 0.5
    secrets = []
    for i, coin in enumerate(coins.tolist()):
        canary = Canary(f"canary {i}", coin=coin)
        prefix = (3 + i % 150, 5)
        secrets.append(Secret(f"c{i}", prefix, (160 + i,), int(coin), member=coin, canary=canary))
    return tuple(secrets)


def make_head_adapter() -> tuple[Any, nn.Parameter]:
    """Return a model with a LoRA adapter on its head only, and the adapter's matrix B."""
    torch.manual_seed(0)
    model = get_peft_model(make_model(), LoraConfig(r=4, target_modules=["lm_head"])).eval()
    (trained,) = [p for name, p in model.named_parameters() if "lora_B" in name]
    return model, trained


def train_in_one_step(secrets: Sequence[Secret], noise: float) -> Any:
    """Return the adapter after a step of DP-SGD on the included canaries, clipped to norm 1."""
    model, trained = make_head_adapter()
    total = torch.zeros_like(trained)
    for secret in secrets:
        if secret.member:
            loss = compute_loss(model, secret.prefix, secret.suffix)
            (gradient,) = torch.autograd.grad(loss, [trained])
            total += gradient / gradient.norm()
    rate = 1e-3
    with torch.no_grad():
        trained -= rate * total
    move_randomly([trained], rate * noise, 2)
    return model


def audit_model(model: Any, secrets: Sequence[Secret]) -> float:
    probe = EpsilonAudit(score="gradient")
    view = View("target", wrap(model), WHITE_BOX, seed=0, reference=wrap(make_model()))
    observed = observe_all_secrets(probe, view, secrets)
    assert any("along its gradient" in note for note in probe.notes(secrets, observed))
    return probe.epsilon_lower_bounds(secrets, observed)[0].epsilon


def test_an_audit_by_gradients_nears_its_ceiling_and_shows_nothing_of_noise() -> None:
    secrets = make_secrets()
    ceiling = estimate_median_epsilon(N_CANARIES, 0.5, (1.0, 1), 1e-5, 0.05)
    assert audit_model(train_in_one_step(secrets, 0.5), secrets) > 0.8 * ceiling > 1
    untouched, trained = make_head_adapter()
    move_randomly([trained], 5e-4, 2)
    assert audit_model(untouched, secrets) == 0


def test_what_has_no_comparable_weights_is_refused() -> None:
    reference = wrap(make_model())
    with refuses("equal shapes", "gpt_neox.embed_in.weight", error=NotApplicable):
        WeightChange(wrap(make_model(vocab_size=500)), reference)
    with refuses("equal weights", error=NotApplicable):
        WeightChange(wrap(make_model()), reference)
    saved = LoraConfig(r=2, target_modules=["query_key_value"], modules_to_save=["lm_head"])
    with refuses("plain LoRA", "lm_head", error=NotApplicable):
        WeightChange(wrap(get_peft_model(make_model(), saved)), reference)
    with refuses("without an adapter", error=NotApplicable):
        WeightChange(reference, wrap(get_peft_model(make_model(), saved)))
    secrets = make_secrets()[:1]
    view = View("target", reference, WHITE_BOX, seed=0)
    with refuses("reference model", error=NotApplicable):
        next(EpsilonAudit(score="gradient").observe_secrets(view, secrets))
    with refuses("by=loss", "by=samples"):
        EpsilonAudit(score="gradient", by="samples")
