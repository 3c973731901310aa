"""No test depends on what ran before it: the global generators start alike for every fixture and
every test."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch


def drawn() -> tuple[float, float, float]:
    return random.random(), float(np.random.random()), float(torch.rand(()))


@pytest.fixture(scope="module")
def of_the_module() -> tuple[float, float, float]:
    return drawn()


@pytest.mark.parametrize("time", [1, 2])
def test_the_global_generators_start_alike(
    of_the_module: tuple[float, float, float], time: int
) -> None:
    assert drawn() == of_the_module
    drawn()
