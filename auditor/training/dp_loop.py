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
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from opacus.grad_sample import GradSampleModule
from opacus.grad_sample.embedding import compute_embedding_grad_sample
from opacus.grad_sample.functorch import ft_compute_per_sample_gradient
from opacus.grad_sample.utils import register_grad_sampler
from opacus.optimizers import DPOptimizer
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers.pytorch_utils import Conv1D

from auditor.core.errors import AuditError
from auditor.core.nouns import Tokens
from auditor.core.streams import generator
from auditor.plugins.trainer import Checkpoint
from auditor.training import clipping, masks
from auditor.training.finetune import require_finite, trained_parameters
from auditor.training.gradient_canaries import NOTHING_PLANTED, Assumed, CanaryWatch, NoiseScale, Planted
from auditor.training.noise import NoiseStream, add_noise

Progress = Callable[[int, float], None]  # (steps done, mean loss of the last batch, nats a token)


@dataclass(frozen=True)
class PoissonSampler:
    """Each of `size` units is in each step's batch with probability `rate`, independently: what the accounting is of.

    A batch is a function of (key, step), so that a resumed training draws the batches it would have drawn.
    """

    size: int
    rate: float
    key: str

    def batch(self, step: int) -> NDArray[np.int64]:
        """The units of this step, possibly none."""
        return np.flatnonzero(generator("batch", self.key, step).random(self.size) < self.rate)


@dataclass(frozen=True)
class Recipe:
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
        factors = clipping.factors(clipping.norms(self.grad_samples), self.max_grad_norm * shares.double())
        for p in self.params:
            sample = self._get_flat_grad_sample(p)
            p.summed_grad = clipping.add_clipped(p.summed_grad, sample, factors, self.max_grad_norm)
            p.grad_sample = None
        return factors

    def finish(self) -> None:
        """Noise on the sums, the mean over the expected batch, one step. An empty batch is a step of noise alone."""
        for p in self.params:
            if p.summed_grad is None:
                p.summed_grad = torch.zeros_like(p, dtype=torch.float64, device=clipping.where_float64(p.device))
        self.add_noise()
        for p in self.params:
            p.grad /= self.expected_batch_size
        self.original_optimizer.step()
        self.zero_grad(set_to_none=True)

    def add_noise(self) -> None:
        """Noise of our own stream, scaled for this batch: Opacus's can be guessed (`auditor/training/noise.py`)."""
        deviation = 0.0
        if self.noise_multiplier:
            deviation = self.noise_scale * self.noise_multiplier * self.max_grad_norm * (1 + clipping.ROUNDING)
        for p in self.params:
            p.grad = add_noise(p.summed_grad, deviation, self.stream).to(p).view_as(p)


