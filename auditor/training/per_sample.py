"""Compute per-sample gradients with Opacus's hooks, adding gradient rules for more layers.

Before use, per-sample gradients are compared with backward passes of single records. Needs the `dp`
extra.
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
from auditor.training.finetune import list_trainable_parameters


def pad_examples(
    batch: Sequence[Tokens],
    pad: int,
    device: torch.device | str,
) -> tuple[Tensor, Tensor]:
    """Return token ids and labels of the sequences, (b, n) each, padded with `pad`.

    Padding comes last, so causal attention needs no mask.
    """
    width = max(map(len, batch))
    padded = [[*ids, *[pad] * (width - len(ids))] for ids in batch]
    rows = torch.tensor(padded, device=device)
    lengths = torch.tensor(list(map(len, batch)), device=device)
    is_padding = torch.arange(width, device=device) >= lengths.unsqueeze(1)
    labels = loss_masks.make_row_labels(rows).masked_fill(is_padding, loss_masks.IGNORED)
    return loss_masks.remove_row_loss_masks(rows), labels


def compute_padded_record_nlls(model: Any, tokens: Tensor, labels: Tensor) -> Tensor:
    """Return each sequence's mean negative log-likelihood over the tokens in its loss, (b,) nats.

    `tokens` and `labels` are (b, n). The loss never includes the first token. The value is 0 if the
    loss includes no token.
    """
    # Position ids of full batch size: GPT-2's own are (1, n), and their embedding would have no
    # per-sample gradient.
    positions = torch.arange(tokens.shape[1], device=tokens.device).repeat(len(tokens), 1)
    return loss_masks.compute_mean_learnt_nlls(
        model,
        labels,
        input_ids=tokens,
        position_ids=positions,
        use_cache=False,
    )


@contextmanager
def wrap_checked_model(
    model: Any,
    ghost: bool,
    examples: Sequence[Tokens],
    pad: int,
) -> Iterator[Any]:
    """Check the model's per-sample gradients, and wrap it with Opacus's hooks during the block.

    If `ghost` is True, keep only one record's gradient in memory at a time. Dropout is off, so that
    a gradient depends only on its record; the noise regularises enough.
    """
    _disable_dropout(model)
    pairs = pick_gradient_check_pairs(examples)
    check_buffers_unchanged(model.train(), pairs, pad)
    with warnings.catch_warnings():
        # torch warns for every layer whose input needs no gradient, e.g. an embedding's token ids.
        warnings.filterwarnings(
            "ignore",
            message="Full backward hook is firing",
            category=UserWarning,
        )
        wrapped = wrap_opacus(model, ghost)
        try:
            for pair in pairs:
                check_per_sample_gradients(wrapped, pair, pad)
            yield wrapped
        finally:
            wrapped.cleanup()


@register_grad_sampler(Conv1D)
def _compute_conv1d_gradients(
    layer: Conv1D, activations: list[Tensor], backprops: Tensor
) -> dict[nn.Parameter, Tensor]:
    """Compute per-sample gradients of GPT-2's linear layer, whose weight is (in, out)."""
    inputs = activations[0].to(backprops.dtype)
    samples: dict[nn.Parameter, Tensor] = {}
    if layer.weight.requires_grad:
        # n: records, ...: positions, which are summed over, i: inputs, j: outputs
        samples[layer.weight] = torch.einsum("n...i,n...j->nij", inputs, backprops)
    if layer.bias.requires_grad:
        samples[layer.bias] = torch.einsum("n...k->nk", backprops)
    return samples


@register_grad_sampler(nn.Embedding)
def _compute_embedding_gradients(
    layer: nn.Embedding, activations: list[Tensor], backprops: Tensor
) -> dict[nn.Parameter, Tensor]:
    """Compute per-sample gradients by Opacus's rule, but none for the row of `padding_idx`.

    torch gives no gradient to this row either; it is often the end of text.
    """
    backprops = backprops * getattr(layer, "embed_scale", 1.0)  # Gemma scales its output
    if layer.padding_idx is not None:
        is_padding = (activations[0] == layer.padding_idx).unsqueeze(-1)
        backprops = backprops.masked_fill(is_padding, 0)
    samples: dict[nn.Parameter, Tensor] = compute_embedding_grad_sample(
        layer,
        activations,
        backprops,
    )
    return samples


