"""Records of a store with vectors, and what `audit erase` says after some were deleted."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from auditor.erasure.examine import Erasure, examine_erased_stores
from auditor.erasure.records import read_erasure_records

Row = dict[str, Any]


def make_rows(n: int = 120, dimensions: int = 32, seed: int = 0) -> list[Row]:
    """Return rows of 25 random words from one list, as many vectors, and a number that is alone."""
    draw, normal = random.Random(seed), np.random.default_rng(seed)
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["".join(draw.choices(letters, k=draw.randint(3, 11))) for _ in range(2_000)]
    rows = []
    for i in range(n):
        text = f"The following was noted: {' '.join(draw.choices(words, k=25))}"
        vector = normal.normal(size=dimensions)
        unit = (vector / np.linalg.norm(vector)).astype(np.float32)
        code = f" {draw.randrange(10**9):09d}code{i}"
        rows.append({"id": f"r{i}", "text": text + code, "embedding": unit.tolist()})
    return rows


def split_rows(rows: Sequence[Row], n_deleted: int, seed: int = 1) -> tuple[list[Row], list[Row]]:
    """Return the deleted rows, evenly drawn, and the kept ones."""
    chosen = set(random.Random(seed).sample(range(len(rows)), n_deleted))
    deleted = [rows[i] for i in sorted(chosen)]
    return deleted, [row for i, row in enumerate(rows) if i not in chosen]


def write_rows(path: Path, rows: Sequence[Row]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def examine(tmp_path: Path, deleted: Sequence[Row], kept: Sequence[Row], *stores: str) -> Erasure:
    gone = write_rows(tmp_path / "gone.jsonl", deleted)
    records = read_erasure_records(gone, write_rows(tmp_path / "kept.jsonl", kept))
    return examine_erased_stores(stores, records, lambda _: None)


def verdicts_by_layer(erasure: Erasure) -> dict[tuple[str, str], str]:
    """Return `still there`, `gone` or `cannot tell` by layer and kind."""
    return {(one.layer, one.kind): one.verdict for one in erasure.verdicts}


def count_leftovers(erasure: Erasure) -> dict[tuple[str, str], int]:
    return {(one.layer, one.kind): len(one.leftovers) for one in erasure.verdicts}


def vector_bytes(row: Row) -> bytes:
    return np.array(row["embedding"], np.float32).tobytes()
