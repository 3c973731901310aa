"""Choose batch sizes that fit into free memory, and halve a batch size that does not fit.

Batch sizes affect only the run time, never a result.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from auditor.core import machine_memory
from auditor.core.arrays import Ints
from auditor.core.errors import is_memory_error, is_onednn_memory_error

T = TypeVar("T")

# The share of free memory: the rest is for activations, for distributions in more precision, and
# for rows during a move to a larger buffer.
_SHARE = 4


def choose_memory_budget(device: torch.device, most: int) -> int:
    """Return how many bytes decoding rows may use: a quarter of the free memory of `device`.

    `most` is the upper limit on a CPU, where larger batches are no faster.
    """
    share = measure_free_device_memory(device) // _SHARE
    return max(1, share if device.type in ("cuda", "mps") else min(most, share))


def measure_free_device_memory(device: torch.device) -> int:
    """Return how many more bytes this process may use on `device`, within its limits."""
    if device.type == "cuda":
        # Reserved by this process, but unused.
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    if device.type == "mps":
        return torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
    return machine_memory.measure_free_memory()


def release_unused_memory() -> None:
    """Return unused memory to the system and the accelerator.

    Without this call, glibc would keep the memory, and oneDNN might find none for its kernels.
    """
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    if sys.platform == "linux":
        malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if malloc_trim:  # musl has none
            malloc_trim(0)


def wrap_threaded_work(work: Callable[[int], T]) -> Callable[[int], T]:
    """Return a function that runs `work` in a new thread.

    After an out-of-memory error, oneDNN compiles no more kernels in the same thread, so only a new
    thread can try again. The new thread keeps the current context and gradient mode.
    """
    context = copy_context()
    # A decorator, because new threads begin with gradients enabled. Creating it also sets the mode
    # of this thread, to its current value.
    set_same_mode = torch.set_grad_enabled(torch.is_grad_enabled())

    def run_work(size: int) -> T:
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(context.run, set_same_mode(work), size).result()

    return run_work


@dataclass
class BatchSizeLimit:
    """A batch size that is permanently halved whenever a batch does not fit into memory.

    `minimum` is the smallest batch size.
    """

    size: int
    minimum: int = 1

    def run_within_memory(self, work: Callable[[int], T], most: int | None = None) -> tuple[int, T]:
        """Run `work(size)`, halving the size until the batch fits. Return the size and the result.

        `most` is the largest size to try. An out-of-memory error is raised only at size `minimum`.
        All other errors of `work` are raised at once.
        """
        size = self.size
        if most is not None:
            size = min(size, most)
        run_work = work
        in_new_thread = False
        while True:
            try:
                return size, run_work(size)
            except (RuntimeError, MemoryError) as error:
                needs_new_thread = not in_new_thread and is_onednn_memory_error(error)
                can_retry = size > self.minimum or needs_new_thread
                if not is_memory_error(error) or not can_retry:
                    raise
            # After the block: inside it, the error keeps the tensors of its frames alive.
            release_unused_memory()
            size = max(self.minimum, size // 2)
            self.size = size
            if needs_new_thread:
                run_work = wrap_threaded_work(work)
                in_new_thread = True

    def run_pieces_within_memory(
        self,
        count: int,
        work: Callable[[slice], T],
    ) -> Iterator[tuple[slice, T]]:
        """Run `work` on slices of range(count) that fit into memory; yield slices with results.

        Raise the same errors as `run_within_memory`.
        """
        start = 0
        while start < count:

            def run_piece(size: int, first: int = start) -> T:
                return work(slice(first, first + size))

            size, result = self.run_within_memory(run_piece, count - start)
            yield slice(start, start + size), result
            start += size


def group_equal_shapes(
    lengths: Sequence[tuple[int, int]] | NDArray[Any],
    batch_size: int | None = None,
) -> Iterator[Ints]:
    """Yield batches of indices with equal (prefix, suffix) lengths, which need no padding.

    `lengths` holds (tokens in the prefix, tokens in the suffix). `batch_size` is the largest batch;
    None for no limit.
    """
    indices_by_shape = defaultdict[tuple[int, int], list[int]](list)
    for i, (n_prefix, n_suffix) in enumerate(np.asarray(lengths).tolist()):
        indices_by_shape[n_prefix, n_suffix].append(i)
    for indices in indices_by_shape.values():
        step = batch_size or len(indices)
        for start in range(0, len(indices), step):
            yield np.array(indices[start : start + step])
