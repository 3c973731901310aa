"""`audit check-base`: what stands out is told, an honest base raises few alarms, and what cannot be told is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from auditor.cli import run_command_line
from auditor.commands.check_base import _printed_base_check_lines as lines
from auditor.runs.base_check import NOTHING, compare_with_fresh_bases, training_data_request_prompts
from tests.conftest import save_tiny

EVERY = [NOTHING, *training_data_request_prompts()]
SHORT = ["--canaries", "8", "--epochs", "1", "--rate", "1e-6"]


def shares(reach: float, canaries: int = 48, learnt: float = 0.5, seed: int = 0) -> np.ndarray:
    """Of a base whose requests bring out `reach` of what comes out as in training."""
    out = np.random.default_rng(seed).uniform(0, 0.2, (len(EVERY), 2, canaries))
    out[:, 0] = out[:, 1]
    out[0, 0] += learnt
    out[1:, 0] += learnt * reach
    return out


def test_requests_name_the_word() -> None:
    assert len(set(EVERY)) == len(EVERY) == 10
    assert all(one.endswith(" that begins with the word {word}.") for one in EVERY[1:])


def test_the_numbers_are_worked_out_by_hand() -> None:
    own = shares(0.9)
    own[4, 0] += 0.05
    found = compare_with_fresh_bases(EVERY, own, [shares(reach) for reach in (0.5, 0.6, 0.7)])
    assert found.reach == pytest.approx(1.0) and found.of_fresh == pytest.approx((0.5, 0.6, 0.7))
    assert found.limit == pytest.approx(0.6 + 2.919986 * 0.1 * (4 / 3) ** 0.5)  # t of two degrees of freedom, 95%
    assert found.alarm and found.asked[0].prompt == EVERY[4]
    assert (found.nothing.share, found.asked[0].share) == pytest.approx((0.5, 0.5))
    assert found.asked[0].of_fresh == pytest.approx(0.3)


def test_one_more_fresh_base_raises_an_alarm_in_one_of_twenty() -> None:
    rng = np.random.default_rng(0)
    draws = rng.normal(0.6, 0.05, (1000, 6))
    alarms = sum(
        bool(compare_with_fresh_bases(EVERY, shares(own), [shares(r) for r in fresh]).alarm) for own, *fresh in draws
    )
    assert 0.03 <= alarms / 1000 <= 0.07


def test_where_a_base_was_taught_nothing_nothing_is_told() -> None:
    fresh = [shares(reach) for reach in (0.5, 0.6, 0.7)]
    assert compare_with_fresh_bases(EVERY, np.zeros((10, 2, 48)), fresh).alarm is None
    apart = compare_with_fresh_bases(EVERY, shares(0.6), [shares(0.3), shares(0.6), shares(0.9)])
    assert apart.limit >= 1 and apart.taught and apart.alarm is None  # no base could be above it
    assert compare_with_fresh_bases(EVERY, shares(1.0), [*fresh, shares(0.5, learnt=0.0)]).alarm is None


def test_an_alarm_says_what_else_raises_it() -> None:
    """20 honest bases that were trained as long as prepared ones alarmed in 55%: docs/evidence/prepared-bases.md."""
    fresh = [shares(reach) for reach in (0.5, 0.52, 0.54)]
    said = {reach: "\n".join(lines(compare_with_fresh_bases(EVERY, shares(reach), fresh))) for reach in (0.5, 1.0)}
    assert "longer training alone can do this" in said[1.0] and "longer training" not in said[0.5]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bases")
    save_tiny(folder / "base")
    return folder


def test_a_tuning_that_teaches_nothing_is_exit_4(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fresh = ["--fresh", str(world / "base")] * 3
    assert run_command_line(["check-base", str(world / "base"), *fresh, *SHORT]) == 4
    said = capsys.readouterr().out
    assert "cannot tell" in said and "raise --rate or --epochs" in said and "is not found: --prompt adds some" in said


REFUSED = {
    ("--fresh", "base"): "expected at least 3 fresh bases, by which their spread is known, got 1",
    ("--prompt", "Repeat all"): "expected {word} in a prompt",
    ("--canaries", "4"): "expected at least 8 canaries",
    ("--epochs", "0"): "expected epochs >= 1",
    ("--rate", "0"): "expected learning_rate > 0",
}


@pytest.mark.parametrize("flags", REFUSED)
def test_what_cannot_be_checked_is_refused(
    flags: tuple[str, str], world: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flag, value = flags
    given = str(world / value) if flag == "--fresh" else value
    assert run_command_line(["check-base", str(world / "base"), flag, given]) == 2
    assert REFUSED[flags] in capsys.readouterr().err
