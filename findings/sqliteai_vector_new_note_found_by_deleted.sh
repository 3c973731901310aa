#!/usr/bin/env bash
# Guess: a search in a table whose vectors were quantized gives rows that are in the table, each with the distance of its vector.
# Library: sqliteai-vector 1.1.2 (with apsw 3.54.1.0). Date: 2026-11-30.
# Seen: after DELETE the quantized search still gives the deleted rows, each at distance 0 from its own vector, also after VACUUM
# and after opening the file anew. A note that is then inserted with the number of a deleted one is found by the deleted
# one's vector, at distance 0: joined with the table, the search gives one person's note for another's. An UPDATE of a
# vector is not seen either. vector_full_scan() gives what is in the table. Only vector_quantize(), called again, renews it.
# Why: vector_quantize() copies the vectors once into a table of its own, which no trigger follows.
# Exits 0 if that is still so, 1 if it changed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile "sqliteai-vector==1.1.2" "apsw==3.54.1.0"
cd "$work"
"$work/venv/bin/python" - <<'PY'
import importlib.resources
import random
import struct
import sys

import apsw

EXTENSION = str(importlib.resources.files("sqlite_vector.binaries") / "vector")
draw = random.Random(0)
vectors = [struct.pack("16f", *[draw.gauss(0, 1) for _ in range(16)]) for _ in range(300)]


def open_store():
    store = apsw.Connection("notes.db")
    store.enable_load_extension(True)
    store.load_extension(EXTENSION)
    store.execute("CREATE TABLE IF NOT EXISTS notes (number INTEGER PRIMARY KEY, text TEXT, vector BLOB)")
    store.execute("SELECT vector_init('notes', 'vector', 'type=FLOAT32,dimension=16,distance=L2')").fetchall()
    return store


def search(store, number, kind="quantize"):
    """The number and distance of the row nearest to a vector."""
    query = f"SELECT rowid, distance FROM vector_{kind}_scan('notes', 'vector', ?, 1)"
    return store.execute(query, (vectors[number],)).fetchone()


store = open_store()
store.executemany("INSERT INTO notes VALUES (?, ?, ?)", [(n, f"note {n} of Ann", vector) for n, vector in enumerate(vectors)])
store.execute("SELECT vector_quantize('notes', 'vector')").fetchall()
store.execute("DELETE FROM notes WHERE number < 30")
store.execute("VACUUM")
store.close()
store = open_store()
found = sum(search(store, number) == (number, 0) for number in range(30))
found_full = sum(search(store, number, "full")[0] == number for number in range(30))
print(f"of 30 deleted rows {found} are found by the quantized search at distance 0, {found_full} by the full one")
store.execute("INSERT INTO notes VALUES (7, 'note of Bob', ?)", (vectors[200],))
store.execute("UPDATE notes SET vector = ? WHERE number = 250", (vectors[11],))
joined = (
    "SELECT text, distance FROM notes JOIN vector_quantize_scan('notes', 'vector', ?, 1) AS near ON notes.number = near.rowid"
)
other = store.execute(joined, (vectors[7],)).fetchone()
print(f"the text found by the deleted vector of number 7: {other}")
updated = search(store, 250)
print(f"a row with another vector since, searched by its old one: {updated}")
store.execute("SELECT vector_quantize('notes', 'vector')").fetchall()
after = sum(search(store, number)[0] == number for number in range(30) if number != 7)
print(f"deleted rows found after another vector_quantize(): {after}")
sys.exit(not (found == 30 and found_full == 0 and other == ("note of Bob", 0) and updated == (250, 0) and after == 0))
PY
