"""Gradient canaries: what they add is what a record could at most; what is read of them is a naive
twin's."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.stats import binom, norm
from torch import Tensor

from auditor.core.errors import AuditError
from auditor.plugins.trainer import TrainerCheckpoint
from auditor.training.clipping import add_clipped_gradients
from auditor.training.dp_loop import (
    PoissonSampler,
    PrivateModel,
    PrivateRecipe,
    ScaledOptimizer,
    fit_privately,
)
from auditor.training.finetune import list_trainable_parameters
from auditor.training.gradient_canaries import (
    LENGTH,
    CanaryWatch,
    PlantedCanaries,
    compute_inclusion_log_ratio,
)
from auditor.training.noise import NoiseStream
from tests.training.naive_noise import NaiveNoise
from tests.training.test_dp_loop import EXAMPLES, neox_untied

COUNT, RATE, STEPS, RECORDS = 60, 0.3, 8, len(EXAMPLES)


def recipe(**more: Any) -> PrivateRecipe:
    given: dict[str, Any] = {
        "noise_multiplier": 0.5,
        "clip": 0.3,
        "steps": STEPS,
        "expected_batch": 4.0,
    }
    return PrivateRecipe(
        **{**given, "learning_rate": 0.1, "optimizer": "sgd", "physical_batch": 5, **more}
    )


def sampler(count: int = COUNT, rate: float = RATE, key: str = "k") -> PoissonSampler:
    return PoissonSampler(RECORDS + count, rate, key)


def fit(how: PrivateRecipe, key: str = "k", **more: Any) -> PrivateModel:
    return fit_privately(
        neox_untied().train(),
        EXAMPLES,
        sampler(key=key),
        how,
        pad=0,
        canaries=PlantedCanaries(COUNT),
        **more,
    )


def taken(key: str = "k") -> NDArray[np.float64]:
    """(steps, canaries): 1 where a canary that is in takes part."""
    parts = np.zeros((STEPS, COUNT))
    for step in range(STEPS):
        drawn = sampler(key=key).draw_batch_units(step)
        parts[step, drawn[drawn >= RECORDS] - RECORDS] = 1
    return parts * PlantedCanaries(COUNT).included


@pytest.mark.parametrize("noise", [0.2, 1.0, 7.0])
def test_the_score_is_the_likelihood_ratio_of_the_subsampled_gaussian(noise: float) -> None:
    x = np.linspace(-3, 4, 29)
    for rate in (1e-3, 0.4, 1.0):
        mixture = (1 - rate) * norm.pdf(x, 0, noise) + rate * norm.pdf(x, 1, noise)
        expected = np.log(mixture / norm.pdf(x, 0, noise))
        np.testing.assert_allclose(
            compute_inclusion_log_ratio(x, noise, rate), expected, rtol=1e-9, atol=1e-12
        )
    silent = compute_inclusion_log_ratio(np.array([0.0, 1.0]), 0.0, 0.1)
    assert silent[0] == pytest.approx(math.log(0.9)) and 1e5 < silent[1] < math.inf


@pytest.mark.parametrize("ghost", [False, True])
def test_without_noise_what_is_read_is_in_how_many_steps_each_was(ghost: bool) -> None:
    """Whatever the records add at its coordinate is taken off; one that is out is in no batch."""
    watch = fit(recipe(noise_multiplier=0.0, ghost=ghost)).watch
    np.testing.assert_allclose(watch.sums, taken().sum(0), atol=1e-5)
    assert taken().sum(0).max() >= 4 and (watch.sums[~watch.included] < 1e-5).all()


@pytest.mark.parametrize("ghost", [False, True])
def test_scores_are_those_of_a_naive_twin(ghost: bool) -> None:
    """The noise of each step is drawn again, the canary's coordinate looked up in it."""
    how = recipe(ghost=ghost)
    watch = fit(how).watch
    sizes = [p.numel() for p in list_trainable_parameters(neox_untied().train()).values()]
    flat = PlantedCanaries(COUNT).draw_coordinates(sum(sizes))
    scores = np.zeros(COUNT)
    for step, part in enumerate(taken()):
        noise = NaiveNoise("k", step, sum(size + 1 for size in sizes))
        z = np.concatenate([noise.normal(size) for size in sizes])[flat]
        s = how.noise_multiplier
        x = part + s * z
        scores += np.log(1 - RATE + RATE * np.exp((2 * x - 1) / (2 * s**2)))
    np.testing.assert_allclose(watch.scores, scores, atol=2e-3)
    assert watch.scores[watch.included].mean() > watch.scores[~watch.included].mean() + 1


