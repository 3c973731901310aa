"""Known answers of formulas.md B6, and what the estimates promise."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from auditor.conclusions.secret_details import compute_survival_function
from auditor.statistics import exposure

SIXTEEN = np.arange(1, 17.0)
BITS = math.log2(10**6)


@pytest.mark.parametrize(
    ("nll", "bits"), [(0, 4), (0.1, 4), (3.5, 2), (20, -0.0874628412503391), (4, 1.67807190511264)]
)
def test_sampled_exposure_is_that_of_tf_privacy(nll: float, bits: float) -> None:
    assert exposure.estimate_sampled_exposure(nll, SIXTEEN) == pytest.approx(bits, abs=1e-12)


@pytest.mark.parametrize(
    ("distribution", "nll", "bits"),
    [
        ((4, 0, 1), -2, 58.85244658),
        ((4, 0, 1), -1, 20.22145044),
        ((4, 0, 1), 0, 3.680768124),
        ((4, 0, 1), 1, 0.55069682),
        ((4, 0, 1), 2, 0.06718329613),
        ((0, 10, 2), 4, 9.532933851),
        ((0, 10, 2), 6, 5.457981277),
        ((0, 10, 2), 10, 1.0),
        ((-3, 5, 1.5), 0.5, 8.532933851),
        ((-3, 5, 1.5), 2, 4.457981277),
        ((-3, 5, 1.5), 5, 0.1558817502),
        ((2, 100, 7), 79, 40.70050885),
        ((2, 100, 7), 86, 21.60107073),
        ((2, 100, 7), 93, 9.184315501),
        ((2, 100, 7), 100, 2.760395509),
    ],
)
def test_tails_of_the_skew_normal(
    distribution: tuple[float, float, float], nll: float, bits: float
) -> None:
    assert exposure.SkewNormal(distribution, 1.0).extrapolate_exposure(
        nll, math.inf
    ) == pytest.approx(bits, rel=1e-7)


def test_a_fit_says_the_same_twice_and_is_capped_and_checked() -> None:
    references = np.random.default_rng(0).normal(24, 3, 150)
    fitted, again = exposure.fit_skew_normal(references), exposure.fit_skew_normal(references)
    assert fitted == again and fitted.fit_p > 0.05
    assert fitted.extrapolate_exposure(18.0, BITS) == pytest.approx(
        -math.log2(0.5 * math.erfc(2 / math.sqrt(2))), abs=1.0
    )
    assert fitted.extrapolate_exposure(-200.0, BITS) == BITS
    assert exposure.fit_skew_normal(np.repeat([1.0, 50.0], 60)).fit_p < 0.01
    assert exposure.fit_skew_normal(np.full(20, 3.0)).extrapolate_exposure(3.0, BITS) == 0


def test_a_fit_that_is_ten_bits_off_in_the_tail_is_not_taken_for_one() -> None:
    """Logistic references: at 20 bits the fit says 30 or more. Kolmogorov and Smirnov's own p-value
    is 0.29."""
    for seed in (1, 2):
        references = stats.logistic(24, 2).rvs(1000, random_state=seed)
        fitted = exposure.fit_skew_normal(references)
        assert fitted.extrapolate_exposure(stats.logistic(24, 2).ppf(2**-20), 200.0) > 30
        assert fitted.fit_p < 0.05


def test_references_that_are_skew_normal_are_seldom_refuted() -> None:
    noise = np.random.default_rng(0)
    samples = (
        stats.skewnorm(shape, 24, 3).rvs(100, random_state=i)
        for shape in (0, -3)
        for i in range(15)
    )
    # 1.5 expected
    assert (
        sum(exposure.compute_skew_normal_p_value(sample, noise) < 0.05 for sample in samples) <= 4
    )


def test_exposure_of_a_rank() -> None:
    assert exposure.compute_exposure(1, BITS) == pytest.approx(19.931569)
    assert exposure.compute_exposure(10**6, BITS) == pytest.approx(0, abs=1e-12)


def test_the_null_distribution_bounds_a_canary_that_was_never_inserted() -> None:
    """Its rank is uniform: P(exposure >= e) <= 2^-e at every e, for ranks and for Monte-Carlo
    p-values."""
    noise = np.random.default_rng(0)
    bits = np.array(
        [exposure.compute_exposure(rank, 10.0) for rank in noise.integers(1, 1025, size=20_000)]
    )
    p_values = np.array(
        [
            exposure.compute_canary_p_value(noise.normal(), noise.normal(size=19))
            for _ in range(20_000)
        ]
    )
    for e in (0.5, 1, 2, 4.3):
        slack = 4 * math.sqrt(2.0**-e / 20_000)
        assert (bits >= e).mean() <= 2.0**-e + slack and (
            p_values <= 2.0**-e
        ).mean() <= 2.0**-e + slack


@pytest.mark.parametrize("n", [6, 30])
def test_of_models_that_learned_nothing_at_most_one_in_20_leaves_the_band(n: int) -> None:
    """The null distribution alone, without a band around it, is crossed by all but a few of them:
    it says nothing."""
    ranks = np.random.default_rng(n).integers(1, 10**6 + 1, size=(2000, n))
    tails = [
        compute_survival_function([exposure.compute_exposure(rank, BITS) for rank in canaries])
        for canaries in ranks
    ]
    assert np.mean([any(y > 2.0**-x for x, y in points) for points in tails]) > 0.9
    assert (
        np.mean(
            [
                any(y > exposure.bound_null_exposure_tail(x, n) for x, y in points)
                for points in tails
            ]
        )
        <= 0.05
    )


def test_a_model_that_learned_a_third_leaves_the_band() -> None:
    ranks = [*[1] * 10, *np.random.default_rng(0).integers(1, 10**6 + 1, size=20)]
    assert any(
        y > exposure.bound_null_exposure_tail(x, 30)
        for x, y in compute_survival_function(
            [exposure.compute_exposure(rank, BITS) for rank in ranks]
        )
    )


def weighted(n: int, uniform: int, size: int, seed: int, p: np.ndarray) -> exposure.WeightedDraws:
    """Draws from q = p, the model's own distribution over a space of numbers, and uniform ones."""
    noise = np.random.default_rng(seed)
    drawn = np.concatenate(
        [noise.choice(size, size=n, p=p / p.sum()), noise.integers(size, size=uniform)]
    )
    nll = -np.log(p[drawn])
    counts = np.ones(len(drawn), dtype=bool)
    return exposure.WeightedDraws(
        tuple(map(str, drawn)), nll, np.log(p[drawn] / p.sum()), counts, n, size
    )


