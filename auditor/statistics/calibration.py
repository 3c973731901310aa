"""Conformal p-values against non-members."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray


def conformal_threshold(controls: NDArray[np.float64], alpha: float) -> float:
    """The ceil((1-a)(n+1))-th smallest control score, +inf where there are too few (formulas.md A7).

    A record exchangeable with the controls scores above it with probability at most alpha.
    """
    place = math.ceil((1 - alpha) * (len(controls) + 1) - 1e-9)  # 0.95 * 20 is 19, whatever rounding says
    return float(np.sort(controls)[place - 1]) if place <= len(controls) else math.inf


def conformal_p(scores: NDArray[np.float64], controls: NDArray[np.float64]) -> NDArray[np.float64]:
    """(1 + #{control >= score}) / (n + 1) of each score."""
    below = np.searchsorted(np.sort(controls), scores, side="left")
    result: NDArray[np.float64] = (1 + len(controls) - below) / (len(controls) + 1)
    return result
