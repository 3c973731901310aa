"""Uniform mixing: the distribution by hand, the claim tight, the ends exact."""

from __future__ import annotations

import math
from typing import Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from auditor.benchmarks.data.fixed_distributions import FixedDistribution
from auditor.core.secret_randomness import draw_secret_uniforms
from auditor.defenses.uniform_mixing import UniformMixing, mix_public_top_k, mix_uniform
from auditor.generation.sample import sample_candidates
from auditor.models.base import LanguageModel
from auditor.models.decoding import ANCESTRAL
from auditor.models.huggingface import HuggingFaceModel
from auditor.plugins.defense import Scenario
from auditor.privacy.accounting import compute_uniform_mixing_epsilon, realised_pure_dp
from tests.conftest import refuses, tiny


def test_distribution_by_hand() -> None:
    mixed = mix_uniform(torch.tensor([0.7, 0.2, 0.1, 0.0]).log(), 0.5, 4).exp()
    assert mixed.tolist() == pytest.approx([0.475, 0.225, 0.175, 0.125])


def test_the_ends_are_exact(neox: HuggingFaceModel) -> None:
    context = torch.tensor([[1, 2, 3]])
    distribution = neox.log_probs(context, 1)
    assert torch.equal(mix_uniform(distribution, 1.0, 61), distribution)
    # perplexity |V|
    assert mix_uniform(distribution, 0.0, 61).exp().reciprocal().max() == pytest.approx(
        61, rel=1e-5
    )


