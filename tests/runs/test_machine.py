"""What a record says of where it was made."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from auditor.runs import machine


def test_a_record_names_the_commit_that_the_command_stood_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert "commit" not in machine.environment("cpu")  # no repository

    def git(*words: str) -> str:
        as_who = ("-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false")
        return subprocess.run(["git", *as_who, *words], check=True, capture_output=True, text=True).stdout.strip()

    git("init")
    (tmp_path / "train.py").write_text("1")
    git("add", ".")
    git("commit", "-m", "first")
    git("tag", "v1")  # a name may move; the commit does not
    (tmp_path / "untracked").write_text("a run folder")
    head = git("rev-parse", "HEAD")
    assert machine.environment("cpu")["commit"] == head
    (tmp_path / "train.py").write_text("2")
    assert machine.environment("cpu")["commit"] == f"{head}-dirty"
