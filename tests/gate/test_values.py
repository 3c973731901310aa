"""Values that no run writes are a sentence each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.conftest import check_command
from tests.gate.finished_runs import edit, finished


@pytest.mark.parametrize("value", [None, 0, 5])
def test_a_plan_that_is_none_is_refused(
    value: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = finished(tmp_path / "run")
    edit(run, "result.json", lambda result: result["plan"].update(defense=value))
    check_command("gate", run, "--max", "recall=0.05", code=2)
    assert "plan.defense: expected a list" in capsys.readouterr().err


@pytest.mark.parametrize("change", [{"value": "-inf", "low": "-inf"}, {"n": 10**30}])
def test_numbers_that_no_secrets_make_fail_in_a_sentence(
    change: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = finished(tmp_path / "run")
    edit(run, "result.json", lambda result: result["findings"][0]["measurements"][0].update(change))
    check_command("gate", run, "--max", "recall=0.05", code=1)
    assert "the result contradicts itself: recall is" in capsys.readouterr().out