def fit_privately(
    model: Any,
    examples: Sequence[Tokens],
    sampler: PoissonSampler,
    recipe: Recipe,
    *,
    pad: int,
    shares: Sequence[float] | None = None,
    noise_scale: NoiseScale | None = None,
    canaries: Planted = NOTHING_PLANTED,
    progress: Progress = lambda done, loss: None,
    checkpoint: Checkpoint | None = None,
    seconds_between: float = 60.0,
) -> PrivateModel:
    """Trains the parameters that require gradients, in place, from the checkpoint on; each example is a privacy unit.

    shares: for each example the fraction of the clipping norm, in (0, 1], that its gradient is clipped to.
    noise_scale: maps the units of a batch to the factor on its noise. canaries: extra units, sampled like the examples
    and numbered after them; a canary that was not included (by its coin) contributes to no batch.
    Raises AuditError for batches that are not Poisson or too large to be summed exactly, frozen models, and layers
    without per-sample gradients.
    """
    _require_poisson(sampler, len(examples), canaries.count)
    parameters = trained_parameters(model)
    before = _digest(parameters)
    assumed = Assumed(recipe.noise_multiplier, recipe.clip, sampler.rate)
    watch = CanaryWatch(canaries, list(parameters.values()), len(examples), assumed)
    clipping.check_clipping(list(parameters.values()), recipe.clip, sampler.size * sampler.rate)
    trained = PrivateModel(0, False, watch=watch)
    own = torch.ones(len(examples)) if shares is None else torch.tensor(shares)
    own = torch.cat([own, torch.ones(canaries.count)])
    scale = noise_scale and (lambda units: noise_scale(units) if len(units) else 1.0)
    with _private(model, recipe, examples, pad) as wrapped:
        optimizer = _optimizer(list(parameters.values()), recipe)
        if checkpoint is not None and (state := checkpoint.load()) is not None:
            _restore(state, sampler, parameters, optimizer, trained)
        elif checkpoint is not None:
            checkpoint.save(_state(sampler, parameters, optimizer, trained))  # the key, before it is used
        saved = time.monotonic()
        while trained.steps < recipe.steps:
            units = watch.present(sampler.batch(trained.steps))
            optimizer.noise_scale = 1.0 if scale is None else scale(units)
            optimizer.stream = NoiseStream(sampler.key, trained.steps)
            loss = _accumulate(wrapped, optimizer, units.tolist(), examples, own, recipe, pad, watch)
            with _watched(optimizer, watch, units, scale):
                optimizer.finish()
            require_finite(parameters.values(), checkpoint)
            trained.steps += 1
            trained.noise_scales.append(optimizer.noise_scale)
            if checkpoint is not None and time.monotonic() - saved >= seconds_between:
                checkpoint.save(_state(sampler, parameters, optimizer, trained))
                saved = time.monotonic()
            progress(trained.steps, loss)
    trained.moved = _digest(parameters) != before
    return trained


def _require_poisson(sampler: Any, examples: int, canaries: int) -> None:
    if not isinstance(sampler, PoissonSampler):
        raise AuditError(
            f"expected Poisson batches, got {type(sampler).__name__}: epsilon is accounted for Poisson sampling, and "
            "says nothing of a shuffled or any other loader"
        )
    if sampler.size != examples + canaries:
        beside = f" and {canaries} gradient canaries" if canaries else ""
        raise AuditError(f"expected a sampler of the {examples} examples{beside}, got one of {sampler.size}")


def _optimizer(parameters: list[nn.Parameter], recipe: Recipe) -> ScaledOptimizer:
    kind: Any = torch.optim.Adam if recipe.optimizer == "adam" else torch.optim.SGD
    return ScaledOptimizer(
        kind(parameters, lr=recipe.learning_rate),
        noise_multiplier=recipe.noise_multiplier,
        max_grad_norm=recipe.clip,
        expected_batch_size=recipe.expected_batch,
        loss_reduction="sum",
    )


# --- one batch --------------------------------------------------------------------------------------------------------


def _watched(
    optimizer: ScaledOptimizer, watch: CanaryWatch, units: NDArray[np.int64], scale: NoiseScale | None
) -> RemovableHandle:
    """Whatever the inner optimizer is given is what is released: of this the canaries are read, not of our own sums."""
    inner, expected = optimizer.original_optimizer, optimizer.expected_batch_size
    return inner.register_step_pre_hook(lambda *_: watch.see(expected, units, scale))


