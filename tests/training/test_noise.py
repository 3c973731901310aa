"""The secret noise: its stream against the standard and a naive twin, its distribution, its grid,
and the attack on seeds."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from opacus.optimizers.optimizer import _generate_noise
from scipy import stats

from auditor.training import dp_loop as loops
from auditor.training.dp_loop import PoissonSampler, PrivateRecipe, fit_privately
from auditor.training.finetune import make_untrained_gpt_neox
from auditor.training.noise import NoiseStream, add_gaussian_noise, compute_grid_spacing
from tests.training.naive_noise import NaiveNoise, chacha20

CPU = torch.device("cpu")
COUNT = 1 << 15


def drawn(key: str, step: int = 0, count: int = COUNT) -> NDArray[np.float64]:
    values: NDArray[np.float64] = NoiseStream(key, step).draw_standard_normals(count, CPU).numpy()
    return values


def test_the_naive_cipher_is_that_of_the_standard() -> None:
    """RFC 8439, 2.3.2: the block of counter 1."""
    block = chacha20(bytes(range(32)), bytes.fromhex("000000090000004a00000000"), 2)[64:]
    assert block.hex().startswith("10f1e7e4d13b5915500fdd1fa32071c4") and block.hex().endswith(
        "a2503c4e"
    )


def test_the_stream_is_that_of_a_naive_twin() -> None:
    """An odd number of values leaves one behind, so that the next tensor starts at a word of its
    own."""
    mine, twin = NoiseStream("k", 70_000), NaiveNoise("k", 70_000, 5_000)
    for count in (1, 7, 2_000, 1, 64):
        assert mine.draw_standard_normals(count, CPU).numpy() == pytest.approx(
            twin.normal(count), abs=1e-12
        )


def test_every_bit_of_the_key_counts() -> None:
    """Keys that differ above bit 31 only gave torch's generator the same noise."""
    for bit in (0, 31, 32, 33, 63, 64, 127, 128, 200, 255):
        one, other = drawn(f"{0:064x}"), drawn(f"{1 << bit:064x}")
        assert abs(np.corrcoef(one, other)[0, 1]) < 5 / math.sqrt(COUNT)


def test_opacus_draws_the_same_noise_from_seeds_that_differ_above_bit_31_on_a_cpu() -> None:
    """What the docstring of `auditor/training/noise.py` says of it: where this fails, it has been
    mended there."""
    like = torch.zeros(100)
    one, other = (
        _generate_noise(1.0, like, torch.Generator().manual_seed(seed))
        for seed in (5, 5 + (9 << 32))
    )
    assert torch.equal(one, other)
    torch.manual_seed(5)  # its default: torch's own generator
    default = _generate_noise(1.0, like)
    torch.manual_seed(5 + (9 << 32))
    assert torch.equal(default, _generate_noise(1.0, like))


def test_a_step_can_be_drawn_again_and_steps_differ() -> None:
    assert np.array_equal(drawn("k", 7), drawn("k", 7))
    assert abs(np.corrcoef(drawn("k", 7), drawn("k", 8))[0, 1]) < 5 / math.sqrt(COUNT)


@pytest.mark.parametrize("step", [0, 1, 2**33])
def test_the_distribution_is_gaussian(step: int) -> None:
    values = drawn("distribution", step, 1 << 18)
    n = len(values)
    assert stats.kstest(values, "norm").pvalue > 1e-3
    assert abs(values.mean()) < 4 / math.sqrt(n) and abs(values.var() - 1) < 4 * math.sqrt(2 / n)
    assert abs(stats.skew(values)) < 4 * math.sqrt(6 / n) and abs(
        stats.kurtosis(values)
    ) < 4 * math.sqrt(24 / n)
    # the two of a pair of words
    assert abs(np.corrcoef(values[::2], values[1::2])[0, 1]) < 4 / math.sqrt(n / 2)
    assert 3.9 < np.abs(values).max() < 6.5


