"""Choose how many threads a run uses and how the threads wait for each other.

Import this module before torch: when torch loads OpenMP, OpenMP reads its environment, and it does
so only once. By default, waiting threads spin. If other work is running, a spinning thread takes
processor time from the thread that it is waiting for; a sleeping thread takes none. But a small
model has many short waits, and sleeping at each one costs more than a second thread gains. So
threads spin for microseconds and then sleep. Other work slows down threads that wait for each other
by more than its share of the processors, because all of them wait for the slowest. So a run uses
only as many threads as there are free processors when it starts.
"""

from __future__ import annotations

import functools
import math
import os
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from auditor.core.errors import AuditError

_GROUPS = Path("/sys/fs/cgroup")
_LOAD = Path("/proc/loadavg")
# Seconds between measurements; the median of several ignores short-lived processes.
_LOOKS = 7
_BETWEEN = 0.01
# A training step of the lab takes 45 ms with this value, 42 ms if threads always spin, and 62 ms if
# they sleep at once.
_SPINS = "10000"


def set_thread_count(count: int | None = None) -> None:
    """Set the number of threads of this process and its children.

    `count` overrides OMP_NUM_THREADS. If neither is set, use one thread for each processor that
    this process may use and that other processes leave free, but at least 1. The number of threads
    affects the last bits of results, because it decides how sums are split. So a run reports it.
    Idle threads sleep instead of spinning, unless OMP_WAIT_POLICY is set. Raise AuditError if the
    count is below 1.
    """
    if count is not None and count < 1:
        raise AuditError(f"expected --threads >= 1, got {count}")
    if torch := _get_loaded_torch():  # its threads have already read the environment
        if count is not None:
            torch.set_num_threads(count)
        return
    if count is not None:
        os.environ["OMP_NUM_THREADS"] = str(count)
    elif (
        "OMP_NUM_THREADS" not in os.environ
        and (free := min(_read_cgroup_quota(), _count_idle_processors()))
        < count_usable_processors()
    ):
        os.environ["OMP_NUM_THREADS"] = str(max(1, int(free)))
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
        # GNU's OpenMP ranks this above the policy.
        os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)


@contextmanager
def limit_torch_threads(count: int | None) -> Iterator[None]:
    """Limit torch to `count` threads during the block, for small work. None means no limit.

    A fixed number of threads splits sums in the same way on every machine, so results are equal.
    """
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(min(count or before, before))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def count_usable_processors() -> int:
    """Return the number of processors that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def describe_threads(count: int) -> str:
    """Return a phrase such as `2 of 2 processors` for `count` threads."""
    return f"{count} of {count_usable_processors()} processors"


@functools.cache
def measure_machine_gflops() -> float:
    """Return the best GFLOP/s of three products of 1,024 x 1,024 float32 matrices.

    With this number, timings on different machines can be compared.
    """
    import torch

    a = torch.ones(1024, 1024)
    b = torch.ones(1024, 1024)
    best = math.inf
    for _ in range(3):
        start = time.perf_counter()
        a @ b
        best = min(best, time.perf_counter() - start)
    return 2 * 1024**3 / best / 1e9


def _get_loaded_torch() -> Any:
    """Return the torch module, or None if torch is not loaded."""
    return sys.modules.get("torch")


def _count_idle_processors() -> float:
    """Return the number of processors that other processes leave idle.

    Return inf if the number is unknown (there is no /proc).
    """
    try:
        running = []
        for _ in range(_LOOKS):
            # The field is "running/all threads".
            running.append(int(_LOAD.read_text().split()[3].partition("/")[0]))
            time.sleep(_BETWEEN)
        # Without this process.
        return (os.cpu_count() or 1) - (statistics.median(running) - 1)
    except (OSError, ValueError, IndexError):
        return math.inf


def _read_cgroup_quota() -> float:
    """Return the processor quota of the control group (version 2 or 1), or inf without a limit.

    OpenMP respects the process's processor affinity, but not this quota.
    """
    for names in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        try:
            quota, period = " ".join((_GROUPS / name).read_text() for name in names).split()
            if quota not in ("max", "-1"):
                return float(quota) / float(period)
            return float("inf")
        except (OSError, ValueError):
            continue
    return float("inf")
