"""The machine that a run is on: what its numbers may depend on, and the memory it takes."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path

import psutil
import torch

from auditor.core import threads
from auditor.models.weights import resolve_model_device


def describe_environment(device: str) -> dict[str, str]:
    """What the numbers may depend on, and the commit that the command stood in, where git knows
    one.

    device: as the plan says it.
    """
    versions = {
        name: importlib.metadata.version(name)
        for name in ("torch", "transformers", "peft", "numpy")
    }
    device = str(resolve_model_device(device))
    made_of = (
        torch.cuda.get_device_name(device)
        if device.startswith("cuda")
        else f"{os.cpu_count()} cores"
    )
    return {
        "python": platform.python_version(),
        **versions,
        **_zlib_build(),
        "machine": f"{platform.system()} {platform.machine()}, {made_of}",
        "threads": threads.describe_threads(torch.get_num_threads()),
        "gemm": f"{threads.measure_machine_gflops():.0f} GFLOP/s in float32 on the processor, by "
        "which timings "
        "of machines compare",
        "device": device,
        **({"commit": commit} if (commit := _current_commit_label()) else {}),
    }


def _zlib_build() -> dict[str, str]:
    """The zlib that compressed sizes are of: zlib-ng, which some Pythons are built with, makes
    other ones."""
    try:
        import zlib  # some Pythons are built without it
    except ImportError:
        return {}
    return {"zlib": zlib.ZLIB_RUNTIME_VERSION}


def _current_commit_label() -> str:
    """`4f2a…`, `4f2a…-dirty` where tracked files were changed since; "" where git knows none."""
    head = _run_git_without_hooks("rev-parse", "--verify", "HEAD")
    if head is None or head.returncode:
        return ""
    # What the folder's own configuration would have git run on the files that it looks at.
    filters = _run_git_without_hooks(
        "config", "--name-only", "--get-regexp", r"^filter\..*\.(clean|smudge|process|required)$"
    )
    names = filters.stdout.split("\n") if filters is not None else []
    off = [f"{name}={'false' if name.endswith('required') else ''}" for name in names if name]
    changed = _run_git_without_hooks(
        "diff",
        "--quiet",
        "--no-ext-diff",
        "--no-textconv",
        "--ignore-submodules=all",
        "HEAD",
        off=off,
    )
    return (
        f"{head.stdout.strip()}-dirty"
        if changed is None or changed.returncode
        else head.stdout.strip()
    )


def _run_git_without_hooks(
    *asked: str, off: Sequence[str] = ()
) -> subprocess.CompletedProcess[str] | None:
    """What git says, without the programs that a folder may name for it: monitors, hooks, filters.
    None: no git.

    off: settings more, as `name=value`.
    """
    settings = [
        word
        for one in ("core.fsmonitor=false", "core.hooksPath=/dev/null", *off)
        for word in ("-c", one)
    ]
    # --no-optional-locks: the index of the repository is not written anew.
    command = ["git", "--no-optional-locks", *settings, *asked]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None


def reset_peak_memory() -> None:
    """Starts a new high-water mark, where the system has one to reset."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    try:
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM: proc(5)
    except OSError:
        return  # not Linux: the mark is then that of the whole run


def peak_memory_mb(device: torch.device) -> float:
    """Highest resident memory since the last reset, in MB; of the GPU where the model is on one."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e6
    try:
        line = next(
            x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmHWM")
        )
        return float(line.split()[1]) * 1024 / 1e6  # its kB are KiB
    except (
        OSError,
        StopIteration,
    ):  # no /proc: Windows says it of the process, macOS by getrusage, both in bytes
        own = psutil.Process().memory_info()
        if hasattr(own, "peak_wset"):
            return float(own.peak_wset) / 1e6
        import resource

        return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) / 1e6
