"""Plant gradient canaries: units with known gradients that audit a private training from within.

A fair coin decides whether a canary is in the data. If so, it is sampled, clipped, summed and
noised like the records. Its gradient lies along one coordinate of the trained parameters, a
different one for each canary, so that canaries do not disturb each other. The gradient is far
longer than the clipping norm C, so it contributes exactly C if clipping works, and more if not. At
each step the auditor reads the canary's coordinate in the gradient that the optimizer receives, and
subtracts the records' contribution (Nasr et al. 2023; Steinke, Nasr and Jagielski 2023, Section 6).

The sampling rate, the noise and the number of steps are those of the training without canaries. The
claim follows from them and holds for any data, including the canaries. Only the number of units in
a batch changes.

The auditor also checks the steps: how many there were, whether units were drawn as often as in
Poisson sampling, and whether the noise has the right size and never repeats. This module computes
no bound and writes no file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from auditor.core.arrays import Bools, Floats, Ints
from auditor.core.errors import AuditError
from auditor.core.secret_randomness import make_keyed_generator

NoiseScale = Callable[[Ints], float]  # of a batch, by its units
LENGTH = 1e3  # of a canary's gradient before it is clipped, in clipping norms
_LEAST_NOISE = 1e-3  # in clipping norms: the likelihood treats less noise as this much
# Excluded canaries whose coordinates contain only noise: their values are stored at each step.
_WITNESSES = 64
_BLOCK = 1024  # steps that are compared with all others at once
_STATE_ARRAYS = ("scores", "sums", "drawn")


@dataclass(frozen=True)
class PlantedCanaries:
    """The gradient canaries to plant.

    `seed` determines the coins, which decide which canaries are in the data (`included`), and the
    canaries' coordinates.
    """

    count: int
    seed: int = 0

    @property
    def included(self) -> Bools:
        rng = make_keyed_generator("gradient canaries", "coins", self.seed)
        return rng.random(self.count) < 0.5

    def draw_coordinates(self, parameters: int) -> Ints:
        """Draw a distinct coordinate for each canary among this many parameters, (count,).

        Raise AuditError if there are fewer parameters than canaries.
        """
        if self.count > parameters:
            n_trained = f"{parameters:,} trained parameters"
            raise AuditError(
                f"expected at most a gradient canary for each of {n_trained}, got {self.count:,}",
            )
        rng = make_keyed_generator("gradient canaries", "directions", self.seed)
        return rng.choice(parameters, self.count, replace=False).astype(np.int64)


NOTHING_PLANTED = PlantedCanaries(0)


class CanaryWatch:
    """Watch that plants canaries in the steps of a training and scores each release of gradients.

    Attributes:
        planted: the canaries.
        parameters: the trained parameters.
        first: index of the first canary among the privacy units; canaries follow all records.
        noise_multiplier, clip, rate: sigma, C and the sampling rate q that the training should use,
            by which a canary's score, a likelihood ratio, is computed.
    """

    def __init__(
        self,
        planted: PlantedCanaries,
        parameters: Sequence[nn.Parameter],
        first: int,
        noise_multiplier: float,
        clip: float,
        rate: float,
    ) -> None:
        self.parameters = parameters
        self.first = first
        self.noise_multiplier = noise_multiplier
        self.clip = clip
        self.rate = rate
        starts = np.cumsum([0, *(p.numel() for p in parameters)])
        coordinates = planted.draw_coordinates(int(starts[-1]))
        self.included = planted.included
        self.scores = np.zeros(planted.count)
        self.sums = np.zeros(planted.count)
        self.releases = 0  # steps scored
        self.drawn = np.zeros(planted.count)  # draws of each canary, included or not
        # Noise at the witnesses' coordinates in each step, over its reported deviation.
        self._noise: list[Floats] = []
        self._witnesses = np.flatnonzero(~self.included)[:_WITNESSES]
        # The records' contribution at each canary's coordinate, in this step.
        self._known_sums = np.zeros(planted.count)
        # The parameter that contains each canary's coordinate, and the offset in it.
        self._owner = np.searchsorted(starts, coordinates, side="right") - 1
        self._offset = coordinates - starts[self._owner]
        # For each parameter, its canaries and their offsets.
        self._canaries_by_parameter = list[Ints]()
        self._offsets_by_parameter = list[Tensor]()
        for i, parameter in enumerate(parameters):
            canaries = np.flatnonzero(self._owner == i)
            offsets = torch.from_numpy(self._offset[canaries]).to(parameter.device)
            self._canaries_by_parameter.append(canaries)
            self._offsets_by_parameter.append(offsets)

    @property
    def canary_count(self) -> int:
        return len(self.included)

    def drop_excluded_canaries(self, units: Ints) -> Ints:
        """Return the units of a batch without the canaries that a coin excluded.

        Draws are counted for all canaries, including the excluded ones.
        """
        canaries = units[units >= self.first]
        self.drawn[canaries - self.first] += 1
        included = canaries[self.included[canaries - self.first]]
        return np.concatenate([units[units < self.first], included])

    # --- canary gradients, for the code that clips and sums ---

    def append_canary_gradients(self, canaries: Sequence[int]) -> None:
        """Append the gradients of these canaries to the records' per-sample gradients.

        Opacus stores per-sample gradients in `grad_sample` of each parameter.
        """
        if not canaries:
            return
        for i, p in enumerate(self.parameters):
            rows = torch.zeros(len(canaries), p.numel(), dtype=p.dtype, device=p.device)
            for row, canary in enumerate(canaries):
                if self._owner[canary] == i:
                    rows[row, self._offset[canary]] = LENGTH * self.clip
            parameter: Any = p  # Opacus adds attributes to parameters
            rows = rows.view(-1, *p.shape)
            samples = getattr(parameter, "grad_sample", None)
            if samples is None:
                parameter.grad_sample = rows
            else:
                parameter.grad_sample = torch.cat([samples, rows])

    # --- reading gradients ---

    def read_record_gradients(self, records: int) -> Tensor:
        """Return per-sample gradients of the first `records` records, (records, canaries).

        Only the canaries' coordinates are returned.
        """
        gradients = torch.zeros(records, self.canary_count, dtype=torch.float64)
        for i, p in enumerate(self.parameters):
            parameter: Any = p
            canaries = torch.from_numpy(self._canaries_by_parameter[i])
            if len(canaries) and records:
                samples = parameter.grad_sample[:records].flatten(1)
                gradients[:, canaries] = samples[:, self._offsets_by_parameter[i]].double().cpu()
        return gradients

    def add_known_sums(self, sums: Tensor) -> None:
        """Add noiseless sums of records' gradients at the canaries' coordinates, (canaries,).

        `score_release` subtracts these sums, so that only the canaries' gradients and the noise
        remain.
        """
        self._known_sums += sums.numpy()

    def read_released_gradients(self) -> Tensor:
        """Return the released gradients at the canaries' coordinates, (canaries,); 0 if absent."""
        gradients = torch.zeros(self.canary_count, dtype=torch.float64)
        for i, p in enumerate(self.parameters):
            canaries = torch.from_numpy(self._canaries_by_parameter[i])
            if len(canaries) and p.grad is not None:
                flat = p.grad.detach().view(-1)
                gradients[canaries] = flat[self._offsets_by_parameter[i]].double().cpu()
        return gradients

    def score_release(
        self,
        expected_batch: float,
        units: Ints,
        scale: NoiseScale | None,
    ) -> None:
        """Score one release: the gradients that the optimizer will use.

        Args:
            expected_batch: number by which the summed gradients are divided.
            units: the units in the batch.
            scale: maps units to the noise scale; None if the scale does not depend on the units.
        """
        # The sum less the records' contribution is the canary's C, or 0, plus noise.
        noisy_sums = self.read_released_gradients().numpy() * expected_batch
        x = (noisy_sums - self._known_sums) / self.clip
        noise = self.noise_multiplier
        if scale is None:
            self.scores += compute_inclusion_log_ratio(x, noise, self.rate)
        else:
            scales_with, scales_without = self._compute_noise_scales(units, scale)
            noise_with = noise * scales_with
            noise_without = noise * scales_without
            size_ratio = self._compute_noise_size_log_ratio(
                expected_batch,
                noise_with,
                noise_without,
            )
            self.scores += compute_inclusion_log_ratio(x, noise_with, self.rate, size_ratio)
            noise *= scale(units)
        self.sums += x
        self.releases += 1
        if noise:
            self._noise.append(x[self._witnesses] / noise)
        self._known_sums[:] = 0

    def _compute_noise_scales(self, units: Ints, scale: NoiseScale) -> tuple[Floats, Floats]:
        """Return the noise scale with and without each canary in the batch, (canaries,) each.

        The other units of the batch stay the same.
        """
        scales_with = []
        scales_without = []
        for canary in range(self.first, self.first + self.canary_count):
            other_units = units[units != canary]
            scales_with.append(scale(np.append(other_units, canary)))
            scales_without.append(scale(other_units))
        return np.array(scales_with), np.array(scales_without)

    def _compute_noise_size_log_ratio(
        self,
        expected_batch: float,
        noise_with: Floats,
        noise_without: Floats,
    ) -> Floats:
        """Return the evidence for each canary in the size of this step's noise, (canaries,) nats.

        This is the log-likelihood ratio of the deviation `noise_with` to `noise_without`; it is 0
        if both are equal. ADP's noise depends on the batch (Wu et al. 2022, Eq. 5 and 6).
        """
        energy = 0.0
        n_values = 0
        for p in self.parameters:
            parameter: Any = p  # Opacus adds attributes to parameters
            noisy_sum = parameter.grad.double() * expected_batch
            noise = (noisy_sum - parameter.summed_grad.double()) / self.clip
            energy += float(noise.square().sum())
            n_values += p.numel()
        s_with = np.maximum(noise_with, _LEAST_NOISE)
        s_without = np.maximum(noise_without, _LEAST_NOISE)
        # The ratio of two centred normal densities of all these values at once.
        log_normalisers = n_values * np.log(s_without / s_with)
        return np.asarray(log_normalisers + energy / 2 * (s_without**-2 - s_with**-2))

    @property
    def draw_unevenness_z(self) -> float:
        """Z-score for how unevenly canaries were drawn; negative if they were drawn too evenly.

        In T steps, canary i is drawn X_i ~ Binomial(T, q) times. With D_i = (X_i - T q)^2, the
        score is z = sum_i (D_i - E D_i) / sqrt(sum_i E D_i^2). For any number of nonnegative terms
        D_i, P[z < -t] is at most exp(-t^2 / 2) (Maurer 2003, Theorem 2.1).
        """
        n = self.releases
        q = self.rate
        variance = n * q * (1 - q)
        if not variance or not self.canary_count:
            return 0.0
        # The fourth central moment of a binomial.
        fourth = variance * (1 + 3 * (n - 2) * q * (1 - q))
        squared_deviations = float(np.square(self.drawn - n * q).sum())
        excess = squared_deviations - self.canary_count * variance
        return excess / math.sqrt(self.canary_count * fourth)

    def measure_noise(self) -> tuple[int, float, float]:
        """Measure the noise at some coordinates, in units of the reported deviation.

        Return the number of noise values, their root mean square, and the largest correlation
        between two steps; (0, 1, 0) if no noise is reported.
        """
        if not self._noise or not len(self._witnesses):
            return 0, 1.0, 0.0
        steps = np.stack(self._noise)
        lengths = np.linalg.norm(steps, axis=1, keepdims=True)
        directions = steps / np.maximum(lengths, 1e-300)
        largest = 0.0
        for start in range(0, len(directions), _BLOCK):
            block = np.abs(directions[start : start + _BLOCK] @ directions.T)
            block[np.arange(len(block)), start + np.arange(len(block))] = 0
            largest = max(largest, float(block.max()))
        return steps.size, math.sqrt(float(np.square(steps).mean())), largest

    # --- checkpoints ---

    def state(self) -> dict[str, Any]:
        """Return a state from which `restore` continues."""
        state: dict[str, Any] = {"releases": self.releases}
        for name in _STATE_ARRAYS:
            state[name] = torch.from_numpy(getattr(self, name).copy())
        state["noise"] = list(map(torch.from_numpy, self._noise))
        return state

    def restore(self, state: dict[str, Any]) -> None:
        for name in _STATE_ARRAYS:
            setattr(self, name, state[name].numpy().copy())
        self.releases = state["releases"]
        self._noise = [step.numpy().copy() for step in state["noise"]]


def compute_inclusion_log_ratio(
    x: Floats,
    noise: float | Floats,
    rate: float,
    other_evidence: float | Floats = 0.0,
) -> Floats:
    """Return a canary's log-likelihood ratio of being included to being excluded, in nats.

    It compares x ~ (1 - q) N(0, s^2) + q N(1, s^2) with N(0, s^2): the subsampled Gaussian
    mechanism with and without one unit of gradient 1. The value is log(1 - q + q exp((2 x - 1) / (2
    s^2))).

    Args:
        x: observed values.
        noise: s.
        rate: q.
        other_evidence: a further log-ratio in nats, added to the exponent.
    """
    s = np.maximum(noise, _LEAST_NOISE)
    log_ratio = (2 * x - 1) / (2 * s * s) + other_evidence
    log_excluded = math.log1p(-rate) if rate < 1 else -math.inf
    # logaddexp: exp of a long canary's term by itself would overflow.
    return np.asarray(np.logaddexp(log_excluded, math.log(rate) + log_ratio))
