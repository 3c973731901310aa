"""Progress in a log: how long a step still takes, by what it took itself."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from auditor.commands import console

Report = tuple[str, int, int, float]  # step, what is done, of how many, and when in seconds


def list_times_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], reports: Sequence[Report]
) -> list[str]:
    now = [0.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    console.stderr_console.cache_clear()
    with (
        console.open_progress_terminal(verbose=False) as reporter,
        reporter.transient_progress_bar("model 1"),
    ):
        for what, done, total, at in reports:
            now[0] = at
            reporter.progress(what, done, total)
    console.stderr_console.cache_clear()
    return [line.partition(", ")[2] for line in capsys.readouterr().err.splitlines()]


def test_the_time_left_is_of_the_step_and_not_of_what_was_done_before_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reports = [
        ("training", 3, 3, 3600.0),
        ("reading", 10, 100, 3700.0),
        ("reading", 20, 100, 3800.0),
        ("asking", 1, 2, 3900.0),
    ]
    assert list_times_left(monkeypatch, capsys, reports) == [
        "0.0 s left of this step",
        "15 min 00 s left of this step",
        "13 min 20 s left of this step",
        "1 min 40 s left of this step",
    ]


def test_neither_a_long_preparation_nor_a_pause_makes_the_time_left_absurd(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # An hour to fill a store, ten seconds a question, and an hour without an answer.
    reports = [("asking", 0, 100, 3600.0)]
    reports += [("asking", n, 100, 3600.0 + 10 * n) for n in range(1, 9)]
    reports += [("asking", n, 100, 7200.0 + 10 * n) for n in range(9, 11)]
    assert list_times_left(monkeypatch, capsys, reports) == [
        "16 min 30 s left of this step",
        "15 min 30 s left of this step",
        "15 min 10 s left of this step",
    ]
