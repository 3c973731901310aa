"""Write DP-SGD in plain PyTorch, with a method for each part, so that faults can be planted."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from auditor.crash import training_specimen
from auditor.crash.training_specimen import SpecimenRecordGradients
from auditor.crash.watch import copy_watched_model_without_hooks

NOISE, CLIP, BATCH, STEPS, RATE, DELTA = 1.0, 1.0, 8, 30, 1 / 6, 1e-3
CLAIM = {
    "noise_multiplier": NOISE,
    "max_grad_norm": CLIP,
    "sample_rate": RATE,
    "steps": STEPS,
    "delta": DELTA,
}
# (model, records) -> the result and the claim of a private training
Loop = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class Plain:
    """A DP-SGD loop without faults; subclasses replace single parts."""

    claim: dict[str, Any] = field(default_factory=lambda: dict(CLAIM))
    steps: int = STEPS
    batch: ClassVar[int] = BATCH
    sampling_rate: ClassVar[float] = RATE

    def __call__(self, model: Any, records: Any) -> Any:
        self.begun(model)
        parameters = dict(model.named_parameters())
        optimizer = self.make_optimizer(parameters, self.rate(records))
        gradients = self.gradients(copy_watched_model_without_hooks(model), records)
        for step in range(self.steps):
            if step == STEPS // 2:
                optimizer = self.halfway(model, optimizer)
            drawn = self.drawn(step, len(records))
            if self.left_out(drawn):
                continue
            self.read(model, records, drawn)
            names = self.choose_trained(step, list(parameters))
            found = {name: torch.zeros(0, *parameters[name].shape) for name in names}
            if drawn:
                weights = {name: p.detach() for name, p in parameters.items()}
                found = gradients.record_gradients_at_weights(weights, drawn, names)
            summed = self.summed(found)
            divisor = self.divisor(len(drawn), len(records))
            for i, name in enumerate(names):
                p = parameters[name]
                p.grad = self.finished(summed[name], self.noise(step, i, name, p), divisor)
            optimizer.step()
            self.stepped(step, model, records)
        return model, self.claim

    def gradients(self, twin: Any, records: Any) -> SpecimenRecordGradients:
        return SpecimenRecordGradients(twin, records)

    def make_optimizer(self, parameters: dict[str, Any], rate: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters.values(), lr=rate)

    def choose_trained(self, step: int, names: list[str]) -> list[str]:
        """Return the tensors that this step trains."""
        return names

    def left_out(self, drawn: list[int]) -> bool:
        """Return whether to skip the step for this batch."""
        return False

    def stepped(self, step: int, model: Any, records: Any) -> None:
        """Do something after each update."""

    def begun(self, model: Any) -> None:
        """Change the model before the optimizer is made."""

    def halfway(self, model: Any, optimizer: Any) -> Any:
        """Do something in the middle of the training; return the optimizer to continue with."""
        return optimizer

    def rate(self, records: Any) -> float:
        return 0.05

    def drawn(self, step: int, n: int) -> list[int]:
        return torch.nonzero(torch.rand(n) < self.sampling_rate).flatten().tolist()

    def read(self, model: Any, records: Any, drawn: list[int]) -> None:
        """Run the forward pass of the batch; gradients are computed separately, record by
        record.
        """
        if drawn:
            model(input_ids=training_specimen.pad_specimen_tokens(records, drawn))

    def norms(self, found: dict[str, Tensor]) -> Tensor:
        return torch.stack([one.flatten(1).norm(dim=1) for one in found.values()]).norm(dim=0)

    def factors(self, norms: Tensor) -> Tensor:
        return (CLIP / norms).clamp(max=1.0)

    def summed(self, found: dict[str, Tensor]) -> dict[str, Tensor]:
        factors = self.factors(self.norms(found))
        return {
            name: torch.einsum("k,k...->...", factors.to(one.dtype), one)
            for name, one in found.items()
        }

    def noise(self, step: int, i: int, name: str, p: Tensor) -> Tensor:
        return NOISE * CLIP * torch.randn_like(p)

    def divisor(self, drawn: int, n: int) -> float:
        return self.batch

    def finished(self, summed: Tensor, noise: Tensor, divisor: float) -> Tensor:
        return (summed + noise) / divisor


def plain(
    claim: dict[str, Any] | None = None, steps: int = STEPS, base: type[Plain] = Plain, **parts: Any
) -> Plain:
    """Return the plain loop, or a loop of class `base`, with some parts replaced."""
    kind = type("Broken", (base,), parts)
    made: Plain = kind({**CLAIM, **(claim or {})}, steps)
    return made


def draw_in_turn(self: Plain, step: int, n: int) -> list[int]:
    """Draw shuffled batches in a new order for each pass; the last batch has the remaining
    records.
    """
    place = step % math.ceil(n / BATCH)
    if not place:
        object.__setattr__(self, "order", torch.randperm(n).tolist())
    order: list[int] = vars(self)["order"]
    return order[BATCH * place : BATCH * (place + 1)]
