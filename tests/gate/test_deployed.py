"""A gate is about the model that lies there: another one in its place fails, whatever the rules
say."""

from __future__ import annotations

import os
import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from auditor.core.errors import AuditError
from auditor.core.plan_parts import TargetPlan
from auditor.core.result import AuditResult, BenchmarkRecord
from auditor.gate.deployed import compare_deployed_files
from auditor.gate.policy import Policy, Required, Rule, read_gate_policy
from auditor.records import file_digests
from auditor.runs.gate_inputs import judge_gated_run
from tests.conftest import check_command
from tests.gate.finished_runs import edit, finished, model

Said = pytest.CaptureFixture[str]
HOLDS = ("--max", "recall=0.05")


def test_other_weights_in_the_place_of_the_judged_ones_fail(tmp_path: Path, capsys: Said) -> None:
    lies = model(tmp_path / "model")
    run = finished(tmp_path / "run", model=lies)
    check_command("gate", run, *HOLDS)
    first, *_ = capsys.readouterr().out.splitlines()
    assert str(lies) in first and "(just now): unchanged since" in first
    before = (lies / "model.safetensors").stat()
    (lies / "model.safetensors").write_bytes(b"\3\2\1")
    # as who hides it would
    os.utime(lies / "model.safetensors", ns=(before.st_atime_ns, before.st_mtime_ns))
    check_command("gate", run, *HOLDS, "--inconclusive", "pass", code=1)
    said = capsys.readouterr().out
    assert "another model is there now: model/model.safetensors has changed" in said.splitlines()[0]
    assert "the judged model is not the deployed one" in said


@pytest.mark.parametrize("name", ["model-2.safetensors", "chat_template.jinja", "modeling.py"])
def test_a_file_more_is_another_model(tmp_path: Path, name: str) -> None:
    lies = model(tmp_path / "model")
    run = finished(tmp_path / "run", model=lies)
    (lies / name).write_text("x")
    check_command("gate", run, *HOLDS, code=1)


