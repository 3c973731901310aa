"""Where caches go, and what runs where the system is not Linux (which is the one that is
tested)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from auditor.core import disk
from auditor.core.disk import find_cache_folder

WITHOUT = """
import sys
sys.modules.update(fcntl=None, resource=None, pwd=None, grp=None)  # as on Windows
import auditor.gate.decide, auditor.reports.html, auditor.commands.run
from auditor.cli import run_command_line
sys.exit(run_command_line(["gate", "--help"]) or run_command_line(["nothing"]) != 2)
"""


def test_the_cache_is_where_the_platform_keeps_caches_unless_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AUDIT_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert (
        find_cache_folder() == tmp_path / "xdg" / "audit"
        and find_cache_folder().stat().st_mode & 0o777 == 0o700
    )
    monkeypatch.setenv("AUDIT_CACHE", str(tmp_path / "mine"))
    assert find_cache_folder() == tmp_path / "mine"


def test_what_needs_no_model_starts_without_the_modules_of_unix() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


def test_without_locks_no_folder_of_another_process_is_taken_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "fcntl", None)
    with disk.open_scratch_folder(tmp_path, "x") as others:
        with disk.open_scratch_folder(tmp_path, "x") as own:
            assert others.exists() and own.exists()
        assert others.exists() and not own.exists()
    assert not others.exists()
