"""The n-gram index against a sorted table of 64-bit hashes and a Python set of all n-grams, in one
run.

    python -m validation.speed.ngram_index [--megabytes 10 100] [--n 50] [--generations 1000]
    [--length 256]

Text is drawn token by token from a Zipf distribution over 32,000 tokens, four bytes of text each,
in records of 400 tokens of which every tenth is an exact copy; the generations are half drawn anew,
half cut out of the records. Each way is timed in a process of its own, in seconds of processor time
(all are of one thread, and machines are shared); its peak memory is that of the process less what
it held before. The hashes answer for one n alone and not for certain (two n-grams may share one),
and neither says which record it was; the suffix array answers for every n, exactly, and names the
record. The set is left out above 10 MB: it would not fit. Ratios are to the index.
"""

from __future__ import annotations

import multiprocessing
import resource
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor

import numpy as np
from numpy.typing import NDArray

from auditor.benchmarks.data import ngrams
from auditor.core.secret_randomness import keyed_random_generator
from validation.harness import Page, run

VOCABULARY, RECORD, BYTES = 32_000, 400, 4  # tokens; tokens of a record; bytes of text a token
SET_AT_MOST = 10  # megabytes
_BASE = np.uint64(0x9E3779B97F4A7C15)  # odd: what the rolling hash is a polynomial in, modulo 2^64

Asked = list[tuple[int, ...]]


def records(megabytes: int) -> NDArray[np.uint32]:
    """(records, RECORD) token ids."""
    noise = keyed_random_generator("speed", "ngrams")
    distribution = 1 / np.arange(1, VOCABULARY + 1)
    cdf = np.cumsum(distribution / distribution.sum())
    count = megabytes * 1_000_000 // BYTES // RECORD
    made = np.empty((count, RECORD), dtype=np.uint32)
    for start in range(0, count, 4096):
        some = made[start : start + 4096]
        some[:] = np.searchsorted(cdf, noise.random(some.shape)).clip(max=VOCABULARY - 1)
    made[9::10] = made[0::10][: len(made[9::10])]
    return made


def generations(text: NDArray[np.uint32], count: int, length: int) -> Asked:
    noise = keyed_random_generator("speed", "generations")
    drawn = noise.integers(VOCABULARY, size=(count, length))
    width = min(length, RECORD)
    for row in drawn[::2]:
        start = noise.integers(RECORD - width + 1)
        row[:width] = text[noise.integers(len(text))][start : start + width]
    return [tuple(row.tolist()) for row in drawn]


def by_index(text: NDArray[np.uint32], n: int) -> Callable[[Asked], int]:
    # Copies are kept as records of their own here: the texts of a user are first made one, which is
    # other work.
    found = ngrams.build_ngram_index(((row, 1) for row in text), ())  # type: ignore[misc]
    return lambda asked: sum(len(seen.at) for seen in found.match_ngrams(asked, n))


def by_hashes(text: NDArray[np.uint32], n: int) -> Callable[[Asked], int]:
    table = np.sort(
        np.concatenate(
            [hashes(text[start : start + 4096], n) for start in range(0, len(text), 4096)]
        )
    )

    def look(asked: Asked) -> int:
        own = hashes(np.array(asked, dtype=np.uint32), n)
        return int((table[np.searchsorted(table, own).clip(max=len(table) - 1)] == own).sum())

    return look


def hashes(rows: NDArray[np.uint32], n: int) -> NDArray[np.uint64]:
    """Of every n-gram of each row, a polynomial modulo 2^64."""
    windows = rows.shape[1] - n + 1
    total = np.zeros((len(rows), windows), dtype=np.uint64)
    for i in range(n):
        total = total * _BASE + rows[:, i : i + windows] + np.uint64(1)
    return total.ravel()


def by_set(text: NDArray[np.uint32], n: int) -> Callable[[Asked], int]:
    held = {row[at : at + n].tobytes() for row in text for at in range(RECORD - n + 1)}

    def look(asked: Asked) -> int:
        rows = np.array(asked, dtype=np.uint32)
        return sum(
            row[at : at + n].tobytes() in held
            for row in rows
            for at in range(rows.shape[1] - n + 1)
        )

    return look


WAYS = {"index": by_index, "hashes": by_hashes, "set": by_set}


def one(way: str, megabytes: int, n: int, count: int, length: int) -> dict[str, float]:
    text = records(megabytes)
    asked = generations(text, count, length)
    held = peak()
    start = time.process_time()
    look = WAYS[way](text, n)
    made = time.process_time()
    found = look(asked)
    return {
        "made": made - start,
        "asked": time.process_time() - made,
        "memory": peak() - held,
        "found": found,
    }


def peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6  # gigabytes


def main(
    megabytes: tuple[int, ...] = (10, 100), n: int = 50, generations: int = 1000, length: int = 256
) -> None:
    page, anew = Page(), multiprocessing.get_context("spawn")
    page.head("text", "way", "made", "asked", "memory", "found", "made, to the index", "asked")
    for size in megabytes:
        first: dict[str, float] = {}
        for way in WAYS:
            if way == "set" and size > SET_AT_MOST:
                continue
            with ProcessPoolExecutor(1, anew) as pool:
                seen = pool.submit(one, way, size, n, generations, length).result()
            first = first or seen
            ratios = (f"{seen[name] / first[name]:.2f}x" for name in ("made", "asked"))
            times = f"{seen['made']:.1f} s", f"{seen['asked']:.2f} s", f"{seen['memory']:.2f} GB"
            page.row(f"{size} MB", way, *times, f"{seen['found']:,.0f}", *ratios)


if __name__ == "__main__":
    raise SystemExit(run(main))
