"""Watches a training from outside: what the model reads, and the gradient that each step is about to use.

By torch's hooks alone; nothing of the training is edited. Every privatised gradient is taken apart at once:

    gradient = scale * (sum over the batch's records of (reach * unit gradient) + noise)

In some 5,000 dimensions the records of a batch span a handful, so what lies outside their span is noise and nothing
else: its size is known to a percent from one step. Reaches are told in units of it, which no later scaling (by the
batch size, the learning rate, or a norm of the released gradient) changes.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, distributed, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from auditor.core.errors import AuditError
from auditor.crash import subject
from auditor.crash.subject import Gradients, Record

_Array = NDArray[np.float64]
_ROUNDING = 1e-9  # relative: below it a direction of double precision is rounding
_SILENT = 1e-5  # of a gradient, which is of single precision: noise below it is rounding


@dataclass(frozen=True)
class ReadStep:
    """One update, as it was seen. noise: (d,) outside the records' span, in the gradient's own scale; by tensor."""

    records: tuple[int, ...]  # those read since the step before, with repeats
    passes: int  # reads of the model they came by
    rate: float  # the learning rate
    scale: float  # standard deviation of the noise an element, over all tensors; 0: no more than rounding
    scales: dict[str, tuple[float, int]]  # tensor -> its noise's standard deviation, and from how many degrees
    reaches: (
        _Array  # (records,) coefficients of their unit gradients, in units of `scale`; of the gradient where it is 0
    )
    gram: _Array  # (records, records) of the unit gradients: the inverse of the reaches' covariance
    norms: _Array  # (records,) of the gradients before clipping
    batch_norm: float  # of their sum
    noise: _Array  # (d,)
    spread: _Array  # (d,) each element's standard deviation over that of the noise: less than 1 near the records' span


@dataclass
class Trace:
    """One training, step by step."""

    n: int
    steps: list[ReadStep] = field(default_factory=list)
    evaluated: set[int] = field(default_factory=set)  # records that were read without a gradient
    foreign: int = 0  # rows that are no record of ours
    overflowed: list[tuple[int, str]] = field(default_factory=list)  # step and tensor of numbers that are not finite
    shapes: dict[str, tuple[int, int]] = field(default_factory=dict)  # tensor -> where it lies in `noise`


class StepWatch:
    """Takes every step of one training apart. Raises AuditError where it lasts longer than it may."""

    def __init__(self, model: nn.Module, records: list[Record], until: float, everyone: bool = False) -> None:
        """everyone: the reach of every record is looked for in each step, whether it was read or not."""
        self._model, self._records, self._until, self._everyone = model, records, until, everyone
        self.trace = Trace(len(records))
        self._read: list[int] = []
        self._passes = 0
        self._gradients: Gradients | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Off again behind it, whatever happens."""
        hooks = [
            self._model.register_forward_pre_hook(self._forward, with_kwargs=True),
            register_optimizer_step_pre_hook(self._step),
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _forward(self, _model: nn.Module, given: tuple[Any, ...], more: dict[str, Any]) -> None:
        if time.monotonic() > self._until:
            raise AuditError("the training takes longer than its budget: give it fewer steps, or raise --minutes")
        ids = more.get("input_ids", given[0] if given else None)
        if not isinstance(ids, Tensor):
            return
        while torch._C._functorch.is_functorch_wrapped_tensor(ids):  # inside vmap or grad of torch.func
            ids = torch._C._functorch.get_unwrapped(ids)
        rows = subject.read(ids.detach().cpu().reshape(-1, ids.shape[-1]))
        self.trace.foreign += rows.count(None)
        known = [row for row in rows if row is not None]
        if torch.is_grad_enabled():
            self._read += known
            self._passes += 1
        else:
            self.trace.evaluated.update(known)

    def _step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        names = {id(value): name for name, value in self._model.named_parameters()}
        held = [value for group in optimizer.param_groups for value in group["params"]]
        mine = [value for value in held if id(value) in names and value.grad is not None]
        if not mine:
            return
        if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
            raise AuditError(
                f"the training runs in {distributed.get_world_size()} processes, of which one is watched: run it in one"
            )
        read, passes = self._read, self._passes
        self._read, self._passes = [], 0
        taken = {names[id(value)]: value.grad.detach().double().flatten() for value in mine if value.grad is not None}
        at = len(self.trace.steps)
        self.trace.overflowed += [(at, name) for name, value in taken.items() if not value.isfinite().all()]
        rate = float(optimizer.param_groups[0]["lr"])
        self.trace.steps.append(self._taken_apart(taken, tuple(read), passes, rate))

    def _taken_apart(self, taken: dict[str, Tensor], read: tuple[int, ...], passes: int, rate: float) -> ReadStep:
        if self._gradients is None:
            self._gradients = Gradients(bare(self._model), self._records)
            ends = np.cumsum([len(part) for part in taken.values()])
            self.trace.shapes = {
                name: (int(end) - len(taken[name]), int(end)) for name, end in zip(taken, ends, strict=True)
            }
        weights = {name: value.detach() for name, value in self._model.named_parameters()}
        wanted = list(range(len(self._records))) if self._everyone else sorted(set(read))
        parts = self._gradients.at(weights, wanted, list(taken)) if wanted else {}
        own = {name: parts[name].double().flatten(1).T if wanted else part.new_zeros(len(part), 0)
               for name, part in taken.items()}  # fmt: skip
        if self.trace.overflowed:  # broken, and the weights with it: what follows is read as far as it is a number
            taken, own = ({name: value.nan_to_num(0.0, 0.0, 0.0) for name, value in held.items()}
                          for held in (taken, own))  # fmt: skip
        noise = {name: _outside(part, own[name]) for name, part in taken.items()}
        least = _SILENT * float(torch.cat(list(taken.values())).abs().max())
        scales = {name: (_scale(left, free, least), free) for name, (left, free, _) in noise.items() if free}
        free = sum(free for _, free in scales.values())
        scale = (sum(one**2 * free for one, free in scales.values()) / free) ** 0.5 if free else 0.0
        whole = torch.cat(list(own.values()))
        reaches, gram, norms = _reaches(torch.cat(list(taken.values())), whole)
        if len(norms) and not norms.any() and not self.trace.overflowed:
            raise AuditError("the gradient of no record can be computed anew: the training replaced the model's layers")
        unit = scale or 1.0
        return ReadStep(
            records=read, passes=passes, rate=rate, scale=scale, scales=scales,
            reaches=reaches / unit, gram=gram, norms=norms, batch_norm=float(whole.sum(1).norm()),
            noise=torch.cat([left for left, _, _ in noise.values()]).numpy(),
            spread=torch.cat([spread for _, _, spread in noise.values()]).numpy(),
        )  # fmt: skip


def bare(model: nn.Module) -> nn.Module:
    """A copy without hooks: Opacus hangs its own on every layer, and ours would count our reading.

    Trainers replace `forward` of the model itself (autocast, TRL's loss in chunks) by one bound to the original.
    """
    made = copy.deepcopy(model)
    made.__dict__.pop("forward", None)
    for module in made.modules():
        for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
            getattr(module, name).clear()
        for name in ("_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs", "_forward_hooks_always_called"):
            getattr(module, name).clear()
    return made.train()


def _outside(part: Tensor, own: Tensor) -> tuple[Tensor, int, Tensor]:
    """part: (d,), own: (d, k) -> what of `part` is outside the span of `own`, its dimensions, and its spread."""
    if not own.shape[1]:
        return part, len(part), torch.ones_like(part)
    values, vectors = torch.linalg.eigh(own.T @ own)  # of the few records, not of the many dimensions
    kept = values > _ROUNDING * values.max().clamp(min=1e-300)
    basis = own @ (vectors[:, kept] / values[kept].sqrt())
    spread = (1 - basis.square().sum(1)).clamp(min=0).sqrt()
    return part - basis @ (basis.T @ part), max(0, len(part) - basis.shape[1]), spread


def _scale(left: Tensor, free: int, least: float) -> float:
    found = float((left @ left / free).sqrt())
    return found if found > least else 0.0


def _reaches(gradient: Tensor, own: Tensor) -> tuple[_Array, _Array, _Array]:
    """gradient: (d,), own: (d, k) -> least squares on the unit gradients, their Gram matrix, norms."""
    norms = own.norm(dim=0)
    units = own / norms.clamp(min=1e-300)
    gram = units.T @ units
    found = torch.linalg.pinv(gram, hermitian=True) @ (units.T @ gradient)
    return found.numpy(), gram.numpy(), norms.numpy()


Train = Callable[..., Any]


def watched(
    train: Train, seed: int, n: int, until: float, embedding: float = 1.0, chosen: Sequence[int] | None = None
) -> tuple[Trace, Any]:
    """One training under the given seed on n of our records -> its trace, and what it returned.

    chosen: of the n it gets these alone, and each step's reaches are those of all n.

    Raises AuditError where it reads none of its records, takes no step that is seen, or lasts too long.
    """
    model, records = subject.model(0, embedding), subject.records(0, n)
    watch = StepWatch(model, records, until, everyone=chosen is not None)
    torch.manual_seed(seed)
    np.random.seed(seed)
    with watch.watching():
        returned = train(model, [dict(records[i]) for i in (range(n) if chosen is None else chosen)])
    trace = watch.trace
    if not any(step.records for step in trace.steps):
        seen = f"{len(trace.steps)} steps of an optimizer, none of them after our model had read one of our records"
        raise AuditError(
            "expected `train` to train the model that it is given, on the records that it is given, by a "
            f"torch.optim optimizer; saw {seen}"
        )
    return trace, returned
