#!/usr/bin/env bash
# Guess: after the texts of one user were set to null, no file written from the frame holds them.
# Library: polars 2.1.0. Date: 2026-11-29.
# Seen: an Arrow file (write_ipc, sink_ipc), serialize() and a pickle, as it is sent to a worker, hold all 100 nulled texts, word
# for word, also after rechunk(); reading the file gives null. Parquet holds none, nor does any file if the texts are
# overwritten by a constant, or if their rows are dropped.
# Why: nulling changes the mask of the column only; Arrow files hold the buffer of characters as it is.
# Exits 0 if that is still so, 1 if it changed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q "polars==2.1.0"
cd "$work"
"$work/venv/bin/python" - <<'PY'
import pathlib
import pickle
import sys

import polars as pl

texts = [f"patient number {i:04d} was treated for mumps" for i in range(1000)]
frame = pl.DataFrame({"user": [i % 10 for i in range(1000)], "text": texts})
removed = [text.encode() for text in texts[3::10]]
mine = pl.col("user") == 3


def count_texts(frame):
    frame.write_ipc("a.arrow")
    frame.lazy().sink_ipc("b.arrow")
    frame.write_parquet("c.parquet", compression="uncompressed")
    contents = {path: pathlib.Path(path).read_bytes() for path in ("a.arrow", "b.arrow", "c.parquet")}
    contents["serialize"] = frame.serialize()
    contents["pickle"] = pickle.dumps(frame)
    assert pl.read_ipc("a.arrow").equals(frame)
    return {name: sum(text in content for text in removed) for name, content in contents.items()}


nulled = frame.with_columns(pl.when(~mine).then("text").alias("text"))
written_over = pl.when(mine).then(pl.lit("removed")).otherwise("text")
counts = {
    "set to null": count_texts(nulled),
    "set to null, rechunk()": count_texts(nulled.rechunk()),
    "overwritten": count_texts(frame.with_columns(written_over.alias("text"))),
    "rows dropped": count_texts(nulled.drop_nulls()),
}
for name, found in counts.items():
    print(f"{name}: of 100 texts found {found}")
kept = {"a.arrow": 100, "b.arrow": 100, "c.parquet": 0, "serialize": 100, "pickle": 100}
none = dict.fromkeys(kept, 0)
sys.exit(list(counts.values()) != [kept, kept, none, none])
PY
