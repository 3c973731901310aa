"""The bootstrap: the same resamples in any blocks, and the numbers of a plain loop."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from scipy.stats import ks_2samp, skew
from scipy.stats import t as student

from auditor.core.secret_randomness import make_keyed_generator
from auditor.statistics import bootstrap


@pytest.mark.parametrize("at_once", [1, 7, 100, 101])
def test_blocks_bound_the_memory_and_change_nothing(at_once: int) -> None:
    blocks = list(bootstrap.draw_resample_blocks(13, "blocks", 101, at_once))
    assert max(map(len, blocks)) == at_once and sum(map(len, blocks)) == 101
    whole = make_keyed_generator("bootstrap", "blocks", 13).multinomial(
        13, np.full(13, 1 / 13), size=101
    )
    assert np.array_equal(np.concatenate(blocks), whole) and (whole.sum(1) == 13).all()


@pytest.mark.parametrize(("n", "digits"), [(80, 9), (4000, 0)])  # counting items, and values
def test_the_interval_of_a_mean_covers_it_as_often_as_it_says(n: int, digits: int) -> None:
    rng, covered = np.random.default_rng(0), 0
    for i in range(200):
        values = rng.normal(size=n).round(digits)
        low, high = bootstrap.compute_percentile_interval(
            bootstrap.compute_resampled_means(values, f"mean {i}")
        )
        covered += low <= 0 <= high
    assert 0.90 <= covered / 200 <= 0.98


def test_weights_are_uniform_on_the_simplex() -> None:
    values = np.array([0.0, 0.25, 1.0])
    found = bootstrap.compute_resampled_statistic(
        3, lambda weights: weights @ values, "weights", 4000, bootstrap.draw_dirichlet_weights
    )
    assert found.shape == (4000,) and found.min() > 0 and found.max() < 1
    assert found.mean() == pytest.approx(values.mean(), abs=0.01)
    # of Dirichlet(1, 1, 1): 1 / (n + 1)
    assert found.var() == pytest.approx(values.var() / 4, rel=0.05)


def test_many_secrets_take_no_more_memory_than_few() -> None:
    first = next(bootstrap.draw_resample_blocks(300_000, "many"))
    assert len(first) > 1 and first.nbytes <= 2**24
    assert len(next(bootstrap.draw_resample_blocks(300, "few"))) == bootstrap.RESAMPLES


def test_items_in_blocks_are_drawn_as_by_a_plain_loop() -> None:
    n = 150_000
    rng, trend = np.random.default_rng(0), np.arange(n) / n
    plain = [trend[rng.integers(n, size=n)].mean() for _ in range(300)]
    found = bootstrap.compute_resampled_means(trend, "trend", 300)
    assert ks_2samp(found, plain).pvalue > 0.01
    assert found.std() == pytest.approx(trend.std() / n**0.5, rel=0.15)
    counts = next(bootstrap.draw_resample_blocks(n, "counts"))
    assert (counts.sum(1) == n).all()
    for block in np.split(counts[0], range(0, n, 2**13)[1:]):
        assert (block == 0).mean() == pytest.approx(np.exp(-1), abs=0.02)
        assert block.var() == pytest.approx(1, abs=0.1)


def log_ratio(each: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return np.log(each[:, 0] / each[:, 1]), np.stack([1 / each[:, 0], -1 / each[:, 1]], axis=1)


def test_a_number_of_rates_by_a_plain_loop() -> None:
    """Each end the farther of Student's t and the bootstrap-t, here of the log of a ratio of two
    rates."""
    rng, n = np.random.default_rng(3), 30
    counts = rng.integers(5, 50, n).astype(float)
    sums = counts * rng.exponential(2, (2, n))

    def at(places: np.ndarray) -> tuple[float, float]:
        one, other = sums[0, places], sums[1, places]
        moves = (one / one.sum() - other / other.sum()) * n  # of the log: the counts cancel
        return float(np.log(one.sum() / other.sum())), float(
            np.sqrt((moves**2).sum() / n / (n - 1))
        )

    value, error = at(np.arange(n))
    drawn = [
        at(np.repeat(np.arange(n), draw))
        for draw in next(bootstrap.draw_resample_blocks(n, "loop", 1000))
    ]
    below, above = np.quantile([(x - value) / e for x, e in drawn], [0.025, 0.975])
    reach = student.ppf(0.975, n - 1)
    ends = value - max(above, reach) * error, value - min(below, -reach) * error
    assert bootstrap.estimate_rate_statistic(
        sums, counts[None], log_ratio, "loop"
    ) == pytest.approx((value, *ends))


def test_one_text_says_nothing_and_few_say_little() -> None:
    def same(each: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return each[:, 0], np.ones_like(each)

    assert bootstrap.estimate_rate_statistic([[6.0]], [[3.0]], same, "few") == (
        2.0,
        -np.inf,
        np.inf,
    )
    value, low, high = bootstrap.estimate_rate_statistic([[6.0, 9.0]], [[3.0, 3.0]], same, "few")
    # as of two numbers 1 apart
    assert high - value == value - low == pytest.approx(student.ppf(0.975, 1) / 2)
    assert bootstrap.estimate_rate_statistic([[6.0, 6.0]], [[3.0, 3.0]], same, "few") == (
        2.0,
        2.0,
        2.0,
    )
    assert bootstrap.estimate_rate_statistic([[6.0] * 9 + [np.inf]], [[3.0] * 10], same, "few") == (
        np.inf,
        2.0,
        np.inf,
    )


@pytest.mark.parametrize("draw", [bootstrap.draw_resample_counts, bootstrap.draw_dirichlet_weights])
def test_many_items_of_few_values_have_the_means_of_a_plain_loop(
    draw: Callable[..., np.ndarray],
) -> None:
    """Of skewed values, so that no normal distribution would do."""
    values = np.repeat([0.0, 0.5, 1.0], [4000, 900, 3])
    found = bootstrap.compute_resampled_means(values, "few values", 4000, draw)
    items = draw(np.random.default_rng(0), len(values), 4000)
    plain = items @ values / items.sum(1)
    assert ks_2samp(found, plain).pvalue > 0.01
    assert found.std() == pytest.approx(plain.std(), rel=0.05)
    assert skew(found) == pytest.approx(skew(plain), abs=0.15)


def test_the_mean_of_many_equal_items_needs_no_draws() -> None:
    draws = 0

    def draw(noise: np.random.Generator, n: int, size: int, copies: np.ndarray) -> np.ndarray:
        nonlocal draws
        draws += n * size
        return bootstrap.draw_resample_counts(noise, n, size, copies)

    assert (
        bootstrap.compute_resampled_means(np.full(10**6, 0.25), "equal", 50, draw) == 0.25
    ).all()
    assert draws == 50
