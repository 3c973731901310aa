"""Results by secret of several runs, aligned: the numbers of a plain loop."""

from __future__ import annotations

import numpy as np
import pytest

from auditor.conclusions.outcomes import (
    ValuesBySecret,
    align_secret_values,
    compare_paired_metric,
)
from auditor.core.secret_table import STRINGS
from auditor.statistics.adjusted_auc import estimate_adjusted_auc
from auditor.statistics.metrics import ADJUSTED_AUC


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


def test_few_non_members_make_a_change_of_the_adjusted_auc_uncertain() -> None:
    """Equal models with 60 non-members (members alone told 29% of them apart)."""
    rng = np.random.default_rng(0)
    member = np.arange(1060) < 1000
    ids = np.array([f"s{i:05d}" for i in range(1060)], STRINGS)
    weights = np.where(member, 1 / 1000, 1 / 60)
    n_worse = 0
    for _ in range(100):
        results = []
        for _ in range(2):
            scores = rng.normal(size=1060) + 0.74 * member
            _, parts = estimate_adjusted_auc(ADJUSTED_AUC, scores, member, weights, "", 1.0)
            results.append(ValuesBySecret(ids, member, (None,) * 1060, {ADJUSTED_AUC: parts}))
        change = compare_paired_metric(ADJUSTED_AUC, None, *results)
        assert not isinstance(change, str)
        n_worse += change.low(0.05) > 0
    assert n_worse <= 14
