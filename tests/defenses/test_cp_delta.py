"""CP-Δ against its formula and its source's bound, and what it asks for."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from auditor.core.errors import NotApplicable
from auditor.defenses import cp_delta
from auditor.defenses.cp_delta import CpDelta, CpDeltaModel, PublicCommon
from auditor.models.ensemble import Ensemble, ModelEnsemble
from auditor.models.huggingface import HuggingFaceModel
from auditor.plugins.defense import Scenario
from tests.conftest import refuses

MakeTiny = Callable[..., HuggingFaceModel]
CONTEXTS = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])


@pytest.fixture(scope="module")
def halves(make_tiny: MakeTiny) -> ModelEnsemble:
    return ModelEnsemble(make_tiny(), [make_tiny(seed=s) for s in (1, 2)])


def scenario(ensemble: Ensemble) -> Scenario:
    return Scenario(ensemble.public, ensemble.public, ensemble, queries=10, answer_length=4)


def distributions(halves: ModelEnsemble) -> tuple[torch.Tensor, torch.Tensor]:
    first, second = (part.log_probs(CONTEXTS, 3).double().exp() for part in halves.parts[1:])
    return first, second


def test_max_is_the_lesser_of_both_and_kl_their_geometric_mean(halves: ModelEnsemble) -> None:
    first, second = distributions(halves)
    for model, mixed in (
        (CpDelta(), torch.minimum(first, second)),
        (CpDelta(distance="kl"), (first * second).sqrt()),
    ):
        found = model.protect(scenario(halves)).log_probs(CONTEXTS, 3).double().exp()
        torch.testing.assert_close(found, mixed / mixed.sum(-1, keepdim=True), atol=1e-6, rtol=1e-4)


def test_its_sources_bound_holds_of_each_half_and_is_made_of_the_private_distributions(
    halves: ModelEnsemble,
) -> None:
    """Theorem 3.1 at Δ_max: the log-ratio to either half is -log(1 - TV) at most; TV differs from
    prompt to prompt."""
    first, second = distributions(halves)
    k = -torch.log1p(-(first - second).abs().sum(-1) / 2)
    distribution = CpDelta().protect(scenario(halves)).log_probs(CONTEXTS, 3).double()
    for half in (first, second):
        most = (distribution - half.log()).amax(-1)
        assert bool((most <= k + 1e-5).all()) and bool((most > k - 1e-4).all())
    assert float(k.max() - k.min()) > 0.1


def test_kl_bounds_the_mean_and_no_single_text(halves: ModelEnsemble) -> None:
    """Theorem 3.1 at Δ_KL, where the two halves all but disagree on a rare token: KL is within k,
    that token is not."""
    first, second = torch.tensor([[0.5, 0.5], [1 - 1e-9, 1e-9]], dtype=torch.float64).log()
    k = -2 * torch.logsumexp((first + second) / 2, -1)  # 1 - H^2 is the sum of sqrt(q1 q2)
    distribution = CpDeltaModel(halves, "kl", (1, 2)).mix_pair(torch.stack([first, second]))
    above = distribution - second
    assert float(k) == pytest.approx(0.6931, abs=1e-4) and float(above.max()) == pytest.approx(
        10.36, abs=0.005
    )
    for half in (first, second):
        assert float((distribution.exp() * (distribution - half)).sum()) <= float(k)
    least = CpDeltaModel(halves, "max", (1, 2)).mix_pair(torch.stack([first, second]))
    assert float((least - second).max()) <= -math.log1p(-0.5 + 1e-9) + 1e-9
    said = " ".join((cp_delta.__doc__ or "").split())
    assert "With `kl`, only the mean" in said and "exp(10.36) although k is 0.693" in said


def test_rows_are_as_teacher_forced(halves: ModelEnsemble) -> None:
    model = CpDelta().protect(scenario(halves))
    rows = model.start(CONTEXTS[:, :3], 2)
    rows.advance(torch.tensor([0, 1, 1]), torch.tensor([1, 5, 7]))
    read = torch.tensor([[3, 1, 4, 1], [9, 2, 6, 5], [9, 2, 6, 7]])
    torch.testing.assert_close(rows.log_probs(), model.log_probs(read, 1)[:, 0], atol=1e-5, rtol=0)


def test_nothing_is_claimed(halves: ModelEnsemble) -> None:
    assert CpDelta().claim(scenario(halves), 10) is None and CpDelta.claims.startswith("none")
    with refuses("claim", error=NotApplicable):
        CpDelta().protect(scenario(halves)).divergence_checks(CONTEXTS, 2, [0, 1])


def test_another_number_of_members_is_refused(make_tiny: MakeTiny, tmp_path: Path) -> None:
    three = ModelEnsemble(make_tiny(), [make_tiny(seed=s) for s in (1, 2, 3)])
    with refuses("cp-delta", "2", "3", "audit train pmixed"):
        CpDelta().protect(scenario(three))
    with refuses("distance", "'max'", "'kl'", "'l2'"):
        CpDelta(distance="l2")  # type: ignore[arg-type]


def test_with_the_public_model_as_one_half(halves: ModelEnsemble) -> None:
    public, target, _ = halves.parts
    given = Scenario(target, public, None, queries=10, answer_length=4)
    p, q = (part.log_probs(CONTEXTS, 3).double().exp() for part in (public, target))
    for model, mixed in (
        (PublicCommon(), torch.minimum(p, q)),
        (PublicCommon(distance="kl"), (p * q).sqrt()),
    ):
        served = model.protect(given)
        found = served.log_probs(CONTEXTS, 3).double().exp()
        torch.testing.assert_close(found, mixed / mixed.sum(-1, keepdim=True), atol=1e-6, rtol=1e-4)
        rows = served.start(CONTEXTS[:, :3], 2)
        torch.testing.assert_close(
            rows.log_probs().double().exp(), found[:, 0], atol=1e-5, rtol=1e-4
        )
        assert model.claim(given, 10) is None
    with refuses("distance", "'max'", "'kl'", "'l2'"):
        PublicCommon(distance="l2")  # type: ignore[arg-type]
