#!/usr/bin/env bash
# Guess: `chroma vacuum`, which says that it purges the log, takes deleted documents out of the database.
# Library: chromadb 1.5.9. Date: 2026-11-29.
# Seen: it exits with 0 after "Purging the log", and of 50 of 500 deleted documents all texts and all vectors stay in the
# table embeddings_queue, beside 550 rows. With 150 of 1,500 deleted no text stays there; all vectors stay in the index.
# Why: it purges what the index has written to its own file, which happens every 1,000 writes, and nothing removes deleted
# vectors from that file.
# Exits 0 if that is still so, 1 if it changed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile "chromadb==1.5.9"
"$work/venv/bin/python" -W ignore - "$work" <<'PY'
import pathlib
import subprocess
import sys

import chromadb
import numpy as np
from chromadb.config import Settings

work = pathlib.Path(sys.argv[1])
vectors = np.random.default_rng(0).normal(size=(1_500, 64)).astype(np.float32)


def count_left(n_documents, n_deleted):
    folder = work / f"store{n_documents}"
    client = chromadb.PersistentClient(str(folder), Settings(anonymized_telemetry=False))
    notes = client.create_collection("notes", embedding_function=None)
    ids = [f"note {number:05d} of a patient" for number in range(n_documents)]
    notes.add(ids=list(map(str, range(n_documents))), documents=ids, embeddings=vectors[:n_documents])
    notes.delete(ids=list(map(str, range(n_deleted))))
    program = pathlib.Path(sys.executable).with_name("chroma")
    done = subprocess.run(
        [program, "vacuum", "--force", "--path", folder], capture_output=True, text=True, check=True
    )
    content = b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())
    texts = sum(text.encode() in content for text in ids[:n_deleted])
    left = sum(vector[:8].tobytes() in content for vector in vectors[:n_deleted])
    return "Purging the log" in done.stdout, texts, left


small, large = count_left(500, 50), count_left(1_500, 150)
print("50 of 500 deleted (says that it purges; texts; vectors):", small)
print("150 of 1,500 deleted:", large)
sys.exit(not (small == (True, 50, 50) and large == (True, 0, 150)))
PY
