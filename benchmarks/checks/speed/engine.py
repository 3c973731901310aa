"""Two workers of a Ray cluster against one, and against one process without Ray: the same audit, in one run of this.

    python -m benchmarks.checks.speed.engine [--samples 100] [--repeats 3]

Each is a whole `audit run` of the lab's target (trained first, where the cache has none) in a process of its own, with
one thread each. *Attack*: the seconds of one cell, all secrets attacked by workers that are open. *Start*: what the
first cell took more than that one: tuning, and in workers loading Python, torch and the models. *Whole*: the command,
from its start to its end; loading, tuning, perplexity and reports are the run's own in all three, so no number of
workers makes them less. The three take turns, and ratios are of runs next to each other: other work on the machine
slows both, and two workers more than one, as they want two processors. Its load is printed beside each. Guesses are
compared.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.checks.harness import run

_CLAIM, _WORST = (f"Undefended: ethicist ({setting})" for setting in ("text-only", "white-box"))
_ENGINES = {
    "one process": [],
    "1 worker": ["--engine", "ray", "--workers", "1"],
    "2 workers": ["--engine", "ray", "--workers", "2"],
}


@dataclass(frozen=True)
class Times:
    """Seconds, and the load of the machine as the run began."""

    attack: float
    start: float
    whole: float
    load: float
    guesses: dict[tuple[str, str], list[list[int]]]  # suffixes, best first, by cell and secret


def audited(engine: list[str], samples: int, out: Path) -> Times:
    asked = ["--attack", "ethicist", "--samples", str(samples), "-A", "epochs=1", "-o", str(out)]
    load, begin = os.getloadavg()[0], time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "auditor.cli", "--threads", "1", "run", *asked, *engine],
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    whole = time.perf_counter() - begin
    seconds = json.loads((out / "result.json").read_text())["timings"]
    return Times(seconds[_WORST], seconds[_CLAIM] - seconds[_WORST], whole, load, guesses(out))


def guesses(out: Path) -> dict[tuple[str, str], list[list[int]]]:
    lines = map(json.loads, (out / "guesses.jsonl").read_text().splitlines())
    return {(line["cell"], line["secret"]): [one[0] for one in line["ranked"]] for line in lines}


def main(samples: int = 100, repeats: int = 3) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    rounds: list[dict[str, Times]] = []
    with tempfile.TemporaryDirectory() as scratch:
        audited([], 1, Path(scratch) / "warm")  # the lab is trained, and what files are read is in memory
        for turn in range(repeats):
            names = list(_ENGINES)[:: (-1) ** turn]
            rounds.append({n: audited(_ENGINES[n], samples, Path(scratch) / f"{turn}-{n}") for n in names})
            for name in _ENGINES:
                one = rounds[-1][name]
                print(
                    f"{name:12}  attack {one.attack:6.1f} s  start {one.start:5.1f} s  whole {one.whole:6.1f} s  "
                    f"load {one.load:4.1f}",
                    flush=True,
                )
            assert all(one.guesses == rounds[0]["one process"].guesses for one in rounds[-1].values())
    print("guesses are the same in all runs, token for token")
    for base in ("1 worker", "one process"):
        for what in ("attack", "whole"):
            ratios = [getattr(one[base], what) / getattr(one["2 workers"], what) for one in rounds]
            told = ", ".join(f"{ratio:.2f}" for ratio in ratios)
            print(f"2 workers against {base}, {what}: {statistics.median(ratios):.2f} x ({told})")


if __name__ == "__main__":
    raise SystemExit(run(main))
