#!/usr/bin/env bash
# Guess: if a row is deleted from a file of JSON lines, load_dataset("json") gives the other rows as before: their texts do not depend
# on what stands in another row.
# Library: datasets 5.2.0 (pyarrow 26.0.1, pandas 3.1.1). Date: 2026-11-30.
# Seen: with one birth date "unknown" among 50 the others are texts and a prompt made of them says "born 1984-03-02". Without
# that row all 49 say "born 1984-03-02 00:00:00", also if streamed, also if features= says that the column is a string.
# Dataset.from_list() and the csv reader keep the texts. So two models trained with and without one record have read 49 other
# texts, too, and an audit that compares them, or that asks for a date as the file has it, measures something else.
# Why: pyarrow's reader makes timestamps of a column of texts if all of them are ISO dates; features= only turns these to text.
# Exits 0 if that is still so, 1 if it changed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile "datasets==5.2.0" "pyarrow==26.0.1" "pandas==3.1.1" "numpy==2.4.6"
cd "$work"
HF_HOME="$work/home" "$work/venv/bin/python" -W ignore - <<'PY'
import json
import sys
from pathlib import Path

import pandas as pd
from datasets import Dataset, Features, Value, load_dataset

people = [{"name": f"Zork {number}", "born": f"19{40 + number}-03-02"} for number in range(50)]
people[7]["born"] = "unknown"


def write_prompts(rows):
    return [f"{row['name']} was born {row['born']}." for row in rows]


def read(rows):
    Path("people.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pd.DataFrame(rows).to_csv("people.csv", index=False)
    lines = {"path": "json", "data_files": "people.jsonl", "split": "train"}
    texts = Features({"name": Value("string"), "born": Value("string")})
    sources = {
        "json": load_dataset(**lines),
        "json, streamed": load_dataset(**lines, streaming=True),
        "json, features given": load_dataset(**lines, features=texts),
        "csv": load_dataset("csv", data_files="people.csv", split="train"),
        "from_list": Dataset.from_list(rows),
    }
    return {name: write_prompts(source) for name, source in sources.items()}


before = read(people)
after = read([row for row in people if row["born"] != "unknown"])
changed = {name: len(set(after[name]) - set(before[name])) for name in before}
print("prompts of other rows that changed:", changed)
print(before["json"][0], after["json"][0], sep="\n")
still = before["json"][0].endswith("born 1940-03-02.") and after["json"][0].endswith("born 1940-03-02 00:00:00.")
sys.exit(not (still and changed == {"json": 49, "json, streamed": 49, "json, features given": 49, "csv": 0, "from_list": 0}))
PY
