"""Private fine-tuning by Opacus: per-sample gradients clipped, summed, noised; Poisson batches; checkpoints.

Knows token sequences, one mechanism and its steps. Does no accounting: epsilon follows from the noise multiplier, the
sampling rate and the number of steps that `fit_privately` returns. Needs the `dp` extra.

The noise is sigma times the sensitivity C (1 + ROUNDING), rounding included: a millionth of C, which is proved in
`auditor/training/clipping.py`. Not covered by any epsilon: the loss that is shown while it trains, and that a record's
own gradient, by float32 kernels, can differ in its last digits by which records are computed beside it.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from opacus.optimizers import DPOptimizer
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from auditor.core.errors import AuditError
from auditor.core.nouns import Tokens
from auditor.core.secret_randomness import keyed_random_generator
from auditor.plugins.trainer import TrainerCheckpoint
from auditor.training import clipping
from auditor.training.finetune import require_finite_weights, trainable_parameters
from auditor.training.gradient_canaries import (
    NOTHING_PLANTED,
    AssumedMechanism,
    CanaryWatch,
    NoiseScale,
    PlantedCanaries,
)
from auditor.training.noise import NoiseStream, add_secret_gaussian_noise_on_grid
from auditor.training.per_sample import (
    PerSampleGradientHook,
    checked_opacus_model_context,
    mean_nll_of_each_padded_record,
    pad_training_tokens_and_labels,
)

Progress = Callable[[int, float], None]  # (steps done, mean loss of the last batch, nats a token)


@dataclass(frozen=True)
class PoissonSampler:
    """Each of `size` units is in each step's batch with probability `rate`, independently: what the accounting is of.

    A batch is a function of (key, step), so that a resumed training draws the batches it would have drawn.
    """

    size: int
    rate: float
    key: str

    def units_in_batch(self, step: int) -> NDArray[np.int64]:
        """The units of this step, possibly none."""
        return np.flatnonzero(keyed_random_generator("batch", self.key, step).random(self.size) < self.rate)


@dataclass(frozen=True)
class PrivateRecipe:
    """How to train: the mechanism and the optimizer.

    noise_multiplier: sigma; 0: no noise. clip: C, on the gradient of a unit's mean loss a token; inf: none.
    expected_batch: L, what sums are divided by. ghost: one record's gradient at a time in memory.
    """

    noise_multiplier: float
    clip: float
    steps: int
    expected_batch: float
    learning_rate: float
    optimizer: Literal["adam", "sgd"] = "adam"
    physical_batch: int = 16  # sequences at once: memory, not results
    ghost: bool = False


@dataclass
class PrivateModel:
    """What came of it: the steps that were taken, whether any parameter moved, the noise scale of each step.

    watch: what was read of the gradient canaries.
    """

    steps: int
    moved: bool
    noise_scales: list[float] = field(default_factory=list)
    watch: CanaryWatch = field(kw_only=True, compare=False)


class ScaledOptimizer(DPOptimizer):
    """Opacus's optimizer, with a share of the clipping norm for each example, and a scale of the noise for each batch.

    Both are 1 in DP-SGD. The second is ADP's (Wu et al. 2022, Eq. 6: z = gamma_B N(0, C^2 sigma^2 I)) and voids the
    accounting where it depends on the data; the first leaves the sensitivity at C (formulas B4, variant B).
    """

    noise_multiplier: float
    noise_scale: float = 1.0
    stream: NoiseStream  # of this step

    def clip_and_add(self, shares: Tensor) -> Tensor:
        """Adds the clipped per-sample gradients of one physical batch to the sums; shares (b,) of the clipping norm.

        Returns what each was multiplied by, (b,) float64.
        """
        factors = clipping.clipping_factors(
            clipping.per_sample_gradient_norms(self.grad_samples), self.max_grad_norm * shares.double()
        )
        for p in self.params:
            sample = self._get_flat_grad_sample(p)
            p.summed_grad = clipping.add_clipped_gradients_on_grid(p.summed_grad, sample, factors, self.max_grad_norm)
            p.grad_sample = None
        return factors

    def step_by_noisy_mean_gradient(self) -> None:
        """Noise on the sums, the mean over the expected batch, one step. An empty batch is a step of noise alone."""
        for p in self.params:
            if p.summed_grad is None:
                p.summed_grad = torch.zeros_like(
                    p, dtype=torch.float64, device=clipping.device_for_float64_gradient_sums(p.device)
                )
        self.add_noise()
        for p in self.params:
            # By the expected size: that of this batch is secret.
            p.grad /= self.expected_batch_size
        self.original_optimizer.step()
        self.zero_grad(set_to_none=True)  # Opacus's: the clipped sums go too

    def add_noise(self) -> None:
        """Noise of our own stream, scaled for this batch: Opacus's can be guessed (`auditor/training/noise.py`)."""
        deviation = 0.0
        if self.noise_multiplier:
            deviation = self.noise_scale * self.noise_multiplier * self.max_grad_norm * (1 + clipping.ROUNDING)
        for p in self.params:
            # Back in float32, which holds the grid exactly up to 256 deviations (`noise._GRID`).
            p.grad = add_secret_gaussian_noise_on_grid(p.summed_grad, deviation, self.stream).to(p).view_as(p)


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
    progress: Progress = lambda done, loss: None,
    checkpoint: TrainerCheckpoint | None = None,
    seconds_between: float = 60.0,
) -> PrivateModel:
    """Trains the parameters that require gradients, in place, from the checkpoint on; each example is a privacy unit.

    shares: for each example the fraction of the clipping norm, in (0, 1], that its gradient is clipped to.
    noise_scale: maps the units of a batch to the factor on its noise. canaries: extra units, sampled like the examples
    and numbered after them; a canary that was not included (by its coin) contributes to no batch.
    Raises AuditError for batches that are not Poisson or too large to be summed exactly, frozen models, and layers
    without per-sample gradients.
    """
    _require_poisson_sampler(sampler, len(examples), canaries.count)
    parameters = trainable_parameters(model)
    before = _digest_parameters(parameters)
    assumed = AssumedMechanism(recipe.noise_multiplier, recipe.clip, sampler.rate)
    watch = CanaryWatch(canaries, list(parameters.values()), len(examples), assumed)
    clipping.self_test_gradient_clipping(list(parameters.values()), recipe.clip, sampler.size * sampler.rate)
    trained = PrivateModel(0, False, watch=watch)
    own = torch.ones(len(examples)) if shares is None else torch.tensor(shares)
    # A canary is clipped to all of C: the most that a unit may add.
    own = torch.cat([own, torch.ones(canaries.count)])
    # ADP's scale is a mean over the batch: of an empty one there is none
    scale = noise_scale and (lambda units: noise_scale(units) if len(units) else 1.0)
    with checked_opacus_model_context(model, recipe.ghost, examples, pad) as wrapped:
        optimizer = _make_dp_optimizer(list(parameters.values()), recipe)
        if checkpoint is not None and (state := checkpoint.load()) is not None:
            _restore_private_training_state(state, sampler, parameters, optimizer, trained)
        elif checkpoint is not None:
            checkpoint.save(
                _private_training_state(sampler, parameters, optimizer, trained)
            )  # the key, before it is used
        saved = time.monotonic()
        while trained.steps < recipe.steps:
            units = watch.count_draws_and_drop_excluded_canaries(sampler.units_in_batch(trained.steps))
            optimizer.noise_scale = 1.0 if scale is None else scale(units)
            optimizer.stream = NoiseStream(sampler.key, trained.steps)
            loss = _accumulate_clipped_gradients(wrapped, optimizer, units.tolist(), examples, own, recipe, pad, watch)
            with _hook_canary_scores_to_optimizer_step(optimizer, watch, units, scale):
                optimizer.step_by_noisy_mean_gradient()
            require_finite_weights(parameters.values(), checkpoint)
            trained.steps += 1
            trained.noise_scales.append(optimizer.noise_scale)
            if checkpoint is not None and time.monotonic() - saved >= seconds_between:
                checkpoint.save(_private_training_state(sampler, parameters, optimizer, trained))
                saved = time.monotonic()
            progress(trained.steps, loss)
    trained.moved = _digest_parameters(parameters) != before
    return trained