def _accumulate(
    wrapped: Any,
    optimizer: ScaledOptimizer,
    units: Sequence[int],
    examples: Sequence[Tokens],
    shares: Tensor,
    recipe: Recipe,
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
        own = shares[records + canaries].to(device)
        losses = torch.zeros(0, device=device)
        if records:
            losses = record_losses(wrapped, *padded([examples[i] for i in records], pad, device))
            losses.sum().backward()
        numbers = [i - len(examples) for i in canaries]
        if isinstance(wrapped, OneByOne):
            for i in range(len(records)):
                wrapped.compute(i)
                _add_samples(optimizer, 1, own[i : i + 1], watch, [])
            for i, number in enumerate(numbers, len(records)):
                _add_samples(optimizer, 0, own[i : i + 1], watch, [number])
            wrapped.forget()
        else:
            _add_samples(optimizer, len(losses), own, watch, numbers)
        total += float(losses.detach().sum())
    drawn = sum(i < len(examples) for i in units)
    return total / drawn if drawn else float("nan")


def _add_samples(
    optimizer: ScaledOptimizer, records: int, shares: Tensor, watch: CanaryWatch, canaries: Sequence[int]
) -> None:
    """Clips and adds the per-sample gradients that a backward pass left, and those of the canaries behind them."""
    watch.extend_samples(canaries)
    seen = watch.know_samples(records)
    watch.know(optimizer.clip_and_add(shares)[:records].double().cpu() @ seen)


def padded(batch: Sequence[Tokens], pad: int, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """(b, n) token ids and labels. Padding stands behind what causal attention sees, so it needs no mask."""
    width = max(map(len, batch))
    rows = torch.tensor([[*ids, *[pad] * (width - len(ids))] for ids in batch], device=device)
    lengths = torch.tensor([len(ids) for ids in batch], device=device)
    labels = masks.labels(rows).masked_fill(torch.arange(width, device=device) >= lengths.unsqueeze(1), masks.IGNORED)
    return masks.read(rows), labels


def record_losses(model: Any, tokens: Tensor, labels: Tensor) -> Tensor:
    """(b,) mean nll in nats of each sequence's tokens that have a loss, its first one given; 0 where none has."""
    # Position ids of full batch size: GPT-2's own are (1, n), and their embedding would have no per-sample gradient.
    positions = torch.arange(tokens.shape[1], device=tokens.device).repeat(len(tokens), 1)
    logits = model(input_ids=tokens, position_ids=positions, use_cache=False).logits[:, :-1].float()
    wanted = labels[:, 1:]
    nll = nn.functional.cross_entropy(logits.transpose(1, 2), wanted, ignore_index=masks.IGNORED, reduction="none")
    return nll.sum(1) / (wanted != masks.IGNORED).sum(1).clamp(min=1)


# --- the model under Opacus -------------------------------------------------------------------------------------------


@register_grad_sampler(Conv1D)
def _conv1d_samples(layer: Conv1D, activations: list[Tensor], backprops: Tensor) -> dict[nn.Parameter, Tensor]:
    """GPT-2's linear layer: its weight is (in, out), else as Opacus's own for nn.Linear."""
    inputs = activations[0].to(backprops.dtype)
    samples: dict[nn.Parameter, Tensor] = {}
    if layer.weight.requires_grad:
        samples[layer.weight] = torch.einsum("n...i,n...j->nij", inputs, backprops)
    if layer.bias.requires_grad:
        samples[layer.bias] = torch.einsum("n...k->nk", backprops)
    return samples


@register_grad_sampler(nn.Embedding)
def _embedding_samples(layer: nn.Embedding, activations: list[Tensor], backprops: Tensor) -> dict[nn.Parameter, Tensor]:
    """Opacus's, of what reaches the rows: torch gives that of `padding_idx` (often end of text) no gradient."""
    reaching = _reaching_rows(layer, activations[0], backprops)
    samples: dict[nn.Parameter, Tensor] = compute_embedding_grad_sample(layer, activations, reaching)
    return samples


def _reaching_rows(layer: nn.Embedding, ids: Tensor, backprops: Tensor) -> Tensor:
    """The gradient at the rows, of that at the output, which Gemma's embedding scales by a constant."""
    backprops = backprops * getattr(layer, "embed_scale", 1.0)
    if layer.padding_idx is None:
        return backprops
    return backprops.masked_fill((ids == layer.padding_idx).unsqueeze(-1), 0)


def _know_embeddings(model: nn.Module) -> None:
    """Embeddings of other classes by the same rule: `check_gradients` sees whether it is theirs."""
    for kind in {type(module) for module in model.modules() if isinstance(module, nn.Embedding)}:
        if kind not in GradSampleModule.GRAD_SAMPLERS:
            register_grad_sampler(kind)(_embedding_samples)


@contextmanager
def _private(model: Any, recipe: Recipe, examples: Sequence[Tokens], pad: int) -> Iterator[Any]:
    """The model with Opacus's hooks, which are taken off again. Its per-sample gradients are checked first.

    Dropout is switched off: the noise regularises enough, and a gradient is then a function of its record.
    """
    _no_dropout(model)
    pairs = pairs_to_check(examples)
    check_buffers(model.train(), pairs, pad)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Full backward hook is firing", category=UserWarning)
        wrapped = wrap(model, recipe.ghost)
        try:
            for pair in pairs:
                check_gradients(wrapped, pair, pad)
            yield wrapped
        finally:
            wrapped.cleanup()


class OneByOne(GradSampleModule):
    """Keeps what each layer read and what came back, of which it computes the gradient of one record at a time."""

    def __init__(self, model: Any, **more: Any) -> None:
        super().__init__(model, **more)
        self._kept: list[tuple[nn.Module, list[Tensor], Tensor]] = []

    def capture_backprops_hook(
        self, module: Any, _forward_input: Any, forward_output: Any, loss_reduction: str, batch_first: bool
    ) -> None:
        if not self.hooks_enabled:
            return
        back = forward_output[0].detach()
        how: dict[str, Any] = {"loss_reduction": loss_reduction, "batch_first": batch_first}
        self._kept.append((module, *self.rearrange_grad_samples(module=module, backprops=back, **how)))
        if not module.activations:
            del module.max_batch_len

    def compute(self, i: int) -> None:
        """Leaves the gradient of record i in `grad_sample` of the parameters, (1, ...) each; of its uses the sum."""
        for p in self.parameters():
            p.grad_sample = None
        for module, activations, backprops in self._kept:
            rule = self.GRAD_SAMPLERS.get(type(module), ft_compute_per_sample_gradient)
            own = [part[i : i + 1] for part in activations]
            for p, gradient in rule(module, own, backprops[i : i + 1]).items():
                p.grad_sample = gradient if p.grad_sample is None else p.grad_sample + gradient

    def forget(self) -> None:
        """What was kept of the last backward pass."""
        self._kept.clear()


def wrap(model: Any, ghost: bool) -> Any:
    """Opacus's module around the model: sums of losses, per-sample gradients. Raises AuditError."""
    _know_embeddings(model)
    kind: Any = OneByOne if ghost else GradSampleModule
    try:  # not strict: it would refuse every layer with a buffer, constants too; see `check_buffers`
        return kind(model.train(), loss_reduction="sum", strict=False)
    except NotImplementedError as error:
        raise _cannot(model, str(error).splitlines()[0]) from None


def _no_dropout(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in list(vars(module).items()):
            if "dropout" in name and isinstance(value, float):
                setattr(module, name, 0.0)


def pairs_to_check(examples: Sequence[Tokens]) -> list[list[Tokens]]:
    """What a record's gradient is tried beside: the shortest of each octave of lengths with the longest of all.

    A model may change with the length of its batch (rotary embeddings past their original length), so that a short
    record's gradient depends on who stands beside it. The last pair is of the two longest.
    """
    ordered = sorted(examples, key=len)
    shortest = {len(example).bit_length(): example for example in reversed(ordered)}
    return [*([example, ordered[-1]] for _, example in sorted(shortest.items())), ordered[-2:]]


@torch.no_grad()
def check_buffers(model: nn.Module, pairs: Sequence[Sequence[Tokens]], pad: int) -> None:
    """Refuses a model that remembers what it has read: its buffers would tell of records, without any noise.

    Constants, which no forward pass changes, are buffers too. Raises AuditError with the name of the layer.
    """
    device = next(model.parameters()).device
    before: dict[str, Tensor] = {}
    for example in (pairs[0][0], pairs[-1][-1]):
        try:
            record_losses(model, *padded([example], pad, device))
        except (RuntimeError, ValueError, TypeError):
            return  # `check_gradients` says why
        now = {name: buffer.clone() for name, buffer in model.named_buffers()}
        for name in before:
            if not torch.equal(before[name], now[name]):
                layer, _, _ = name.rpartition(".")
                kind = type(model.get_submodule(layer)).__name__
                why = f"{layer} ({kind}) keeps statistics of what it reads or of how long it is, which mix records"
                raise _cannot(model, why)
        before = now


def check_gradients(wrapped: Any, examples: Sequence[Tokens], pad: int) -> None:
    """Holds Opacus's per-sample gradients against backward passes of one example each.

    Single ones go first, lest the others leave a trace. Raises AuditError with the layer that is wrong.
    """
    model = wrapped._module
    named: dict[str, Any] = dict(trained_parameters(model))  # Any: Opacus hangs its own attributes on parameters
    device = next(iter(named.values())).device
    single: list[dict[str, Tensor]] = []
    wrapped.disable_hooks()
    for example in examples:
        record_losses(model, *padded([example], pad, device)).sum().backward()
        single.append({name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in named.items()})
        model.zero_grad(set_to_none=True)
    wrapped.enable_hooks()
    found: list[dict[str, Tensor]] = []
    try:
        record_losses(wrapped, *padded(examples, pad, device)).sum().backward()
        for i in range(len(examples)):
            if isinstance(wrapped, OneByOne):
                wrapped.compute(i)
            row = 0 if isinstance(wrapped, OneByOne) else i
            found.append({name: p.grad_sample[row] for name, p in named.items()})
    except (RuntimeError, ValueError, NotImplementedError, AttributeError, TypeError) as error:
        raise _cannot(model, f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}") from error
    finally:
        _forget(wrapped)
    for i, gradients in enumerate(single):
        whole = torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
        for name, gradient in gradients.items():
            if not float((found[i][name] - gradient).norm()) <= 1e-2 * float(gradient.norm()) + 1e-4 * float(whole):
                layer, _, _ = name.rpartition(".")
                kind = type(model.get_submodule(layer)).__name__
                beside = f"beside a record of {max(map(len, examples))} tokens"
                raise _cannot(model, f"{beside}, those of {name} ({kind}) are not what single records give")


def _forget(wrapped: Any) -> None:
    wrapped._module.zero_grad(set_to_none=True)
    for p in wrapped._module.parameters():
        p.grad_sample = None
    if isinstance(wrapped, OneByOne):
        wrapped.forget()


def _cannot(model: nn.Module, why: str) -> AuditError:
    kinds = {
        type(module).__name__
        for module in model.modules()
        if type(module) not in GradSampleModule.GRAD_SAMPLERS
        and any(p.requires_grad for p in module.parameters(recurse=False))
    }
    used = any("lora_" in name for name, p in model.named_parameters() if p.requires_grad)
    advice = (
        "freeze or replace that layer" if used else "train a LoRA adapter (--lora), or freeze or replace that layer"
    )
    beside = f"; layers it has no rule for: {', '.join(sorted(kinds))}" if kinds else ""
    return AuditError(f"Opacus cannot compute the per-sample gradients of this model: {why}{beside}; {advice}")


# --- going on ---------------------------------------------------------------------------------------------------------


def _state(
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


def _restore(
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
    if trained.watch.count:  # older checkpoints have none
        trained.watch.restore(state["canaries"])


def _digest(parameters: dict[str, nn.Parameter]) -> str:
    digest = hashlib.sha256()
    for name, p in parameters.items():
        digest.update(name.encode())
        digest.update(p.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