@given(st.floats(0.01, 0.99), st.integers(0, 2**31))
def test_no_pair_of_models_exceeds_the_claim(weight: float, seed: int) -> None:
    distributions = torch.log_softmax(
        torch.randn(2, 7, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 8,
        -1,
    )
    realised = realised_pure_dp(
        *(
            mix_uniform(distribution, weight, distribution.shape[-1]).numpy()
            for distribution in distributions
        )
    )
    assert realised <= compute_uniform_mixing_epsilon(weight, 7) + 1e-9


def test_where_nothing_is_drawn_the_claim_is_that_of_one_token_and_says_so(
    neox: HuggingFaceModel,
) -> None:
    scenario, defense = (
        Scenario(neox, None, None, queries=0, answer_length=4),
        UniformMixing(weight=0.6),
    )
    claim = defense.claim(scenario, 0)
    assert claim.queries == 1 and claim.spent_queries == 0
    assert claim.epsilon["any two models"] == pytest.approx(
        compute_uniform_mixing_epsilon(0.6, neox.vocab_size)
    )
    assert any("one token" in remark for remark in defense.remarks(scenario))
    assert defense.remarks(Scenario(neox, None, None, queries=5, answer_length=4)) == ()


def test_the_claim_is_attained_by_opposite_one_hots() -> None:
    one_hots = torch.full((2, 5), -math.inf, dtype=torch.float64)
    one_hots[0, 0] = one_hots[1, 1] = 0.0
    realised = realised_pure_dp(
        *(
            mix_uniform(distribution, 0.3, distribution.shape[-1]).numpy()
            for distribution in one_hots
        )
    )
    assert realised == pytest.approx(compute_uniform_mixing_epsilon(0.3, 5), rel=1e-12)


@pytest.mark.parametrize(
    ("weight", "vocab_size"), [(1e-6, 50_257), (1e-3, 50_257), (0.9, 3), (1e-9, 7)]
)
def test_distributions_of_single_precision_are_served_within_the_claim(
    weight: float, vocab_size: int
) -> None:
    """Opposite certain models, and a distribution whose mass float32 rounds: as drawn from and as
    read, with no tolerance."""
    certain = torch.zeros(3, vocab_size)
    certain[0, 0] = certain[1, 1] = certain[2, 0] = 1.0
    certain[2] += 1e-6 * torch.rand(vocab_size, generator=torch.Generator().manual_seed(0))
    model = UniformMixing(weight=weight).protect(
        Scenario(FixedDistribution(certain), None, None, 1, 1)
    )
    contexts = torch.tensor([[0], [1], [2]])
    for distribution in (
        model.log_probs(contexts, 1)[:, 0],
        model.start(contexts, 1, distribution=False).log_probs(),
    ):
        mine, *others = distribution.numpy()
        realised = max(float(realised_pure_dp(mine, other)) for other in others)
        assert realised <= compute_uniform_mixing_epsilon(weight, vocab_size) * (1 + 1e-12)


def test_rows_scores_and_claim(neox: HuggingFaceModel) -> None:
    scenario = Scenario(neox, None, None, queries=480, answer_length=8)
    defense = UniformMixing(weight=0.6)
    model = defense.protect(scenario)
    prefix = torch.tensor([[1, 2, 3]])
    found = sample_candidates(model, prefix, 4, ANCESTRAL, draw_secret_uniforms(30, 4, 0)[None])[0]
    assert found.token_log_probs is not None
    again = model.token_log_probs(prefix.expand(len(found.suffixes), -1), found.suffixes)
    torch.testing.assert_close(found.token_log_probs, again, atol=1e-5, rtol=0)
    claim = defense.claim(scenario, n_tokens=240)
    per_token = compute_uniform_mixing_epsilon(0.6, 61)
    assert claim.details["epsilon_per_token"] == pytest.approx(per_token)
    assert claim.details["epsilon_per_answer"] == pytest.approx(8 * per_token)
    assert claim.epsilon["any two models"] == pytest.approx(480 * per_token)
    assert claim.spent_epsilon["any two models"] == pytest.approx(240 * per_token)


@pytest.mark.parametrize("weight", [-0.1, 1.2, math.nan])
def test_weights_outside_the_unit_interval_are_refused(weight: float) -> None:
    with refuses("weight", "0", "1"):
        UniformMixing(weight=weight)


# --- on the public top-k ---


def distributions(count: int, seed: int, scale: float, size: int = 9) -> torch.Tensor:
    noise = torch.randn(
        count, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    return torch.log_softmax(noise * scale, -1)


def test_distribution_on_a_support_by_hand() -> None:
    distribution, public = (
        torch.tensor([0.6, 0.1, 0.2, 0.1]).log(),
        torch.tensor([0.1, 0.5, 0.3, 0.1]).log(),
    )
    # The public top-2 are tokens 1 and 2; the private distribution there is (1/3, 2/3), halfway to
    # uniform (5/12, 7/12).
    assert mix_public_top_k(
        distribution, public, 0.5, 2, tail=False
    ).exp().tolist() == pytest.approx([0, 5 / 12, 7 / 12, 0])
    with_tail = mix_public_top_k(distribution, public, 0.5, 2, tail=True).exp().tolist()
    assert with_tail == pytest.approx([0.1, 0.8 * 5 / 12, 0.8 * 7 / 12, 0.1])


@given(
    st.floats(0, 1), st.integers(1, 9), st.booleans(), st.integers(0, 2**31), st.floats(0.1, 300)
)
def test_on_a_public_support_no_pair_of_models_exceeds_the_claim(
    weight: float, top_k: int, tail: bool, seed: int, scale: float
) -> None:
    first, second, public = distributions(3, seed, scale)
    mixed = [
        mix_public_top_k(distribution, public, weight, top_k, tail)
        for distribution in (first, second)
    ]
    for distribution in mixed:
        assert float(distribution.exp().sum()) == pytest.approx(1)
    assert (
        realised_pure_dp(*(distribution.numpy() for distribution in mixed))
        <= compute_uniform_mixing_epsilon(weight, top_k) + 1e-9
    )


@pytest.mark.parametrize("tail", [False, True])
def test_that_claim_is_attained(tail: bool) -> None:
    public = distributions(1, 0, 1.0)[0]
    kept = public.topk(4).indices
    one_hots = torch.full((2, 9), -math.inf, dtype=torch.float64)
    one_hots[0, kept[0]] = one_hots[1, kept[3]] = 0.0
    realised = realised_pure_dp(
        *(mix_public_top_k(distribution, public, 0.3, 4, tail).numpy() for distribution in one_hots)
    )
    assert realised == pytest.approx(compute_uniform_mixing_epsilon(0.3, 4), rel=1e-12)


def test_a_private_support_has_no_epsilon() -> None:
    """What the option refuses to be: with each model's own top-k, supports differ, and so do they
    without bound."""
    first, second = distributions(2, 3, 5.0)
    own = [
        mix_public_top_k(distribution, distribution, 0.3, 3, tail=False).numpy()
        for distribution in (first, second)
    ]
    assert realised_pure_dp(*own) == math.inf


def test_no_mass_on_the_support_is_uniform_there() -> None:
    distribution = torch.tensor([1.0, 0, 0, 0]).log()
    public = torch.tensor([0.1, 0.4, 0.4, 0.1]).log()
    assert mix_public_top_k(
        distribution, public, 0.9, 2, tail=False
    ).exp().tolist() == pytest.approx([0, 0.5, 0.5, 0])


@pytest.mark.parametrize("tail", ["none", "public"])
def test_rows_scores_and_claim_on_a_support(
    neox: HuggingFaceModel, tail: Literal["none", "public"]
) -> None:
    public = tiny(seed=5)
    scenario = Scenario(neox, public, None, queries=30, answer_length=4)
    defense = UniformMixing(weight=0.6, public_top_k=7, tail=tail)
    model = defense.protect(scenario)
    prefix = torch.tensor([[1, 2, 3]])
    found = sample_candidates(model, prefix, 4, ANCESTRAL, draw_secret_uniforms(30, 4, 0)[None])[0]
    again = model.token_log_probs(prefix.expand(len(found.suffixes), -1), found.suffixes)
    assert found.token_log_probs is not None
    torch.testing.assert_close(found.token_log_probs, again, atol=1e-4, rtol=0)
    if tail == "none":
        assert int((model.log_probs(prefix, 1) > -math.inf).sum()) == 7
    claim = defense.claim(scenario, n_tokens=3)
    assert claim.epsilon["any two models"] == pytest.approx(
        compute_uniform_mixing_epsilon(0.6, 7, 30)
    )
    (check,) = model.divergence_checks(prefix, 3, [0, 2])
    assert check.claimed == compute_uniform_mixing_epsilon(0.6, 7)
    assert 0.5 * check.claimed < float(check.realised.max()) <= check.claimed + 1e-9
    broken = UniformMixing(weight=0.7, public_top_k=7, tail=tail).protect(scenario)
    broken.claimed = check.claimed  # type: ignore[attr-defined]
    assert (
        float(broken.divergence_checks(prefix, 3, [0, 2])[0].realised.max()) > check.claimed + 0.05
    )


def test_a_support_needs_a_public_model(neox: HuggingFaceModel) -> None:
    alone = Scenario(neox, None, None, queries=30, answer_length=4)
    with refuses("--public"):
        UniformMixing(public_top_k=7).protect(alone)
    with refuses("--public"):
        UniformMixing(public_top_k=7).claim(alone, 0)
    with refuses("61", "62"):
        UniformMixing(public_top_k=62).protect(Scenario(neox, neox, None, 30, 4))
    with refuses("public_top_k", "0"):
        UniformMixing(public_top_k=-1)


def test_a_public_model_that_takes_only_tokens_gives_the_support(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(FixedDistribution, "embedding_rows", LanguageModel.embedding_rows)
    target, public = FixedDistribution([0.7, 0.2, 0.1]), FixedDistribution([0.1, 0.5, 0.4])
    defense = UniformMixing(weight=0.5, public_top_k=2)
    served = defense.protect(Scenario(target, public, None, 1, 1))
    expected = [0.0, 0.5 * 2 / 3 + 0.25, 0.5 / 3 + 0.25]
    context = torch.tensor([[0]])
    assert served.log_probs(context, 1).exp().flatten().tolist() == pytest.approx(expected)
    assert served.start(context, 1).log_probs().exp().flatten().tolist() == pytest.approx(expected)
