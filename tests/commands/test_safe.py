"""A folder or a plan file may be anybody's: no code that it names runs, unless the command line
names it too."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from auditor.cli import run_command_line
from auditor.commands import options
from auditor.core import safe_mode
from auditor.core.errors import AuditError
from auditor.core.plan import Plan
from auditor.records.folder import RunFolder
from auditor.reports import files
from tests.conftest import check_command, save_tiny

Said = pytest.CaptureFixture[str]
MARK = """from auditor.plugins.provider import Provider

open("ran", "w").close()


class Theirs(Provider):
    name = "theirs"
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a plug-in that leaves a mark."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "theirs.py").write_text(MARK)
    yield tmp_path


def begun(folder: Path, **plan: object) -> Path:
    """A run folder as somebody might hand it over."""
    RunFolder.create(folder, "r", {**Plan().to_json(), **plan}).close()
    return folder


def refused(arguments: list[str], said: str, capsys: Said) -> None:
    check_command(*arguments, code=2)
    told = capsys.readouterr().err
    assert said in told and told.startswith("error: ") and "Traceback" not in told
    assert not Path("ran").exists()


def test_a_folder_that_is_gone_on_with_runs_no_plug_in_of_its_own(here: Path, capsys: Said) -> None:
    folder = begun(here / "run", plugin=["theirs.py"], attack=["nobody"])
    refused(
        ["run", "--resume", str(folder)],
        "sets plugin to 'theirs.py', and its code would run",
        capsys,
    )
    refused(
        ["run", "--resume", str(folder), "--plugin", "mine.py"],
        "sets plugin to 'theirs.py'",
        capsys,
    )
    check_command("run", "--resume", folder, "--plugin", "./theirs.py", code=2)
    assert "unknown attack 'nobody'" in capsys.readouterr().err
    assert Path("ran").exists()  # named on the command line too


def test_a_folder_that_is_gone_on_with_runs_no_code_of_a_model(here: Path, capsys: Said) -> None:
    folder = begun(here / "run", model="m", data="d", trust_remote_code=True, attack=["nobody"])
    refused(["run", "--resume", str(folder)], "sets trust_remote_code", capsys)
    refused(
        ["run", "--resume", str(folder), "--trust-remote-code"], "unknown attack 'nobody'", capsys
    )


def test_a_folder_that_is_gone_on_with_sends_and_writes_nothing_where_nobody_said(
    here: Path, capsys: Said
) -> None:
    remote = {
        "model": "openai:m",
        "base_url": "http://127.0.0.1:1/v1",
        "data": "d",
        "attack": ["nobody"],
    }
    folder = ["run", "--resume", str(begun(here / "run", **remote, submission="theirs.csv"))]
    refused(folder, "sets base_url to 'http://127.0.0.1:1/v1'", capsys)
    refused(
        [*folder, "--base-url", "http://127.0.0.1:2/v1"],
        "sets base_url to 'http://127.0.0.1:1/v1'",
        capsys,
    )
    refused(
        [*folder, "--base-url", "http://127.0.0.1:1/v1"], "sets submission to 'theirs.csv'", capsys
    )
    named = [*folder, "--base-url", "http://127.0.0.1:1/v1", "--submission", "./theirs.csv"]
    refused(named, "--submission goes with a --data folder", capsys)  # asked for, and no more is


def test_a_flag_wins_over_what_a_plan_file_would_send_elsewhere(here: Path, capsys: Said) -> None:
    (here / "plan.toml").write_text(
        "base_url = 'http://127.0.0.1:1/v1'\nmodel = 'openai:m'\ndata = 'd'\n"
    )
    mine = ["--base-url", "http://127.0.0.1:2/v1", "--attack", "nobody"]
    refused(["run", "--config", "plan.toml", *mine], "unknown attack 'nobody'", capsys)


def test_what_is_allowed_beyond_the_plan_is_not_ignored(here: Path, capsys: Said) -> None:
    folder = begun(here / "run")
    resume = ["run", "--resume", str(folder)]
    refused([*resume, "--plugin", "theirs.py"], "expected no --plugin theirs.py", capsys)
    refused([*resume, "--trust-remote-code"], "expected no --trust-remote-code", capsys)
    refused([*resume, "--seed", "1"], "give no other option with it", capsys)


@pytest.mark.parametrize("more", [[], ["--estimate"]])
@pytest.mark.parametrize(
    "plan",
    [
        "plugin = ['theirs.py']",
        "trust_remote_code = true\nmodel = 'm'\ndata = 'd'",
        "seeds = [0, 1]\nplugin = ['theirs.py']",
        "[sweep]\nplugin = ['theirs.py']",
        "[[variant]]\nname = 'a'\nplugin = ['theirs.py']",
        "[[variant]]\nname = 'a'\ntrust_remote_code = true",
        "base_url = 'http://127.0.0.1:1/v1'\nmodel = 'openai:m'\ndata = 'd'",
        "[sweep]\nbase_url = ['http://127.0.0.1:1/v1']",
        "submission = 'theirs.csv'",
        "ray_address = '127.0.0.1:1'\nengine = 'ray'",
    ],
)
def test_a_plan_file_runs_nothing_that_the_command_line_does_not_name(
    here: Path, capsys: Said, plan: str, more: list[str]
) -> None:
    (here / "plan.toml").write_text(f"attack = ['nobody']\n{plan}\n")
    refused(["run", "--config", "plan.toml", *more], "on the command line too", capsys)


