#!/usr/bin/env bash
# Guess: delete(), then vacuum() with no retention, leaves nothing of the deleted rows in the table's folder.
# Library: deltalake 1.6.6 (with pyarrow 26.0.1). Date: 2026-11-29.
# Seen: the data file is gone, and the log of the table, which is copied with it, still quotes the least and the greatest
# value of each column of the deleted file: here a text of user 0, name and diagnosis in full.
# create_checkpoint() and cleanup_metadata() remove that log file only if delta.logRetentionDuration allows it: with the
# default of 30 days it stays. With delta.dataSkippingNumIndexedCols=0 no value is quoted.
# Exits 0 if that is still so, 1 if it changed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile "deltalake==1.6.6" "pyarrow==26.0.1"
cd "$work"
"$work/venv/bin/python" -W ignore - <<'PY'
import pathlib
import sys

import pyarrow as pa
from deltalake import DeltaTable, write_deltalake

users = [i // 20 for i in range(200)]
texts = [f"note {i:03d}: Quentin Zork, lymphoma" for i in range(20)]
texts += [f"note {i:03d}: nothing found" for i in range(20, 200)]
rows = pa.table({"user": users, "text": texts})
settings = {
    "as it comes": {},
    "log kept for 0 hours": {"delta.logRetentionDuration": "interval 0 hours"},
    "no statistics": {"delta.dataSkippingNumIndexedCols": "0"},
}


def find_name(folder):
    files = [path for path in pathlib.Path(folder).rglob("*") if path.is_file()]
    return sorted(path.relative_to(folder).as_posix() for path in files if b"Quentin Zork" in path.read_bytes())


seen = {}
for name, configuration in settings.items():
    write_deltalake(name, rows, configuration=configuration)
    table = DeltaTable(name)
    deleted = table.delete("user = 0")["num_deleted_rows"]
    table.vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False)
    after_vacuum = find_name(name)
    table.create_checkpoint()
    table.cleanup_metadata()
    after_cleanup = find_name(name)
    n_left = DeltaTable(name).to_pyarrow_table().filter(pa.compute.field("user") == 0).num_rows
    print(f"{name}: deleted {deleted}, rows left {n_left}; name in {after_vacuum}, after cleanup in {after_cleanup}")
    seen[name] = (deleted, n_left, len(after_vacuum), len(after_cleanup))
expected = {"as it comes": (20, 0, 1, 1), "log kept for 0 hours": (20, 0, 1, 0), "no statistics": (20, 0, 0, 0)}
sys.exit(seen != expected)
PY
