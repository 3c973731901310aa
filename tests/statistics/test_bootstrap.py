"""The bootstrap: the same resamples in any blocks, and the numbers of a plain loop."""

from __future__ import annotations

import numpy as np
import pytest

from auditor.core.streams import generator
from auditor.statistics import bootstrap


@pytest.mark.parametrize("at_once", [1, 7, 100, 101])
def test_blocks_bound_the_memory_and_change_nothing(at_once: int) -> None:
    blocks = list(bootstrap.blocks(13, "blocks", 101, at_once))
    assert max(map(len, blocks)) == at_once and sum(map(len, blocks)) == 101
    whole = generator("bootstrap", "blocks", 13).multinomial(13, np.full(13, 1 / 13), size=101)
    assert np.array_equal(np.concatenate(blocks), whole) and (whole.sum(1) == 13).all()


def test_the_interval_of_a_mean_covers_it_as_often_as_it_says() -> None:
    rng, covered = np.random.default_rng(0), 0
    for i in range(200):
        values = rng.normal(size=80)
        low, high = bootstrap.interval(bootstrap.resampled(80, lambda draws, v=values: draws @ v / 80, f"mean {i}"))
        covered += low <= 0 <= high
    assert 0.90 <= covered / 200 <= 0.98


def test_places_are_drawn_with_replacement() -> None:
    found = list(bootstrap.places(20, "places", 50))
    assert len(found) == 50 and all(len(at) == 20 and at.min() >= 0 and at.max() < 20 for at in found)
    assert np.mean([len(set(at.tolist())) for at in found]) == pytest.approx(20 * (1 - (1 - 1 / 20) ** 20), abs=0.6)


def test_many_secrets_take_no_more_memory_than_few() -> None:
    first = next(bootstrap.blocks(300_000, "many"))
    assert len(first) > 1 and first.nbytes <= 2**24
    assert len(next(bootstrap.blocks(300, "few"))) == bootstrap.RESAMPLES
