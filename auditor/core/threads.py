"""How many threads a run takes, and how they wait for each other. Imports nothing heavy: it must
come before torch.

OpenMP reads its environment once, when torch loads it. By default a thread that waits for another
spins: beside other work it burns the time that the one it waits for would need. Asleep, it costs
nothing; but to sleep and wake at each of a small model's many short waits costs more than a second
thread gains. So it spins for microseconds, then sleeps. And threads that must wait for each other
lose more than their share to other work, as one of them is always kept
waiting: where others keep the processors busy as a run begins, it takes as many threads as there
are processors free.
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
# seconds; the median of some looks, as what comes and goes takes no processor
_LOOKS, _BETWEEN = (
    7,
    0.01,
)
_SPINS = "10000"  # a training step of the lab: 45 ms so, 42 spinning on, 62 asleep at once


def set_thread_count(count: int | None = None) -> None:
    """Settles number and waiting of threads for this process and those it starts. count: wins over
    OMP_NUM_THREADS.

    Else there are as many as the processors this process may use and nobody else keeps busy, one at
    least. How sums are split depends on the number, and the last bits of results with it: a run
    says how many it took.
    Raises AuditError for a count below 1.
    """
    if count is not None and count < 1:
        raise AuditError(f"expected --threads >= 1, got {count}")
    if torch := _loaded_torch():  # its threads wait as they do
        if count is not None:
            torch.set_num_threads(count)
        return
    if count is not None:
        os.environ["OMP_NUM_THREADS"] = str(count)
    elif (
        "OMP_NUM_THREADS" not in os.environ
        and (free := min(_cgroup_processor_quota(), _idle_processor_count()))
        < usable_processor_count()
    ):
        os.environ["OMP_NUM_THREADS"] = str(max(1, int(free)))
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
        os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)  # which GNU's OpenMP heeds over the policy


@contextmanager
def limit_torch_threads(count: int | None) -> Iterator[None]:
    """At most so many torch threads in the block (None: no limit), for small work, whose threads
    wait for each other.

    With a fixed number, sums are split alike on every machine, and results are the same.
    """
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(min(count or before, before))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def usable_processor_count() -> int:
    """How many processors this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def describe_threads(count: int) -> str:
    """`2 of 2 processors`."""
    return f"{count} of {usable_processor_count()} processors"


@functools.cache
def measure_machine_gflops() -> float:
    """GFLOP/s of a product of two float32 matrices of 1,024 rows, the best of some: tells machines'
    timings apart."""
    import torch

    a, b, best = torch.ones(1024, 1024), torch.ones(1024, 1024), math.inf
    for _ in range(8):
        start = time.perf_counter()
        a @ b
        best = min(best, time.perf_counter() - start)
    return 2 * 1024**3 / best / 1e9


def _loaded_torch() -> Any:
    """torch, where something has loaded it."""
    return sys.modules.get("torch")


def _idle_processor_count() -> float:
    """Processors of the machine that nobody else is running on now; inf where the system does not
    say (no /proc)."""
    try:
        running = []
        for _ in range(_LOOKS):
            # "running/all threads"
            running.append(int(_LOAD.read_text().split()[3].partition("/")[0]))
            time.sleep(_BETWEEN)
        # one of them is this process
        return (os.cpu_count() or 1) - (statistics.median(running) - 1)
    except (OSError, ValueError, IndexError):
        return math.inf


def _cgroup_processor_quota() -> float:
    """Processors' worth of time that the control group grants, version 2 or 1; inf without a limit.

    OpenMP knows the affinity, not this.
    """
    for names in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        try:
            quota, period = " ".join((_GROUPS / name).read_text() for name in names).split()
            return float(quota) / float(period) if quota not in ("max", "-1") else float("inf")
        except (OSError, ValueError):
            continue
    return float("inf")
