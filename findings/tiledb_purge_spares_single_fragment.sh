#!/usr/bin/env bash
# Guess: after a query that deletes a user's rows, consolidate() and vacuum() leave nothing of them in the array's folder; at the
# latest with sm.consolidation.purge_deleted_cells, whose name says so.
# Library: tiledb 0.36.1 (core 2.30.0), a sparse array without filters. Date: 2026-11-30.
# Seen: consolidate() copies all 20 deleted texts into the new fragment, and vacuum() takes only the old fragments away, so they
# stay. With purge_deleted_cells from the start none stays. But on an array of one fragment consolidate() does nothing, with
# that setting, too: an array that was written once keeps all 20, and so does one that was consolidated without the setting
# before. Reads return 180 of 200 rows in each case. If any row is written afterwards, the purge takes all 20 away.
# Exits 0 if that is still so, 1 if it changed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile "tiledb==0.36.1" "numpy==2.4.6"
cd "$work"
"$work/venv/bin/python" -W ignore - <<'PY'
import sys
import time
from pathlib import Path

import numpy as np
import tiledb

PLAIN, PURGE = {}, {"sm.consolidation.purge_deleted_cells": "true"}


def write(folder, numbers):
    texts = np.array([f"note {number:03d} of user {number % 10}" for number in numbers], dtype=object)
    with tiledb.open(folder, "w") as array:
        array[numbers] = {"text": texts, "user": numbers % 10}
    time.sleep(0.01)


def delete_user(folder, n_writes, consolidations, later_row=False):
    number = tiledb.Dim("number", domain=(0, 999), tile=100, dtype=np.int64)
    columns = [tiledb.Attr("text", dtype=str, var=True), tiledb.Attr("user", dtype=np.int64)]
    tiledb.Array.create(folder, tiledb.ArraySchema(tiledb.Domain(number), columns, sparse=True))
    for numbers in np.array_split(np.arange(200), n_writes):
        write(folder, numbers)
    with tiledb.open(folder, "d") as array:
        array.query(cond="user == 3").submit()
    if later_row:
        write(folder, np.array([904]))
    for settings in consolidations:
        tiledb.consolidate(folder, config=tiledb.Config(settings))
        tiledb.vacuum(folder, config=tiledb.Config(settings))
    with tiledb.open(folder) as array:
        n_read = len(array[:]["user"])
    content = b"".join(path.read_bytes() for path in Path(folder).rglob("*") if path.is_file())
    n_deleted, n_kept = (sum(f"note {n:03d} of user {user}".encode() in content for n in range(user, 200, 10)) for user in (3, 4))
    print(f"{folder}: {n_read} rows read; of 20 deleted texts {n_deleted} stay, of 20 kept ones {n_kept}")
    return n_read, n_deleted, n_kept


seen = [
    delete_user("two writes, consolidated", 2, [PLAIN]),
    delete_user("two writes, purged", 2, [PURGE]),
    delete_user("two writes, consolidated, then purged", 2, [PLAIN, PURGE]),
    delete_user("one write, purged", 1, [PURGE]),
    delete_user("one write and a row after the deletion, purged", 1, [PURGE], later_row=True),
]
sys.exit(seen != [(180, 20, 20), (180, 0, 20), (180, 20, 20), (180, 20, 20), (181, 0, 20)])
PY
