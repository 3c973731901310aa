"""The server of the tests in a process of its own, so that what is forked beside it has no threads of its own."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import Value
from pathlib import Path
from typing import Any

from auditor.models.loading import load
from benchmarks.checks.faults.worlds import World
from tests.remote.conftest import save
from tests.remote.server import Server, serving


class _Counted(list[Any]):
    """What is appended is counted where other processes see it."""

    def __init__(self, count: Any) -> None:
        self.count_ = count

    def append(self, asked: Any) -> None:
        with self.count_.get_lock():
            self.count_.value += 1


@contextmanager
def server(world: World) -> Iterator[None]:
    """While the block runs, cases with an API find one, and how many requests it was asked."""
    folder, count, url = world.folder / "given" / "served", Value("i", 0), world.folder / "url"
    save(folder)
    pid = os.fork()
    if pid == 0:
        try:
            _serve(folder, count, url)
        finally:
            os._exit(0)
    try:
        while not url.exists():
            time.sleep(0.01)
        world.url, world.asked = url.read_text(), lambda: int(count.value)
        yield
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _serve(folder: Path, count: Any, url: Path) -> None:
    answers = Server(load(str(folder)))
    answers.asked = _Counted(count)
    with serving(answers) as address:
        scratch = url.with_suffix(".new")
        scratch.write_text(address)
        scratch.rename(url)
        signal.pause()
