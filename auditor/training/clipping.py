"""Clipped sums of per-sample gradients whose sensitivity is proved, rounding included. Knows tensors only.

Two data sets that differ in one unit have sums that differ by at most C (1 + ROUNDING) in norm, as they are computed:

- Norms are summed in float64, of squares that are exact there: two parts of at most 2^25 additions each, so that a norm
  is too small by at most 2^-27 of itself, whatever the order (Higham 2002, Section 4.2). In float32, eight lanes of a
  large matrix lose whatever is below half a unit in the last place of what they hold already: 13% of a norm.
- A clipped gradient's entries are rounded to a grid of 2^-37 to 2^-36 of C before they are added, which moves a
  gradient of d entries by at most sqrt(d) 2^-37 C: 2^-20.5 C where d is at most MOST_PARAMETERS.
- Sums are then of whole multiples of the grid, below 2^53 of it for fewer than 2^16 units: exact in float64, in any
  order. What the other units are rounded to does not depend on who else is in the batch.

Together (1 + 2^-27) (1 + 2^-52)^3 + 2^-20.5 < 1 + 2^-20. Not covered: the per-sample gradients themselves come out of
float32 kernels, whose last digits can depend on which records are computed together (`physical_batch=1`: each alone).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from auditor.core.errors import AuditError

ROUNDING = 2.0**-20  # what computing adds to the sensitivity, in clipping norms
MOST_PARAMETERS, MOST_UNITS = 2**33, 2**15  # units that are expected in a batch: twice as many have no chance
_GRID = 2.0**-36  # spacing, of the power of two below C
_PIECE = {"cpu": 1 << 18, "cuda": 1 << 24}  # values at once: they stay in the cache, or fill the device
_NARROWEST = 1 << 8  # columns at once, however many rows: the fewer parts, the less their sum is rounded
_LANES = 8  # of float32 norms on a CPU


def device_for_float64_gradient_sums(device: torch.device) -> torch.device:
    """The device, or the CPU where it has no float64."""
    return device if device.type in _PIECE else torch.device("cpu")


def per_sample_gradient_norms(samples: Sequence[Tensor]) -> Tensor:
    """(b,) float64 norms of b gradients, each in parts (b, ...), one a parameter."""
    where = device_for_float64_gradient_sums(samples[0].device)
    squares = torch.zeros(len(samples[0]), dtype=torch.float64, device=where)
    for sample in samples:
        for piece in _split_into_column_pieces(sample):
            exact = piece.to(where).double()
            squares += torch.linalg.vecdot(exact, exact)
    return squares.sqrt()


def clipping_factors(norms: Tensor, clips: Tensor) -> Tensor:
    """(b,) float64 min(1, clip / norm); 1 for a gradient that is zero."""
    return (clips.to(norms) / norms).clamp(max=1.0)


def add_clipped_gradients_on_grid(total: Tensor | None, sample: Tensor, factors: Tensor, clip: float) -> Tensor:
    """total plus the sum of factors (b,) times sample (b, ...), in float64, on the grid of `clip` (inf: on none)."""
    where = device_for_float64_gradient_sums(sample.device)
    if total is None:
        total = torch.zeros(sample.shape[1:], dtype=torch.float64, device=where)
    grid = 2.0 ** math.floor(math.log2(clip)) * _GRID if math.isfinite(clip) else 0.0
    weights = (factors.to(where) / (grid or 1.0)).unsqueeze(1)  # a power of two: exact
    # A view: what is added to it is added to `total`.
    flat, start = total.view(-1), 0
    for piece in _split_into_column_pieces(sample):
        weighted = piece.to(where).double().mul_(weights)
        own = flat[start : start + piece.shape[1]]
        own += weighted.round_().sum(0).mul_(grid) if grid else weighted.sum(0)
        start += piece.shape[1]
    return total


def _split_into_column_pieces(sample: Tensor) -> Sequence[Tensor]:
    rows = sample.flatten(1)
    most = _PIECE.get(rows.device.type, _PIECE["cpu"])
    return rows.split(max(_NARROWEST, most // max(1, len(rows))), dim=1)


def dense_test_gradient(parameter: Tensor, clip: float) -> Tensor:
    """(1, ...) a gradient whose float32 norm is too small: a large entry for each lane, in which the others vanish."""
    large = 2.0 ** math.ceil(math.log2(256 * clip))
    # The square of a small entry is just below half a unit in the last place (2^-24) of the large one's.
    entries = torch.full((parameter.numel(),), 0.99 * 2**-12 * large, dtype=parameter.dtype, device=parameter.device)
    entries[:_LANES] = large
    return entries.view(1, *parameter.shape)


def self_test_gradient_clipping(parameters: Sequence[Tensor], clip: float, units: float) -> None:
    """Clips a dense gradient of these shapes on this device, far longer than C, and measures it by other means.

    units: expected in a batch. Raises AuditError where more than C (1 + ROUNDING) is left of it, and for more
    parameters or units than the proof is of.
    """
    if not math.isfinite(clip):
        return
    count = sum(p.numel() for p in parameters)
    if count > MOST_PARAMETERS:
        raise AuditError(
            f"expected at most {MOST_PARAMETERS:,} trained parameters, for which rounding is bounded, got {count:,}: "
            "train a LoRA adapter (--lora)"
        )
    if units > MOST_UNITS:
        raise AuditError(f"expected batches of at most {MOST_UNITS:,} units, whose sums are exact, got {units:,.0f}")
    samples = [dense_test_gradient(p, clip) for p in parameters]
    weights = clipping_factors(per_sample_gradient_norms(samples), torch.tensor([clip]))
    squares = 0.0
    for sample in samples:
        left = add_clipped_gradients_on_grid(None, sample, weights, clip)
        squares += float(np.square(left.cpu().numpy() / clip).sum())  # numpy adds pairwise: no lane loses small entries
    if not math.sqrt(squares) <= 1 + ROUNDING:
        raise AuditError(
            f"expected a dense gradient to be clipped to {clip:g}, got {math.sqrt(squares) * clip:.9g}: this device's "
            "float64 arithmetic is not what epsilon is accounted for"
        )
