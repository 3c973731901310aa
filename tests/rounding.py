"""How far apart two ways to the same single-precision numbers may lie."""

from __future__ import annotations

import torch
from torch import Tensor

_LEAST = 1e-5
_STEPS = 32  # of the largest number's last place: what sums of a few hundred terms lose in another order


def assert_same(ours: Tensor, theirs: Tensor) -> None:
    """Equal but for the order of their sums: a log-probability is off by the rounding of the largest logit."""
    largest = float(theirs[theirs.isfinite()].abs().max()) if theirs.isfinite().any() else 0.0
    tolerance = max(_LEAST, _STEPS * torch.finfo(torch.float32).eps * largest)
    torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=0)
