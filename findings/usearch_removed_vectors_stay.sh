#!/usr/bin/env bash
# Guess: a file that is saved after remove() has the vectors of the index, at the latest after remove(compact=True), or of a
# copy().
# Library: usearch 2.26.6 (numpy 2.4.6). Date: 2026-11-30.
# Seen: all 400 of 2,000 vectors that were removed are in the file, number for number, in each of the three; the index says that
# it has 1,600, none is found, and get() returns nothing for their keys. From a vector of an embedding model its text can be
# guessed. They go one by one as new vectors take their places: after 400 new ones none is left. Loading and saving again keeps
# them.
# Why: a removed vector's place is marked as free; compact=True cuts links to it only, as its docstring says.
# Exits 0 if that is still so, 1 if it changed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile "usearch==2.26.6" "numpy==2.4.6"
cd "$work"
"$work/venv/bin/python" -W ignore - <<'PY'
import pathlib
import sys

import numpy as np
from usearch.index import Index

rng = np.random.default_rng(0)
vectors = rng.standard_normal((2000, 16)).astype(np.float32)
removed = np.arange(0, 2000, 5)
kept = np.setdiff1d(np.arange(2000), removed)


def count_vectors(index):
    index.save("index")
    content = pathlib.Path("index").read_bytes()
    return len(index), *(sum(vectors[i].tobytes() in content for i in rows) for rows in (removed, kept))


seen = {}
for compact in (False, True):
    index = Index(ndim=16, metric="l2sq", dtype="f32")
    index.add(np.arange(2000), vectors)
    index.remove(removed, compact=compact)
    seen[f"remove(compact={compact})"] = count_vectors(index)
    assert not index.contains(removed).any() and not np.isin(index.search(vectors[removed], 3).keys, removed).any()
seen["copy()"] = count_vectors(index.copy())
restored = Index.restore("index")
seen["loaded again"] = count_vectors(restored)
restored.add(np.arange(5000, 5400), rng.standard_normal((400, 16)).astype(np.float32))
seen["400 new vectors"] = count_vectors(restored)
for name, counts in seen.items():
    print(f"{name}: size, removed and kept vectors in the file {counts}")
sys.exit(list(seen.values()) != [(1600, 400, 1600)] * 4 + [(2000, 0, 1600)])
PY
