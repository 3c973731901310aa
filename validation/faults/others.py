"""Test faults other than kills: signals, full or read-only disks, two commands at once, damaged
files.
"""

from __future__ import annotations

import hashlib
import random
import resource
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from validation.faults.alike import left_over
from validation.faults.forks import Ended
from validation.faults.kills import on_disk, recovered
from validation.faults.rows import Recovery
from validation.faults.worlds import CommandPhase, FaultCommand, World

REFUSED, INTERRUPTED = 2, 130


def refused(
    world: World,
    case: FaultCommand,
    stand: Path,
    fault: str,
    moment: str,
    first: Ended,
    then: str,
    after: Ended,
    during: str = "",
) -> Recovery:
    """Return the row of a fault that the command refused or that interrupted it.

    after: the end of the command that continued.
    """
    expected = INTERRUPTED if first.sent else REFUSED, 0
    found = recovered(
        world, case, stand, fault, moment, first, then, after, during, expected=expected
    )
    shutil.rmtree(stand, ignore_errors=True)
    return found


def goes_on(
    world: World,
    case: FaultCommand,
    stand: Path,
    fault: str,
    moment: str,
    first: Ended,
    mended: str = "",
    during: str = "",
) -> Recovery:
    """Continue the command and return the row of its fault.

    mended: how the fault was repaired first, in words.
    """
    after = world.run(case, stand, case.again(stand))
    then = ", ".join(filter(None, (mended, case.how(stand))))
    return refused(world, case, stand, fault, moment, first, then, after, during)


def signals(
    world: World, case: FaultCommand, phase: CommandPhase, number: signal.Signals, seconds: float
) -> Recovery:
    """Send a signal that ends the command, then continue the command.

    The command must report the signal and leave no half-written file.
    """
    stand = world.stand(case)
    first = world.run(case, stand, moment=phase.moment(stand, seconds, number))
    half, seen = left_over(stand), on_disk(stand, case)
    found = goes_on(world, case, stand, number.name, seen, first, during=phase.name)
    return replace(
        found, different=(*found.different, *(f"{name} was left half written" for name in half))
    )


# --- no room ---


@contextmanager
def small(folder: Path, kilobytes: int) -> Iterator[Callable[[str], None]]:
    """Mount a file system of this size at the folder; yield a function that changes its options.

    This needs root.
    """
    folder.mkdir(parents=True, exist_ok=True)
    options = f"size={kilobytes}k,mode=0700"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], check=True)

    def again(changed: str) -> None:
        subprocess.run(["mount", "-o", f"remount,{changed}", str(folder)], check=True)

    try:
        yield again
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def full_disk(world: World, case: FaultCommand, place: str, share: float) -> Recovery:
    """Run the command with a full disk, then enlarge the disk and continue the command.

    place: the folder on this disk; share: the disk's size as a share of the folder's final size.
    """
    whole, _ = world.whole(case)
    size = sum(path.stat().st_size for path in (whole / place).rglob("*") if path.is_file())
    stand = world.stand(case)
    with small(stand / place, max(8, int(share * size / 1024))) as again:
        first = world.run(case, stand)
        again("size=200m")
        moment = f"room in {place}/ for {share:.0%} of what it holds in the end"
        found = goes_on(world, case, stand, "disk full", moment, first, "room made")
    shutil.rmtree(stand, ignore_errors=True)
    return found


def large_file(world: World, case: FaultCommand, size: int) -> Recovery:
    """Limit every file to `size` bytes (RLIMIT_FSIZE), which imitates a full disk without root."""
    stand = world.stand(case)
    limit = size, resource.RLIM_INFINITY
    first = world.start(
        case, stand, before=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    ).ended()
    return goes_on(
        world,
        case,
        stand,
        "no room for a file",
        f"no file beyond {size:,} bytes",
        first,
        "room made",
    )


def read_only(world: World, case: FaultCommand, phase: CommandPhase, place: str) -> Recovery:
    """Continue a killed run whose folder is read-only, then writable again.

    The failed attempt must not change the folder.
    """
    stand = world.stand(case)
    with small(stand / place, 200 * 1024) as again:
        world.run(case, stand, moment=phase.moment(stand))
        before = _fingerprint(stand / place)
        again("ro")
        first = world.run(case, stand, case.again(stand))
        untouched = _fingerprint(stand / place) == before
        again("rw")
        moment = f"{place}/ mounted read-only behind a kill"
        found = goes_on(world, case, stand, "read-only folder", moment, first, "writable again")
    shutil.rmtree(stand, ignore_errors=True)
    return (
        found
        if untouched
        else replace(found, different=(*found.different, "the folder was changed"))
    )


