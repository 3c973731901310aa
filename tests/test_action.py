"""action.yml, the pre-commit hook and examples/ci: what they call exists, and what they are given
is never run."""

from __future__ import annotations

import os
import re
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from auditor.cli import app
from auditor.gate.policy import read_gate_policy
from auditor.records.manifest import MANIFEST
from auditor.records.result_file import RESULT
from auditor.records.table import TABLE

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "ci"
ACTION: dict[str, Any] = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
STEPS: dict[str, dict[str, Any]] = {
    step.get("name", "setup"): step for step in ACTION["runs"]["steps"]
}
NAMED = re.compile(r"\$\{\{\s*(inputs|steps)\.([\w-]+)(?:\.outputs\.([\w-]+))?")


def options(command: str) -> set[str]:
    group: Any = typer.main.get_command(app)
    return {name for parameter in group.commands[command].params for name in parameter.opts}


def flags(script: str) -> set[str]:
    return set(re.findall(r"(?<![\w-])(--[a-z][a-z-]+)", script))


def test_the_action_is_whole() -> None:
    assert ACTION["runs"]["using"] == "composite"
    for step in STEPS.values():
        assert ("uses" in step) != ("run" in step)
        assert "uses" in step or step["shell"] == "bash"
    used = {
        match[2]
        for match in NAMED.finditer((ROOT / "action.yml").read_text())
        if match[1] == "inputs"
    }
    used |= set(
        re.findall(r"\binputs\.([\w-]+)", " ".join(step.get("if", "") for step in STEPS.values()))
    )
    assert used == set(ACTION["inputs"])
    written = set(re.findall(r"'?\b(\w+)=\$RUN", STEPS["Report"]["run"].replace('"', "'")))
    assert {NAMED.search(output["value"])[3] for output in ACTION["outputs"].values()} == written  # type: ignore[index]


@pytest.mark.parametrize("name", [name for name, step in STEPS.items() if "run" in step])
def test_its_shell_is_valid_and_takes_inputs_as_variables_only(name: str) -> None:
    step = STEPS[name]
    assert "${{" not in step["run"]
    subprocess.run(["bash", "-n"], input=step["run"], text=True, check=True)
    assert set(re.findall(r"\$\{?([A-Z]+)\b", step["run"])) <= set(step["env"])


def test_flags_exist() -> None:
    assert flags(STEPS["Audit and gate"]["run"]) <= options("run")
    assert flags(STEPS["Crash test"]["run"]) <= options("dp-loop")
    script = (EXAMPLE / "run.sh").read_text()
    parts = dict(re.findall(r"^(\w+)\(\) \{.*?\n(.*?)^\}", script, flags=re.MULTILINE | re.DOTALL))
    assert flags(parts["train"]) <= options("train") and len(flags(parts["train"])) > 3
    assert (
        flags(parts["check"] + parts["gated"]) <= options("run") and "--baseline" in parts["gated"]
    )
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
    assert hook["entry"] == "audit gate" and flags(" ".join(hook["args"])) <= options("gate")
    subprocess.run(["bash", "-n", EXAMPLE / "run.sh"], check=True)
    assert (EXAMPLE / "run.sh").stat().st_mode & stat.S_IXUSR


def test_the_workflow_to_copy_fits_the_action() -> None:
    workflow = yaml.safe_load((EXAMPLE / "workflow.yml").read_text())
    steps = workflow["jobs"]["audit"]["steps"]
    (audit,) = (step for step in steps if step.get("id") == "audit")
    assert set(audit["with"]) <= set(ACTION["inputs"])
    assert {name for name, given in ACTION["inputs"].items() if given.get("required")} <= set(
        audit["with"]
    )
    assert flags(audit["with"]["args"]) <= options("run")
    outputs = re.findall(r"steps\.audit\.outputs\.(\w+)", (EXAMPLE / "workflow.yml").read_text())
    assert outputs and set(outputs) <= set(ACTION["outputs"])
    for step in steps:
        if "run" in step:
            assert "${{" not in step["run"]
            subprocess.run(["bash", "-n"], input=step["run"], text=True, check=True)
    (copied,) = (
        re.search(r"\{(.*)\} baseline", step["run"])
        for step in steps
        if " baseline && cp " in step.get("run", "")
    )
    # what a baseline is read from
    assert copied and set(copied[1].split(",")) == {
        RESULT,
        TABLE,
        MANIFEST,
    }
    policies = re.findall(r"'(\w+\.toml)'", audit["with"]["policy"])
    assert [
        any(r.against_baseline for r in read_gate_policy(EXAMPLE / name).rules) for name in policies
    ] == [True, False]


