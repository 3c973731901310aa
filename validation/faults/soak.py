"""Audit many secrets: memory must stay flat, and time must not grow faster than the secrets.

    python -m validation.faults.soak [--secrets 20000]  (some 5 minutes)

The audit has a tiny model, two attacks that share their samples, and a probe, so weights do not
hide what grows with the secrets. The process's resident memory and the lines of its journals are
read twice a second. The warm-up (libraries, weights, data, first batches) ends when a tenth of the
first attack's secrets is finished. Exits with 1 if memory leaves ±10% of its middle, or if the two
halves of a journal differ in time by a factor of more than 1.25.
"""

from __future__ import annotations

import random
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tests.conftest import save_tiny
from validation.harness import run, write_rows

_EVERY = 0.5  # seconds between measurements
_FLAT, _LINEAR = 0.10, 1.25
_CELLS = ("perplexity", "zlib", "extraction-probability")
_PAGE = 4096 / 2**20  # MiB


@dataclass(frozen=True)
class Sample:
    """A reading: seconds since the start, MiB of resident memory, processor seconds.

    finished: number of finished secrets of each cell.
    """

    seconds: float
    memory: float
    busy: float
    finished: tuple[int, ...]


@dataclass(frozen=True)
class Soak:
    """All readings of an audit, in the order of time. secrets: number of secrets in each cell."""

    secrets: int
    samples: tuple[Sample, ...]

    @property
    def warm(self) -> list[Sample]:
        return [sample for sample in self.samples if sample.finished[0] >= self.secrets / 10]

    @property
    def middle(self) -> float:
        """Return the mean of the least and the greatest memory after the warm-up, in MiB."""
        memory = [sample.memory for sample in self.warm]
        return (min(memory) + max(memory)) / 2

    @property
    def off(self) -> float:
        """Return the largest deviation of memory from `middle`, as a share of `middle`."""
        return max(sample.memory for sample in self.warm) / self.middle - 1

    def under_way(self, cell: int) -> list[Sample]:
        """Return the samples from the first finished secret of a cell to the last."""
        whole = [sample for sample in self.samples if sample.finished[cell] == self.secrets]
        return [
            sample for sample in self.samples if 0 < sample.finished[cell] < self.secrets
        ] + whole[:1]

    def halves(self, cell: int) -> float:
        """Return the ratio of processor times of the second and first halves of a cell's secrets.

        The first tenth of the secrets is left out.
        """
        own = self.under_way(cell)
        done, busy = [s.finished[cell] for s in own], [s.busy for s in own]
        start, half, end = np.interp(
            [self.secrets * share for share in (0.1, 0.55, 1.0)], done, busy
        )
        return float((end - half) / (half - start))

    @property
    def held(self) -> bool:
        return self.off <= _FLAT and all(
            1 / _LINEAR <= self.halves(i) <= _LINEAR for i in range(len(_CELLS))
        )

    def told(self) -> str:
        halves = ", ".join(f"{name} {self.halves(i):.2f}" for i, name in enumerate(_CELLS))
        return (
            f"{self.secrets:,} secrets: {self.middle:.0f} MiB ±{self.off:.1%} after the warm-up; "
            f"second half of the secrets by the first, processor time: {halves}; "
            f"{self.samples[-1].busy:.0f} s in all"
        )


def soak(folder: Path, secrets: int) -> Soak:
    save_tiny(folder / "model")
    for name, first, count in (("data", 0, secrets), ("known", 10**6, 50)):
        rng = random.Random(first)
        cases = range(first, first + count)
        rows = (
            {"prefix": f"case {i:07d} is", "suffix": f" {rng.randrange(10**9):09d}"} for i in cases
        )
        write_rows(folder / f"{name}.jsonl", rows)
    words = [
        "run",
        "--model",
        "model",
        "--data",
        "data.jsonl",
        "--known",
        "known.jsonl",
        "--setting",
        "white-box",
    ]
    words += [word for name in _CELLS for word in ("--attack", name)] + [
        "--samples",
        "10",
        "-o",
        "run",
    ]
    command = [sys.executable, "-m", "auditor.cli", "--threads", "1", *words]
    process = subprocess.Popen(
        command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    journals = [folder / "run" / f"{name}.jsonl" for name in ("guesses", "observations")]
    samples, start = [], time.time()
    while process.poll() is None:
        try:
            memory = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1]) * _PAGE
            busy = time.clock_gettime((~process.pid << 3) | 2)  # CPUCLOCK_SCHED of that process
        except (OSError, IndexError):
            break
        guesses, observations = (
            path.read_bytes().count(b"\n") if path.exists() else 0 for path in journals
        )
        finished = (min(guesses, secrets), max(0, guesses - secrets), min(observations, secrets))
        if memory:
            samples.append(Sample(time.time() - start, memory, busy, finished))
        time.sleep(_EVERY)
    if code := process.wait():
        raise SystemExit(f"audit run ended with {code}")
    return Soak(secrets, tuple(samples))


def main(secrets: int = 20_000) -> int:
    with tempfile.TemporaryDirectory() as folder:
        found = soak(Path(folder), secrets)
    print(found.told())
    return int(not found.held)


if __name__ == "__main__":
    raise SystemExit(run(main))
