"""Measure how much of the machine's memory (not the accelerators') this process may still use."""

from __future__ import annotations

from pathlib import Path

import psutil

_GROUP = Path("/sys/fs/cgroup")
_NO_LIMIT = 2**60  # bytes; more than any control group reports


def measure_free_memory() -> int:
    """Return the number of bytes that this process may still use.

    The limits of the process and of its container are respected.
    """
    return max(
        0,
        min(
            psutil.virtual_memory().available,
            _measure_control_group_memory(),
            _process_limit_free_bytes(),
        ),
    )


def _measure_control_group_memory() -> int:
    """Return the free bytes of a container's or cluster job's control group (version 2).

    Inactive pages of cached files count as free.
    """
    try:
        limit, used = (
            (_GROUP / name).read_text().strip() for name in ("memory.max", "memory.current")
        )
        cached = dict(line.split() for line in (_GROUP / "memory.stat").read_text().splitlines())[
            "inactive_file"
        ]
        if limit == "max":
            return _NO_LIMIT
        return int(limit) - int(used) + int(cached)
    except (OSError, ValueError, KeyError):
        return _NO_LIMIT


def _process_limit_free_bytes() -> int:
    """Return the number of bytes that `ulimit -v` still allows."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return _NO_LIMIT
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return _NO_LIMIT
    return limit - psutil.Process().memory_info().vms