def test_every_action_is_pinned_and_no_token_lies_in_the_checkout() -> None:
    workflow = yaml.safe_load((EXAMPLE / "workflow.yml").read_text())
    steps = workflow["jobs"]["audit"]["steps"]
    used = [step["uses"] for step in (*steps, *STEPS.values()) if "uses" in step]
    unpinned = [name for name in used if not re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", name)]
    assert len(used) == 6 and unpinned == ["OWNER/audit@COMMIT"]  # whose commit the reader fills in
    (checkout,) = (step for step in steps if step.get("uses", "").startswith("actions/checkout@"))
    assert checkout["with"] == {"persist-credentials": False}
    assert workflow["permissions"] == {}
    # In a pull request from a fork the token may not comment, and the job would fail for that.
    assert steps[-1]["continue-on-error"] is True


def test_a_pull_request_is_held_to_the_policy_of_the_branch_it_is_for(tmp_path: Path) -> None:
    """The step of the workflow, in a checkout whose own policy was loosened."""
    steps = yaml.safe_load((EXAMPLE / "workflow.yml").read_text())["jobs"]["audit"]["steps"]
    (held,) = (step["run"] for step in steps if "BASE" in step.get("env", {}))
    env = {
        **os.environ,
        "BASE": "main",
        "RUNNER_TEMP": str(tmp_path),
        "GIT_CONFIG_GLOBAL": "/dev/null",
    }

    def git(where: Path, *words: str) -> None:
        as_who = ("-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false")
        subprocess.run(
            ["git", *as_who, *words], cwd=where, env=env, check=True, capture_output=True
        )

    shell = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", held]
    (tmp_path / "origin").mkdir()
    git(tmp_path / "origin", "init", "-b", "main")
    git(tmp_path / "origin", "commit", "--allow-empty", "-m", "no policy yet")
    git(tmp_path / "origin", "remote", "add", "origin", ".")
    early = subprocess.run(
        shell, cwd=tmp_path / "origin", env=env, check=False, capture_output=True, text=True
    )
    assert early.returncode == 1 and "::error::push leakage.toml to main first" in early.stdout
    for name in ("leakage.toml", "first.toml"):
        (tmp_path / "origin" / name).write_text((EXAMPLE / name).read_text())
    git(tmp_path / "origin", "add", ".")
    git(tmp_path / "origin", "commit", "-m", "policy")
    git(tmp_path, "clone", "origin", "change")
    (tmp_path / "change" / "leakage.toml").write_text('rules = ["recall <= 1"]\n')
    git(tmp_path / "change", "commit", "-am", "looser")
    subprocess.run(shell, cwd=tmp_path / "change", env=env, check=True, capture_output=True)
    for name in ("leakage.toml", "first.toml"):
        assert (tmp_path / name).read_text() == (EXAMPLE / name).read_text()
    (audit,) = (step for step in steps if step.get("id") == "audit")
    assert audit["with"]["policy"].startswith("${{ runner.temp }}/")


STUB = """#!/usr/bin/env bash
printf '%s\\n' "$@" >"$STUB_LOG"
mkdir -p "$RUN" && echo report >"$RUN/report.md" && echo gate >"$RUN/gate.md"
exit "$STUB_CODE"
"""


def step(name: str, folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs a step as GitHub does."""
    (folder / "step.sh").write_text(STEPS[name]["run"])
    given = {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", **env}
    shell = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "step.sh"]
    return subprocess.run(shell, cwd=folder, env=given, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("code", ["0", "1", "4"])
def test_the_steps_do_what_they_say(tmp_path: Path, code: str) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "audit").write_text(STUB)
    (tmp_path / "bin" / "audit").chmod(0o755)
    evil = "my model; $(touch pwned) `touch pwned` *"
    env = {
        "MODEL": evil,
        "DATA": "d.jsonl",
        "NONMEMBERS": "",
        "ATTACKS": "perplexity zlib",
        "POLICY": "p.toml",
    }
    env |= {"BASELINE": "old runs", "ARGS": "--setting white-box $(touch pwned)", "RUN": "out"}
    done = step("Audit and gate", tmp_path, **env, STUB_LOG="args", STUB_CODE=code)
    assert done.returncode == int(code), done.stderr
    expected = ["run", "--model", evil, "--data", "d.jsonl", "--gate", "p.toml", "--out", "out"]
    expected += ["--attack", "perplexity", "--attack", "zlib", "--baseline", "old runs"]
    assert (tmp_path / "args").read_text().splitlines() == [
        *expected,
        "--setting",
        "white-box",
        "$(touch",
        "pwned)",
    ]
    (tmp_path / "summary").write_text("gate\n")
    files = {"GITHUB_STEP_SUMMARY": "summary", "GITHUB_OUTPUT": "output"}
    assert step("Report", tmp_path, RUN="out", **files).returncode == 0
    assert (tmp_path / "summary").read_text() == "gate\nreport\n"
    assert (tmp_path / "out" / "comment.md").read_text() == "gate\nreport\n"
    assert (tmp_path / "output").read_text() == "run=out\ncomment=out/comment.md\n"
    assert step("Report", tmp_path, RUN="nothing", **files).returncode == 0  # the audit was refused
    assert not (tmp_path / "pwned").exists()


def test_attacks_and_arguments_on_lines_of_their_own_all_run(tmp_path: Path) -> None:
    """As YAML's `attacks: |` hands them over: `read` alone takes the first line, and the gate holds
    for the rest."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "audit").write_text(STUB)
    (tmp_path / "bin" / "audit").chmod(0o755)
    env = {
        "MODEL": "m",
        "DATA": "d",
        "NONMEMBERS": "",
        "POLICY": "p.toml",
        "BASELINE": "",
        "RUN": "out",
    }
    env |= {
        "ATTACKS": "perplexity\n  zlib\tmin-k\n\nexposure\n",
        "ARGS": "--setting white-box\n--samples 10\n*\n",
    }
    done = step("Audit and gate", tmp_path, **env, STUB_LOG="args", STUB_CODE="0")
    assert done.returncode == 0, done.stderr
    asked = (tmp_path / "args").read_text().splitlines()[9:]
    attacks = [
        word for name in ("perplexity", "zlib", "min-k", "exposure") for word in ("--attack", name)
    ]
    assert asked == [*attacks, "--setting", "white-box", "--samples", "10", "*"]


@pytest.mark.parametrize("code", ["0", "1", "4"])
def test_a_loop_is_crash_tested_and_its_verdict_decides(tmp_path: Path, code: str) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "audit").write_text(STUB.replace("report.md", "dp-loop.md"))
    (tmp_path / "bin" / "audit").chmod(0o755)
    evil = "my train.py; $(touch pwned)"
    done = step(
        "Crash test",
        tmp_path,
        LOOP=evil,
        RUN="out",
        GITHUB_STEP_SUMMARY="summary",
        STUB_LOG="args",
        STUB_CODE=code,
    )
    assert done.returncode == int(code), done.stderr
    asked = ["dp-loop", evil, "--gate", "--junit", "out/dp-loop.xml", "--out", "out"]
    assert (tmp_path / "args").read_text().splitlines() == asked
    assert (tmp_path / "summary").read_text() == "report\n" and not (tmp_path / "pwned").exists()


def test_a_loop_alone_is_not_audited_and_nothing_asked_for_is_refused_by_the_audit() -> None:
    assert STEPS["Audit and gate"]["if"] == "inputs.model != '' || inputs.dp-loop == ''"
    assert STEPS["Crash test"]["if"] == "inputs.dp-loop != ''"


def test_nothing_private_is_uploaded() -> None:
    paths = STEPS["Upload"]["with"]["path"].split("\n")
    names = {Path(path.split("}}/")[1]).name for path in paths if path}
    kept = {
        "report.html",
        "report.md",
        "comment.md",
        "gate.md",
        "gate.xml",
        "dp-loop.html",
        "dp-loop.md",
        "dp-loop.json",
        "dp-loop.xml",
        "decisions.jsonl",
        "decisions.sha256",
        "result.json",
        "manifest.json",
    }
    assert names == kept and all("*" not in path for path in paths)


def test_the_example_is_run_by_our_ci() -> None:
    assert "examples/ci/run.sh" in (ROOT / ".ci" / "run").read_text()
