#!/usr/bin/env bash
# Guess: rows with a nested object are the same rows whether `datasets` gets them by `Dataset.from_list` or by
# `load_dataset("json")`.
# Library: datasets 5.2.0 (with pyarrow 26.0.1), 2026-11-28.
# Seen: from_list gives every object the keys of all other rows' objects, with null ({"who": "Ann", "amount": null}), and
# load_dataset("json") keeps the objects as they are ({"who": "Ann"}): a chat template that writes tools or arguments
# as JSON writes another prompt, by how the same file was loaded.
# Exits 0 if that is still so, 1 if it changed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q "datasets==5.2.0" "pyarrow==26.0.1"
cd "$work"
HF_HOME="$work/home" HF_HUB_OFFLINE=1 "$work/venv/bin/python" - <<'PY'
import json
import sys

import datasets

datasets.disable_progress_bars()
rows = [{"arguments": {"who": "Ann"}}, {"arguments": {"amount": 5}}]
with open("rows.jsonl", "w") as file:
    file.writelines(json.dumps(row) + "\n" for row in rows)
listed = datasets.Dataset.from_list(rows)[0]["arguments"]
loaded = datasets.load_dataset("json", data_files="rows.jsonl", split="train")[0]["arguments"]
print("from_list:           ", json.dumps(listed))
print("load_dataset('json'):", json.dumps(loaded))
sys.exit(listed != {"who": "Ann", "amount": None} or loaded != {"who": "Ann"})
PY
