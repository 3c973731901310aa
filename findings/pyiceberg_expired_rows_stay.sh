#!/usr/bin/env bash
# Guess: delete(), then expiring the snapshot that had the rows, removes the data file that holds them.
# Library: pyiceberg 0.12.0 (with pyarrow 26.0.1), a catalog in SQLite. Date: 2026-11-29.
# Seen: the table has one snapshot and no deleted row, and the data file with all 20 deleted texts lies where it was; the
# table's list of all its files leaves it out, so only a listing of the folder shows it. purge_table() deletes it, with the table.
# Why: expire_snapshots() takes snapshots out of the metadata and deletes no file.
# Exits 0 if that is still so, 1 if it changed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile "pyiceberg[sql-sqlite]==0.12.0" "pyarrow==26.0.1"
cd "$work"
"$work/venv/bin/python" -W ignore - "$work" <<'PY' 2> "$work/log"
import pathlib
import sys

import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.catalog.sql import SqlCatalog

work = sys.argv[1]
catalog = SqlCatalog("notes", uri=f"sqlite:///{work}/catalog.db", warehouse=f"file://{work}/tables")
catalog.create_namespace("clinic")
rows = pa.table({"user": [i // 20 for i in range(200)], "text": [f"note {i} of user {i // 20}" for i in range(200)]})
table = catalog.create_table("clinic.notes", schema=rows.schema)
table.append(rows)


def count_texts():
    found = 0
    for path in pathlib.Path(work, "tables").rglob("*.parquet"):
        found += sum(text.endswith("of user 0") for text in pq.read_table(path)["text"].to_pylist())
    return found


table.delete("user = 0")
current = table.current_snapshot().snapshot_id
old = [snapshot.snapshot_id for snapshot in table.snapshots() if snapshot.snapshot_id != current]
table.maintenance.expire_snapshots().by_ids(old).commit()
table = catalog.load_table("clinic.notes")
n_snapshots = len(table.snapshots())
n_rows = table.scan(row_filter="user = 0").to_arrow().num_rows
named = table.inspect.all_files().num_rows
print(f"snapshots {n_snapshots}, deleted rows returned {n_rows}, data files that the table names {named}")
print(f"deleted texts in the folder: {count_texts()} of 20")
seen = [n_snapshots, n_rows, named, count_texts()]
catalog.purge_table("clinic.notes")
print(f"after purge_table(): {count_texts()} of 20")
sys.exit(seen != [1, 0, 1, 20] or count_texts() != 0)
PY
