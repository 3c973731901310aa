"""Watch a training from outside: which records the model reads, and the gradient of each step.

The watch uses torch's hooks and does not change the training. It decomposes every privatised
gradient:

    gradient = scale * (sum over the batch's records of (reach * unit gradient) + noise)

A gradient has about 5,000 dimensions, and the records of a batch span only a few. The rest is
noise, so one step gives the noise's size to 1%. A reach is in units of the noise, so later scaling
(by batch size, learning rate or norm) does not change it.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, distributed, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from auditor.core.arrays import Floats
from auditor.core.errors import AuditError
from auditor.crash import training_specimen
from auditor.crash.printed_output import PrintedText
from auditor.crash.time_limit import LONG, training_time_limit_context
from auditor.crash.training_specimen import Record, SpecimenRecordGradients

Tensors = dict[str, Tensor]  # by weight name

_ROUNDING = 1e-9  # relative: below it a direction in double precision is rounding
_SILENT = 1e-5  # of a single-precision gradient: smaller noise is rounding
_TOGETHER = 16  # steps whose records' gradients one query computes


@dataclass(frozen=True)
class ObservedStep:
    """Hold an observed update of the weights, decomposed into records' contributions and noise.

    records: indices of the records read since the previous step, with repeats.
    passes: indices of the records in each forward pass.
    rate: the learning rate.
    scale: standard deviation of each element of the noise; 0 if there is only rounding.
    scales: (standard deviation, degrees of freedom) of the noise in each tensor, keyed by tensor.
    reaches: (records,) lengths of the contributions, over `scale`.
    gram: (records, records) Gram matrix of the records' unit gradients.
    norms: (records,) norms of the records' gradients before clipping.
    noise: (d,) the part of the gradient outside the span of the records' gradients.
    spread: (d,) standard deviation of each element of `noise`, over `scale`. It is at most 1,
        because the span was removed.
    tensor_ranges: (begin, end) of each tensor's elements in `noise`, keyed by tensor.
    foreign: number of rows that the model read and that are no record.
    tensor_grams: (tensors, records, records) inner products of the records' gradients.
    tensor_products: (tensors, records) their inner products with the released gradient, over
        `scale`.
    """

    records: tuple[int, ...]
    passes: tuple[tuple[int, ...], ...]
    rate: float
    scale: float
    scales: dict[str, tuple[float, int]]
    reaches: Floats
    gram: Floats
    norms: Floats
    noise: Floats
    spread: Floats
    tensor_ranges: dict[str, tuple[int, int]] = field(default_factory=dict)
    foreign: int = 0
    # (tensors, records, records) inner products of the gradients, and (tensors, records) theirs
    # with the released gradient over `scale`. Tensors are in the order of `tensor_ranges`. These
    # are the input of whitening and groups.
    tensor_grams: Floats = field(default_factory=lambda: np.zeros((0, 0, 0)))
    tensor_products: Floats = field(default_factory=lambda: np.zeros((0, 0)))

    @property
    def distinct_records(self) -> list[int]:
        """The distinct records read since the previous step, in ascending order."""
        return sorted(set(self.records))


@dataclass(frozen=True)
class _TakenStep:
    """Hold a step that is not decomposed yet.

    weights: those before the step, keyed by tensor.
    """

    records: tuple[int, ...]
    passes: tuple[tuple[int, ...], ...]
    rate: float
    foreign: int
    weights: Tensors


@dataclass
class TrainingTrace:
    """Hold the observations of one training.

    n: number of records; steps: its updates of the weights.
    evaluated: records read without a gradient.
    elsewhere: index of the first step whose initial weights are not those after the previous step;
        None if there is none.
    returned: the step whose weights were returned; None if no step ended with these weights.
    overflowed: each (step, tensor) with numbers that are not finite.
    released: each step's gradients, keyed by tensor; state: the final weights and buffers.
    printed: printed text.
    batch_effect: relative change of a record's logits if the rest of its batch changes.
    """

    n: int
    steps: list[ObservedStep] = field(default_factory=list)
    evaluated: set[int] = field(default_factory=set)
    elsewhere: int | None = None
    returned: int | None = None
    overflowed: list[tuple[int, str]] = field(default_factory=list)
    released: list[Tensors] = field(default_factory=list)
    state: Tensors = field(default_factory=dict)
    printed: PrintedText = field(default_factory=PrintedText)
    batch_effect: float | None = None

    @property
    def measured_steps(self) -> list[ObservedStep]:
        """The steps that read records and have noise, which is the unit of contributions."""
        return [step for step in self.steps if step.scale and step.records]


class StepWatch:
    """Watch a training and decompose its every step.

    Raise AuditError if the training exceeds its time limit.
    """

    def __init__(
        self,
        model: nn.Module,
        records: list[Record],
        until: float,
        everyone: bool = False,
        most: int | None = None,
        replayed: Sequence[Tensors] = (),
    ) -> None:
        """Create a watch of a training.

        until: time limit; most: maximum number of steps. everyone: whether to measure the
        contributions of all records, including those not read. replayed: gradients that the
        optimizer receives instead of the real gradients; the real gradients are still observed.
        """
        self._model = model
        self._records = records
        self._until = until
        self._everyone = everyone
        self._most = most
        self._replayed = replayed
        # token ids of several rows, and their logits
        self._together: tuple[Tensor, Tensor] | None = None
        self.trace = TrainingTrace(len(records))
        self._read: list[int] = []
        self._passes: list[tuple[int, ...]] = []
        self._foreign = 0
        # the optimizer whose step has begun and not ended
        self._stepping: torch.optim.Optimizer | None = None
        self._after: list[Tensor] = []  # the weights, (d,), after each step
        self._parameters = list(model.parameters())
        self._gradients: SpecimenRecordGradients | None = None
        self._taken: list[_TakenStep] = []

    @contextmanager
    def install_hooks_temporarily(self) -> Iterator[None]:
        """Watch the code inside the context, and always remove the hooks at its end."""
        _let_hooks_see_base_steps()
        hooks = [
            self._model.register_forward_hook(self._record_forward_pass, with_kwargs=True),
            # torch calls these for every optimizer of the process, including other models'
            register_optimizer_step_pre_hook(self._record_optimizer_step),
            register_optimizer_step_post_hook(self._record_weights_after_step),
        ]
        try:
            with self.trace.printed.capture_printed_text_context():
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def _record_forward_pass(
        self, _model: nn.Module, arguments: tuple[Any, ...], more: dict[str, Any], output: Any
    ) -> None:
        """Record which records the model read.

        Also keep a batch's logits, to measure whether they depend on the rest of the batch.
        """
        # if nothing can set an alarm: see `training_time_limit_context`
        if time.monotonic() > self._until:
            raise AuditError(LONG)
        ids = more.get("input_ids", arguments[0] if arguments else None)
        if not isinstance(ids, Tensor):
            return
        functorch = torch._C._functorch
        logits = getattr(output, "logits", None)
        if (
            self.trace.batch_effect is None
            and isinstance(logits, Tensor)
            and not functorch.is_functorch_wrapped_tensor(logits)
            and ids.shape == logits.shape[:2]
            and len(ids) > 1
        ):
            self._together = ids.detach().cpu(), logits.detach().cpu()
        while functorch.is_functorch_wrapped_tensor(ids):  # inside vmap or grad of torch.func
            ids = functorch.get_unwrapped(ids)
        batch = ids.detach().cpu().reshape(-1, ids.shape[-1])
        rows = training_specimen.find_row_records(batch)
        known = [row for row in rows if row is not None]
        if torch.is_grad_enabled():
            self.trace.printed.before_step = True
            self._read += known
            # A row of padding has no token with a loss: it fills an empty batch.
            self._foreign += sum(
                row is None and bool((tokens != training_specimen.PAD).any())
                for row, tokens in zip(rows, batch, strict=True)
            )
            self._passes.append(tuple(known))
        else:
            self.trace.evaluated.update(known)

    def _measure_logit_change(self, weights: Tensors, twin: nn.Module) -> float | None:
        """Return how much a record's logits change with its batch, relative to the logits' size."""
        if self._together is None:
            return None
        changes = []
        for row, logits in [*zip(*self._together, strict=True)][:4]:
            (record,) = training_specimen.find_row_records(row.unsqueeze(0))
            if record is None or record >= len(self._records):
                continue
            tokens = torch.tensor(self._records[record]["input_ids"])
            # Left padding, or a prepended first token, shifts the record in its row.
            begins = int((row == tokens[0]).nonzero()[0])
            with torch.no_grad():
                single = functional_call(
                    twin, weights, (), {"input_ids": tokens.unsqueeze(0), "use_cache": False}
                ).logits
            joint = logits[begins : begins + len(tokens)].float()
            single = single[0, : len(joint)].float()
            # Subtract the mean: a constant in all logits changes no probability, but would count as
            # size.
            changes.append(float((joint - single).norm() / (single - single.mean()).norm()))
        return max(changes, default=None)

    def _list_model_gradients(self, optimizer: torch.optim.Optimizer) -> Tensors:
        """Return the optimizer's gradients of the model's weights, keyed by weight name."""
        names = {id(value): name for name, value in self._model.named_parameters()}
        gradients = {}
        for group in optimizer.param_groups:
            for value in group["params"]:
                if id(value) in names and value.grad is not None:
                    gradients[names[id(value)]] = value.grad
        return gradients

    def _record_optimizer_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Record a step, and the gradients that it uses, before the optimizer takes it."""
        gradients = self._list_model_gradients(optimizer)
        if not gradients:
            return
        _refuse_several_processes()
        if self._stepping is optimizer:
            self._take_back_outer_step()
        self._stepping = optimizer
        index = len(self.trace.released)
        # A query is for one set of tensors: a training that unfreezes a layer trains more tensors
        # later.
        if len(self._taken) == _TOGETHER or (
            self._taken and list(self.trace.released[-1]) != list(gradients)
        ):
            self.decompose_taken_steps()
        if self._gradients is None:
            self._gradients = SpecimenRecordGradients(
                copy_watched_model_without_hooks(self._model), self._records
            )
        # The step is not taken yet: its gradients belong to the model's present weights.
        weights = _copy_tensors(self._model.named_parameters())
        if self.trace.batch_effect is None:
            self.trace.batch_effect = self._measure_logit_change(weights, self._gradients.twin)
        rate = float(optimizer.param_groups[0]["lr"])
        self._taken.append(
            _TakenStep(tuple(self._read), tuple(self._passes), rate, self._foreign, weights)
        )
        self._read = []
        self._passes = []
        self._foreign = 0
        for name, value in gradients.items():
            if not value.detach().isfinite().all():
                self.trace.overflowed.append((index, name))
        if (
            self._after
            and self.trace.elsewhere is None
            and not torch.equal(self._flatten_weights(), self._after[-1])
        ):
            self.trace.elsewhere = index
        self.trace.printed.before_step = False
        # Copy before a replayed gradient overwrites it.
        self.trace.released.append(_copy_tensors(gradients.items()))
        for name, value in self._replayed[index].items() if index < len(self._replayed) else ():
            if name in gradients:
                # in place: the optimizer reads this tensor after the hook
                gradients[name].copy_(value)

    def _take_back_outer_step(self) -> None:
        """Discard the outer step of an optimizer that calls its base class's step.

        A subclass may clip and add noise before it calls its base class, so only the inner step
        counts.
        """
        outer = self._taken.pop()
        self.trace.released.pop()
        while self.trace.overflowed and self.trace.overflowed[-1][0] == len(self.trace.released):
            self.trace.overflowed.pop()
        self._read = [*outer.records, *self._read]
        self._passes = [*outer.passes, *self._passes]
        self._foreign += outer.foreign

    def _record_weights_after_step(self, _optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Record the weights after a step; end the training after the last step to watch."""
        self._stepping = None
        if len(self._after) < len(self.trace.released):
            self._after.append(self._flatten_weights())
        elif self._after:  # an optimizer that calls another: the outer step ends later
            self._after[-1] = self._flatten_weights()
        if len(self.trace.released) == self._most:
            raise _EnoughSteps

    def _flatten_weights(self) -> Tensor:
        return torch.cat([value.detach().flatten() for value in self._parameters])

    def find_final_step(self) -> None:
        """Store the returned weights, and find the last step that ended with these weights."""
        self.trace.state = _copy_tensors(self._model.state_dict().items())
        now = self._flatten_weights()
        for at, weights in enumerate(self._after):
            if torch.equal(weights, now):
                self.trace.returned = at

    def decompose_taken_steps(self) -> None:
        """Decompose the gradients of all steps since the last call.

        The gradients of all records in these steps are computed at once, each with its step's
        weights.
        """
        if not self._taken or self._gradients is None:
            return
        indices = list[int]()
        counts = list[int]()
        for step in self._taken:
            measured = sorted(set(step.records))
            if self._everyone:
                measured = list(range(len(self._records)))
            indices += measured
            counts.append(len(measured))
        released = self.trace.released[-1]
        gradients = torch.zeros(0, sum(value.numel() for value in released.values()))
        if indices:
            weights = Tensors()
            for name in self._taken[0].weights:
                values = torch.stack([step.weights[name] for step in self._taken])
                weights[name] = values.repeat_interleave(torch.tensor(counts), 0)
            parts = self._gradients.record_gradients_at_weights(weights, indices, list(released))
            # (records, d), columns in the order of `released`
            gradients = torch.cat([parts[name].flatten(1) for name in released], dim=1)
        parts_of_steps = gradients.double().split(counts)
        for step, part in zip(self._taken, parts_of_steps, strict=True):
            self.trace.steps.append(self._decompose_step(step, part.T))
        self._taken = []

    def _decompose_step(self, step: _TakenStep, gradients: Tensor) -> ObservedStep:
        """Decompose a step into contributions and noise; gradients: (d, records)."""
        index = len(self.trace.steps)
        gradients_taken = self.trace.released[index]
        released = torch.cat([value.double().flatten() for value in gradients_taken.values()])
        sizes = [value.numel() for value in gradients_taken.values()]
        ends = itertools.accumulate(sizes, initial=0)
        tensor_ranges = dict(zip(gradients_taken, itertools.pairwise(ends), strict=True))
        is_overflowed = bool(self.trace.overflowed) and self.trace.overflowed[0][0] <= index
        # The training is broken, and so are its weights: use finite numbers in place of later
        # values.
        if is_overflowed:
            released = released.nan_to_num(0.0, 0.0, 0.0)
            gradients = gradients.nan_to_num(0.0, 0.0, 0.0)
        residual, free, spread = _project_out_record_gradients(released, gradients, sizes)
        scales = _measure_noise_scales(gradients_taken, released, residual.split(sizes), free)
        # Pool over tensors: variances weighted by their degrees of freedom.
        total = sum(size**2 * dimensions for size, dimensions in scales.values())
        scale = (total / max(1, sum(free))) ** 0.5
        unit = scale or 1.0
        grams_by_tensor = []
        products_by_tensor = []
        for part, value in zip(gradients.split(sizes), released.split(sizes), strict=True):
            grams_by_tensor.append(part.T @ part)
            products_by_tensor.append(part.T @ value / unit)
        grams = torch.stack(grams_by_tensor)
        products = torch.stack(products_by_tensor)
        reaches, gram, norms = fit_gradient_reaches(grams.sum(0).numpy(), products.sum(0).numpy())
        if len(norms) and not norms.any() and not is_overflowed:
            raise AuditError(
                "no record's gradient can be recomputed: the training replaced the model's layers"
            )
        return ObservedStep(
            records=step.records,
            passes=step.passes,
            rate=step.rate,
            scale=scale,
            scales=scales,
            reaches=reaches,
            gram=gram,
            norms=norms,
            noise=residual.numpy(),
            spread=spread.numpy(),
            tensor_ranges=tensor_ranges,
            foreign=step.foreign,
            tensor_grams=grams.numpy(),
            tensor_products=products.numpy(),
        )


def _measure_noise_scales(
    names: Iterable[str], released: Tensor, residuals: Iterable[Tensor], free: Iterable[int]
) -> dict[str, tuple[float, int]]:
    """Return each tensor's noise deviation and degrees of freedom, keyed by name.

    The deviation is 0 if there is only rounding. released: (d,) the step's gradient; residuals: its
    part outside the span of the records' gradients, for each tensor; free: the degrees of freedom
    of each part.
    """
    least = _SILENT * float(released.abs().max())
    scales = {}
    for name, values, dimensions in zip(names, residuals, free, strict=True):
        if dimensions:
            size = float((values @ values / dimensions).sqrt())
            scales[name] = (size if size > least else 0.0, dimensions)
    return scales


def _refuse_several_processes() -> None:
    if (
        distributed.is_available()
        and distributed.is_initialized()
        and (processes := distributed.get_world_size()) > 1
    ):
        raise AuditError(
            f"the training runs in {processes} processes, of which one is watched: run it in one"
        )


def _copy_tensors(named_tensors: Iterable[tuple[str, Tensor]]) -> Tensors:
    return {name: value.detach().clone() for name, value in named_tensors}


def _let_hooks_see_base_steps() -> None:
    """Make step hooks also run when an optimizer's subclass calls the base class's step.

    The subclass may add noise before this call, so the base class's step has the noisy gradient.
    """
    kinds: list[Any] = [kind for kind in vars(torch.optim).values() if isinstance(kind, type)]
    for kind in kinds:
        if "step" in vars(kind) and not hasattr(kind.step, "hooked"):
            kind.step = torch.optim.Optimizer.profile_hook_step(kind.step)
            kind.step.hooked = True


def copy_watched_model_without_hooks(model: nn.Module) -> nn.Module:
    """Copy a watched model without its hooks.

    Opacus hooks every layer, and our own hooks would count our reads. The copy also drops a
    replaced `forward` (autocast, TRL's chunked loss), which would still run the original model.
    Batch norms use running statistics, because batch statistics mix the records' gradients.
    """
    twin = copy.deepcopy(model)
    twin.__dict__.pop("forward", None)
    twin.train()
    for module in twin.modules():
        for name in (
            "_forward_hooks",
            "_forward_pre_hooks",
            "_backward_hooks",
            "_backward_pre_hooks",
            "_forward_hooks_with_kwargs",
            "_forward_pre_hooks_with_kwargs",
            "_forward_hooks_always_called",
        ):
            getattr(module, name).clear()
        if isinstance(module, _BatchNorm):
            module.eval()
    return twin


def _project_out_record_gradients(
    released: Tensor, gradients: Tensor, sizes: list[int]
) -> tuple[Tensor, list[int], Tensor]:
    """Remove the records' gradients from the released gradient, tensor by tensor.

    released: (d,); gradients: (d, k); sizes: (tensors,) number of elements, with sum d.

    Returns:
        The part of the released gradient outside the span of the records' gradients, (d,).
        The degrees of freedom of this part, one for each tensor.
        The standard deviation of each of its elements, (d,), as a fraction of that of the full
            noise.
    """
    if not gradients.shape[1]:
        return released, list(sizes), torch.ones_like(released)
    parts = gradients.split(sizes)
    # Use the (k, k) Gram matrices, since k records are few: `part @ turn` below is an orthonormal
    # basis of their span.
    values, vectors = torch.linalg.eigh(torch.stack([part.T @ part for part in parts]))
    is_used = values > _ROUNDING * values[:, -1:].clamp(min=1e-300)
    turned = vectors * torch.where(is_used, values.clamp(min=1e-300).rsqrt(), 0.0).unsqueeze(1)
    bases = []
    inside = []
    for part, turn, value in zip(parts, turned, released.split(sizes), strict=True):
        basis = part @ turn
        bases.append(basis)
        inside.append(basis @ (basis.T @ value))
    free = (torch.tensor(sizes) - is_used.sum(1)).clamp(min=0).tolist()
    # Outside the span an element keeps 1 - |its row of the basis|^2 of its variance: the
    # projection's diagonal.
    spread = (1 - torch.cat(bases).square().sum(1)).clamp(min=0).sqrt()
    return released - torch.cat(inside), free, spread


def fit_gradient_reaches(inner_products: Floats, products: Floats) -> tuple[Floats, Floats, Floats]:
    """Fit a gradient as a sum of multiples of unit gradients, by least squares.

    inner_products: (..., records, records) of the records' gradients; products: (..., records),
    their inner products with the fitted gradient. Return the multiples (reaches), the Gram matrix
    of the unit gradients, and the norms.
    """
    norms = np.sqrt(np.diagonal(inner_products, axis1=-2, axis2=-1))
    # a gradient of 0, as of LoRA's first matrix initially, stays 0
    lengths = np.where(norms > 0, norms, 1.0)
    gram = inner_products / (lengths[..., :, None] * lengths[..., None, :])
    # pinv, since records of one text may have the same gradient.
    inverse = np.linalg.pinv(gram, hermitian=True)
    return (inverse @ (products / lengths)[..., None])[..., 0], gram, norms


Train = Callable[..., Any]


def run_watched_training(
    train: Train,
    seed: int,
    n: int = training_specimen.RECORDS,
    until: float = math.inf,
    training: int = 0,
    chosen: Sequence[int] | None = None,
    most: int | None = None,
    replayed: Sequence[Tensors] = (),
    other_last: bool = False,
    specimen: training_specimen.Specimen | None = None,
    empty_draws: bool = False,
) -> tuple[TrainingTrace, Any]:
    """Run one training on n records with a seed; return its trace and its return value.

    training: index that selects the model and the records.
    chosen: the records that the training gets; contributions are still measured for all n.
    most: number of steps after which to end the training; its return value is then None.
    replayed: see `StepWatch`.
    other_last: whether to reorder the last record's words.
    specimen: the model and records to use instead of those that `training` selects.
    empty_draws: whether to use `empty_draws_context`.

    Raise AuditError if the training takes no observed step, returns a different model, or exceeds
    its time limit `until`. End all processes that the training left running.
    """
    specimen = specimen or training_specimen.build_training_specimen(training)
    model = specimen.build_crash_test_model()
    records = specimen.make_crash_test_records(n)
    if other_last:
        name, *words = records[-1]["input_ids"]
        records[-1] = {"input_ids": [name, *reversed(words)]}
    watch = StepWatch(
        model, records, until, everyone=chosen is not None, most=most, replayed=replayed
    )
    _seed_all_generators(seed)
    # Shallow copies: keys that a training adds to its records stay in the copies.
    inputs = [dict(records[i]) for i in (range(n) if chosen is None else chosen)]
    returned = None
    draws = training_specimen.empty_draws_context(n) if empty_draws else contextlib.nullcontext()
    watched = watch.install_hooks_temporarily()
    with watched, training_time_limit_context(until), contextlib.suppress(_EnoughSteps), draws:
        returned = train(model, inputs)
    watch.decompose_taken_steps()
    watch.find_final_step()
    if not watch.trace.steps:
        require_read_records(watch.trace)
    _require_given_model(model, returned)
    return watch.trace, returned


def _seed_all_generators(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)  # numpy takes at most 32 bits
    random.seed(seed)


def require_read_records(trace: TrainingTrace) -> None:
    """Raise AuditError if no step of the training read one of its records.

    Of an honest training, all batches may be empty, but not of every seed.
    """
    if not any(step.records for step in trace.steps):
        observed = (
            f"{len(trace.steps)} steps of an optimizer, none of them after our model had read one "
            "of our records"
        )
        raise AuditError(
            "expected `train` to train the model that it is given, on the records that it is "
            f"given, by a torch.optim optimizer; saw {observed}"
        )


def _require_given_model(model: nn.Module, returned: Any) -> None:
    result = returned
    if isinstance(returned, tuple) and returned:
        result = returned[0]
    if isinstance(result, nn.Module) and not set(map(id, result.parameters())) & set(
        map(id, model.parameters())
    ):
        raise AuditError(
            "expected `train` to return the model that it is given, trained; it returned another "
            "one"
        )


class _EnoughSteps(BaseException):
    """End a training after enough steps; `except Exception` does not catch this exception."""
