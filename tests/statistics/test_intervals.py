"""Intervals of shares and of their differences: the tables of Newcombe's papers of 1998."""

from __future__ import annotations

import numpy as np
import pytest

from auditor.statistics.intervals import excess, wilson


@pytest.mark.parametrize(
    ("hits", "n", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson(hits: int, n: int, low: float, high: float) -> None:
    """Statistics in Medicine 17, 857-872, Table I, method 3; and the mirror of each."""
    assert wilson(hits, n) == pytest.approx((low, high), abs=5.1e-5)
    assert wilson(n - hits, n) == pytest.approx((1 - high, 1 - low), abs=5.1e-5)


@pytest.mark.parametrize(
    ("a", "m", "b", "n", "low", "high"),
    [(56, 70, 48, 80, 0.0524, 0.3339), (9, 10, 3, 10, 0.1705, 0.8090), (0, 10, 0, 20, -0.1611, 0.2775)],
)
def test_a_difference_of_shares(a: int, m: int, b: int, n: int, low: float, high: float) -> None:
    """Statistics in Medicine 17, 873-890, Table II, method 10."""
    found = excess("excess", np.arange(m) < a, np.arange(n) < b)
    assert (found.value, found.low, found.high) == pytest.approx((a / m - b / n, low, high), abs=5.1e-5)
    assert found.n == m + n
