"""What a record says of where it was made."""

from __future__ import annotations

import subprocess
import zlib
from pathlib import Path

import pytest

from auditor.runs import machine


def test_a_record_names_the_commit_that_the_command_stood_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert "commit" not in machine.describe_environment("cpu")  # no repository

    def git(*words: str) -> str:
        as_who = ("-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false")
        return subprocess.run(
            ["git", *as_who, *words], check=True, capture_output=True, text=True
        ).stdout.strip()

    git("init")
    (tmp_path / "train.py").write_text("1")
    git("add", ".")
    git("commit", "-m", "first")
    git("tag", "v1")  # a name may move; the commit does not
    (tmp_path / "untracked").write_text("a run folder")
    head = git("rev-parse", "HEAD")
    assert machine.describe_environment("cpu")["commit"] == head
    (tmp_path / "train.py").write_text("2")
    assert machine.describe_environment("cpu")["commit"] == f"{head}-dirty"


def test_a_record_names_the_build_of_zlib() -> None:
    assert machine.describe_environment("cpu")["zlib"] == zlib.ZLIB_RUNTIME_VERSION


def test_no_program_that_a_folder_names_for_git_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is begun in somebody's folder asks git for the commit: no monitor, filter or hook
    there is run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))

    def git(*words: str) -> str:
        as_who = ("-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false")
        return subprocess.run(
            ["git", *as_who, *words], check=True, capture_output=True, text=True
        ).stdout.strip()

    git("init")
    (tmp_path / "train.py").write_text("1")
    (tmp_path / ".gitattributes").write_text("*.py filter=theirs diff=theirs\n")
    git("add", ".")
    git("commit", "-m", "first")
    head = git("rev-parse", "HEAD")
    named = ("fsmonitor", "clean", "process", "diff", "textconv", "hook")
    for name in named:
        (tmp_path / ".git" / name).write_text(f"#!/bin/sh\ntouch {tmp_path / 'ran'}-{name}\ncat\n")
        (tmp_path / ".git" / name).chmod(0o755)
    hooks = tmp_path / ".git" / "hooks"
    hooks.mkdir(exist_ok=True)
    (tmp_path / ".git" / "hook").rename(hooks / "post-index-change")
    git("config", "core.fsmonitor", str(tmp_path / ".git" / "fsmonitor"))
    git("config", "filter.theirs.clean", str(tmp_path / ".git" / "clean"))
    git("config", "filter.theirs.process", str(tmp_path / ".git" / "process"))
    git("config", "filter.theirs.required", "true")
    git("config", "diff.theirs.command", str(tmp_path / ".git" / "diff"))
    git("config", "diff.theirs.textconv", str(tmp_path / ".git" / "textconv"))
    (tmp_path / "train.py").write_text("1")  # the same text, at another time: git has to look
    said = [machine.describe_environment("cpu").get("commit")]
    (tmp_path / "train.py").write_text("2")
    said.append(machine.describe_environment("cpu").get("commit"))
    assert sorted(path.name for path in tmp_path.glob("ran*")) == []
    assert said == [head, f"{head}-dirty"]