@pytest.mark.parametrize("deviation", [1e-9, 0.3, 1.0, 700.0])
def test_sums_lie_on_a_grid_that_depends_on_the_deviation_only(deviation: float) -> None:
    """Else the last bits of a sum tell what the noise was added to (Mironov 2012)."""
    torch.manual_seed(0)
    grid = compute_grid_spacing(deviation)
    assert 2.0**-17 <= grid / deviation <= 2.0**-16
    for shift in (0.0, 1e-3, 1 / 3):
        total = torch.randn(1000) * deviation + shift * deviation
        noisy = add_gaussian_noise(total, deviation, NoiseStream("k", 1))
        assert noisy.dtype == torch.float32
        assert torch.equal((noisy.double() / grid).round() * grid, noisy.double())
        moved = (noisy.double() - total.double()) / deviation
        np.testing.assert_allclose(moved, drawn("k", 1, 1000), rtol=0, atol=2.0**-17 + 1e-6)


def test_a_sum_that_is_long_is_not_cut_into_other_noise() -> None:
    long = add_gaussian_noise(torch.zeros(3, 50_001), 2.0, NoiseStream("k", 1))
    np.testing.assert_allclose(
        long.flatten(), 2 * drawn("k", 1, 150_003), rtol=0, atol=2 * 2.0**-16
    )


def test_no_deviation_is_no_noise() -> None:
    total = torch.arange(3.0)
    assert torch.equal(add_gaussian_noise(total, 0.0, NoiseStream("k", 1)), total)


# --- the attack ---


def seeded(seed: int, step: int, count: int) -> torch.Tensor:
    return torch.normal(
        0.0, 1.0, (count,), generator=torch.Generator().manual_seed(seed * 1000 + step)
    )


def released(
    monkeypatch: pytest.MonkeyPatch, noise: Callable[[int, int], torch.Tensor] | None
) -> Any:
    """What 8 steps of private SGD moved the weights by; noise (step, count): instead of the
    implementation's."""
    model = make_untrained_gpt_neox(
        vocab_size=31, layers=1, hidden=16, heads=2, positions=16, end=0, seed=0
    )
    examples = [tuple(1 + (i * j) % 30 for j in range(1, 9)) for i in range(1, 9)]
    steps, sizes = iter(range(8)), [p.numel() for p in model.parameters() if p.requires_grad]
    if noise is not None:
        whole: list[torch.Tensor] = []

        def other(total: torch.Tensor, deviation: float, stream: Any) -> torch.Tensor:
            if not whole:
                whole.extend(noise(next(steps), sum(sizes)).split(sizes))
            return total + deviation * whole.pop(0).view(total.shape)

        monkeypatch.setattr(loops, "add_gaussian_noise", other)
    before = torch.cat([p.detach().flatten().clone() for p in model.parameters()])
    how = PrivateRecipe(1.0, 1.0, 8, 4.0, 0.1, optimizer="sgd")
    fit_privately(model, examples, PoissonSampler(8, 0.5, "a key nobody knows"), how, pad=0)
    return torch.cat([p.detach().flatten() for p in model.parameters()]) - before


def scores(moved: Any, candidates: range) -> NDArray[np.float64]:
    """(candidates,) z of the inner product with the noise that each seed would have given."""
    guesses = [
        sum((seeded(seed, step, len(moved)) for step in range(8)), torch.zeros(()))
        for seed in candidates
    ]
    return np.array([-float(moved @ g) / float(moved.norm() * g.std()) for g in guesses])


def test_weights_tell_a_seed_of_32_bits_and_no_key_of_256(monkeypatch: pytest.MonkeyPatch) -> None:
    """The attack works where the noise is one of few known vectors, and so finds nothing in
    ours."""
    with monkeypatch.context() as patch:
        z = scores(released(patch, lambda step, count: seeded(123, step, count)), range(200))
    assert z.argmax() == 123 and z[123] > 20 and np.delete(z, 123).max() < 5
    assert np.abs(scores(released(monkeypatch, None), range(200))).max() < 5
