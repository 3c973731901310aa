#!/usr/bin/env bash
# Guess: a file that is read through fsspec's "filecache" is read anew when it has changed, and not found when it is gone.
# Library: fsspec 2026.9.0. Date: 2026-11-30.
# Seen: with a folder for the cache, a new process reads the deleted row after the row was deleted, and all rows after the file
# was deleted: for a week by default with "filecache", without an end with "simplecache". With check_files=True "filecache"
# reads the changed file and refuses the one that is gone.
# So a model can be trained again on the rows that were deleted from its data.
# Exits 0 if that is still so, 1 if it changed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile "fsspec==2026.9.0"
cd "$work"
cat > read.py <<'PY'
import json
import sys

import fsspec

protocol, options = sys.argv[1], json.loads(sys.argv[2])
try:
    with fsspec.open(f"{protocol}::file://{sys.argv[3]}", "rt", **{protocol: options}) as file:
        print("patient 3\n" in file.read())
except FileNotFoundError:
    print("refused")
PY
"$work/venv/bin/python" -W ignore - <<'PY'
import json
import os
import pathlib
import subprocess
import sys

path = pathlib.Path("notes.txt").resolve()
rows = [f"note of patient {i}\n" for i in range(20)]


def read_thrice(name, protocol, **options):
    options["cache_storage"] = name
    command = [sys.executable, "-W", "ignore", "read.py", protocol, json.dumps(options), str(path)]
    seen = []
    for content in (rows, rows[:3] + rows[4:], None):
        if content is None:
            path.unlink()
        else:
            path.write_text("".join(content))
            os.utime(path, (len(content),) * 2)  # another time of the change
        seen.append(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip())
    print(f"{name}: the row is read at first {seen[0]}, deleted {seen[1]}, file deleted {seen[2]}")
    return seen


seen = [
    read_thrice("filecache", "filecache"),
    read_thrice("simplecache", "simplecache"),
    read_thrice("checked", "filecache", check_files=True),
]
sys.exit(seen != [["True"] * 3, ["True"] * 3, ["True", "False", "refused"]])
PY
