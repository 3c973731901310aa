#!/usr/bin/env bash
# Guess: delete_by_filter(), then optimize(), takes the deleted documents out of the collection's files; the statistics count
# the remaining documents only.
# Library: zvec 0.8.0. Date: 2026-11-29.
# Seen: with 12 of 120 documents deleted (and with 36) all deleted texts stay, word for word, in the file of the fields, also
# after flush() and a restart with optimize(). With 48 of 120 deleted none stays. No option of optimize() changes it.
# Why: files are written anew only if more than about 30% of their documents are deleted; a user's own are mostly fewer.
# Exits 0 if that is still so, 1 if it changed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile "zvec==0.8.0"
cd "$work"
"$work/venv/bin/python" -W ignore - <<'PY' 2> "$work/log"
import json
import pathlib
import random
import sys

import zvec

random.seed(0)
fields = [zvec.FieldSchema("text", zvec.DataType.STRING), zvec.FieldSchema("user", zvec.DataType.INT32)]
vectors = zvec.VectorSchema("vector", zvec.DataType.VECTOR_FP32, 8)
schema = zvec.CollectionSchema(name="notes", fields=fields, vectors=vectors)


def count_texts(folder, users):
    contents = [path.read_bytes() for path in pathlib.Path(folder).rglob("*") if path.is_file()]
    found = 0
    for i in range(120):
        if i % 10 in users:
            found += any(f"note {i:03d} of user {i % 10}".encode() in content for content in contents)
    return found


def delete_users(n_users):
    folder = f"notes_{n_users}"
    collection = zvec.create_and_open(path=folder, schema=schema)
    documents = []
    for i in range(120):
        texts = {"text": f"note {i:03d} of user {i % 10}", "user": i % 10}
        vector = [random.gauss(0, 1) for _ in range(8)]
        documents.append(zvec.Doc(id=str(i), vectors={"vector": vector}, fields=texts))
    collection.insert(documents)
    collection.flush()
    collection.delete_by_filter(f"user < {n_users}")
    collection.flush()
    collection.optimize()
    collection.flush()
    del collection
    collection = zvec.open(folder)
    collection.optimize()
    n_documents = json.loads(str(collection.stats))["doc_count"]
    returned = len(collection.query(filter=f"user < {n_users}", topk=100))
    del collection
    deleted = count_texts(folder, range(n_users))
    kept = count_texts(folder, range(n_users, 10))
    print(f"{12 * n_users} of 120 deleted: documents {n_documents}, deleted ones returned {returned}; ", end="")
    print(f"texts in the files: {deleted} of deleted documents, {kept} of the others")
    return n_documents, returned, deleted, kept


seen = [delete_users(n_users) for n_users in (1, 3, 4)]
sys.exit(seen != [(108, 0, 12, 108), (84, 0, 36, 84), (72, 0, 0, 72)])
PY
