#!/usr/bin/env bash
# Guess: after `delete()` and `chroma vacuum`, above the 1,000 writes from which vacuum empties the log, nobody can read
# the deleted documents in the database.
# Library: chromadb 1.5.9. Date: 2026-11-29.
# Seen: of 150 of 1,500 deleted documents no text stays in the log or in a table, but the full-text index still has their
# trigrams with positions, and these spell every text. SQLite itself prints them if its list of segments names one segment.
# Why: a deletion adds a mark to the FTS5 index; the trigrams go when segments are merged, for which vacuum does not ask
# (INSERT INTO embedding_fulltext_search(embedding_fulltext_search) VALUES ('optimize')).
# Exits 0 if that is still so, 1 if it changed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile "chromadb==1.5.9"
"$work/venv/bin/python" -W ignore - "$work" <<'PY'
import pathlib
import sqlite3
import subprocess
import sys

import chromadb
import numpy as np
from chromadb.config import Settings

folder = pathlib.Path(sys.argv[1]) / "store"
vectors = np.random.default_rng(0).normal(size=(1_500, 64)).astype(np.float32)
texts = [f"note {number:05d} of a patient" for number in range(1_500)]
ids = list(map(str, range(1_500)))
client = chromadb.PersistentClient(str(folder), Settings(anonymized_telemetry=False))
notes = client.create_collection("notes", embedding_function=None)
notes.add(ids=ids, documents=texts, embeddings=vectors)
notes.delete(ids=ids[:150])
program = pathlib.Path(sys.executable).with_name("chroma")
subprocess.run([program, "vacuum", "--force", "--path", folder], capture_output=True, check=True)
content = b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())
plain = sum(text.encode() in content for text in texts[:150])


def read_numbers(block):
    numbers = []
    number = 0
    for byte in block:
        number = number << 7 | byte & 127
        if byte < 128:
            numbers.append(number)
            number = 0
    return numbers


def write_number(number):
    parts = [number & 127]
    while number := number >> 7:
        parts.append(128 | number & 127)
    return bytes(reversed(parts))


# The list: a count of changes, levels, segments, writes; for each level its merges and segments, and for each segment its
# name, first page and last page.
table = "embedding_fulltext_search"
file = folder / "chroma.sqlite3"
(structure,) = sqlite3.connect(file).execute(f"SELECT block FROM {table}_data WHERE id = 10").fetchone()
n_levels, _, n_writes, *rest = read_numbers(structure[4:])
segments = []
for _ in range(n_levels):
    n_segments = rest[1]
    rest = rest[2:]
    for _ in range(n_segments):
        segments.append(rest[:3])
        rest = rest[3:]
spelled = {}
for segment in segments:
    with sqlite3.connect(file) as database:
        alone = structure[:4] + b"".join(map(write_number, (1, 1, n_writes, 0, 1, *segment)))
        database.execute(f"UPDATE {table}_data SET block = ? WHERE id = 10", [alone])
    database = sqlite3.connect(file)
    database.execute(f"CREATE VIRTUAL TABLE temp.words USING fts5vocab(main, {table}, 'instance')")
    for trigram, row, place in database.execute("SELECT term, doc, offset FROM temp.words"):
        spelled.setdefault(row, {})[place] = trigram
found = set()
for trigrams in spelled.values():
    found.add("".join(trigrams[place][0] for place in sorted(trigrams)) + trigrams[max(trigrams)][1:])
left = sum(text in found for text in texts[:150])
kept = sum(text in found for text in texts[150:])
print("150 of 1,500 deleted, in the files as they are:", plain)
print("spelled by trigrams: deleted", left, "kept", kept)
sys.exit(not (plain == 0 and left == 150 and kept == 1_350))
PY
