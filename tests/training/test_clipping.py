"""Clipping holds at C, rounding included: large dense gradients, sums of many, whoever else is in
them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from auditor.core.errors import AuditError
from auditor.training import clipping
from auditor.training.clipping import (
    MOST_PARAMETERS,
    ROUNDING,
    check_gradient_clipping,
    make_dense_gradient,
)
from auditor.training.dp_loop import PoissonSampler, ScaledOptimizer, fit_privately
from tests.training.test_dp_loop import EXAMPLES, neox, recipe


def optimizer(*shapes: tuple[int, ...], clip: float = 1.0) -> Any:
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
    inner = torch.optim.SGD(parameters, lr=1.0)
    return ScaledOptimizer(inner, noise_multiplier=1.0, max_grad_norm=clip, expected_batch_size=1.0)


def summed(clip: float, *samples: Tensor) -> tuple[NDArray[np.float64], Any]:
    """The clipped sum (d,) as the training makes it, of per-sample gradients (b, ...) of each
    parameter."""
    own = optimizer(*(tuple(sample.shape[1:]) for sample in samples), clip=clip)
    for p, sample in zip(own.params, samples, strict=True):
        p.grad_sample = sample
    own.add_clipped_samples(torch.ones(len(samples[0])))
    return np.concatenate(
        [p.summed_grad.numpy().astype(np.float64).ravel() for p in own.params]
    ), own


@pytest.mark.parametrize("clip", [1.0, 0.3])
def test_a_large_dense_gradient_is_clipped_to_the_norm(clip: float) -> None:
    """A float32 norm on a CPU is too small by 2% of the first, 0.1% of the second, and more the
    larger the matrix."""
    shape = (1024, 4096)
    generator = torch.Generator().manual_seed(0)
    for sample in (
        make_dense_gradient(torch.zeros(shape), clip),
        1e3 * torch.randn((1, *shape), generator=generator),
    ):
        length = math.sqrt(np.square(summed(clip, sample)[0]).sum())
        assert (1 - 1e-5) * clip < length <= (1 + ROUNDING) * clip


def test_no_unit_moves_a_sum_by_more_than_the_sensitivity() -> None:
    """4,096 that point the same way, one of them left out; and its own share is what it is alone,
    to the last bit."""
    torch.manual_seed(0)
    samples = (100 * torch.rand(4096, 4, 40), 100 * torch.rand(4096, 50))
    whole, less = summed(0.7, *samples)[0], summed(0.7, *(s[1:] for s in samples))[0]
    moved = whole - less
    assert 0.699 < math.sqrt(np.square(moved).sum()) <= 0.7 * (1 + ROUNDING)
    np.testing.assert_array_equal(moved, summed(0.7, *(s[:1] for s in samples))[0])


def test_a_sum_does_not_depend_on_order_and_parts() -> None:
    torch.manual_seed(1)
    sample = torch.randn(300, 7, 11) * torch.logspace(-6, 6, 300).view(-1, 1, 1)
    own = optimizer((7, 11))
    for part in sample[torch.randperm(300)].split(37):
        own.params[0].grad_sample = part
        own.add_clipped_samples(torch.ones(len(part)))
    np.testing.assert_array_equal(own.params[0].summed_grad.numpy().ravel(), summed(1.0, sample)[0])


def test_the_noise_is_of_the_sensitivity_with_its_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []

    def noise(total: Tensor, deviation: float, stream: Any) -> Tensor:
        asked.append(deviation)
        return total

    monkeypatch.setattr("auditor.training.dp_loop.add_gaussian_noise", noise)
    own = optimizer((3,), clip=0.5)
    own.stream = None
    own.take_noisy_step(lambda: None)
    assert asked == [0.5 * (1 + 2**-20)]


def naive_norms(samples: Any) -> Tensor:
    return torch.stack([sample.flatten(1).norm(dim=1) for sample in samples]).norm(dim=0).double()


def test_clipping_by_float32_norms_is_refused_before_any_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What one-hot canaries cannot see: their float32 norms are exact."""
    check_gradient_clipping([torch.zeros(1024, 1024)], 0.3, 8)
    check_gradient_clipping([torch.zeros(1024, 1024)], math.inf, 8)
    one_hot = torch.zeros(1, 1024, 1024)
    one_hot[0, 5, 7] = 300.0
    assert naive_norms([one_hot]) == clipping.compute_gradient_norms([one_hot])
    monkeypatch.setattr(clipping, "compute_gradient_norms", naive_norms)
    with pytest.raises(AuditError, match=r"a dense gradient to be clipped to 0.3, got 0.301"):
        check_gradient_clipping([torch.zeros(1024, 1024)], 0.3, 8)


def test_what_the_proof_is_not_of_is_refused() -> None:
    with pytest.raises(
        AuditError, match="at most 8,589,934,592 trained parameters, for which rounding is bounded"
    ):
        check_gradient_clipping([torch.zeros(1).expand(MOST_PARAMETERS + 1)], 1.0, 8)
    with pytest.raises(
        AuditError, match="batches of at most 32,768 units for exact sums, got 40,000"
    ):
        many = EXAMPLES[:1] * 50_000
        fit_privately(neox(), many, PoissonSampler(50_000, 0.8, "n"), recipe(), pad=0)
