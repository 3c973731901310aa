"""Bounds err as often as they say, by enumeration; each formula against a slow twin."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import minimize_scalar
from scipy.stats import binom, binomtest, multinomial

from auditor.core.arrays import Floats
from auditor.core.result import Measurement
from auditor.statistics import compare
from auditor.statistics.bounds import (
    BoundedNumber,
    bound_binomial_share,
    bound_discordant_pairs,
    bound_recorded_interval,
    bound_resampled_number,
    compute_paired_p_value,
    compute_tango_statistic,
    count_discordant_pairs,
)
from auditor.statistics.compare import (
    resample_paired_means,
    resample_paired_recall,
)
from auditor.statistics.intervals import clopper_pearson


def distribution(delta: float, discordant: float) -> list[float]:
    """Probabilities of a win, a loss and neither."""
    return [max(0.0, (discordant + delta) / 2), max(0.0, (discordant - delta) / 2), 1 - discordant]


def test_paired_bounds_err_at_most_as_often_as_stated() -> None:
    """Over all outcomes of 12 pairs, at every difference and discordance: no simulation, no
    noise."""
    n = 12
    outcomes = np.array([(b, c, n - b - c) for b in range(n + 1) for c in range(n + 1 - b)])
    low = np.array([bound_discordant_pairs(int(b), int(c), n).low(0.05) for b, c, _ in outcomes])
    high = np.array([bound_discordant_pairs(int(b), int(c), n).high(0.05) for b, c, _ in outcomes])
    worst = 0.0
    for delta in (-0.6, -0.3, -0.1, 0.0, 0.05, 0.2, 0.4):
        for discordant in np.linspace(abs(delta), 1, 30):
            p = multinomial.pmf(outcomes, n, distribution(delta, discordant))
            wrong = p[low > delta + 1e-9].sum(), p[high < delta - 1e-9].sum()
            assert max(wrong) <= 0.05, (delta, discordant)
            worst = max(worst, *wrong)
    assert worst > 0.03  # exact, not merely careful


def test_the_statistic_is_the_score_of_the_constrained_likelihood() -> None:
    """The variance of wins - losses at the most likely distribution with that difference, found by
    a search."""
    n, wins, losses, delta = 40, 9, 3, 0.08

    def unlikelihood(lost: float) -> float:
        return -multinomial.logpmf(
            [wins, losses, n - wins - losses], n, [lost + delta, lost, 1 - 2 * lost - delta]
        )

    lost = minimize_scalar(unlikelihood, bounds=(1e-9, (1 - delta) / 2 - 1e-9), method="bounded").x
    expected = (wins - losses - n * delta) / np.sqrt(n * (2 * lost + delta - delta**2))
    assert compute_tango_statistic(wins, losses, n, delta) == pytest.approx(expected, abs=1e-4)
    # McNemar's
    assert compute_tango_statistic(9, 3, 40, 0.0) == pytest.approx((9 - 3) / np.sqrt(9 + 3))
    assert compute_tango_statistic(0, 0, 40, 0.0) == 0


@pytest.mark.parametrize(
    ("wins", "losses", "n", "delta"),
    [(5, 1, 15, 0.0), (6, 2, 15, 0.1), (1, 3, 14, -0.3), (120, 96, 240, 0.0), (1, 238, 240, -0.98)],
)
def test_the_p_value_is_the_largest_tail(wins: int, losses: int, n: int, delta: float) -> None:
    outcomes = np.array([(b, c, n - b - c) for b in range(n + 1) for c in range(n + 1 - b)])
    seen = compute_tango_statistic(wins, losses, n, delta)
    extreme = compute_tango_statistic(outcomes[:, 0], outcomes[:, 1], n, delta) >= seen - 1e-9
    low, high = clopper_pearson(wins + losses, n, 1 - 1e-4)
    grid = np.linspace(max(low, abs(delta)), high, 25)
    slow = max(
        multinomial.pmf(outcomes[extreme], n, distribution(delta, psi)).sum() for psi in grid
    )
    assert compute_paired_p_value(wins, losses, n, delta) == pytest.approx(slow + 1e-4, abs=1e-9)


def test_equal_answers_leave_open_what_so_few_secrets_can() -> None:
    assert bound_discordant_pairs(0, 0, 59).high(0.05) == pytest.approx(
        1 - 0.05 ** (1 / 59), abs=2e-3
    )
    assert bound_discordant_pairs(0, 0, 59).low(0.05) == -bound_discordant_pairs(0, 0, 59).high(
        0.05
    )
    assert (
        bound_discordant_pairs(8, 0, 100).low(0.05)
        > 0
        > bound_discordant_pairs(0, 8, 100).high(0.05)
    )


@pytest.mark.parametrize(
    ("wins", "losses", "mcnemar", "refuted"),
    [
        (1, 0, 0.500, False),
        (4, 0, 0.063, True),  # sharper: it does not condition on four answers having changed
        (5, 0, 0.031, True),
        (9, 2, 0.033, True),
        (10, 2, 0.019, True),
        (30, 20, 0.101, False),
    ],
)
def test_no_change_is_refuted_about_where_mcnemar_refutes_it(
    wins: int, losses: int, mcnemar: float, refuted: bool
) -> None:
    """The unconditional test refutes where exact McNemar does, at times more, and not where that is
    far from it."""
    p = binomtest(wins, wins + losses, alternative="greater").pvalue
    assert p == pytest.approx(mcnemar, abs=6e-4)
    assert (bound_discordant_pairs(wins, losses, 200).low(0.05) > 0) == refuted


def test_exact_counts_and_recorded_intervals() -> None:
    assert bound_binomial_share(0, 59).high(0.05) < 0.05 < bound_binomial_share(0, 58).high(0.05)
    assert binom.sf(29, 100, bound_binomial_share(30, 100).low(0.05)) == pytest.approx(0.05)
    recorded = bound_recorded_interval(Measurement("x", 0.10, 0.06, 0.18, 50))
    assert (recorded.low(0.05), recorded.high(0.05)) == (0.06, pytest.approx(0.18))
    assert recorded.low(0.005) == pytest.approx(0.10 - 0.04 * 2.5758 / 1.9600, abs=1e-4)
    assert np.isnan(bound_recorded_interval(Measurement("x", 0.1, np.nan, 0.2, 50)).low(0.05))


def test_a_ranking_is_resampled_with_both_runs_thresholds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a loop that repeats secrets one by one."""
    rng = np.random.default_rng(0)
    n, errors = 60, 10
    runs = [(rng.random(n) < share, rng.normal(size=n)) for share in (0.5, 0.3)]

    def recall(hit: np.ndarray, score: np.ndarray, chosen: np.ndarray) -> float:
        wrong, right = 0, 0
        for i in sorted(chosen, key=lambda i: (-score[i], hit[i])):
            right += bool(hit[i]) and wrong < errors
            wrong += not hit[i]
        return right / len(chosen)

    resampled: list[Floats] = []

    def kept(value: float, n: int, draws: Floats, floor: BoundedNumber) -> BoundedNumber:
        resampled.append(draws)
        return bound_resampled_number(value, n, draws, floor)

    monkeypatch.setattr(compare, "bound_resampled_number", kept)
    seen = resample_paired_recall(*runs, errors)
    (draws,) = resampled
    assert seen.value == pytest.approx(
        recall(*runs[0], np.arange(n)) - recall(*runs[1], np.arange(n))
    )
    slow = []
    for _ in range(400):
        chosen = rng.integers(n, size=n)
        slow.append(recall(*runs[0], chosen) - recall(*runs[1], chosen))
    assert np.mean(draws) == pytest.approx(np.mean(slow), abs=0.02)
    assert np.std(draws) == pytest.approx(np.std(slow), rel=0.15)
    assert seen.low(0.05) <= np.quantile(draws, 0.05) and seen.high(0.05) >= np.quantile(
        draws, 0.95
    )


