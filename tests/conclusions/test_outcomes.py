"""Results by secret of several runs, aligned: the numbers of a plain loop."""

from __future__ import annotations

import numpy as np
import pytest

from auditor.conclusions.outcomes import ValuesBySecret, align_secret_values
from auditor.core.secret_table import STRINGS


def build_shuffled_results(seed: int, secrets: range, name: str = "recall") -> ValuesBySecret:
    rng = np.random.default_rng(seed)
    places = rng.permutation(np.array(secrets))
    ids = np.array([f"row-{place}" for place in places], STRINGS)
    repeats = tuple((places % 3).tolist())
    return ValuesBySecret(ids, places % 4 > 0, repeats, {name: rng.random(len(places))})


@pytest.mark.parametrize(("members", "count"), [(True, None), (False, None), (True, 2)])
def test_results_in_other_orders_are_aligned_as_by_a_plain_loop(
    members: bool, count: int | None
) -> None:
    results = [build_shuffled_results(seed, range(seed, 40 + 9 * seed)) for seed in (1, 2, 3)]
    columns = [result.values_by_secret("recall", members, count) for result in results]
    shared = sorted(columns[0].keys() & columns[1].keys() & columns[2].keys())
    ids, values = align_secret_values(results, "recall", members, count)
    assert len(shared) > 5 and ids.tolist() == shared
    assert values.tolist() == [[column[id] for id in shared] for column in columns]


def test_a_metric_that_a_result_lacks_is_aligned_for_no_secret() -> None:
    results = [build_shuffled_results(1, range(9)), build_shuffled_results(1, range(9), "other")]
    ids, values = align_secret_values(results, "recall", True)
    assert not len(ids) and values.shape == (2, 0)
