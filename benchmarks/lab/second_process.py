"""Train a lab's target and its ensembles in two processes at once, with one thread in each.

The processes share only the cache, where the lock of a part decides which of them trains it.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable
from contextlib import suppress
from typing import IO

import torch

from auditor.benchmarks.lab.lab import TARGET, Lab, name_ensemble
from auditor.core import threads
from auditor.core.freed_memory import keep_freed_memory
from auditor.core.safe_mode import is_safe_mode


def train_in_two_processes(lab: Lab, counts: Iterable[int | None]) -> None:
    """Train the lab's target in this process and its ensembles in a second one.

    Train nothing if no second processor is free, or if nothing is missing for one of the processes:
    the missing models are then trained on first use, as in any lab. If the second process fails,
    this process trains the ensembles, and the lab's notes say so.

    Args:
        counts: number of members of each ensemble (None: the recipe's).
    """
    missing = [c for c in counts if not (lab.folder / name_ensemble(lab.recipe, c)).is_dir()]
    if not missing or (lab.folder / TARGET).is_dir() or not _can_use_second_process(lab):
        return
    with tempfile.TemporaryFile() as errors, _start_second_process(errors) as second:
        is_waiting = threading.Event()
        reader = threading.Thread(target=_show_steps, args=(lab, second.stdout, is_waiting))
        reader.start()
        try:
            assert second.stdin is not None  # it is a pipe
            with suppress(BrokenPipeError):  # the process has failed already
                # Leave the pipe open: it ends when this process ends, however that happens.
                second.stdin.write(
                    pickle.dumps((type(lab), lab.recipe, lab.folder.parents[1], missing))
                )
            # The second process still imports torch. When it needs the public model, this process
            # has the lock.
            lab.target_folder()
            is_waiting.set()
            for count in reversed(missing):
                lab.ensemble_folder(count)
            if second.poll():
                errors.seek(0)
                last_line = errors.read().decode(errors="replace").strip().rpartition("\n")[2]
                lab.add_note(
                    "the process that trains the lab's ensemble beside its target failed "
                    f"({last_line or f'exit code {second.returncode}'}): the run itself trained it"
                )
        finally:
            second.kill()
            reader.join()


def _can_use_second_process(lab: Lab) -> bool:
    """Return whether a training of the lab leaves a thread and a processor to this run."""
    return (
        lab.threads == 1
        and lab.parts.makes
        and torch.get_num_threads() > 1
        and threads.count_usable_processors() > 1
        and not is_safe_mode()
    )


def _start_second_process(errors: IO[bytes]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        # -P: the working folder may contain modules with the names of ours.
        [sys.executable, "-P", "-m", __name__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        bufsize=0,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def _show_steps(lab: Lab, steps: IO[bytes], is_waiting: threading.Event) -> None:
    """Show the steps of the second process while this process waits for its ensembles.

    steps: a JSON list for each step: its description, the number of finished steps, and of all.
    """
    for line in steps:
        with suppress(ValueError):  # a library may print, too
            step = json.loads(line)
            if is_waiting.is_set():
                lab.progress(*step)


def _print_step(*step: str | int) -> None:
    print(json.dumps(step), flush=True)


def _exit_with_first_process() -> None:
    # Until the first process ends. A buffered read would hold a lock that Python's exit needs.
    os.read(sys.stdin.fileno(), 1)
    os._exit(1)  # sys.exit would end only this thread


def _train_ensembles() -> None:
    kind, recipe, cache, counts = pickle.load(sys.stdin.buffer)
    threading.Thread(target=_exit_with_first_process, daemon=True).start()
    keep_freed_memory()
    lab = kind(recipe, cache, progress=_print_step)
    for count in counts:
        lab.ensemble_folder(count)


if __name__ == "__main__":
    _train_ensembles()