def test_means_are_never_surer_than_a_missed_secret_allows() -> None:
    nothing = resample_paired_means(np.zeros(59), np.zeros(59))
    assert nothing.high(0.05) == pytest.approx(1 - 0.05 ** (1 / 59))
    rng = np.random.default_rng(0)
    new, base = rng.random(400), rng.random(400)
    spread = (new - base).std() / 20
    assert resample_paired_means(new, base).high(0.05) == pytest.approx(
        (new - base).mean() + 1.645 * spread, abs=0.2 * spread
    )


def test_shares_are_counted_by_secret() -> None:
    new, base = np.array([True, True, False, True]), np.array([True, False, True, False])
    counted, expected = count_discordant_pairs(new, base), bound_discordant_pairs(2, 1, 4)
    assert (counted.value, counted.n) == (0.25, 4)
    assert (counted.low(0.05), counted.high(0.05)) == (expected.low(0.05), expected.high(0.05))


@pytest.mark.parametrize(("wins", "losses", "p"), [(0, 5, 1.0), (1, 4, 0.0), (0, 4, 0.0)])
def test_only_losses_alone_leave_a_difference_of_minus_one(
    wins: int, losses: int, p: float
) -> None:
    assert compute_paired_p_value(wins, losses, 5, -1.0) == p


def test_a_difference_of_probabilities_is_at_most_one() -> None:
    """It was −103.3 points: bounds for secrets that were not seen came on top of −100."""
    certain, forgotten = np.full(20, 0.999), np.full(20, 1e-4)
    m = compare.measure_mean_difference("p", "probability", forgotten, certain)
    assert m.low == -1 and m.value < m.high < 0
    nats = compare.measure_mean_difference("loss", "nats", forgotten, certain)
    assert nats.low < -1
