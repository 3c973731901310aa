#!/usr/bin/env bash
# Guess: notes that are masked and written again with DuplicatePolicy.OVERWRITE replace those with the same number.
# Library: haystack-ai 3.4.1. Date: 2026-11-30.
# Seen: the store holds both: 20 documents for 10 notes, and a search for a patient's name finds the note as it was.
# save_to_disk() writes both. With ids of one's own, OVERWRITE replaces all 10.
# Why: without an id a document's is the hash of its text and metadata, so a changed text is another document.
# Exits 0 if that is still so, 1 if it changed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile "haystack-ai==3.4.1"
cd "$work"
HAYSTACK_TELEMETRY_ENABLED=False "$work/venv/bin/python" -W ignore - <<'PY' 2> "$work/log"
import pathlib
import sys

from haystack import Document
from haystack.components.retrievers.in_memory import InMemoryBM25Retriever
from haystack.document_stores.in_memory import InMemoryDocumentStore
from haystack.document_stores.types import DuplicatePolicy


def write_twice(name, **ids):
    store = InMemoryDocumentStore()
    for label in ("Anna{}", "[NAME]"):
        documents = []
        for i in range(10):
            text = f"visit of {label.format(i)} who has a cough"
            own = {"id": f"note {i}"} if ids else {}
            documents.append(Document(content=text, meta={"number": i}, **own))
        store.write_documents(documents, policy=DuplicatePolicy.OVERWRITE)
    found = InMemoryBM25Retriever(store, top_k=1).run(query="Anna3")["documents"]
    store.save_to_disk("store.json")
    n_named = sum(f"Anna{i}" in pathlib.Path("store.json").read_text() for i in range(10))
    seen = store.count_documents(), any("Anna3" in one.content for one in found), n_named
    print(f"{name}: {seen[0]} documents, the name is found: {seen[1]}, names in the file: {seen[2]}")
    return seen


sys.exit([write_twice("no ids"), write_twice("own ids", own=True)] != [(20, True, 10), (10, False, 0)])
PY
