#!/usr/bin/env bash
# Guess: the test part of train_test_split(), or a dataset after filter(), holds its own rows, however it is stored or sent.
# Library: datasets 5.2.0 with pyarrow 26.0.1. Date: 2026-11-29.
# Seen: pickled (for a worker, a job queue, joblib, torch.save) it holds the texts of all rows, also those of the 900
# training rows and those that the filter removed. save_to_disk() and to_parquet() do not. But save_to_disk() of the first
# rows, select(range(3)), writes the text of the row after them, too, where no reader looks.
# Why: a split is the whole table with a list of row numbers; a slice of an Arrow table is written with its buffers rounded
# up to 64 bytes, so the bytes that follow the slice are written, too.
# Exits 0 if that is still so, 1 if it changed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q "datasets==5.2.0" "pyarrow==26.0.1"
cd "$work"
HF_HOME="$work/home" HF_HUB_OFFLINE=1 "$work/venv/bin/python" - <<'PY'
import pathlib
import pickle
import sys

import datasets

datasets.disable_progress_bars()
texts = [f"patient number {i:04d} has mumps" for i in range(1000)]
rows = datasets.Dataset.from_dict({"user": [i % 10 for i in range(1000)], "text": texts})
parts = {
    "test part of a split": rows.train_test_split(test_size=0.1, seed=0)["test"],
    "filter": rows.filter(lambda row: row["user"] != 3),
    "first three": rows.select(range(3)),
}
counts = []
for name, part in parts.items():
    others = [text.encode() for text in set(texts) - set(part["text"])]
    part.save_to_disk(name)
    part.to_parquet("part.parquet")
    contents = {
        "pickle": pickle.dumps(part),
        "save_to_disk": b"".join(path.read_bytes() for path in pathlib.Path(name).glob("*.arrow")),
        "to_parquet": pathlib.Path("part.parquet").read_bytes(),
    }
    found = {way: sum(text in content for text in others) for way, content in contents.items()}
    counts.append(list(found.values()))
    print(f"{name}, {len(part)} rows: texts of others in it {found}")
sys.exit(counts != [[900, 0, 0], [100, 0, 0], [997, 1, 0]])
PY
