"""The bootstrap: how often each of n secrets, texts or draws stands in a resample of them (Efron 1979).

Every resample is a function of the stream's name and n, so that numbers over the same secrets are read at the same
resamples, and what they share cancels in a difference. Knows nothing of what is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from auditor.core.streams import generator

CONFIDENCE = 0.95
RESAMPLES = 1000
_COUNTS = 2**21  # of a block, unless asked otherwise: what is resampled takes no more memory for being longer

Draws = NDArray[np.int64]  # (resamples, n): how often each was drawn
Values = NDArray[np.float64]  # (resamples,); NaN where a resample holds nothing to take a number of


def blocks(n: int, stream: str, size: int = RESAMPLES, at_once: int | None = None) -> Iterator[Draws]:
    """`size` resamples of n, at most `at_once` rows a block, by default as memory bounds it; the same in any blocks."""
    noise, uniform = generator("bootstrap", stream, n), np.full(n, 1 / n)
    step = at_once or max(1, _COUNTS // n)
    for start in range(0, size, step):
        yield noise.multinomial(n, uniform, size=min(step, size - start))


def resampled(
    n: int, statistic: Callable[[Draws], Any], stream: str, size: int = RESAMPLES, at_once: int | None = None
) -> Values:
    """(size,): the statistic, of (rows, n) counts, at every resample."""
    return np.concatenate([statistic(draws) for draws in blocks(n, stream, size, at_once)])


def places(n: int, stream: str, size: int) -> Iterator[NDArray[np.int64]]:
    """(n,) indices of what each of `size` resamples holds: for a statistic that takes no counts, such as a fit."""
    noise = generator("bootstrap", stream, n)
    for _ in range(size):
        yield noise.integers(n, size=n)


def interval(values: Any, method: Literal["linear", "inverted_cdf"] = "linear") -> tuple[float, float]:
    """The two-sided 95% interval of resampled values.

    method: "inverted_cdf" takes a value that was drawn, where some are infinite and nothing lies between two of them.
    """
    low, high = np.quantile(values, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2], method=method)
    return float(low), float(high)
