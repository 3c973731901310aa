"""Several tests at once (Holm 1979): all together wrong with at most the level, step by step from
the surest one.

Of m tests the surest is decided at level/m, the next at level/(m - 1), and so on until one does not
reject. The same rule in two forms: for tests that can be asked at a level, and for p-values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np


def adjust_test_level(tests: Sequence[Callable[[float], bool]], level: float) -> float:
    """The level at which each test is decided.

    tests: whether each rejects at a level; a test that rejects at one also does at every higher
    one.
    """
    rejected = 0
    while True:
        # The level only rises from round to round, so that a test that rejected once still does.
        each = level / max(1, len(tests) - rejected)
        now = sum(test(each) for test in tests)
        if now <= rejected:
            return each
        rejected = now


def adjust_p_values(p_values: Sequence[float]) -> list[float]:
    """The p-values to hold against the level itself, in the order given: the least level at which
    each rejects.
    """
    order = np.argsort(p_values, kind="stable")
    found = [0.0] * len(p_values)
    worst = 0.0
    for place, i in enumerate(order.tolist()):
        # step-down: none rejects before all surer ones do
        worst = max(worst, min(1.0, (len(p_values) - place) * p_values[i]))
        found[i] = worst
    return found
