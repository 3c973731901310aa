"""Progress in a log: how long a step still takes, by what it took itself."""

from __future__ import annotations

import pytest

from auditor.commands import console


def test_the_time_left_is_of_the_step_and_not_of_what_was_done_before_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    console.stderr_console.cache_clear()
    with (
        console.open_progress_terminal(verbose=False) as reporter,
        reporter.transient_progress_bar("model 1"),
    ):
        for what, done, at in (
            ("training", 3, 3600),
            ("reading", 10, 3700),
            ("reading", 20, 3800),
            ("asking", 1, 3900),
        ):
            now[0] = at
            reporter.progress(what, done, {"training": 3, "reading": 100, "asking": 2}[what])
    console.stderr_console.cache_clear()
    said = capsys.readouterr().err.splitlines()
    assert [line.partition(", ")[2] for line in said] == [
        "0.0 s left of this step",
        "15 min 00 s left of this step",
        "13 min 20 s left of this step",
        "1 min 40 s left of this step",
    ]
