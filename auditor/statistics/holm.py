"""Test several hypotheses together (Holm 1979).

The probability of any false rejection is at most the significance level. The test with the smallest
of m p-values is decided at level/m, the next at level/(m - 1), and so on until a test does not
reject. `adjust_test_level` is for tests that can be run at any level, `adjust_p_values` for
p-values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np


def adjust_test_level(tests: Sequence[Callable[[float], bool]], level: float) -> float:
    """Return the significance level at which to decide all tests, by Holm's method.

    tests: functions that return whether a test rejects at a given level. If a test rejects at one
    level, it must reject at every higher level too. level: the probability of any false rejection.
    """
    rejected = 0
    while True:
        # The level only rises from round to round, so a test that rejected once rejects again.
        test_level = level / max(1, len(tests) - rejected)
        n_rejected = sum(test(test_level) for test in tests)
        if n_rejected <= rejected:
            return test_level
        rejected = n_rejected


def adjust_p_values(p_values: Sequence[float]) -> list[float]:
    """Return Holm's adjusted p-values, in the given order.

    A test's adjusted p-value is the smallest level at which Holm's method rejects the test.
    """
    order = np.argsort(p_values, kind="stable")
    adjusted = [0.0] * len(p_values)
    worst = 0.0
    for place, i in enumerate(order.tolist()):
        # Step-down: a test rejects only after all tests with smaller p-values.
        worst = max(worst, min(1.0, (len(p_values) - place) * p_values[i]))
        adjusted[i] = worst
    return adjusted