def _require_poisson_sampler(sampler: Any, examples: int, canaries: int) -> None:
    if not isinstance(sampler, PoissonSampler):
        raise AuditError(
            f"expected Poisson batches, got {type(sampler).__name__}: epsilon is accounted for Poisson sampling, and "
            "says nothing of a shuffled or any other loader"
        )
    if sampler.size != examples + canaries:
        beside = f" and {canaries} gradient canaries" if canaries else ""
        raise AuditError(f"expected a sampler of the {examples} examples{beside}, got one of {sampler.size}")


def _make_dp_optimizer(parameters: list[nn.Parameter], recipe: PrivateRecipe) -> ScaledOptimizer:
    kind: Any = torch.optim.Adam if recipe.optimizer == "adam" else torch.optim.SGD
    return ScaledOptimizer(
        kind(parameters, lr=recipe.learning_rate),
        noise_multiplier=recipe.noise_multiplier,
        max_grad_norm=recipe.clip,
        expected_batch_size=recipe.expected_batch,
        loss_reduction="sum",
    )


# --- one batch --------------------------------------------------------------------------------------------------------


def _hook_canary_scores_to_optimizer_step(
    optimizer: ScaledOptimizer, watch: CanaryWatch, units: NDArray[np.int64], scale: NoiseScale | None
) -> RemovableHandle:
    """Scores canaries on the gradients that the inner optimizer is given: these are released, and not our own sums."""
    inner, expected = optimizer.original_optimizer, optimizer.expected_batch_size
    return inner.register_step_pre_hook(lambda *_: watch.score_release(expected, units, scale))


