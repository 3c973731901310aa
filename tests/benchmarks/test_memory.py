"""The memory model of docs/big-models.md, held against what tensors take."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

_PATH = Path(__file__).parents[2] / "benchmarks" / "speed" / "memory.py"
_SPEC = importlib.util.spec_from_file_location("memory_benchmark", _PATH)
assert _SPEC is not None and _SPEC.loader is not None
memory = importlib.util.module_from_spec(_SPEC)
sys.modules[_SPEC.name] = memory
_SPEC.loader.exec_module(memory)

NEAR = {"a live row": 0.001, "a member": 0.001, "a tuned prompt": 0.001, "a batch of tuning": 0.1}


def test_what_is_predicted_is_held() -> None:
    rows = list(memory.table(memory.SMALL[1:2]))
    assert [what for _, what, _, _ in rows] == list(NEAR)
    for _, what, predicted, held in rows:
        assert held == pytest.approx(predicted, rel=NEAR[what]), what
