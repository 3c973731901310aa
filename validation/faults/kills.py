"""Send SIGKILL to every command at random moments, continue it, and compare the final files.

They must equal the files of an undisturbed command. On Ray, a driver is also killed, whose run is
continued with --resume, and a worker, whose run continues by itself.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from validation.faults.alike import differences, left_over
from validation.faults.forks import Ended, Moment
from validation.faults.rows import Recovery
from validation.faults.worlds import RAY, CommandPhase, FaultCommand, World

_TRIES = 4  # tries to hit a moment before the phase ends
_AGAIN = 0.25  # probability that a resumed command is killed, too


def rows(world: World, case: FaultCommand, kills: int, seed: int) -> Iterator[Recovery]:
    """Yield the results of `kills` kills in each phase of a command.

    The moments are spread over the phase's processor time: one random moment in each equal part.
    """
    lasting = world.lasting(case)
    for phase in case.phases:
        rng = random.Random(f"{seed} {case.name} {phase.name}")
        for number in range(kills):
            share = (number + rng.random()) / kills
            yield _killed(world, case, phase, share, lasting[phase.name], rng)


def _killed(
    world: World,
    case: FaultCommand,
    phase: CommandPhase,
    share: float,
    lasting: float,
    rng: random.Random,
) -> Recovery:
    for _ in range(_TRIES):
        stand = world.stand(case)
        first = world.run(case, stand, moment=phase.moment(stand, share * lasting))
        if first.sent and first.code == -9:
            break
        share *= 0.7  # it was faster this time
        shutil.rmtree(stand)
    else:
        raise AssertionError(f"{case.name}, {phase.name}: over before it could be killed")
    seen, kills = on_disk(stand, case), 1
    if rng.random() < _AGAIN:
        second = world.run(
            case, stand, case.again(stand), Moment(lambda: True, rng.random() * lasting)
        )
        kills += second.code == -9
    after = world.run(case, stand, case.again(stand))
    moment = f"{share:.0%} of it done; {seen}"
    row = recovered(
        world,
        case,
        stand,
        "SIGKILL",
        moment,
        first,
        case.how(stand),
        after,
        during=phase.name,
        kills=kills,
    )
    if row.held:
        shutil.rmtree(stand)
    return replace(row, said="")


def recovered(
    world: World,
    case: FaultCommand,
    stand: Path,
    fault: str,
    moment: str,
    first: Ended,
    then: str,
    after: Ended,
    during: str = "",
    **more: Any,
) -> Recovery:
    """Return the row of a fault, with how the final files differ from the undisturbed command's.

    first: the end of the disturbed command; then: what was done next; after: the end of the
    command that continued.
    """
    said, then_said = (one.line.replace(str(stand), ".") for one in (first, after))
    different = tuple(compared(world, case, stand))
    return Recovery(
        fault,
        during,
        case.told,
        moment,
        said,
        first.code,
        then,
        then_said,
        after.code,
        different,
        **more,
    )


def on_disk(stand: Path, case: FaultCommand) -> str:
    """Return how many finished secrets and files there were, as a phrase."""
    journals = {
        name: stand / case.made[0] / f"{name}.jsonl" for name in ("guesses", "observations")
    }
    counts = [
        f"{path.read_bytes().count(10)} {name}" for name, path in journals.items() if path.exists()
    ]
    files = sum(path.is_file() for made in case.made for path in (stand / made).rglob("*"))
    half = len(left_over(stand))
    return ", ".join([*counts, f"{files} files" + (f" and {half} half written" if half else "")])


def compared(world: World, case: FaultCommand, stand: Path) -> Iterator[str]:
    """Yield a sentence for each difference between the files here and the undisturbed command's."""
    whole, _ = world.whole(case)
    for made in case.made:
        if not (stand / made).exists():
            yield f"{made} is missing"
            continue
        yield from differences(stand / made, whole / made)
    yield from (f"{name} was left half written" for name in left_over(stand))


# --- Ray ---


def rows_of_ray(world: World, kills: int, seed: int) -> Iterator[Recovery]:
    rng = random.Random(f"{seed} ray")
    world.whole(RAY)
    for number in range(kills):
        yield _lost(world, "the driver", (number + rng.random()) / kills)
        yield _lost(world, "a worker", (number + rng.random()) / kills)


def _lost(world: World, who: str, share: float) -> Recovery:
    """Kill the driver or a worker when this share of the run's secrets is finished."""
    whole, _ = world.whole(RAY)
    stand = world.stand(RAY)
    lines = share * _finished(whole)
    running = world.start(RAY, stand)
    running.until(lambda: _finished(stand) >= max(1, lines))
    moment, workers = f"{share:.0%} of it done; {on_disk(stand, RAY)}", _workers(stand)
    driver = who == "the driver"
    os.kill(running.pid if driver else workers[0], signal.SIGKILL)
    after = first = running.ended()
    if driver:
        after = world.run(RAY, stand, RAY.again(stand))
        deadline = time.monotonic() + 30
        while _workers(stand):  # none outlives its driver
            if time.monotonic() > deadline:
                raise TimeoutError("workers outlived their driver")
            time.sleep(0.05)
    then, more = (
        "--resume" if driver else "nothing: the worker is replaced",
        {"expected": (-9 if driver else 0, 0)},
    )
    row = recovered(
        world, RAY, stand, "SIGKILL", moment, first, then, after, f"Ray, {who}", kills=1, **more
    )
    shutil.rmtree(stand)
    return row


def _finished(stand: Path) -> int:
    files = (stand / "run" / f"{name}.jsonl" for name in ("guesses", "observations"))
    return sum(path.read_bytes().count(10) for path in files if path.exists())


def _workers(stand: Path) -> list[int]:
    """Return the ids of the worker processes of the run in this folder."""
    found = []
    for process in Path("/proc").iterdir():
        try:
            ours = (
                process.name.isdigit() and str(stand).encode() in (process / "environ").read_bytes()
            )
            if ours and (process / "cmdline").read_bytes().startswith(b"ray::_Worker"):
                found.append(int(process.name))
        except OSError:
            continue
    return sorted(found)
