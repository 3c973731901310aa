#!/usr/bin/env bash
# Guess: a pipeline that is used on private notes and then saved is the pipeline as it was: only training changes what
# to_disk() writes; a Doc that is sent to a worker carries its own text.
# Library: spacy 3.8.18, a blank English pipeline. Date: 2026-11-29.
# Seen: the saved folder lists each word of all 20 notes, names and all, in vocab/strings.json. A pickle of a Doc "Hello",
# as multiprocessing and joblib write it, holds every name, too; Doc.to_bytes(), to_disk() before use, and a pipeline that
# was used within nlp.memory_zone() hold none.
# Why: each new word goes into the pipeline's table of strings, which is saved, and pickled, with the vocabulary.
# Exits 0 if that is still so, 1 if it changed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q "spacy==3.8.18"
WORK="$work" "$work/venv/bin/python" -W ignore - <<'PY'
import os
import pickle
import sys
from pathlib import Path

import spacy

names = [f"Zorblat{i}x" for i in range(20)]
notes = [f"Patient {name} of ward {i} has a fever." for i, name in enumerate(names)]


def count(data):
    return sum(name.encode() in data for name in names)


def count_saved(nlp, folder):
    nlp.to_disk(folder)
    return count(b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file()))


folder = Path(os.environ["WORK"])
fresh, used, zoned = spacy.blank("en"), spacy.blank("en"), spacy.blank("en")
for _ in used.pipe(notes):
    pass
with zoned.memory_zone():
    for _ in zoned.pipe(notes):
        pass
hello = used("Hello")
seen = {
    "saved before use": count_saved(fresh, folder / "fresh"),
    "saved after use": count_saved(used, folder / "used"),
    "saved after use in memory_zone()": count_saved(zoned, folder / "zoned"),
    "pickle of another Doc": count(pickle.dumps(hello)),
    "to_bytes() of another Doc": count(hello.to_bytes()),
}
for where, number in seen.items():
    print(f"{where}: {number} of {len(names)} names")
sys.exit(list(seen.values()) != [0, 20, 0, 20, 0])
PY
