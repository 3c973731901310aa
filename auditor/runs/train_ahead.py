"""Models of later rows, trained in a process of its own while the first rows are measured.

It leaves what it trains in the lab's cache, where the run finds it; where it fails, the run trains
it itself.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch

from auditor.core import threads
from auditor.core.plan import Plan
from auditor.core.safe_mode import is_safe_mode
from auditor.runs.cell_work import WorkerSite
from auditor.runs.selection import PluginSelection
from auditor.runs.site import Site

_THREADS = 1  # of the other process


@contextmanager
def later_models_trained_in_background(
    plan: Plan, site: Site, selection: PluginSelection
) -> Iterator[Callable[[], None]]:
    """While the block lasts, what later rows need is trained beside it: where there is a processor
    and a thread for it.

    Yields a function that takes back the other process's thread once that has ended. Nothing is
    left running behind the block.
    """
    before = torch.get_num_threads()
    spare = before > _THREADS and threads.usable_processor_count() > _THREADS and not is_safe_mode()
    if (
        not (spare and site.trains_ahead)
        or plan.objects
        or not site.models_to_train(selection.defenses_by_row_name, ())
    ):
        yield lambda: None
        return
    site.public_model  # noqa: B018 - what all others are made of: the other process would wait for it
    with subprocess.Popen(
        [sys.executable, "-m", __name__],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": str(_THREADS)},
    ) as other:
        assert other.stdin is not None  # a pipe
        torch.set_num_threads(before - _THREADS)
        try:
            with suppress(BrokenPipeError):  # it could not begin
                pickle.dump(WorkerSite(plan), other.stdin)
                # not closed: its end tells the other process that the run has ended
                other.stdin.flush()
            # `poll` is None while it runs.
            yield lambda: torch.set_num_threads(before - _THREADS * (other.poll() is None))
        finally:
            torch.set_num_threads(before)
            # The `with` waits for its end.
            other.kill()


def _train_parts_of_defenses(there: WorkerSite) -> None:
    """What the defenses hold, in the order in which the run asks for it."""
    site, selection = there()
    for defense in selection.defenses_by_row_name.values():
        if "ensemble" in defense.needs:
            site.defense_parts.ensemble_served_by_defense(defense)
        if "trained" in defense.needs:
            site.defense_parts.model_trained_by_defense(defense)
        if "whole" in defense.needs:
            site.defense_parts.control_adapter_of_ensemble(defense)


def _exit_when_parent_ends() -> None:
    """The pipe ends where the run does, however it ends."""
    sys.stdin.buffer.read()
    # Not `sys.exit`, which would end this thread alone.
    os._exit(1)


if __name__ == "__main__":
    given: WorkerSite = pickle.load(sys.stdin.buffer)
    threading.Thread(target=_exit_when_parent_ends, daemon=True).start()
    _train_parts_of_defenses(given)