def not_ours(world: World, case: FaultCommand, phase: CommandPhase, place: str) -> Recovery:
    """Test as `read_only` does, but without root: the folder's permissions forbid writing."""
    stand = world.stand(case)
    world.run(case, stand, moment=phase.moment(stand))
    held = [stand / place, *(path for path in (stand / place).rglob("*") if path.is_dir())]
    modes = [path.stat().st_mode for path in held]
    for path in held:
        path.chmod(0o555)
    before = _fingerprint(stand / place)
    first = world.run(case, stand, case.again(stand))
    untouched = _fingerprint(stand / place) == before
    for path, mode in zip(held, modes, strict=True):
        path.chmod(mode)
    moment = f"{place}/ of another user, behind a kill"
    found = goes_on(world, case, stand, "folder of another user", moment, first, "ours again")
    return (
        found
        if untouched
        else replace(found, different=(*found.different, "the folder was changed"))
    )


def _fingerprint(folder: Path) -> dict[str, str]:
    return {
        str(path): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


# --- two at once ---


def second(world: World, case: FaultCommand, phase: CommandPhase, *, resume: bool) -> Recovery:
    """Start the same command, or --resume, while the first is running; the first must end
    normally.
    """
    stand = world.stand(case)
    running = world.start(case, stand)
    running.until(lambda: phase.begun(stand))
    # so that it is still at work, however long the other command takes
    running.send(signal.SIGSTOP)
    words = case.resume if resume else case.words
    first = world.run(case, stand, words)
    running.send(signal.SIGCONT)
    after = running.ended()
    how = "--resume" if resume else "the same command"
    return refused(
        world, case, stand, f"two at once: {how}", phase.name, first, "the first one went on", after
    )


def together(world: World, case: FaultCommand) -> Recovery:
    """Start a command twice at once: one must run, and the other must refuse."""
    stand = world.stand(case)
    running = [world.start(case, stand) for _ in range(2)]
    ended = sorted((one.ended() for one in running), key=lambda one: one.code)
    fault, then = "two at once: started together", "the other one went on"
    return refused(world, case, stand, fault, "at once", ended[1], then, ended[0])


# --- damage ---


@dataclass(frozen=True)
class Damage:
    """A damage to a file of a killed run.

    mended: how a user repairs the damage if the command refuses the file.
    """

    name: str
    files: str  # a glob
    do: Callable[[bytes, random.Random], bytes | None]  # None: the file is lost
    then: str = ""  # words of the refusal; "": the file is not refused
    mended: Callable[[Path, bytes], None] = lambda path, before: path.unlink()


def _cut_line(held: bytes, rng: random.Random) -> bytes:
    begin = held.rstrip(b"\n").rfind(b"\n") + 1
    return held[: rng.randrange(begin + 1, len(held))]


def _cut(held: bytes, rng: random.Random) -> bytes:
    return held[: rng.randrange(len(held))]


def _scribbled(held: bytes, rng: random.Random) -> bytes:
    begin = held.rstrip(b"\n").rfind(b"\n") + 1
    return held[:begin] + bytes(rng.randrange(32, 127) for _ in range(40)) + b"\n"


def _lost(held: bytes, rng: random.Random) -> None:
    """Delete the file."""


def _zeros(held: bytes, rng: random.Random) -> bytes:
    return held + bytes(rng.randrange(1, 4096))


def _without_last(path: Path, before: bytes) -> None:
    held = path.read_bytes()
    path.write_bytes(held[: held.rstrip(b"\n").rfind(b"\n") + 1])


def _back(path: Path, before: bytes) -> None:
    path.write_bytes(before)


JOURNALS = ("guesses", "observations", "tokens")
DAMAGES = (
    *(Damage("last line cut off", f"run/{name}.jsonl", _cut_line) for name in JOURNALS),
    *(Damage("zeros behind the last line", f"run/{name}.jsonl", _zeros) for name in JOURNALS[:1]),
    *(
        Damage(
            "last line overwritten",
            f"run/{name}.jsonl",
            _scribbled,
            "the line taken out",
            _without_last,
        )
        for name in JOURNALS
    ),
    Damage("tuned prompt cut off", "run/state/*.pt", _cut, "the file taken away"),
    Damage("prefix_token.json cut off", "run/prefix_token.json", _cut, "the file put back", _back),
    Damage("prefix_token.json lost", "run/prefix_token.json", _lost, "the file put back", _back),
    Damage("weights.json cut off", "run/weights.json", _cut, "the file put back", _back),
    Damage("secrets.sha256 cut off", "run/secrets.sha256", _cut, "the file taken away"),
    Damage("plan.json cut off", "run/plan.json", _cut, "the file put back", _back),
)


def damaged(
    world: World, case: FaultCommand, phase: CommandPhase, damage: Damage, seed: int
) -> Recovery:
    stand = world.stand(case)
    world.run(case, stand, moment=phase.moment(stand))
    (path,) = stand.glob(damage.files)
    before = path.read_bytes()
    left = damage.do(before, random.Random(f"{seed} {damage.name} {damage.files}"))
    if left is None:
        path.unlink()
    else:
        path.write_bytes(left)
    first = world.run(case, stand, case.again(stand))
    moment = f"`{path.name}`, behind a kill"
    if not damage.then:
        found = refused(world, case, stand, damage.name, moment, first, "nothing to be done", first)
        return replace(found, expected=(0, 0))
    damage.mended(path, before)
    return goes_on(world, case, stand, damage.name, moment, first, damage.then)
