"""Faults planted in private prediction, on an ensemble whose distributions are given: who is caught, and by whom."""

from __future__ import annotations

import pytest

from auditor.benchmarks.fixed_distributions import fixed_ensemble
from auditor.core.nouns import Secret
from benchmarks.checks.trust.prediction_faults import FAULTS, Detection, audited

HELD = fixed_ensemble((0.145, 0.855), (1.0, 0.0), *[(0.1, 0.9)] * 9)
SECRETS = [Secret("s", (0, 1), (1, 0), 1, True, alias="alias")]
BY_NAME = {fault.name: fault for fault in FAULTS}


def row(name: str, games: int = 4000) -> Detection:
    return audited(BY_NAME[name], HELD, SECRETS, games, epsilon=1.0, seed=0)


@pytest.mark.parametrize("name", [fault.name for fault in FAULTS if fault.sound])
def test_what_is_not_broken_is_not_accused(name: str) -> None:
    found = row(name)
    assert not found.caught and not found.seen and found.bound <= found.exact <= found.claimed < found.best


@pytest.mark.parametrize("name", ["published at N = 1", "no mixing", "not charged"])
def test_games_catch_what_is_broken(name: str) -> None:
    found = row(name)
    assert found.caught and "**caught**" in found.cells[2]


def test_what_one_audit_does_not_see_and_another_does() -> None:
    assert any("not charged" in said for said in row("not charged", 64).seen)
    assert row("shard in eight", 64).exact > 1.0  # by the distributions, what the games are too few to show
    assert not row("one subset", 64).seen and row("one subset", 64).exact <= 1.0  # single draws have their distribution
