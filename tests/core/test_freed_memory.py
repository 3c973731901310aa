"""Freed memory stays with the process for the next allocation."""

import platform
import resource
import subprocess
import sys

import pytest

# Page faults while blocks of 16 and 4 MiB are allocated, written and freed ten times.
_COUNT_FAULTS = """
import resource
from auditor.core.freed_memory import keep_freed_memory

if {keeps}:
    keep_freed_memory()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    # The second block lets the heap's end move when the first is freed.
    bytearray(2**24), bytearray(2**22)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def _count_page_faults(keeps: bool, **environment: str) -> int:
    program = _COUNT_FAULTS.format(keeps=keeps)
    command = [sys.executable, "-c", program]
    printed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return int(printed.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has these parameters")
def test_freed_memory_is_fetched_once() -> None:
    n_pages = (2**24 + 2**22) / resource.getpagesize()
    assert _count_page_faults(True) < 1.2 * n_pages < _count_page_faults(False)
    # What the user sets stays: larger blocks are returned each time.
    by_user = _count_page_faults(True, MALLOC_MMAP_THRESHOLD_=str(2**20))
    assert by_user > 9 * n_pages
