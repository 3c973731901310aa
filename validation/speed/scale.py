"""Measure processor time and peak memory of `audit run` by the number of secrets, and draw both.

    python -m validation.speed.scale FOLDER [--sizes 1000 10000 100000 1000000]
    python -m validation.speed.scale FOLDER --sizes 0

Each size has a run of membership and extraction probability in a process with one thread, on a
random model and texts of 8 to 12 words; non-members are a tenth more. A row replaces the row of
its size in `docs/evidence/data/secrets.csv`. Size 0 only draws the rows.
"""

from __future__ import annotations

import csv
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
from matplotlib.figure import Figure

from auditor.core.secret_randomness import make_keyed_generator
from validation.harness import run, save_svg
from validation.speed.curves import VOCABULARY, growth, tiny, tokenizer

EVIDENCE = Path(__file__).resolve().parents[2] / "docs" / "evidence"
TABLE = EVIDENCE / "data" / "secrets.csv"
COLUMNS = ("secrets", "processor seconds", "peak memory, MB")
AT_ONCE = 10_000  # rows written at once
ASKED = "--prefix-length 4 --suffix-length 4 --known-fraction 0 --attack membership"
ASKED += " --attack extraction-probability -A membership.score=loss"


def write_texts(path: Path, count: int) -> None:
    noise = make_keyed_generator("scale", path.name)
    with path.open("w", encoding="utf-8") as lines:
        for begin in range(0, count, AT_ONCE):
            size = min(AT_ONCE, count - begin)
            words = noise.integers(1, VOCABULARY, size=(size, 12)).tolist()
            for row, length in zip(words, noise.integers(8, 13, size=size), strict=True):
                text = " ".join(f"w{word}" for word in row[:length])
                lines.write(f'{{"text": "{text}"}}\n')


def measure(folder: Path, size: int) -> tuple[int, float, float]:
    """Run an audit of `size` secrets and return its row of the table."""
    inputs = folder / f"{size}"
    inputs.mkdir(parents=True)
    tiny().save_pretrained(inputs / "model")
    tokenizer().save_pretrained(inputs / "model")
    write_texts(inputs / "data.jsonl", size)
    write_texts(inputs / "others.jsonl", size // 10)
    command = ["audit", "run", "--model", "model", "--data", "data.jsonl"]
    command += ["--nonmembers", "others.jsonl", *ASKED.split(), "-o", "run"]
    threads = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    program = [sys.executable, "-c", "import auditor; auditor.main()", *command[1:]]
    child = subprocess.Popen(program, cwd=inputs, env={**os.environ, **threads})
    # A run resets the system's own record of its peak, for the peak of each row of its report.
    process = psutil.Process(child.pid)
    peak = 0
    ended = 0
    while not ended:
        peak = max(peak, process.memory_info().rss)
        time.sleep(0.05)
        ended, status, used = os.wait4(child.pid, os.WNOHANG)
    assert status == 0
    peak = max(peak, used.ru_maxrss * 1024)
    return size, round(used.ru_utime + used.ru_stime, 1), round(peak / 1e6)


def draw(rows: list[tuple[float, ...]]) -> Figure:
    sizes, seconds, memory = zip(*rows, strict=True)
    figure = Figure(figsize=(8, 3), layout="constrained")
    left, right = figure.subplots(1, 2)
    for axes, values in ((left, seconds), (right, memory)):
        axes.plot(sizes, values, "o-", color="C0", markersize=4)
        axes.set(xscale="log", xlabel=COLUMNS[0])
        axes.grid(color="0.9", linewidth=0.6)
    left.set_yscale("log")
    left.set_title(f"{COLUMNS[1]}: power {growth(sizes, seconds).power:.2f}", fontsize=9)
    right.set_ylim(bottom=0)
    more = (memory[-1] - memory[-2]) / (sizes[-1] - sizes[-2]) * 1e3
    right.set_title(f"{COLUMNS[2]}: at last {more:.1f} kB a secret", fontsize=9)
    return figure


def main(folder: Path, sizes: tuple[int, ...] = (1000, 10_000, 100_000, 1_000_000)) -> None:
    rows: dict[float, tuple[float, ...]] = {}
    if TABLE.exists():
        with TABLE.open(encoding="utf-8", newline="") as lines:
            for row in list(csv.reader(lines))[1:]:
                rows[float(row[0])] = tuple(map(float, row))
    for size in filter(None, sizes):
        rows[size] = measure(folder, size)
    ordered = [rows[size] for size in sorted(rows)]
    with TABLE.open("w", encoding="utf-8", newline="") as lines:
        table = csv.writer(lines, lineterminator="\n")
        table.writerow(COLUMNS)
        for row in ordered:
            table.writerow([f"{value:g}" if value % 1 else f"{value:.0f}" for value in row])
    save_svg(draw(ordered), EVIDENCE / "cost.svg")


if __name__ == "__main__":
    raise SystemExit(run(main))