def _accumulate_clipped_gradients(
    wrapped: Any,
    optimizer: ScaledOptimizer,
    units: Sequence[int],
    examples: Sequence[Tokens],
    shares: Tensor,
    recipe: PrivateRecipe,
    pad: int,
    watch: CanaryWatch,
) -> float:
    """Adds the clipped gradients of these units, a physical batch at a time.

    Returns the mean loss of the records among them, NaN where there is none. Units past the examples are canaries.
    """
    total, device = 0.0, optimizer.params[0].device
    order = sorted(units, key=lambda i: len(examples[i]) if i < len(examples) else 0)  # equal lengths: less padding
    for start in range(0, len(order), recipe.physical_batch):
        part = order[start : start + recipe.physical_batch]
        records, canaries = [i for i in part if i < len(examples)], [i for i in part if i >= len(examples)]
        own = shares[records + canaries].to(device)  # as rows stand: `append_canary_gradients` puts canaries last
        losses = torch.zeros(0, device=device)
        if records:
            losses = mean_nll_of_each_padded_record(
                wrapped, *pad_training_tokens_and_labels([examples[i] for i in records], pad, device)
            )
            losses.sum().backward()  # of a mean, Opacus would give each record's gradient divided by the batch
        numbers = [i - len(examples) for i in canaries]
        if isinstance(wrapped, PerSampleGradientHook):
            for i in range(len(records)):
                wrapped.compute_record_gradient(i)
                _clip_and_add_record_and_canary_gradients(optimizer, 1, own[i : i + 1], watch, [])
            for i, number in enumerate(numbers, len(records)):
                _clip_and_add_record_and_canary_gradients(optimizer, 0, own[i : i + 1], watch, [number])
            wrapped.drop_kept_backprops()
        else:
            _clip_and_add_record_and_canary_gradients(optimizer, len(losses), own, watch, numbers)
        total += float(losses.detach().sum())
    drawn = sum(i < len(examples) for i in units)
    return total / drawn if drawn else float("nan")


def _clip_and_add_record_and_canary_gradients(
    optimizer: ScaledOptimizer, records: int, shares: Tensor, watch: CanaryWatch, canaries: Sequence[int]
) -> None:
    """Clips and adds the per-sample gradients that a backward pass left, and those of the canaries behind them."""
    watch.append_canary_gradients(canaries)
    seen = watch.record_gradients_at_canary_coordinates(records)  # before `clip_and_add`, which frees the samples
    watch.add_known_sums_at_canary_coordinates(optimizer.clip_and_add(shares)[:records].double().cpu() @ seen)


# --- going on ---------------------------------------------------------------------------------------------------------


def _private_training_state(
    sampler: PoissonSampler, parameters: dict[str, nn.Parameter], optimizer: ScaledOptimizer, trained: PrivateModel
) -> dict[str, Any]:
    return {
        "key": sampler.key,
        "steps": trained.steps,
        "noise_scales": trained.noise_scales,
        "parameters": {name: p.detach() for name, p in parameters.items()},
        "optimizer": optimizer.state_dict(),
        "canaries": trained.watch.state(),
    }


def _restore_private_training_state(
    state: dict[str, Any],
    sampler: PoissonSampler,
    parameters: dict[str, nn.Parameter],
    optimizer: ScaledOptimizer,
    trained: PrivateModel,
) -> None:
    """Steps, weights and moments come from one file, so that no step is in the weights and not in the count."""
    if state["key"] != sampler.key:
        raise AuditError("expected the checkpoint of this training, got one whose noise has another key")
    with torch.no_grad():
        for name, p in parameters.items():
            p.copy_(state["parameters"][name])
    optimizer.load_state_dict(state["optimizer"])
    trained.steps, trained.noise_scales = state["steps"], list(state["noise_scales"])
    if trained.watch.canary_count:
        trained.watch.restore(state["canaries"])


def _digest_parameters(parameters: dict[str, nn.Parameter]) -> str:
    digest = hashlib.sha256()
    for name, p in parameters.items():
        digest.update(name.encode())
        # as bytes: numpy has no bfloat16
        digest.update(p.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
