"""Describe a run's machine, which may affect the numbers, and measure memory use."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path

import psutil
import torch

from auditor import __version__
from auditor.core import threads
from auditor.models.base import LanguageModel
from auditor.models.huggingface import HuggingFaceModel
from auditor.models.weights import resolve_model_device


def describe_environment(device: str) -> dict[str, str]:
    """Describe the software and hardware that may affect numbers, with the working folder's commit.

    The result is keyed by name, such as `torch` and `machine`. The commit is left out outside a git
    repository.

    Args:
        device: name of the device in the plan.
    """
    device = str(resolve_model_device(device))
    if device.startswith("cuda"):
        made_of = torch.cuda.get_device_name(device)
    else:
        made_of = f"{os.cpu_count()} cores"
    return {
        "python": platform.python_version(),
        **_list_library_versions(),
        **_describe_zlib(),
        "machine": f"{platform.system()} {platform.machine()}, {made_of}",
        "threads": threads.describe_threads(torch.get_num_threads()),
        "gemm": f"{threads.measure_machine_gflops():.0f} GFLOP/s in float32 on the processor",
        "device": device,
        **({"commit": commit} if (commit := _format_current_commit()) else {}),
    }


def describe_versions(model: LanguageModel | None = None) -> str:
    """Return the versions of the programs, and the precision with which a model answers."""
    versions = {"audit": __version__, **_list_library_versions()}
    parts = list(map(" ".join, versions.items()))
    if isinstance(model, HuggingFaceModel):
        parts.append(str(model.model.dtype).removeprefix("torch."))
    return ", ".join(parts)


def _list_library_versions() -> dict[str, str]:
    names = ("torch", "transformers", "peft", "numpy")
    return dict(zip(names, map(importlib.metadata.version, names), strict=True))


def _describe_zlib() -> dict[str, str]:
    """Return the version of the zlib library.

    Some Pythons contain zlib-ng, whose compressed sizes differ.
    """
    try:
        import zlib  # some Pythons are built without it
    except ImportError:
        return {}
    return {"zlib": zlib.ZLIB_RUNTIME_VERSION}


def _format_current_commit() -> str:
    """Return the hash of the working folder's commit.

    Add `-dirty` if tracked files changed. Return "" outside a git repository.
    """
    head = _run_git_without_hooks("rev-parse", "--verify", "HEAD")
    if head is None or head.returncode:
        return ""
    # Find the programs that the folder's configuration would let git run on files.
    filters = _run_git_without_hooks(
        "config", "--name-only", "--get-regexp", r"^filter\..*\.(clean|smudge|process|required)$"
    )
    off = []
    for name in [] if filters is None else filter(None, filters.stdout.split("\n")):
        off.append(f"{name}={'false' if name.endswith('required') else ''}")
    changed = _run_git_without_hooks(
        "diff",
        "--quiet",
        "--no-ext-diff",
        "--no-textconv",
        "--ignore-submodules=all",
        "HEAD",
        off=off,
    )
    if changed is None or changed.returncode:
        return f"{head.stdout.strip()}-dirty"
    return head.stdout.strip()


def _run_git_without_hooks(
    *arguments: str, off: Sequence[str] = ()
) -> subprocess.CompletedProcess[str] | None:
    """Run git without starting any program that a repository's settings may name.

    Such programs are file monitors and hooks, which are always disabled. Return None if git is
    missing.

    Args:
        off: further git settings, as `name=value`, that disable programs such as filters.
    """
    settings = list[str]()
    for setting in ("core.fsmonitor=false", "core.hooksPath=/dev/null", *off):
        settings += ("-c", setting)
    # --no-optional-locks: do not rewrite the repository's index.
    command = ["git", "--no-optional-locks", *settings, *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None


def reset_peak_memory() -> None:
    """Reset the measurement of peak memory, if the system allows."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    try:
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM: proc(5)
    except OSError:
        return  # not Linux: the mark is then that of the whole run


def measure_peak_memory(device: torch.device) -> float:
    """Return the peak memory since the last reset, in MB.

    For a model on a GPU this is GPU memory, otherwise the process's resident memory.
    """
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
    ):  # no /proc: ask the process on Windows, getrusage on macOS, both in bytes
        memory = psutil.Process().memory_info()
        if hasattr(memory, "peak_wset"):
            return float(memory.peak_wset) / 1e6
        import resource

        return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) / 1e6
