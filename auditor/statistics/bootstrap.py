"""Resample secrets, texts or draws with replacement (the bootstrap, Efron 1979).

A resample is stored as the number of times that each of the n items occurs in it. Resamples depend
only on the stream's name and n. Statistics of the same secrets therefore use the same resamples,
and variation that they share cancels in a difference. Only the means of many items with few
different values have other resamples, which count the values.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, Literal

import numpy as np
import scipy

from auditor.core.arrays import Floats, Ints
from auditor.core.secret_randomness import make_keyed_generator

CONFIDENCE = 0.95
# Streams of the resamples behind every AUC and true-positive rate.
MEMBERS = "membership members"
NONMEMBERS = "membership non-members"
RESAMPLES = 1000
# default number of entries in a block of counts, which bounds the memory of a resampling
_COUNTS = 2**21
_BLOCK = 2**16  # items of a resample that are drawn at once
_COST_OF_VALUE = 20  # of counting a value in a resample, relative to drawing an item

Draws = Ints  # (resamples, n): how often each item was drawn
Values = Floats  # (resamples,); NaN if a resample has no value


def draw_resample_counts(
    noise: np.random.Generator, n: int, size: int, copies: Ints | None = None
) -> Draws:
    """Draw n of n items with replacement, `size` times, and count each item, of shape (size, n).

    copies: (n,) number of equal items that each item represents; None for one each.
    """
    if copies is not None:
        total = copies.sum()
        return noise.multinomial(total, copies / total, size=size)
    if n * RESAMPLES <= _COUNTS:
        return noise.multinomial(n, np.full(n, 1 / n), size=size)
    counts = np.empty((size, n), np.int64)
    for row in counts:  # the same distribution in a tenth of the time
        _count_drawn_items(noise, n, row)
    return counts


def _count_drawn_items(noise: np.random.Generator, times: int, counts: Ints) -> None:
    """Draw items with replacement, `times` times, and set `counts` of them, (items,)."""
    n = len(counts)
    if n > _BLOCK:
        half = math.ceil(n / 2 / _BLOCK) * _BLOCK
        n_of_half = noise.binomial(times, half / n)
        _count_drawn_items(noise, n_of_half, counts[:half])
        _count_drawn_items(noise, times - n_of_half, counts[half:])
    elif n == _BLOCK:
        items = noise.integers(n, size=times, dtype=np.uint16)  # any 16 random bits
        counts[:] = np.bincount(items, minlength=n)
    else:
        counts[:] = np.bincount(noise.integers(n, size=times), minlength=n)


def draw_dirichlet_weights(
    noise: np.random.Generator, n: int, size: int, copies: Ints | None = None
) -> Floats:
    """Draw weights of shape (size, n), each row uniform on the simplex (Rubin 1981).

    A row sums to 1; its distribution is Dirichlet(1, ..., 1). copies: (n,) number of equal items
    that each item represents, whose weights are added; None for one each.
    """
    # Exponentials divided by their sum are Dirichlet(1, ..., 1); a sum of exponentials is a gamma.
    if copies is None:
        weights = noise.standard_exponential((size, n))
    else:
        weights = noise.standard_gamma(copies, (size, n))
    weights /= weights.sum(1, keepdims=True)
    return weights


def draw_resample_blocks(
    n: int,
    stream: str,
    size: int = RESAMPLES,
    at_once: int | None = None,
    draw: Callable[..., Any] = draw_resample_counts,
) -> Iterator[Any]:
    """Yield `size` resamples of n items in blocks of at most `at_once` rows.

    The resamples do not depend on the block size, which by default follows from memory.
    stream: a name that seeds the resamples; draw: a function that draws counts or weights of shape
    (rows, n).
    """
    step = at_once or max(1, _COUNTS // n)
    if n * size <= _COUNTS:
        resamples = _draw_cached_resamples(n, stream, size, draw)
        yield from (resamples[start : start + step] for start in range(0, size, step))
        return
    # Draw row by row, so that blocks of any size use the same numbers of the stream.
    noise = make_keyed_generator("bootstrap", stream, n)
    for start in range(0, size, step):
        yield draw(noise, n, min(step, size - start))


@functools.lru_cache(maxsize=4)
def _draw_cached_resamples(n: int, stream: str, size: int, draw: Callable[..., Any]) -> Any:
    """Draw resamples and cache them: they are reused often and are slow to draw."""
    resamples = draw(make_keyed_generator("bootstrap", stream, n), n, size)
    resamples.flags.writeable = False  # all callers share this array
    return resamples


def compute_resampled_statistic(
    n: int,
    statistic: Callable[[Any], Any],
    stream: str,
    size: int = RESAMPLES,
    draw: Callable[..., Any] = draw_resample_counts,
) -> Values:
    """Return the statistic of every resample, of shape (size,).

    statistic: a function of (rows, n) counts or weights.
    """
    blocks = draw_resample_blocks(n, stream, size, draw=draw)
    return np.concatenate([statistic(draws) for draws in blocks])


def compute_resampled_means(
    values: Any,
    stream: str,
    size: int = RESAMPLES,
    draw: Callable[..., Any] = draw_resample_counts,
) -> Any:
    """Return the mean of every resample: (size,), or (size, k) for values of shape (k, n).

    draw: as in `draw_resample_blocks`. If many items have few different values, each resample only
    counts the values: the means have the same distribution.
    """
    n = np.shape(values)[-1]
    total = n  # the sum of a row
    if draw is draw_dirichlet_weights:
        total = 1
    if np.ndim(values) == 1 and n * size > _COUNTS:
        distinct, copies = np.unique(values, return_counts=True)
        if len(distinct) * _COST_OF_VALUE < n:
            values = distinct
            draw = functools.partial(draw, copies=copies)
    return compute_resampled_statistic(
        np.shape(values)[-1], lambda draws: draws @ np.transpose(values) / total, stream, size, draw
    )


def compute_percentile_interval(
    values: Any, method: Literal["linear", "inverted_cdf"] = "linear"
) -> tuple[float, float]:
    """Return the two-sided 95% percentile interval of resampled values.

    method: as in `numpy.quantile`. Use "inverted_cdf" if values are infinite, because infinite
    values cannot be interpolated.
    """
    low, high = np.quantile(values, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2], method=method)
    return float(low), float(high)


def estimate_mean_rate(sums: Floats, counts: Floats, stream: str) -> tuple[float, float, float]:
    """Return the sum of `sums` over the sum of `counts`, as `estimate_rate_statistic` does.

    sums, counts: (texts,).
    """
    return estimate_rate_statistic(
        [sums], [counts], lambda rates: (rates[:, 0], np.ones_like(rates)), stream
    )


def estimate_rate_statistic(
    sums: Any,
    counts: Any,
    statistic: Callable[[Any], tuple[Any, Any]],
    stream: str,
    size: int = RESAMPLES,
) -> tuple[float, float, float]:
    """Return a smooth function of rates with its 95% interval, as (value, low, high).

    A rate is the sum of `sums` over n texts, divided by the sum of `counts` (a ratio estimator).

    Args:
        sums: (rates, n), inf if a text makes the rate infinite.
        counts: (rates, n) or (1, n), above 0.
        statistic: maps (rows, rates) to values (rows,) and slopes (rows, rates).
        stream: a name that seeds the resamples.
        size: number of resamples.

    Two intervals are computed, and each returned end is the outer one of their two ends:

    - Student's t with the delta-method error. It is too short on the side of a long tail.
    - The bootstrap-t (Efron and Tibshirani 1993, 12.5). It is too short if there are outliers on
      both sides. Resamples that repeat a single text have error 0 and are omitted.

    For a single text, the ends are infinite. If a sum is infinite, the ends are plain quantiles of
    the resamples.
    """
    sums = np.asarray(sums, dtype=float)
    counts = np.asarray(counts, dtype=float)
    n = sums.shape[1]
    beyond = np.isinf(sums)
    finite_sums = np.where(beyond, 0.0, sums)  # 0 times infinity would be NaN

    def at(draws: Any) -> tuple[Any, Any]:
        rates = np.where(draws @ beyond.T > 0, np.inf, draws @ finite_sums.T / (draws @ counts.T))
        values, slopes = statistic(rates)
        if beyond.any():
            return values, np.zeros_like(values)
        slopes = slopes / (draws @ counts.T / n)
        # Delta method: a text moves each rate by (its sum - rate x its count) / the mean count.
        # `moves` has the shape (rows, n).
        moves = slopes @ finite_sums - (slopes * rates) @ np.broadcast_to(counts, sums.shape)
        return values, np.sqrt((draws * moves**2).sum(1) / (n * max(n - 1, 1)))

    (value,), (error,) = at(np.ones((1, n)))
    if n == 1 and not beyond.any():
        return float(value), -np.inf, np.inf
    values, errors = np.concatenate(
        [at(draws) for draws in draw_resample_blocks(n, stream, size)], axis=1
    )
    if beyond.any():
        return float(value), *compute_percentile_interval(values, "inverted_cdf")
    reach = scipy.special.stdtrit(n - 1, (1 + CONFIDENCE) / 2)
    spread = errors > 1e-9 * error  # smaller errors are rounding
    # The bootstrap-t swaps the ends: the upper quantile of t gives the lower end.
    low_t, high_t = (
        compute_percentile_interval((values - value)[spread] / errors[spread])
        if spread.any()
        else (0.0, 0.0)
    )
    return (
        float(value),
        float(value - max(high_t, reach) * error),
        float(value - min(low_t, -reach) * error),
    )
