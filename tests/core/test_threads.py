"""Threads are settled before torch is loaded: a user's word wins, a container's quota counts,
nobody spins."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from auditor.core import threads
from auditor.core.errors import AuditError


@pytest.fixture(autouse=True)
def unsettled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As before torch is loaded, in no container."""
    monkeypatch.setattr(threads, "_get_loaded_torch", lambda: None)
    for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.setenv(name, "")  # so that it is put back as it was
        monkeypatch.delenv(name)
    monkeypatch.setattr(threads, "_GROUPS", tmp_path)
    monkeypatch.setattr(threads, "_LOAD", tmp_path / "loadavg")
    monkeypatch.setattr(threads, "_BETWEEN", 0)
    monkeypatch.setattr(threads, "count_usable_processors", lambda: 8)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)


def test_waiting_threads_sleep_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads.set_thread_count()
    assert os.environ["OMP_WAIT_POLICY"] == "PASSIVE" and "OMP_NUM_THREADS" not in os.environ
    assert os.environ["GOMP_SPINCOUNT"] == "10000"  # short waits are not worth a sleep
    assert threads.describe_threads(8) == "8 of 8 processors"
    monkeypatch.delenv("GOMP_SPINCOUNT")
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    threads.set_thread_count()
    assert "GOMP_SPINCOUNT" not in os.environ  # who chooses a policy gets it whole


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"cpu.max": "250000 100000\n"}, "2"),
        ({"cpu.max": "50000 100000\n"}, "1"),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu.max": "6400000 100000\n"}, None),  # more than there are
        ({"cpu/cpu.cfs_quota_us": "300000\n", "cpu/cpu.cfs_period_us": "100000\n"}, "3"),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
    ],
)
def test_a_container_gets_no_more_threads_than_its_quota(
    files: dict[str, str], expected: str | None, tmp_path: Path
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    threads.set_thread_count()
    assert os.environ.get("OMP_NUM_THREADS") == expected


@pytest.mark.parametrize(("running", "expected"), [(1, None), (4, "5"), (8, "1"), (30, "1")])
def test_what_others_keep_busy_is_left_to_them(
    running: int, expected: str | None, tmp_path: Path
) -> None:
    # one of them is this process
    (tmp_path / "loadavg").write_text(f"0.20 0.18 0.12 {running}/80 11206\n")
    threads.set_thread_count()
    assert os.environ.get("OMP_NUM_THREADS") == expected


def test_others_do_not_overrule_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "loadavg").write_text("0.20 0.18 0.12 30/80 11206\n")
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    threads.set_thread_count()
    assert os.environ["OMP_NUM_THREADS"] == "5"


def test_the_option_wins_over_the_environment_and_that_over_the_quota(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "cpu.max").write_text("200000 100000")
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    threads.set_thread_count()
    assert os.environ["OMP_NUM_THREADS"] == "5"
    threads.set_thread_count(3)
    assert os.environ["OMP_NUM_THREADS"] == "3"
    with pytest.raises(AuditError, match="expected --threads >= 1, got 0"):
        threads.set_thread_count(0)


def test_where_torch_is_loaded_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(
        threads, "_get_loaded_torch", lambda: SimpleNamespace(set_num_threads=asked.append)
    )
    threads.set_thread_count()
    threads.set_thread_count(2)
    assert asked == [2] and "OMP_WAIT_POLICY" not in os.environ


def test_every_command_settles_them_before_torch_is_loaded() -> None:
    code = (
        "import os; from auditor import cli; cli.run_command_line(['--threads', '1', 'gate', "
        "'/nowhere', '--max', 'recall=1']); import torch; print(os.environ['OMP_WAIT_POLICY'], "
        "torch.get_num_threads())"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True
    )
    assert done.stdout.split() == ["PASSIVE", "1"]
