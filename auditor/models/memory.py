"""How much is asked at once, by the memory that is free; halved wherever that turns out to be too much all the same.

Nothing but time depends on it: no result does. Knows no model.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass
from typing import TypeVar

import torch

from auditor.core import machine_memory
from auditor.core.errors import is_onednn_memory_error, is_out_of_memory

T = TypeVar("T")

# Of what is free: the rest is for activations, for distributions in more precision, and for rows while they move to
# more room.
_SHARE = 4


def decoding_memory_budget(device: torch.device, most: int) -> int:
    """Bytes that decoding rows may take at once: a quarter of the free memory; on a CPU at most `most`.

    most: the size beyond which a CPU gets no faster. An accelerator keeps getting faster with larger batches.
    """
    share = available_device_memory_bytes(device) // _SHARE
    return max(1, share if device.type in ("cuda", "mps") else min(most, share))


def available_device_memory_bytes(device: torch.device) -> int:
    """Bytes that this process could still take: of the accelerator, or of the machine within the limits set to it."""
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # ours, and in no use
        return torch.cuda.mem_get_info(device)[0] + kept
    if device.type == "mps":
        return torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
    return machine_memory.free_machine_memory_bytes()


def release_unused_memory() -> None:
    """Returns to the system, and to the accelerator, what nothing here holds any more.

    glibc keeps freed memory for its next `malloc`; kernels that oneDNN compiles map pages past it, and find none left.
    """
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):  # musl has none
        trim(0)


def wrap_work_in_new_thread(work: Callable[[int], T]) -> Callable[[int], T]:
    """`work` in a thread of its own, with this one's context and gradients.

    Where oneDNN once found no page to compile a kernel into, it compiles none in that thread ever again.
    """
    # As a decorator: a thread begins with gradients on. Making it sets the mode here, too, to what it is already.
    context, same = copy_context(), torch.set_grad_enabled(torch.is_grad_enabled())

    def run(size: int) -> T:
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(context.run, same(work), size).result()

    return run


@dataclass
class BatchSizeLimit:
    """How many of something are asked at once: halved wherever memory does not hold them, and then kept so."""

    size: int
    least: int = 1

    def run_within_memory(self, work: Callable[[int], T], most: int | None = None) -> tuple[int, T]:
        """The size that memory held, no more than `most`, and `work(size)`.

        Raises what `work` raises, and that of memory that holds not even `least`.
        """
        asked = self.size if most is None else min(self.size, most)
        run, apart = work, False
        while True:
            try:
                return asked, run(asked)
            except (RuntimeError, MemoryError) as error:
                move = not apart and is_onednn_memory_error(error)
                if not is_out_of_memory(error) or (asked <= self.least and not move):
                    raise
            # Behind the block: until it is left, the error holds on to what was made on the way to it.
            release_unused_memory()
            self.size = asked = max(self.least, asked // 2)
            if move:
                run, apart = wrap_work_in_new_thread(work), True

    def run_pieces_within_memory(self, count: int, work: Callable[[slice], T]) -> Iterator[tuple[slice, T]]:
        """`work` on slices of 0..count, `size` long at most: each with its result. Raises as `run_within_memory`."""
        start = 0
        while start < count:
            held, result = self.run_within_memory(lambda n, start=start: work(slice(start, start + n)), count - start)  # type: ignore[misc]
            yield slice(start, start + held), result
            start += held