def test_a_plan_file_runs_what_the_command_line_names(here: Path, capsys: Said) -> None:
    (here / "plan.toml").write_text("attack = ['nobody']\nplugin = ['theirs.py']\n")
    check_command("run", "--config", "plan.toml", "--plugin", "theirs.py", code=2)
    assert "unknown attack 'nobody'" in capsys.readouterr().err
    assert Path("ran").exists()


@pytest.mark.parametrize(
    "plan", ["plugin = ['theirs.py']", "[[variant]]\nname = 'a'\nplugin = ['theirs.py']"]
)
def test_a_folder_of_plans_runs_nothing_that_the_command_line_does_not_name(
    here: Path, capsys: Said, plan: str
) -> None:
    (here / "paper").mkdir()
    (here / "paper" / "paper.toml").write_text("title = 'p'\n[scale.lab]\n")
    (here / "paper" / "one.toml").write_text(f"attack = ['nobody']\n{plan}\n")
    refused(["reproduce", "paper"], "on the command line too", capsys)


def test_an_interrupted_run_says_what_it_takes_to_go_on() -> None:
    plan = Plan.from_fields(plugin=("my plug-in.py",))
    assert options.format_risk_flags(plan) == ["--plugin 'my plug-in.py'"]


def test_the_same_is_refused_to_a_safe_run(here: Path, capsys: Said) -> None:
    refused(
        ["run", "--safe", "--plugin", "theirs.py", "--attack", "nobody"],
        "--safe: --plugin theirs.py: its code would run",
        capsys,
    )
    more = ["--model", "m", "--data", "d", "--trust-remote-code"]
    refused(
        ["run", "--safe", *more],
        "--safe: --trust-remote-code: code in model folders would run",
        capsys,
    )


def test_while_a_record_is_read_python_itself_refuses_programs_and_the_network() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        with safe_mode.safe_mode():
            with pytest.raises(AuditError, match="a program would be run"):
                subprocess.run(["true"], check=True)
            with pytest.raises(AuditError, match="a program would be run"):
                os.system("true")
            with pytest.raises(
                OSError, match="the network would be asked"
            ):  # what libraries can do without
                socket.create_connection(server.getsockname())
        socket.create_connection(server.getsockname()).close()
    assert subprocess.run(["true"], check=False).returncode == 0


@pytest.mark.parametrize(
    "command",
    [
        ["report", "r"],
        ["gate", "r"],
        ["compare", "r"],
        ["history", "r"],
        ["advise", "r"],
        ["export", "r", "--csv", "c"],
    ],
    ids=lambda command: command[0],
)
def test_commands_that_read_are_safe_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch, capsys: Said, command: list[str]
) -> None:
    """Whatever they call would find a program refused: here the first thing that each of them asks
    for."""
    from auditor.conclusions import outcomes
    from auditor.gate import history
    from auditor.records import result_file
    from auditor.runs import gate_inputs  # noqa: F401 - before the names that it imports are others

    def runs(*_: object, **__: object) -> None:
        subprocess.run(["touch", "ran"], check=True)

    for where, name in (
        (files, "rewrite_run_reports"),
        (outcomes, "read_run_outcomes"),
        (history, "build_run_history"),
        (result_file, "read_result"),
    ):
        monkeypatch.setattr(where, name, runs)
    refused(command, "--safe: a program would be run", capsys)
    run_command_line([*command, "--no-safe"])
    assert Path("ran").exists()


def test_a_whole_run_is_safe_where_nobody_elses_code_is_in_it(here: Path, capsys: Said) -> None:
    save_tiny(here / "model")
    rows = [
        {"prefix": f"the number of {i} is", "suffix": f" {i * 7919} {i * 31} {i}"} for i in range(6)
    ]
    (here / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = [
        "--model",
        "model",
        "--data",
        "data.jsonl",
        "--prefix-length",
        "3",
        "--suffix-length",
        "2",
    ]
    check_command(
        "run",
        "--safe",
        *data,
        "--attack",
        "perplexity",
        "--samples",
        "2",
        "--prefix-token",
        "none",
        "-o",
        "out",
    )
    assert "commit" not in json.loads((here / "out" / "result.json").read_text())["environment"]
    check_command("report", "out")
    check_command("gate", "out", "--max", "recall=1")
