"""Epsilon from independent trials, against the numbers of jax_privacy, TF Privacy and PrivacyGuard,
and enumeration."""

from __future__ import annotations

import math

import pytest
from scipy.stats import binom

from auditor.core.errors import AuditError
from auditor.statistics.games import epsilon_clopper_pearson

# tp of P, fp of N, level, delta, forward, reverse (formulas.md B5): jax_privacy's
# `epsilon_clopper_pearson`, 9 digits.
KNOWN = [
    (500, 500, 0, 500, 0.01, 0.0, 4.541915810, 4.541915810),
    (500, 500, 0, 500, 0.05, 0.0, 4.905594210, 4.905594210),
    (90, 100, 10, 100, 0.05, 0.0, 1.542152395, 1.542152395),
    (90, 100, 10, 100, 0.05, 1e-5, 1.542140255, 1.542140255),
    (50, 1000, 5, 1000, 0.05, 0.0, 1.166399432, 0.026352590),
    (50, 1000, 5, 1000, 0.05, 0.01, 0.854640036, 0.016183396),
    (30, 1000, 0, 1000, 0.05, 1e-5, 1.708150656, 0.016841078),
    (10, 10, 0, 10, 0.05, 0.0, 0.807154865, 0.807154865),
    (700, 1000, 300, 1000, 0.1, 1e-6, 0.732009381, 0.732009381),
    (0, 100, 0, 100, 0.05, 0.0, 0.0, 0.0),
    (100, 100, 100, 100, 0.05, 0.0, 0.0, 0.0),
]


@pytest.mark.parametrize(("tp", "p", "fp", "n", "level", "delta", "forward", "reverse"), KNOWN)
def test_known_answers_of_jax_privacy(
    tp: int, p: int, fp: int, n: int, level: float, delta: float, forward: float, reverse: float
) -> None:
    found = epsilon_clopper_pearson(tp, p - tp, fp, n - fp, delta, level)
    assert found == pytest.approx(max(forward, reverse), abs=2e-9)


def test_tf_privacy_s_audit_of_500_against_500() -> None:
    """TF Privacy's `audit_2020` and the test of its `epsilon_lower_bound`: level 0.01."""
    assert epsilon_clopper_pearson(500, 0, 0, 500, 0.0, 0.01) == pytest.approx(
        4.541915810224092, rel=1e-12
    )


@pytest.mark.parametrize(
    ("counts", "ratios"),
    [
        ((473, 511, 755, 950), (1.01166194, 1.01148934, 1.01167669, 1.01189079)),
        ((1000, 10, 10, 10_000), (589.27335593, 613.58766147, 592.63264572, 568.32659563)),
    ],
)
def test_tf_privacy_s_asymptotic_ratio_bounds_lie_shortly_above(
    counts: tuple[int, int, int, int], ratios: tuple[float, ...]
) -> None:
    """Its RatioBound at 5%: Katz, Bailey, inverse sinh, adjusted log (formulas.md B6). Ours is
    exact, hence lower."""
    found = math.exp(epsilon_clopper_pearson(*counts, 0.0))
    assert 0.8 * min(ratios) < found < min(ratios)


def test_the_bound_errs_at_most_as_often_as_stated() -> None:
    """Randomised response of epsilon 1: over every outcome of 30 and 30 trials."""
    n, right = 30, math.e / (1 + math.e)
    distribution = binom.pmf(range(n + 1), n, right), binom.pmf(range(n + 1), n, 1 - right)
    wrong = sum(
        distribution[0][tp] * distribution[1][fp]
        for tp in range(n + 1)
        for fp in range(n + 1)
        if epsilon_clopper_pearson(tp, n - tp, fp, n - fp, 0.0) > 1
    )
    assert 0.0001 < wrong <= 0.05


@pytest.mark.parametrize("bad", [(0, 0, 1, 2), (1, 2, 0, 0), (-1, 3, 1, 2)])
def test_trials_of_one_kind_are_refused(bad: tuple[int, int, int, int]) -> None:
    with pytest.raises(AuditError, match="with the record and without it"):
        epsilon_clopper_pearson(*bad, 1e-5)
