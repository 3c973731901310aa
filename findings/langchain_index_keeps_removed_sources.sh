#!/usr/bin/env bash
# Guess: index() of the notes that are left, with any cleanup, deletes the note whose source was removed.
# Library: langchain-core 1.8.3 (numpy 2.4.6). Date: 2026-11-30.
# Seen: only cleanup="full" deletes it. With "incremental" and "scoped_full" it stays in the vector store and is found, in every
# later run too, and num_deleted says 0. An emptied note with the same source, index()ed once, takes the old one away.
# Why: both look only at sources that the run was given, and a removed one is not among them.
# Exits 0 if that is still so, 1 if it changed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile "langchain-core==1.8.3" "numpy==2.4.6"
"$work/venv/bin/python" -W ignore - <<'PY'
import sys

from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.indexing import InMemoryRecordManager, index
from langchain_core.vectorstores import InMemoryVectorStore

notes = [Document(page_content=f"note of Anna{i}", metadata={"source": f"{i}.txt"}) for i in range(10)]
others = notes[:3] + notes[4:]
emptied = Document(page_content="", metadata={"source": "3.txt"})


def index_again(cleanup, later):
    store = InMemoryVectorStore(DeterministicFakeEmbedding(size=8))
    records = InMemoryRecordManager("notes")
    records.create_schema()
    n_deleted = 0
    for documents in (notes, later, later):
        counts = index(
            documents, records, store, cleanup=cleanup, source_id_key="source", key_encoder="sha256"
        )
        n_deleted += counts["num_deleted"]
    found = store.similarity_search("note of Anna3", k=1)[0].page_content == "note of Anna3"
    return found, n_deleted


seen = {}
for cleanup in ("full", "incremental", "scoped_full"):
    seen[cleanup] = index_again(cleanup, others), index_again(cleanup, [*others, emptied])
    print(f"{cleanup}: (found, deleted) if removed {seen[cleanup][0]}, if emptied {seen[cleanup][1]}")
gone, stays = (False, 1), (True, 0)
sys.exit(seen != {"full": (gone, gone), "incremental": (stays, gone), "scoped_full": (stays, gone)})
PY