class PerSampleGradientHook(GradSampleModule):
    """Hook that stores each layer's inputs and backprops.

    From these, it computes the gradient of one record at a time.
    """

    def __init__(self, model: Any, **options: Any) -> None:
        super().__init__(model, **options)
        self._backprops: list[tuple[nn.Module, list[Tensor], Tensor]] = []

    def capture_backprops_hook(
        self,
        module: Any,
        _forward_input: Any,
        forward_output: Any,
        loss_reduction: str,
        batch_first: bool,
    ) -> None:
        if not self.hooks_enabled:
            return
        activations, backprops = self.rearrange_grad_samples(
            module=module,
            backprops=forward_output[0].detach(),
            loss_reduction=loss_reduction,
            batch_first=batch_first,
        )
        self._backprops.append((module, activations, backprops))
        if not module.activations:
            # As Opacus's own hook does: the next batch may have another size.
            del module.max_batch_len

    def compute_record_gradient(self, i: int) -> None:
        """Set `grad_sample` of each parameter to the gradient of record i, (1, ...).

        The gradient is a sum over all uses of the parameter.
        """
        for p in self.parameters():
            p.grad_sample = None
        for module, activations, backprops in self._backprops:
            rule = self.GRAD_SAMPLERS.get(type(module), ft_compute_per_sample_gradient)
            inputs = [part[i : i + 1] for part in activations]
            for p, gradient in rule(module, inputs, backprops[i : i + 1]).items():
                if p.grad_sample is None:
                    p.grad_sample = gradient
                else:
                    p.grad_sample = p.grad_sample + gradient

    def drop_backprops(self) -> None:
        """Free the stored tensors of the last backward pass."""
        self._backprops.clear()


def wrap_opacus(model: Any, ghost: bool) -> Any:
    """Wrap the model in Opacus's module, which computes per-sample gradients of summed losses.

    Raise AuditError if Opacus does not support the model.
    """
    embeddings = set()
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            embeddings.add(type(module))
    # `check_per_sample_gradients` tests whether the rule fits a subclass of Embedding.
    for embedding in embeddings - set(GradSampleModule.GRAD_SAMPLERS):
        register_grad_sampler(embedding)(_compute_embedding_gradients)
    if ghost:
        kind: Any = PerSampleGradientHook
    else:
        kind = GradSampleModule
    try:
        # Not strict: strict rejects every layer with a buffer, even with constant buffers.
        # `check_buffers_unchanged` tests buffers instead.
        return kind(model.train(), loss_reduction="sum", strict=False)
    except NotImplementedError as error:
        raise _make_unsupported_error(model, str(error).splitlines()[0]) from None


