"""Gradient canaries: units whose gradients are known, by which a private training is audited from within.

Each is a unit like any: sampled, clipped, summed and noised with the records, or not in the data at all, by a fair
coin. Its gradient lies along one coordinate of the trained parameters, which is no other canary's, so that they do not
disturb each other, and is far longer than the clipping norm C: what is added of it is C long where clipping does what
it says, and more where it does not. At each step the auditor reads the canary's coordinate of what the optimizer is
given, and takes off what the records added there (Nasr et al. 2023; Steinke, Nasr and Jagielski 2023, Section 6).

The sampling rate, the noise and the steps are those of the training without canaries: the claim follows from them and
holds for any data, these units among them. What changes is how many units a batch has.

Beside what a canary's own coordinate says, the steps themselves are looked at: how many there were, whether units were
drawn as often as Poisson sampling draws them, whether the noise has its size and is never the same twice. Knows no
bound and no file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from auditor.core.errors import AuditError
from auditor.core.secret_randomness import keyed_random_generator

NoiseScale = Callable[[NDArray[np.int64]], float]  # of a batch, by its units
LENGTH = 1e3  # of a canary's gradient before it is clipped, in clipping norms
_LEAST_NOISE = 1e-3  # in clipping norms: with less there is none, to a likelihood
_WITNESSES = 64  # canaries that are out, at whose coordinates is noise alone: looked at step by step
_BLOCK = 1024  # steps that are held against all others at once
_READ = ("scores", "sums", "drawn")


@dataclass(frozen=True)
class PlantedCanaries:
    """So many canaries; `included`: which of them are in the data, by coins that follow from the seed alone."""

    count: int
    seed: int = 0

    @property
    def included(self) -> NDArray[np.bool_]:
        return keyed_random_generator("gradient canaries", "coins", self.seed).random(self.count) < 0.5

    def draw_coordinates(self, parameters: int) -> NDArray[np.int64]:
        """(count,) of so many parameters in a row, each another one. Raises AuditError where there are too few."""
        if self.count > parameters:
            raise AuditError(
                f"expected at most a gradient canary for each of {parameters:,} trained parameters, got {self.count:,}"
            )
        rng = keyed_random_generator("gradient canaries", "directions", self.seed)
        return rng.choice(parameters, self.count, replace=False).astype(np.int64)


NOTHING_PLANTED = PlantedCanaries(0)


@dataclass(frozen=True)
class AssumedMechanism:
    """The mechanism that a score is a likelihood under: sigma, C, the sampling rate."""

    noise_multiplier: float
    clip: float
    rate: float


class CanaryWatch:
    """Plants canaries in the steps of one training, and reads what each release says of them.

    first: the number of the first canary among the units; those below are records.
    """

    def __init__(
        self, planted: PlantedCanaries, parameters: Sequence[nn.Parameter], first: int, assumed: AssumedMechanism
    ) -> None:
        self.parameters, self.first, self.assumed = parameters, first, assumed
        starts = np.cumsum([0, *(p.numel() for p in parameters)])
        flat = planted.draw_coordinates(int(starts[-1]))
        self.included = planted.included
        self.scores, self.sums = np.zeros(planted.count), np.zeros(planted.count)
        self.releases, self.drawn = 0, np.zeros(planted.count)  # steps seen; how often each was drawn, in or out
        self._noise: list[NDArray[np.float64]] = []  # of each step the witnesses', over its deviation as it is said
        self._witnesses = np.flatnonzero(~self.included)[:_WITNESSES]
        self._known = np.zeros(planted.count)  # what the records add at each canary's coordinate, in this step
        # The parameter that each canary's coordinate lies in, and where in it.
        self._owner = np.searchsorted(starts, flat, side="right") - 1
        self._offset = flat - starts[self._owner]
        self._here = [np.flatnonzero(self._owner == i) for i in range(len(parameters))]  # of each parameter, which
        self._at = [torch.from_numpy(self._offset[own]).to(parameters[i].device) for i, own in enumerate(self._here)]

    @property
    def canary_count(self) -> int:
        return len(self.included)

    def count_draws_and_drop_excluded_canaries(self, units: NDArray[np.int64]) -> NDArray[np.int64]:
        """Of the units drawn for a batch, those that are in the data. Counts the draws of every canary, in or out."""
        canaries = units[units >= self.first]
        self.drawn[canaries - self.first] += 1
        return np.concatenate([units[units < self.first], canaries[self.included[canaries - self.first]]])

    # --- their gradients, for whoever clips and sums ---

    def append_canary_gradients(self, canaries: Sequence[int]) -> None:
        """Puts the gradients of these canaries behind the records' per-sample gradients, where Opacus keeps them."""
        if not canaries:
            return
        for i, p in enumerate(self.parameters):
            rows = torch.zeros(len(canaries), p.numel(), dtype=p.dtype, device=p.device)
            for row, canary in enumerate(canaries):
                if self._owner[canary] == i:
                    rows[row, self._offset[canary]] = LENGTH * self.assumed.clip
            own: Any = p  # Opacus hangs its own attributes on parameters
            rows = rows.view(-1, *p.shape)
            samples = getattr(own, "grad_sample", None)
            own.grad_sample = rows if samples is None else torch.cat([samples, rows])

    # --- what is read ---

    def record_gradients_at_canary_coordinates(self, records: int) -> Tensor:
        """(records, count) the per-sample gradients of the first rows at the canaries' coordinates."""
        found = torch.zeros(records, self.canary_count, dtype=torch.float64)
        for p, here, at in zip(self.parameters, self._here, self._at, strict=True):
            own: Any = p
            if len(here) and records:
                found[:, torch.from_numpy(here)] = own.grad_sample[:records].flatten(1)[:, at].double().cpu()
        return found

    def add_known_sums_at_canary_coordinates(self, added: Tensor) -> None:
        """(count,) what records have added at the canaries' coordinates, without noise."""
        self._known += added.numpy()

    def released_gradients_at_canary_coordinates(self) -> Tensor:
        """(count,) the gradients that the parameters hold, at the canaries' coordinates; 0 where they hold none."""
        found = torch.zeros(self.canary_count, dtype=torch.float64)
        for p, here, at in zip(self.parameters, self._here, self._at, strict=True):
            if len(here) and p.grad is not None:
                found[torch.from_numpy(here)] = p.grad.detach().view(-1)[at].double().cpu()
        return found

    def score_release(self, expected_batch: float, units: NDArray[np.int64], scale: NoiseScale | None) -> None:
        """Reads one release: the gradients that the optimizer is about to use, which are means over that batch.

        units: those in the batch. scale: of the noise, where that depends on them.
        """
        # The mean made a sum again; less the records' part it is the canary's C, or 0, plus noise.
        noisy = self.released_gradients_at_canary_coordinates().numpy() * expected_batch
        x = (noisy - self._known) / self.assumed.clip
        noise = self.assumed.noise_multiplier
        if scale is None:
            self.scores += canary_inclusion_log_likelihood_ratio(x, noise, self.assumed.rate)
        else:
            inside, out = (noise * scales for scales in self._noise_scales_with_without(units, scale))
            told = self._noise_size_log_ratio(expected_batch, inside, out)
            self.scores += canary_inclusion_log_likelihood_ratio(x, inside, self.assumed.rate, told)
            noise *= scale(units)
        self.sums += x
        self.releases += 1
        if noise:
            self._noise.append(x[self._witnesses] / noise)
        self._known[:] = 0

    def _noise_scales_with_without(
        self, units: NDArray[np.int64], scale: NoiseScale
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """(count,) each: the noise's scale with this canary in the batch and without it, the other units as drawn."""
        numbers = range(self.first, self.first + self.canary_count)
        others = [units[units != number] for number in numbers]
        inside = [scale(np.append(left, number)) for left, number in zip(others, numbers, strict=True)]
        return np.array(inside), np.array([scale(left) for left in others])

    def _noise_size_log_ratio(
        self, expected_batch: float, inside: NDArray[np.float64], out: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """(count,) the log-likelihood ratio, in nats, of deviations `inside` against `out` of all of this step's noise.

        What the noise's size says of who is in the batch: nothing where it is the same (formulas B4, (i)).
        """
        energy, number = 0.0, 0
        for own in self.parameters:
            p: Any = own  # Opacus hangs its own attributes on parameters
            noise = (p.grad.double() * expected_batch - p.summed_grad.double()) / self.assumed.clip
            energy, number = energy + float(noise.square().sum()), number + p.numel()
        inside, out = np.maximum(inside, _LEAST_NOISE), np.maximum(out, _LEAST_NOISE)
        # Of two centred normal densities of all these numbers at once.
        return np.asarray(number * np.log(out / inside) + energy / 2 * (out**-2 - inside**-2))

    @property
    def draw_unevenness_z(self) -> float:
        """How unevenly canaries were drawn: z of their counts' summed squared deviations; below 0: too evenly.

        Each count is Binomial(steps, q). The sum less its mean, over the root of the sum of its terms' second moments:
        below -z with a chance of at most exp(-z^2 / 2), for any number of terms, which are not negative (Maurer 2003,
        Theorem 2.1).
        """
        n, q = self.releases, self.assumed.rate
        variance = n * q * (1 - q)
        if not variance or not self.canary_count:
            return 0.0
        # the fourth central moment of a binomial
        fourth = variance * (1 + 3 * (n - 2) * q * (1 - q))
        found = float(np.square(self.drawn - n * q).sum())
        return (found - self.canary_count * variance) / math.sqrt(self.canary_count * fourth)

    def noise_count_size_and_largest_correlation(self) -> tuple[int, float, float]:
        """How many values of the noise were looked at, their root mean square, the largest correlation of two steps.

        Over the deviation that the training says they have; (0, 1, 0) where it says that there is none.
        """
        if not self._noise or not len(self._witnesses):
            return 0, 1.0, 0.0
        steps = np.stack(self._noise)
        lengths = np.linalg.norm(steps, axis=1, keepdims=True)
        unit, largest = steps / np.maximum(lengths, 1e-300), 0.0
        for start in range(0, len(unit), _BLOCK):
            block = np.abs(unit[start : start + _BLOCK] @ unit.T)
            block[np.arange(len(block)), start + np.arange(len(block))] = 0
            largest = max(largest, float(block.max()))
        return steps.size, math.sqrt(float(np.square(steps).mean())), largest

    # --- going on ---

    def state(self) -> dict[str, Any]:
        read = {name: torch.from_numpy(getattr(self, name).copy()) for name in _READ}
        return {**read, "releases": self.releases, "noise": [torch.from_numpy(step) for step in self._noise]}

    def restore(self, state: dict[str, Any]) -> None:
        self.scores, self.sums, self.drawn = (state[name].numpy().copy() for name in _READ)
        self.releases, self._noise = state["releases"], [step.numpy().copy() for step in state["noise"]]


def canary_inclusion_log_likelihood_ratio(
    x: NDArray[np.float64], noise: float | NDArray[np.float64], rate: float, told: float | NDArray[np.float64] = 0.0
) -> NDArray[np.float64]:
    """In nats, of x ~ (1 - q) N(0, s^2) + q N(1, s^2) against N(0, s^2): log(1 - q + q exp((2 x - 1) / (2 s^2))).

    The subsampled Gaussian mechanism's, with or without one unit of gradient 1. told: what else tells the two apart.
    """
    s = np.maximum(noise, _LEAST_NOISE)
    apart = (2 * x - 1) / (2 * s * s) + told
    out = math.log1p(-rate) if rate < 1 else -math.inf
    # logaddexp: exp of a long canary's term alone would overflow.
    return np.asarray(np.logaddexp(out, math.log(rate) + apart))
