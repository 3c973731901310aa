#!/usr/bin/env bash
# Guess: save_to_disk() into the folder of an earlier save replaces that dataset: after a user's rows were removed and the rest
# saved to the same place, the folder holds none of them.
# Library: datasets 5.2.0 (pyarrow 26.0.1). Date: 2026-11-30.
# Seen: as soon as the number of files changes, which follows from the size of the rows or from num_shards, the old files stay
# beside the new one, with all 10 removed texts and all others a second time; Dataset.from_file() reads them. load_from_disk()
# gives the 30 rows that are left, so no check by reading notices it. A DatasetDict keeps the folder of a split that it no
# longer has. With as many files as before each is overwritten, and none of the 10 is left.
# Why: files are named by their number and count (data-00000-of-00004.arrow), and nothing is deleted before writing. Who copies
# or publishes the folder passes the removed rows on. Exits 0 if that is still so, 1 if it changed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile "datasets==5.2.0" "pyarrow==26.0.1"
cd "$work"
HF_HOME="$work/home" HF_HUB_OFFLINE=1 "$work/venv/bin/python" -W ignore - <<'PY' 2> "$work/log"
import pathlib
import sys

from datasets import Dataset, DatasetDict, load_from_disk

rows = [{"user": i % 4, "text": f"note {i:03d} of user {i % 4}"} for i in range(40)]
kept = [row for row in rows if row["user"] != 3]


def count_removed(folder):
    content = b"".join(path.read_bytes() for path in pathlib.Path(folder).rglob("*") if path.is_file())
    return sum(f"note {i:03d} of user 3".encode() in content for i in range(3, 40, 4))


def save_twice(n_before, n_after):
    folder = f"notes_{n_before}_{n_after}"
    Dataset.from_list(rows).save_to_disk(folder, num_shards=n_before)
    Dataset.from_list(kept).save_to_disk(folder, num_shards=n_after)
    old = pathlib.Path(folder, f"data-{n_before - 1:05d}-of-{n_before:05d}.arrow")
    n_read = len(Dataset.from_file(str(old))) if n_before != n_after else 0
    print(f"{n_before} files, then {n_after}: rows {len(load_from_disk(folder))}, removed texts {count_removed(folder)}, ", end="")
    print(f"rows read from the last old file {n_read}")
    return len(load_from_disk(folder)), count_removed(folder), n_read


seen = [save_twice(4, 1), save_twice(4, 3), save_twice(4, 4)]
splits = {"kept": Dataset.from_list(kept), "withdrawn": Dataset.from_list([row for row in rows if row["user"] == 3])}
DatasetDict(splits).save_to_disk("splits")
DatasetDict({"kept": splits["kept"]}).save_to_disk("splits")
names = list(load_from_disk("splits"))
print(f"splits: {names}, removed texts {count_removed('splits')}")
sys.exit(seen != [(30, 10, 10), (30, 10, 10), (30, 0, 0)] or names != ["kept"] or count_removed("splits") != 10)
PY