def _disable_dropout(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        # Attention passes its rate to a function: it has no Dropout module to switch off.
        for name, value in list(vars(module).items()):
            if "dropout" in name and isinstance(value, float):
                setattr(module, name, 0.0)


def pick_gradient_check_pairs(examples: Sequence[Tokens]) -> list[list[Tokens]]:
    """Pair the longest record with shorter records, to check per-sample gradients.

    Lengths are divided into octaves of 2^k to 2^(k+1) - 1 tokens, and the shortest record of each
    octave is taken. The last pair is the two longest records.

    A model may read a record differently in a longer batch, for example if rotary embeddings exceed
    their original length. A short record's gradient then depends on the other records.
    """
    ordered = sorted(examples, key=len)
    # In reverse order, so that the shortest example of each octave comes last and remains.
    shortest = {}
    for example in reversed(ordered):
        shortest[len(example).bit_length()] = example
    pairs = []
    for octave in sorted(shortest):
        pairs.append([shortest[octave], ordered[-1]])
    return [*pairs, ordered[-2:]]


@torch.no_grad()
def check_buffers_unchanged(model: nn.Module, pairs: Sequence[Sequence[Tokens]], pad: int) -> None:
    """Raise AuditError, with the layer's name, if a forward pass changes the model's buffers.

    Noise does not protect buffers, so changed buffers would reveal records.
    """
    device = next(model.parameters()).device
    before: dict[str, Tensor] = {}
    # The shortest, then the longest: some buffers (caches of rotary angles) change with the length
    # only.
    for example in (pairs[0][0], pairs[-1][-1]):
        try:
            compute_padded_record_nlls(model, *pad_examples([example], pad, device))
        except (RuntimeError, ValueError, TypeError):
            return  # `check_per_sample_gradients` reports the reason
        buffers = {}
        for name, buffer in model.named_buffers():
            buffers[name] = buffer.clone()
        for name in before:
            if not torch.equal(before[name], buffers[name]):
                layer, _, _ = name.rpartition(".")
                kind = type(model.get_submodule(layer)).__name__
                raise _make_unsupported_error(
                    model,
                    f"{layer} ({kind}) keeps statistics of inputs or lengths, which mix records",
                )
        before = buffers


def check_per_sample_gradients(wrapped: Any, examples: Sequence[Tokens], pad: int) -> None:
    """Compare Opacus's per-sample gradients with backward passes of single examples.

    Raise AuditError with the name of the first layer whose gradients differ.
    """
    model = wrapped._module
    # Any: Opacus adds attributes to parameters.
    parameters: dict[str, Any] = dict(list_trainable_parameters(model))
    device = next(iter(parameters.values())).device
    # Single examples go first, in case the batch leaves a trace.
    single_gradients = _compute_single_gradients(wrapped, parameters, examples, pad, device)
    sample_gradients: list[dict[str, Tensor]] = []
    try:
        losses = compute_padded_record_nlls(wrapped, *pad_examples(examples, pad, device))
        losses.sum().backward()
        for i in range(len(examples)):
            row = i
            if isinstance(wrapped, PerSampleGradientHook):
                wrapped.compute_record_gradient(i)
                row = 0
            sample_gradients.append({name: p.grad_sample[row] for name, p in parameters.items()})
    except (RuntimeError, ValueError, NotImplementedError, AttributeError, TypeError) as error:
        reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"
        raise _make_unsupported_error(model, reason) from error
    finally:
        model.zero_grad(set_to_none=True)
        for p in model.parameters():
            p.grad_sample = None
        if isinstance(wrapped, PerSampleGradientHook):
            wrapped.drop_backprops()
    for i, gradients in enumerate(single_gradients):
        whole_norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
        for name, gradient in gradients.items():
            difference = float((sample_gradients[i][name] - gradient).norm())
            # Batches of another shape round differently: a tensor with a tiny gradient is compared
            # relative to the norm of the whole gradient.
            if not difference <= 1e-2 * float(gradient.norm()) + 1e-4 * float(whole_norm):
                kind = type(model.get_submodule(name.rpartition(".")[0])).__name__
                n_tokens = max(map(len, examples))
                raise _make_unsupported_error(
                    model,
                    f"in a batch with a record of {n_tokens} tokens, the gradients of {name} "
                    f"({kind}) differ from those of single records",
                )


def _compute_single_gradients(
    wrapped: Any,
    parameters: dict[str, Any],
    examples: Sequence[Tokens],
    pad: int,
    device: torch.device,
) -> list[dict[str, Tensor]]:
    """Return each example's gradients from its own backward pass, without Opacus's hooks."""
    model = wrapped._module
    model.zero_grad(set_to_none=True)  # earlier gradients would be added to the first
    wrapped.disable_hooks()
    single_gradients: list[dict[str, Tensor]] = []
    for example in examples:
        losses = compute_padded_record_nlls(model, *pad_examples([example], pad, device))
        losses.sum().backward()
        gradients = {}
        for name, p in parameters.items():
            gradients[name] = torch.zeros_like(p) if p.grad is None else p.grad
        single_gradients.append(gradients)
        model.zero_grad(set_to_none=True)
    wrapped.enable_hooks()
    return single_gradients


def _make_unsupported_error(model: nn.Module, reason: str) -> AuditError:
    """Return the error, with advice, for a model without per-sample gradients."""
    kinds = set[str]()
    for module in model.modules():
        is_trained = any(p.requires_grad for p in module.parameters(recurse=False))
        if is_trained and type(module) not in GradSampleModule.GRAD_SAMPLERS:
            kinds.add(type(module).__name__)
    advice = "freeze or replace that layer"
    if not any("lora_" in name for name, p in model.named_parameters() if p.requires_grad):
        advice = f"train a LoRA adapter (--lora), or {advice}"
    if kinds:
        layers = f"; layers it has no rule for: {', '.join(sorted(kinds))}"
    else:
        layers = ""
    return AuditError(
        f"Opacus cannot compute the per-sample gradients of this model: {reason}{layers}; {advice}",
    )
