"""The server of the tests in a process of its own, so that what is forked beside it has no threads of its own."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

from auditor.models.loading import load
from benchmarks.checks.faults.worlds import World
from tests.remote.conftest import save
from tests.remote.server import Server, serving


@contextmanager
def server(world: World) -> Iterator[None]:
    """While the block runs, cases with an API find one."""
    folder, url = world.folder / "given" / "served", world.folder / "url"
    save(folder)
    pid = os.fork()
    if pid == 0:
        try:
            with serving(Server(load(str(folder)))) as address:
                scratch = url.with_suffix(".new")
                scratch.write_text(address)
                scratch.rename(url)
                signal.pause()
        finally:
            os._exit(0)
    try:
        while not url.exists():
            time.sleep(0.01)
        world.url = url.read_text()
        yield
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
