"""The memory model of docs/how-to/big-models.md, held against what tensors take."""

from __future__ import annotations

import pytest

from validation.speed import memory

NEAR = {"a live row": 0.001, "a member": 0.001, "a tuned prompt": 0.001, "a batch of tuning": 0.1}


def test_what_is_predicted_is_held() -> None:
    rows = list(memory.table(memory.SMALL[1:2]))
    assert [what for _, what, _, _ in rows] == list(NEAR)
    for _, what, predicted, held in rows:
        assert held == pytest.approx(predicted, rel=NEAR[what]), what
