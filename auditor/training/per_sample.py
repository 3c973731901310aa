"""The gradient of every record by itself: the model under Opacus's hooks, its layers' rules, and what is refused.

Per-sample gradients are held against backward passes of single records before any is used. Needs the `dp` extra.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from opacus.grad_sample import GradSampleModule
from opacus.grad_sample.embedding import compute_embedding_grad_sample
from opacus.grad_sample.functorch import ft_compute_per_sample_gradient
from opacus.grad_sample.utils import register_grad_sampler
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from auditor.core.errors import AuditError
from auditor.core.nouns import Tokens
from auditor.training import loss_masks
from auditor.training.finetune import trainable_parameters


def pad_training_tokens_and_labels(
    batch: Sequence[Tokens], pad: int, device: torch.device | str = "cpu"
) -> tuple[Tensor, Tensor]:
    """(b, n) token ids and labels. Padding stands behind what causal attention sees, so it needs no mask."""
    width = max(map(len, batch))
    rows = torch.tensor([[*ids, *[pad] * (width - len(ids))] for ids in batch], device=device)
    lengths = torch.tensor([len(ids) for ids in batch], device=device)
    labels = loss_masks.labels_of_loss_masked_rows(rows).masked_fill(
        torch.arange(width, device=device) >= lengths.unsqueeze(1), loss_masks.IGNORED
    )
    return loss_masks.token_id_rows_without_loss_mask(rows), labels


def mean_nll_of_each_padded_record(model: Any, tokens: Tensor, labels: Tensor) -> Tensor:
    """(b,) mean nll in nats of each sequence's tokens that have a loss, its first one given; 0 where none has."""
    # Position ids of full batch size: GPT-2's own are (1, n), and their embedding would have no per-sample gradient.
    positions = torch.arange(tokens.shape[1], device=tokens.device).repeat(len(tokens), 1)
    return loss_masks.mean_nll_of_tokens_with_loss_per_row(
        model, labels, input_ids=tokens, position_ids=positions, use_cache=False
    )


@contextmanager
def checked_opacus_model_context(model: Any, ghost: bool, examples: Sequence[Tokens], pad: int) -> Iterator[Any]:
    """A context: the model with Opacus's hooks, taken off at its end. Per-sample gradients are checked first.

    Dropout is switched off: the noise regularises enough, and a gradient is then a function of its record.
    """
    _disable_dropout_for_private_training(model)
    pairs = example_pairs_for_gradient_check(examples)
    check_buffers_unchanged(model.train(), pairs, pad)
    with warnings.catch_warnings():
        # torch's, of every layer whose input needs no gradient, as an embedding's token ids
        warnings.filterwarnings("ignore", message="Full backward hook is firing", category=UserWarning)
        wrapped = wrap_with_opacus(model, ghost)
        try:
            for pair in pairs:
                check_per_sample_gradients(wrapped, pair, pad)
            yield wrapped
        finally:
            wrapped.cleanup()


@register_grad_sampler(Conv1D)
def _conv1d_per_sample_gradients(
    layer: Conv1D, activations: list[Tensor], backprops: Tensor
) -> dict[nn.Parameter, Tensor]:
    """GPT-2's linear layer: its weight is (in, out), else as Opacus's own for nn.Linear."""
    inputs = activations[0].to(backprops.dtype)
    samples: dict[nn.Parameter, Tensor] = {}
    if layer.weight.requires_grad:
        # n: records, ...: positions, which are summed over, i: inputs, j: outputs
        samples[layer.weight] = torch.einsum("n...i,n...j->nij", inputs, backprops)
    if layer.bias.requires_grad:
        samples[layer.bias] = torch.einsum("n...k->nk", backprops)
    return samples


@register_grad_sampler(nn.Embedding)
def _embedding_per_sample_gradients(
    layer: nn.Embedding, activations: list[Tensor], backprops: Tensor
) -> dict[nn.Parameter, Tensor]:
    """Opacus's, of what reaches the rows: torch gives that of `padding_idx` (often end of text) no gradient."""
    backprops = backprops * getattr(layer, "embed_scale", 1.0)  # Gemma's scales its output by a constant
    if layer.padding_idx is not None:
        backprops = backprops.masked_fill((activations[0] == layer.padding_idx).unsqueeze(-1), 0)
    samples: dict[nn.Parameter, Tensor] = compute_embedding_grad_sample(layer, activations, backprops)
    return samples


class PerSampleGradientHook(GradSampleModule):
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
        if not module.activations:  # as Opacus's own hook does: the next batch may be of another size
            del module.max_batch_len

    def compute_record_gradient(self, i: int) -> None:
        """Leaves the gradient of record i in `grad_sample` of the parameters, (1, ...) each, summed over its uses."""
        for p in self.parameters():
            p.grad_sample = None
        for module, activations, backprops in self._kept:
            rule = self.GRAD_SAMPLERS.get(type(module), ft_compute_per_sample_gradient)
            own = [part[i : i + 1] for part in activations]
            for p, gradient in rule(module, own, backprops[i : i + 1]).items():
                p.grad_sample = gradient if p.grad_sample is None else p.grad_sample + gradient

    def drop_kept_backprops(self) -> None:
        """Frees what was kept of the last backward pass."""
        self._kept.clear()


