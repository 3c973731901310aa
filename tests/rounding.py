"""How far apart two ways to the same single-precision numbers may lie."""

from __future__ import annotations

import torch
from torch import Tensor

_LEAST = 1e-5
# of the largest number's last place: what sums of a few hundred terms lose in another order
_STEPS = 32


def assert_same(ours: Tensor, theirs: Tensor, terms: int = 1) -> None:
    """Equal but for the order of their sums: a log-probability is off by the rounding of the
    largest logit.

    terms: log-probabilities that each number is the sum of, or the gradient of the sum: errors that
    have nothing to do with each other add up as their root.
    """
    largest = float(theirs[theirs.isfinite()].abs().max()) if theirs.isfinite().any() else 0.0
    tolerance = max(_LEAST * terms**0.5, _STEPS * torch.finfo(torch.float32).eps * largest)
    torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=0)