def test_a_size_of_the_noise_that_depends_on_the_batch_tells_who_is_in_it() -> None:
    """ADP's (Wu et al. 2022, Eq. 6): of all coordinates the size is known well, whatever the one of
    a canary says."""

    def scale(units: NDArray[np.int64]) -> float:
        return 0.1 + 0.9 * float(np.mean(units % 2)) if len(units) else 1.0

    how, there = recipe(noise_multiplier=50.0), taken().sum(0) > 0
    fixed, told = fit(how).watch, fit(how, noise_scale=scale).watch
    assert told.scores[there].min() > 0 > told.scores[~there].max()
    assert fixed.scores[there].min() < fixed.scores[~there].max()
    # A naive twin of the first step's: logs of Gaussian densities of every coordinate, with the
    # canary and without.
    size = sum(p.numel() for p in neox_untied().parameters())
    noise = NaiveNoise("k", 0, 2 * size)
    names = list_trainable_parameters(neox_untied().train())
    in_data = np.concatenate([np.ones(RECORDS, dtype=bool), PlantedCanaries(COUNT).included])
    drawn = sampler().draw_batch_units(0)
    batch = drawn[in_data[drawn]]
    z = 50 * scale(batch) * np.concatenate([noise.normal(p.numel()) for p in names.values()])
    one = fit(recipe(noise_multiplier=50.0, steps=1), noise_scale=scale).watch
    flat = PlantedCanaries(COUNT).draw_coordinates(size)
    for canary in range(COUNT):
        number = RECORDS + canary
        out = batch[batch != number]
        s1, s0 = (50 * scale(units) for units in (np.append(out, number), out))
        apart = (norm.logpdf(z, 0, s1) - norm.logpdf(z, 0, s0)).sum()
        x = z[flat[canary]] + float(number in batch)
        apart += (2 * x - 1) / (2 * s1**2)
        assert one.scores[canary] == pytest.approx(
            np.logaddexp(np.log(1 - RATE), np.log(RATE) + apart), abs=2e-2
        )


def test_both_ways_of_clipping_say_the_same() -> None:
    plain, ghost = (fit(recipe(ghost=ghost)).watch for ghost in (False, True))
    np.testing.assert_allclose(plain.scores, ghost.scores, atol=1e-4)


def test_records_are_trained_on_as_they_were_without() -> None:
    """Equal batches of them; of the weights, only the canaries' coordinates are others."""
    how = recipe(noise_multiplier=0.0, steps=1)
    models = [neox_untied().train() for _ in range(2)]
    fit_privately(models[0], EXAMPLES, sampler(0), how, pad=0)
    fit_privately(models[1], EXAMPLES, sampler(), how, pad=0, canaries=PlantedCanaries(COUNT))
    alone, beside = (
        torch.cat([p.detach().flatten() for p in model.parameters()]) for model in models
    )
    named = list_trainable_parameters(models[0])
    assert list(named) == [name for name, _ in models[0].named_parameters()]
    moved = (alone - beside).abs() > 1e-6
    expected = torch.zeros_like(moved)
    expected[PlantedCanaries(COUNT).draw_coordinates(len(alone))[taken()[0] == 1]] = True
    assert torch.equal(moved, expected) and moved.any()


# --- faults of the path that records take are seen ---


class NotClipped(ScaledOptimizer):
    def add_clipped_samples(self, shares: Tensor) -> Tensor:
        kept, self.max_grad_norm = self.max_grad_norm, math.inf
        try:
            return super().add_clipped_samples(shares)
        finally:
            self.max_grad_norm = kept


class MeanClipped(ScaledOptimizer):
    """The mean gradient of a batch is clipped, not each record's."""

    def add_clipped_samples(self, shares: Tensor) -> Tensor:
        mean = torch.stack([sample.mean(0).norm() for sample in self.grad_samples]).norm()
        factors = (self.max_grad_norm / mean).clamp(max=1.0).double().expand(len(shares))
        for p in self.params:
            p.summed_grad = add_clipped_gradients(
                p.summed_grad, self._get_flat_grad_sample(p), factors, math.inf
            )
            p.grad_sample = None
        return factors


@pytest.mark.parametrize(("fault", "least"), [(NotClipped, 0.99 * LENGTH), (MeanClipped, 2.0)])
def test_a_fault_of_clipping_is_seen(
    monkeypatch: pytest.MonkeyPatch, fault: type, least: float
) -> None:
    monkeypatch.setattr("auditor.training.dp_loop.ScaledOptimizer", fault)
    watch = fit(recipe(noise_multiplier=0.0, physical_batch=64)).watch
    there = taken().sum(0) > 0
    assert (watch.sums[there] > least).all() and (watch.sums[~there] < 0.1).all()


def test_noise_that_is_off_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    how, there = recipe(noise_multiplier=20.0), taken().sum(0) > 0
    honest = fit(how).watch
    monkeypatch.setattr(
        ScaledOptimizer,
        "add_noise",
        lambda self: [setattr(p, "grad", p.summed_grad.to(p)) for p in self.params],
    )
    silent = fit(how).watch
    assert silent.scores[there].min() > silent.scores[~there].max()
    assert honest.scores[there].min() < honest.scores[~there].max()


