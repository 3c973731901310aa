#!/usr/bin/env bash
# Guess: a new InMemoryDocumentStore is empty, and the notes in memory go with the last reference to their store.
# Library: haystack-ai 3.4.1. Date: 2026-11-30.
# Seen: with the name of an index, a new store holds the notes that another store of this name was given, also after that one
# was deleted and collected; so a search for one customer, whose store has the same index, gives the notes of another.
# Without a name each store is empty.
# Why: the notes are kept for the whole process, by the name of the index.
# Exits 0 if that is still so, 1 if it changed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile "haystack-ai==3.4.1"
cd "$work"
HAYSTACK_TELEMETRY_ENABLED=False "$work/venv/bin/python" -W ignore - <<'PY' 2> "$work/log"
import gc
import sys

from haystack import Document
from haystack.components.retrievers.in_memory import InMemoryBM25Retriever
from haystack.document_stores.in_memory import InMemoryDocumentStore


def open_twice(**options):
    store = InMemoryDocumentStore(**options)
    store.write_documents([Document(content=f"visit {i} of Anna") for i in range(10)])
    del store
    gc.collect()
    new = InMemoryDocumentStore(**options)
    n_notes = new.count_documents()
    new.write_documents([Document(content="visit of Boris")])
    found = InMemoryBM25Retriever(new, top_k=1).run(query="Anna")["documents"]
    return n_notes, any("Anna" in document.content for document in found)


seen = {"a named index": open_twice(index="notes"), "no name": open_twice()}
print(seen)
sys.exit(seen != {"a named index": (10, True), "no name": (0, False)})
PY
