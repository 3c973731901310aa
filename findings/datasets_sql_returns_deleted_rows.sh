#!/usr/bin/env bash
# Guess: Dataset.from_sql and Dataset.from_generator, called anew in a new process after a row was deleted from the database
# and from the file that the generator reads, give the rows that are left.
# Library: datasets 5.2.0 (with pyarrow 26.0.1, SQLAlchemy 2). Date: 2026-11-29.
# Seen: both silently give the deleted row back. load_dataset("json") on the same file does not. A training that
# is repeated after a deletion, in a new process, learns the deleted record again.
# Why: the copy in the cache's folder is found by the query and the database's address, or by the generator and its
# arguments; neither knows of the rows. keep_in_memory=True does not help, nor does VACUUM.
# Exits 0 if that is still so, 1 if it changed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q "datasets==5.2.0" "pyarrow==26.0.1" "SQLAlchemy>=2,<3"
cd "$work"
cat > write.py <<'PY'
import json
import pathlib
import sqlite3
import sys

rows = sys.argv[1:]
pathlib.Path("notes.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
pathlib.Path("notes.db").unlink(missing_ok=True)
connection = sqlite3.connect("notes.db")
connection.execute("CREATE TABLE notes (text TEXT)")
connection.executemany("INSERT INTO notes VALUES (?)", [(row,) for row in rows])
connection.commit()
PY
cat > read.py <<'PY'
import json
import sys

import datasets

datasets.disable_progress_bars()


def read_lines(path):
    with open(path) as file:
        for line in file:
            yield json.loads(line)


arguments = {"path": "notes.jsonl"}
found = {
    "from_sql": datasets.Dataset.from_sql("SELECT text FROM notes", "sqlite:///notes.db"),
    "from_sql, keep_in_memory": datasets.Dataset.from_sql(
        "SELECT text FROM notes", "sqlite:///notes.db", keep_in_memory=True
    ),
    "from_generator": datasets.Dataset.from_generator(read_lines, gen_kwargs=arguments),
    "load_dataset": datasets.load_dataset("json", data_files="notes.jsonl", split="train"),
}
for name, dataset in found.items():
    print(f"{name}: {dataset['text'][:]}")
stale = [name for name, dataset in found.items() if "forget me" in dataset["text"][:]]
sys.exit(stale != list(found)[: int(sys.argv[1])])
PY
export HF_HOME="$work/home" HF_HUB_OFFLINE=1
"$work/venv/bin/python" write.py "keep" "forget me"
"$work/venv/bin/python" read.py 4
"$work/venv/bin/python" write.py "keep"
echo "after the row was deleted, in a new process:"
"$work/venv/bin/python" read.py 3
