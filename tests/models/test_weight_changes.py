"""Scores of texts by the change of weights: against plain gradients, and in audits of epsilon."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from auditor.attacks.epsilon_audit import EpsilonAudit
from auditor.core.errors import NotApplicable
from auditor.core.nouns import Canary, Secret, Tokens
from auditor.models import weight_changes
from auditor.models.huggingface import HuggingFaceModel
from auditor.models.weight_changes import WeightChange, regress_weight_change
from auditor.plugins.probe import observe_all_secrets
from auditor.plugins.view import WHITE_BOX, View
from auditor.runs.prefix_token import wrap_prefixed_model
from auditor.statistics.audit_power import estimate_median_epsilon
from auditor.statistics.audited import audit_epsilon_bounds
from auditor.training.finetune import make_untrained_gpt_neox
from tests.conftest import refuses

# PEFT's advice for an adapter on one of two tied matrices
pytestmark = pytest.mark.filterwarnings("ignore:Model (has|with) `tie_word_embeddings")

N_CANARIES = 200
PREFIX = (3, 5)
TEXTS = [(PREFIX, (7, 9)), (PREFIX, (11,)), ((8, 9, 10), (7, 12)), ((4,), (9, 200, 6))]


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


def regress_naively(gradients: Tensor, change: Tensor) -> np.ndarray:
    """Minimise ||change + G alpha||^2 + 2 ||alpha - mean(alpha)||^2 by least squares.

    gradients: (n, parameters); the columns of G are unit gradients.
    """
    columns = (gradients / gradients.norm(dim=1, keepdim=True)).T.double().numpy()
    n = columns.shape[1]
    penalty = 2**0.5 * (np.eye(n) - 1 / n)
    stacked = np.concatenate([columns, penalty])
    right = np.concatenate([-change.double().numpy(), np.zeros(n)])
    return np.asarray(np.linalg.lstsq(stacked, right, rcond=None)[0])


def collect_gradients(model: Any, parameters: Sequence[nn.Parameter]) -> Tensor:
    rows = []
    for prefix, suffix in TEXTS:
        gradients = torch.autograd.grad(compute_loss(model, prefix, suffix), list(parameters))
        rows.append(torch.cat([gradient.flatten() for gradient in gradients]))
    return torch.stack(rows)


def flatten(parameters: Iterable[nn.Parameter]) -> Tensor:
    return torch.cat([p.detach().flatten() for p in parameters])


def test_the_scores_of_a_whole_model_are_a_regression_on_gradients_at_the_reference() -> None:
    reference, target = make_model(), make_model()
    move_randomly(list(target.parameters()), 0.01, 1)
    scores = WeightChange(wrap(target), wrap(reference)).score_texts(TEXTS, 0)
    change = flatten(target.parameters()) - flatten(reference.parameters())
    gradients = collect_gradients(reference, list(reference.parameters()))
    assert scores == pytest.approx(regress_naively(gradients, change), rel=1e-3, abs=1e-6)


@pytest.mark.parametrize("is_merged", [False, True])
def test_the_scores_of_an_adapter_are_of_its_own_parameters(is_merged: bool) -> None:
    config = LoraConfig(r=2, lora_alpha=6, target_modules=["query_key_value", "lm_head"])
    target = get_peft_model(make_model(), config).eval()
    trained = [p for name, p in target.named_parameters() if "lora_B" in name]
    move_randomly(trained, 0.1, 1)
    twin = copy.deepcopy(target)
    if is_merged:
        target.merge_adapter()
    scores = WeightChange(wrap(target), wrap(make_model())).score_texts(TEXTS, 0)

    change = flatten(trained)
    twin_parameters = [p for name, p in twin.named_parameters() if "lora_B" in name]
    with torch.no_grad():
        for p in twin_parameters:
            p.zero_()
    gradients = collect_gradients(twin, twin_parameters)
    assert scores == pytest.approx(regress_naively(gradients, change), rel=1e-3, abs=1e-6)


def test_a_prefix_token_is_read_before_the_text() -> None:
    reference, target = make_model(), make_model()
    move_randomly(list(target.parameters()), 0.01, 1)
    plain = WeightChange(wrap(target), wrap(reference))
    prefixed = WeightChange(
        wrap_prefixed_model(wrap(target), (0,)), wrap_prefixed_model(wrap(reference), (0,))
    )
    longer = [((0, *prefix), suffix) for prefix, suffix in TEXTS]
    assert prefixed.score_texts(TEXTS, 0).tolist() == plain.score_texts(longer, 0).tolist()


def test_the_order_of_texts_changes_no_score_and_equal_texts_have_equal_scores() -> None:
    target = make_model()
    move_randomly(list(target.parameters()), 0.01, 1)
    change = WeightChange(wrap(target), wrap(make_model()))
    texts = [*TEXTS, TEXTS[0]]
    scores = change.score_texts(texts, 0)
    assert scores[0] == pytest.approx(scores[-1], rel=1e-4)
    assert change.score_texts(texts[::-1], 0)[::-1] == pytest.approx(scores, rel=1e-4)
    assert len(set(scores.round(5))) == len(TEXTS)


def plant_gradients(n: int, size: int) -> tuple[Tensor, np.ndarray, Tensor]:
    """Return gradients with a common part, coins, and a noisy sum of those that a coin included.

    Another part of the change, along the common direction, hides the coins from inner products.
    """
    generator = torch.Generator().manual_seed(3)
    shared = torch.randn(size, generator=generator)
    shares = torch.rand(n, 1, generator=generator)
    gradients = torch.randn(n, size, generator=generator) + 0.5 * shares * shared
    gradients /= gradients.norm(dim=1, keepdim=True)
    coins = np.random.default_rng(3).random(n) < 0.5
    change = -gradients[torch.from_numpy(coins)].sum(0) - 40 * shared / shared.norm()
    return gradients, coins, change + 0.5 * torch.randn(size, generator=generator)


@pytest.mark.parametrize("sketch_bytes", [2**30, 4 * 200 * 4000])
def test_a_common_direction_hides_no_coin_with_and_without_sketches(
    sketch_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    n, size = 200, 8000
    monkeypatch.setattr(weight_changes, "_SKETCH_BYTES", sketch_bytes)
    gradients, coins, change = plant_gradients(n, size)
    n_read = 0

    def read_parts() -> Iterator[tuple[Tensor, Tensor]]:
        nonlocal n_read
        for gradient in gradients:
            n_read += 1
            yield gradient[: size // 2].view(2, -1), gradient[size // 2 :]

    parts = (change[: size // 2].view(2, -1), change[size // 2 :])
    scores = regress_weight_change(parts, read_parts, n, seed=5)
    assert n_read == n * (1 if sketch_bytes == 2**30 else 2)
    bound = audit_epsilon_bounds(scores, coins, 1e-5, 0.05)[0].epsilon
    projections = -(gradients @ change).double().numpy()
    assert bound > 1.5 > audit_epsilon_bounds(projections, coins, 1e-5, 0.05)[0].epsilon


def test_sketches_have_the_stated_size_and_keep_inner_products_on_average() -> None:
    generator = torch.Generator().manual_seed(0)
    one, other, common = torch.randn(3, 3000, generator=generator)
    common /= common.norm()
    other += one
    products, shared = [], []
    for seed in range(200):
        sketch = weight_changes._GradientSketch([common[:1000], common[1000:]], 50, seed)

        def compress(gradient: Tensor, sketch: Any = sketch) -> Tensor:
            return sketch.compress([gradient[:1000], gradient[1000:]])

        assert compress(one).shape == (50,)
        products.append(float(compress(one) @ compress(other)))
        shared.append(float(compress(one) @ compress(common)))
    error = np.std(products) / len(products) ** 0.5
    assert np.mean(products) == pytest.approx(float(one @ other), abs=4 * error)
    assert error < 0.1 * float(one @ other)
    assert shared == pytest.approx([float(one @ common)] * 200, abs=1e-3)


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
    assert any("canaries' gradients" in note for note in probe.notes(secrets, observed))
    return probe.epsilon_lower_bounds(secrets, observed)[0].epsilon


def test_an_audit_by_gradients_nears_its_ceiling_and_shows_nothing_of_noise() -> None:
    secrets = make_secrets()
    ceiling = estimate_median_epsilon(N_CANARIES, 0.5, (1.0, 1), 1e-5, 0.05)
    assert audit_model(train_in_one_step(secrets, 0.5), secrets) > 0.8 * ceiling > 1
    untouched, trained = make_head_adapter()
    move_randomly([trained], 5e-4, 2)
    assert audit_model(untouched, secrets) == 0


def test_gradients_are_of_whole_records_if_the_training_says_what_follows_them() -> None:
    """The canaries' scores are then those of the texts that were trained."""
    secrets = make_secrets()[:6]
    prefix = (7,)
    target, trained = make_head_adapter()
    move_randomly([trained], 1e-3, 2)
    models = [wrap_prefixed_model(wrap(model), prefix) for model in (target, make_model())]
    view = View("target", models[0], WHITE_BOX, seed=0, reference=models[1])
    scores = {}
    for after in (None, (), (9,)):
        observed = observe_all_secrets(
            EpsilonAudit(score="gradient"), replace(view, tokens_after=after), secrets
        )
        scores[after] = [observation.values["score"] for observation in observed]
    change = WeightChange(wrap(target), wrap(make_model()))
    whole = [(prefix, (*secret.tokens, 9)) for secret in secrets]
    assert scores[9,] == pytest.approx(change.score_texts(whole, 0), rel=1e-6)
    of_secrets = [((*prefix, *secret.prefix), secret.suffix) for secret in secrets]
    assert scores[None] == pytest.approx(change.score_texts(of_secrets, 0), rel=1e-6)
    assert scores[()] != scores[9,]


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
