"""Compute linear layers with another low-rank update for each row of a batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

_MERGED_BYTES = 2**28  # of all members' weights, each with its merged updates


class MixedLoraRouting:
    """The ensemble part (adapter) of each batch row, for all layers that mix adapters.

    It is set before each forward pass.

    Attributes:
        part: the part of each row, (rows,); None if all parts have the same number of rows.
        blocks: the parts whose rows follow each other in blocks, one block for each part;
            `slice(None)` for all parts in order. None if consecutive rows belong to parts 0, 1, ...
            in turn. Used only if `part` is None.
        runs: pairs of a part and its number of consecutive rows, in the order of `part`.
        rows: number of rows.
    """

    part: Tensor | None = None
    blocks: Tensor | slice | None = None
    runs: Sequence[tuple[int, int]] = ()
    rows: int = 0

    def route_rows(self, part: Tensor) -> None:
        """Route the next forward pass: row i goes to part part[i]."""
        self.part = part
        self.rows = len(part)
        parts, counts = torch.unique_consecutive(part, return_counts=True)
        self.runs = list(zip(parts.tolist(), counts.tolist(), strict=True))


class MixedLora(nn.Module):
    """A linear layer `base` with a low-rank update for each ensemble part.

    Products are computed in the adapter's precision, as in PEFT.

    Attributes:
        a: first factor of each update, (parts, r, in); zeros for part 0.
        b: second factor of each update, (parts, out, r); zeros for part 0.
        merged: the layer's weight with each part's update added, (parts, in, out), or None.
    """

    a: Tensor
    b: Tensor
    merged: Tensor | None = None

    def __init__(self, base: nn.Module, a: Tensor, b: Tensor, routing: MixedLoraRouting) -> None:
        super().__init__()
        self.base = base
        self.routing = routing
        self.register_buffer("a", a)
        self.register_buffer("b", b)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the base layer and the LoRA update of each row's part.

        x: (rows, n, in). Return (rows, n, out). Some layers have the shape (rows * n, in).

        `self.routing` says which part of the ensemble each row belongs to.
        """
        routing = self.routing
        if x.ndim != 3:
            y = self.forward(x.reshape(routing.rows, -1, x.shape[-1]))
            return y.reshape(*x.shape[:-1], -1)
        parts = len(self.a)
        if routing.part is not None:
            # On a GPU, many small products take longer than copies of the factors.
            if self.merged is not None and x.is_cpu and len(routing.runs) <= parts:
                return self._merged_output_by_run(x, routing.runs)
            a = self.a[routing.part]
            b = self.b[routing.part]
            return _add_lora_update(self.base(x), x.to(a.dtype), a, b)
        if routing.blocks is not None:
            n_blocks = parts if isinstance(routing.blocks, slice) else len(routing.blocks)
            return self._lora_output_by_part(
                x.reshape(n_blocks, -1, x.shape[-1]), routing.blocks
            ).view(*x.shape[:2], -1)
        blocks = x.unflatten(0, (-1, parts)).transpose(0, 1)  # (parts, rows, n, in)
        y = self._lora_output_by_part(blocks.flatten(1, 2)).unflatten(1, blocks.shape[1:3])
        return y.transpose(0, 1).flatten(0, 1)

    def _merged_output_by_run(self, x: Tensor, runs: Sequence[tuple[int, int]]) -> Tensor:
        """Apply the merged weights of each run's part to its rows; see `MixedLoraRouting.runs`."""
        assert self.merged is not None
        outputs = []
        for (part, _), rows in zip(runs, x.split([count for _, count in runs]), strict=True):
            outputs.append(nn.functional.linear(rows, self.merged[part].mT, self._base_bias))
        return torch.cat(outputs)

    @property
    def _base_bias(self) -> Tensor | None:
        return self.base.bias  # type: ignore[return-value]

    def _lora_output_by_part(self, x: Tensor, parts: Tensor | slice | None = None) -> Tensor:
        """Map x to the layer's output, with another adapter for each part of x.

        x: (adapters, m, in); the result is (adapters, m, out). parts: the adapters' indices; None
        for all adapters in order.
        """
        if self.merged is None:
            a, b = (self.a, self.b) if parts is None else (self.a[parts], self.b[parts])
            return _add_lora_update(self.base(x), x.to(a.dtype), a, b)
        weight = self.merged
        if parts is not None:
            weight = weight[parts]
        if self._base_bias is None:
            return torch.bmm(x, weight)
        return torch.baddbmm(self._base_bias, x, weight)


def _add_lora_update(y: Tensor, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return y + x a^T b^T; without gradients, the sum is computed in place."""
    thin = torch.bmm(x, a.mT)
    if y.dtype != x.dtype:
        return (y + torch.bmm(thin, b.mT)).to(y.dtype)
    if y.requires_grad or a.requires_grad:  # in-place writes into a view cost its gradient a copy
        return torch.baddbmm(y, thin, b.mT)
    return y.baddbmm_(thin, b.mT)


def merge_lora_updates_within_memory(layers: Sequence[MixedLora]) -> None:
    """Merge the updates of all layers into their weights, if memory suffices for all layers.

    A merged layer computes one product instead of three.
    """
    bases = [layer.base for layer in layers]
    # Other modules may have more than weight and bias.
    if not all(type(base) in (nn.Linear, Conv1D) for base in bases):
        return
    weights = [base.get_parameter("weight") for base in bases]
    same_dtype = all(
        weight.dtype == layer.a.dtype for weight, layer in zip(weights, layers, strict=True)
    )
    if (
        same_dtype
        and sum(len(layer.a) * w.nbytes for w, layer in zip(weights, layers, strict=True))
        <= _MERGED_BYTES
    ):
        for weight, layer in zip(weights, layers, strict=True):
            if isinstance(layer.base, nn.Linear):
                layer.merged = torch.baddbmm(weight.T, layer.a.mT, layer.b.mT)
            else:
                layer.merged = torch.baddbmm(weight, layer.a.mT, layer.b.mT)
