"""Fine-tune privately with Opacus: clipped and noised gradients, Poisson batches, checkpoints.

This module runs one mechanism on token sequences, without accounting: epsilon follows from the
noise multiplier, the sampling rate and the number of steps that `fit_privately` returns. It needs
the `dp` extra.

The noise is sigma times the sensitivity C (1 + ROUNDING); `auditor/training/clipping.py` proves the
rounding, a millionth of C. Epsilon does not cover two things: the training loss that is shown as
progress, and float32 kernels, in which the last digits of a record's gradient can depend on the
other records computed with it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from opacus.optimizers import DPOptimizer
from torch import Tensor, nn

from auditor.core.arrays import Ints
from auditor.core.errors import AuditError
from auditor.core.nouns import Tokens
from auditor.core.secret_randomness import make_keyed_generator
from auditor.plugins.trainer import TrainerCheckpoint
from auditor.training import clipping
from auditor.training.finetune import check_weights_finite, list_trainable_parameters
from auditor.training.gradient_canaries import (
    NOTHING_PLANTED,
    CanaryWatch,
    NoiseScale,
    PlantedCanaries,
)
from auditor.training.noise import NoiseStream, add_gaussian_noise
from auditor.training.per_sample import (
    PerSampleGradientHook,
    compute_padded_record_nlls,
    pad_examples,
    wrap_checked_model,
)

Progress = Callable[[int, float], None]  # (steps done, mean loss of the last batch, nats a token)


@dataclass(frozen=True)
class PoissonSampler:
    """Sampler that puts each of `size` units into each batch independently, at rate `rate`.

    Epsilon is computed for this kind of sampling. A batch is determined by (key, step), so a
    resumed training draws the same batches.
    """

    size: int
    rate: float
    key: str

    def draw_batch_units(self, step: int) -> Ints:
        """Return the units drawn for this step, which may be none."""
        rng = make_keyed_generator("batch", self.key, step)
        return np.flatnonzero(rng.random(self.size) < self.rate)


@dataclass(frozen=True)
class PrivateRecipe:
    """Mechanism and optimizer of a private training.

    Attributes:
        noise_multiplier: sigma; 0 for no noise.
        clip: C, the largest norm of the gradient of a unit's mean loss per token; inf for no
            clipping.
        steps: number of optimizer steps.
        expected_batch: L, the expected number of units in a batch, by which sums are divided.
        physical_batch: number of sequences in one forward pass.
        ghost: whether to keep only one record's gradient in memory at a time.
    """

    noise_multiplier: float
    clip: float
    steps: int
    expected_batch: float
    learning_rate: float
    optimizer: Literal["adam", "sgd"] = "adam"
    physical_batch: int = 16  # sequences at once: changes memory, not results
    ghost: bool = False


@dataclass
class PrivateModel:
    """Result of a private training.

    Attributes:
        steps: number of steps.
        moved: whether any parameter changed.
        noise_scales: the noise scale of each step.
        watch: holds the scores of the gradient canaries.
    """

    steps: int
    moved: bool
    noise_scales: list[float] = field(default_factory=list)
    watch: CanaryWatch = field(kw_only=True, compare=False)


class ScaledOptimizer(DPOptimizer):
    """Opacus's optimizer, with a clipping norm for each example and a noise scale for each batch.

    In DP-SGD, both factors equal 1. ADP scales the noise (Wu et al. 2022, Eq. 6: z = gamma_B N(0,
    C^2 sigma^2 I)), which invalidates epsilon if the scale depends on the data. Clipping factors of
    at most 1 leave the sensitivity at C.
    """

    noise_multiplier: float
    noise_scale: float = 1.0
    stream: NoiseStream  # of this step

    def add_clipped_samples(self, shares: Tensor) -> Tensor:
        """Add the clipped per-sample gradients of one physical batch to the sums.

        `shares` (b,) give each sample's clipping norm as a fraction of the usual one. Return the
        clipping factors, (b,) in float64.
        """
        norms = clipping.compute_gradient_norms(self.grad_samples)
        factors = clipping.compute_clipping_factors(norms, self.max_grad_norm * shares.double())
        for p in self.params:
            sample = self._get_flat_grad_sample(p)
            p.summed_grad = clipping.add_clipped_gradients(
                p.summed_grad,
                sample,
                factors,
                self.max_grad_norm,
            )
            p.grad_sample = None
        return factors

    def take_noisy_step(self, score_release: Callable[[], None]) -> None:
        """Add noise to the sums, divide them by the expected batch, and take one optimizer step.

        If the batch is empty, the step consists of noise only. `score_release` reads the noisy
        gradients that DP-SGD publishes, not the exact sums over records.
        """
        for p in self.params:
            if p.summed_grad is None:
                device = clipping.choose_sum_device(p.device)
                p.summed_grad = torch.zeros_like(p, dtype=torch.float64, device=device)
        self.add_noise()
        for p in self.params:
            # Divide by the expected size: the size of this batch is secret.
            p.grad /= self.expected_batch_size
        score_release()
        self.original_optimizer.step()
        self.zero_grad(set_to_none=True)  # Opacus's `zero_grad` also clears the clipped sums

    def add_noise(self) -> None:
        """Add noise from `NoiseStream`, scaled for this batch.

        Opacus's own noise can be guessed (`auditor/training/noise.py`).
        """
        deviation = 0.0
        if self.noise_multiplier:
            nominal = self.noise_scale * self.noise_multiplier * self.max_grad_norm
            deviation = nominal * (1 + clipping.ROUNDING)
        for p in self.params:
            noisy = add_gaussian_noise(p.summed_grad, deviation, self.stream)
            # Back to float32, which represents the grid exactly up to 256 deviations.
            p.grad = noisy.to(p).view_as(p)


def fit_privately(
    model: Any,
    examples: Sequence[Tokens],
    sampler: PoissonSampler,
    recipe: PrivateRecipe,
    *,
    pad: int,
    shares: Sequence[float] | None = None,
    noise_scale: NoiseScale | None = None,
    canaries: PlantedCanaries = NOTHING_PLANTED,
    progress: Progress = lambda n_steps, loss: None,
    checkpoint: TrainerCheckpoint | None = None,
    seconds_between: float = 60.0,
) -> PrivateModel:
    """Train the parameters that require gradients, in place; each example is a privacy unit.

    If the checkpoint has a state, the training continues from it.

    Args:
        sampler: draws the batches.
        recipe: the mechanism.
        pad: id of the padding token.
        shares: for each example, the fraction of the clipping norm to which its gradient is
            clipped, in (0, 1].
        noise_scale: maps the units of a batch, which may be none, to the factor on its noise.
        canaries: extra units, numbered after the examples. They are sampled like examples, but
            those that a coin excluded add nothing to a batch.
        progress: callback(steps done, loss).
        seconds_between: seconds between two checkpoints.

    Raises:
        AuditError: if batches are not Poisson or are too large for exact sums, if the model is
            frozen, or if a layer has no per-sample gradients.
    """
    _check_sampler(sampler, len(examples), canaries.count)
    parameters = list_trainable_parameters(model)
    initial_digest = _digest_parameters(parameters)
    mechanism = (recipe.noise_multiplier, recipe.clip, sampler.rate)
    watch = CanaryWatch(canaries, list(parameters.values()), len(examples), *mechanism)
    expected_units = sampler.size * sampler.rate
    clipping.check_gradient_clipping(list(parameters.values()), recipe.clip, expected_units)
    if shares is None:
        example_shares = torch.ones(len(examples))
    else:
        example_shares = torch.tensor(shares)
    # A canary is clipped to all of C: the most that a unit may add.
    unit_shares = torch.cat([example_shares, torch.ones(canaries.count)])
    trained = PrivateModel(0, False, watch=watch)
    with wrap_checked_model(model, recipe.ghost, examples, pad) as wrapped:
        batches = _ClippedBatches(
            wrapped, examples, pad, unit_shares, _make_dp_optimizer(parameters, recipe), watch
        )
        training = _PrivateTraining(batches, parameters, sampler, recipe, noise_scale, trained)
        if checkpoint is not None:
            training.resume(checkpoint)
        while trained.steps < recipe.steps:
            loss = training.take_step()
            check_weights_finite(parameters.values(), checkpoint)
            if checkpoint is not None:
                checkpoint.save_when_due(seconds_between, training.state)
            progress(trained.steps, loss)
    trained.moved = _digest_parameters(parameters) != initial_digest
    return trained


def _check_sampler(sampler: Any, n_examples: int, n_canaries: int) -> None:
    if not isinstance(sampler, PoissonSampler):
        raise AuditError(
            f"expected Poisson batches, got {type(sampler).__name__}: epsilon is accounted for "
            "Poisson sampling, and does not hold for a shuffled or any other loader"
        )
    if sampler.size != n_examples + n_canaries:
        if n_canaries:
            canaries = f" and {n_canaries} gradient canaries"
        else:
            canaries = ""
        raise AuditError(
            f"expected a sampler of the {n_examples} examples{canaries}, got one of {sampler.size}",
        )


def _make_dp_optimizer(
    parameters: Mapping[str, nn.Parameter], recipe: PrivateRecipe
) -> ScaledOptimizer:
    if recipe.optimizer == "adam":
        kind: Any = torch.optim.Adam
    else:
        kind = torch.optim.SGD
    return ScaledOptimizer(
        kind(parameters.values(), lr=recipe.learning_rate),
        noise_multiplier=recipe.noise_multiplier,
        max_grad_norm=recipe.clip,
        expected_batch_size=recipe.expected_batch,
        loss_reduction="sum",
    )


@dataclass
class _ClippedBatches:
    """Sums of the clipped gradients of batches, in the optimizer.

    Attributes:
        model: the model with per-sample gradients.
        shares: for each example, then for each canary, the fraction of the clipping norm, (units,).
    """

    model: Any
    examples: Sequence[Tokens]
    pad: int
    shares: Tensor
    optimizer: ScaledOptimizer
    watch: CanaryWatch

    def add_gradients(self, units: Sequence[int], physical_batch: int) -> float:
        """Add the clipped gradients of these units, one physical batch at a time.

        Units numbered after the examples are canaries. Return the mean loss of the records, or NaN
        if there are none.
        """
        examples = self.examples
        total_loss = 0.0
        device = self.optimizer.params[0].device
        # Batches of equal lengths need less padding.
        order = sorted(units, key=lambda i: len(examples[i]) if i < len(examples) else 0)
        for start in range(0, len(order), physical_batch):
            part = order[start : start + physical_batch]
            records = [i for i in part if i < len(examples)]
            canaries = [i for i in part if i >= len(examples)]
            # In the order of the rows: `append_canary_gradients` appends canaries at the end.
            part_shares = self.shares[records + canaries].to(device)
            losses = torch.zeros(0, device=device)
            if records:
                tokens, labels = pad_examples([examples[i] for i in records], self.pad, device)
                losses = compute_padded_record_nlls(self.model, tokens, labels)
                # Of a mean, Opacus would return each record's gradient divided by the batch.
                losses.sum().backward()
            numbers = [i - len(examples) for i in canaries]
            if isinstance(self.model, PerSampleGradientHook):
                for i in range(len(records)):
                    self.model.compute_record_gradient(i)
                    self._add_clipped(1, part_shares[i : i + 1], [])
                for i, number in enumerate(numbers, len(records)):
                    self._add_clipped(0, part_shares[i : i + 1], [number])
                self.model.drop_backprops()
            else:
                self._add_clipped(len(losses), part_shares, numbers)
            total_loss += float(losses.detach().sum())
        n_records = sum(i < len(examples) for i in units)
        if n_records:
            return total_loss / n_records
        return float("nan")

    def _add_clipped(self, n_records: int, shares: Tensor, canaries: Sequence[int]) -> None:
        """Clip and add the per-sample gradients of a backward pass, then those of the canaries.

        `n_records` is the number of records in the backward pass; `shares` is (n_records,).
        """
        self.watch.append_canary_gradients(canaries)
        # Read before `add_clipped_samples`, which frees the samples.
        record_gradients = self.watch.read_record_gradients(n_records)
        factors = self.optimizer.add_clipped_samples(shares)[:n_records].double().cpu()
        self.watch.add_known_sums(factors @ record_gradients)


@dataclass
class _PrivateTraining:
    """Private training in progress.

    Attributes:
        noise_scale: maps the units of a batch to the factor on its noise; None for a factor of 1.
        trained: result of the steps so far.
    """

    batches: _ClippedBatches
    parameters: Mapping[str, nn.Parameter]
    sampler: PoissonSampler
    recipe: PrivateRecipe
    noise_scale: NoiseScale | None
    trained: PrivateModel

    def take_step(self) -> float:
        """Draw a batch and take one step. Return the mean loss of the batch's records."""
        optimizer = self.batches.optimizer
        watch = self.batches.watch
        recipe = self.recipe
        step = self.trained.steps
        units = watch.drop_excluded_canaries(self.sampler.draw_batch_units(step))
        if self.noise_scale is None:
            optimizer.noise_scale = 1.0
        else:
            optimizer.noise_scale = self.noise_scale(units)
        optimizer.stream = NoiseStream(self.sampler.key, step)
        loss = self.batches.add_gradients(units.tolist(), recipe.physical_batch)
        optimizer.take_noisy_step(
            partial(watch.score_release, recipe.expected_batch, units, self.noise_scale)
        )
        self.trained.steps += 1
        self.trained.noise_scales.append(optimizer.noise_scale)
        return loss

    def resume(self, checkpoint: TrainerCheckpoint) -> None:
        """Continue from the checkpoint; without a state in it, save the key before it is used."""
        state = checkpoint.load()
        if state is None:
            checkpoint.save(self.state())
        else:
            self._restore(state)

    def state(self) -> dict[str, Any]:
        return {
            "key": self.sampler.key,
            "steps": self.trained.steps,
            "noise_scales": self.trained.noise_scales,
            "parameters": {name: p.detach() for name, p in self.parameters.items()},
            "optimizer": self.batches.optimizer.state_dict(),
            "canaries": self.trained.watch.state(),
        }

    def _restore(self, state: dict[str, Any]) -> None:
        """Restore the steps, weights and optimizer moments from the contents of one file."""
        if state["key"] != self.sampler.key:
            raise AuditError(
                "expected the checkpoint of this training, got one whose noise has another key",
            )
        with torch.no_grad():
            for name, p in self.parameters.items():
                p.copy_(state["parameters"][name])
        self.batches.optimizer.load_state_dict(state["optimizer"])
        self.trained.steps = state["steps"]
        self.trained.noise_scales = list(state["noise_scales"])
        if self.trained.watch.canary_count:
            self.trained.watch.restore(state["canaries"])


def _digest_parameters(parameters: Mapping[str, nn.Parameter]) -> str:
    digest = hashlib.sha256()
    for name, p in parameters.items():
        digest.update(name.encode())
        # As bytes: numpy has no bfloat16.
        weights = p.detach().cpu().contiguous()
        digest.update(weights.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
