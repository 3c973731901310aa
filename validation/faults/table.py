"""Write the fault table: disturb every command, and compare its result with the undisturbed one.

    python -m validation.faults.table [--kills 5] [--seed 0] [--only run] [--ray] [-o FOLDER]  (20 CPU minutes)

A kill is SIGKILL at a random (seeded) moment of a phase, in processor time. Then follows --resume
or the same command, which is also killed every fourth time. All files except locks are compared
with the undisturbed command's: ids, words, tokens and counts exactly, weights and tuned prompts
bit by bit, numbers to 1e-5. Times, memory, the machine's speed and API costs are not compared.
Every command is `auditor.cli.main` in a fork of this process, which has already imported torch.
Full and read-only disks need root (mounts); otherwise a limit on file sizes and a write-protected
folder replace them. DP-SGD gets a known key instead of a secret one, and writes checkpoints at
every step.
"""  # noqa: E501

from __future__ import annotations

import dataclasses
import json
import os
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Annotated

import torch

from auditor.models.loading import load_causal_lm
from tests.remote.conftest import save
from tests.remote.server import Server, serving
from validation.faults import kills, others, worlds
from validation.faults.rows import Recovery, markdown, totals
from validation.faults.worlds import (
    API,
    CASES,
    LAB,
    MEMBERS,
    OWN,
    PRIVATE,
    SWEEP,
    FaultCommand,
    World,
)
from validation.harness import run

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PLACES = (
    (OWN, "run"),
    (PRIVATE, "private"),
    (MEMBERS, "ensemble"),
    (SWEEP, "sweep"),
    (LAB, "cache"),
)


def rows(world: World, count: int, seed: int, only: Sequence[str], ray: bool) -> Iterator[Recovery]:
    wanted = [case for case in (*CASES, API) if not only or case.name in only]
    for case in wanted:
        with server(world) if case.api else nullcontext():
            yield from kills.rows(world, case, count, seed)
    yield from _others(world, wanted, random.Random(f"{seed} others"), seed)
    if ray:
        yield from kills.rows_of_ray(world, count, seed)


def _others(
    world: World, wanted: Sequence[FaultCommand], rng: random.Random, seed: int
) -> Iterator[Recovery]:
    root = os.getuid() == 0
    for case in wanted:
        for phase in {OWN: OWN.phases, PRIVATE: PRIVATE.phases, MEMBERS: MEMBERS.phases}.get(
            case, ()
        ):
            for number in _ENDING:
                yield others.signals(world, case, phase, number, 0.1 * rng.random())
    for case, place in _PLACES:
        if case in wanted and root:
            for share in (0.05, 0.6) if case is OWN else (0.4,):
                yield others.full_disk(world, case, place, share * (0.9 + 0.1 * rng.random()))
            if case in (OWN, PRIVATE, SWEEP):
                yield others.read_only(world, case, case.phases[-1], place)
    if OWN in wanted:
        for size in (3_000, 20_000):
            yield others.large_file(world, OWN, size)
        if not root:
            yield others.not_ours(world, OWN, OWN.phases[2], "run")
    for case in wanted:
        if case in (OWN, PRIVATE, SWEEP):
            yield others.second(world, case, case.phases[0], resume=False)
            if case.resume:
                yield others.second(world, case, case.phases[0], resume=True)
            yield others.together(world, case)
    if OWN in wanted:
        for damage in others.DAMAGES:
            yield others.damaged(world, OWN, OWN.phases[2], damage, seed)


@contextmanager
def server(world: World) -> Iterator[None]:
    """Run a model server for cases with an API, in a process of its own.

    Commands are forked from this process, so its threads must not include the server's.
    """
    folder, url = world.folder / "given" / "served", world.folder / "url"
    save(folder)
    pid = os.fork()
    if pid == 0:
        try:
            with serving(Server(load_causal_lm(str(folder)))) as address:
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


def main(
    kills: Annotated[int, "of each phase of each command"] = 5,
    seed: int = 0,
    only: Annotated[tuple[str, ...], [case.name for case in (*CASES, API)]] = (),
    ray: Annotated[bool, "also the driver and the workers of Ray clusters"] = False,
    out: Annotated[Path | None, "a folder for faults.md and faults.json"] = None,
) -> int:
    torch.set_num_threads(1)
    os.environ.update({"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"})
    folder, found = Path(tempfile.mkdtemp(prefix="audit-faults-")), list[Recovery]()
    try:
        for row in rows(worlds.make(folder), kills, seed, only, ray):
            found.append(row)
            held = (
                "equal"
                if row.held
                else f"NOT EQUAL: {'; '.join(row.different[:3])} ({row.code}, {row.then_code})"
            )
            print(f"{row.fault}, {row.during}, {row.command}: {row.moment}: {held}", flush=True)
            if out:
                _write(out, found)
    finally:
        if all(row.held for row in found):  # otherwise keep it for inspection
            shutil.rmtree(folder, ignore_errors=True)
    print(totals(found))
    return int(not all(row.held for row in found))


def _write(out: Path, found: Sequence[Recovery]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / "faults.md").write_text(f"{markdown(found)}\n{totals(found)}.\n")
    told = [{**dataclasses.asdict(row), "held": row.held} for row in found]
    (out / "faults.json").write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    raise SystemExit(run(main))
