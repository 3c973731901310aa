"""SIGKILL on Ray: of the driver, whose run goes on with --resume, and of a worker, whose run goes on by itself."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.checks.faults.forks import Running
from benchmarks.checks.faults.kills import compared, on_disk
from benchmarks.checks.faults.rows import Recovery
from benchmarks.checks.faults.worlds import RAY, World

_WORKER = b"ray::_Worker"


def rows(world: World, kills: int, seed: int) -> Iterator[Recovery]:
    rng = random.Random(f"{seed} ray")
    world.whole(RAY)
    for number in range(kills):
        yield _lost(world, "the driver", (number + rng.random()) / kills)
        yield _lost(world, "a worker", (number + rng.random()) / kills)


def _lost(world: World, who: str, share: float) -> Recovery:
    """One of the processes of the run is killed when so large a share of its secrets is finished."""
    whole, _ = world.whole(RAY)
    stand = world.stand(RAY)
    lines = share * _finished(whole)
    running = Running(world.words(RAY.words), stand, world.conditions(stand))
    running.until(lambda: _finished(stand) >= max(1, lines))
    seen, workers = on_disk(stand, RAY), _workers(stand)
    if who == "the driver":
        running.send(signal.SIGKILL)
    else:
        os.kill(workers[0], signal.SIGKILL)
    first = running.ended()
    after, then = first, "nothing: the worker is replaced"
    if who == "the driver":
        after, then = world.run(RAY, stand, RAY.again(stand)), "--resume"
        _wait(lambda: not _workers(stand))  # none outlives its driver
    code = -9 if who == "the driver" else 0
    row = Recovery(
        "SIGKILL",
        f"Ray, {who}",
        RAY.told,
        f"{share:.0%} of it done; {seen}",
        first.line,
        first.code,
        then,
        after.line,
        after.code,
        tuple(compared(world, RAY, stand)),
        kills=1,
        expected=(code, 0),
    )
    shutil.rmtree(stand)
    return row


def _finished(stand: Path) -> int:
    files = (stand / "run" / f"{name}.jsonl" for name in ("guesses", "observations"))
    return sum(path.read_bytes().count(10) for path in files if path.exists())


def _workers(stand: Path) -> list[int]:
    """The processes of the workers of the run that stands here."""
    found = []
    for process in Path("/proc").iterdir():
        try:
            ours = process.name.isdigit() and str(stand).encode() in (process / "environ").read_bytes()
            if ours and (process / "cmdline").read_bytes().startswith(_WORKER):
                found.append(int(process.name))
        except OSError:
            continue
    return sorted(found)


def _wait(happened: object, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not happened():  # type: ignore[operator]
        if time.monotonic() > deadline:
            raise TimeoutError("workers outlived their driver")
        time.sleep(0.05)
