"""What is left of records that were to be forgotten: each difference by hand, and where no share of
it can be told."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from auditor.core.result import GroupRecall
from auditor.statistics.unlearning import measure_unlearning_group

Floats = NDArray[np.float64]


def of(name: str, **columns: list[float]) -> GroupRecall:
    return measure_unlearning_group(
        "attack", name, "forgotten", {model: np.array(values) for model, values in columns.items()}
    )


def values(found: GroupRecall) -> dict[str, float]:
    return {name: one.value for name, one in found.changes.items()}


def test_shares_and_their_differences_by_hand() -> None:
    """Ten secrets: 8 said before, 3 after, 4 once relearned; 2 by a model that never saw them, 3
    when it learns."""
    found = of(
        "recall",
        before=[1.0] * 8 + [0.0] * 2,
        after=[1.0] * 3 + [0.0] * 7,
        relearned=[1.0] * 4 + [0.0] * 6,
        retrained=[0.0] * 8 + [1.0] * 2,
        retrained_relearned=[0.0] * 7 + [1.0] * 3,
    )
    assert {model: one.value for model, one in found.values.items()} == {
        "before": 0.8,
        "after": 0.3,
        "relearned": 0.4,
        "retrained": 0.2,
        "retrained_relearned": 0.3,
    }
    changes = values(found)
    assert changes.pop("share_back") == pytest.approx(1 / 5)
    assert changes == pytest.approx(
        {"unlearned": -0.5, "left": 0.1, "relearned": 0.1, "came_back": 0.0}
    )
    assert all(one.n == 10 and one.low <= one.value <= one.high for one in found.changes.values())


def test_only_what_there_are_models_for_is_said() -> None:
    some = [0.5, 0.25] * 6
    assert set(of("extraction_probability", before=some, after=some).changes) == {"unlearned"}
    assert set(of("extraction_probability", after=some, retrained=some).changes) == {"left"}
    assert set(of("extraction_probability", after=some, relearned=some).changes) == {"relearned"}


def test_a_share_that_came_back_is_of_what_was_taken_on_the_whole() -> None:
    taken = np.linspace(0.1, 0.6, 12)
    found = of(
        "extraction_probability",
        before=(0.2 + taken).tolist(),
        after=[0.2] * 12,
        relearned=(0.2 + taken / 4).tolist(),
    )
    back = found.changes["share_back"]
    # of each the same part
    assert (back.value, back.low, back.high) == pytest.approx((0.25, 0.25, 0.25))
    assert (back.n, back.unit) == (12, "share")
    assert values(found)["unlearned"] == pytest.approx(-taken.mean())


@pytest.mark.parametrize(
    ("before", "after", "relearned"),
    [
        ([0.9, 0.8, 0.7] * 3, [0.1] * 9, [0.4, 0.5, 0.3] * 3),  # too few to resample
        ([0.1, 0.2] * 6, [0.1, 0.2] * 6, [0.3, 0.5] * 6),  # nothing was taken
        ([0.1, 0.2] * 6, [0.4, 0.2] * 6, [0.3, 0.5] * 6),  # less than nothing
        ([0.9, 0.8] * 6, [0.1, 0.2] * 6, [0.1, 0.2] * 6),  # nothing came back
        (
            [0.9] + [0.1] * 11,
            [0.1] * 12,
            [0.5, 0.2] * 6,
        ),  # a resample without the first holds nothing that was taken
    ],
)
def test_no_share_where_nobody_could_say_how_sure_it_is(
    before: list[float], after: list[float], relearned: list[float]
) -> None:
    found = of("extraction_probability", before=before, after=after, relearned=relearned)
    assert set(found.changes) == {"unlearned", "relearned"}
