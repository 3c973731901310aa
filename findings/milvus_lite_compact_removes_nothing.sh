#!/usr/bin/env bash
# Guess: delete(), then compact(), whose state is reported as completed, takes deleted rows out of the files.
# Library: milvus-lite 3.2.2 with pymilvus 3.0.2. Date: 2026-11-29.
# Seen: all 12 deleted texts, with their vectors, are in the Parquet file of the collection's data as before, also after
# flush() and a restart; no query returns them. compact() returns 0 and the state is "Completed" at once. They go only if
# four data files of like size come together, or with drop_collection().
# Why: the server answers the call for compaction without doing anything.
# Exits 0 if that is still so, 1 if it changed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q "milvus-lite==3.2.2" "pymilvus==3.0.2" pyarrow
cd "$work"
"$work/venv/bin/python" -W ignore - <<'PY' 2> "$work/log"
import pathlib
import sys

import pyarrow.parquet
from pymilvus import MilvusClient


def count_deleted():
    found = 0
    for path in pathlib.Path("notes.db").rglob("data/*.parquet"):
        rows = pyarrow.parquet.read_table(path).to_pylist()
        found += sum("belongs to user 3" in str(row) for row in rows)
    return found


client = MilvusClient("notes.db")
client.create_collection("notes", dimension=8)
rows = []
for i in range(120):
    rows.append({"id": i, "vector": [float(i)] * 8, "user": i % 10, "text": f"note {i} belongs to user {i % 10}"})
client.insert("notes", rows)
client.flush("notes")
deleted = len(client.delete("notes", filter="user == 3"))
client.flush("notes")
job = client.compact("notes")
state = client.get_compaction_state(job)
left = len(client.query("notes", filter="user == 3", output_fields=["text"]))
client.close()
after_close = count_deleted()
client = MilvusClient("notes.db")
client.load_collection("notes")
client.compact("notes")
client.close()
print(f"deleted {deleted}; compaction {job}: {state}; queries find {left}; files hold {after_close}")
print(f"after a restart: files hold {count_deleted()}")
client = MilvusClient("notes.db")
client.drop_collection("notes")
client.close()
print(f"after drop_collection: files hold {count_deleted()}")
sys.exit([deleted, left, after_close] != [12, 0, 12] or count_deleted() != 0)
PY
