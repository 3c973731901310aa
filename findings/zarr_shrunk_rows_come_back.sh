#!/usr/bin/env bash
# Guess: rows cut off a store of embeddings by resize() are gone: if it grows again, the new rows are fill_value.
# Library: zarr 3.1.6. Date: 2026-11-29.
# Seen: of 30 rows cut off and 30 rows added, 20 are the old ones, number for number; the files hold them in between.
# Why: only chunks that lie wholly past the new end are deleted; the one that the end cuts stays as it is.
# Exits 0 if that is still so, 1 if it changed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q "zarr==3.1.6"
cd "$work"
"$work/venv/bin/python" - <<'PY'
import sys

import numpy as np
import zarr

vectors = np.random.default_rng(0).normal(size=(100, 8))
store = zarr.create_array("vectors.zarr", shape=(100, 8), chunks=(30, 8), dtype="f8", fill_value=0.0)
store[:] = vectors
store.resize((70, 8))
store = zarr.open_array("vectors.zarr", mode="r+")
store.resize((100, 8))
back = int((store[70:] == vectors[70:]).all(axis=1).sum())
print(f"of 30 rows cut off, {back} are back; fill_value in {int((store[70:] == 0).all(axis=1).sum())}")
sys.exit(back != 20)
PY
