"""Clip and sum per-sample gradients with a proven sensitivity that includes rounding.

If two data sets differ in one unit, their computed sums differ by at most C (1 + ROUNDING) in norm:

- Norms are summed in float64, in which the squares are exact, in two stages of at most 2^25
  additions each. So a norm is too small by a relative error of at most 2^-27, in any order
  (Higham 2002, Section 4.2). In float32, the sum of a large matrix in eight lanes can lose 13% of a
  norm, because each lane loses every value below half a unit in the last place of its running sum.
- The entries of a clipped gradient are rounded to a grid of 2^-37 to 2^-36 of C before they are
  added. This moves a gradient of d entries by at most sqrt(d) 2^-37 C, which is 2^-20.5 C if d is
  at most MOST_PARAMETERS.
- Sums are then multiples of the grid spacing, below 2^53 spacings for fewer than 2^16 units. So
  float64 represents the sums exactly, in any order. A unit's rounding does not depend on the other
  units.

Together, (1 + 2^-27) (1 + 2^-52)^3 + 2^-20.5 < 1 + 2^-20. The proof does not cover the per-sample
gradients themselves. They come from float32 kernels, whose last digits can depend on which records
are computed together (`physical_batch=1` computes each record separately).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from auditor.core.errors import AuditError

ROUNDING = 2.0**-20  # what computing adds to the sensitivity, in clipping norms
MOST_PARAMETERS = 2**33
MOST_UNITS = 2**15  # expected in a batch: a batch of twice as many has no chance to occur
_GRID = 2.0**-36  # spacing, relative to the power of two below C
_PIECE = {"cpu": 1 << 18, "cuda": 1 << 24}  # values at once: they fit the cache, or fill the device
# Columns at once, for any number of rows: fewer pieces mean fewer roundings of their sum.
_MIN_COLUMNS = 1 << 8
_LANES = 8  # of float32 norms on a CPU


def choose_sum_device(device: torch.device) -> torch.device:
    """Return `device`, or the CPU if `device` has no float64."""
    if device.type in _PIECE:
        return device
    return torch.device("cpu")


def compute_gradient_norms(samples: Sequence[Tensor]) -> Tensor:
    """Return the norms of b per-sample gradients, (b,) in float64.

    `samples` holds, for each parameter, its part of the gradients, (b, ...).
    """
    device = choose_sum_device(samples[0].device)
    squares = torch.zeros(len(samples[0]), dtype=torch.float64, device=device)
    for sample in samples:
        for piece in _split_columns(sample):
            exact = piece.to(device).double()
            squares += torch.linalg.vecdot(exact, exact)
    return squares.sqrt()


def compute_clipping_factors(norms: Tensor, clips: Tensor) -> Tensor:
    """Return min(1, clip / norm), (b,) in float64; 1 for a zero gradient."""
    return (clips.to(norms) / norms).clamp(max=1.0)


def add_clipped_gradients(
    total: Tensor | None,
    sample: Tensor,
    factors: Tensor,
    clip: float,
) -> Tensor:
    """Add the sum over b of factors[b] times sample[b] to `total`, in float64.

    `sample` holds gradients (b, ...), and `factors` is (b,). The summands are rounded to a grid
    whose spacing depends on `clip` (inf: no rounding). If `total` is None, start a new sum.
    """
    device = choose_sum_device(sample.device)
    if total is None:
        total = torch.zeros(sample.shape[1:], dtype=torch.float64, device=device)
    grid = 0.0
    if math.isfinite(clip):
        grid = 2.0 ** math.floor(math.log2(clip)) * _GRID
    # Dividing by the grid is exact: the grid is a power of two.
    weights = (factors.to(device) / (grid or 1.0)).unsqueeze(1)
    flat_total = total.view(-1)  # a view: additions to it change `total`
    start = 0
    for piece in _split_columns(sample):
        weighted = piece.to(device).double().mul_(weights)
        columns = flat_total[start : start + piece.shape[1]]
        if grid:
            columns += weighted.round_().sum(0).mul_(grid)
        else:
            columns += weighted.sum(0)
        start += piece.shape[1]
    return total


def _split_columns(sample: Tensor) -> Sequence[Tensor]:
    """Flatten gradients (b, ...) to (b, n), and split them into columns of limited size."""
    rows = sample.flatten(1)
    max_values = _PIECE.get(rows.device.type, _PIECE["cpu"])
    return rows.split(max(_MIN_COLUMNS, max_values // max(1, len(rows))), dim=1)


def make_dense_gradient(parameter: Tensor, clip: float) -> Tensor:
    """Make a gradient (1, ...) whose norm comes out too small if it is computed in float32.

    A CPU computes a float32 norm as `_LANES` partial sums. Each sum gets an entry so large that the
    small entries are rounded away.
    """
    large = 2.0 ** math.ceil(math.log2(256 * clip))
    # The square of a small entry is just below half a unit in the last place (2^-24) of a large
    # entry's square.
    small = 0.99 * 2**-12 * large
    entries = torch.full(
        (parameter.numel(),),
        small,
        dtype=parameter.dtype,
        device=parameter.device,
    )
    entries[:_LANES] = large
    return entries.view(1, *parameter.shape)


def check_gradient_clipping(parameters: Sequence[Tensor], clip: float, units: float) -> None:
    """Check that this device clips a dense, far too long gradient to at most C (1 + ROUNDING).

    The norm of the result is computed independently.

    Args:
        parameters: give the shapes and the device.
        clip: C, the clipping norm.
        units: expected number of units in a batch.

    Raises:
        AuditError: if the clipped gradient is too long, or if the proof does not cover this number
            of parameters or units.
    """
    if not math.isfinite(clip):
        return
    n_parameters = sum(p.numel() for p in parameters)
    if n_parameters > MOST_PARAMETERS:
        raise AuditError(
            f"expected at most {MOST_PARAMETERS:,} trained parameters, for which rounding is "
            f"bounded, got {n_parameters:,}: train a LoRA adapter (--lora)"
        )
    if units > MOST_UNITS:
        raise AuditError(
            f"expected batches of at most {MOST_UNITS:,} units for exact sums, got {units:,.0f}",
        )
    samples = [make_dense_gradient(p, clip) for p in parameters]
    factors = compute_clipping_factors(compute_gradient_norms(samples), torch.tensor([clip]))
    squares = 0.0
    for sample in samples:
        clipped = add_clipped_gradients(None, sample, factors, clip)
        # numpy adds pairwise: no lane loses small entries.
        squares += float(np.square(clipped.cpu().numpy() / clip).sum())
    if not math.sqrt(squares) <= 1 + ROUNDING:
        raise AuditError(
            f"expected a dense gradient to be clipped to {clip:g}, got "
            f"{math.sqrt(squares) * clip:.9g}: epsilon is accounted for exact float64 arithmetic, "
            "which this device does not have"
        )
