"""SIGKILL at random moments of every command, then the command that goes on: does it end as if nothing had been?"""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from pathlib import Path

from benchmarks.checks.faults.alike import differences, left_over
from benchmarks.checks.faults.forks import Moment, Running
from benchmarks.checks.faults.rows import Recovery
from benchmarks.checks.faults.worlds import CommandPhase, FaultCommand, World

_TRIES = 4  # for a moment before the phase ends
_AGAIN = 0.25  # how often what goes on is killed too


def rows(world: World, case: FaultCommand, kills: int, seed: int) -> Iterator[Recovery]:
    """So many kills in each phase of a command, at moments spread evenly over its processor time, but for chance."""
    lasting = _lasting(world, case)
    for phase in case.phases:
        rng = random.Random(f"{seed} {case.name} {phase.name}")
        for number in range(kills):
            share = (number + rng.random()) / kills
            yield _killed(world, case, phase, share, lasting[phase.name], rng)


def _lasting(world: World, case: FaultCommand) -> dict[str, float]:
    """Seconds of processor time that each phase of the undisturbed command takes."""
    stand = world.stand(case)
    running = Running(world.words(case.words), stand, world.conditions(stand))
    found = {}
    for phase in case.phases:
        running.until(lambda phase=phase: phase.begun(stand))  # type: ignore[misc]
        begun = running.seconds
        running.until(lambda phase=phase: phase.over(stand))  # type: ignore[misc]
        found[phase.name] = running.seconds - begun
    ended = running.ended()
    assert ended.code == 0, ended.said
    shutil.rmtree(stand)
    return found


def _killed(
    world: World, case: FaultCommand, phase: CommandPhase, share: float, lasting: float, rng: random.Random
) -> Recovery:
    for _ in range(_TRIES):
        stand = world.stand(case)
        ended = world.run(case, stand, moment=_at(phase, stand, share * lasting))
        if ended.sent and ended.code == -9:
            break
        share *= 0.7  # it was faster this time
        shutil.rmtree(stand)
    else:
        raise AssertionError(f"{case.name}, {phase.name}: over before it could be killed")
    seen, kills = on_disk(stand, case), 1
    if rng.random() < _AGAIN:
        second = world.run(case, stand, case.again(stand), Moment(lambda: True, rng.random() * lasting))
        kills += second.code == -9
    after = world.run(case, stand, case.again(stand))
    row = Recovery(
        fault="SIGKILL",
        during=phase.name,
        command=case.told,
        moment=f"{share:.0%} of it done; {seen}",
        said="",
        code=ended.code,
        then=case.how(stand),
        then_said=after.line,
        then_code=after.code,
        different=tuple(compared(world, case, stand)),
        kills=kills,
    )
    if row.held:
        shutil.rmtree(stand)
    return row


def _at(phase: CommandPhase, stand: Path, seconds: float) -> Moment:
    return Moment(lambda: phase.begun(stand), seconds)


def on_disk(stand: Path, case: FaultCommand) -> str:
    """What there was of it: finished secrets and files."""
    journals = {name: stand / case.made[0] / f"{name}.jsonl" for name in ("guesses", "observations")}
    counts = [f"{path.read_bytes().count(10)} {name}" for name, path in journals.items() if path.exists()]
    files = sum(path.is_file() for made in case.made for path in (stand / made).rglob("*"))
    half = len(left_over(stand))
    return ", ".join([*counts, f"{files} files" + (f" and {half} half written" if half else "")])


def compared(world: World, case: FaultCommand, stand: Path) -> Iterator[str]:
    """How what lies there differs from what the undisturbed command made: sentences, none where it does not."""
    whole, _ = world.whole(case)
    for made in case.made:
        if not (stand / made).exists():
            yield f"{made} is missing"
            continue
        yield from differences(stand / made, whole / made)
    yield from (f"{name} was left half written" for name in left_over(stand))