# --- coins, directions, going on ---


def test_coins_and_directions_are_of_the_seed_and_fair() -> None:
    many = PlantedCanaries(4000, 1)
    assert abs(many.included.mean() - 0.5) < 4 * 0.5 / math.sqrt(4000)
    assert not np.array_equal(many.included, PlantedCanaries(4000, 2).included)
    assert np.array_equal(many.included[:100], PlantedCanaries(100, 1).included)
    where = many.draw_coordinates(5000)
    assert len(set(where.tolist())) == 4000 and where.min() >= 0 and where.max() < 5000
    assert np.array_equal(fit(recipe(), "one").watch.included, fit(recipe(), "two").watch.included)


def test_there_are_no_more_canaries_than_parameters() -> None:
    with pytest.raises(
        AuditError, match="at most a gradient canary for each of 10 trained parameters, got 11"
    ):
        PlantedCanaries(11).draw_coordinates(10)
    with pytest.raises(
        AuditError, match="a sampler of the 12 examples and 60 gradient canaries, got one of 12"
    ):
        fit_privately(
            neox_untied(), EXAMPLES, sampler(0), recipe(), pad=0, canaries=PlantedCanaries(COUNT)
        )


class _Killed(Exception):
    pass


@pytest.mark.parametrize("killed_at", [1, 5])
def test_killed_and_resumed_it_has_read_the_same(tmp_path: Path, killed_at: int) -> None:
    """No step is read twice, and none is left out: what was read belongs to the checkpoint."""
    expected = fit(recipe()).watch

    def kill(done: int, loss: float) -> None:
        if done == killed_at:
            raise _Killed

    more: Any = {
        "checkpoint": TrainerCheckpoint(tmp_path / "checkpoint.pt"),
        "seconds_between": 0.0,
    }
    with pytest.raises(_Killed):
        fit(recipe(), progress=kill, **more)
    again = fit(recipe(), **more).watch
    np.testing.assert_allclose(again.scores, expected.scores, atol=1e-4)
    np.testing.assert_allclose(again.sums, expected.sums, atol=1e-4)
    np.testing.assert_array_equal(again.drawn, expected.drawn)
    assert again.releases == STEPS and again.measure_noise() == pytest.approx(
        expected.measure_noise(), rel=1e-3
    )


# --- what the steps are ---


def test_steps_that_are_what_they_are_said_to_be() -> None:
    watch = fit(recipe()).watch
    values, size, repeated = watch.measure_noise()
    assert watch.releases == STEPS and abs(watch.draw_unevenness_z) < 4
    witnesses = (~PlantedCanaries(COUNT).included).sum()
    assert (
        values == STEPS * witnesses
        and size == pytest.approx(1, abs=5 / math.sqrt(2 * values))
        and repeated < 0.8
    )
    np.testing.assert_array_equal(watch.drawn * watch.included, taken().sum(0))
    assert fit(recipe(noise_multiplier=0.0)).watch.measure_noise() == (0, 1.0, 0.0)


@pytest.mark.parametrize("rate", [0.02, 0.1, 0.5])
def test_uneven_counts_by_enumerating_the_binomial(rate: float) -> None:
    watch = CanaryWatch(
        PlantedCanaries(5),
        [torch.nn.Parameter(torch.zeros(9))],
        0,
        *(1.0, 1.0, rate),
    )
    watch.releases, watch.drawn[:] = 40, [0, 3, 4, 9, 31]
    k = np.arange(41)
    second, fourth = (binom.pmf(k, 40, rate) @ (k - 40 * rate) ** power for power in (2, 4))
    found = ((watch.drawn - 40 * rate) ** 2).sum()
    assert watch.draw_unevenness_z == pytest.approx((found - 5 * second) / math.sqrt(5 * fourth))


def test_counts_are_held_against_poisson_sampling() -> None:
    """Over many trainings the statistic is 0 and spreads by less than 1; shuffled batches are far
    from it."""
    steps, rate, found = 40, 0.1, []
    parameters = [torch.nn.Parameter(torch.zeros(300))]
    for trial in range(200):
        watch = CanaryWatch(PlantedCanaries(300), parameters, 0, 1.0, 1.0, rate)
        for step in range(steps):
            watch.drop_excluded_canaries(
                PoissonSampler(300, rate, f"trial {trial}").draw_batch_units(step)
            )
        watch.releases = steps
        found.append(watch.draw_unevenness_z)
    assert abs(np.mean(found)) < 4 / math.sqrt(200) and 0.6 < np.std(found) < 1
    watch.drawn[:] = 4
    assert watch.draw_unevenness_z < -8


def test_noise_that_is_the_same_twice_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "auditor.training.dp_loop.NoiseStream", lambda key, step: NoiseStream(key, step % 5)
    )
    assert fit(recipe()).watch.measure_noise()[2] == pytest.approx(1, abs=1e-3)