def wrap_with_opacus(model: Any, ghost: bool) -> Any:
    """Opacus's module around the model: sums of losses, per-sample gradients. Raises AuditError."""
    for embedding in {type(module) for module in model.modules() if isinstance(module, nn.Embedding)}:
        if (
            embedding not in GradSampleModule.GRAD_SAMPLERS
        ):  # `check_per_sample_gradients` sees whether the rule is theirs
            register_grad_sampler(embedding)(_embedding_per_sample_gradients)
    kind: Any = PerSampleGradientHook if ghost else GradSampleModule
    try:  # not strict: it would refuse every layer with a buffer, constants too; see `check_buffers_unchanged`
        return kind(model.train(), loss_reduction="sum", strict=False)
    except NotImplementedError as error:
        raise _no_per_sample_gradients_error(model, str(error).splitlines()[0]) from None


def _disable_dropout_for_private_training(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        # Attention hands its rate to a function: there is no Dropout module to switch off.
        for name, value in list(vars(module).items()):
            if "dropout" in name and isinstance(value, float):
                setattr(module, name, 0.0)


def example_pairs_for_gradient_check(examples: Sequence[Tokens]) -> list[list[Tokens]]:
    """What a record's gradient is tried beside: the shortest of each octave of lengths with the longest of all.

    A model may change with the length of its batch (rotary embeddings past their original length), so that a short
    record's gradient depends on who stands beside it. The last pair is of the two longest.
    """
    ordered = sorted(examples, key=len)
    # Reversed, so that of each octave the shortest is what stays.
    shortest = {len(example).bit_length(): example for example in reversed(ordered)}
    return [*([example, ordered[-1]] for _, example in sorted(shortest.items())), ordered[-2:]]


@torch.no_grad()
def check_buffers_unchanged(model: nn.Module, pairs: Sequence[Sequence[Tokens]], pad: int) -> None:
    """Refuses a model that remembers what it has read: its buffers would tell of records, without any noise.

    Constants, which no forward pass changes, are buffers too. Raises AuditError with the name of the layer.
    """
    device = next(model.parameters()).device
    before: dict[str, Tensor] = {}
    # The shortest, then the longest: some buffers (caches of rotary angles) change with the length alone.
    for example in (pairs[0][0], pairs[-1][-1]):
        try:
            mean_nll_of_each_padded_record(model, *pad_training_tokens_and_labels([example], pad, device))
        except (RuntimeError, ValueError, TypeError):
            return  # `check_per_sample_gradients` says why
        now = {name: buffer.clone() for name, buffer in model.named_buffers()}
        for name in before:
            if not torch.equal(before[name], now[name]):
                layer, _, _ = name.rpartition(".")
                kind = type(model.get_submodule(layer)).__name__
                why = f"{layer} ({kind}) keeps statistics of what it reads or of how long it is, which mix records"
                raise _no_per_sample_gradients_error(model, why)
        before = now


def check_per_sample_gradients(wrapped: Any, examples: Sequence[Tokens], pad: int) -> None:
    """Holds Opacus's per-sample gradients against backward passes of one example each.

    Single ones go first, lest the others leave a trace. Raises AuditError with the layer that is wrong.
    """
    model = wrapped._module
    named: dict[str, Any] = dict(trainable_parameters(model))  # Any: Opacus hangs its own attributes on parameters
    device = next(iter(named.values())).device
    single: list[dict[str, Tensor]] = []
    model.zero_grad(set_to_none=True)  # of whoever had it before: it would be added to the first
    wrapped.disable_hooks()
    for example in examples:
        mean_nll_of_each_padded_record(model, *pad_training_tokens_and_labels([example], pad, device)).sum().backward()
        single.append({name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in named.items()})
        model.zero_grad(set_to_none=True)
    wrapped.enable_hooks()
    found: list[dict[str, Tensor]] = []
    try:
        mean_nll_of_each_padded_record(wrapped, *pad_training_tokens_and_labels(examples, pad, device)).sum().backward()
        for i in range(len(examples)):
            row = i
            if isinstance(wrapped, PerSampleGradientHook):
                wrapped.compute_record_gradient(i)
                row = 0
            found.append({name: p.grad_sample[row] for name, p in named.items()})
    except (RuntimeError, ValueError, NotImplementedError, AttributeError, TypeError) as error:
        why = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"
        raise _no_per_sample_gradients_error(model, why) from error
    finally:
        model.zero_grad(set_to_none=True)
        for p in model.parameters():
            p.grad_sample = None
        if isinstance(wrapped, PerSampleGradientHook):
            wrapped.drop_kept_backprops()
    for i, gradients in enumerate(single):
        whole = torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
        for name, gradient in gradients.items():
            # Batches of another shape round differently: a tensor of hardly any gradient is held to the whole's norm.
            if not float((found[i][name] - gradient).norm()) <= 1e-2 * float(gradient.norm()) + 1e-4 * float(whole):
                kind = type(model.get_submodule(name.rpartition(".")[0])).__name__
                why = f"beside a record of {max(map(len, examples))} tokens, those of {name} ({kind})"
                raise _no_per_sample_gradients_error(model, f"{why} are not what single records give")


def _no_per_sample_gradients_error(model: nn.Module, why: str) -> AuditError:
    kinds = {
        type(module).__name__
        for module in model.modules()
        if type(module) not in GradSampleModule.GRAD_SAMPLERS
        and any(p.requires_grad for p in module.parameters(recurse=False))
    }
    used = any("lora_" in name for name, p in model.named_parameters() if p.requires_grad)
    advice = f"{'' if used else 'train a LoRA adapter (--lora), or '}freeze or replace that layer"
    beside = f"; layers it has no rule for: {', '.join(sorted(kinds))}" if kinds else ""
    return AuditError(f"Opacus cannot compute the per-sample gradients of this model: {why}{beside}; {advice}")