def test_the_digests_are_read_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was kept of a file by its size and dates is believed nowhere."""
    lies = model(tmp_path / "model")
    monkeypatch.setattr(file_digests, "_SETTLED", -1.0)  # it is remembered at once
    held = file_digests.digest_model_files({"model": (str(lies), None)})
    monkeypatch.setattr(file_digests, "_fingerprint_file", lambda path: [0])
    file_digests.digest_model_files({"model": (str(lies), None)})
    (lies / "model.safetensors").write_bytes(b"leaky")
    # by what is kept, nothing has changed
    assert file_digests.digest_model_files({"model": (str(lies), None)}) == held
    assert file_digests.digest_model_files({"model": (str(lies), None)}, print) != held


def test_the_model_may_lie_elsewhere(tmp_path: Path, capsys: Said) -> None:
    lies = model(tmp_path / "model")
    run = finished(tmp_path / "run", model=lies)
    shutil.move(lies, tmp_path / "deployed")
    check_command("gate", run, *HOLDS)
    assert (
        "not on this machine: it cannot be checked here that"
        in capsys.readouterr().out.splitlines()[0]
    )
    check_command("gate", run, *HOLDS, "--model", tmp_path / "deployed")
    assert "unchanged since" in capsys.readouterr().out
    model(tmp_path / "deployed", says=(4, 5))
    check_command("gate", run, *HOLDS, "--model", tmp_path / "deployed", code=1)
    check_command("gate", run, *HOLDS, "--model", tmp_path / "nowhere", code=2)
    lab = finished(tmp_path / "lab")
    check_command("gate", lab, *HOLDS, "--model", tmp_path / "deployed", code=2)


def test_a_model_in_memory_is_held_to_no_file(tmp_path: Path, capsys: Said) -> None:
    """It may have been trained on since it was loaded from the folder whose name it has."""
    lies = model(tmp_path / "model")
    plan = {"model": str(lies), "data": "d", "objects": {"model": "transformers.GPT2LMHeadModel"}}
    run = finished(tmp_path / "run", model=lies, plan=plan)
    check_command("gate", run, *HOLDS)
    assert "in the memory of a process: it cannot be checked" in capsys.readouterr().out


def test_a_policy_may_require_that_the_model_is_here(tmp_path: Path) -> None:
    lies = model(tmp_path / "model")
    run, lab = finished(tmp_path / "run", model=lies), finished(tmp_path / "lab")
    policy = Policy((Rule("recall", 0.05),), require=Required(model_here=True))
    assert judge_gated_run(run, policy).exit_code == 0
    assert judge_gated_run(lab, policy).exit_code == 1  # nobody deploys it
    shutil.rmtree(lies)
    decision = judge_gated_run(run, policy)
    assert decision.exit_code == 1 and "not on this machine" in decision.rulings[0].reason
    assert judge_gated_run(run, Policy(policy.rules)).exit_code == 0


@pytest.mark.parametrize(("days", "code"), [(6.9, 0), (7.1, 1), (-1, 1)])
def test_a_policy_may_require_that_the_run_is_young(tmp_path: Path, days: float, code: int) -> None:
    made = (datetime.now(UTC) - timedelta(days=days)).isoformat(timespec="seconds")
    run = finished(tmp_path / "run", created=made)
    policy = tmp_path / "leakage.toml"
    policy.write_text('rules = ["recall <= 0.05"]\n[require]\nmax_age = 7\n')
    check_command("gate", run, "--policy", policy, code=code)
    check_command("gate", run, *HOLDS)


@pytest.mark.parametrize(
    "line",
    [
        "model_here = 1",
        'max_age = "7"',
        "max_age = 0",
        "max_age = nan",
        "max_age = true",
        "modelhere = true",
    ],
)
def test_requirements_that_say_nothing_are_refused(tmp_path: Path, line: str) -> None:
    policy = tmp_path / "leakage.toml"
    policy.write_text(f'rules = ["recall <= 0.05"]\n[require]\n{line}\n')
    with pytest.raises(AuditError, match="require"):
        read_gate_policy(policy)


@pytest.mark.parametrize(
    ("ago", "said"),
    [
        (timedelta(seconds=-5), "in the future"),
        (timedelta(seconds=59), "just now"),
        (timedelta(seconds=61), "1 minute ago"),
        (timedelta(minutes=59.5), "59 minutes ago"),
        (timedelta(hours=1.99), "1 hour ago"),
        (timedelta(hours=23.9), "23 hours ago"),
        (timedelta(hours=47.9), "1 day ago"),
        (timedelta(days=1234.5), "1,234 days ago"),
    ],
)
def test_the_age_of_a_run_is_said_in_whole_units(ago: timedelta, said: str) -> None:
    made = datetime(2026, 1, 1, tzinfo=UTC)
    result = AuditResult(
        "r", made.isoformat(), "0", "", {}, BenchmarkRecord("b", "", 0, 0, 0), (), (), {}, {}, 0
    )
    found = compare_deployed_files(result, TargetPlan(), {}, "there", made, made + ago)
    assert f"judged 2026-01-01 00:00 UTC ({said})" in found.statement
    assert found.age == pytest.approx(ago / timedelta(days=1))


def test_a_date_that_is_none_is_refused(tmp_path: Path, capsys: Said) -> None:
    run = finished(tmp_path / "run")
    edit(run, "result.json", lambda result: result.update(created="yesterday"))
    check_command("gate", run, *HOLDS, code=2)
    assert "expected the date of the run in result.json, got 'yesterday'" in capsys.readouterr().err


def test_a_refused_run_leaves_none_to_be_taken_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Said
) -> None:
    """As the hook for pre-commit judges it: `audit gate runs/latest`."""
    monkeypatch.chdir(tmp_path)
    finished(Path("runs/clean"), model=model(tmp_path / "model"))
    Path("runs/latest").symlink_to("clean")
    check_command("gate", "runs/latest", *HOLDS)
    check_command(
        "run", "--model", "model", "--data", "private.jsonl", "--attack", "nosuch", code=2
    )
    capsys.readouterr()
    check_command("gate", "runs/latest", *HOLDS, code=2)
    assert "no such run folder; the last audit run was refused" in capsys.readouterr().err