@pytest.mark.parametrize("place", [0, 3, 60, 450])
def test_estimated_ranks_are_unbiased_and_their_intervals_cover(place: int) -> None:
    size = 500
    p = 0.8 * np.sort(np.random.default_rng(1).lognormal(sigma=3, size=size))[::-1]
    p /= p.sum() / 0.8
    found = [
        exposure.estimate_canary_rank(
            -math.log(p[place]) + 1e-9, str(place), weighted(300, 60, size, s, p)
        )
        for s in range(24)
    ]
    ranks = np.array([estimate.rank for estimate in found])
    error = max(ranks.std() / math.sqrt(len(ranks)), 1e-9)
    assert abs(ranks.mean() - (place + 1)) < 4.5 * error + 1e-6
    covered = sum(estimate.low - 1e-9 <= place + 1 <= estimate.high + 1e-9 for estimate in found)
    assert covered >= 20
    assert all(
        e.low <= e.rank <= e.high <= exposure.rank_upper_bound(-math.log(p[place]), size) + 1e-6
        for e in found
    )


@pytest.mark.parametrize(("drawn", "uniform"), [(200, 0), (0, 200)])
def test_either_kind_of_draw_does_alone(drawn: int, uniform: int) -> None:
    p = np.full(100, 0.01)
    estimate = exposure.estimate_canary_rank(
        -math.log(0.01) + 1e-9, "5", weighted(drawn, uniform, 100, 0, p)
    )
    assert estimate.low <= 100 <= estimate.high + 1e-6 and estimate.rank == pytest.approx(
        100, rel=0.05
    )


def test_no_draw_below_leaves_open_what_so_many_draws_can_miss() -> None:
    """Clopper-Pearson's bound for none of 200, times the most that a draw can weigh: n / drawn
    e^nll."""
    draws = exposure.WeightedDraws(
        tuple(map(str, range(200))),
        np.full(200, 5.0),
        np.full(200, -5.0),
        np.ones(200, dtype=bool),
        100,
        10**6,
    )
    estimate = exposure.estimate_canary_rank(3.0, "canary", draws)
    assert estimate.rank == estimate.low == 1
    assert estimate.high == pytest.approx(1 + (1 - 0.025 ** (1 / 200)) * 2 * math.exp(3.0))
