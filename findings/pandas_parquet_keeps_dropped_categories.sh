#!/usr/bin/env bash
# Guess: a Parquet file written after rows were dropped holds the values of the rows that are in it, and no others.
# Library: pandas 3.1.1 with pyarrow 26.0.1, a column of dtype "category". Date: 2026-11-28.
# Seen: the file of 150 rows holds the texts of all 50 dropped rows, and read_parquet() gives them back as categories.
# The least and greatest value that the file states are those of the rows. Columns of dtype "str": 0 of 50.
# pyarrow alone does the same with a dictionary column that was filtered (read_dictionary=["text"]).
# Why: the file's dictionary page is the whole list of categories; dropping rows leaves the list as it was.
# Exits 0 if that is still so, 1 if it changed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile "pandas==3.1.1" "pyarrow==26.0.1"
cd "$work"
"$work/venv/bin/python" -W ignore - <<'PY'
import sys
from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq

texts = [f"note {i:03d} of a patient" for i in range(200)]
table = pd.DataFrame({"text": texts, "number": range(200)})


def count_texts(path):
    content = Path(path).read_bytes()
    dropped = sum(text.encode() in content for text in texts[:50])
    return dropped, sum(text.encode() in content for text in texts[50:])


frames = {"str": table, "category": table.astype({"text": "category"})}
counts = {}
for dtype, frame in frames.items():
    frame[frame["number"] >= 50].to_parquet("rows.parquet", compression=None)
    counts[dtype] = count_texts("rows.parquet")
back = pd.read_parquet("rows.parquet")
categories = set(back["text"].cat.categories)
least = pq.read_metadata("rows.parquet").row_group(0).column(0).statistics.min
used = frames["category"][frames["category"]["number"] >= 50]
used = used.assign(text=used["text"].cat.remove_unused_categories())
used.to_parquet("used.parquet", compression=None)
counts["remove_unused_categories"] = count_texts("used.parquet")
table.to_parquet("all.parquet")
whole = pq.read_table("all.parquet", read_dictionary=["text"])
pq.write_table(whole.filter(pq.read_table("all.parquet")["number"].to_numpy() >= 50), "arrow.parquet", compression="none")
counts["pyarrow, read_dictionary"] = count_texts("arrow.parquet")
for dtype, (dropped, present) in counts.items():
    print(f"{dtype}: texts in the file, of dropped rows {dropped} of 50, of its rows {present} of 150")
n_back = len(categories & set(texts[:50]))
print(f"read again: {len(back)} rows, categories of dropped rows {n_back} of 50; least value stated: {least!r}")
expected = {
    "str": (0, 150),
    "category": (50, 150),
    "remove_unused_categories": (0, 150),
    "pyarrow, read_dictionary": (50, 150),
}
sys.exit(not (counts == expected and n_back == 50 and least == texts[50]))
PY
