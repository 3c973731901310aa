"""Let the C library keep freed memory for the next allocation.

By default, glibc returns much of a freed tensor to the system, and the next tensor of this size
fetches it again, page by page. A training step of the lab spends a sixth of its time on this.
"""

from __future__ import annotations

import ctypes
import os
import sys

# Number of each parameter in glibc's malloc.h, its value in bytes, and the variable that sets it.
_PARAMETERS = (
    # The end of the heap is returned only if more than 256 MiB of it are free.
    (-1, 2**28, "MALLOC_TRIM_THRESHOLD_"),
    # The heap grows by at least 16 MiB.
    (-2, 2**24, "MALLOC_TOP_PAD_"),
    # Blocks above 32 MiB are returned when freed; old versions of glibc accept no larger value.
    (-3, 2**25, "MALLOC_MMAP_THRESHOLD_"),
)


def keep_freed_memory() -> None:
    """Keep up to 256 MiB of freed memory in this process.

    Results do not change. Variables of the environment take precedence. Without glibc, this does
    nothing.
    """
    if sys.platform != "linux":
        return
    set_parameter = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_parameter is None:
        return
    for number, value, variable in _PARAMETERS:
        if variable not in os.environ:
            set_parameter(number, value)
