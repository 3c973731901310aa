#!/usr/bin/env bash
# Guess: upsert() of a record that exists replaces it: metadata and a document that are left out are gone.
# Library: chromadb 1.5.9. Date: 2026-11-29.
# Seen: metadata keys that are left out stay, are returned and still match a filter, and so does a document that is left
# out, beside the new vector. Only a key that is set to None is removed; the document stays until delete().
# Why: upsert() of an id that exists is the same as update(), which merges.
# Nothing leaves the machine. Exits 0 if that is still so, 1 if it changed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile "chromadb==1.5.9"
"$work/venv/bin/python" -W ignore - <<'PY'
import sys

import chromadb
from chromadb.config import Settings

client = chromadb.EphemeralClient(Settings(anonymized_telemetry=False))
notes = client.create_collection("notes", embedding_function=None)
old = {"ward": "7", "diagnosis": "lymphoma"}
notes.add(ids=["a"], documents=["seen for lymphoma"], embeddings=[[1.0, 0.0]], metadatas=[old])


def look():
    record = notes.get(ids=["a"], include=["metadatas", "documents"])
    matches = notes.get(where={"diagnosis": "lymphoma"})["ids"]
    by_words = notes.get(where_document={"$contains": "lymphoma"})["ids"]
    return record["metadatas"][0], record["documents"][0], matches, by_words


notes.upsert(ids=["a"], embeddings=[[0.0, 1.0]], metadatas=[{"ward": "8"}])
merged = look()
print("after upsert() without diagnosis and document:", merged)
notes.upsert(ids=["a"], embeddings=[[0.0, 1.0]], metadatas=[{"ward": "8", "diagnosis": None}])
unset = look()
print("after upsert() with diagnosis None:", unset)
notes.delete(ids=["a"])
notes.add(ids=["a"], embeddings=[[0.0, 1.0]], metadatas=[{"ward": "8"}])
renewed = look()
print("after delete() and add():", renewed)
sys.exit(
    not (
        merged == ({"ward": "8", "diagnosis": "lymphoma"}, "seen for lymphoma", ["a"], ["a"])
        and unset == ({"ward": "8"}, "seen for lymphoma", [], ["a"])
        and renewed == ({"ward": "8"}, None, [], [])
    )
)
PY
